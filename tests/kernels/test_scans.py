"""The scans of training and prefill against the recurrences they stand for, a token at a time.

In fp64 rounding leaves about 1e-14 on sums of a few hundred terms; the gated delta rule's
triangular system multiplies it by its condition, below 1e3 here. transformers computes in fp32,
which leaves about 1e-6. The packages' kernels multiply in tf32 or bf16, whose rounding of 2e-3 to
8e-3 a product bounds their error.
"""

import inspect

import pytest
import torch
from kernel_cases import relative_error

from stree_kernels import naive
from stree_kernels.gated_delta.scan import flash_linear_attention_kernel, gated_delta_scan
from stree_kernels.mamba.chunk_scan import chunk_scan, mamba_ssm_kernel, uncompiled

FP64 = dict(rtol=0, atol=1e-11)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Mamba:
    value, naive_scan, scan = "x", staticmethod(naive.chunk_scan), staticmethod(chunk_scan)

    @staticmethod
    def inputs(T, heads=4, groups=(4, 2, 4), P=8, S=16, batch=2, dtype=torch.float64):
        x_groups, b_groups, c_groups = groups
        generator = torch.Generator().manual_seed(9)
        dt, A = (torch.rand(*shape, generator=generator) for shape in ((batch, T, heads), (heads,)))
        given = dict(
            x=normal(batch, T, x_groups, P), dt=dt * 0.5, A=A * -8,
            B=normal(batch, T, b_groups, S, seed=1), C=normal(batch, T, c_groups, S, seed=2),
            D=normal(heads, seed=3),
        )
        return {name: value.to(dtype) for name, value in given.items()}

    @staticmethod
    def start(x, dt, A, B, C, D):
        return x.new_zeros(len(x), dt.shape[2], x.shape[-1], B.shape[-1])

    @staticmethod
    def step(state, t, x, dt, A, B, C, D):
        x, B, C = (each[:, t].repeat_interleave(len(A) // each.shape[2], 1) for each in (x, B, C))
        dt = dt[:, t, :, None, None]
        state = (dt * A[:, None, None]).exp() * state + dt * x[..., None] * B[:, :, None]
        return state, (state * C[:, :, None]).sum(-1) + D[:, None] * x

    @staticmethod
    def steep(given):
        given["A"] = torch.full_like(given["A"], -400.0)


class GatedDelta:
    value = "v"
    naive_scan, scan = staticmethod(naive.gated_delta_scan), staticmethod(gated_delta_scan)

    @staticmethod
    def inputs(T, heads=4, key_heads=2, K=6, V=5, batch=2, strongest=1, dtype=torch.float64):
        given = dict(
            q=normal(batch, T, key_heads, K, seed=1), k=normal(batch, T, key_heads, K, seed=2),
            v=normal(batch, T, heads, V, seed=3), log_decay=-normal(batch, T, heads, seed=4).abs(),
            beta=normal(batch, T, heads, seed=5).sigmoid() * strongest,
        )
        return {name: value.to(dtype) for name, value in given.items()}

    @staticmethod
    def start(q, k, v, log_decay, beta):
        return v.new_zeros(*beta.shape[::2], k.shape[-1], v.shape[-1])

    @staticmethod
    def step(state, t, q, k, v, log_decay, beta):
        q, k = (each[:, t].repeat_interleave(v.shape[2] // each.shape[2], 1) for each in (q, k))
        q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
        state = log_decay[:, t, :, None, None].exp() * state
        update = beta[:, t, :, None] * (v[:, t] - (k[:, :, None] @ state)[..., 0, :])
        state = state + k[..., None] * update[..., None, :]
        return state, (q[:, :, None] @ state)[..., 0, :] * q.shape[-1] ** -0.5

    @staticmethod
    def steep(given):
        given["log_decay"] = given["log_decay"] * 400


def recurrence(kind, given, state=None, segment_ids=None):
    state, outputs = kind.start(**given) if state is None else state, []
    for t in range(given[kind.value].shape[1]):
        if segment_ids is not None and t:
            new = segment_ids[:, t] != segment_ids[:, t - 1]
            state = torch.where(new[:, None, None, None], 0.0, state)
        state, y = kind.step(state, t, **given)
        outputs.append(y)
    return torch.stack(outputs, 1), state


def agrees(got, wanted, **tolerance):
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.to(other.dtype), other, **(tolerance or FP64))


each_kind = pytest.mark.parametrize("kind", [Mamba, GatedDelta])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((Mamba, dict(groups=each)) for each in ((4, 4, 4), (2, 2, 4), (4, 1, 1), (1, 2, 4))),
        *((GatedDelta, dict(key_heads=k, strongest=s)) for k in (1, 2, 4) for s in (1, 2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("T", [1, 7, 8, 9, 63, 100])
def test_chunks_equal_the_recurrence(kind, T, options):
    given = kind.inputs(T, **options)
    state = normal(*kind.start(**given).shape, seed=6)
    agrees(kind.scan(**given, chunk_size=8, initial_state=state), recurrence(kind, given, state))


@each_kind
def test_chunks_are_no_longer_than_the_sequence(kind):
    """A long chunk would take 10⁸ × 10⁸ numbers a head for four tokens."""
    given = kind.inputs(4)
    agrees(kind.scan(**given, chunk_size=10**8), recurrence(kind, given))


@each_kind
@pytest.mark.parametrize("chunk_size", [4, 16, 64])
def test_packed_samples_do_not_leak(kind, chunk_size):
    given = kind.inputs(40)
    state = normal(*kind.start(**given).shape, seed=6)
    segment_ids = torch.tensor([[0] * 8 + [1] * 1 + [2] * 23 + [3] * 8, [0] * 15 + [1] * 25])
    options = dict(chunk_size=chunk_size, initial_state=state, segment_ids=segment_ids)
    y, last = kind.scan(**given, **options)
    agrees((y, last), recurrence(kind, given, state, segment_ids))
    given[kind.value][0, :9] = 1e30  # the first two samples of row 0: nobody else may notice
    again, _ = kind.scan(**given, **options)
    assert torch.equal(again[0, 9:], y[0, 9:])


@pytest.mark.parametrize(
    ("kind", "options"),
    [(Mamba, dict(groups=(1, 2, 2), P=2, S=3)), (GatedDelta, dict(key_heads=1, K=3, V=2))],
)
def test_gradients(kind, options):
    given = kind.inputs(7, heads=2, batch=1, **options)
    leaves = [*given.values(), normal(*kind.start(**given).shape, seed=6)]
    leaves = [value.requires_grad_() for value in leaves]
    segment_ids = torch.tensor([[0] * 3 + [1] * 4])

    def run(*values):
        return kind.naive_scan(
            *values[:-1], chunk_size=4, initial_state=values[-1], segment_ids=segment_ids
        )

    assert torch.autograd.gradcheck(run, leaves, fast_mode=kind is GatedDelta)


@each_kind
def test_steep_decay_stays_finite(kind):
    """exp(c_i − c_j) overflows off the causal mask when the decay is steep."""
    given = kind.inputs(64, dtype=torch.float32)
    kind.steep(given)
    leaves = [value.requires_grad_() for value in given.values()]
    y, _ = kind.naive_scan(*leaves, chunk_size=64)
    y.sum().backward()
    assert y.isfinite().all() and all(leaf.grad.isfinite().all() for leaf in leaves)


@pytest.mark.parametrize("T", [1, 63, 130])
@pytest.mark.parametrize(
    "name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"]
)
def test_the_gated_delta_rule_equals_transformers(name, T):
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    given = GatedDelta.inputs(T, K=32, V=16, dtype=torch.float32)
    state = normal(2, 4, 32, 16, seed=6).float()
    q, k, v, log_decay, beta = given.values()
    # Of grouped heads only newer versions know
    q, k = (each.repeat_interleave(v.shape[2] // each.shape[2], dim=2) for each in (q, k))
    in_torch = inspect.unwrap(getattr(modeling, name))  # not flash-linear-attention's
    wanted = in_torch(
        q, k, v, g=log_decay, beta=beta, initial_state=state, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    agrees(naive.gated_delta_scan(**given, initial_state=state), wanted, rtol=0, atol=1e-5)


@pytest.fixture
def mamba_ssm_twin(monkeypatch):
    """Stand in for mamba-ssm's kernel, as strict: B and C have one number of groups, x has
    one a head. Note the chunk sizes."""
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
    """In fp32 rounding leaves some 1e-6 on sums of size 10."""
    given = Mamba.inputs(21, heads=12, groups=groups, dtype=torch.float32)
    agrees(chunk_scan(**given, chunk_size=8), recurrence(Mamba, given), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("T", "chunk_size", "given"),
    [(4, 10**8, 256), (4, 64, 64), (300, 10**8, 512), (300, 256, 256), (512, 4096, 512)],
)
def test_chunks_through_mamba_ssm(mamba_ssm_twin, T, chunk_size, given):
    chunk_scan(**Mamba.inputs(T, dtype=torch.float32), chunk_size=chunk_size)
    assert mamba_ssm_twin == [given]


@pytest.fixture
def flash_linear_attention_twin(monkeypatch):
    """Stand in for flash-linear-attention's kernel, as strict: one number of heads and one
    16-bit type; one row and a state a segment where segments have bounds."""

    def kernel(
        q, k, v, g, beta, *, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    ):
        assert q.shape[2] == k.shape[2] == v.shape[2] and output_final_state
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16 and use_qk_l2norm_in_kernel
        assert g.dtype == torch.float32
        bounds = [0, q.shape[1]]
        if cu_seqlens is not None:
            assert q.shape[0] == 1 and len(initial_state) == len(cu_seqlens) - 1
            bounds, initial_state = cu_seqlens.tolist(), initial_state[:, None]
        else:
            initial_state = [initial_state]
        wide = dict(q=q, k=k, v=v, log_decay=g, beta=beta)
        parts = [
            recurrence(
                GatedDelta, {name: part[:, start:end].float() for name, part in wide.items()}, state
            )
            for start, end, state in zip(bounds, bounds[1:], initial_state, strict=False)
        ]
        return torch.cat([y for y, _ in parts], dim=1), torch.cat([state for _, state in parts])

    name = "stree_kernels.gated_delta.scan.flash_linear_attention_kernel"
    monkeypatch.setattr(name, lambda: kernel)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


@pytest.mark.parametrize("segment_ids", [None, [[0] * 8 + [2] * 13, [3] * 20 + [4]]], ids=str)
def test_through_flash_linear_attention(flash_linear_attention_twin, segment_ids):
    """Grouped heads, packed rows and initial states reach its kernel as it takes them. In fp32,
    which leaves some 1e-6, of inputs that are bf16 on both sides."""
    given = GatedDelta.inputs(21, dtype=torch.bfloat16)
    given["log_decay"] = given["log_decay"].float()
    segment_ids = None if segment_ids is None else torch.tensor(segment_ids)
    options = dict(initial_state=normal(2, 4, 6, 5, seed=6).float(), segment_ids=segment_ids)
    wide = {name: value.double() for name, value in given.items()}
    wanted = naive.gated_delta_scan(**wide, **options)
    agrees(gated_delta_scan(**given, **options), wanted, rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "options", "narrow", "kernel"),
    [
        *((Mamba, dict(heads=heads, groups=groups, P=64, S=64), dtype, mamba_ssm_kernel)
          for heads, groups in ((4, (2, 2, 4)), (6, (6, 2, 3)))
          for dtype in (torch.float32, torch.bfloat16)),
        (GatedDelta, dict(K=64, V=64), torch.bfloat16, flash_linear_attention_kernel),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_packages_kernels_agree(kind, options, narrow, kernel):
    if kernel() is None:
        pytest.skip("needs mamba-ssm or flash-linear-attention")
    given = kind.inputs(200, **options)
    segment_ids = torch.tensor([[0] * 90 + [1] * 110, [0] * 200])
    wanted, _ = recurrence(kind, given, segment_ids=segment_ids)
    cuda = {
        name: value.cuda().to(torch.float32 if name in ("dt", "A", "D") else narrow)
        for name, value in given.items()
    }
    y, _ = kind.scan(**cuda, chunk_size=64, segment_ids=segment_ids.cuda())
    assert relative_error(y.cpu(), wanted) < (2e-3 if narrow == torch.float32 else 2e-2)


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_the_compiler_is_asked_to_keep_out_only_where_the_kernel_can_be(cuda, monkeypatch):
    """Asking imports it, for a second, in every command."""
    asked = []
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.compiler, "disable", lambda function: asked.append(function) or len)
    assert (uncompiled(max) is len) == (cuda is not None) and len(asked) == (cuda is not None)
