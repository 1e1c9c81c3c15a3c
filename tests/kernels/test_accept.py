"""Greedy acceptance: the kernel, its twin and the host's walk agree on every tree."""

import pytest
import torch
from kernel_cases import DEVICE, comb, star

from stree.tree import TokenTree
from stree.verify import verify_greedy
from stree_kernels import accept, naive

TREES = [TokenTree.chain(0), TokenTree.chain(6), TokenTree.paper(), star(40), comb(100)]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{tree.name}-{tree.num_nodes}")
def test_walks(tree):
    batch, N, longest = 4, tree.num_nodes, tree.max_depth + 1
    generator = torch.Generator().manual_seed(N)
    best, tokens = (torch.randint(3, (batch, N), generator=generator).to(DEVICE) for _ in range(2))
    for node, parent in enumerate(tree.parents[1:], start=1):  # one row accepts the last node
        if node in tree.path_to(N - 1):
            tokens[0, node] = best[0, parent]
    highest = torch.zeros(batch, N, device=DEVICE)
    highest[1, N // 2], highest[2, 0] = torch.nan, torch.inf
    finite = torch.tensor([[True] * 3, [True] * 3, [True] * 3, [True, False, True]], device=DEVICE)
    parents = torch.tensor(tree.parents, device=DEVICE)
    for function in (naive.accept_greedy, accept.accept_greedy):
        path, block = (torch.full((batch, longest + 2), -7, device=DEVICE) for _ in range(2))
        report = torch.full((batch, 2 * longest + 3), -7, device=DEVICE)
        path_length = torch.zeros(batch, dtype=torch.long, device=DEVICE)
        function(
            best, highest, tokens, parents, finite,
            path, path_length, block[:, : 1 + longest], report,
        )  # fmt: skip
        for row in range(batch):
            nodes, bonus = verify_greedy(best[row].tolist(), tokens[row].tolist(), tree)
            wanted = [*tokens[row, nodes[1:]].tolist(), bonus]
            assert path[row].tolist() == nodes + [-7] * (longest + 2 - len(nodes))
            unwritten = [-7] * (longest - len(nodes))
            assert block[row].tolist() == [len(nodes), *wanted, *unwritten, -7]
            assert report[row].tolist() == [
                row == 0, len(nodes), *wanted, *unwritten, *nodes, *unwritten, -7,
            ]  # fmt: skip
            assert int(path_length[row]) == len(nodes)
