"""Trees that are built on the device: exactly those of the host, and of the naive twins."""

import itertools
import math
import random

import pytest
import torch
from kernel_cases import DEVICE, comb, star, topology_of
from lanes import quick_first
from toys import random_tree

from stree import TokenTree
from stree_kernels import naive
from stree_kernels.contracts import Topology
from stree_kernels.sampling import dynamic_trees as growth

MODULES = [naive, growth]


def blank(batch: int, size: int, width: int) -> Topology:
    """Fill a topology, so that what is not written shows."""
    return Topology(
        torch.ones(batch, size, size, dtype=torch.bool, device=DEVICE),
        torch.full((batch, size), 99, dtype=torch.int32, device=DEVICE),
        torch.full((batch, size, width), 99, dtype=torch.int32, device=DEVICE),
    )


SIZES = [(1, 4), (2, 2), (7, 1), (16, 4), (33, 2), (256, 4), (257, 4)]
LARGE = [(1000, 2), (2048, 4)]  # takes the interpreter up to a minute


@pytest.mark.quick(8)
@pytest.mark.parametrize(
    ("num_nodes", "width", "module"),
    quick_first(
        [*((*size, module) for size in SIZES for module in MODULES),
         *((*size, naive) for size in LARGE)],
        [(*size, growth) for size in LARGE],
    ),
)
def test_a_topology_is_that_of_the_host_s_trees(num_nodes, width, module):
    trees = [random_tree(num_nodes, num_nodes)]
    if num_nodes <= 256:
        trees.append(star(num_nodes))
    if num_nodes < 256:  # its depth takes the interpreter long
        trees.append(comb(num_nodes))
    wanted = topology_of(trees, width)
    parents = torch.tensor([[*tree.parents, 77] for tree in trees], device=DEVICE)[:, :num_nodes]
    got = blank(len(trees), num_nodes, width)
    module.build_topology(parents, max(tree.max_depth for tree in trees), got)
    for name in ("ancestors", "depths", "windows"):
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name


@pytest.mark.parametrize("module", MODULES)
def test_several_roots_and_padding_see_nothing_of_each_other(module):
    """A drafter reads such trees: the root's children begin trees of their own."""
    parents = torch.tensor([[-1, -1, 0, 2, -2]], device=DEVICE)
    got = blank(1, 5, 3)
    module.build_topology(parents, 2, got)
    assert got.depths[0].tolist() == [0, 0, 1, 2, 0]
    assert [row.nonzero()[:, 0].tolist() for row in got.ancestors[0]] == [
        [0], [1], [0, 2], [0, 2, 3], [4],
    ]
    assert got.windows[0].tolist() == [[0, 1, 2], [0, 1, 3], [1, 2, 4], [2, 4, 5], [0, 1, 6]]


def random_values(batch: int, size: int, kind: str) -> torch.Tensor:
    values = -torch.rand(batch, size, generator=torch.Generator().manual_seed(size)) * 9
    if kind == "ties":
        values = values.round()
    elif kind == "extremes":
        values[:, ::3], values[:, 1::5], values[:, 2::7] = -torch.inf, -0.0, torch.nan
    return values.to(DEVICE)


@pytest.mark.quick(6)
@pytest.mark.parametrize("kind", ["random", "ties", "extremes"])
@pytest.mark.parametrize(
    ("first", "end", "count"), [(1, 4, 3), (5, 69, 8), (2, 3, 1), (1, 1001, 1)]
)
def test_the_best_nodes_of_a_level_are_picked(first, end, count, kind):
    """One pool has values beyond the level that must not count."""
    values = random_values(3, end + 2, kind)
    values[1, [0, end, end + 1]] = 0.0
    drawn_by = torch.arange(end + 2, device=DEVICE) // 3
    results = []
    for module in MODULES:
        wide = torch.full((2, 3, count + 2), -7, device=DEVICE)
        picks, parents = wide[:, :, 1:-1]
        module.pick_level(values, drawn_by, first, end, picks, parents)
        assert (wide[:, :, [0, -1]] == -7).all()
        results.append(wide.clone())
        for row, chosen in enumerate(picks.tolist()):
            ranked = sorted(
                range(first, end), key=lambda n: (-values[row, n].nan_to_num(-torch.inf), n)
            )
            assert chosen == sorted(ranked[:count])
            assert parents[row].tolist() == [n // 3 - 1 for n in chosen]
    assert torch.equal(*results)


@pytest.mark.parametrize("kind", ["random", "ties", "sure"])
@pytest.mark.parametrize(
    ("width", "depth", "num_nodes"), [(1, 3, 4), (3, 1, 3), (3, 4, 9), (8, 5, 40)]
)
def test_the_best_nodes_of_a_pool_are_a_tree(width, depth, num_nodes, kind):
    """The pool has `depth` levels, each of whose `width` nodes with children draws `width`."""
    size = 1 + width + width * width * (depth - 1)
    drawn_by = [0, *[0] * width]
    pool_depths = [0, *[1] * width]
    for level in range(1, depth):
        for at in range(width):
            drawn_by += [1 + (level - 1) * width + at] * width
            pool_depths += [level + 1] * width
    rng = random.Random(size)
    drawn = torch.zeros(2, 1 + width * (depth - 1), dtype=torch.long)
    for row in drawn:
        for level in range(1, depth):
            of_level = [node for node in range(size) if pool_depths[node] == level]
            start = 1 + (level - 1) * width
            row[start : start + width] = torch.tensor(sorted(rng.sample(of_level, width)))
    steps = random_values(2, size, "ties" if kind == "ties" else "random")
    steps = steps * (kind != "sure")
    values = torch.zeros(2, size, device=DEVICE)
    above = torch.zeros(2, size, dtype=torch.long)
    for row in range(2):
        for node in range(1, size):
            above[row, node] = drawn[row, drawn_by[node]]
            values[row, node] = values[row, above[row, node]] + steps[row, node]
    tokens = torch.randint(100, (2, size), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    constants = torch.tensor(drawn_by, device=DEVICE), drawn.to(DEVICE)
    for module, least in itertools.product(MODULES, (-math.inf, -4.5)):
        got, parents, inner = torch.full((3, 2, num_nodes), -7, device=DEVICE)
        depths = torch.full((2, num_nodes), -7, dtype=torch.int32, device=DEVICE)
        module.pick_tree(
            values, *constants, torch.tensor(pool_depths, dtype=torch.int32, device=DEVICE),
            tokens, got, parents, depths, inner, least,
        )
        for row in range(2):
            ranked = sorted(range(size), key=lambda node: (-values[row, node], node))
            picks = ranked[:num_nodes]
            wanted = [-1] + [picks.index(above[row, node]) for node in picks[1:]]
            grown = sum(values[row, node] >= least for node in picks)
            absent = [-2] * (num_nodes - grown)
            assert parents[row].tolist() == wanted[:grown] + absent
            of_tree = TokenTree(tuple(wanted)).depths[:grown]
            assert depths[row].tolist() == [*of_tree, *[0] * len(absent)]
            places = drawn[row].tolist()
            assert inner[row].tolist() == [
                places.index(node) if node in places else 0 for node in picks
            ]
            assert got[row].tolist() == tokens[row, picks].tolist()
