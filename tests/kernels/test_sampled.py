"""Sampling on the device against the functions whose law the tests enumerate, uniform by uniform.

Both invert the same cumulative laws in fp64, summed in another order: they can differ where a
uniform is within 1e-12 or so of a step of the law, which random ones do not hit.
"""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, comb, star

from stree.sampling import sample_siblings, sampling_law
from stree.tree import TokenTree, balanced, parents_of
from stree.verify import level_widths, tables, verify_multi_step
from stree_kernels import naive, sampled


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("vocab", "temperature"), [(7, 1.0), (1024, 0.7), (2500, 1.3)])
def test_law(vocab, temperature, dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (8 * torch.randn(4, vocab + 3, generator=generator)).to(DEVICE, dtype)[:, :-3]
    logits[1, : vocab - 2] = -torch.inf  # whole blocks are impossible
    logits[2] += 3e4  # nothing overflows
    finite = torch.zeros(4, dtype=torch.bool, device=DEVICE)
    wanted = sampling_law(logits.cpu(), temperature).to(DEVICE)  # which divides exactly
    got = sampled.temperature_law(logits, temperature, finite)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-300)
    assert finite.all()
    assert torch.equal(sampled.temperature_law(logits, temperature, None), got)


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_rows_without_a_law(spoilt):
    logits, finite = torch.zeros(3, 1500, device=DEVICE), torch.zeros(3, device=DEVICE) != 0
    logits[1, slice(None) if spoilt == -torch.inf else slice(1400, 1401)] = spoilt
    sampled.temperature_law(logits, 1.0, finite)
    assert finite.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("vocab", "count", "support"),
    [(7, 3, None), (1024, 4, None), (2500, 3, 2), (61, 5, 1), (20, 18, 11)],
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
    children, exists, rows = tables(tree, torch.device(DEVICE))
    widths = level_widths(tree)
    for seed in range(6 if vocab < 1000 else 2):
        target = laws(tree.num_nodes, vocab, seed, support)
        parents = parents_of(tree)
        draft = 0.7 * target[list(parents)] + 0.3 * laws(len(parents), vocab, seed + 50)
        tokens = torch.zeros(tree.num_nodes, dtype=torch.long, device=DEVICE)
        drawn = sampled.sample_siblings(draft, widest, uniforms(widest, len(parents), seed=seed))
        for row, node in enumerate(parents):
            for place, child in enumerate(tree.children[node]):
                tokens[child] = drawn[row, place]
        given = uniforms(sum(widths) + 1, seed=seed + 200)
        wanted = verify_multi_step(target, draft, tokens, tree, Given(given[:, None]))
        got = sampled.accept_sampled(target, draft, tokens, children, exists, rows, widths, given)
        count = int(wanted[1])
        lengths.add(count)
        assert int(got[1]) == count
        assert got[0][:count].tolist() == wanted[0][:count].tolist()
        assert got[2].tolist() == wanted[2].tolist()
    # Few tokens, seeds or levels may all end alike
    assert len(lengths) > 1 or vocab != 61 or tree.max_depth == 1


@pytest.mark.parametrize(("vocab", "support"), [(12, None), (30, 3), (30, 6), (2500, 6)])
@pytest.mark.parametrize("tree", [star(12), balanced([7, 2], "wide")], ids=str)
def test_many_rejections(tree, vocab, support):
    """Drafts of a law of its own, of which the target wants little: with a small support it is used
    up before the siblings are."""
    widths, parents = level_widths(tree), parents_of(tree)
    widest = max(widths)
    for seed in range(3):
        target = laws(tree.num_nodes, vocab, seed)
        draft = laws(len(parents), vocab, seed + 50, support)
        tokens = torch.zeros(tree.num_nodes, dtype=torch.long, device=DEVICE)
        drawn = sampled.sample_siblings(draft, widest, uniforms(widest, len(parents), seed=seed))
        for row, node in enumerate(parents):
            for place, child in enumerate(tree.children[node]):
                tokens[child] = drawn[row, place]
                target[node, drawn[row, place]] *= 0.3
        target /= target.sum(1, keepdim=True)
        given = uniforms(sum(widths) + 1, seed=seed + 200)
        given[:-1] *= 0.02  # a child is accepted only where this is at least 1 − p / q
        wanted = verify_multi_step(target, draft, tokens, tree, Given(given[:, None]))
        where = tables(tree, torch.device(DEVICE))
        got = sampled.accept_sampled(target, draft, tokens, *where, widths, given)
        assert [each.tolist() for each in got] == [each.tolist() for each in wanted]


def test_children_go_to_their_places():
    law, drawn_by = laws(3, 1500, 0), uniforms(3, 3, seed=1)
    places = torch.tensor([[4, 1, -1], [2, -1, -1], [5, 6, 3]], device=DEVICE)
    tokens = torch.full((7,), -5, device=DEVICE)
    sampled.sample_children(law, places, drawn_by, tokens)
    drawn = sampled.sample_siblings(law, 3, drawn_by)
    assert tokens[0] == -5
    for row, rank in (places >= 0).nonzero().tolist():
        assert tokens[places[row, rank]] == drawn[row, rank]


@pytest.mark.parametrize("longest", [1, 4])
@pytest.mark.parametrize("bad", [None, "target", "draft"])
def test_settling(longest, bad):
    tokens = torch.arange(100, 113, device=DEVICE)
    target_finite = torch.ones(13, dtype=torch.bool, device=DEVICE)
    draft_finite = torch.ones(1, 5, dtype=torch.bool, device=DEVICE)
    if bad is not None:
        (target_finite if bad == "target" else draft_finite[0])[3] = False
    for count in range(1, longest + 1):
        accepted = torch.tensor([0, 2, 5, 9][:longest], device=DEVICE)
        decided = (accepted, *torch.tensor([[count], [77]], device=DEVICE))
        results = []
        for settle in (naive.settle_sampled, sampled.settle_sampled):
            sizes = ((1, 13), (1,), (1, 1 + longest), (1, 2 + 2 * longest))
            written = [torch.full(size, -1, device=DEVICE) for size in sizes]
            settle(*decided, tokens, target_finite, draft_finite, *written)
            results.append([each.tolist() for each in written])
        assert results[0] == results[1]
        report = results[1][3][0]
        assert report[:2] == [bad is None, count]
        assert report[1 + count] == 77 and report[2] == (77 if count == 1 else 102)
