"""Estimate a command's parameters, memory and disk from configs alone.

Nothing is loaded: models are built without data (meta or fake tensors), so an 8 B target is sized
up on a laptop in seconds. Weights, gradients, moments, caches and files are exact to a percent;
activations are counted on PyTorch's own path and a guide only (another kernel keeps others).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stree.common.words import size
from stree.models.cache import HybridCache
from stree.models.config import HybridConfig
from stree.models.layer_caches import AttentionCache
from stree.models.layers.rotary import rotary_angles
from stree.models.model import HybridModel
from stree_pipelines.training.losses.distillation_loss import chunk_rows
from stree_pipelines.training.optimization import OptimizerKind, num_moments
from stree_pipelines.training.parallel.float8 import round_products
from stree_pipelines.training.parallel.precision import AUTOCAST

GRADIENT_BYTES = 4  # per weight
LOSS_BUFFERS = 5  # (C, V) fp32, see distillation_loss.py
LOGGED_ROW_BYTES = 500  # of metrics.csv and TensorBoard together


def num_parameters(config: HybridConfig) -> int:
    with torch.device("meta"):
        return HybridModel(config).num_parameters()


def checkpoint_bytes(config: HybridConfig, optimizer: OptimizerKind = "adamw") -> int:
    """Count the bytes of fp32 weights and the optimiser's moments, in memory or in a checkpoint."""
    with torch.device("meta"):
        named = list(HybridModel(config).named_parameters())
    moments = sum(each.numel() * num_moments(name, each, optimizer) for name, each in named)
    weights = sum(each.numel() for _, each in named)
    return 4 * (weights + moments)


def head_in_8_bits_bytes(config: HybridConfig) -> int:
    """Count the bytes of the head's 8-bit copy, without its scales."""
    return config.head_size * (config.head_rank or config.d_model)


def activation_bytes(
    config: HybridConfig, shape: tuple[int, int], precision: str, compiled: bool = False
) -> int:
    """Count the bytes that a forward pass over (B, T) tokens keeps for the backward pass.

    The head is left out. compiled: of compiled layers, which keep only what is dear to compute
    again: PyTorch's own choice (its minimal cut of the joint graph), made here without compiling
    code.
    """
    dtype = AUTOCAST[precision]
    sizes: dict[int, int] = {}
    kept = []  # keeps storages alive until counted, as their addresses would be reused

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept.append(storage)
        sizes[storage._cdata] = storage.nbytes()
        return tensor

    # What the model caches between calls must stay real: it is made before the fake pass needs it.
    if config.attn_layers:
        rotary_angles(config, torch.arange(1), torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = HybridModel(config)
        if compiled:
            torch._dynamo.reset()  # it stops compiling code that it has compiled too often
            for layer in model.model.layers:
                layer.compile(dynamic=False, backend="aot_eager_decomp_partition")
        tokens = torch.zeros(shape, dtype=torch.long)
        autocast = torch.autocast("cpu", dtype) if dtype else nullcontext()
        read = torch.zeros(*shape, config.feature_width) if config.feature_layers else None
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor), autocast:
            model.hidden_states(tokens, torch.zeros_like(tokens), read=read)
        for parameter in model.parameters():
            sizes.pop(parameter.untyped_storage()._cdata, None)
    return sum(sizes.values())


def training_memory(
    trained: HybridConfig,
    shape: tuple[int, int],
    precision: str,
    on_cuda: bool,
    target: HybridConfig | None = None,
    target_dtype: torch.dtype = torch.float32,
    checkpointing: bool = False,
    reference: HybridConfig | None = None,
    passes: int = 1,
    compiled: bool = False,
    optimizer: OptimizerKind = "adamw",
) -> dict[str, int]:
    """Estimate the bytes by part of a training on one device, at its fullest moment.

    Micro-batches have `shape` (B, T). The moments are: while the target runs, while tokens are
    chosen, and in the loss, where the drafter's activations wait. Gradients, of the step or
    micro-batch before, are there in each.

    Args:
        target: the frozen target that runs, too; None when there is none (or it is cached).
        checkpointing: activations are computed again in the backward pass.
        reference: a drafter in fp32 that tokens are chosen by.
        passes: passes of the trained model over each micro-batch, whose activations all stay.
        compiled: the trained model's layers are compiled.
        optimizer: the kind whose moments are kept.
    """
    parameters = num_parameters(trained)
    kept = checkpoint_bytes(trained, optimizer)
    always = {"weights, gradients, moments": kept + GRADIENT_BYTES * parameters}
    if reference is not None:
        always["reference"] = 4 * num_parameters(reference)
    head_numbers = trained.head_size * (trained.head_rank or trained.d_model)
    loss = {"the head's gradient": 4 * head_numbers}
    dtype = AUTOCAST[precision]
    if dtype is not None:
        loss["the head for products"] = dtype.itemsize * head_numbers
    activations = passes * _trained_activations(trained, shape, precision, checkpointing, compiled)
    moments = []
    if target is not None:
        before = forward_memory(target, shape, precision, on_cuda, target_dtype)
        always["target"], loss["loss"] = before.pop("target"), before.pop("loss")
        moments.append(before)
    else:
        loss["loss"] = _loss_bytes(trained.head_size, shape, on_cuda)
    moments.append({"activations": activations, **loss})
    if reference is not None:
        chosen = _one_layer_bytes(reference, shape, precision)
        moments.append({"activations": activations, "reference's activations": chosen})
    return always | max(moments, key=lambda parts: sum(parts.values()))


def forward_memory(
    target: HybridConfig,
    shape: tuple[int, int],
    precision: str,
    on_cuda: bool,
    dtype: torch.dtype,
) -> dict[str, int]:
    """Estimate the bytes by part of a target that only predicts (B, T) tokens."""
    return {
        "target": held_bytes(target, dtype),
        # Without gradients one layer's activations live at a time.
        "target's activations": _one_layer_bytes(target, shape, precision),
        "loss": _loss_bytes(target.vocab_size, shape, on_cuda),
    }  # fmt: skip


def held_bytes(target: HybridConfig, dtype: torch.dtype) -> int:
    """Count the bytes of a frozen target's weights; `round_products` leaves some in bf16."""
    with torch.device("meta"):
        model = HybridModel(target)
    if dtype.itemsize > 1:
        return dtype.itemsize * model.num_parameters()
    round_products(model.bfloat16())
    return sum(each.nbytes for each in [*model.parameters(), *model.buffers()])


def _trained_activations(
    config: HybridConfig,
    shape: tuple[int, int],
    precision: str,
    checkpointing: bool,
    compiled: bool,
) -> int:
    if not checkpointing:
        return activation_bytes(config, shape, precision, compiled)
    # The input of each layer, and one layer's activations while it is computed again.
    inputs = 4 * config.num_layers * config.d_model * shape[0] * shape[1]
    return inputs + _one_layer_bytes(config, shape, precision)


def _one_layer_bytes(config: HybridConfig, shape: tuple[int, int], precision: str) -> int:
    """Count the activations of one layer, of the kind in the model that has most."""
    kinds = {config.layer_type(layer): layer for layer in range(config.num_layers)}
    alone = (config.keep_layers([layer]) for layer in kinds.values())
    return max(activation_bytes(each, shape, precision) for each in alone)


def _loss_bytes(vocab_size: int, shape: tuple[int, int], on_cuda: bool) -> int:
    rows = min(chunk_rows(vocab_size, on_cuda), shape[0] * shape[1])
    return LOSS_BUFFERS * 4 * rows * vocab_size


def decoding_memory(
    target: HybridConfig,
    drafter: HybridConfig | None,
    dtype: torch.dtype,
    max_length: int,
    trees: Mapping[str, int],
    num_rows: int = 1,
) -> dict[str, int]:
    """Estimate the bytes by part of an evaluation of `num_rows` sequences.

    trees: nodes that each method verifies per call.
    """
    parts = {"target": dtype.itemsize * num_parameters(target)}
    caches = 0
    for num_nodes in trees.values():
        caches += num_rows * cache_bytes(target, max_length, num_nodes, dtype)
        if drafter is not None and num_nodes > 1:
            caches += num_rows * cache_bytes(drafter, max_length, num_nodes, dtype)
    if drafter is not None:
        parts["drafter"] = dtype.itemsize * num_parameters(drafter)
    return {**parts, "caches": caches}


def cache_bytes(config: HybridConfig, max_length: int, max_nodes: int, dtype: torch.dtype) -> int:
    """Count the bytes of a decoder's cache for one sequence."""
    cache = HybridCache(config, max_length, max_nodes, device="meta", dtype=dtype)
    attention = (each for each in cache.layers if isinstance(each, AttentionCache))
    shared = next((each.rotary.nbytes for each in attention), 0)
    return sum(cache.sequence_bytes().values()) + shared


def training_disk(
    trained: HybridConfig,
    saves: int,
    keep_last: int,
    exports: int,
    export_dtype: torch.dtype,
    tokenizer: str | os.PathLike[str],
    logged_rows: int,
    optimizer: OptimizerKind = "adamw",
) -> dict[str, int]:
    """Estimate the bytes by part in the run folder at its fullest.

    One checkpoint more than `keep_last` is there while the oldest goes.
    """
    checkpoint = checkpoint_bytes(trained, optimizer)
    export = export_dtype.itemsize * num_parameters(trained) + files_beside_weights_bytes(tokenizer)
    return {
        "checkpoints": min(saves, keep_last + 1) * checkpoint,
        "exports": exports * export,
        "logs": logged_rows * LOGGED_ROW_BYTES,
    }


def files_beside_weights_bytes(directory: str | os.PathLike[str]) -> int:
    """Count the bytes of a checkpoint folder's tokenizer, configs and other small files."""
    files = (path for path in Path(directory).iterdir() if path.is_file())
    return sum(p.stat().st_size for p in files if p.suffix not in (".safetensors", ".bin"))


def itemised(parts: Mapping[str, int]) -> str:
    """Format total and parts: "1.5 GiB (weights 1.0 GiB, …)"."""
    listed = ", ".join(f"{name} {size(value)}" for name, value in parts.items() if value)
    return f"{size(sum(parts.values()))} ({listed})"
