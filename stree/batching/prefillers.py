"""Prefillers: read a prompt whole, or in chunks that run the kernels of a tree step."""

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
    from stree.drafters import Drafter

MAX_KEPT = 64  # graphs
SHORTEST_CHUNK, LONGEST_CHUNK = 16, 512  # tokens of a chunk, padding included
CaptureType = Callable[..., Any]  # of a device, a function and the one `beside`: has `replay`
Timed = Callable[[], AbstractContextManager[None]]


def chunk_size(most: int) -> int:
    """Return the padded size of the first chunk of `most` tokens."""
    return max(SHORTEST_CHUNK, 1 << (min(most, LONGEST_CHUNK) - 1).bit_length())


def chunk_sizes(most: int) -> list[int]:
    """Return the padded sizes of chunks of 1 to `most` tokens, smallest first."""
    powers = range(SHORTEST_CHUNK.bit_length() - 1, chunk_size(most).bit_length())
    return [1 << power for power in powers]


class Prefiller:
    """Read prompts by operations over whole sequences (CPU, where starting one costs little).

    Attributes:
        reads_both: Whether a drafter may read each chunk right after the target, by `read_both`.
    """

    reads_both: bool = False

    def read_row(
        self, model: HybridModel, cache: HybridCache, row: int, tokens: Tensor,
        features: HiddenStateTap | None = None, inputs: Tensor | None = None, *,
        start: int | None = None,
    ) -> Tensor:
        """Read tokens as `stree.models.model.read_row` does.

        start is the number of tokens that the row has read, if no accepted path of it is pending;
        None if that is not known.
        """
        return read_row(model, cache, row, tokens, features, inputs)

    def read_both(
        self, model: HybridModel, cache: HybridCache, drafter: Drafter, row: int, tokens: Tensor,
        timed: Timed, *, start: int, drafter_read: int,
    ) -> Tensor:
        """Read tokens with the target, and after each chunk let the drafter read it, too."""
        raise NotImplementedError

    def prepare(
        self, model: HybridModel, cache: HybridCache, row: int, start: int, count: int,
        layers: tuple[int, ...] = (), reads_inputs: bool = False, drafter: Drafter | None = None,
    ) -> list[PrefillGraph]:
        """Return the graphs of the chunks of `count` tokens after `start`, if there are any."""
        return []


class PromptCall:
    """Stand-in for `CudaGraph` whose replay calls the function."""

    def __init__(self, device: torch.device, function: Callable[[], Any], beside: Any) -> None:
        self.replay = function


class ChunkedPrefill(Prefiller):
    """Read prompts in chunks of up to LONGEST_CHUNK tokens, padded to a power of two (GPUs).

    A chunk is one call over a tree that is a chain (`stree.models.chunk_pass`): a host takes longer
    to start a whole prompt's operations than the device to do them.

    capture makes the object that replays a chunk's call: `CudaGraph`, or `PromptCall`.
    """

    reads_both = True

    def __init__(self, capture: CaptureType) -> None:
        self.capture = capture
        self.graphs: LRUCache[Any, PrefillGraph] = LRUCache(MAX_KEPT)

    def read_row(
        self, model: HybridModel, cache: HybridCache, row: int, tokens: Tensor,
        features: HiddenStateTap | None = None, inputs: Tensor | None = None, *,
        start: int | None = None,
    ) -> Tensor:
        """Read tokens in chunks; the next prefill overwrites the logits.

        Without `start` it asks the device, and waits for it.
        """
        if start is None:
            lengths = torch.stack([cache.length[row], cache.path_length[row]])
            committed, pending = lengths.tolist()
            start = committed + pending
            if pending:
                model.apply_path(cache.at(row))
        cache.reserve(len(tokens), start)
        asked, reads_inputs = () if features is None else features.layers, inputs is not None
        graphs = self.prepare(model, cache, row, start, len(tokens), asked, reads_inputs)
        parts = tokens.split(LONGEST_CHUNK)
        added = [None] * len(parts) if inputs is None else inputs.split(LONGEST_CHUNK)
        for graph, part, more in zip(graphs, parts, added, strict=True):
            logits = graph.replay(row, part, more)
            for layer, stream in zip(asked, graph.streams, strict=True):
                assert features is not None
                features.take(layer, stream[:, : len(part)].clone())
        return logits

    def read_both(
        self, model: HybridModel, cache: HybridCache, drafter: Drafter, row: int, tokens: Tensor,
        timed: Timed, *, start: int, drafter_read: int,
    ) -> Tensor:
        """Read tokens with the target, and after each chunk let the drafter read it, too.

        Args:
            model: The target.
            cache: The target's.
            drafter: Reads the target's features of the chunk, if it takes any.
            row: Row of both caches.
            tokens: (T,), on the device or the host.
            timed: A context around each run of the drafter.
            start: Tokens that the target has read.
            drafter_read: Tokens after `start` that the drafter has read already.

        Returns the target's logits (1, V), which the next prefill overwrites.
        """
        for each in (cache, drafter.cache):
            each.reserve(len(tokens), start)
        asked = drafter.feature_layers
        graphs = self.prepare(model, cache, row, start, len(tokens), asked, False, drafter)
        for graph, part in zip(graphs, tokens.split(LONGEST_CHUNK), strict=True):
            logits = graph.replay(row, part)
            if drafter_read < len(part):
                with timed():
                    graph.replay_drafter(drafter_read)
            drafter_read = max(drafter_read - len(part), 0)
        return logits

    def prepare(
        self, model: HybridModel, cache: HybridCache, row: int, start: int, count: int,
        layers: tuple[int, ...] = (), reads_inputs: bool = False, drafter: Drafter | None = None,
    ) -> list[PrefillGraph]:
        """Return the graphs of the chunks of `count` tokens after `start`.

        A graph is captured when it is first asked for, with a row that has no pending path:
        padding is written after its tokens.

        Args:
            model: Reads the chunks.
            cache: Its cache.
            row: Row to capture with.
            start: Tokens that the row has read.
            count: Tokens to read.
            layers: Layers whose residual streams are kept as features.
            reads_inputs: Whether inputs are added to the tokens' embeddings.
            drafter: A drafter that reads each chunk, too (`reads_alongside`); None for none.
        """
        graphs: list[PrefillGraph] = []
        for begin in range(start, start + count, LONGEST_CHUNK):
            size = chunk_size(start + count - begin)
            bound = _bound_of(cache, begin + size)
            drafter_bound = None if drafter is None else _bound_of(drafter.cache, begin + size)
            key = id(model), id(cache), size, bound, layers, reads_inputs, drafter_bound
            if key not in self.graphs:
                graph = PrefillGraph(
                    model, cache, row, size, bound, layers, reads_inputs, self.capture,
                    beside=next(iter(self.graphs.values()), None),
                    scratch=self._scratch_of(model, cache, size),
                )
                if drafter is not None and drafter_bound is not None:
                    scratch = self._scratch_of(drafter.model, drafter.cache, size)
                    graph.add_drafter(drafter, drafter_bound, scratch, self.capture)
                self.graphs[key] = graph
            graphs.append(self.graphs[key])
        return graphs

    def _scratch_of(self, model: HybridModel, cache: HybridCache, size: int) -> PrefillScratch:
        """Return the scratch buffers that all graphs of a cache and size share."""
        for each in self.graphs.values():
            if (found := each.scratches.get(id(cache))) is not None and each.size == size:
                return found
        with torch.inference_mode(False):  # it is written inside of it and outside
            return PrefillScratch(cache, size, model.config.d_conv)


def _bound_of(cache: HybridCache, num_used: int) -> int:
    """Return the number of cache slots to attend to when `num_used` are used, with padding."""
    bucket = ops.bucket(cache.num_slots, cache.device, cache.dtype)
    return bucket if bucket >= cache.num_slots else -(-num_used // bucket) * bucket


class PrefillGraph:
    """Graph that reads a chunk of up to `size` tokens into any row.

    It is captured with count = 0, which leaves the row unchanged. All graphs of a prefiller share
    one memory pool, because they run one after the other; their outputs are copied out of it.
    """

    def __init__(
        self, model: HybridModel, cache: HybridCache, row: int, size: int, bound: int,
        layers: tuple[int, ...], reads_inputs: bool, capture: CaptureType,
        beside: PrefillGraph | None, scratch: PrefillScratch,
    ) -> None:
        self.model, self.size, device = model, size, cache.device
        with torch.inference_mode(False):  # they are written inside of it and outside
            self.tokens = tokens = torch.zeros(1, size, dtype=torch.long, device=device)
            self.count = count = torch.zeros(1, dtype=torch.long, device=device)
            self.row = whose = torch.full_like(count, row)
            self.inputs: Tensor | None = None
            if reads_inputs:
                shape = 1, size, model.config.d_model
                self.inputs = torch.zeros(shape, dtype=model.dtype, device=device)
        self.scratches = {id(cache): scratch}  # by cache; kept, as graphs hold their addresses
        added = self.inputs
        self.given: list[Tensor] = []  # logits (1, V), then the streams (1, T, ·) of layers
        kept = self.given  # the function must not hold this object, which holds the function

        @torch.no_grad()
        def read() -> None:
            features = HiddenStateTap(layers)
            last = model.prefill_padded(
                tokens, count, whose, cache, scratch, bound, features=features, inputs=added
            )
            given = [model.logits(last), *features.streams]
            if not kept:  # at the first rehearsal
                with torch.inference_mode(False):
                    kept.extend(torch.empty_like(each) for each in given)
            for mine, each in zip(kept, given, strict=True):
                mine.copy_(each)

        self.captured: Any = capture(device, read, None if beside is None else beside.captured)
        self.skipped: Tensor | None = None  # (1,) tokens of the chunk that the drafter has read
        self.captured_drafter: Any = None  # the drafter's graph

    def add_drafter(
        self, drafter: Drafter, bound: int, scratch: PrefillScratch, capture: CaptureType
    ) -> None:
        """Capture the graph by which a drafter reads the same chunk."""
        self.scratches[id(drafter.cache)] = scratch
        tokens, count, row, given = self.tokens, self.count, self.row, self.given
        with torch.inference_mode(False):
            self.skipped = skipped = torch.zeros_like(count)

        def read() -> None:
            drafter.read_padded(tokens, count, skipped, row, scratch, bound, given[1:])

        self.captured_drafter = capture(tokens.device, read, self.captured)

    def replay(self, row: int, tokens: Tensor, inputs: Tensor | None = None) -> Tensor:
        """Let a row read tokens (T,), with inputs (T, D) added to their embeddings.

        The tokens may be on the host.
        Returns logits (1, V), which the next replay of this graph overwrites.
        """
        self.row.fill_(row)
        self.count.fill_(len(tokens))
        self.tokens[0, : len(tokens)].copy_(tokens, non_blocking=True)
        if self.inputs is not None and inputs is not None:
            self.inputs[0, : len(tokens)] = inputs
        self.captured.replay()
        return self.given[0]

    def replay_drafter(self, skipped: int) -> None:
        """Let the drafter read the chunk of the last replay without its first `skipped` tokens."""
        assert self.skipped is not None
        self.skipped.fill_(skipped)
        self.captured_drafter.replay()

    @property
    def streams(self) -> list[Tensor]:
        """Residual streams (1, T, ·) of the last replay, one a layer, with padding."""
        return self.given[1:]
