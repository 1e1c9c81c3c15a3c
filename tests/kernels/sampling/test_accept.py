"""Acceptance: the kernel, its twin and a walk in Python agree on every tree."""

import pytest
import torch
from kernel_cases import DEVICE, comb, star
from toys import random_tree

from stree.trees.token_tree import TokenTree
from stree_kernels import naive
from stree_kernels.sampling import accept

TREES = [
    TokenTree.chain(0), TokenTree.chain(6), TokenTree.paper(), star(40), comb(100),
    random_tree(1000), random_tree(2048),
]


def walk(best, tokens, tree):
    """Return the accepted path, and the target's choice at its end."""
    path = [0]
    while True:
        wanted = best[path[-1]]
        child = next((node for node in tree.children[path[-1]] if tokens[node] == wanted), None)
        if child is None:
            return path, wanted
        path.append(child)


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{tree.name}-{tree.num_nodes}")
def test_walks(tree):
    """Row 0's is the deepest, 1 and 2 have bad target logits, 2 and 3 a bad draft, 4 is idle.

    A row whose logits are bad in both models is the target's error.
    """
    batch, N, longest = 5, tree.num_nodes, tree.max_depth + 1
    generator = torch.Generator().manual_seed(N)
    best, tokens = (torch.randint(3, (batch, N), generator=generator).to(DEVICE) for _ in range(2))
    for node, parent in enumerate(tree.parents[1:], start=1):  # one row accepts the last node
        if node in tree.path_to(N - 1):
            tokens[0, node] = best[0, parent]
    highest = torch.zeros(batch, N, device=DEVICE)
    highest[1, N // 2], highest[2, 0] = torch.nan, torch.inf
    finite = torch.ones(batch, 3, dtype=torch.bool, device=DEVICE)
    finite[2:4, 1] = False
    active = torch.tensor([True] * 4 + [False], device=DEVICE)
    other = TokenTree((-1, *(max(0, node - 254) for node in range(N - 1))))  # of rows 2 and 3
    trees = [tree, tree, other, other, tree]
    parents = torch.tensor([each.parents for each in trees], device=DEVICE)
    wide = torch.full((batch, N + 2), -9, device=DEVICE)
    wide[:, :N] = tokens
    for function in (naive.accept_choices, accept.accept_choices):
        for given in (finite, None):
            path, block = (torch.full((batch, longest + 2), -7, device=DEVICE) for _ in range(2))
            report = torch.full((batch, 2 * longest + 2), -7, device=DEVICE)
            path_length = torch.full((batch,), -7, device=DEVICE)
            position = torch.arange(batch, device=DEVICE)
            root = torch.full((batch, 1), -7, device=DEVICE)
            function(
                best, highest, wide[:, :N], parents, given, active,
                path, path_length, block, position, root, report,
            )
            for row in range(batch - 1):
                nodes, bonus = walk(best[row].tolist(), tokens[row].tolist(), trees[row])
                wanted = [*tokens[row, nodes[1:]].tolist(), bonus]
                unwritten = [-7] * (longest - len(nodes))
                code = [1, 0, 0, 1 if given is None else -1][row]
                assert path[row].tolist() == [*nodes, *unwritten, -7, -7]
                assert block[row].tolist() == [len(nodes), *wanted, *unwritten, -7]
                assert report[row].tolist() == [
                    code, len(nodes), *wanted, *unwritten, *nodes, *unwritten,
                ]
                assert int(path_length[row]) == len(nodes)
                assert int(position[row]) == row + len(nodes) and int(root[row]) == bonus
            assert path_length[4] == 0 and report[4, 1] == 0 and position[4] == 4 and root[4] == -7
            assert (block[4] == -7).all() and (path[4] == -7).all()
