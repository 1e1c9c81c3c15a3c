"""Fused verification has its twin's distribution, and makes its decisions. Planted mistakes are
caught.

tests/stree/verifiers/test_verifiers.py proves that the twin's output has the target's distribution.
"""

from dataclasses import replace

import pytest
import torch
from judged import Case, case, disagreements, distributions, sampled_tree
from kernel_cases import DEVICE, normal
from lanes import costly
from planted import edited_module

from stree.trees.token_tree import TokenTree, balanced
from stree_kernels import naive
from stree_kernels.sampling import verification

in_the_interpreter = pytest.mark.skipif(
    DEVICE == "cuda", reason="random numbers are told to the interpreter only"
)
SIBLINGS, BRANCHING = TokenTree((-1, 0, 0)), TokenTree((-1, 0, 0, 1))
RULES = ("naive", "multi_step", "traversal")


def plant(line: str, instead: str, monkeypatch, tmp_path) -> None:
    broken = edited_module(verification, line, instead, tmp_path)
    for name in ("rows_kernel", "siblings_kernel", "walk_kernel"):
        monkeypatch.setattr(verification, name, getattr(broken, name))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(verification, "PIECE", 128 if DEVICE == "cuda" else 2)


@in_the_interpreter
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("tree", "relation", "most"),
    [
        costly(SIBLINGS, "random", 8), (SIBLINGS, "disjoint", 8),
        *(
            pytest.param(tree, relation, 48, marks=pytest.mark.long)
            for tree in (
                TokenTree.chain(1), TokenTree.chain(2), SIBLINGS, BRANCHING,
                TokenTree((-1, 0, 0, 2)), TokenTree((-1, 0, 0, 0)),
            )
            for relation in ("random", "zeros", "ties", "equal", "disjoint")
        ),
    ],
)
def test_distribution_is_the_twins(tree, relation, rule, most):
    """They agree in fp64, at both ends of the random numbers for each of some choices."""
    drawn = distributions(1, tree, relation, 4 if relation == "disjoint" else 3)
    wrong, count = disagreements(rule, tree, *drawn, most=most)
    assert wrong == 0 and count >= 6


@pytest.mark.quick(2)
@in_the_interpreter
@pytest.mark.parametrize("rule", RULES[1:])
@pytest.mark.parametrize("mixed", [False, True])
def test_distribution_is_the_twins_where_drafts_are_points(rule, mixed):
    """All drafts are points, or the last sibling alone."""
    target, drawn = distributions(2, SIBLINGS)
    points = torch.tensor([[False, False, True]]) if mixed else None
    wrong, count = disagreements(rule, SIBLINGS, target, drawn if mixed else None, points, most=6)
    assert wrong == 0 and count >= 6


@in_the_interpreter
@pytest.mark.parametrize("rule", [pytest.param(RULES[1], marks=pytest.mark.long), RULES[2]])
def test_distribution_is_the_twins_where_siblings_are_independent(rule, monkeypatch, tmp_path):
    """They differ where the kernels take siblings for drawn without replacement."""
    given = (rule, SIBLINGS, *distributions(1, SIBLINGS), None, True)
    wrong, count = disagreements(*given, most=16)
    assert wrong == 0 and count >= 6
    plant(" & (trees.independent == 0)", "", monkeypatch, tmp_path)
    assert disagreements(*given)[0]


def large(rule: str, dtype, vocabulary: int) -> Case:
    """Make rows of their own trees and settings, some with tokens left out; the last is idle."""
    trees = [TokenTree.chain(3), balanced([2, 1]), balanced([2, 1]), TokenTree.chain(1)]
    temperature = torch.tensor([1.0, 0.6, 0.0, 1.0], dtype=torch.float64, device=DEVICE)
    wide = normal(4, 5, vocabulary + 3, seed=1, dtype=dtype)
    logits, drawn = 2 * wide[..., :vocabulary], normal(4, 4, vocabulary, seed=2, dtype=dtype)
    logits[0, :, ::3] = -torch.inf
    drawn = drawn + logits[:, :4] / 2
    tokens = sampled_tree(trees, logits, drawn, temperature)
    made = case(rule, trees, logits[:, : tokens.shape[1]], drawn, temperature, tokens)
    made.active[3] = False
    return made


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("rule", "dtype"),
    [("naive", torch.float32), ("multi_step", torch.bfloat16), ("traversal", torch.bfloat16),
     costly("naive", torch.bfloat16), costly("multi_step", torch.float32),
     costly("traversal", torch.float32)],
)
def test_decisions_are_the_twins(rule, dtype, monkeypatch):
    """Rounding decides once in a million numbers."""
    monkeypatch.setattr(verification, "PIECE", 128)
    made = large(rule, dtype, 300)
    wanted = made.committed(naive)
    assert made.committed(verification) == wanted
    monkeypatch.setattr(verification, "MAX_PIECES_IN_REGISTERS", 16)  # as of large trees
    assert made.committed(verification) == wanted
    assert wanted[3][1] and {len(each[3]) for each in wanted} != {1}


@pytest.mark.parametrize("rules", [verification, naive], ids=["kernel", "twin"])
def test_logits_that_are_not_finite_are_reported(rules, monkeypatch):
    """A row whose logits are bad in both models (row 1) is the target's error."""
    monkeypatch.setattr(verification, "PIECE", 128)
    made = large("multi_step", torch.float32, 150)
    made.logits[0, 1, 140], made.logits[1, 2, 7] = torch.nan, torch.inf
    made.logits[3, 0] = -torch.inf
    finite = torch.tensor([[True], [False], [False], [True]], device=DEVICE)
    made.drafts = replace(made.drafts, finite=finite)
    assert [each[0] for each in made.committed(rules)] == [0, 0, -1, 0]


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_greedy_row_has_no_distribution_where_logits_are_not_finite(wrong):
    """One token with the probability 1 would look like a sure choice."""
    logits = torch.zeros(2, 2, 5, dtype=torch.float64)
    logits[:, 1, 3] = wrong
    temperature = torch.tensor([0.0, 1.0], dtype=torch.float64)
    probs = naive.distribution(logits, temperature)
    assert probs[:, 1].isnan().any(-1).all()
    assert probs[0, 0].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0] and probs[1, 0].isfinite().all()


# The line, what it says instead, and the rule whose distribution shows it
MISTAKES = {
    "a residual that is not clipped": ("maximum(p - offered, 0.0)", "abs(p - offered)", 1),
    "a residual that is not normalised": ("/ rest.to(WIDE), p)", ", p)", 1),
    "no residual": ("piece, place, share, RULE", "piece, 0, share, RULE", 1),
    "one sibling forgotten": (
        "q = left_to_draw(trees, token, drafted, undrawn, q)\n            q_sum", "q_sum", 1,
    ),
    "what is left to draw counts all": (
        "q = left_to_draw(trees, token, drafted, undrawn, q)\n        at", "at", 1,
    ),
    "too generous": ("(wanted < odds", "(1.1 * wanted < odds", 1),
    "coins of the sibling before": ("place + ACCEPT", "place - 1 + ACCEPT", 1),
    "coins of the level below": ("LEVEL * step)", "LEVEL * step + LEVEL)", 1),
    "the last sibling that passes": (
        "first = tl.min(tl.where(kept, place, WIDEST), axis=0)",
        "first = WIDEST - 1 - tl.min(tl.where(kept, WIDEST - 1 - place, -1), axis=0)", 1,
    ),
    "the token after, of the target itself": (
        "for place in range(siblings):", "for place in range(0):", 1,
    ),
    "the token after, in a piece of the target itself": (
        "piece, siblings, share, RULE", "piece, 0, share, RULE", 1,
    ),
    "a threshold that comes too late": ("> threshold), at", "> threshold + 1e-3), at", 0),
    "the threshold of the row within a piece": (
        "threshold - tl.sum(tl.where(at < found, mass, 0.0), axis=0)", "threshold", 0,
    ),
    "pieces that forget their own highest": ("part *= scaled(high", "scaled(high", 0),
    "the target after the root": ("node, 0, step, seed", "node * 0, 0, step, seed", 0),
    "the same number at each level": ("to(tl.int64) + AFTER + step", "to(tl.int64) + AFTER", 0),
    "a share that forgets the rejections": ("rest + (1.0 - share), 1.0)", "1.0, 1.0)", 2),
    "a share beside its parent's": ("p *= share.to(WIDE)", "p *= 1.0", 2),
    "a node passes whatever its children have taken": (
        "share = tl.where(child >= 0, left, share)", "left = tl.where(child >= 0, left, share)", 2,
    ),
    "what passes below a node is none of its": ("& (passes == 1)", "& (passes == 2)", 2),
}
DEEP = {
    "a share beside its parent's", "what passes below a node is none of its",
    "the target after the root", "the same number at each level", "coins of the level below",
}
QUICK = {"no residual", "one sibling forgotten", "what passes below a node is none of its"}


@in_the_interpreter
@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(each, marks=pytest.mark.costly if each in QUICK else pytest.mark.long)
        for each in MISTAKES
    ],
)
def test_planted_mistake_is_caught(mistake, monkeypatch, tmp_path):
    line, instead, rule = MISTAKES[mistake]
    plant(line, instead, monkeypatch, tmp_path)
    tree = TokenTree.chain(2) if mistake in DEEP else SIBLINGS
    wrong, _ = disagreements(RULES[rule], tree, *distributions(1, tree))
    assert wrong
