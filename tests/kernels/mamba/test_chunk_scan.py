"""The chunk scan against the recurrence it stands for, one token at a time in fp64.

fp64 leaves about 1e-14 on sums of a few hundred terms; on CUDA mamba-ssm's kernel multiplies in
tf32 or bf16, whose rounding of 2e-3 to 8e-3 a product bounds its error.
"""

import pytest
import torch

from stree_kernels import naive
from stree_kernels.mamba.chunk_scan import _uncompiled, chunk_scan, mamba_ssm_kernel


def inputs(T, heads=4, groups=(4, 2, 4), P=8, S=16, batch=2, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    x_groups, b_groups, c_groups = groups
    return dict(
        x=normal(batch, T, x_groups, P),
        dt=torch.rand(batch, T, heads, generator=generator, dtype=dtype) * 0.5,
        A=-torch.rand(heads, generator=generator, dtype=dtype) * 8,
        B=normal(batch, T, b_groups, S),
        C=normal(batch, T, c_groups, S),
        D=normal(heads),
    )


def recurrence(x, dt, A, B, C, D, state=None, segment_ids=None):
    batch, T, heads = dt.shape
    x, B, C = (part.repeat_interleave(heads // part.shape[2], dim=2) for part in (x, B, C))
    if state is None:
        state = x.new_zeros(batch, heads, x.shape[-1], B.shape[-1])
    y = torch.empty_like(x)
    for t in range(T):
        if segment_ids is not None and t:
            new = segment_ids[:, t] != segment_ids[:, t - 1]
            state = torch.where(new[:, None, None, None], 0.0, state)
        decay = (dt[:, t] * A).exp()[..., None, None]
        state = decay * state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        y[:, t] = (state * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t]
    return y, state


@pytest.mark.parametrize("groups", [(4, 4, 4), (2, 2, 4), (4, 1, 1), (1, 2, 4)], ids=str)
@pytest.mark.parametrize("T", [1, 7, 8, 9, 63, 100])
def test_equals_the_recurrence(T, groups):
    given = inputs(T, groups=groups)
    state = torch.randn(2, 4, 8, 16, dtype=torch.float64)
    y, last = chunk_scan(**given, chunk_size=8, initial_state=state)
    wanted, wanted_last = recurrence(**given, state=state)
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-11)
    torch.testing.assert_close(last, wanted_last, rtol=0, atol=1e-11)


def test_chunks_are_no_longer_than_the_sequence():
    """Else 10⁸ × 10⁸ numbers a head for four tokens."""
    given = inputs(4)
    y, last = chunk_scan(**given, chunk_size=10**8)
    wanted, wanted_last = recurrence(**given)
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-11)
    torch.testing.assert_close(last, wanted_last, rtol=0, atol=1e-11)


@pytest.fixture
def mamba_ssm_twin(monkeypatch):
    """In the place of mamba-ssm's kernel, and as strict: B and C have one number of groups, x has
    one a head. Notes the chunk sizes."""
    asked = []

    def kernel(x, dt, A, B, C, chunk_size, *, D, initial_states, seq_idx, return_final_states):
        assert B.shape == C.shape and x.shape[2] == dt.shape[2] and dt.shape[2] % B.shape[2] == 0
        asked.append(chunk_size)
        return naive.chunk_scan(
            x, dt, A, B, C, D,
            chunk_size=chunk_size, initial_state=initial_states, segment_ids=seq_idx,
        )

    monkeypatch.setattr("stree_kernels.mamba.chunk_scan.mamba_ssm_kernel", lambda: kernel)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    return asked


@pytest.mark.parametrize("groups", [(12, 2, 3), (4, 6, 4), (1, 1, 12), (6, 4, 4)], ids=str)
def test_groups_through_mamba_ssm(mamba_ssm_twin, groups):
    """In fp32, whose rounding leaves some 1e-6 on sums of size 10."""
    given = inputs(21, heads=12, groups=groups, dtype=torch.float32)
    y, last = chunk_scan(**given, chunk_size=8)
    wanted, wanted_last = recurrence(**given)
    torch.testing.assert_close(y, wanted, rtol=0, atol=2e-5)
    torch.testing.assert_close(last, wanted_last, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("T", "chunk_size", "given"),
    [(4, 10**8, 256), (4, 64, 64), (300, 10**8, 512), (300, 256, 256), (512, 4096, 512)],
)
def test_chunks_through_mamba_ssm(mamba_ssm_twin, T, chunk_size, given):
    chunk_scan(**inputs(T, dtype=torch.float32), chunk_size=chunk_size)
    assert mamba_ssm_twin == [given]


@pytest.mark.parametrize("chunk_size", [4, 16, 64])
def test_packed_samples_do_not_leak(chunk_size):
    given = inputs(40)
    segment_ids = torch.tensor([[0] * 8 + [1] * 1 + [2] * 23 + [3] * 8, [0] * 15 + [1] * 25])
    y, last = chunk_scan(**given, chunk_size=chunk_size, segment_ids=segment_ids)
    wanted, wanted_last = recurrence(**given, segment_ids=segment_ids)
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-11)
    torch.testing.assert_close(last, wanted_last, rtol=0, atol=1e-11)
    given["x"][0, :9] = 1e30  # the first two samples of row 0: nobody else may notice
    again, _ = chunk_scan(**given, chunk_size=chunk_size, segment_ids=segment_ids)
    assert torch.equal(again[0, 9:], y[0, 9:])


def test_gradients():
    given = inputs(10, heads=2, groups=(1, 2, 2), P=2, S=3, batch=1)
    segment_ids = torch.tensor([[0] * 4 + [1] * 6])
    leaves = [value.requires_grad_() for value in given.values()]

    def run(*values):
        return naive.chunk_scan(*values, chunk_size=4, segment_ids=segment_ids)

    assert torch.autograd.gradcheck(run, leaves)


def test_steep_decay_stays_finite():
    """exp(c_i − c_j) overflows off the causal mask when dt·A is large."""
    given = inputs(64, dtype=torch.float32)
    given["A"] = torch.full((4,), -400.0)
    leaves = [value.requires_grad_() for value in given.values()]
    y, _ = naive.chunk_scan(*leaves, chunk_size=64)
    y.sum().backward()
    assert y.isfinite().all() and all(leaf.grad.isfinite().all() for leaf in leaves)


@pytest.mark.gpu
@pytest.mark.skipif(mamba_ssm_kernel() is None, reason="needs mamba-ssm")
@pytest.mark.parametrize("heads, groups", [(4, (2, 2, 4)), (6, (6, 2, 3))], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mamba_ssm_kernel_agrees(dtype, heads, groups):
    given = inputs(200, heads=heads, groups=groups, P=64, S=64)
    segment_ids = torch.tensor([[0] * 90 + [1] * 110, [0] * 200])
    wanted, _ = recurrence(**given, segment_ids=segment_ids)
    narrow = {
        name: value.cuda().to(dtype if name in "xBC" else torch.float32)
        for name, value in given.items()
    }
    y, _ = chunk_scan(**narrow, chunk_size=64, segment_ids=segment_ids.cuda())
    error = (y.double().cpu() - wanted).norm() / wanted.norm()
    assert error < (2e-3 if dtype == torch.float32 else 2e-2), error


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_the_compiler_is_asked_to_keep_out_only_where_the_kernel_can_be(cuda, monkeypatch):
    """Asking imports it, for a second, in every command."""
    asked = []
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.compiler, "disable", lambda function: asked.append(function) or len)
    assert (_uncompiled(max) is len) == (cuda is not None) and len(asked) == (cuda is not None)
