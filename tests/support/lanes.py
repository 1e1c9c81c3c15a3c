"""Choose which cases of a test run in `make test-all`, and which in `make test-long` only."""

from __future__ import annotations

from typing import Any

import pytest

from stree.trees.token_tree import TokenTree


def lanes(quick: int, long: int) -> list:
    """List a test's seeds, 0 to `long` - 1: the first `quick` run in `make test-all` too."""
    return [
        pytest.param(seed, marks=[pytest.mark.long] if seed >= quick else [])
        for seed in range(long)
    ]


def quick_first(quick: list[tuple], all_of_them: list[tuple]) -> list:
    """List a test's arguments: the `quick` ones, then the others with the `long` marker."""
    others = [each for each in all_of_them if each not in quick]
    return [
        pytest.param(*each, id=_identifier(each), marks=pytest.mark.long if each in others else [])
        for each in (*quick, *others)
    ]


def _identifier(arguments: tuple[Any, ...]) -> str:
    def name(argument: Any) -> str:
        if isinstance(argument, TokenTree):
            return f"{argument.name}-{argument.num_nodes}"
        return getattr(argument, "__name__", str(argument))

    return "-".join(map(name, arguments))
