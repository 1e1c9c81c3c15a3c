"""Drafts from the text: which ones they are, and that they change nothing of what comes out."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from captures import nothing_waits
from lanes import costly, quick_first
from toys import right_now_and_then, tiny_model

from stree import BatchDecoder, GenerationConfig, Request, TokenTree
from stree.batching.state import BatchState
from stree.common.errors import UsageError
from stree.drafters.model import ModelDrafter
from stree.drafters.ngram import NGram, RowTexts
from stree.tree_policy.adaptive import PLAIN, AdaptiveTrees
from stree.trees.build import make_tree_batch
from stree.trees.token_tree import balanced

PNG = TokenTree((-1, 0, 0, 1, 2, 3, 4), "png-3-2")  # three tokens of two drafts


def drafted(text: list[int], tree: TokenTree, corpus=(), context: int = 3) -> list[int]:
    """Return what the second of two rows drafts after a text that ends with a block of two."""
    target = tiny_model(1)
    drafter = NGram(context, corpus).for_decoder(target, 2, 64, tree.num_nodes)
    rows = BatchState.new(2, 8)
    rows.set(1, GenerationConfig())
    drafter.read(1, torch.tensor(text[:3]))
    drafter.read(1, torch.tensor(text[3:-2]))
    rows.begin(1, len(text) - 1, 0)
    rows.block[1, :3] = torch.tensor([2, *text[-2:]])
    tree_batch = make_tree_batch([TokenTree.chain(2), tree], target.device)
    with nothing_waits():
        proposal = drafter.draft(rows, tree_batch, 2, 64, False)
    return proposal.tokens[1, : tree.num_nodes].tolist()


def test_what_came_last_after_the_longest_match_comes_first():
    text = [1, 2, 3, 4, 9, 5, 2, 3, 7, 8, 9, 6, 2, 3]
    assert drafted(text, TokenTree.chain(3)) == [3, 7, 8, 9]
    # the later of two matches of two tokens, then the earlier one, each going on on its own
    assert drafted(text, PNG) == [3, 7, 4, 8, 9, 9, 5]
    # a longer match counts more than a later one
    assert drafted([1, 2, 3, 4, 0, 2, 3, 5, 1, 2, 3], TokenTree.chain(2)) == [3, 4, 0]
    assert drafted([1, 2, 3, 4, 0, 2, 3, 5, 1, 2, 3], TokenTree.chain(1), context=2) == [3, 5]


def test_continuations_with_one_beginning_share_its_node():
    text = [1, 2, 5, 6, 1, 2, 5, 7, 1, 2, 8, 8, 1, 2]
    tree = TokenTree((-1, 0, 0, 1, 1, 2))
    assert drafted(text, tree) == [2, 8, 5, 8, 1, 7]


def wanted_continuations(text, corpus, context, count, barred):
    """Look at each place of the text, one after the other; fill up with None."""
    slots = [*corpus, None, *text]
    best: dict[int, tuple[int, int]] = {}
    for place in range(len(slots) - 1):
        length = 0
        while length < min(context, place + 1, len(text)) and (
            slots[place - length] == text[-1 - length]
        ):
            length += 1
        token = slots[place + 1]
        if token is not None and token not in barred:
            best[token] = max(best.get(token, (-1, -1)), (length, place))
    ordered = sorted(best, key=best.__getitem__, reverse=True)
    return (ordered + [None] * count)[:count]


def test_continuations_are_those_of_a_search_place_by_place():
    rng = random.Random(0)
    for _ in range(60):
        vocabulary, context = rng.randint(12, 30), rng.randint(1, 5)
        count, num_barred = rng.randint(1, 4), rng.randint(0, 2)
        corpus = [rng.randrange(6) for _ in range(rng.randint(0, 12))]
        words = [rng.randrange(rng.randint(1, 6)) for _ in range(rng.randint(1, 25))]
        text = RowTexts(context, torch.tensor(corpus), 1, 40, vocabulary, torch.device("cpu"))
        text.read(0, torch.tensor(words))
        rows = BatchState.new(1, 4)
        rows.begin(0, len(words) - 1, words[-1])
        barred = rng.sample(range(vocabulary + 1), num_barred)
        given = torch.tensor(barred).view(1, 1, -1) if barred else None
        seen = text.look(rows, 3)
        found = seen.continuations(seen.matches, count, given)[0, 0].tolist()
        wanted = wanted_continuations(words, corpus, context, count, barred)
        assert [token for token, each in zip(found, wanted, strict=True) if each is not None] == [
            each for each in wanted if each is not None
        ]
        assert len(set(found)) == count and not set(found) & set(barred)
        assert all(0 <= token < vocabulary for token in found)


def test_of_a_long_corpus_the_first_continuation_is_that_of_a_whole_search():
    """A step looks at few places of a corpus, whatever its length."""
    rng = random.Random(1)
    corpus = [rng.randrange(7) for _ in range(3000)]
    lengths = set()
    for _ in range(30):
        words = [rng.randrange(7) for _ in range(rng.randint(1, 12))]
        text = RowTexts(5, torch.tensor(corpus), 1, 16, 9, torch.device("cpu"))
        text.read(0, torch.tensor(words))
        rows = BatchState.new(1, 4)
        rows.begin(0, len(words) - 1, words[-1])
        seen = text.look(rows, 3)
        lengths.add(int(seen.matches.max()))
        assert seen.continuations(seen.matches, 1)[0, 0].tolist() == wanted_continuations(
            words, corpus, 5, 1, []
        )
        assert seen.texts.shape[1] < 1500
    assert {1, 5} <= lengths


def test_a_corpus_is_drafted_from_where_the_text_has_nothing_longer():
    corpus = [40, 41, 42, 43, 44, 45]
    assert drafted([3, 5, 4, 40, 41], TokenTree.chain(4), corpus) == [41, 42, 43, 44, 45]
    assert drafted([41, 7, 9, 40, 41], TokenTree.chain(1), corpus) == [41, 42]
    assert drafted([40, 41, 7, 40, 41], TokenTree.chain(1), corpus) == [41, 7]
    # no match goes from the corpus' end into the text
    assert drafted([7, 8, 9, 45, 7], TokenTree.chain(1), [*corpus, 7, 30], context=2) == [7, 30]


def requests(count: int, trees) -> list[Request]:
    rng = random.Random(1)
    return [
        Request(
            [rng.randrange(9) for _ in range(rng.randint(1, 30))],
            GenerationConfig(20, rng.choice([0.0, 0.7, 1.2]), rng.choice([0, 5]), seed=each),
            rng.choice(trees),
        )
        for each in range(count)
    ]


TREES = [PNG, TokenTree.chain(3), balanced([3, 2]), TokenTree.chain(0)]


@pytest.mark.parametrize("captured", [costly(False), True])
@pytest.mark.parametrize("grafted", [False, True], ids=["alone", "grafted"])
def test_drafts_change_nothing_of_what_is_sampled(grafted, captured, request):
    """One batch has all trees and settings, eagerly and by graphs, in which nothing may wait."""
    if captured:
        request.getfixturevalue("captured_on_cpu")
    target = tiny_model(1)
    model = right_now_and_then(target) if grafted else None
    served = requests(6, TREES)
    decoder = BatchDecoder(
        target, NGram(4, [1, 2, 3], model), num_rows=4, max_length=64, max_nodes=10
    )
    plain = BatchDecoder(target, num_rows=4, max_length=64)
    wanted = plain.generate([Request(each.prompt_ids, each.generation) for each in served])
    outputs = decoder.generate(served)
    assert [out.tokens for out in outputs] == [out.tokens for out in wanted]
    assert sum(sum(out.stats.accepted_per_call) for out in outputs) > 3


@pytest.mark.parametrize(
    ("grafted", "verifier"),
    quick_first(
        [(True, "multi_step")],
        [(grafted, verifier) for grafted in (False, True)
         for verifier in ("multi_step", "traversal")],
        [(False, "traversal")],
    ),
)
def test_drafts_do_not_depend_on_what_shares_the_batch(grafted, verifier):
    """With verifiers that toss coins the tokens tell which drafts there were."""
    target = tiny_model(1)
    model = right_now_and_then(target) if grafted else None
    served = requests(5, [TokenTree.chain(4), balanced([3])])
    alone, together = (
        BatchDecoder(
            target, NGram(2, (), model), num_rows=count, max_length=64, max_nodes=10,
            verifier=verifier,
        ).generate(served)
        for count in (1, 3)
    )
    assert [out.tokens for out in together] == [out.tokens for out in alone]


def test_the_roots_last_child_and_what_is_below_are_n_grams():
    """A tree whose root has one child is the model's."""
    target = tiny_model(1)
    model = right_now_and_then(target)
    trees = [TokenTree.chain(2), PNG, balanced([3, 1]), TokenTree((-1, 0, 0, 1, 1))]
    drafter = NGram(3, model=model).for_decoder(target, 4, 64, 8)
    alone = NGram(3, model=model).for_decoder(target, 4, 64, 8)
    rows = BatchState.new(4, 8)
    for row in range(4):
        for each in (drafter, alone):
            each.read(row, torch.tensor([7, 8, 9, 7]))
        rows.set(row, GenerationConfig())
        rows.begin(row, 4, 8)
    tree_batch = make_tree_batch(trees, target.device)
    got = drafter.draft(rows, tree_batch, 1, 64, True)
    models = super(type(alone), alone).draft(rows, tree_batch, 1, 64, True)
    grafted = [[], [2, 4, 6], [3, 6], [2]]
    assert [row.nonzero()[:, 0].tolist() for row in got.points] == grafted
    assert torch.equal(got.tokens[~got.points], models.tokens[~got.points])
    assert torch.equal(got.logits, models.logits)
    for row, nodes in enumerate(grafted):
        if nodes and 9 not in got.tokens[row, list(trees[row].children[0][:-1])]:
            assert got.tokens[row, nodes].tolist() == [9, 7, 8][: len(nodes)]


def test_the_n_grams_may_begin_as_the_child_that_they_replace(monkeypatch):
    """Only the model's children that stay in the tree are barred."""
    target = tiny_model(1)
    model = right_now_and_then(target)
    drafter = NGram(3, model=model).for_decoder(target, 1, 64, 8)
    draft = ModelDrafter.draft

    def with_nine_last(self, *given):
        proposal = draft(self, *given)
        tokens = proposal.tokens.clone()
        tokens[:, 1:4] = torch.tensor([30, 31, 9])
        return replace(proposal, tokens=tokens)

    monkeypatch.setattr(ModelDrafter, "draft", with_nine_last)
    drafter.read(0, torch.tensor([7, 8, 9, 6, 7]))
    rows = BatchState.new(1, 8)
    rows.set(0, GenerationConfig())
    rows.begin(0, 5, 8)
    tree_batch = make_tree_batch([balanced([3, 1])], target.device)
    tokens = drafter.draft(rows, tree_batch, 1, 64, True).tokens[0].tolist()
    assert tokens[1:4] == [30, 31, 9] and tokens[6] == 6


def test_a_context_of_nothing_is_refused():
    with pytest.raises(UsageError, match="context is 0"):
        NGram(0)


class Alternating(AdaptiveTrees):
    """Policy of two steps with a tree, then a plain one."""

    def choose(self, num_rows):
        self.turn = getattr(self, "turn", 0) + 1
        return self.trees[1] if self.turn % 3 else PLAIN


@pytest.mark.parametrize("captured", [costly(False), True])
@pytest.mark.parametrize("grafted", [False, True], ids=["alone", "grafted"])
def test_what_plain_steps_added_stands_in_its_place_in_the_text(grafted, captured, request):
    if captured:
        request.getfixturevalue("captured_on_cpu")
    target = tiny_model(1)
    drafts = NGram(4, [1, 2], right_now_and_then(target) if grafted else None)
    decoder = BatchDecoder(target, drafts, Alternating([PNG]), num_rows=2, max_length=96)
    rows = [decoder.admit(Request([each, 2, 3], GenerationConfig(30 + each))) for each in (4, 5)]
    while decoder.num_free_rows < 2:
        for report in decoder.step():
            if report.finish_reason:
                rows.remove(report.row)
                decoder.release(report.row)
        for row in rows:
            text = decoder.drafter.text
            written = text.texts[row, text.start : -1]
            certain = [row + 4, 2, 3, *decoder.tokens_of(row)]
            count = int((written >= 0).sum())
            assert count > len(certain) - 16
            assert written[: min(count, len(certain))].tolist() == certain[:count]
