"""Weights as products of few rows read them, laid out again when they have moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import groupby, zip_longest

import torch
from torch import Tensor, nn

from stree_kernels import naive, ops
from stree_kernels.contracts import Gated, Scaled, Stream

Weight = Tensor | Scaled
FLOAT8 = torch.float8_e4m3fn


class KeepsScaled(nn.Module):
    """Base of modules whose own weights in fp8 e4m3, and their scales, are not cast.

    Values would change otherwise. So a model in 8 bits can be cast (`model.to(dtype)`): only the
    rest of it is. Names of scales end with "scale".
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KeepsScaled:
        held = [
            (each, each.data) for name, each in self._parameters.items()
            if each is not None and (each.dtype == FLOAT8 or name.endswith("scale"))
        ]
        super()._apply(fn, recurse)
        for each, data in held:
            if each.dtype != data.dtype:
                each.data = data.to(each.device)
        return self


class ScaledLinear(KeepsScaled, nn.Linear):
    """A projection in 8 bits: weight (E, D) in fp8 e4m3, scale (E, G) in fp32 (`Scaled`).

    Inputs keep their dtype, sums are fp32. It is not trained; gradients go through it.

    Attributes:
        rounds_inputs: Whether inputs of many rows are rounded to 8 bits, too, for a frozen target.
    """

    rounds_inputs = False

    def __init__(self, weight: Scaled, bias: nn.Parameter | None = None) -> None:
        outputs, inputs = weight.shape
        super().__init__(inputs, outputs, bias=False, device="meta")
        self.weight = nn.Parameter(weight.values, requires_grad=False)
        self.scale = nn.Parameter(weight.scale, requires_grad=False)
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        weight = Scaled(self.weight, self.scale)
        if self.rounds_inputs and naive.fits_rounded(x, weight):
            y = naive.linear_rounded(x, weight)
        else:
            y = (naive if torch.is_grad_enabled() else ops).linear(x, weight)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def weight_of(projection: nn.Linear) -> Weight:
    """Return the weight by which a product multiplies, in 8 bits if it is held so."""
    if isinstance(projection, ScaledLinear):
        return Scaled(projection.weight, projection.scale)
    return projection.weight


class PackedLinear:
    """The weights and biases that one product of a call over trees reads.

    Projections of one input are stacked along their outputs (dim 0). Projections whose outputs are
    summed lie next to each other along their inputs (dim 1). The weights of several projections
    become views of the packed weight: no memory is doubled, and writing to a projection in place
    changes what the product reads. Neighbours of which one is in 8 bits and one is not, or with
    scales of other groups, are products of their own.

    Args:
        projections: One or several.
        before: The product's weights until now; where the projections still lie in them, they stay.
        keeps_rows: Whether weights stay stored output by output, because other code shares them.
        dim: 0 or 1.

    Attributes:
        weights: (E, D), one, or one for each run of projections that are held alike.
        biases: Terms (E,) of the product, none or several.
    """

    def __init__(
        self, projections: Sequence[nn.Linear], before: PackedLinear | None = None,
        keeps_rows: bool = False, dim: int = 0,
    ) -> None:
        biases = [each.bias for each in projections]
        self.biases: list[Tensor] = [each for each in biases if each is not None]
        self.dim = dim
        alike = _num_groups if dim == 0 else _is_scaled
        runs = [list(run) for _, run in groupby(projections, alike)]
        held_weights = before.weights if before is not None else []
        self.weights: list[Weight] = [
            _joined_weight(run, was, keeps_rows, dim)
            for run, was in zip_longest(runs, held_weights[: len(runs)])
        ]
        if self.biases and dim == 0 and len(projections) > 1:
            sizes = [each.out_features for each in projections]
            held = before.biases[0] if before is not None and before.biases else None
            self.biases = [_joined(biases, held, keeps_rows, sizes=sizes)]

    def linear(self, x: Tensor | Stream) -> Tensor:
        """Return the outputs (…, E) for x (…, D), or for the norm of a stream."""
        ys = [ops.linear(x, weight) for weight in self.weights]
        y = ys[0] if len(ys) == 1 else torch.cat(ys, dim=-1)
        for bias in self.biases:
            y = y + bias
        return y

    def swiglu(self, x: Stream) -> Tensor:
        """Return silu(gate)·up of the outputs (…, [gate, up]) for the norm of a stream."""
        if self.biases or len(self.weights) > 1:
            return ops.activated(self.linear(x), "swiglu")
        return ops.linear_swiglu(x, self.weights[0])

    def parts(self, x: Tensor | Gated) -> Tensor:
        """Return the outputs as parts of a sum (S, …, E).

        x is (…, D), or a gated value whose norm is projected.
        """
        if len(self.weights) == 1:
            parts = ops.linear_parts(x, self.weights[0])
        else:
            assert isinstance(x, Tensor) and self.dim == 1
            pieces = x.split([weight.shape[1] for weight in self.weights], dim=-1)
            parts = reduce(torch.add, map(ops.linear, pieces, self.weights))[None]
        for bias in self.biases:
            parts[0] += bias
        return parts


def lay_for_products(weight: Tensor, keeps_rows: bool = False) -> None:
    """Store a projection's weight as products of few rows read it, in place."""
    with torch.inference_mode(weight.is_inference()):  # PyTorch can't mix tensors of both modes
        laid_weight = _laid(weight.data, keeps_rows)
        if laid_weight.data_ptr() != weight.data_ptr():
            weight.data = laid_weight


def lay_channels_together(conv: nn.Conv1d) -> None:
    """Store a conv's weight (C, 1, W) tap by tap: a tree conv reads many channels of one tap."""
    weight = conv.weight
    if weight.stride(0) != 1:
        with torch.inference_mode(weight.is_inference()):
            weight.data = weight.data.permute(1, 2, 0).contiguous().permute(2, 0, 1)


def _laid(weight: Tensor, keeps_rows: bool) -> Tensor:
    return weight.contiguous() if keeps_rows or weight.ndim == 1 else ops.laid(weight)


def _num_groups(projection: nn.Linear) -> int:
    return projection.scale.shape[1] if isinstance(projection, ScaledLinear) else 0


def _is_scaled(projection: nn.Linear) -> bool:
    return isinstance(projection, ScaledLinear)


def _joined_weight(
    projections: list[nn.Linear], before: Weight | None, keeps_rows: bool, dim: int
) -> Weight:
    """Return the weight of projections that are held alike, of which theirs become views."""
    first, weights = projections[0], [each.weight for each in projections]
    if len(projections) == 1:
        if not _is_scaled(first):
            lay_for_products(first.weight, keeps_rows)
        return weight_of(first)
    held = (before.values, before.scale) if isinstance(before, Scaled) else (before, None)
    if not _is_scaled(first):
        return _joined(weights, held[0], keeps_rows, dim)
    scaled = [each for each in projections if isinstance(each, ScaledLinear)]
    if dim == 1:  # all inputs lie in groups of one size
        group = math.gcd(*(each.in_features // _num_groups(each) for each in scaled))
        for each in scaled:
            repeats = each.in_features // group // _num_groups(each)
            if repeats > 1:
                each.scale.data = each.scale.repeat_interleave(repeats, dim=1)
    scales: list[Tensor] = [each.scale for each in scaled]
    return Scaled(_joined(weights, held[0], True, dim), _joined(scales, held[1], True, dim))


def _joined(
    pieces: Sequence[Tensor | None], before: Tensor | None, keeps_rows: bool, dim: int = 0,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Return a tensor of pieces, zeros for None, and make the pieces views of it.

    It is `before` if the pieces still lie there. sizes are those of the pieces, if some are None.
    """
    sizes = sizes or [each.shape[dim] for each in pieces if each is not None]
    if before is not None and all(
        each is None or _place(each) == _place(view)
        for each, view in zip(pieces, before.split(list(sizes), dim), strict=True)
    ):
        return before
    given = [each for each in pieces if each is not None]
    first = given[0]
    if len(given) == len(pieces) and dim == 0 and _follow_one_another(given):
        # pieces of a projection that is stored fused
        return first.detach().as_strided((sum(sizes), *first.shape[1:]), first.stride())
    with torch.inference_mode(first.is_inference()):
        filled = [
            first.new_zeros(size) if each is None else each.detach()
            for each, size in zip(pieces, sizes, strict=True)
        ]
        whole = _laid(torch.cat(filled, dim), keeps_rows)
        for each, view in zip(pieces, whole.split(list(sizes), dim), strict=True):
            if each is not None:
                each.data = view
    return whole


def _place(tensor: Tensor) -> tuple[int, tuple[int, ...], torch.dtype]:
    return tensor.data_ptr(), tensor.stride(), tensor.dtype


def _follow_one_another(tensors: list[Tensor]) -> bool:
    """Return whether contiguous tensors of one storage have no gap between them."""
    storage, address = tensors[0].untyped_storage().data_ptr(), tensors[0].data_ptr()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == storage and tensor.data_ptr() == address
        if not (same and tensor.is_contiguous()):
            return False
        address += tensor.nbytes
    return True
