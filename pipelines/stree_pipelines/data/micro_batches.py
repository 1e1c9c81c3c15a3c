"""Choose the packed rows of each training batch, in an order that depends on (seed, k) alone.

A row of the packing comes once per pass over the data, each pass in an order of its own. The rows
of a step are the same for any number of ranks and accumulated micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stree_pipelines.data.packing import Packing, TokenTable, count_rows, make_batch

Batch = dict[str, Any]


@lru_cache(maxsize=4)  # every micro-batch of a pass asks for the same one
def permutation(seed: int, stream: int, size: int) -> NDArray[np.int64]:
    """Return a permutation of range(size) that is a function of (seed, stream).

    Built on the raw output of PCG64, which NumPy keeps stable across versions (shuffling functions
    it does not).
    """
    keys = np.random.PCG64(np.random.SeedSequence((seed, stream))).random_raw(size)
    order = np.argsort(keys, kind="stable")
    order.flags.writeable = False
    return order


@dataclass(frozen=True)
class MicroBatches:
    """The endless sequence of training batches of one rank: item k is a function of (seed, k).

    The packed rows are laid out pass after pass, each pass permuted by (seed, its number). A global
    batch is a stretch of `world_size * batch_size * accumulate` rows; its micro-batches take
    `world_size * batch_size` of them in turn, and of those each rank `batch_size`.
    """

    table: TokenTable
    packing: Packing
    batch_size: int
    seed: int
    pad_id: int
    rank: int = 0
    world_size: int = 1
    accumulate: int = 1

    def rows(self, k: int) -> NDArray[np.int64]:
        """Return the packing's rows in micro-batch k of this rank: (batch_size,)."""
        return self._rows_at((k * self.world_size + self.rank) * self.batch_size, self.batch_size)

    def totals(self, step: int) -> dict[str, int]:
        """Count the tokens of a step's whole global batch, by the names of `packing.count_rows`.

        Every rank knows them beforehand: the loss is a mean over them, without communication.
        """
        size = self.world_size * self.batch_size * self.accumulate
        rows = self._rows_at(step * size, size)
        return {name: int(counts[rows].sum()) for name, counts in self._row_counts.items()}

    @cached_property
    def _row_counts(self) -> dict[str, NDArray[np.int64]]:
        return count_rows(self.table, self.packing)

    def _rows_at(self, start: int, count: int) -> NDArray[np.int64]:
        places = np.arange(start, start + count)
        passes, within = np.divmod(places, len(self.packing))
        rows = np.empty(count, dtype=np.int64)
        for number in np.unique(passes):
            chosen = passes == number
            # stream 0 ordered the samples for packing
            order = permutation(self.seed, int(number) + 1, len(self.packing))
            rows[chosen] = order[within[chosen]]
        return rows

    def __getitem__(self, k: int) -> Batch:
        arrays = make_batch(self.table, self.packing, self.rows(k), self.pad_id)
        totals = self.totals(k // self.accumulate)
        return {**as_tensors(arrays), "totals": totals, "number": (self.seed, k, self.rank)}


def as_tensors(arrays: dict[str, NDArray]) -> Batch:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
