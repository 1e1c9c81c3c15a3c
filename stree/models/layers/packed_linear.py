"""Weights as products of few rows read them, laid out again when they have moved."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stree_kernels import ops
from stree_kernels.contracts import Gated, Stream


class PackedLinear:
    """The weights and biases that one product of a call over trees reads.

    Projections of one input are stacked along their outputs (dim 0). Projections whose outputs are
    summed lie next to each other along their inputs (dim 1). The weights of several projections
    become views of the packed weight: no memory is doubled, and writing to a projection in place
    changes what the product reads.

    Args:
        projections: One or several.
        before: The product's weights until now; where the projections still lie in them, they stay.
        keeps_rows: Whether weights stay stored output by output, because other code shares them.
        dim: 0 or 1.

    Attributes:
        weight: (E, D).
        biases: Terms (E,) of the product, none or several.
    """

    def __init__(
        self, projections: Sequence[nn.Linear], before: PackedLinear | None = None,
        keeps_rows: bool = False, dim: int = 0,
    ) -> None:
        weights = [each.weight for each in projections]
        biases = [each.bias for each in projections]
        self.biases: list[Tensor] = [each for each in biases if each is not None]
        if len(projections) == 1:
            lay_for_products(weights[0], keeps_rows)
            self.weight: Tensor = weights[0]
            return
        sizes = [each.shape[dim] for each in weights]
        self.weight = _joined(weights, sizes, before.weight if before else None, keeps_rows, dim)
        if self.biases and dim == 0:
            held = before.biases[0] if before is not None and before.biases else None
            self.biases = [_joined(biases, sizes, held, keeps_rows)]

    def linear(self, x: Tensor | Stream) -> Tensor:
        """Return the outputs (…, E) for x (…, D), or for the norm of a stream."""
        y = ops.linear(x, self.weight)
        for bias in self.biases:
            y = y + bias
        return y

    def swiglu(self, x: Stream) -> Tensor:
        """Return silu(gate)·up of the outputs (…, [gate, up]) for the norm of a stream."""
        if self.biases:
            return ops.activated(self.linear(x), "swiglu")
        return ops.linear_swiglu(x, self.weight)

    def parts(self, x: Tensor | Gated) -> Tensor:
        """Return the outputs as parts of a sum (S, …, E).

        x is (…, D), or a gated value whose norm is projected.
        """
        parts = ops.linear_parts(x, self.weight)
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


def _joined(
    pieces: Sequence[Tensor | None], sizes: list[int], before: Tensor | None, keeps_rows: bool,
    dim: int = 0,
) -> Tensor:
    """Return a tensor of pieces, zeros for None, and make the pieces views of it.

    It is `before` if the pieces still lie there.
    """
    if before is not None and all(
        each is None or _place(each) == _place(view)
        for each, view in zip(pieces, before.split(sizes, dim), strict=True)
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
        for each, view in zip(pieces, whole.split(sizes, dim), strict=True):
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
