"""The verifiers that toss coins keep the target's distribution, and their acceptance is compared.

All random choices of a step are enumerated (tests/support/enumerated.py). What steps have in common
is their noise, and that is sampled.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from enumerated import (
    CONTEXT,
    RELATIONS,
    SETTINGS,
    Independent,
    Mixed,
    Repetitive,
    assert_targets,
    block_distribution,
    chance_of,
    is_caught,
    length_of,
    plain_distribution,
    random_case,
    related_case,
)
from lanes import lanes
from planted import edited
from toys import TableDrafter, TableTarget, Undrawn, choose_by, tiny_model

from stree import BatchDecoder, Decoder, GenerationConfig, Request, TokenTree
from stree.common.errors import UsageError
from stree.trees.token_tree import balanced
from stree.verifiers import VERIFIERS, named
from stree.verifiers.rejection import Block, MultiStep, Naive, Traversal
from stree_kernels import ops
from stree_kernels.naive.sampling import verification as rules

CHAINS = [TokenTree.chain(1), TokenTree.chain(2)]
BRANCHING = [
    TokenTree((-1, 0, 0)), TokenTree((-1, 0, 0, 1)), TokenTree((-1, 0, 0, 2)),
    TokenTree((-1, 0, 0, 0)), TokenTree((-1, 0, 1, 1)),
]


DRAWING = (TableDrafter, Independent, Mixed)


@pytest.mark.parametrize(
    ("kind", "verifier"),
    [
        pytest.param(
            kind, verifier,
            # The naive rule has a choice of the target's at every node to enumerate
            marks=pytest.mark.costly if verifier is Naive and kind in DRAWING else [],
        )
        for kind in (*DRAWING, Undrawn, Repetitive)
        for verifier in (Naive, MultiStep, Traversal, Block)
    ],
)
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, 20))]
)
def test_output_distribution_is_the_targets(part, verifier, kind):
    """Every relation of the distributions has another tree each time."""
    trees = CHAINS if verifier is Block else BRANCHING
    for index, relation in enumerate(RELATIONS):
        seed = 7 * part + index
        target, drafter, tree, setting = related_case(seed, relation, trees)
        tables = TableTarget(target), kind(drafter)
        blocks = block_distribution(*tables, tree, setting, verifier)
        assert_targets(blocks, target, setting, tree)


def lengths(seed: int, trees) -> list[float]:
    target, drafter, tree, setting = random_case(seed, trees)
    tables = TableTarget(target), TableDrafter(drafter)
    return [
        length_of(block_distribution(*tables, tree, setting, each))
        for each in (Naive, MultiStep, Traversal)
    ]


@pytest.mark.costly
def test_acceptance_length_grows_from_naive_to_traversal():
    """On a chain multi-step sampling is the token-level rule, and block verification traversal."""
    longer = [0, 0]
    for seed in range(8):
        naive, multi_step, traversal = lengths(seed, [*CHAINS, *BRANCHING[:2]])
        assert traversal >= multi_step - 1e-12 and multi_step >= naive - 1e-12, seed
        longer[0] += traversal > multi_step + 1e-3
        longer[1] += multi_step > naive + 1e-3
    assert longer[0] >= 1 and longer[1] >= 4


@pytest.mark.costly
@pytest.mark.parametrize("part", lanes(1, 8))
def test_independent_siblings_are_accepted_no_more_often(part):
    """Two siblings that are alike are one chance."""
    trees, fewer = [TokenTree((-1, 0, 0)), TokenTree((-1, 0, 0, 0)), balanced([2, 1])], 0
    for seed in range(5 * part, 5 * part + 5):
        target, drafter, tree, setting = random_case(seed, trees)
        independent, without_replacement = (
            length_of(block_distribution(TableTarget(target), each, tree, setting))
            for each in (Independent(drafter), TableDrafter(drafter))
        )
        assert independent <= without_replacement + 1e-12, seed
        fewer += independent < without_replacement - 1e-2
    assert fewer


def test_naive_accepts_more_where_only_a_late_sibling_has_children():
    """Multi-step sampling passes the first sibling too often for such a tree."""
    naive, multi_step, traversal = lengths(5, [TokenTree((-1, 0, 0, 2))])
    assert naive > multi_step + 0.05 and traversal >= multi_step - 1e-12


def block_verification(p: torch.Tensor, q: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Return the distribution of Sun et al. (2024), Algorithm 2, for two drafts; p, q (V, V, V)."""
    distribution: Counter[tuple[int, ...]] = Counter()
    first, start = CONTEXT
    for x, y in itertools.product(range(len(p)), repeat=2):
        weight = float(q[first, start, x] * q[start, x, y])
        if weight == 0:
            continue
        p1 = min(1.0, float(p[first, start, x] / q[first, start, x]))
        p2 = min(1.0, p1 * float(p[start, x, y] / q[start, x, y]))
        left0 = (p[first, start] - q[first, start]).clamp(min=0)
        left1 = (p1 * p[start, x] - q[start, x]).clamp(min=0)
        h1 = float(left1.sum()) / max(float(left1.sum()) + 1 - p1, 1e-300)
        for z in range(len(p)):
            distribution[x, y, z] += weight * p2 * float(p[x, y, z])
            if h1:
                distribution[x, z] += weight * (1 - p2) * h1 * float(left1[z] / left1.sum())
            if left0.sum():
                distribution[z,] += weight * (1 - p2) * (1 - h1) * float(left0[z] / left0.sum())
    return {block: prob for block, prob in distribution.items() if prob > 0}


@pytest.mark.parametrize("seed", range(3))
def test_block_verification_is_the_papers(seed):
    target, drafter, tree, _ = random_case(seed, CHAINS[1:2])
    setting = GenerationConfig(temperature=1.0)
    got = block_distribution(TableTarget(target), TableDrafter(drafter), tree, setting, Block)
    wanted = block_verification(target.softmax(-1), drafter.softmax(-1))
    for block in got.keys() | wanted.keys():
        assert got.get(block, 0.0) == pytest.approx(wanted.get(block, 0.0), abs=1e-12)


def test_naive_acceptance_equals_its_closed_form():
    """A draft is accepted with probability Σ p·q."""
    target, drafter, _, _ = random_case(0)
    tables = TableTarget(target), TableDrafter(drafter)
    blocks = block_distribution(*tables, TokenTree.chain(1), SETTINGS[0], Naive)
    p, q = (plain_distribution(each[CONTEXT], SETTINGS[0]) for each in (target, drafter))
    assert length_of(blocks) - 1 == pytest.approx(float(p @ q), abs=1e-12)


MISTAKES = {
    "nothing left out for the next sibling": (rules.share_out, "left / total", "target"),
    "a share that forgets the rejections": (
        rules.share_out, "total / (total + (1.0 - share))", "total",
    ),
    "a share beside its parent's": (
        rules.share_out, "share * target.gather", "target.gather",
    ),
    "one sibling forgotten": (
        rules.share_out, "siblings.take(token, there & ~is_point)", "None",
    ),
    "the neighbour's drafts": (
        rules.share_out, "drafts.tokens[at, child]", "drafts.tokens[0 * at + 1, child]",
    ),
    "the last in post-order": (rules.accept_traversal, "found.long()", "(children * found)"),
    "a node passes whatever its children have taken": (
        rules.accept_traversal, "size, nodes), rest", "size, nodes), given.gather(1, nodes)",
    ),
    "the token after a node whatever its children have taken": (
        rules.accept_traversal, "drafts.children[at, last], logits",
        "0 * drafts.children[at, last] - 1, logits",
    ),
    "the target at the root": (rules.accept_naive, "logits[at, node]", "logits[at, 0 * node]"),
    "a draft of another parent": (
        rules.accept_naive, "drafts.children[at, node]", "drafts.children[at, 0 * node]",
    ),
}


@pytest.mark.costly
@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistake_is_caught(mistake, monkeypatch):
    function = edited(*MISTAKES[mistake])
    verifier = Naive if function.__name__ == "accept_naive" else Traversal
    monkeypatch.setattr(rules, function.__name__, function)
    beside = None if mistake == "the neighbour's drafts" else CHAINS[1]
    assert is_caught(range(20), verifier, BRANCHING, beside)


def improbable(verifier: str, tree: TokenTree, count: int = 1000) -> float:
    """Return how probable answers of several steps, a seed each, are at most."""
    torch.manual_seed(11)
    table = 1.5 * torch.randn(2, 3, 3, 3, dtype=torch.float64)
    decoder = BatchDecoder(
        TableTarget(table[0]), TableDrafter(table[1]), tree, num_rows=100, max_length=16,
        verifier=verifier,
    )
    served = [Request([0, 1], GenerationConfig(4, 1.0, seed=seed)) for seed in range(count)]
    answers = [out.tokens for out in decoder.generate(served)]
    return chance_of(answers, table[0], GenerationConfig(temperature=1.0))


TREES = {"block": TokenTree.chain(3), "traversal": balanced([2, 1, 1])}


@pytest.mark.quick(1)
@pytest.mark.parametrize("verifier", TREES)
def test_answers_of_several_steps_follow_the_targets_distribution(verifier):
    """The bound's false-alarm rate is about one in a million."""
    assert improbable(verifier, TREES[verifier]) > 1e-6


@pytest.mark.parametrize("drafter_layers", [(), (1,)], ids=["recurrent", "hybrid"])
def test_no_noise_is_drawn_with_twice_where_drafts_are_judged_together(drafter_layers, monkeypatch):
    """Bottom-up rules see drafts that the next step, or another node, must not depend on."""
    target, seen, drawing = tiny_model(1), [], ops.choose_children

    def recorded(logits, depths, sampling, *others):
        seen.extend((sampling.position[:, None] + depths).flatten().tolist())
        drawing(logits, depths, sampling, *others)

    choose_by(monkeypatch, recorded)
    drafter = tiny_model(2, attn_layers=drafter_layers)
    for verifier, shared in (("traversal", False), ("multi_step", False), ("coupled", True)):
        seen.clear()
        decoder = Decoder(target, drafter, balanced([2, 2]), max_length=64, verifier=verifier)
        decoder.generate([1, 2], GenerationConfig(12, temperature=1.0, seed=0))
        assert (len(set(seen)) < len(seen)) == shared


def test_a_tree_that_branches_is_refused_for_chains():
    table = torch.randn(4, 4, 4, dtype=torch.float64)
    target, drafter, tree = TableTarget(table), TableDrafter(table), TokenTree((-1, 0, 0))
    with pytest.raises(UsageError, match="Block judges chains only"):
        Decoder(target, drafter, tree, verifier="block")
    decoder = BatchDecoder(target, drafter, TokenTree.chain(2), verifier="block", max_nodes=3)
    with pytest.raises(UsageError, match="Block judges chains only"):
        decoder.admit(Request([0, 1], tree=tree))
    assert decoder.num_free_rows == decoder.num_rows


def test_every_name_is_a_verifier():
    assert [type(named(name)).__name__ for name in VERIFIERS] == [
        "Coupled", "Naive", "MultiStep", "Block", "Traversal"
    ]
    with pytest.raises(UsageError, match="wanted one of coupled, naive"):
        named("greedy")
