"""The small ops against their naive twins.

Both round at the same places, but sum in another order: fp32 agrees to a few 2⁻²³ of a norm; in
bf16 a sum that lies between two bf16 numbers may go either way, which a share of elements shows
as one rounding (2⁻⁸ of their size). The interpreter cuts off where CUDA rounds: up to 2⁻⁷ each.
"""

import pytest
import torch
from kernel_cases import DEVICE, cache_state_of, normal, relative_error

from stree.models.config import MLP_KINDS
from stree_kernels import naive, pointwise

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-3 if DEVICE == "cuda" else 1.5e-2}
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@each_dtype
@pytest.mark.parametrize("shape", [(1, 1, 64), (2, 3, 100), (1, 5, 1000)], ids=str)
def test_add_rms_norm(shape, dtype):
    x, added = normal(*shape, dtype=dtype), normal(1, *shape, seed=1, dtype=dtype)
    parts = normal(4, *shape, seed=3, dtype=torch.float32)
    weight = normal(shape[-1], seed=2, dtype=dtype)
    for more in (None, added, parts, (parts, added), (added, parts), (parts, added, parts)):
        got = pointwise.add_rms_norm(x, more, weight, 1e-5)
        wanted = naive.add_rms_norm(x, more, weight, 1e-5)
        if not isinstance(more, tuple) and (dtype == torch.float32 or DEVICE == "cuda"):
            assert torch.equal(got[0], wanted[0])
        for one, other in zip(got, wanted, strict=True):
            assert relative_error(one, other) < TOLERANCE[dtype]


def test_a_scale_in_more_bits_is_not_rounded():
    """bf16 makes another number of 1 + 3·2⁻⁹, which shows in most products."""
    x = normal(1, 5, 1000, dtype=torch.bfloat16)
    scale = torch.full((1000,), 1.0 + 3 * 2**-9, device=DEVICE)
    for add_rms_norm in (naive.add_rms_norm, pointwise.add_rms_norm):
        fine, coarse = (add_rms_norm(x, None, each, 1e-5)[1] for each in (scale, scale.bfloat16()))
        assert fine.dtype == coarse.dtype == torch.bfloat16
        assert 0.1 < float(fine.ne(coarse).float().mean()) < 1
    got, wanted = pointwise.add_rms_norm(x, None, scale, 1e-5), naive.rms_norm(x, scale, 1e-5)
    assert relative_error(got[1], wanted) < TOLERANCE[torch.bfloat16]


@each_dtype
@pytest.mark.parametrize(
    ("name", "width", "norm"),
    [
        *(("gated_rms_norm", 90, (90, 1e-5, groups)) for groups in (1, 3)),
        *(("gate_normed", 90, (head_dim, 1e-5)) for head_dim in (90, 18)),
        *((name, width, ()) for name in ("gated", "sigmoid_gated") for width in (7, 1100)),
    ],
)
def test_gates(name, width, norm, dtype):
    y, wide = normal(2, 5, width, dtype=dtype), normal(2, 5, width + 43, seed=1, dtype=dtype)
    weight = (normal(norm[0], seed=2, dtype=dtype), *norm[1:]) if norm else ()
    arguments = y, wide[..., 9:-34], *weight
    got, wanted = (getattr(module, name)(*arguments) for module in (pointwise, naive))
    assert relative_error(got, wanted) < TOLERANCE[dtype]


@each_dtype
@pytest.mark.parametrize("num_q, num_k, width", [(1, 1, 18), (6, 2, 64), (5, 5, 20)])
def test_norm_heads(num_q, num_k, width, dtype):
    wide = normal(2, 5, (num_q + 2 * num_k) * width + 9, dtype=dtype)
    q_weight, k_weight = normal(width, seed=1), normal(width, seed=2)
    arguments = (wide[..., :-9], q_weight, k_weight, 1e-5, num_k)
    got, wanted = pointwise.norm_heads(*arguments), naive.norm_heads(*arguments)
    assert relative_error(got, wanted) < TOLERANCE[dtype]
    values = num_k * width
    assert torch.equal(got[..., -values:], wide[..., -values - 9 : -9])
    assert not torch.equal(got[..., :width], wide[..., :width])


@each_dtype
@pytest.mark.parametrize("width", [7, 1024, 1100])
@pytest.mark.parametrize("kind", MLP_KINDS)
def test_activated(kind, width, dtype):
    y = normal(2, 3, 2 * width, dtype=dtype)
    got, wanted = (module.activated(y, kind) for module in (pointwise, naive))
    assert got.shape == wanted.shape and relative_error(got, wanted) < TOLERANCE[dtype]


@each_dtype
@pytest.mark.parametrize("own, other", [(64, 64), (100, 20), (30, 500)])
def test_the_norm_of_two_next_to_each_other(own, other, dtype):
    x, beside = normal(2, 3, own, dtype=dtype), normal(2, 3, other, seed=1, dtype=dtype)
    weight = normal(own + other, seed=2, dtype=dtype)
    for added in (None, normal(1, 2, 3, own, seed=3, dtype=dtype)):
        got = pointwise.add_rms_norm(x, added, weight, 1e-5, beside)
        wanted = naive.add_rms_norm(x, added, weight, 1e-5, beside)
        assert got[0].shape == x.shape and relative_error(got[0], wanted[0]) < TOLERANCE[dtype]
        assert relative_error(got[1], wanted[1]) < TOLERANCE[dtype]


def test_advance():
    ours, theirs = (cache_state_of([5, 9, 0], [[0, 1], [], [0]], 1, 3) for _ in range(2))
    pointwise.advance(ours)
    naive.advance(theirs)
    for name in ("length", "path", "path_length", "variant", "parity"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
