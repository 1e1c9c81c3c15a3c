"""Pack samples of any length into rows of T tokens: best-fit decreasing inside a window."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

WINDOW = 2048  # samples sorted together: large enough to fill rows, small enough to mix sources


@dataclass(frozen=True)
class TokenTable:
    """Samples end to end: sample i is `tokens[offsets[i]:offsets[i + 1]]`, `mask` likewise.

    tokens: int32 (all tokens,); mask: bool (all tokens,), True for the assistant's tokens;
    offsets: int64 (samples + 1,).
    """

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    @property
    def counted(self) -> NDArray[np.int64]:
        """Assistant tokens of each sample, (samples,)."""
        return np.diff(np.concatenate([[0], np.cumsum(self.mask)])[self.offsets])

    @cached_property
    def sha256(self) -> str:
        """Hash of all tokens, masks and boundaries: the data's fingerprint."""
        digest = hashlib.sha256()
        for array in (self.tokens, self.mask, self.offsets):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def joined(tables: Sequence[TokenTable]) -> TokenTable:
    """Join the samples of all tables, in order."""
    if len(tables) == 1:
        return tables[0]
    lengths = np.concatenate([table.lengths for table in tables])
    return TokenTable(
        np.concatenate([table.tokens for table in tables]),
        np.concatenate([table.mask for table in tables]),
        np.cumsum([0, *lengths], dtype=np.int64),
    )


def chosen(table: TokenTable, samples: NDArray[np.int64]) -> TokenTable:
    """Return a table of some of the samples."""
    spans = [slice(table.offsets[each], table.offsets[each + 1]) for each in samples]
    return TokenTable(
        np.concatenate([table.tokens[span] for span in spans]),
        np.concatenate([table.mask[span] for span in spans]),
        np.cumsum([0, *table.lengths[samples]], dtype=np.int64),
    )


def shared_out(
    tables: Sequence[TokenTable], shares: Sequence[float], orders: Sequence[NDArray[np.int64]]
) -> list[TokenTable]:
    """Take samples of each table, so that their assistant tokens have these shares.

    Shares need not sum to one; the total is the most that the scarcest table allows. Samples are
    taken in the given orders and stay in the table's own; each table gives at least one.
    """
    counts = [table.counted for table in tables]
    scale = min(each.sum() / share for each, share in zip(counts, shares, strict=True))
    parts = []
    for table, count, share, order in zip(tables, counts, shares, orders, strict=True):
        # To the nearest sample: a table that gives all of it loses none to rounding.
        passed = np.cumsum(count[order]) - count[order] / 2
        taken = max(int(np.searchsorted(passed, share * scale)), 1)
        parts.append(chosen(table, np.sort(order[:taken])))
    return parts


@dataclass(frozen=True)
class Packing:
    """Assignment of samples to rows: row r holds `samples[starts[r]:starts[r + 1]]`, in order.

    Each sample is cut to `sequence_length` tokens.
    """

    sequence_length: int
    samples: NDArray[np.int64]
    starts: NDArray[np.int64]
    num_truncated: int  # samples longer than a row
    num_dropped_tokens: int  # tokens cut off
    num_unused: int  # samples left out: they have no assistant token within the row length

    def __len__(self) -> int:
        return len(self.starts) - 1


def pack(
    table: TokenTable, sequence_length: int, order: Sequence[int] | NDArray[np.int64],
    window: int = WINDOW,
) -> Packing:
    """Pack the samples, taken in `order`, into rows of `sequence_length` (T) tokens.

    Deterministic. Inside each window of samples the longest goes first, into the row with the least
    room that still takes it; rows stay open for later windows. A sample over T tokens is cut to its
    first T (counted), because a tail without its beginning is not what the model meets when it
    drafts. A sample with no assistant token (beyond its first token, which nothing predicts) within
    T is left out (counted).
    """
    T = sequence_length
    full_lengths = table.lengths
    lengths = np.minimum(full_lengths, T)
    useful = np.array(
        [table.mask[a + 1 : a + n].any() for a, n in zip(table.offsets, lengths, strict=False)],
        dtype=bool,
    )
    rows: list[list[int]] = []
    room_rows: list[list[int]] = [[] for _ in range(T + 1)]  # room in tokens -> rows that have it
    rooms = 0  # bit s is set when some row has exactly s tokens of room
    wanted = np.asarray(order, dtype=np.int64)
    wanted = wanted[useful[wanted]]
    for begin in range(0, len(wanted), window):
        part = wanted[begin : begin + window]
        for sample in part[np.argsort(-lengths[part], kind="stable")].tolist():
            length = int(lengths[sample])
            fitting = rooms >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                row = room_rows[room].pop()
                if not room_rows[room]:
                    rooms ^= 1 << room
            else:
                row, room = len(rows), T
                rows.append([])
            rows[row].append(sample)
            left = room - length
            if left:
                room_rows[left].append(row)
                rooms |= 1 << left
    used = full_lengths[wanted]
    return Packing(
        sequence_length=T,
        samples=np.array([sample for row in rows for sample in row], dtype=np.int64),
        starts=np.cumsum([0, *map(len, rows)], dtype=np.int64),
        num_truncated=int((used > T).sum()),
        num_dropped_tokens=int((used - lengths[wanted]).sum()),
        num_unused=int((~useful).sum()),
    )


def count_rows(table: TokenTable, packing: Packing) -> dict[str, NDArray[np.int64]]:
    """Count the tokens of each row (rows,): `tokens`, without padding, `assistant` and `all`.

    The latter two leave out each sample's first token, which nothing predicts.
    """
    starts = table.offsets[packing.samples]
    lengths = np.minimum(table.lengths[packing.samples], packing.sequence_length)
    spans = zip(starts.tolist(), lengths.tolist(), strict=True)
    assistant = np.array([np.count_nonzero(table.mask[a + 1 : a + n]) for a, n in spans])
    counts = {"tokens": lengths, "assistant": assistant, "all": lengths - 1}
    return {name: np.add.reduceat(each, packing.starts[:-1]) for name, each in counts.items()}


def make_batch(
    table: TokenTable, packing: Packing, rows: Sequence[int] | NDArray[np.int64], pad_id: int
) -> dict[str, NDArray]:
    """Make arrays (B, T) of the rows: `tokens` int64, `segment_ids` int64, `loss_mask` bool.

    Segment ids count up from 0 along a row, one a sample; padding has the id after the last.
    `loss_mask[b, t]`: predicting token t counts, i.e. it is the assistant's; False on a segment's
    first token (nothing predicts it) and on padding.
    """
    shape = (len(rows), packing.sequence_length)
    tokens = np.full(shape, pad_id, dtype=np.int64)
    segment_ids = np.zeros(shape, dtype=np.int64)
    loss_mask = np.zeros(shape, dtype=bool)
    for b, row in enumerate(rows):
        at = segment = 0
        for sample in packing.samples[packing.starts[row] : packing.starts[row + 1]]:
            start = table.offsets[sample]
            length = min(int(table.offsets[sample + 1] - start), packing.sequence_length)
            tokens[b, at : at + length] = table.tokens[start : start + length]
            segment_ids[b, at : at + length] = segment
            loss_mask[b, at + 1 : at + length] = table.mask[start + 1 : start + length]
            at, segment = at + length, segment + 1
        segment_ids[b, at:] = segment
    return {"tokens": tokens, "segment_ids": segment_ids, "loss_mask": loss_mask}
