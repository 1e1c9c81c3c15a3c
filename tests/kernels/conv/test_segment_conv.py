"""The convolution of training in one launch each way, against its twin's autograd in fp64."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, normal, relative_error

from stree_kernels import naive
from stree_kernels.conv.segment_conv import segment_conv

# The result is rounded, and the interpreter cuts off; sums of many tokens are of fp32
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8 if DEVICE == "cuda" else 3 * 2**-8}
SEGMENTS = {
    "none": None,
    "within a block": [0] * 5 + [1] * 1 + [2] * 2 + [3] * 62,
    "over a block's bound": [0] * 63 + [4] * 7,
}


def gradients(op, inputs, weight, bias, segment_ids, silu, grad):
    """Return the result, and the gradients of inputs, weight and bias."""
    leaves = [each.detach().requires_grad_() for each in (inputs, weight, bias) if each is not None]
    y = op(leaves[0], leaves[1], None if bias is None else leaves[2], segment_ids, silu)
    return y.detach(), *torch.autograd.grad(y, leaves, grad.to(y.dtype))


def compare(shape, width, dtype, segment_ids=None, bias=True, silu=True, weight_dtype=None):
    batch, tokens, channels = shape
    wide = normal(batch, tokens, channels + 9, dtype=dtype)  # of a split, as projections give it
    weight = normal(width, channels, seed=1, dtype=weight_dtype or dtype).t()
    given = [
        wide[..., 3:-6], weight,
        normal(channels, seed=2, dtype=weight_dtype or dtype) if bias else None,
    ]
    grad = normal(*shape, seed=3, dtype=dtype)
    got = gradients(segment_conv, *given, segment_ids, silu, grad)
    exact = [None if each is None else each.double() for each in given]
    wanted = gradients(naive.segment_conv, *exact, segment_ids, silu, grad)
    names = ["y", "inputs", "weight", "bias"]
    for name, own, other in zip(names, got, wanted, strict=False):
        assert own.shape == other.shape, name
        assert own.dtype == (dtype if name in ("y", "inputs") else weight_dtype or dtype), name
        assert relative_error(own, other) < TOLERANCE[dtype], name
    return got


@pytest.mark.quick(3)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("segments", SEGMENTS)
def test_segments(segments, dtype):
    ids = SEGMENTS[segments]
    ids = None if ids is None else torch.tensor([ids, ids[::-1]], device=DEVICE)
    compare((2, 70, 67), 4, dtype, ids)


@pytest.mark.parametrize(
    ("width", "tokens", "bias", "silu"),
    [(4, 1, True, True), (4, 3, False, True), (3, 2, True, False), (2, 65, False, False)],
)
def test_widths_and_short_sequences(width, tokens, bias, silu):
    compare((1, tokens, 5), width, torch.float32, None, bias, silu)


def test_a_weight_in_more_bits_than_the_inputs():
    compare((1, 9, 5), 4, torch.bfloat16, weight_dtype=torch.float32)


def test_another_segment_is_not_read():
    """A token that is not a number spoils its own segment only, in both passes."""
    ids = torch.tensor([[0, 0, 1, 1, 1, 2, 2]], device=DEVICE)
    inputs = normal(1, 7, 5)
    inputs[0, 2:5] = torch.nan
    weight, bias, grad = normal(5, 4, seed=1), normal(5, seed=2), normal(1, 7, 5, seed=3)
    y, grad_inputs, *_ = gradients(segment_conv, inputs, weight, bias, ids, True, grad)
    for each in (y, grad_inputs):
        assert each[0, [0, 1, 5, 6]].isfinite().all() and each[0, 2:5].isnan().any()


def test_gradients_are_the_same_each_time():
    ids = torch.tensor([[0] * 100 + [1] * 40], device=DEVICE)
    first, second = (compare((1, 140, 5), 4, torch.float32, ids) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_no_token_has_no_result():
    """An empty batch gives an empty result, and gradients of zero."""
    weight, bias = normal(5, 4, seed=1), normal(5, seed=2)
    empty = normal(0, 3, 5)
    y, *grads = gradients(segment_conv, empty, weight, bias, None, True, empty)
    assert y.shape == empty.shape and [float(each.abs().sum()) for each in grads] == [0, 0, 0]
