"""Drafts from a text: the kernel's are the twin's, and both are those of a search by hand."""

import random

import pytest
import torch
from kernel_cases import DEVICE
from lanes import quick_first
from toys import random_tree

from stree import TokenTree
from stree.trees.build import make_tree_batch
from stree.trees.token_tree import several_chains
from stree_kernels import naive
from stree_kernels.naive import TreesToFill
from stree_kernels.sampling import ngrams

TREES = [several_chains(6, 2), TokenTree.paper(), TokenTree.chain(3), TokenTree((-1, 0, 0, 0))]


def by_hand(words: list[int], tree: TokenTree, context: int) -> list[int]:
    """Search place by place for each node, by its whole path; None where a text has too few."""
    drafts: list[int | None] = [words[-1], *[None] * (tree.num_nodes - 1)]
    for node, children in enumerate(tree.children):
        path = [drafts[each] for each in tree.path_to(node)[1:]]
        if None in path:
            continue
        wanted, best = [*words, *path], {}
        for place in range(len(words) - 1):
            length, most = 0, context + len(path)
            while length < min(most, place + 1) and words[place - length] == wanted[-1 - length]:
                length += 1
            best[words[place + 1]] = max(best.get(words[place + 1], (-1, -1)), (length, place))
        ordered = sorted(best, key=best.__getitem__, reverse=True)
        for child, token in zip(children, ordered, strict=False):
            drafts[child] = token
    return drafts


def filled(module, slots, roots, trees, *options, grafted=None):
    tree_batch = make_tree_batch(trees, torch.device(DEVICE))
    tokens = torch.zeros(len(trees), tree_batch.num_nodes, dtype=torch.long, device=DEVICE)
    tokens[:, 0] = slots.gather(1, roots[:, None])[:, 0]
    given = TreesToFill(
        tree_batch.parents, tree_batch.children,
        tuple((level.nodes, level.places, level.above) for level in tree_batch.levels),
    )
    places = barred = None
    if grafted is not None:
        places, barred = tree_batch.levels[0].places[:, :, -1:].contiguous(), grafted
    module.draft_ngrams(slots, roots, tokens, given, *options, places=places, barred=barred)
    return tokens.cpu()


@pytest.mark.parametrize("block", [16, ngrams.BLOCK_TOKENS])
@pytest.mark.parametrize(("seed",), quick_first([(0,), (1,)], [(n,) for n in range(2, 20)]))
def test_drafts_are_those_of_a_search_by_hand(seed, block, monkeypatch):
    """Texts of several lengths and vocabularies, longer than a block and shorter."""
    monkeypatch.setattr(ngrams, "BLOCK_TOKENS", block)
    rng = random.Random(seed)
    context, trees = rng.randint(1, 4), rng.choices([*TREES, random_tree(9, seed)], k=3)
    texts = [
        [rng.randrange(1, rng.randint(2, 7)) for _ in range(rng.randint(1, 40))] for _ in trees
    ]
    slots = torch.full((3, 44), -1)
    for row, words in enumerate(texts):
        slots[row, 1 : 1 + len(words)] = torch.tensor(words)
    roots = torch.tensor([len(words) for words in texts])
    given = slots.to(DEVICE), roots.to(DEVICE), trees, context
    twin, kernel = (filled(module, *given) for module in (naive, ngrams))
    assert torch.equal(twin, kernel)
    for row, (words, tree) in enumerate(zip(texts, trees, strict=True)):
        wanted = by_hand(words, tree, context)
        for got, token in zip(twin[row].tolist(), wanted, strict=False):
            assert token is None or got == token
        for children in tree.children:
            drafts = twin[row, list(children)].tolist()
            assert len(set(drafts)) == len(drafts)


@pytest.mark.parametrize("seed", range(4))
def test_excerpts_and_barred_tokens(seed):
    """Continuations of an excerpt begin after one slot of it; the root's last child is replaced."""
    rng, context, excerpt = random.Random(seed), 3, 8
    excerpts = [rng.choice([-1, *range(5)]) for _ in range(2 * excerpt)]
    words = [rng.randrange(5) for _ in range(12)]
    slots = torch.tensor([[*excerpts, -1, *words, -1, -1]], device=DEVICE)
    roots = torch.tensor([len(excerpts) + len(words)], device=DEVICE)
    for tree in (TokenTree.paper(), several_chains(3, 2)):
        for barred in (None, torch.tensor([[[1, 9]]], device=DEVICE)):
            given = slots, roots, [tree], context, 2, excerpt
            twin, kernel = (filled(each, *given, grafted=barred) for each in (naive, ngrams))
            assert torch.equal(twin, kernel)
            last = tree.children[0][-1]
            assert barred is None or int(twin[0, last]) not in (1, 9)


def test_an_idle_row_harms_nobody():
    slots = torch.full((2, 9), -1, device=DEVICE)
    slots[1, 1:5] = torch.tensor([3, 4, 3, 4], device=DEVICE)
    roots = torch.tensor([0, 4], device=DEVICE)
    for module in (naive, ngrams):
        tokens = filled(module, slots.clone(), roots, [TokenTree.chain(2)] * 2, 2)
        assert tokens[1].tolist() == [4, 3, 4]
