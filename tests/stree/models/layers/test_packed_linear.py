"""What a product over trees reads: the projections' own weights, wherever they were written."""

import pytest
import torch
from torch import nn

from stree.models.layers.packed_linear import PackedLinear


def projections(biases: tuple[bool, ...], dim: int) -> list[nn.Linear]:
    torch.manual_seed(0)
    sizes = range(3, 3 + len(biases))
    return [
        nn.Linear(6, size, bias=bias) if dim == 0 else nn.Linear(size, 6, bias=bias)
        for size, bias in zip(sizes, biases, strict=True)
    ]


def outputs(of: list[nn.Linear], x: torch.Tensor, dim: int) -> torch.Tensor:
    if dim == 0:
        return torch.cat([each(x) for each in of], dim=-1)
    pieces = x.split([each.in_features for each in of], dim=-1)
    return sum(each(piece) for each, piece in zip(of, pieces, strict=True))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("biases", [(True,), (False, False), (True, True), (False, True, False)])
@pytest.mark.parametrize("keeps_rows", [False, True])
@torch.no_grad()
def test_a_product_follows_its_projections(dim, biases, keeps_rows):
    of = projections(biases, dim)
    x = torch.randn(2, sum(each.in_features for each in of) if dim else of[0].in_features)
    packed = PackedLinear(of, None, keeps_rows, dim)

    def require_same():
        wanted = outputs(of, x, dim)
        torch.testing.assert_close(packed.linear(x), wanted)
        torch.testing.assert_close(packed.parts(x).sum(0), wanted)

    require_same()
    for each in of:  # in place
        for weight in each.parameters():
            weight.mul_(2)
    require_same()
    weight, held = packed.weights[0], packed.biases
    packed = PackedLinear(of, packed, keeps_rows, dim)
    assert packed.weights[0] is weight  # graphs hold its address
    assert all(a is b for a, b in zip(packed.biases, held, strict=True))
    for name in ("weight", "bias"):
        if (moved := getattr(of[-1], name)) is not None:
            moved.data = 3 * moved.data
            packed = PackedLinear(of, packed, keeps_rows, dim)
            require_same()
    of[0] = projections(biases, dim)[0]  # another module
    packed = PackedLinear(of, packed, keeps_rows, dim)
    of[0].weight.mul_(5)
    require_same()


@torch.no_grad()
def test_pieces_of_a_fused_projection_stay_where_they_are():
    fused, of = torch.randn(7, 6), projections((False, False), 0)
    for each, piece in zip(of, fused.split([3, 4]), strict=True):
        each.weight.data = piece
    (weight,) = PackedLinear(of).weights
    assert weight.data_ptr() == fused.data_ptr() and torch.equal(weight, fused)


@torch.no_grad()
def test_swiglu_has_its_biases():
    x = torch.randn(2, 6)
    for bias in (False, True):
        torch.manual_seed(1)
        of = [nn.Linear(6, 4, bias=bias) for _ in range(2)]
        wanted = nn.functional.silu(of[0](x)) * of[1](x)
        torch.testing.assert_close(PackedLinear(of).swiglu(x), wanted)
