"""A step keeps each row's target distribution exactly, whatever its neighbour; mistakes are caught.

As in test_lossless.py, all random choices of a step are enumerated. Row 0 is the one under test;
row 1 decodes greedily with another tree, which makes no choice.
"""

from __future__ import annotations

import inspect
import itertools
import random

import pytest
import torch
from torch import Tensor
from toys import exact_law, tiny_config, total_variation

import stree.step
from stree import GenerationConfig, TokenTree
from stree.forest import Forest
from stree.rows import Rows
from stree.sampling import sampling_law
from stree.step import Proposal, Step, draw_children

TREES = [
    TokenTree.chain(1), TokenTree.chain(2), TokenTree((-1, 0, 0)), TokenTree((-1, 0, 0, 1)),
    TokenTree((-1, 0, 0, 2)), TokenTree((-1, 0, 0, 0)),
]  # fmt: skip
SETTINGS = [
    GenerationConfig(temperature=1.0), GenerationConfig(temperature=0.6),
    GenerationConfig(temperature=1.7, top_k=2), GenerationConfig(temperature=1.0, top_p=0.8),
    GenerationConfig(temperature=0.8, top_k=3, top_p=0.9),
]  # fmt: skip
GREEDY = GenerationConfig()
CONTEXT = (1, 2)  # of both rows; the last one is the root


class Table:
    """Target and drafter: logits are a table (V, V, V) over the last two tokens."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def narrow(self, first: int, count: int) -> Table:
        return self

    def accept(self, path: Tensor, count: Tensor) -> None: ...

    def after(self, forest: Forest, tokens: Tensor, row: int, node: int) -> Tensor:
        path = [int(tokens[row, each]) for each in forest.trees[row].path_to(node)]
        before, last = [*CONTEXT[:-1], *path][-2:]
        return self.table[before, last]

    def forest_forward(self, tokens: Tensor, forest: Forest, cache: Table, bound: int) -> Tensor:
        logits = torch.zeros(*tokens.shape, len(self.table), dtype=torch.float64)
        for row, tree in enumerate(forest.trees):
            for node in range(tree.num_nodes):
                logits[row, node] = self.after(forest, tokens, row, node)
        return logits

    def draft(self, block: Tensor, forest: Forest, rows: Rows, choose, bound: int) -> Proposal:
        batch, vocabulary = len(block), len(self.table)
        tokens = torch.zeros(batch, forest.num_nodes, dtype=torch.long)
        tokens[:, 0] = block[:, -1]
        drawn_from = []
        for level in forest.levels:
            logits = torch.zeros(*level.nodes.shape, vocabulary, dtype=torch.float64)
            for (row, at), node in zip(
                itertools.product(*map(range, level.nodes.shape)), level.nodes.flatten().tolist(),
                strict=True,
            ):  # fmt: skip
                if node >= 0:
                    logits[row, at] = self.after(forest, tokens, row, node)
            stree.step.draw_children(logits, level.places, rows, choose, tokens)
            drawn_from.append(logits)
        return Proposal(tokens, torch.cat(drawn_from, 1), torch.ones(batch, dtype=torch.bool))


class Undrawn(Table):
    """Draws nothing: the best tokens of its table, whatever the row's settings."""

    def draft(self, block, forest, rows, choose, bound) -> Proposal:
        greedy = Rows.new(len(block))
        proposal = super().draft(block, forest, greedy, choose, bound)
        return Proposal(proposal.tokens, None, proposal.finite)


def random_case(seed: int) -> tuple[Tensor, Tensor, TokenTree, GenerationConfig]:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tree = TREES[seed % len(TREES)]
    vocabulary = rng.randint(3, 5 if tree.num_nodes == 2 else 4 if tree.num_nodes == 3 else 3)
    tables = torch.randn(2, *[vocabulary] * 3, dtype=torch.float64) * rng.choice([0.5, 1.5, 3.0])
    return tables[0], tables[1], tree, rng.choice(SETTINGS)


def block_distribution(target, drafter, tree, setting) -> dict:
    """Of the tokens that one step gives row 0; row 1 must always get the same."""
    forest = Forest.of([tree, TokenTree.chain(2)], torch.device("cpu"))
    rows = Rows.new(2)
    for row, generation in enumerate((setting, GREEDY)):
        rows.set(row, generation)
        rows.active[row] = True
    rows = rows.narrow(0, 2, [setting, GREEDY])
    block = torch.tensor([[1, CONTEXT[-1]]] * 2)
    neighbours = set()

    def run(choose):
        step = Step(target, target, drafter)
        report = step.run(block, forest, rows, lambda probs, places: choose(probs), 0).tolist()
        neighbours.add(tuple(report[1]))
        return tuple(report[0][2 : 2 + report[0][1]])

    blocks = exact_law(run)
    assert len(neighbours) == 1
    best, before = [], CONTEXT
    for _ in range(3):
        before = (before[1], int(target.table[before].argmax()))
        best.append(before[1])
    _, count, *tokens = neighbours.pop()
    assert tokens[:count] == best[:count]
    return blocks


def distance(blocks: dict, table: Tensor, setting: GenerationConfig, length: int) -> float:
    """Total variation over `length` tokens from sampling the target alone."""

    def after(before: int, last: int) -> list[float]:
        return sampling_law(
            table[before, last], setting.temperature, setting.top_k, setting.top_p
        ).tolist()

    return total_variation(blocks, after, CONTEXT, len(table), length)


@pytest.mark.parametrize("kind", [Table, Undrawn])
@pytest.mark.parametrize("part", range(3))
def test_output_distribution_is_the_targets(part, kind):
    for seed in range(part * 40, part * 40 + 40):
        target, drafter, tree, setting = random_case(seed)
        blocks = block_distribution(Table(target), kind(drafter), tree, setting)
        assert sum(blocks.values()) == pytest.approx(1, abs=1e-12)
        assert distance(blocks, target, setting, tree.max_depth + 1) <= 1e-10, (seed, tree)


def _edited(line: str, mistake: str):
    """`accept_multi_step` with one thing written otherwise."""
    source = inspect.getsource(stree.step.accept_multi_step)
    assert source.count(line) == 1, line
    scope = dict(vars(stree.step))
    exec("from __future__ import annotations\n" + source.replace(line, mistake), scope)
    return scope["accept_multi_step"]


MISTAKES = {
    "no residual": ("torch.where(rejected, left, target)", "target"),
    "residual not renormalised": ("left / total", "left"),
    "one sibling forgotten": (
        "taken.scatter(1, token, rejected | taken.gather(1, token))", "taken",
    ),
    "too generous": ("ratio.clamp(max=1.0)", "(1.02 * ratio).clamp(max=1.0)"),
    "the neighbour's drafts": ("proposal.tokens[at, child]", "proposal.tokens[1 - at, child]"),
    "the neighbour's settings": (
        "rows.distribution(logits[at, node])",
        "rows.distribution(logits[at, node].flip(0)).flip(0)",
    ),
    "the parent's distribution after an accepted draft": (
        "torch.where(accepted[:, None], rows.distribution(logits[at, node]), target)", "target",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistake_is_caught(mistake, monkeypatch):
    monkeypatch.setattr(stree.step, "accept_multi_step", _edited(*MISTAKES[mistake]))
    worst = 0.0
    for seed in (4, 10, 16, 26, 39):
        target, drafter, tree, setting = random_case(seed)
        try:
            blocks = block_distribution(Table(target), Table(drafter), tree, setting)
        except (AssertionError, IndexError):  # the neighbour noticed, or odds of 0 / 0
            return
        worst = max(worst, distance(blocks, target, setting, tree.max_depth + 1))
    assert worst > 1e-4


def test_drafts_that_claim_to_be_drawn_are_caught(monkeypatch):
    """The best k, with the distribution that they were not drawn from."""

    def best(logits, places, rows, choose, tokens):
        draw_children(logits, places, Rows.new(len(tokens)), choose, tokens)

    monkeypatch.setattr(stree.step, "draw_children", best)
    target, drafter, tree, _ = random_case(4)
    blocks = block_distribution(Table(target), Table(drafter), tree, SETTINGS[0])
    assert distance(blocks, target, SETTINGS[0], tree.max_depth + 1) > 1e-4


def test_distributions_are_those_of_one_row():
    torch.manual_seed(0)
    logits = 3 * torch.randn(len(SETTINGS) + 1, 4, 50, dtype=torch.float64)
    rows = Rows.new(len(logits))
    for row, setting in enumerate([*SETTINGS, GREEDY]):
        rows.set(row, setting)
    rows = rows.narrow(0, len(logits), SETTINGS)
    got = rows.distribution(logits)
    for row, each in enumerate(SETTINGS):
        wanted = sampling_law(logits[row], each.temperature, each.top_k, each.top_p)
        torch.testing.assert_close(got[row], wanted, rtol=1e-12, atol=1e-15)
    assert torch.equal(got[-1].argmax(-1), logits[-1].argmax(-1)) and (got[-1].sum(-1) == 1).all()
    one = rows.distribution(logits[:, 0])
    assert torch.equal(one, got[:, 0])


def test_a_forest_pads_what_its_smaller_trees_lack():
    forest = Forest.of([TokenTree.chain(0), TokenTree((-1, 0, 1, 0))], torch.device("cpu"))
    assert forest.parents.tolist() == [[-1, -2, -2, -2], [-1, 0, 1, 0]]
    assert forest.children[1].tolist() == [[1, 3], [2, -1], [-1, -1], [-1, -1]]
    assert [level.nodes.tolist() for level in forest.levels] == [[[-1], [0]], [[-1], [1]]]
    topology = forest.topology(tiny_config().d_conv)
    assert topology.ancestors[0].equal(torch.eye(4, dtype=torch.bool))
    assert topology.depths.tolist() == [[0, 0, 0, 0], [0, 1, 2, 1]]
