"""What a decoder remembers between calls: keys and values, recurrent states, and the last tree.

A call over a token tree writes no state. It keeps the inputs that the state update needs, and
the accepted path of that tree is replayed at the start of the next call (activation replay).
Every buffer is static and every length lives on the device, so that calls can be captured.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from stree.errors import UsageError
from stree.forest import Forest
from stree.models.config import HybridConfig
from stree.models.joint import LastTree, require_backtracking
from stree.models.rotary import rotary_angles
from stree.tree import TokenTree
from stree_kernels import naive, ops
from stree_kernels.shapes import Derived, GatedDeltaShape, MixerShape, Steering

Which = int | slice | Tensor  # of the sequences; a tensor of rows, (n,) int64, for graphs
EACH = slice(None)
STATES, KEYS, NODES = "states", "keys and values", "nodes of trees"


def fill(tensor: Tensor, row: Which, dim: int = 0, value: float = 0) -> None:
    """Fill what `row` says of a dimension, in graphs, too."""
    if isinstance(row, Tensor):  # an assignment would bring the value from the host
        tensor.index_fill_(dim, row, value)
    else:
        tensor.transpose(0, dim)[row] = value


@dataclass
class AttentionCache:
    """Keys and values, each (B, Hkv, slots, D); the tree's nodes sit behind the committed ones."""

    keys: Tensor
    values: Tensor
    rotary: Tensor  # (2, slots, D / 2), shared by all layers

    def narrow(self, first: int, count: int) -> AttentionCache:
        keys, values = (each.narrow(0, first, count) for each in (self.keys, self.values))
        return AttentionCache(keys, values, self.rotary)

    def reset(self, row: Which = EACH) -> None:
        """Nothing to forget: what is behind the length is never read."""

    def save(self, length: int, row: int = 0) -> tuple[Tensor, ...]:
        """Copies of what the committed tokens of a sequence have left."""
        return self.keys[row, :, :length].clone(), self.values[row, :, :length].clone()

    def load(self, saved: tuple[Tensor, ...], row: int = 0) -> None:
        """Take over what `save` gave."""
        for cache, each in zip((self.keys, self.values), saved, strict=True):
            cache[row, :, : each.shape[1]] = each

    def for_piece(self, num_nodes: int) -> AttentionCache:
        """With angles for what pads a piece behind the last slot, which nobody sees."""
        return replace(self, rotary=F.pad(self.rotary, (0, 0, 0, num_nodes)))

    def taken(self, row: Tensor, scratch: AttentionCache) -> AttentionCache:
        """Keys stay where they are: `Steering.rows` says whose they are."""
        return replace(self, rotary=scratch.rotary)

    def put_back(self, row: Tensor, taken: AttentionCache) -> None: ...

    def sharing(self, other: AttentionCache) -> AttentionCache:
        """Keys and values are each layer's own."""
        return self

    def begin_joint(self) -> None: ...

    def end_joint(self) -> None: ...

    def held(self) -> Iterator[tuple[str, Tensor | None]]:
        """What sequences take, each with its part of `HybridCache.sequence_bytes`."""
        yield KEYS, self.keys
        yield KEYS, self.values

    def apply_path(self, mixer: Any, steering: Steering) -> None:
        """Make the accepted path's keys and values contiguous."""
        for cache in (self.keys, self.values):
            naive.move_accepted(cache, steering.length, steering.path, steering.path_length)


@dataclass
class ConvCache:
    """What the conv of a layer reads: of [committed tail, last tree] its raw inputs, twice.

    A call writes the new tree into the half that does not hold the last one (`Steering.parity`).
    With joint attainment the rows serve all layers alike, and each has its tail beside.
    """

    rows: Tensor  # (2, B, W − 1 + N, C or more)
    parity: Tensor  # (1,), shared by all layers
    own_tail: Tensor | None = field(default=None, kw_only=True)  # (B, W − 1, C)

    def tail_shape(self) -> tuple[int, int]:
        """W − 1 and C."""
        raise NotImplementedError

    @property
    def tail(self) -> Tensor:
        """The last committed conv inputs, (B, W − 1, C)."""
        if self.own_tail is None:
            return self._lent_tails.index_select(0, self.parity)[0]
        return self.own_tail

    @tail.setter
    def tail(self, tail: Tensor) -> None:
        if self.own_tail is None:
            self._lent_tails[self.parity] = tail[None]
        else:
            self.own_tail.copy_(tail)

    def narrow(self, first: int, count: int) -> Self:
        tail = self.own_tail
        return replace(
            self, rows=self.rows.narrow(1, first, count),
            own_tail=None if tail is None else tail.narrow(0, first, count),
        )  # fmt: skip

    def for_piece(self, num_nodes: int) -> Self:
        """A cache of one sequence, whose tail and state are to come, for a tree of so many nodes
        that is committed in the same call."""
        length, _ = self.tail_shape()
        rows = self.rows.new_zeros(2, 1, length + num_nodes, self.rows.shape[3])
        return replace(self, rows=rows, parity=torch.zeros_like(self.parity), own_tail=None)

    def taken(self, row: Tensor, scratch: Self) -> Self:
        """What the committed tokens of a sequence, row (1,), have left, with room for nodes as
        `scratch` has; to be put back."""
        if self.own_tail is not None:
            return replace(scratch, own_tail=self.own_tail.index_select(0, row))
        return replace(scratch, own_tail=self._lent_tails[self.parity, row])

    def put_back(self, row: Tensor, taken: Self) -> None:
        """Take over what `taken` has become."""
        assert taken.own_tail is not None
        if self.own_tail is not None:
            self.own_tail.index_copy_(0, row, taken.own_tail)
        else:
            self._lent_tails[self.parity, row] = taken.own_tail

    def reset(self, row: Which = EACH) -> None:
        fill(self.rows[:, :, : self.tail_shape()[0]], row, 1)
        if self.own_tail is not None:
            fill(self.own_tail, row)

    def sharing(self, other: Self) -> Self:
        """The same with the rows of another layer, and a tail beside."""
        tail = torch.zeros_like(self.tail, memory_format=torch.contiguous_format)
        return replace(self, rows=other.rows, own_tail=tail)

    def held(self) -> Iterator[tuple[str, Tensor | None]]:
        yield NODES, self.rows
        yield STATES, self.own_tail

    def save(self, length: int, row: int = 0) -> tuple[Tensor, ...]:
        """Copies of what the committed tokens of a sequence have left."""
        if self.own_tail is not None:
            return (self.own_tail[row].clone(),)
        return (self._lent_tails[:, row].index_select(0, self.parity)[0],)

    def load(self, saved: tuple[Tensor, ...], row: int = 0) -> None:
        """Take over what `save` gave."""
        (tail,) = saved
        if self.own_tail is not None:
            self.own_tail[row] = tail
        else:
            self._lent_tails[:, row].index_copy_(0, self.parity, tail[None])

    @property
    def _lent_tails(self) -> Tensor:
        """Those among the rows, of both halves, (2, B, W − 1, C)."""
        length, channels = self.tail_shape()
        return self.rows[:, :, :length, :channels]

    def begin_joint(self) -> None:
        """Lay the tail where the ops read it."""
        assert self.own_tail is not None
        self._lent_tails[0] = self.own_tail

    def end_joint(self) -> None:
        """Take the tail that they have left."""
        assert self.own_tail is not None
        self.own_tail.copy_(self._lent_tails[0])


@dataclass
class RecurrentCache(ConvCache):
    """What a recurrent layer keeps: a state, and beside the conv's inputs what steers its gates."""

    state: Tensor  # (B, …)
    derived: Derived | None  # as `ops.new_derived`
    shape: Any

    def tail_shape(self) -> tuple[int, int]:
        return self.shape.tail, self.shape.num_channels

    def narrow(self, first: int, count: int) -> Self:
        return replace(
            super().narrow(first, count), state=self.state.narrow(0, first, count),
            derived=self.derived and self.derived.narrow(first, count),
        )  # fmt: skip

    def for_piece(self, num_nodes: int) -> Self:
        scratch = super().for_piece(num_nodes)
        return replace(scratch, derived=ops.new_derived(self.shape, scratch.rows))

    def taken(self, row: Tensor, scratch: Self) -> Self:
        alone = len(self.state) == 1  # nothing to copy
        state = self.state if alone else self.state.index_select(0, row)
        return replace(super().taken(row, scratch), state=state)

    def put_back(self, row: Tensor, taken: Self) -> None:
        super().put_back(row, taken)
        if taken.state is not self.state:
            self.state.index_copy_(0, row, taken.state)

    def reset(self, row: Which = EACH) -> None:
        super().reset(row)
        fill(self.state, row)

    def sharing(self, other: Self) -> Self:
        return replace(super().sharing(other), derived=other.derived)

    def held(self) -> Iterator[tuple[str, Tensor | None]]:
        yield from super().held()
        yield STATES, self.state
        if self.derived is not None:
            yield NODES, self.derived.xb
            yield NODES, self.derived.steps

    def save(self, length: int, row: int = 0) -> tuple[Tensor, ...]:
        return self.state[row].clone(), *super().save(length, row)

    def load(self, saved: tuple[Tensor, ...], row: int = 0) -> None:
        state, *tail = saved
        self.state[row] = state
        super().load(tuple(tail), row)


@dataclass
class MambaCache(RecurrentCache):
    """Mamba-2's: a state (B, H, P, S), conv inputs and dt."""

    shape: MixerShape

    def apply_path(self, mixer: Any, steering: Steering) -> None:
        """Advance state and tail along the accepted path."""
        tail = naive.mamba_replay(self.rows, self.state, mixer.weights, self.shape, steering)
        self.tail = tail[..., : self.shape.num_channels]


@dataclass
class ShortConvCache(ConvCache):
    """A short convolution's inputs of [committed tail, last tree], and no state."""

    width: int  # of the convolution

    def tail_shape(self) -> tuple[int, int]:
        return self.width - 1, self.rows.shape[-1]

    def apply_path(self, mixer: Any, steering: Steering) -> None:
        """Advance the tail along the accepted path."""
        self.tail = naive.short_conv_replay(self.rows, self.width - 1, steering)


@dataclass
class GatedDeltaCache(RecurrentCache):
    """The gated delta rule's: a state (B, H, K, V), conv inputs and a, and the last tree's
    updates."""

    shape: GatedDeltaShape
    updates: Tensor  # (B, N, H, V)

    @classmethod
    def empty(
        cls,
        shape: GatedDeltaShape,
        batch: int,
        max_nodes: int,
        parity: Tensor,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> GatedDeltaCache:
        """For sequences that have not begun. State and updates are fp32, or fp64 with fp64."""
        wide = naive.accumulation_dtype(dtype)

        def zeros(*dims: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(dims, device=device, dtype=dtype)

        heads = shape.num_heads
        rows = zeros(2, batch, shape.tail + max_nodes, shape.num_kept)
        state = zeros(batch, heads, shape.key_dim, shape.value_dim, dtype=wide)
        updates = zeros(batch, max_nodes, heads, shape.value_dim, dtype=wide)
        return cls(rows, parity, state, ops.new_derived(shape, rows), shape, updates)

    def narrow(self, first: int, count: int) -> Self:
        return replace(super().narrow(first, count), updates=self.updates.narrow(0, first, count))

    def for_piece(self, num_nodes: int) -> Self:
        updates = self.updates.new_zeros(1, num_nodes, *self.updates.shape[2:])
        return replace(super().for_piece(num_nodes), updates=updates)

    def sharing(self, other: Self) -> Self:
        return replace(super().sharing(other), updates=other.updates)

    def held(self) -> Iterator[tuple[str, Tensor | None]]:
        yield from super().held()
        yield NODES, self.updates

    def apply_path(self, mixer: Any, steering: Steering) -> None:
        """Advance state and tail along the accepted path."""
        tail = naive.gated_delta_replay(
            self.rows, self.updates, self.state, mixer.weights, self.shape, steering
        )
        self.tail = tail[..., : self.shape.num_channels]


@dataclass(frozen=True)
class SavedPrefix:
    """What a cache holds of the first `length` tokens of a sequence, by layer; keys and values may
    be of some slots more, which nobody reads."""

    length: int
    layers: list[tuple[Tensor, ...]]


LayerCache = AttentionCache | MambaCache | ShortConvCache | GatedDeltaCache


class HybridCache:
    """One cache a mixer, the committed length, and the accepted path not yet replayed.

    `layers` has them in the order of `HybridConfig.mixers` over all layers.

    Args: batch sequences of at most max_length committed tokens, trees of at most max_nodes;
    backtracking, whether calls replay the accepted path, or feed it again (`stree.models.joint`).
    States are fp32, or fp64 in an fp64 model: in bf16 they drift over thousands of tokens.
    """

    def __init__(
        self,
        config: HybridConfig,
        max_length: int,
        max_nodes: int,
        *,
        batch: int = 1,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        backtracking: str = "replay",
    ) -> None:
        self.max_length = max_length
        self.max_nodes = max_nodes
        self.dtype = dtype
        # Moving a path's keys touches up to max_nodes slots past the committed ones
        self.num_slots = max_length + 2 * max_nodes
        self.layers: list[LayerCache] = []
        state_dtype = naive.accumulation_dtype(dtype)

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(batch, *shape, device=device, dtype=dtype)

        self.length = zeros(dtype=torch.long)  # (B,) tokens in the state
        self.path = zeros(max_nodes, dtype=torch.long)  # (B, K) nodes to replay
        self.path_length = zeros(dtype=torch.long)  # (B,) how many of them count
        self.variant = zeros(dtype=torch.long)  # (B,) the tree of each sequence, if several
        self.parity = torch.zeros(1, device=device, dtype=torch.long)
        self.steering = Steering(
            self.length, self.path, self.path_length, self.variant, self.parity
        )
        self.longest_path: int | None = None  # what the host knows of path_length: the most
        self.last_tree: LastTree | None = None
        if require_backtracking(backtracking) == "joint":
            path = Forest.of([TokenTree.chain(max_nodes - 1)], self.parity.device)
            self.last_tree = LastTree.empty(batch, path.topology(config.d_conv), self.parity)
        rotary = None
        if config.attn_layers:
            positions = torch.arange(self.num_slots, device=device)
            rotary = rotary_angles(config, positions, state_dtype)

        def attention() -> AttentionCache:
            assert rotary is not None
            dims = (config.num_kv_heads, self.num_slots, config.head_dim)
            return AttentionCache(zeros(*dims), zeros(*dims), rotary)

        def kept_rows(width: int, channels: int) -> Tensor:
            rows = (2, batch, width - 1 + max_nodes, channels)
            return torch.zeros(rows, device=device, dtype=dtype)

        def mamba() -> MambaCache:
            shape = config.mixer_shape
            state = zeros(shape.num_heads, shape.head_dim, shape.d_state, dtype=state_dtype)
            rows = kept_rows(shape.width, shape.num_kept)
            return MambaCache(rows, self.parity, state, ops.new_derived(shape, rows), shape)

        def short_conv() -> ShortConvCache:
            rows = kept_rows(config.d_conv, config.d_model)
            return ShortConvCache(rows, self.parity, config.d_conv)

        def gated_delta() -> GatedDeltaCache:
            shape = config.gated_delta_shape
            return GatedDeltaCache.empty(
                shape, batch, max_nodes, self.parity, device=device, dtype=dtype
            )

        make: dict[str, Callable[[], LayerCache]] = {
            "attention": attention, "mamba": mamba, "short_conv": short_conv,
            "gated_delta": gated_delta,
        }  # fmt: skip
        alike: dict[str, Any] = {}
        for kind in chain.from_iterable(map(config.mixers, range(config.num_layers))):
            layer = make[kind]()
            if self.last_tree is not None:
                layer = layer.sharing(alike.setdefault(kind, layer))
            self.layers.append(layer)
        self.num_committed = 0  # the host's count, the pending path included

    @property
    def device(self) -> torch.device:
        return self.path.device

    def sequence_bytes(self) -> dict[str, int]:
        """What a sequence takes, by part: its states, its keys and values, and what calls keep of a
        tree's nodes (to replay the accepted path)."""
        held = {id(each): (part, each) for layer in self.layers for part, each in layer.held()}
        parts = dict.fromkeys((STATES, KEYS, NODES), 0)
        for part, each in held.values():
            parts[part] += 0 if each is None else each.nbytes // len(self.length)
        return parts

    def narrow(self, first: int, count: int) -> HybridCache:
        """The same buffers, of some of the sequences only."""
        view = copy.copy(self)
        if count == len(self.length):
            return view
        for name in ("length", "path", "path_length", "variant"):
            setattr(view, name, getattr(self, name).narrow(0, first, count))
        view.steering = Steering(
            view.length, view.path, view.path_length, view.variant, self.parity
        )
        view.last_tree = self.last_tree and self.last_tree.narrow(first, count)
        view.layers = [layer.narrow(first, count) for layer in self.layers]
        return view

    def at(self, row: int) -> HybridCache:
        """One sequence, as a cache of its own to read a prompt into. Waits for the device."""
        view = self.narrow(row, 1)
        view.num_committed = int(view.length + view.path_length)
        return view

    def reset(self, row: Which = EACH) -> None:
        """Forget everything of all sequences, or of some, so that the buffers serve others."""
        for layer in self.layers:
            layer.reset(row)
        fill(self.length, row)
        fill(self.path_length, row)
        self.num_committed = 0

    def save(self, row: int = 0) -> SavedPrefix:
        """Copies of what the committed tokens of one sequence have left; a path that is accepted
        and not replayed yet is left out. Waits for the device."""
        length = int(self.length[row])
        return SavedPrefix(length, self.copies(row, length))

    def copies(self, row: int, most: int) -> list[tuple[Tensor, ...]]:
        """What `save` copies, by layer, where the host only knows that there are at most so many
        committed tokens; does not wait for the device."""
        return [layer.save(most, row) for layer in self.layers]

    def load(self, saved: SavedPrefix, row: int | None = None) -> None:
        """Begin one sequence, the only one unless `row` says which, as if it had just read what was
        saved."""
        if row is None:
            assert len(self.length) == 1, "which of the sequences?"
            row, self.num_committed = 0, saved.length
        for layer, each in zip(self.layers, saved.layers, strict=True):
            layer.load(each, row)
        self.length[row].fill_(saved.length)
        self.path_length[row].zero_()

    def commit(self, path: Sequence[int]) -> None:
        """Accept a path of the last tree, root first; it is replayed by the next call.

        Raises `UsageError` when the cache is full.
        """
        self.reserve(len(path))
        self.path[:, : len(path)] = torch.tensor(list(path), device=self.path.device)
        self.path_length.fill_(len(path))
        self.num_committed += len(path)

    def reserve(self, num_tokens: int, after: int | None = None) -> None:
        """Check that as many more tokens fit, after those that are committed (or after so many)."""
        start = self.num_committed if after is None else after
        if start + num_tokens > self.max_length:
            raise UsageError(
                f"{start} + {num_tokens} tokens do not fit a cache of {self.max_length}; raise "
                "max_length"
            )
