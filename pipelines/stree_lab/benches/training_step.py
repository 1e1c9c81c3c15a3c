"""Time one step of a distillation in its parts, with its memory and share of the GPU's peak."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from stree.common.errors import UsageError
from stree.common.words import counted
from stree.models.config import HybridConfig
from stree.models.hidden_states import HiddenStateTap
from stree_lab.benches.models import random_model
from stree_lab.benches.timing import interleave, release_memory
from stree_pipelines.console.progress import stage
from stree_pipelines.data.micro_batches import Batch, MicroBatches
from stree_pipelines.data.packing import TokenTable, pack
from stree_pipelines.resources.estimates import (
    PEAKS,
    ModelPlan,
    distillation_operations,
    num_parameters,
)
from stree_pipelines.training.distillation import Distillation
from stree_pipelines.training.teachers.frozen_target import TargetDtype

SEGMENT, PROMPT = 512, 200  # tokens of a conversation, and of its prompt, which has no loss


def step_row(
    config: HybridConfig, batch_size: int, sequence_length: int, repeats: int,
    device: torch.device, target_dtype: TargetDtype = "bfloat16", **options: Any,
) -> dict[str, Any]:
    """Measure a distillation step from a random target under bf16 autocast, and return its row.

    The target is in bf16 or has products in 8 bits; rows are conversations of 512 random tokens.
    `options` are those of Distillation. Prints its stages on stderr.
    """
    if sequence_length <= PROMPT:
        raise UsageError(
            f"a step's rows begin with a prompt of {PROMPT} tokens, which do not count: wanted a "
            f"longer --sequence_length, got {sequence_length}"
        )
    release_memory(device)  # of the row before
    table = _conversations(config, batch_size, sequence_length)
    with _stage(f"random target of {num_parameters(config):,} parameters", device):
        target = random_model(config, device)
    with _stage("drafter, cut from it", device):
        module = Distillation.from_model(target, target_dtype=target_dtype, **options)
        module = module.to(device).train()
        kept = module.exported.config.head_vocab_size
        module.begin_head(torch.arange(kept, device=device) if kept else None, False)
        module.frozen.place(device, 1)
        module.prepare_layers()
    release_memory(device)
    packing = pack(table, sequence_length, range(len(table)))
    batches = MicroBatches(table, packing, batch_size, seed=0, pad_id=0)
    step = _Step(module, batches, device)
    return {"target_dtype": target_dtype, **_measured(step, config, repeats)}


def _measured(step: _Step, target: HybridConfig, repeats: int) -> dict[str, Any]:
    module, device = step.module, step.device
    tokens = step.batch()["tokens"]
    num_tokens = tokens.numel()
    with _stage("first step, with compiling and first uses of kernels", device):
        step.whole()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with _stage(counted(repeats, "step"), device):
        whole = interleave({"step": step.whole}, device, repeats)["step"]
    peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    with _stage("its parts, as often", device):
        parts = interleave(step.parts(), device, repeats)
    seconds = whole["median"] * 1e-6
    drafter = module.exported.config
    plan = ModelPlan(drafter, target)
    operations = distillation_operations(plan, num_tokens, step.num_counted)
    total = sum(operations.values())
    row = dict(
        what="distillation step", batch_size=tokens.shape[0], sequence_length=tokens.shape[1],
        counted_tokens=step.num_counted, us_step=whole, us_parts=parts,
        # heads and loss, with their backward
        us_rest=whole["median"] - sum(each["median"] for each in parts.values()),
        tokens_per_second=num_tokens / seconds, operations=operations,
        tflops=total / seconds / 1e12, peak_bytes=peak_bytes,
        target_parameters=num_parameters(target), drafter_parameters=num_parameters(drafter),
    )
    peak = PEAKS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return row if peak is None else {**row, "of_peak": total / seconds / peak}


class _Step:
    """A step with one micro-batch, and its parts."""

    def __init__(self, module: Distillation, batches: MicroBatches, device: torch.device) -> None:
        self.module, self.batches, self.device = module, batches, device
        self.optimizer = module.configure_optimizers()
        self.num_counted = batches.totals(0)["assistant"]
        self._normalizer = torch.full((), float(self.num_counted), device=device)

    def batch(self) -> Batch:
        """Read a batch as a training does, from memory to the device."""
        batch = self.module.on_before_batch_transfer(self.batches[0], 0)
        return self.module.transfer_batch_to_device(batch, self.device, 0)

    def whole(self) -> None:
        batch = self.batch()
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.module.loss_terms(batch, self._normalizer).loss
        loss.backward()
        self.update()
        self.optimizer.zero_grad()

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.module.exported.parameters(), 1.0)
        self.optimizer.step()

    def parts(self) -> dict[str, Any]:
        """Return the call of each part."""
        module, frozen, batch = self.module, self.module.frozen, self.batch()
        inputs = batch["tokens"], batch["segment_ids"]
        features = HiddenStateTap(module.exported.config.feature_layers)

        def target_pass(features: HiddenStateTap | None = None) -> None:
            with torch.autocast(self.device.type, torch.bfloat16):
                frozen.hidden_states(*inputs, features)

        read = None
        if features.layers:
            target_pass(features)
            read = features.values

        def drafter_passes() -> None:
            with torch.autocast(self.device.type, torch.bfloat16):
                hidden = module.exported.hidden_states(*inputs, read=read)
            hidden.sum().backward()

        for parameter in module.exported.parameters():  # the head's, too: all weights are updated
            parameter.grad = torch.zeros_like(parameter)
        return {
            "target": target_pass, "data": self.batch, "drafter": drafter_passes,
            "update": self.update,
        }


def _conversations(config: HybridConfig, batch_size: int, sequence_length: int) -> TokenTable:
    """Make random conversations that fill the rows."""
    full, rest = divmod(sequence_length, SEGMENT)
    lengths = batch_size * ([SEGMENT] * full + [rest] * (rest > 0))
    places = np.concatenate([np.arange(each) for each in lengths])
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=len(places), dtype=np.int32)
    return TokenTable(tokens, places >= PROMPT, np.cumsum([0, *lengths], dtype=np.int64))


@contextmanager
def _stage(name: str, device: torch.device) -> Iterator[None]:
    with stage(name):
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
