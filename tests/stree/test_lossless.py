"""Speculative decoding keeps the target's law exactly; planted mistakes are caught.

Every random choice goes through `choose`, so the law of what one decoding step yields can be
enumerated instead of sampled: at 20,000 samples Monte Carlo misses four of the ten mistakes.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch
from torch import Tensor
from toys import TableCache, TableDrafter, TableTarget, exact_law, tiny_model, total_variation

import stree.draft
import stree.engine
from stree.draft import SamplingRule
from stree.engine import Decoder
from stree.generation import GenerationConfig
from stree.sampling import RandomChooser, without
from stree.tree import TokenTree, law_rows
from stree.verify import verify_multi_step

TREES = [
    TokenTree.chain(1), TokenTree.chain(2), TokenTree((-1, 0, 0)), TokenTree((-1, 0, 0, 1)),
    TokenTree((-1, 0, 0, 2)), TokenTree((-1, 0, 0, 0)),
]  # fmt: skip
RULES = [
    SamplingRule(1.0), SamplingRule(0.6), SamplingRule(1.7, top_k=2), SamplingRule(1.0, top_p=0.8),
    SamplingRule(0.8, top_k=3, top_p=0.9),
]  # fmt: skip
PROMPT, FIRST = [0, 1], 2


def random_case(seed: int) -> tuple[TableTarget, TableDrafter, TokenTree, SamplingRule]:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tree = TREES[seed % len(TREES)]
    largest = 5 if tree.num_nodes == 2 else 4 if tree.num_nodes == 3 else 3
    vocabulary = rng.randint(3, largest)
    tables = torch.randn(2, *[vocabulary] * 3, dtype=torch.float64) * rng.choice([0.5, 1.5, 3.0])
    return TableTarget(tables[0]), TableDrafter(tables[1]), tree, rng.choice(RULES)


def first_block_law(
    target: TableTarget, drafter: TableDrafter, tree: TokenTree, rule: SamplingRule
) -> dict:
    """Law of the first call's block, given PROMPT and the prefill's token FIRST."""
    decoder = Decoder(target, drafter, tree)
    generation = GenerationConfig(
        max_new_tokens=20, temperature=rule.temperature, top_k=rule.top_k, top_p=rule.top_p
    )

    def run(choose):
        blocks = decoder._blocks(list(PROMPT), generation, choose, stree.engine.DecodingStats())
        decoder._first_token = lambda *_: FIRST  # its law is the plain one: not worth enumerating
        next(blocks)
        return tuple(next(blocks)[0])

    return exact_law(run)


def distance(
    blocks: dict, target: TableTarget, rule: SamplingRule, length: int, start=(*PROMPT, FIRST)
) -> float:
    """Total variation over the `length` tokens after `start` from sampling the target alone."""

    def after(before: int, last: int) -> list[float]:
        return rule.law(target.table[before, last]).tolist()

    return total_variation(blocks, after, start, target.config.vocab_size, length)


@pytest.mark.parametrize("part", range(6))
def test_output_law_is_the_targets(part):
    for seed in range(part * 50, part * 50 + 50):
        target, drafter, tree, rule = random_case(seed)
        blocks = first_block_law(target, drafter, tree, rule)
        assert sum(blocks.values()) == pytest.approx(1, abs=1e-12)
        assert distance(blocks, target, rule, tree.max_depth + 1) <= 1e-10, (seed, tree, rule)


@pytest.mark.parametrize("tree", [TokenTree.chain(1), TokenTree((-1, 0, 0))], ids=str)
def test_output_law_over_several_calls(tree):
    torch.manual_seed(5)
    tables = torch.randn(2, 3, 3, 3, dtype=torch.float64)
    target, rule = TableTarget(tables[0]), SamplingRule(1.0)
    decoder = Decoder(target, TableDrafter(tables[1]), tree)
    generation = GenerationConfig(max_new_tokens=4, temperature=1.0)
    law = exact_law(
        lambda choose: tuple(decoder.generate(PROMPT, generation, choose=choose).tokens)
    )
    assert distance(law, target, rule, 4, start=tuple(PROMPT)) <= 1e-10


class ModelAsTable:
    """A model's next-token laws, asked for by whole context, in the place of a table."""

    def __init__(self, model):
        self.model, self.config = model, model.config
        self.laws: dict[tuple[int, ...], Tensor] = {}

    def logits(self, context: tuple[int, ...]) -> Tensor:
        if context not in self.laws:
            with torch.no_grad():
                self.laws[context] = self.model(torch.tensor([context]))[0, -1]
        return self.laws[context]


@pytest.mark.parametrize("drafter_layers", [(), (1,)], ids=["recurrent", "hybrid"])
@pytest.mark.parametrize("tree", [TokenTree.chain(2), TokenTree((-1, 0, 0, 1))], ids=str)
def test_output_law_with_real_models(tree, drafter_layers):
    """The same proof through `HybridModel` and `ModelDrafter`: caches, replay and drafts included.

    Two calls are enumerated, so that the second one reads what the first one committed.
    """
    config = dict(vocab_size=3, num_layers=2, d_model=16, num_heads=2, num_kv_heads=1,
                  num_ssm_heads=2, num_x_groups=1, num_b_groups=1, num_c_groups=2,
                  gated_norm_groups=2, intermediate_size=16)  # fmt: skip
    target = tiny_model(1, attn_layers=(1,), **config)
    decoder = Decoder(target, tiny_model(2, attn_layers=drafter_layers, **config), tree)
    decoder._first_token = lambda *_: FIRST
    generation = GenerationConfig(max_new_tokens=3, temperature=1.3)

    law = exact_law(
        lambda choose: tuple(decoder.generate(PROMPT, generation, choose=choose).tokens)
    )
    oracle, rule = ModelAsTable(target), generation.rule
    for tokens in itertools.product(range(3), repeat=2):
        wanted, context = 1.0, (*PROMPT, FIRST)
        for token in tokens:
            wanted *= float(rule.law(oracle.logits(context))[token])
            context += (token,)
        assert law.get((FIRST, *tokens), 0.0) == pytest.approx(wanted, abs=1e-10)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)


def test_acceptance_equals_its_closed_form():
    """A chain of one draft is accepted with probability Σ min(p, q)."""
    target, drafter, _, _ = random_case(0)
    rule = SamplingRule(1.0)
    blocks = first_block_law(target, drafter, TokenTree.chain(1), rule)
    got = sum(prob for block, prob in blocks.items() if len(block) == 2)
    p, q = (rule.law(each.table[PROMPT[-1], FIRST]) for each in (target, drafter))
    assert got == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-12)


class FirstChoices(TableDrafter):
    """Draws nothing: the best tokens of its table, whatever the rule."""

    def draft(self, sequence, tree, rule, choose):
        return super().draft(sequence, tree, SamplingRule(), choose)


class Repetitive(TableDrafter):
    """Draws nothing, and often gives siblings the same token."""

    def draft(self, sequence, tree, rule, choose):
        tokens = [(sequence[-1] + node // 2) % len(self.table) for node in range(tree.num_nodes)]
        return stree.draft.Draft(torch.tensor(tokens), None, torch.tensor(True))


@pytest.mark.parametrize("kind", [FirstChoices, Repetitive])
def test_output_law_with_drafts_that_were_not_drawn(kind):
    accepted = calls = 0.0
    for seed in range(60):
        target, drafter, tree, rule = random_case(seed)
        blocks = first_block_law(target, kind(drafter.table), tree, rule)
        assert sum(blocks.values()) == pytest.approx(1, abs=1e-12)
        assert distance(blocks, target, rule, tree.max_depth + 1) <= 1e-10, (seed, tree, rule)
        accepted += sum(prob * (len(block) - 1) for block, prob in blocks.items())
        calls += 1
    assert accepted / calls > 0.3


def test_acceptance_of_drafts_that_were_not_drawn():
    """Siblings are accepted with the sum of their probabilities."""
    rule, tree = SamplingRule(1.0), TokenTree((-1, 0, 0))
    target, drafter, _, _ = random_case(2)
    blocks = first_block_law(target, FirstChoices(drafter.table), tree, rule)
    got = sum(prob for block, prob in blocks.items() if len(block) == 2)
    siblings = drafter.table[PROMPT[-1], FIRST].topk(2).indices
    p = rule.law(target.table[PROMPT[-1], FIRST])
    assert got == pytest.approx(float(p[siblings].sum()), abs=1e-12)


def test_random_chooser_accepts_as_enumerated():
    target, drafter, _, _ = random_case(3)
    tree, rule = TokenTree((-1, 0, 0, 1)), SamplingRule(1.0)
    blocks = first_block_law(target, drafter, tree, rule)
    wanted = sum((len(block) - 1) * prob for block, prob in blocks.items())
    second = sum((len(block) - 1) ** 2 * prob for block, prob in blocks.items())
    decoder, samples = Decoder(target, drafter, tree), 3000
    choose = RandomChooser(7)
    total = 0
    for _ in range(samples):
        stats = stree.engine.DecodingStats()
        decoder._first_token = lambda *_: FIRST
        steps = decoder._blocks(list(PROMPT), GenerationConfig(temperature=1.0), choose, stats)
        next(steps)
        total += len(next(steps)[0]) - 1
    deviation = ((second - wanted**2) / samples) ** 0.5
    assert abs(total / samples - wanted) < 5 * deviation


@pytest.mark.parametrize("tree", [TokenTree.chain(0), TokenTree((-1, 0, 0, 1))], ids=str)
def test_sampled_answers_follow_the_law(tree):
    """1500 seeds with the decoder's own randomness: four tokens of several calls, as one draw.

    χ² over the 81 answers; its bound has a false-alarm rate of one in a million.
    """
    torch.manual_seed(11)
    tables = torch.randn(2, 3, 3, 3, dtype=torch.float64)
    target, rule, num_answers = TableTarget(tables[0]), SamplingRule(0.9), 1500
    decoder = Decoder(target, TableDrafter(tables[1]) if tree.num_nodes > 1 else None, tree)
    seen = Counter(
        tuple(decoder.generate(PROMPT, GenerationConfig(4, rule.temperature, seed=seed)).tokens)
        for seed in range(num_answers)
    )
    statistic, rare, num_cells = 0.0, [0.0, 0], 0
    for answer in itertools.product(range(3), repeat=4):
        wanted, context = float(num_answers), tuple(PROMPT)
        for token in answer:
            wanted *= float(rule.law(target.table[context[-2:]])[token])
            context += (token,)
        if wanted < 5:  # too few for χ²: counted together
            rare = [rare[0] + wanted, rare[1] + seen[answer]]
        else:
            statistic += (seen[answer] - wanted) ** 2 / wanted
            num_cells += 1
    statistic += (rare[1] - rare[0]) ** 2 / rare[0]
    half_freedom = torch.tensor(num_cells / 2, dtype=torch.float64)
    by_chance = torch.special.gammaincc(half_freedom, torch.tensor(statistic / 2).double())
    assert num_cells > 30 and by_chance > 1e-6


# Ten planted mistakes. Each replaces one function of the product by a wrong one.


def wrong_verifier(
    *, on_reject="residual", tested_against="residual", renormalise=True, shared_uniform=False,
    generous=1.0, bonus="target",
):  # fmt: skip
    """The verifier as a plain walk, with one thing wrong; with nothing wrong it is a twin."""

    def verify(target_laws, draft_laws, tokens, tree, choose):
        rows = law_rows(tree)
        nodes, bonus = walk(target_laws, draft_laws, rows, tokens.tolist(), tree, choose)
        padded = nodes + [0] * (tree.max_depth + 1 - len(nodes))
        return torch.tensor(padded), torch.tensor([len(nodes)]), torch.tensor([bonus])

    def walk(target_laws, draft_laws, rows, tokens, tree, choose):
        path, residual = [0], target_laws[0]
        while True:
            node, accepted = path[-1], None
            original, spent = residual, 0.0
            if tree.children[node] and draft_laws is not None:
                law = draft_laws[rows[node]]
            taken = torch.zeros_like(residual, dtype=torch.bool)
            for child in tree.children[node]:
                token = tokens[child]
                if draft_laws is None:
                    proposal = torch.eye(len(residual), dtype=residual.dtype)[token]
                else:
                    proposal = without(law, taken) if renormalise else law
                p = residual if tested_against == "residual" else original
                keep = float((generous * p[token] / proposal[token]).clamp(max=1.0))
                odds = keep
                if shared_uniform:  # u < keep, given that u was at least `spent`
                    odds = max(0.0, keep - spent) / (1 - spent) if spent < 1 else 0.0
                    spent = max(spent, keep)
                if int(choose(torch.tensor([1 - odds, odds], dtype=torch.float64))):
                    accepted = child
                    break
                if on_reject == "residual":
                    left = (residual - proposal).clamp(min=0)
                elif on_reject == "zero the token":
                    left = residual.clone()
                    left[token] = 0
                else:
                    left = residual
                residual = left / left.sum() if left.sum() > 0 else residual
                taken[token] = True
            if accepted is None:
                if bonus == "drafter" and not tree.children[node] and node:
                    residual = draft_laws[rows[tree.parents[node]]]
                return path, int(choose(residual))
            path.append(accepted)
            residual = target_laws[accepted]

    return verify


def top_k_drafts(logits: Tensor, parents, tree, rule, choose, tokens, finite):
    """Drafts the top k, and claims that they were sampled."""
    for row, node in zip(logits, parents, strict=True):
        children = list(tree.children[node])
        tokens[children] = row.topk(len(children)).indices
    finite.fill_(True)
    return rule.law(logits)


def stale_after(share: float):
    """The target forgets the last committed token, wholly or in part."""

    def after(self, context):
        right = self.table[context[-2], context[-1]]
        if len(context) <= len(PROMPT) + 1:
            return right
        stale = self.table[context[-3], context[-2]]
        return ((1 - share) * right.softmax(-1) + share * stale.softmax(-1)).log()

    return after


MISTAKES = {
    "no residual": dict(verify=wrong_verifier(on_reject="nothing")),
    "residual only zeroes the token": dict(verify=wrong_verifier(on_reject="zero the token")),
    "second child tested against p": dict(verify=wrong_verifier(tested_against="p")),
    "one uniform for two siblings": dict(verify=wrong_verifier(shared_uniform=True)),
    "q not renormalised": dict(verify=wrong_verifier(renormalise=False)),
    "softmax q with top-k drafts": dict(draw=top_k_drafts),
    "bonus from the drafter": dict(verify=wrong_verifier(bonus="drafter")),
    "stale state": dict(after=stale_after(1.0)),
    "1 % stale state": dict(after=stale_after(0.01)),
    "2 % too generous": dict(verify=wrong_verifier(generous=1.02)),
}


def largest_distance(monkeypatch, verify=None, draw=None, after=None, kind=TableDrafter) -> float:
    if verify:
        monkeypatch.setattr(stree.engine, "verify_sampled", verify)
    if draw:
        monkeypatch.setattr(stree.draft, "draw_children", draw)
    worst = 0.0
    for seed in (4, 10, 16, 26, 39):
        target, drafter, tree, _ = random_case(seed)
        drafter = kind(drafter.table)
        if after:
            oracle, target = target, TableTarget(target.table)
            target.after = after.__get__(target)  # type: ignore[method-assign]
        else:
            oracle = target
        blocks = first_block_law(target, drafter, tree, SamplingRule(1.0))
        worst = max(worst, distance(blocks, oracle, SamplingRule(1.0), tree.max_depth + 1))
    return worst


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistake_is_caught(mistake, monkeypatch):
    assert largest_distance(monkeypatch, **MISTAKES[mistake]) > 1e-4


@pytest.mark.parametrize(
    "mistake", ["no residual", "second child tested against p", "one uniform for two siblings",
                "2 % too generous"]
)  # fmt: skip
def test_planted_mistake_with_drafts_that_were_not_drawn_is_caught(mistake, monkeypatch):
    assert largest_distance(monkeypatch, **MISTAKES[mistake], kind=FirstChoices) > 1e-4


def test_without_a_mistake_the_same_check_passes(monkeypatch):
    for kind in (TableDrafter, FirstChoices):
        assert largest_distance(monkeypatch, kind=kind) <= 1e-10
        with monkeypatch.context() as planted:
            assert largest_distance(planted, verify=wrong_verifier(), kind=kind) <= 1e-10


def test_verifier_by_hand():
    """p = (½, ½, 0), q = (1, 0, 0): the draft 0 is kept half of the time, else 1 follows."""
    p = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    q = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    tree = TokenTree.chain(1)

    def run(choose):
        path, length, bonus = verify_multi_step(p, q, torch.tensor([2, 0]), tree, choose)
        return tuple(path[: int(length)].tolist()), int(bonus)

    assert exact_law(run) == {((0, 1), 2): 0.5, ((0,), 1): 0.5}


def test_table_cache_commits_the_path():
    cache = TableCache()
    cache.tree = [5, 6, 7]
    cache.commit([0, 2])
    assert cache.committed == [5, 7]
