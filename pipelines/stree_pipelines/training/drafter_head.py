"""Choose the tokens of a drafter's head: the most frequent ones of its data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stree.common.errors import UsageError, require_fitting
from stree_pipelines.data.packing import TokenTable


@dataclass(frozen=True)
class HeadConfig:
    """Size of the trained drafter's head.

    A head cut from a whole one (the target's, or model.start_from's) begins with its weights.

    Args:
        vocab_size: number of tokens that can be drafted: the special ones, then the most frequent
            among the assistant's in data.train; null is all.
        rank: factor the head into two products, down to `rank` numbers and up to the tokens; null
            is one product.
    """

    vocab_size: int | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        wanted = "at least 1, or null"
        require_fitting(self, {
            "vocab_size": (self.vocab_size is None or self.vocab_size >= 1, wanted),
            "rank": (self.rank is None or self.rank >= 1, wanted),
        }, "model.head.")


def count_tokens(table: TokenTable, vocab_size: int) -> NDArray[np.int64]:
    """Count each token among the tokens with a loss: (V,) int64."""
    return np.bincount(table.tokens[table.mask], minlength=vocab_size)


def most_frequent(
    counts: NDArray[np.int64], size: int, always: Collection[int]
) -> NDArray[np.int64]:
    """Return (size,) tokens, ascending: all of `always`, then the highest counts (V,).

    Of equal counts the smaller token comes first. Raises UsageError when `always` alone has more.
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
    """Return, per table, the share of its counted tokens that are among `ids` (0 to 1)."""
    counts = {name: count_tokens(table, vocab_size) for name, table in tables.items()}
    return {name: float(each[ids].sum() / max(each.sum(), 1)) for name, each in counts.items()}


def coverage_line(size: int, vocab_size: int, coverage: Mapping[str, float]) -> str:
    shares = ", ".join(f"{share:.2%} in {name}" for name, share in coverage.items())
    return (
        f"the drafter's head is over {size:,} of {vocab_size:,} tokens, which are of the "
        f"assistant's tokens {shares}"
    )
