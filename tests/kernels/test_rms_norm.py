"""The norm of training in one launch each way, against its twin's autograd in fp64."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, normal, relative_error

from stree_kernels import naive, rms_norm

# The norm is rounded before it is scaled, and after; the interpreter cuts off
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7 if DEVICE == "cuda" else 3 * 2**-7}


def gradients(module, x, weight, groups, gate, grad):
    """Return the norm, and the gradients of x, weight and gate."""
    leaves = [each.detach().requires_grad_() for each in (x, weight, gate) if each is not None]
    y = module.rms_norm(leaves[0], leaves[1], 1e-5, groups, None if gate is None else leaves[2])
    return y.detach(), *torch.autograd.grad(y, leaves, grad.to(y.dtype))


def compare(shape, groups, gated, dtype, weight_dtype=None, layout=lambda each: each):
    width = shape[-1]
    x = layout(normal(*shape, dtype=dtype))
    weight = normal(width, seed=1, dtype=weight_dtype or dtype)
    gate = normal(*shape[:-1], width + 9, seed=2, dtype=dtype)[..., 3:-6] if gated else None
    grad = layout(normal(*shape, seed=3, dtype=dtype))
    got = gradients(rms_norm, x, weight, groups, gate, grad)
    exact = [each if each is None else each.double() for each in (x, weight, gate)]
    wanted = gradients(naive, exact[0], exact[1], groups, exact[2], grad)
    for name, own, other in zip(["y", "x", "weight", "gate"], got, wanted, strict=False):
        assert own.shape == other.shape, name
        assert own.dtype == (weight.dtype if name == "weight" else dtype), name
        assert relative_error(own, other) < TOLERANCE[dtype], name
    return got


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("shape", "groups", "gated"),
    [
        ((2, 5, 100), 1, False), ((3, 1000), 1, True), ((1, 130, 24), 3, True),
        ((1, 3, 2, 16), 1, False), ((7,), 1, False), ((2, 4500), 1, False),
    ],
    ids=str,
)
def test_norms(shape, groups, gated, dtype):
    compare(shape, groups, gated, dtype)


def test_a_weight_in_more_bits_than_the_inputs():
    compare((2, 5, 24), 3, True, torch.bfloat16, weight_dtype=torch.float32)


def test_any_layout():
    compare((2, 5, 24), 1, False, torch.float32, layout=lambda each: each.mT.contiguous().mT)


def test_gradients_are_the_same_each_time():
    first, second = (compare((300, 64), 4, True, torch.float32) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_no_row_has_no_norm():
    """An empty batch gives an empty result, and gradients of zero."""
    empty, weight = normal(0, 8), normal(8, seed=1)
    y, *grads = gradients(rms_norm, empty, weight, 2, empty, empty)
    assert y.shape == empty.shape and [float(each.abs().sum()) for each in grads] == [0, 0, 0]
