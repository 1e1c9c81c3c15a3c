"""The gated short convolution in one launch against its naive twin in fp64: a tree, then another
one after an accepted path of the first, with NaN wherever nothing is.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import DEVICE, cache_state_of, comb, compare_calls, normal, relative_error, star
from kernel_cases import topology_of as topologies
from lanes import quick_first

from stree.trees.token_tree import TokenTree, balanced
from stree_kernels import naive
from stree_kernels.conv import short_conv

TREES = [TokenTree.chain(0), TokenTree.paper(), star(17), balanced([2, 2, 2, 2]), comb(33)]
# What is kept, the conv and the result are rounded; the interpreter cuts off
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8 if DEVICE == "cuda" else 3 * 2**-8}


@dataclasses.dataclass
class Case:
    projected: list[torch.Tensor]
    rows: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None

    def call(self, number, shape, topology, cache_state, first=0, nodes=slice(None)):
        module = naive if self.rows.dtype == torch.float64 else short_conv
        projected = self.projected[number][:, nodes]
        return module.short_conv_tree(
            projected, self.rows, self.weight, self.bias, topology, cache_state, first
        )

    def in_fp64(self):
        wide = [None if each is None else each.double() for each in (self.weight, self.bias)]
        return Case([each.double() for each in self.projected], self.rows.double(), *wide)


def make(num_nodes, dtype, batch, channels=70, width=3, bias=True):
    width_in = 3 * channels
    projected = [normal(batch, num_nodes, width_in + 3, seed=s, dtype=dtype) for s in range(2)]
    rows = torch.full((2, batch, width + num_nodes + 1, channels), torch.nan, device=DEVICE)
    rows = rows.to(dtype)
    rows[1, :, : width - 1] = normal(batch, width - 1, channels, seed=5, dtype=dtype)
    return Case(
        [each[..., :width_in] for each in projected], rows,
        normal(width, channels, seed=6, dtype=dtype).T,
        normal(channels, seed=7, dtype=dtype) if bias else None,
    )


def compare(trees, paths, dtype=torch.float32, width=3, **options):
    case = make(trees[0].num_nodes, dtype, len(paths), width=width, **options)
    shape = SimpleNamespace(width=width, tail=width - 1)
    compare_calls(case, case.in_fp64(), shape, trees, paths, TOLERANCE[dtype], copies=False)


@pytest.mark.parametrize(
    "tree, dtype",
    quick_first(
        [(TREES[0], torch.float32), (TREES[2], torch.bfloat16)],
        [(tree, dtype) for tree in TREES for dtype in TOLERANCE],
    ),
)
def test_trees(tree, dtype):
    path = tree.path_to(tree.num_nodes - 1)
    compare([tree], [path, path[:1], []], dtype)


@pytest.mark.parametrize("width", [2, 4])
def test_widths_and_a_tree_per_sequence(width):
    trees = [TokenTree.paper(), TokenTree.chain(12), star(13)]
    compare(trees, [[0], [0, 1, 2], [0, 5]], width=width, bias=width > 2)


def test_growing_a_tree_in_pieces():
    tree, shape = comb(20), SimpleNamespace(width=3, tail=2)
    whole, parts = (make(20, torch.float32, 1) for _ in range(2))
    topology, cache_state = topologies([tree], 3), cache_state_of([0], [[]], 1, 4, parity=1)
    growing = dataclasses.replace(cache_state, parity=1 - cache_state.parity)
    wanted = whole.call(0, shape, topology, cache_state)
    for start, end in ((0, 1), (1, 18), (18, 20)):
        nodes = slice(start, end)
        got = parts.call(0, shape, topology, cache_state if start == 0 else growing, start, nodes)
        assert relative_error(got, wanted[:, nodes]) < 1e-6
    assert torch.equal(parts.rows[0, :, :22], whole.rows[0, :, :22])
