"""Caches of one layer: keys and values, or a recurrent state, and inputs of the last tree.

Every buffer is static, so that calls can be captured. Shapes: B sequences, N nodes of the largest
tree, W the conv's width, C its channels. The conv state is the last W − 1 committed inputs of a
causal convolution.
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
    """Fill the entries `row` of a dimension with a value; works inside CUDA graphs."""
    if isinstance(row, Tensor):  # an assignment would bring the value from the host
        tensor.index_fill_(dim, row, value)
    else:
        tensor.transpose(0, dim)[row] = value


@dataclass
class AttentionCache:
    """Keys and values of an attention layer.

    Attributes:
        keys: (B, Hkv, slots, D); the nodes of a tree follow the committed tokens.
        values: (B, Hkv, slots, D).
        rotary: Cosines and sines (2, slots, D / 2), shared by all layers.
    """

    keys: Tensor
    values: Tensor
    rotary: Tensor

    def narrow(self, first: int, count: int) -> AttentionCache:
        keys, values = (each.narrow(0, first, count) for each in (self.keys, self.values))
        return AttentionCache(keys, values, self.rotary)

    def clear(self, row: Which = EACH) -> None:
        """Do nothing: slots from the committed length on are never read."""

    def save(self, length: int, row: int = 0) -> tuple[Tensor, ...]:
        """Return copies of the keys and values of a sequence's first `length` tokens."""
        return self.keys[row, :, :length].clone(), self.values[row, :, :length].clone()

    def load(self, saved: tuple[Tensor, ...], row: int = 0) -> None:
        """Write the copies that `save` returned into a row."""
        for cache, each in zip((self.keys, self.values), saved, strict=True):
            cache[row, :, : each.shape[1]] = each

    def for_chunk(self, num_nodes: int) -> AttentionCache:
        """Return this cache with angles for the padding of a chunk after the last slot."""
        return replace(self, rotary=F.pad(self.rotary, (0, 0, 0, num_nodes)))

    def taken(self, row: Tensor, scratch: AttentionCache) -> AttentionCache:
        """Return the cache for one row's prefill; `CacheState.rows` names the row's keys."""
        return replace(self, rotary=scratch.rotary)

    def put_back(self, row: Tensor, taken: AttentionCache) -> None: ...

    def sharing(self, other: AttentionCache) -> AttentionCache:
        """Return this cache: keys and values are never shared among layers."""
        return self

    def begin_joint(self) -> None: ...

    def end_joint(self) -> None: ...

    def held(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield each buffer with its part of `HybridCache.sequence_bytes`."""
        yield KEYS, self.keys
        yield KEYS, self.values

    def apply_path(self, mixer: Any, cache_state: CacheState) -> None:
        """Move the keys and values of the accepted path to the slots after the committed ones."""
        for cache in (self.keys, self.values):
            naive.move_accepted(
                cache, cache_state.length, cache_state.path, cache_state.path_length
            )


@dataclass
class ConvCache:
    """Raw inputs of a layer's conv, in two halves of [conv state, nodes of the last tree].

    A call writes the new tree into the half that does not hold the last one (`CacheState.parity`).
    With joint attainment all layers share `rows`, and each has a conv state of its own.

    Attributes:
        rows: (2, B, W − 1 + N, C or more).
        parity: (1,) the half of the last tree, shared by all layers.
        own_conv_state: (B, W − 1, C) with joint attainment, else None.
    """

    rows: Tensor
    parity: Tensor
    own_conv_state: Tensor | None = field(default=None, kw_only=True)

    def conv_state_shape(self) -> tuple[int, int]:
        """Return W − 1 and C."""
        raise NotImplementedError

    @property
    def conv_state(self) -> Tensor:
        """Last committed conv inputs (B, W − 1, C)."""
        if self.own_conv_state is None:
            return self._lent_conv_states.index_select(0, self.parity)[0]
        return self.own_conv_state

    @conv_state.setter
    def conv_state(self, conv_state: Tensor) -> None:
        if self.own_conv_state is None:
            self._lent_conv_states[self.parity] = conv_state[None]
        else:
            self.own_conv_state.copy_(conv_state)

    def narrow(self, first: int, count: int) -> Self:
        conv_state = self.own_conv_state
        return replace(
            self, rows=self.rows.narrow(1, first, count),
            own_conv_state=None if conv_state is None else conv_state.narrow(0, first, count),
        )

    def for_chunk(self, num_nodes: int) -> Self:
        """Return scratch buffers for one sequence that reads a chunk of `num_nodes` tokens.

        `taken` fills in the conv state and the state.
        """
        length, _ = self.conv_state_shape()
        rows = self.rows.new_zeros(2, 1, length + num_nodes, self.rows.shape[3])
        return replace(self, rows=rows, parity=torch.zeros_like(self.parity), own_conv_state=None)

    def taken(self, row: Tensor, scratch: Self) -> Self:
        """Copy a sequence's states, row (1,), into scratch buffers; `put_back` writes them back."""
        if self.own_conv_state is not None:
            return replace(scratch, own_conv_state=self.own_conv_state.index_select(0, row))
        return replace(scratch, own_conv_state=self._lent_conv_states[self.parity, row])

    def put_back(self, row: Tensor, taken: Self) -> None:
        """Write the states that a call has left in `taken` back to the row."""
        assert taken.own_conv_state is not None
        if self.own_conv_state is not None:
            self.own_conv_state.index_copy_(0, row, taken.own_conv_state)
        else:
            self._lent_conv_states[self.parity, row] = taken.own_conv_state

    def clear(self, row: Which = EACH) -> None:
        fill(self.rows[:, :, : self.conv_state_shape()[0]], row, 1)
        if self.own_conv_state is not None:
            fill(self.own_conv_state, row)

    def sharing(self, other: Self) -> Self:
        """Return this cache with the rows of another layer, and a conv state of its own."""
        conv_state = torch.zeros_like(self.conv_state, memory_format=torch.contiguous_format)
        return replace(self, rows=other.rows, own_conv_state=conv_state)

    def held(self) -> Iterator[tuple[str, Tensor | None]]:
        yield NODES, self.rows
        yield STATES, self.own_conv_state

    def save(self, length: int, row: int = 0) -> tuple[Tensor, ...]:
        """Return copies of a sequence's states after its committed tokens."""
        if self.own_conv_state is not None:
            return (self.own_conv_state[row].clone(),)
        return (self._lent_conv_states[:, row].index_select(0, self.parity)[0],)

    def load(self, saved: tuple[Tensor, ...], row: int = 0) -> None:
        """Write the copies that `save` returned into a row."""
        (conv_state,) = saved
        if self.own_conv_state is not None:
            self.own_conv_state[row] = conv_state
        else:
            self._lent_conv_states[:, row].index_copy_(0, self.parity, conv_state[None])

    @property
    def _lent_conv_states(self) -> Tensor:
        """Conv states inside `rows`, of both halves (2, B, W − 1, C)."""
        length, channels = self.conv_state_shape()
        return self.rows[:, :, :length, :channels]

    def begin_joint(self) -> None:
        """Copy the layer's own conv state into the shared rows, where the ops read it."""
        assert self.own_conv_state is not None
        self._lent_conv_states[0] = self.own_conv_state

    def end_joint(self) -> None:
        """Copy the conv state that the ops have left back to the layer's own."""
        assert self.own_conv_state is not None
        self.own_conv_state.copy_(self._lent_conv_states[0])


@dataclass
class RecurrentCache(ConvCache):
    """Cache of a recurrent layer: its state, and in `rows` also the inputs of its gates.

    Attributes:
        state: (B, …), fp32 or fp64.
        derived: Values of nodes that a kernel keeps for the replay (`ops.new_derived`), or None.
        shape: Dimensions of the mixer.
    """

    state: Tensor
    derived: Derived | None
    shape: Any

    def conv_state_shape(self) -> tuple[int, int]:
        return self.shape.tail, self.shape.num_channels

    def narrow(self, first: int, count: int) -> Self:
        return replace(
            super().narrow(first, count), state=self.state.narrow(0, first, count),
            derived=self.derived and self.derived.narrow(first, count),
        )

    def for_chunk(self, num_nodes: int) -> Self:
        scratch = super().for_chunk(num_nodes)
        return replace(scratch, derived=ops.new_derived(self.shape, scratch.rows))

    def taken(self, row: Tensor, scratch: Self) -> Self:
        alone = len(self.state) == 1  # nothing to copy
        state = self.state if alone else self.state.index_select(0, row)
        return replace(super().taken(row, scratch), state=state)

    def put_back(self, row: Tensor, taken: Self) -> None:
        super().put_back(row, taken)
        if taken.state is not self.state:
            self.state.index_copy_(0, row, taken.state)

    def clear(self, row: Which = EACH) -> None:
        super().clear(row)
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
        state, *conv_state = saved
        self.state[row] = state
        super().load(tuple(conv_state), row)


@dataclass
class MambaCache(RecurrentCache):
    """Cache of a Mamba-2 layer: a state (B, H, P, S), conv inputs and dt."""

    shape: MixerShape

    def apply_path(self, mixer: Any, cache_state: CacheState) -> None:
        """Advance state and conv state along the accepted path."""
        kept = naive.mamba_replay(self.rows, self.state, mixer.weights, self.shape, cache_state)
        self.conv_state = kept[..., : self.shape.num_channels]


@dataclass
class ShortConvCache(ConvCache):
    """Cache of a short convolution: its inputs of [conv state, last tree], and no other state."""

    width: int  # of the convolution

    def conv_state_shape(self) -> tuple[int, int]:
        return self.width - 1, self.rows.shape[-1]

    def apply_path(self, mixer: Any, cache_state: CacheState) -> None:
        """Advance the conv state along the accepted path."""
        self.conv_state = naive.short_conv_replay(self.rows, self.width - 1, cache_state)


@dataclass
class GatedDeltaCache(RecurrentCache):
    """Cache of a gated delta layer: state (B, H, K, V), conv inputs, a, and the tree's updates."""

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
        """Return a cache of sequences without tokens; states are fp32, or fp64 in an fp64 model."""
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

    def for_chunk(self, num_nodes: int) -> Self:
        updates = self.updates.new_zeros(1, num_nodes, *self.updates.shape[2:])
        return replace(super().for_chunk(num_nodes), updates=updates)

    def sharing(self, other: Self) -> Self:
        return replace(super().sharing(other), updates=other.updates)

    def held(self) -> Iterator[tuple[str, Tensor | None]]:
        yield from super().held()
        yield NODES, self.updates

    def apply_path(self, mixer: Any, cache_state: CacheState) -> None:
        """Advance state and conv state along the accepted path."""
        kept = naive.gated_delta_replay(
            self.rows, self.updates, self.state, mixer.weights, self.shape, cache_state
        )
        self.conv_state = kept[..., : self.shape.num_channels]


LayerCache = AttentionCache | MambaCache | ShortConvCache | GatedDeltaCache
