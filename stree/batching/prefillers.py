"""How a row reads a prompt: whole, or in pieces that go through the kernels of a step's tree."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stree.common.lru import LRUCache
from stree.models.cache import HybridCache
from stree.models.chunk_pass import PrefillScratch
from stree.models.hidden_states import HiddenStateTap
from stree.models.model import HybridModel, read_row
from stree_kernels import ops

if TYPE_CHECKING:
    from stree.drafters.model import ModelDrafter

MAX_KEPT = 64  # pieces
LEAST_READ, LONGEST_PIECE = 16, 512  # tokens of a piece, padding included
CaptureType = Callable[..., Any]  # of a device, a function and the one `beside`: has `replay`
Timed = Callable[[], AbstractContextManager[None]]


def piece_sizes(most: int) -> list[int]:
    """Of pieces of 1 to `most` tokens, padding included, smallest first."""
    least = LEAST_READ.bit_length() - 1
    greatest = max(least, (min(most, LONGEST_PIECE) - 1).bit_length())
    return [1 << power for power in range(least, greatest + 1)]


class EagerPrefill:
    """Operations over whole sequences: the CPU, where it costs little to start one."""

    def read_row(
        self,
        model: HybridModel,
        cache: HybridCache,
        row: int,
        tokens: Tensor,
        features: HiddenStateTap | None = None,
        inputs: Tensor | None = None,
        *,
        start: int | None = None,
    ) -> Tensor:
        """See `stree.models.model.read_row`."""
        return read_row(model, cache, row, tokens, features, inputs)

    def prepare(self, *reading: Any) -> list[PrefillGraph]:
        """Nothing has to be made ready."""
        return []


class Called:
    """A function that a replay calls: in the place of a captured one."""

    def __init__(self, device: torch.device, function: Callable[[], Any], beside: Any) -> None:
        self.replay = function


class ChunkedPrefill:
    """Read prompts in chunks of up to LONGEST_PIECE tokens, padded to a power of two (GPUs).

    A chunk is one call over a tree that is a chain (`stree.models.chunk_pass`): a host takes longer
    to start a whole prompt's operations than the device to do them.

    capture, how a piece's call is kept for any row and length: as a graph, or as it is.
    """

    def __init__(self, capture: CaptureType) -> None:
        self.capture = capture
        self.pieces: LRUCache[Any, PrefillGraph] = LRUCache(MAX_KEPT)

    def read_row(
        self,
        model: HybridModel,
        cache: HybridCache,
        row: int,
        tokens: Tensor,
        features: HiddenStateTap | None = None,
        inputs: Tensor | None = None,
        *,
        start: int | None = None,
    ) -> Tensor:
        """See `stree.models.model.read_row`. start, how many tokens the row has read, where no
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

    def read_both(
        self, model: HybridModel, cache: HybridCache, drafter: ModelDrafter, row: int,
        tokens: Tensor, timed: Timed, *, start: int, ahead: int,
    ) -> Tensor:  # fmt: skip
        """`read_row`, and after each piece its drafter reads it, with the features that it takes.
        ahead, how many more tokens than the target it has read; timed, a context around what the
        drafter does."""
        for each in (cache, drafter.cache):
            each.reserve(len(tokens), start)
        asked = drafter.feature_layers
        pieces = self.prepare(model, cache, row, start, len(tokens), asked, False, drafter)
        for piece, part in zip(pieces, tokens.split(LONGEST_PIECE), strict=True):
            logits = piece.replay(row, part)
            if ahead < len(part):
                with timed():
                    piece.replay_drafter(ahead)
            ahead = max(ahead - len(part), 0)
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
        drafter: ModelDrafter | None = None,
    ) -> list[PrefillGraph]:
        """The pieces of `count` more tokens after `start`, captured when first asked for: by a row
        without a path that is pending, behind whose tokens padding is written. layers, those whose
        streams are asked for; drafter, if one is to read each piece, too."""
        pieces: list[PrefillGraph] = []
        for begin in range(start, start + count, LONGEST_PIECE):
            size = piece_sizes(start + count - begin)[-1]
            bound = _bound_of(cache, begin + size)
            drafter_bound = None if drafter is None else _bound_of(drafter.cache, begin + size)
            key = id(model), id(cache), size, bound, layers, reads_inputs, drafter_bound
            if key not in self.pieces:
                piece = PrefillGraph(
                    model, cache, row, size, bound, layers, reads_inputs, self.capture,
                    beside=next(iter(self.pieces.values()), None),
                    room=self._room(model, cache, size),
                )  # fmt: skip
                if drafter is not None and drafter_bound is not None:
                    room = self._room(drafter.model, drafter.cache, size)
                    piece.add_drafter(drafter, drafter_bound, room, self.capture)
                self.pieces[key] = piece
            pieces.append(self.pieces[key])
        return pieces

    def _room(self, model: HybridModel, cache: HybridCache, size: int) -> PrefillScratch:
        """Shared by the pieces of a cache and size."""
        for each in self.pieces.values():
            if (found := each.rooms.get(id(cache))) is not None and each.size == size:
                return found
        with torch.inference_mode(False):  # it is written inside of it and outside
            return PrefillScratch(cache, size, model.config.d_conv)


def _bound_of(cache: HybridCache, num_used: int) -> int:
    """Slots to look at where so many are used, the padding's included."""
    bucket = ops.bucket(cache.num_slots, cache.device, cache.dtype)
    return bucket if bucket >= cache.num_slots else -(-num_used // bucket) * bucket


class PrefillGraph:
    """Reads up to `size` tokens, of any row.

    It is captured with no token of the row that is about to read, which changes nothing of it.
    Those of a reader share memory: they run one after the other. What they give lies outside,
    where no other's replay overwrites it.
    """

    def __init__(
        self, model: HybridModel, cache: HybridCache, row: int, size: int, bound: int,
        layers: tuple[int, ...], reads_inputs: bool, capture: CaptureType,
        beside: PrefillGraph | None, room: PrefillScratch,
    ) -> None:  # fmt: skip
        self.model, self.size, device = model, size, cache.device
        with torch.inference_mode(False):  # they are written inside of it and outside
            self.tokens = tokens = torch.zeros(1, size, dtype=torch.long, device=device)
            self.count = count = torch.zeros(1, dtype=torch.long, device=device)
            self.row = whose = torch.full_like(count, row)
            self.inputs: Tensor | None = None
            if reads_inputs:
                shape = 1, size, model.config.d_model
                self.inputs = torch.zeros(shape, dtype=model.dtype, device=device)
        self.rooms = {id(cache): room}  # by cache; kept, as graphs hold their addresses
        added = self.inputs
        self.given: list[Tensor] = []  # logits (1, V), then the streams (1, T, ·) of layers
        kept = self.given  # the function holds what it needs, and not this piece, which holds it

        @torch.no_grad()
        def read() -> None:
            features = HiddenStateTap(layers)
            last = model.prefill_padded(
                tokens, count, whose, cache, room, bound, features=features, inputs=added
            )
            given = [model.logits(last), *features.streams]
            if not kept:  # at the first rehearsal
                with torch.inference_mode(False):
                    kept.extend(torch.empty_like(each) for each in given)
            for mine, each in zip(kept, given, strict=True):
                mine.copy_(each)

        self.captured: Any = capture(device, read, None if beside is None else beside.captured)
        self.skipped: Tensor | None = None  # (1,) how many of its tokens its drafter has read
        self.captured_drafter: Any = None  # what its drafter does

    def add_drafter(
        self, drafter: ModelDrafter, bound: int, room: PrefillScratch, capture: CaptureType
    ) -> None:
        """Let a drafter read the piece, too, in a replay of its own."""
        self.rooms[id(drafter.cache)] = room
        tokens, count, row, given = self.tokens, self.count, self.row, self.given
        with torch.inference_mode(False):
            self.skipped = skipped = torch.zeros_like(count)

        def read() -> None:
            drafter.read_padded(tokens, count, skipped, row, room, bound, given[1:])

        self.captured_drafter = capture(tokens.device, read, self.captured)

    def replay(self, row: int, tokens: Tensor, inputs: Tensor | None = None) -> Tensor:
        """Let a row read tokens (T,), with inputs (T, D); returns logits (1, V) to be used before
        the next replay of this piece."""
        self.row.fill_(row)
        self.count.fill_(len(tokens))
        self.tokens[0, : len(tokens)] = tokens
        if self.inputs is not None and inputs is not None:
            self.inputs[0, : len(tokens)] = inputs
        self.captured.replay()
        return self.given[0]

    def replay_drafter(self, skipped: int) -> None:
        """Let its drafter read what it has read last, but for the first `skipped` tokens."""
        assert self.skipped is not None
        self.skipped.fill_(skipped)
        self.captured_drafter.replay()

    @property
    def streams(self) -> list[Tensor]:
        """What the last replay gave of them, (1, T, ·) a layer, padded."""
        return self.given[1:]
