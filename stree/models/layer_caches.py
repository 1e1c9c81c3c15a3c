"""What a layer remembers between calls: keys and values, or a recurrent state, and the last tree's
inputs. Every buffer is static: calls can be captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from stree_kernels import naive, ops
from stree_kernels.contracts import CacheState, Derived, GatedDeltaShape, MixerShape

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
        """Keys stay where they are: `CacheState.rows` says whose they are."""
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

    def apply_path(self, mixer: Any, cache_state: CacheState) -> None:
        """Make the accepted path's keys and values contiguous."""
        for cache in (self.keys, self.values):
            naive.move_accepted(
                cache, cache_state.length, cache_state.path, cache_state.path_length
            )


@dataclass
class ConvCache:
    """What the conv of a layer reads: of [committed tail, last tree] its raw inputs, twice.

    A call writes the new tree into the half that does not hold the last one (`CacheState.parity`).
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

    def apply_path(self, mixer: Any, cache_state: CacheState) -> None:
        """Advance state and tail along the accepted path."""
        tail = naive.mamba_replay(self.rows, self.state, mixer.weights, self.shape, cache_state)
        self.tail = tail[..., : self.shape.num_channels]


@dataclass
class ShortConvCache(ConvCache):
    """A short convolution's inputs of [committed tail, last tree], and no state."""

    width: int  # of the convolution

    def tail_shape(self) -> tuple[int, int]:
        return self.width - 1, self.rows.shape[-1]

    def apply_path(self, mixer: Any, cache_state: CacheState) -> None:
        """Advance the tail along the accepted path."""
        self.tail = naive.short_conv_replay(self.rows, self.width - 1, cache_state)


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

    def apply_path(self, mixer: Any, cache_state: CacheState) -> None:
        """Advance state and tail along the accepted path."""
        tail = naive.gated_delta_replay(
            self.rows, self.updates, self.state, mixer.weights, self.shape, cache_state
        )
        self.tail = tail[..., : self.shape.num_channels]


LayerCache = AttentionCache | MambaCache | ShortConvCache | GatedDeltaCache
