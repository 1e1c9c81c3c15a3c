"""One step of a distillation in its parts: time, memory, and share of the GPU's peak.

Operations are counted over weights: 2 a weight and token for the target's pass, 6 for the drafter's
two; of the heads for tokens that count in the loss alone. Attention, scans and what a backward pass
computes again are left out, so that a share of the peak is what training needs, not what it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stree.errors import UsageError
from stree.models.features import Features
from stree.models.hybrid import HybridModel
from stree_pipelines.benches.timing import in_turns
from stree_pipelines.resources.estimates import num_parameters
from stree_pipelines.training.distillation import Distillation
from stree_pipelines.training.frozen_target import FrozenTarget, TargetInputs

# bf16 products without sparsity by NVIDIA's data sheets, of the SXM modules
PEAKS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}
SEGMENT, PROMPT = 512, 200  # tokens of a conversation, and of them its prompt, which do not count


def step_row(
    target: str, batch_size: int, sequence_length: int, repeats: int, device: torch.device,
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """A row of a distillation from the checkpoint `target` under bf16 autocast, whose rows are
    conversations of 512 random tokens. `options` are those of Distillation."""
    if sequence_length <= PROMPT:
        raise UsageError(
            f"a step's rows begin with a prompt of {PROMPT} tokens, which do not count: wanted a "
            f"longer --sequence_length, got {sequence_length}"
        )
    module = Distillation(target, **options)
    module.to(device).train()
    assert module.frozen is not None
    frozen = module.frozen
    frozen.place(device, [], 1)
    module.prepare_layers()
    optimizer = module.configure_optimizers()
    shape = (batch_size, sequence_length)
    places = torch.arange(sequence_length, device=device).expand(shape)
    batch = dict(
        tokens=torch.randint(frozen.model.config.vocab_size, shape, device=device),
        segment_ids=places // SEGMENT, loss_mask=places % SEGMENT >= PROMPT,
    )  # fmt: skip
    inputs = TargetInputs(batch["tokens"], batch["segment_ids"])
    num_counted = int(batch["loss_mask"].sum())

    def target_pass() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            frozen.hidden_states(inputs, device)

    def drafter_passes() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            hidden = module.exported.hidden_states(inputs.tokens, inputs.segment_ids, read=read)
        hidden.sum().backward()

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(module.exported.parameters(), 1.0)
        optimizer.step()

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = module.loss_terms(batch, torch.full((), num_counted, device=device)).loss
        loss.backward()
        update()
        optimizer.zero_grad()

    step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    whole = in_turns({"step": step}, device, repeats)["step"]
    peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    read = _features(module.exported.config.feature_layers, frozen, inputs, device)
    for parameter in module.exported.parameters():  # the head's too: an update is of all weights
        parameter.grad = torch.zeros_like(parameter)
    ways = {"target": target_pass, "drafter": drafter_passes, "update": update}
    parts = in_turns(ways, device, repeats)
    optimizer.zero_grad()
    used = {name: each["median"] for name, each in parts.items()}
    seconds = whole["median"] * 1e-6
    operations = num_operations(frozen.model, module.exported, batch_size * sequence_length,
                                num_counted)  # fmt: skip
    row = dict(
        what="distillation step", batch_size=batch_size, sequence_length=sequence_length,
        counted_tokens=num_counted, us_step=whole, us_parts=parts,
        us_rest=whole["median"] - sum(used.values()),  # heads and loss, with their backward
        tokens_per_second=batch_size * sequence_length / seconds,
        operations=operations, tflops=operations / seconds / 1e12, peak_bytes=peak_bytes,
        target_parameters=num_parameters(frozen.model.config),
        drafter_parameters=num_parameters(module.exported.config),
    )  # fmt: skip
    peak = PEAKS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return row if peak is None else {**row, "of_peak": operations / seconds / peak}


def num_operations(
    target: HybridModel, drafter: HybridModel, num_tokens: int, num_counted: int
) -> int:
    """Multiplications and additions of a step, over weights."""
    layers = 2 * _in_layers(target) + 6 * _in_layers(drafter)
    if drafter.config.feature_layers:  # what the target gives needs no gradient
        layers -= 2 * drafter.config.feature_width * drafter.config.d_model
    heads = 2 * target.head_weight.numel() + 6 * drafter.head_weight.numel()
    return num_tokens * layers + num_counted * heads


def _in_layers(model: HybridModel) -> int:
    """Weights of matrices that each token is multiplied with, but for the head."""
    head = model.head_weight
    return sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if weight.ndim == 2 and "embed_tokens" not in name and weight is not head
    )


def _features(
    layers: Sequence[int], frozen: FrozenTarget, inputs: TargetInputs, device: torch.device
) -> Tensor | None:
    """What a drafter reads of the states after these layers, (B, T, F); None without any."""
    features = Features(layers)
    if not layers:
        return None
    with torch.autocast(device.type, torch.bfloat16):
        frozen.hidden_states(inputs, device, features)
    return features.values
