"""How a row reads a prompt: whole, or in pieces that go through the kernels of a step's tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stree.last_used import LastUsed
from stree.models.cache import HybridCache
from stree.models.features import Features
from stree.models.hybrid import HybridModel, read_row
from stree.models.reading import PieceRoom
from stree_kernels import ops

MAX_KEPT = 64  # pieces
LEAST_READ, LONGEST_PIECE = 16, 512  # tokens of a piece, padding included
CaptureType = Callable[..., Any]  # of a device, a function and the one `beside`: has `replay`


def piece_sizes(most: int) -> list[int]:
    """Of pieces of 1 to `most` tokens, padding included, smallest first."""
    least = LEAST_READ.bit_length() - 1
    greatest = max(least, (min(most, LONGEST_PIECE) - 1).bit_length())
    return [1 << power for power in range(least, greatest + 1)]


class Whole:
    """Operations over whole sequences: the CPU, where it costs little to start one."""

    def read_row(
        self,
        model: HybridModel,
        cache: HybridCache,
        row: int,
        tokens: Tensor,
        features: Features | None = None,
        inputs: Tensor | None = None,
        *,
        start: int | None = None,
    ) -> Tensor:
        """See `stree.models.hybrid.read_row`."""
        return read_row(model, cache, row, tokens, features, inputs)

    def prepare(self, *reading: Any) -> list[Piece]:
        """Nothing has to be made ready."""
        return []


class Called:
    """A function that a replay calls: in the place of a captured one."""

    def __init__(self, device: torch.device, function: Callable[[], Any], beside: Any) -> None:
        self.replay = function


class Pieces:
    """Pieces of up to LONGEST_PIECE tokens, padded to a power of two, each as one call over a tree
    (`stree.models.reading`): the GPU, where a host takes longer to start a prompt's operations than
    the device to do them.

    capture, how a piece's call is kept for any row and length: as a graph, or as it is.
    """

    def __init__(self, capture: CaptureType) -> None:
        self.capture = capture
        self.pieces: LastUsed[Any, Piece] = LastUsed(MAX_KEPT)

    def read_row(
        self,
        model: HybridModel,
        cache: HybridCache,
        row: int,
        tokens: Tensor,
        features: Features | None = None,
        inputs: Tensor | None = None,
        *,
        start: int | None = None,
    ) -> Tensor:
        """See `stree.models.hybrid.read_row`. start, how many tokens the row has read, where no
        path of it is pending: without, this waits for the device. The logits are to be used before
        any row reads again."""
        if start is None:
            lengths = torch.stack([cache.length[row], cache.path_length[row]])
            committed, pending = lengths.tolist()
            start = committed + pending
            if pending:
                model.apply_path(cache.at(row))
        cache.reserve(len(tokens), start)
        asked, reads_inputs = () if features is None else features.layers, inputs is not None
        pieces = self.prepare(model, cache, row, start, len(tokens), asked, reads_inputs)
        parts = tokens.split(LONGEST_PIECE)
        added = [None] * len(parts) if inputs is None else inputs.split(LONGEST_PIECE)
        for piece, part, more in zip(pieces, parts, added, strict=True):
            logits = piece.replay(row, part, more)
            for layer, stream in zip(asked, piece.streams, strict=True):
                assert features is not None
                features.take(layer, stream[:, : len(part)].clone())
        return logits

    def prepare(
        self,
        model: HybridModel,
        cache: HybridCache,
        row: int,
        start: int,
        count: int,
        layers: tuple[int, ...] = (),
        reads_inputs: bool = False,
    ) -> list[Piece]:
        """The pieces of `count` more tokens after `start`, captured when first asked for: by a row
        without a path that is pending, behind whose tokens padding is written. layers, those whose
        streams are asked for."""
        pieces: list[Piece] = []
        bucket = ops.bucket(cache.num_slots, cache.device, cache.dtype)
        for begin in range(start, start + count, LONGEST_PIECE):
            left = min(LONGEST_PIECE, start + count - begin)
            size = piece_sizes(left)[-1]
            bound = bucket
            if bucket < cache.num_slots:  # of those that count, and of the padding's
                bound = -(-(begin + size) // bucket) * bucket
            key = id(model), id(cache), size, bound, layers, reads_inputs
            if key not in self.pieces:
                there = self.pieces.values()
                alike = (each for each in there if each.cache is cache and each.size == size)
                self.pieces[key] = Piece(
                    model, cache, row, size, bound, layers, reads_inputs, self.capture,
                    beside=next(iter(there), None), alike=next(alike, None),
                )  # fmt: skip
            pieces.append(self.pieces[key])
        return pieces


class Piece:
    """Reads up to `size` tokens, of any row.

    It is captured with no token of the row that is about to read, which changes nothing of it.
    Those of a reader share memory: they run one after the other. What they give lies outside,
    where no other's replay overwrites it.
    """

    def __init__(
        self, model: HybridModel, cache: HybridCache, row: int, size: int, bound: int,
        layers: tuple[int, ...], reads_inputs: bool, capture: CaptureType,
        beside: Piece | None, alike: Piece | None,
    ) -> None:  # fmt: skip
        self.model, self.cache, self.size, device = model, cache, size, cache.device
        with torch.inference_mode(False):  # they are written inside of it and outside
            self.tokens = tokens = torch.zeros(1, size, dtype=torch.long, device=device)
            self.count = count = torch.zeros(1, dtype=torch.long, device=device)
            self.row = whose = torch.full_like(count, row)
            self.inputs: Tensor | None = None
            if reads_inputs:
                shape = 1, size, model.config.d_model
                self.inputs = torch.zeros(shape, dtype=model.dtype, device=device)
            # Kept, as graphs hold its addresses; pieces run one after the other
            room = alike.room if alike else PieceRoom(cache, size, model.config.d_conv)
        self.room: PieceRoom = room
        added = self.inputs
        self.given: list[Tensor] = []  # logits (1, V), then the streams (1, T, ·) of layers
        kept = self.given  # the function holds what it needs, and not this piece, which holds it

        def read() -> None:
            features = Features(layers)
            logits = model.prefill_padded(
                tokens, count, whose, cache, room, bound, features=features, inputs=added
            )
            given = [logits, *features.streams]
            if not kept:  # at the first rehearsal
                with torch.inference_mode(False):
                    kept.extend(torch.empty_like(each) for each in given)
            for mine, each in zip(kept, given, strict=True):
                mine.copy_(each)

        self.captured: Any = capture(device, read, None if beside is None else beside.captured)

    def replay(self, row: int, tokens: Tensor, inputs: Tensor | None) -> Tensor:
        """Let a row read tokens (T,), with inputs (T, D); returns logits (1, V) to be used before
        the next replay of this piece."""
        self.row.fill_(row)
        self.count.fill_(len(tokens))
        self.tokens[0, : len(tokens)] = tokens
        if self.inputs is not None and inputs is not None:
            self.inputs[0, : len(tokens)] = inputs
        self.captured.replay()
        return self.given[0]

    @property
    def streams(self) -> list[Tensor]:
        """What the last replay gave of them, (1, T, ·) a layer, padded."""
        return self.given[1:]
