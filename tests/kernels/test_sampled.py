"""Sampling on the device against the functions whose law the tests enumerate, uniform by uniform.

Both invert the same cumulative laws in fp64, summed in another order: they can differ where a
uniform is within 1e-12 or so of a step of the law, which random ones do not hit.
"""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, comb, star

from stree.sampling import sample_siblings
from stree.tree import TokenTree, parents_of
from stree.verify import tables, verify_multi_step
from stree_kernels import sampled


class Given:
    """Chooses by uniforms handed out in order."""

    def __init__(self, uniforms):
        self.rest = list(uniforms)

    def __call__(self, probs):
        uniform = self.rest.pop(0)[..., None]
        cumulative = probs.cumsum(-1)
        drawn = torch.searchsorted(cumulative, uniform * cumulative[..., -1:], right=True)
        return drawn.squeeze(-1).clamp(max=probs.shape[-1] - 1)


def laws(rows, vocab, seed, support=None):
    """Peaked laws; with `support`, all but so many tokens have probability 0."""
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    if support is not None:
        threshold = scores.topk(support).values[:, -1:]
        scores = scores.masked_fill(scores < threshold, -torch.inf)
    return scores.softmax(-1).to(DEVICE)


def uniforms(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator, dtype=torch.float64).to(DEVICE)


@pytest.mark.parametrize(
    ("vocab", "count", "support"), [(7, 3, None), (1024, 4, None), (2500, 3, 2), (61, 5, 1)]
)
def test_siblings(vocab, count, support):
    for seed in range(4):
        law, drawn_by = laws(3, vocab, seed, support), uniforms(count, 3, seed=seed + 100)
        wanted = sample_siblings(law, [count] * 3, Given(drawn_by))
        got = sampled.sample_siblings(law, count, drawn_by)
        assert torch.equal(got, wanted)
        assert all(len(set(row)) == count for row in got.tolist())


@pytest.mark.parametrize("support", [None, 2], ids=["all", "two"])
@pytest.mark.parametrize("vocab", [5, 61, 5000])
@pytest.mark.parametrize("tree", [TokenTree.chain(3), TokenTree.paper(), star(5), comb(9)], ids=str)
def test_acceptance(tree, vocab, support):
    lengths = set()
    widest = max(len(nodes) for nodes in tree.children)
    children, exists, rows, widths = tables(tree, torch.device(DEVICE))
    for seed in range(6 if vocab < 1000 else 2):
        target = laws(tree.num_nodes, vocab, seed, support)
        parents = parents_of(tree)
        draft = 0.7 * target[list(parents)] + 0.3 * laws(len(parents), vocab, seed + 50)
        tokens = torch.zeros(tree.num_nodes, dtype=torch.long, device=DEVICE)
        drawn = sampled.sample_siblings(draft, widest, uniforms(widest, len(parents), seed=seed))
        for row, node in enumerate(parents):
            for place, child in enumerate(tree.children[node]):
                tokens[child] = drawn[row, place]
        given = uniforms(int(widths.sum()) + 1, seed=seed + 200)
        wanted = verify_multi_step(target, draft, tokens, tree, Given(given[:, None]))
        got = sampled.accept_sampled(target, draft, tokens, children, exists, rows, widths, given)
        count = int(wanted[1])
        lengths.add(count)
        assert int(got[1]) == count
        assert got[0][:count].tolist() == wanted[0][:count].tolist()
        assert got[2].tolist() == wanted[2].tolist()
    # Few tokens, seeds or levels may all end alike
    assert len(lengths) > 1 or vocab != 61 or tree.max_depth == 1
