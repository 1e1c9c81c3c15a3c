"""Estimate parameters, memory, disk and arithmetic of a command from its configs, for dry runs.

Nothing is loaded: models are built without data (meta or fake tensors), so an 8 B target is sized
up on a laptop in seconds. Weights, gradients, moments, caches and files are exact to a percent;
activations are counted on PyTorch's own path and a guide only (another kernel keeps others).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stree.checkpoints.configs import read_checkpoint_config
from stree.checkpoints.plan.load_plan import LoadPlan, plan_model
from stree.common.device_memory import free_memory_bytes
from stree.common.errors import OutOfMemory
from stree.common.words import counted, size
from stree.drafters.names import DrafterName
from stree.models.cache import HybridCache
from stree.models.config import HybridConfig
from stree.models.in_8_bits import put_in_8_bits, weights_for_8_bits
from stree.models.layer_caches import AttentionCache
from stree.models.layers.part import has_products_in_8_bits
from stree.models.layers.rotary import rotary_angles
from stree.models.model import HybridModel
from stree_pipelines.resources.disk import itemised
from stree_pipelines.training.losses.distillation_loss import chunk_rows
from stree_pipelines.training.optimization import OptimizerKind, num_moments
from stree_pipelines.training.parallel.precision import AUTOCAST

GRADIENT_BYTES = 4  # per weight
LOSS_BUFFERS = 5  # (C, V) fp32, see distillation_loss.py
LOGGED_ROW_BYTES = 500  # of metrics.csv and TensorBoard together
# bf16 products without sparsity a second, by NVIDIA's data sheets, of the SXM modules
PEAKS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}


def _without_data(config: HybridConfig) -> HybridModel:
    with torch.device("meta"):
        return HybridModel(config)


def num_parameters(config: HybridConfig) -> int:
    return _without_data(config).num_parameters()


def checkpoint_bytes(config: HybridConfig, optimizer: OptimizerKind = "adamw") -> int:
    """Count the bytes of fp32 weights and the optimiser's moments, in memory or in a checkpoint."""
    return 4 * sum(
        weight.numel() * (1 + num_moments(name, weight, optimizer))
        for name, weight in _without_data(config).named_parameters()
    )


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

    # The rotary angles are cached between calls: make them here, so that no fake tensors are kept.
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
            bounds = tokens.new_empty(len(tokens) + 1, dtype=torch.int32)
            model.hidden_states(tokens, torch.zeros_like(tokens), read=read, bounds=bounds)
        for parameter in model.parameters():
            sizes.pop(parameter.untyped_storage()._cdata, None)
    return sum(sizes.values())


@dataclass(frozen=True)
class ModelPlan:
    """Architectures of a training, and the options that decide its memory.

    `target` runs with the trained model; `passes` is how often the trained model reads each token.
    `target_in_8_bits` is `numbers_in_8_bits` of its checkpoint.
    """

    trained: HybridConfig
    target: HybridConfig | None = None
    target_dtype: torch.dtype = torch.float32
    target_in_8_bits: int = 0
    activation_checkpointing: bool = False
    passes: int = 1
    compiled: bool = False  # whether the trained model's layers are compiled
    optimizer: OptimizerKind = "adamw"


def training_memory(
    plan: ModelPlan, shape: tuple[int, int], precision: str, on_cuda: bool
) -> dict[str, int]:
    """Count the bytes by part of a training on one device, in micro-batches of `shape` (B, T).

    They are those of the fuller of two moments: while the target runs, and in the loss, where the
    drafter's activations wait. Gradients are there in both, of the step or micro-batch before.
    """
    trained, target, dtype = plan.trained, plan.target, AUTOCAST[precision]
    kept = checkpoint_bytes(trained, plan.optimizer) + GRADIENT_BYTES * num_parameters(trained)
    always = {"weights, gradients, moments": kept}
    head_numbers = trained.head_size * (trained.head_rank or trained.d_model)
    vocab_size = target.vocab_size if target else trained.head_size
    if plan.activation_checkpointing:
        # The input of each layer, and one layer's activations while it is computed again.
        inputs = 4 * trained.num_layers * trained.d_model * shape[0] * shape[1]
        activations = inputs + _one_layer_bytes(trained, shape, precision)
    else:
        activations = activation_bytes(trained, shape, precision, plan.compiled)
    moments = [{
        "activations": plan.passes * activations,
        "the head's gradient": 4 * head_numbers,
        "the head for products": dtype.itemsize * head_numbers if dtype else 0,
        "loss": LOSS_BUFFERS * 4 * vocab_size
        * min(chunk_rows(vocab_size, on_cuda), shape[0] * shape[1]),
    }]
    if target is not None:
        in_8_bits = plan.target_dtype.itemsize == 1
        held = torch.bfloat16 if in_8_bits else plan.target_dtype
        always["target"] = held_bytes(
            target, held, in_8_bits, head=False, stored_in_8_bits=plan.target_in_8_bits
        )
        # Without gradients one layer's activations live at a time.
        moments.insert(0, {"target's activations": _one_layer_bytes(target, shape, precision)})
    return always | max(moments, key=lambda parts: sum(parts.values()))


def held_bytes(
    target: HybridConfig, dtype: torch.dtype, in_8_bits: bool = False, head: bool = True,
    stored_in_8_bits: int = 0,
) -> int:
    """Count the bytes of a frozen target's weights.

    Args:
        target: Config of the target.
        dtype: Dtype of the weights.
        in_8_bits: Whether the weights of products are held in 8 bits instead.
        head: Whether the head is, too, then; of a tied one there is a copy.
        stored_in_8_bits: `numbers_in_8_bits` of its checkpoint, which stay so (their scales are
            left out).
    """
    model = _without_data(target)
    if not in_8_bits:
        return dtype.itemsize * model.num_parameters() - (dtype.itemsize - 1) * stored_in_8_bits
    put_in_8_bits(model.to(dtype), head)
    weights = [*model.parameters(), *model.buffers()]
    if (copy := model.head_in_8_bits) is not None:
        weights += [copy.values, copy.scale]
    return sum(each.nbytes for each in weights)


def _one_layer_bytes(config: HybridConfig, shape: tuple[int, int], precision: str) -> int:
    """Count the activations of one layer, of the kind in the model that has most."""
    kinds = {config.layer_type(layer): layer for layer in range(config.num_layers)}
    alone = (config.keep_layers([layer]) for layer in kinds.values())
    return max(activation_bytes(each, shape, precision) for each in alone)


def decoding_memory(
    target: HybridConfig, drafters: Mapping[DrafterName, HybridConfig], dtype: torch.dtype,
    max_length: int, trees: Mapping[str, int], num_rows: int = 1, in_8_bits: bool = False,
    folder: str = "",
) -> dict[str, int]:
    """Estimate the bytes by part of decoding `num_rows` sequences.

    drafters: models that draft, of which caches are there for one at a time. trees: nodes that each
    method verifies per call. in_8_bits: whether the target's products are. folder: the target's.
    """
    stored_in_8_bits = numbers_in_8_bits(folder)
    parts = {"target": held_bytes(target, dtype, in_8_bits, stored_in_8_bits=stored_in_8_bits)}
    if drafters:
        weights = sum(
            dtype.itemsize * num_parameters(config)
            - (dtype.itemsize - 1) * numbers_in_8_bits(folder, name)
            for name, config in drafters.items()
        )
        parts["drafters" if len(drafters) > 1 else "drafter"] = weights
    heads = [target if name.mtp else config for name, config in drafters.items() if name.float8]
    if heads:
        copies = (each.head_size * (each.head_rank or each.d_model) for each in heads)
        parts["heads in 8 bits"] = sum(copies)  # without their scales
    parts["caches"] = 0
    for num_nodes in trees.values():
        models = [target] if num_nodes == 1 else [target, *largest_of(drafters)]
        parts["caches"] += num_rows * sum(
            cache_bytes(each, max_length, num_nodes, dtype) for each in models
        )
    return parts


def numbers_in_8_bits(folder: str, drafter: DrafterName | None = None) -> int:
    """Return `held_in_8_bits` of a checkpoint, of which only headers of files are read.

    With `drafter` the checkpoint is that of a drafter for the target in the folder. "" is no
    checkpoint.
    """
    if not folder:
        return 0
    of = read_checkpoint_config(Path(folder)) if drafter is None else drafter.checkpoint(folder)
    if of is None or of.quantisation is None:
        return 0
    plan = plan_model(folder) if drafter is None else drafter.plan(folder)
    assert plan is not None
    return held_in_8_bits(plan)


def held_in_8_bits(plan: LoadPlan) -> int:
    """Count the numbers of the weights that are stored in 8 bits, and stay so.

    Where a GPU has no products in 8 bits, none stay so.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not has_products_in_8_bits(device):
        return 0
    taken = weights_for_8_bits(_without_data(plan.config))
    return sum(
        math.prod(weight.shape) for name, weight in plan.weights.items()
        if weight.is_in_8_bits and name in taken
    )


def largest_of(drafters: Mapping[DrafterName, HybridConfig]) -> list[HybridConfig]:
    """Return the config of the largest model that drafts; [] without one."""
    return sorted(drafters.values(), key=lambda config: config.d_model * config.num_layers)[-1:]


def models_of(names: Iterable[DrafterName], target: str) -> dict[DrafterName, HybridConfig]:
    """Return the configs of the drafters that are models."""
    found = {name: name.config(target) for name in names}
    return {name: config for name, config in found.items() if config is not None}


def cache_bytes(config: HybridConfig, max_length: int, max_nodes: int, dtype: torch.dtype) -> int:
    """Count the bytes of a decoder's cache for one sequence."""
    cache = HybridCache(config, max_length, max_nodes, device="meta", dtype=dtype)
    attention = (each for each in cache.layers if isinstance(each, AttentionCache))
    shared = next((each.rotary.nbytes for each in attention), 0)
    return sum(cache.sequence_bytes().values()) + shared


def distillation_operations(plan: ModelPlan, num_tokens: int, num_counted: int) -> dict[str, int]:
    """Count multiplications and additions by part, of which `num_counted` tokens have a loss.

    2 a weight and token for the target's pass, 6 for the drafter's two; of the heads for tokens
    with a loss alone. Attention, scans, experts and what a backward pass computes again are left
    out, so that a share of a GPU's peak is what training needs, not what it does.
    """
    in_layers, head = _weights(plan.trained)
    parts = {"drafter": 6 * (plan.passes * num_tokens * in_layers + num_counted * head)}
    if plan.target is not None:
        in_layers, head = _weights(plan.target)
        parts["target"] = 2 * num_tokens * in_layers + 2 * num_counted * head
    return parts


def _weights(config: HybridConfig) -> tuple[int, int]:
    """Count the weights of the matrices that each token is multiplied with, and of the head."""
    model = _without_data(config)
    in_layers = sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if weight.ndim == 2 and "embed_tokens" not in name and weight is not model.head_weight
    )
    return in_layers, model.head_weight.numel()


def training_disk(
    trained: HybridConfig, saves: int, keep_last: int, exports: int, export_dtype: torch.dtype,
    tokenizer: str | os.PathLike[str], logged_rows: int, optimizer: OptimizerKind = "adamw",
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


# What a dry run prints and refuses


class MemoryEstimate:
    """Estimated bytes of a command by part, compared with the free memory."""

    def __init__(self, parts: Mapping[str, int], on_cuda: bool) -> None:
        self.parts, self.kind = parts, "GPU memory" if on_cuda else "memory"
        is_here = torch.cuda.is_available() or not on_cuda
        self.free = free_memory_bytes(on_cuda) if is_here else None

    @property
    def too_little(self) -> bool:
        return self.free is not None and sum(self.parts.values()) > self.free

    def __str__(self) -> str:
        if self.free is None:
            return f"memory: about {itemised(self.parts)} on a GPU, which is not here"
        judged = " — TOO LITTLE" if self.too_little else ""
        return f"{self.kind}: about {itemised(self.parts)}; {size(self.free)} are free{judged}"

    def require(self, remedy: str) -> None:
        """Raise OutOfMemory when there is too little; `remedy` names smaller settings."""
        if self.free is not None and self.too_little:
            raise OutOfMemory(
                f"about {size(sum(self.parts.values()))} of {self.kind} are needed, "
                f"{size(self.free)} are free: {remedy}"
            )


def model_line(name: str, config: HybridConfig) -> str:
    return (
        f"{name}: {num_parameters(config):,} parameters, {counted(config.num_layers, 'layer')} "
        f"({len(config.attn_layers)} attention), width {config.d_model}, vocabulary "
        f"{config.vocab_size:,}"
    )


def config_lines(config: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(config))  # tuples are lists in YAML
    return "config:\n" + yaml.safe_dump(plain, sort_keys=False).rstrip()
