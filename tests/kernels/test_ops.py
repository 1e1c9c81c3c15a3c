"""Fused kernels serve a call where they can, else plain PyTorch does, with one warning."""

import importlib.util
import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch

import stree
from stree_kernels import naive, ops
from stree_kernels.shapes import GatedDeltaShape, MixerShape

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Pretend a GPU, with its compute capability."""
    state = {"capability": (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: state["capability"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("STREE_KERNELS", raising=False)
    fused = ops.fused  # a test may replace it
    fused.cache_clear()
    yield state
    fused.cache_clear()


@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
def test_fused_where_it_can(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ops.fused(CUDA, dtype, ops.MAX_DIM)
        assert not ops.fused(torch.device("cpu"), dtype)


def test_plain_when_asked_for(monkeypatch):
    monkeypatch.setenv("STREE_KERNELS", "naive")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not ops.fused(CUDA, torch.bfloat16)


@pytest.mark.parametrize(
    ("reason", "dtype", "dim", "capability"),
    [
        ("they have no torch.float64", torch.float64, 64, (9, 0)),
        ("Old GPU is older than compute capability 8.0", torch.float16, 64, (7, 5)),
        ("a dimension of 512 is above their 256", torch.bfloat16, 512, (9, 0)),
    ],
)
def test_a_gpu_that_cannot_is_warned_about_once(gpu, reason, dtype, dim, capability):
    gpu["capability"] = capability
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not any(ops.fused(CUDA, dtype, dim) for _ in range(3))  # found out once
    assert [str(each.message) for each in caught] == [
        f"models run on plain PyTorch, not on the fused kernels: {reason}"
    ]


def test_without_triton(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="triton is not installed"):
        assert not ops.fused(CUDA, torch.bfloat16)


def test_on_a_cpu_an_op_is_its_twin():
    x, weight = torch.randn(2, 3, 8), torch.randn(5, 8)
    assert torch.equal(ops.linear(x, weight), naive.linear(x, weight))
    assert torch.equal(ops.linear_parts(x, weight)[0], naive.linear(x, weight))


def test_an_op_is_the_kernel_of_its_twins_name(monkeypatch):
    """Decide by the tensor that the op names, by the given dtype and by the largest dimension."""
    asked = []

    def fused(device, dtype, largest_dim):
        asked.append((dtype, largest_dim))
        return True

    monkeypatch.setattr(ops, "fused", fused)
    monkeypatch.setattr(ops, "_kernel", lambda module, name: lambda *_: (module, name))
    ids, half = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.float16)
    assert ops.gated(half, half) == ("pointwise", "gated")
    assert ops.linear_parts(None, half) == ("products.short", "linear_parts")
    assert ops.build_topology(ids, 3, None) == ("sampling.dynamic_trees", "build_topology")
    keys = torch.zeros(1, 1, 1, 64)
    assert ops.attend_tree(half, keys) == ("attention.tree_attention", "attend_tree")
    assert asked == [(half.dtype, 0), (half.dtype, 0), (torch.float32, 0), (half.dtype, 64)]


def test_every_op_has_a_twin_and_a_kernel_of_its_name():
    pytest.importorskip("triton")
    wrapped = {name: op for name, op in vars(ops).items() if hasattr(op, "__wrapped__")}
    del wrapped["fused"]
    for name, op in wrapped.items():
        assert op.__wrapped__ is getattr(naive, name)
    own = {name for name, each in vars(ops).items() if inspect.isfunction(each)
           and each.__module__ == ops.__name__ and not name.startswith("_")}
    assert own - {"current", "new_derived", "bucket"} <= set(vars(naive))


def test_what_callers_keep_and_read_follows_from_the_kernels(monkeypatch):
    """The engine asks for memory and for a multiple of slots, not which kernels serve."""
    rows = torch.randn(2, 3, 3 + 5, 20)
    shapes = [MixerShape(4, 8, 6, 2, 1, 1, width=4), GatedDeltaShape(4, 2, 3, 8, width=4)]
    assert [ops.new_derived(shape, rows) for shape in shapes] == [None, None]
    assert ops.bucket(1000, rows.device, rows.dtype) == ops.BUCKET
    assert ops.bucket(100, rows.device, rows.dtype) == 100
    monkeypatch.setattr(ops, "fused", lambda *_: True)
    for shape, channels in zip(shapes, (2 * 8 + 6, 2 * 3 + 2 * 3), strict=True):
        derived = ops.new_derived(shape, rows)
        assert derived is not None
        assert derived.convolved.shape == (2, 3, 5, channels)
        assert derived.convolved.dtype == rows.dtype
        assert derived.decays.shape == (2, 3, 2, 5, 4) and derived.decays.dtype == torch.float32
    assert ops.bucket(1000, rows.device, rows.dtype) == 1000
    files = list(Path(stree.__file__).parent.rglob("*.py"))
    assert len(files) > 50
    asking = re.compile(r"\bops\.fused\b|\bimport .*\bfused\b|STREE_KERNELS")
    assert [path for path in files if asking.search(path.read_text(encoding="utf-8"))] == []


def test_the_page_of_ops_says_whose_twins_are_where():
    tests = Path(__file__).parent
    kernels = tests.parents[1] / "kernels" / "stree_kernels"
    lines = (kernels.parent / "ops.md").read_text(encoding="utf-8").splitlines()
    rows = [re.findall(r"`([\w/]+\.py)`", line) for line in lines if line.startswith("| `naive/")]
    files = {path.relative_to(kernels).as_posix() for path in (kernels / "naive").rglob("*.py")}
    assert {row[0] for row in rows} == files - {"naive/__init__.py", "naive/dtypes.py"}
    named = {name for row in rows for name in row[1:]}
    assert all((kernels / name).exists() or (tests / name).exists() for name in named)
    fused = {
        path.relative_to(kernels).as_posix()
        for path in kernels.rglob("*.py")
        if "@triton.jit" in path.read_text("utf-8")
    }
    assert fused - {"launch.py"} <= named
