"""What of a test runs in `make test`, and what in `make test-long` only."""

from __future__ import annotations

from typing import Any

import pytest

from stree.trees.token_tree import TokenTree


def lanes(quick: int, long: int) -> list:
    """Seeds of a test: `quick` of them in `make test`, all of the `long` in `make test-long`."""
    return [
        pytest.param(seed, marks=[pytest.mark.long] if seed >= quick else [])
        for seed in range(long)
    ]


def quick_first(quick: list[tuple], all_of_them: list[tuple]) -> list:
    """Arguments of a test: some, and with the `long` marker the others too."""
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
