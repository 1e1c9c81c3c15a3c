"""Build the model of a `LoadPlan`: read its stored tensors, and make the weights of them.

dt_bias, A_log and D stay in fp32 in a model of any dtype: they are a few numbers per layer that act
through exponentials, and the recurrence compounds their rounding over the whole sequence. The
correction of experts' scores stays in fp32, too, because it decides between near equals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stree.checkpoints.layouts.quantisation import Quantisation
from stree.checkpoints.layouts.quantised import ScaledTensor, make_parameter, scaled_tensor
from stree.checkpoints.plan.load_plan import LoadPlan
from stree.checkpoints.plan.pickles import load_pickle
from stree.checkpoints.plan.stored import StoredTensor, damaged
from stree.checkpoints.sources import Source
from stree.common.errors import CheckpointRefused, warn
from stree.common.words import counted, dtype_name
from stree.models.config.weights import EMBEDDING, HEAD_IDS
from stree.models.in_8_bits import hold_in_8_bits, scale_name, weights_for_8_bits
from stree.models.layers.part import has_products_in_8_bits, require_products_in_8_bits
from stree.models.model import HybridModel
from stree_kernels import naive
from stree_kernels.contracts import Scaled

_ALWAYS_FP32 = (".dt_bias", ".A_log", ".D", ".correction_bias")

Read = Callable[[StoredTensor], Tensor]


@torch.inference_mode(False)  # its tensors could be neither trained nor packed outside
def build(
    plan: LoadPlan, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32,
    in_8_bits: bool = False,
) -> HybridModel:
    """Load the model of a plan, in evaluation mode.

    Each tensor goes straight to `device` and `dtype` (dt_bias, A_log and D at least fp32), so the
    peak is one model and one tensor. Rows that state-spaces adds to round its vocabulary up are
    dropped. The manifest's hash of the tokenizer stays with the model, so that a `Decoder` can
    compare. What a head takes from its target is still to be shared (`share_ends`).

    Args:
        plan: The plan.
        device: Where the weights go.
        dtype: Dtype of the weights.
        in_8_bits: Whether all `weights_for_8_bits` are held in fp8 e4m3. Without it,
            only those of them are that the checkpoint stores in 8 bits. Its other weights in 8 bits
            are written out, with a warning.

    Raises UsageError for 8 bits on a GPU without them, and CheckpointRefused for tied tensors that
    differ, for token ids of a head that do not ascend, and for files that changed since the plan.
    """
    device = torch.device(device)
    if in_8_bits:
        require_products_in_8_bits(device, "load the target without target_dtype")
    with torch.device("meta"):
        model = HybridModel(plan.config)
    model.tokens_sha256 = plan.tokens_sha256
    model.lacks_embedding = EMBEDDING in plan.lent
    weights: dict[str, Tensor] = {}
    written_out: list[str] = []
    taken = weights_for_8_bits(model) if has_products_in_8_bits(device) else {}
    with open_files() as read_file:
        read = partial(_with_scale, read_file, plan.checkpoint.quantisation)
        _require_equal_copies(plan, read)
        for name, weight in plan.weights.items():
            made = make_parameter(weight.source, list(map(read, weight.stored)), name in taken)
            rows = slice(weight.shape[0])  # without the padding of the vocabulary
            if isinstance(made, Scaled):
                made = made[rows].to(device)
            elif any(each.scale is not None for each in weight.stored):
                written_out.append(name)
            if isinstance(made, Tensor) and in_8_bits and name in taken:
                made = naive.in_8_bits(made[rows].to(device))
            if isinstance(made, Scaled):
                hold_in_8_bits(model, name, made)
                weights[name], weights[scale_name(name)] = made.values, made.scale
            else:
                kept = kept_dtype(name, dtype, weight.source)
                weights[name] = made[rows].to(device, kept, copy=True)
    if written_out:
        warn(
            f"{plan.directory}: {counted(len(written_out), 'weight')} in 8 bits, {written_out[0]} "
            "for one, cannot be multiplied so here and will take the memory of "
            f"{dtype_name(dtype)}"
        )
    for name in plan.zeros:
        weights[name] = torch.zeros(model.get_parameter(name).shape, device=device, dtype=dtype)
    model.load_state_dict(weights, strict=not plan.lent, assign=True)
    _require_head_ids(model, plan.directory)
    if in_8_bits:
        model.put_head_in_8_bits()
    return model.eval()


def kept_dtype(name: str, dtype: torch.dtype, source: Source | None = None) -> torch.dtype:
    """Return the dtype of a parameter in a model that is loaded in `dtype`."""
    if name == HEAD_IDS:
        return torch.long
    wide = name.endswith(_ALWAYS_FP32) or (source is not None and source.wide)
    return torch.promote_types(dtype, torch.float32) if wide else dtype


def _with_scale(
    read: Read, quantisation: Quantisation | None, stored: StoredTensor
) -> Tensor | ScaledTensor:
    if stored.scale is None or quantisation is None:
        return read(stored)
    return scaled_tensor(read(stored), read(stored.scale), quantisation.block)


def _require_equal_copies(
    plan: LoadPlan, read: Callable[[StoredTensor], Tensor | ScaledTensor]
) -> None:
    """Refuse a tied tensor that is stored under several names with different numbers."""
    pairs = {(each.stored[0], copy) for each in plan.weights.values() for copy in each.copies}
    for first, copy in sorted(pairs, key=lambda pair: (pair[0].name, pair[1].name)):
        is_alike = first[1:3] == copy[1:3]
        both = map(read, (first, copy))
        pair = [each if isinstance(each, Tensor) else each.numbers() for each in both]
        if not is_alike or not torch.equal(*pair):
            raise CheckpointRefused(
                f"{plan.directory} says that these weights are tied, but {copy.name} differs from "
                f"{first.name}: export it again, or, for a head, correct tie_word_embeddings (or "
                "tie_embeddings) in config.json"
            )


@contextmanager
def open_files() -> Iterator[Read]:
    """Yield a function that reads stored tensors; files that it opens stay open until the end."""
    opened: dict[Path, Callable[[str], Tensor]] = {}
    with ExitStack() as stack:

        def read(stored: StoredTensor) -> Tensor:
            path = stored.file
            assert path is not None
            try:
                if path not in opened:
                    opened[path] = _opened(path, stack)
                tensor = opened[path](stored.name)
            except (SafetensorError, OSError, ValueError, KeyError) as error:
                raise damaged(path, error) from error
            if tuple(tensor.shape) != stored.shape:
                raise damaged(path, f"{stored.name} has changed since its shape was read")
            return tensor

        yield read


def _opened(path: Path, stack: ExitStack) -> Callable[[str], Tensor]:
    if path.suffix == ".safetensors":
        file = stack.enter_context(safe_open(path, framework="pt"))
        return file.get_tensor
    return load_pickle(path).__getitem__


def _require_head_ids(model: HybridModel, directory: Path) -> None:
    """Refuse a head over a part of the vocabulary whose tokens are not ascending ids."""
    ids, size = model.head_ids, model.config.vocab_size
    if ids is None or ids.is_meta:
        return
    ascending = bool((ids[1:] > ids[:-1]).all())
    if not ascending or int(ids[0]) < 0 or int(ids[-1]) >= size:
        raise CheckpointRefused(
            f"{HEAD_IDS} in {directory} are not ascending token ids below {size}: copy or export "
            "the checkpoint again"
        )
