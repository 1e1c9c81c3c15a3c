"""Choose the lane of a test's cases: `make test`, `make test-all` or `make test-long`."""

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


def costly(*arguments: Any) -> Any:
    """Return a case of a test that `make test-all` runs, and `make test` does not."""
    return pytest.param(*arguments, id=_identifier(arguments), marks=pytest.mark.costly)


def quick_first(
    quick: list[tuple], all_of_them: list[tuple], in_test_all: list[tuple] = ()
) -> list:
    """List a test's arguments: the `quick` ones, those `in_test_all` with the `costly` marker, then
    the others with the `long` marker."""
    known = (*quick, *in_test_all)
    return [
        *(pytest.param(*each, id=_identifier(each)) for each in quick),
        *(costly(*each) for each in in_test_all),
        *(pytest.param(*each, id=_identifier(each), marks=pytest.mark.long)
          for each in all_of_them if each not in known),
    ]


def _identifier(arguments: tuple[Any, ...]) -> str:
    def name(argument: Any) -> str:
        if isinstance(argument, TokenTree):
            return f"{argument.name}-{argument.num_nodes}"
        return getattr(argument, "__name__", str(argument))

    return "-".join(map(name, arguments))
