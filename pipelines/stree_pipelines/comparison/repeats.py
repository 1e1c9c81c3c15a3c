"""Find answers that go in circles: easy to draft, they flatter every drafter."""

from __future__ import annotations

from collections.abc import Sequence

from stree_pipelines.evaluation.records import SampleRow

MIN_QUARTER_TOKENS = 8  # of a last quarter; fewer repeat in any text


def repeats(sample: SampleRow) -> bool:
    """Return True when the last quarter of one of the sample's answers came earlier in that
    answer."""
    return any(_ends_in_a_circle(turn.tokens) for turn in sample.turns)


def _ends_in_a_circle(tokens: Sequence[int]) -> bool:
    size = len(tokens) // 4
    if size < MIN_QUARTER_TOKENS:
        return False
    end = tokens[-size:]
    return any(tokens[at : at + size] == end for at in range(len(tokens) - size))
