"""Products by either library against fp64: one rounding to the stored type, and fp32 sums."""

import pytest
import torch
from kernel_cases import DEVICE, normal, relative_error

from stree_kernels import naive, products

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("outputs", [96, 200, 256])
@pytest.mark.parametrize("rows", [(1, 1), (1, 31), (4, 8), (64,), (3, 32), (1, 97)], ids=str)
def test_linear(rows, outputs, dtype):
    x, weight = normal(*rows, 200, dtype=dtype), normal(outputs, 200, seed=1, dtype=dtype)
    got = products.linear(x, weight)
    assert got.shape == (*rows, outputs) and got.dtype == dtype and got.is_contiguous()
    assert relative_error(got, naive.linear(x.double(), weight.double())) < TOLERANCE[dtype]


def test_linear_of_rows_that_lie_apart():
    x = normal(2, 40, 300, dtype=torch.bfloat16)[:, 4:, :128]
    weight = normal(64, 128, seed=1, dtype=torch.bfloat16)
    wanted = naive.linear(x.double(), weight.double())
    assert relative_error(products.linear(x, weight), wanted) < TOLERANCE[torch.bfloat16]


@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA graphs")
def test_linear_in_a_graph_sees_no_memory_of_it():
    """What stands in for a bias outlives the graph in which it was first used."""
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
