"""Products by either library against fp64: one rounding to the stored type, and fp32 sums."""

import pytest
import torch
from kernel_cases import DEVICE, normal, relative_error
from lanes import quick_first

from stree_kernels import naive
from stree_kernels.products import linear as products

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("outputs", [96, 200, 256])
@pytest.mark.parametrize("rows", [(1, 1), (1, 31), (4, 8), (64,), (3, 32), (1, 97)], ids=str)
def test_linear(rows, outputs, dtype):
    x, weight = normal(*rows, 200, dtype=dtype), normal(outputs, 200, seed=1, dtype=dtype)
    got = products.linear(x, weight)
    assert got.shape == (*rows, outputs) and got.dtype == dtype and got.is_contiguous()
    assert relative_error(got, naive.linear(x.double(), weight.double())) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("inputs", "dtype"),
    quick_first(
        [*((40, dtype) for dtype in TOLERANCE), (4100, torch.bfloat16)],
        [(4100, torch.float16), (8200, torch.float16)],  # which differ in their type alone
        [(4100, torch.float32), (8200, torch.float32), (8200, torch.bfloat16)],
    ),
)
@pytest.mark.parametrize("rows", [(1, 1), (17,), (2, 24), (64,), (65,)], ids=str)
def test_linear_parts(rows, inputs, dtype):
    """The norm that follows adds up the parts of the sum, rounded once."""
    x, weight = normal(*rows, inputs, dtype=dtype), normal(200, inputs, seed=1, dtype=dtype)
    parts = products.linear_parts(x, weight)
    assert parts.shape[1:] == (*rows, 200) and parts.is_contiguous()
    several = inputs > 40 and 16 < x.numel() // inputs <= 64 and dtype != torch.float32
    assert (len(parts) > 1) == several
    assert parts.dtype == (dtype if len(parts) == 1 else torch.float32)
    wanted = naive.linear(x.double(), weight.double())
    assert relative_error(parts.sum(0), wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1, 16, 40, 70])
def test_linear_wide(rows, dtype):
    """Nothing is rounded but sums in fp32: experts are chosen by them."""
    x, weight = normal(rows, 200, dtype=dtype), normal(20, 200, seed=1, dtype=dtype)
    got = products.linear_wide(x, weight)
    assert got.dtype == torch.float32 and got.shape == (rows, 20)
    assert relative_error(got, naive.linear_wide(x.double(), weight.double())) < 1e-5


def test_linear_of_rows_that_lie_apart():
    x = normal(2, 40, 300, dtype=torch.bfloat16)[:, 4:, :128]
    weight = normal(64, 128, seed=1, dtype=torch.bfloat16)
    wanted = naive.linear(x.double(), weight.double())
    assert relative_error(products.linear(x, weight), wanted) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu  # CUDA graphs
def test_linear_in_a_graph_sees_no_memory_of_it():
    """The stand-in for a bias outlives the graph in which it was first used."""
    x, weight = (normal(64, 640, seed=seed, dtype=torch.bfloat16) for seed in (0, 1))
    wanted = products.linear(x, weight)
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = products.linear(x, weight)
        graph.replay()
        assert torch.equal(got, wanted)
        del got, graph
        torch.full((1 << 20,), float("nan"), device="cuda")
        assert torch.equal(products.linear(x, weight), wanted)


@pytest.mark.quick(30)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("inputs", "width"), [(64, 512), (200, 100), (96, 3), (64, 700)])
@pytest.mark.parametrize("rows", [(1, 1), (2, 5), (16,), (1, 17), (48,)], ids=str)
def test_linear_swiglu(rows, inputs, width, dtype):
    """Gate, up, silu and their product are rounded; the interpreter cuts off: twice as far."""
    x = normal(*rows, inputs, dtype=dtype)
    weight = normal(2 * width, inputs, seed=1, dtype=dtype) / inputs**0.5
    got = products.linear_swiglu(x, weight)
    assert got.shape == (*rows, width) and got.dtype == dtype
    wanted = naive.linear_swiglu(x.double(), weight.double())
    roundings = 3 if DEVICE == "cuda" else 6
    assert relative_error(got, wanted) < roundings * TOLERANCE[dtype]


@pytest.mark.quick(12)
@pytest.mark.parametrize(("dtype", "kind"), [
    (torch.float32, "geglu"), (torch.bfloat16, "geglu"), (torch.bfloat16, "swiglu"),
])
@pytest.mark.parametrize(("inputs", "width", "rank"), [(64, 512, 8), (200, 100, 40)])
@pytest.mark.parametrize("rows", [(1, 1), (2, 5), (48,), (65,)], ids=str)
def test_linear_adapted(rows, inputs, width, rank, dtype, kind):
    """Both products of many rows and their sum are rounded, besides what SwiGLU rounds."""
    x, low = normal(*rows, inputs, dtype=dtype), normal(*rows, rank, seed=2, dtype=dtype)
    weight = normal(2 * width, inputs, seed=1, dtype=dtype) / inputs**0.5
    up = normal(2 * width, rank, seed=3, dtype=dtype) / rank**0.5
    got = products.linear_adapted(x, weight, low, up, kind)
    assert got.shape == (*rows, width) and got.dtype == dtype
    wide = (each.double() for each in (x, weight, low, up))
    wanted = naive.linear_adapted(*wide, kind)
    assert relative_error(got, wanted) < (4 if DEVICE == "cuda" else 8) * TOLERANCE[dtype]


@pytest.mark.parametrize("op", [products.linear, products.linear_swiglu])
def test_a_row_does_not_depend_on_the_others(op):
    """Hence a tree and a step of one token round alike, up to attention and the scan."""
    x, weight = (normal(rows, 160, seed=rows, dtype=torch.bfloat16) for rows in (16, 300))
    together = op(x, weight)
    for rows in (1, 2, 13):
        assert torch.equal(op(x[:rows], weight), together[:rows])
