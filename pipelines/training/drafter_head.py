"""A drafter's head over the tokens that its data has most often, and of low rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stree.common.errors import UsageError
from stree_pipelines.data.packing import TokenTable


@dataclass(frozen=True)
class HeadConfig:
    """The head of the drafter that is trained. One that is cut from a whole head, of the target or
    of model.start_from, begins with what it can hold of it.

    Args:
        vocab_size: so many tokens can be drafted, the most frequent ones among the assistant's in
            data.train, special tokens always; null is all.
        rank: the head is two products, down to so many numbers and up to the tokens; null is one.
    """

    vocab_size: int | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"model.head.{name} is {value}, wanted at least 1, or null")


def count_tokens(table: TokenTable, vocab_size: int) -> NDArray[np.int64]:
    """(V,), how often each token is among those that count for the loss."""
    return np.bincount(table.tokens[table.mask], minlength=vocab_size)


def most_frequent(
    counts: NDArray[np.int64], size: int, always: Collection[int]
) -> NDArray[np.int64]:
    """(size,) tokens, ascending: those of `always`, then by counts (V,), of equal ones the smaller.

    Raises UsageError when `always` alone has more.
    """
    wanted = sorted(set(always))
    if len(wanted) > size:
        raise UsageError(
            f"the drafter's head is over {size} tokens, and the special tokens alone are "
            f"{len(wanted)}: raise model.head.vocab_size"
        )
    ranked = counts.copy()
    ranked[wanted] = counts.max() + 1
    return np.sort(np.argsort(-ranked, kind="stable")[:size])


def coverage_of(
    ids: NDArray[np.int64], tables: Mapping[str, TokenTable], vocab_size: int
) -> dict[str, float]:
    """Of each table's tokens that count, which share is among `ids`."""
    counts = {name: count_tokens(table, vocab_size) for name, table in tables.items()}
    return {name: float(each[ids].sum() / max(each.sum(), 1)) for name, each in counts.items()}


def coverage_line(size: int, vocab_size: int, coverage: Mapping[str, float]) -> str:
    shares = ", ".join(f"{share:.2%} in {name}" for name, share in coverage.items())
    return (
        f"the drafter's head is over {size:,} of {vocab_size:,} tokens, which are of the "
        f"assistant's tokens {shares}"
    )
