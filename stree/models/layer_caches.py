"""Caches of one layer: keys and values, or a recurrent state, and inputs of the last tree.

Every buffer is static, so that calls can be captured. Shapes: B sequences, N nodes of the largest
tree, W the conv's width, C its channels. The conv state is the last W − 1 committed inputs of a
causal convolution.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from stree.models.config import HybridConfig
from stree_kernels import naive, ops
from stree_kernels.contracts import CacheState, Derived, Mamba1Held

Which = int | slice | Tensor  # of the sequences; a tensor of rows, (n,) int64, for graphs
EACH = slice(None)
STATES, KEYS, NODES = "states", "keys and values", "nodes of trees"


def fill(tensor: Tensor, row: Which, dim: int = 0, value: float = 0) -> None:
    """Fill the entries `row` of a dimension with a value; works inside CUDA graphs."""
    if isinstance(row, Tensor):  # an assignment would bring the value from the host
        tensor.index_fill_(dim, row, value)
    else:
        tensor.transpose(0, dim)[row] = value


class CacheSizes(NamedTuple):
    """Sizes that the caches of all layers share, and buffers that they share.

    Attributes:
        batch: Number of sequences.
        max_nodes: Most nodes of a tree.
        num_slots: Slots of keys and values of a sequence.
        parity: (1,), see `ConvCache`.
        rotary: Cosines and sines (2, slots, D / 2); None without attention.
        device: Where the buffers lie.
        dtype: Of keys, values and conv inputs.
    """

    batch: int
    max_nodes: int
    num_slots: int
    parity: Tensor
    rotary: Tensor | None
    device: torch.device | str
    dtype: torch.dtype

    def zeros(self, *dims: int) -> Tensor:
        """Return zeros of some dimensions in the model's dtype."""
        return torch.zeros(dims, device=self.device, dtype=self.dtype)

    def new_state(self, *dims: int) -> Tensor:
        """Return zeros (B, …) of a state: fp32, or fp64 in an fp64 model."""
        dtype = naive.accumulation_dtype(self.dtype)
        return torch.zeros(self.batch, *dims, device=self.device, dtype=dtype)


class Buffer(NamedTuple):
    """Declaration of a cache's buffer: its part of `HybridCache.sequence_bytes`, and its dims."""

    part: str
    sequences: int = 0  # dimension of the sequences
    nodes: int = 1  # dimension of a tree's nodes, in a buffer of that part


@dataclass(kw_only=True)
class LayerCache:
    """Buffers of one mixer, declared by the names of their fields; a buffer may be None.

    Attributes:
        max_nodes: N.
    """

    BUFFERS: ClassVar[dict[str, Buffer]] = {}
    max_nodes: int

    @classmethod
    def of(cls, config: HybridConfig, sizes: CacheSizes) -> Self:
        """Return the cache of sequences without tokens."""
        raise NotImplementedError

    def buffers(self, part: str | None = None) -> Iterator[tuple[str, Buffer, Tensor]]:
        """Yield name, declaration and tensor of each buffer, or of those of one part."""
        for name, buffer in self.BUFFERS.items():
            tensor = getattr(self, name)
            if tensor is not None and part in (None, buffer.part):
                yield name, buffer, tensor

    def _with(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def narrow(self, first: int, count: int) -> Self:
        """Return a view of `count` sequences from `first` on."""
        return self._with(**{
            name: tensor.narrow(buffer.sequences, first, count)
            for name, buffer, tensor in self.buffers()
        })

    def for_chunk(self, num_nodes: int) -> Self:
        """Return scratch buffers for one sequence that reads a chunk of `num_nodes` tokens.

        `taken` fills in the states.
        """
        scratch: dict[str, Any] = {}
        for name, buffer, tensor in self.buffers(NODES):
            dims = list(tensor.shape)
            dims[buffer.sequences] = 1
            dims[buffer.nodes] += num_nodes - self.max_nodes
            scratch[name] = tensor.new_zeros(dims)
        return replace(self, max_nodes=num_nodes, **scratch)

    def taken(self, row: Tensor, scratch: Self) -> Self:
        """Copy a sequence's states, row (1,), into scratch buffers; `put_back` writes them back."""
        return scratch._with(**{
            name: state if len(state) == 1 else state.index_select(0, row)  # alone: nothing to copy
            for name, _, state in self.buffers(STATES)
        })

    def put_back(self, row: Tensor, taken: Self) -> None:
        """Write the states that a call has left in `taken` back to the row."""
        for name, _, state in self.buffers(STATES):
            if getattr(taken, name) is not state:
                state.index_copy_(0, row, getattr(taken, name))

    def clear(self, row: Which = EACH) -> None:
        """Empty the states of some sequences. What is kept of nodes is never read before a tree."""
        for _, _, state in self.buffers(STATES):
            fill(state, row)

    def save(self, length: int, row: int = 0) -> tuple[Tensor, ...]:
        """Return copies of a sequence's states after its committed tokens."""
        return tuple(state[row].clone() for _, _, state in self.buffers(STATES))

    def load(self, saved: tuple[Tensor, ...], row: int = 0) -> None:
        """Write the copies that `save` returned into a row."""
        for (_, _, state), each in zip(self.buffers(STATES), saved, strict=True):
            state[row] = each

    def sharing(self, other: Self) -> Self:
        """Return this cache with what another layer's keeps of nodes."""
        return self._with(**{name: tensor for name, _, tensor in other.buffers(NODES)})

    def begin_joint(self) -> None:
        """Begin a layer's ops over [accepted path, tree]."""

    def end_joint(self) -> None:
        """End these ops."""

    def apply_path(self, mixer: Any, cache_state: CacheState) -> None:
        """Advance the states along the accepted path."""
        raise NotImplementedError


@dataclass(kw_only=True)
class AttentionCache(LayerCache):
    """Keys and values of an attention layer; slots from the committed length on are never read.

    Attributes:
        keys: (B, Hkv, slots, D); the nodes of a tree follow the committed tokens.
        values: (B, Hkv, slots, D).
        rotary: Cosines and sines (2, slots, D / 2), shared by all layers.
    """

    BUFFERS: ClassVar = {"keys": Buffer(KEYS), "values": Buffer(KEYS)}
    keys: Tensor
    values: Tensor
    rotary: Tensor

    @classmethod
    def of(cls, config: HybridConfig, sizes: CacheSizes) -> Self:
        assert sizes.rotary is not None
        dims = sizes.batch, config.num_kv_heads, sizes.num_slots, config.head_dim
        return cls(
            max_nodes=sizes.max_nodes, keys=sizes.zeros(*dims), values=sizes.zeros(*dims),
            rotary=sizes.rotary,
        )

    def save(self, length: int, row: int = 0) -> tuple[Tensor, ...]:
        """Return copies of the keys and values of a sequence's first `length` tokens."""
        return self.keys[row, :, :length].clone(), self.values[row, :, :length].clone()

    def load(self, saved: tuple[Tensor, ...], row: int = 0) -> None:
        for cache, each in zip((self.keys, self.values), saved, strict=True):
            cache[row, :, : each.shape[1]] = each

    def for_chunk(self, num_nodes: int) -> Self:
        """Return this cache with angles for the padding of a chunk after the last slot."""
        return replace(self, rotary=F.pad(self.rotary, (0, 0, 0, num_nodes)))

    def taken(self, row: Tensor, scratch: Self) -> Self:
        """Return the cache for one row's prefill; `CacheState.rows` names the row's keys."""
        return replace(self, rotary=scratch.rotary)

    def apply_path(self, mixer: Any, cache_state: CacheState) -> None:
        """Move the keys and values of the accepted path to the slots after the committed ones."""
        for cache in (self.keys, self.values):
            naive.move_accepted(
                cache, cache_state.length, cache_state.path, cache_state.path_length
            )


@dataclass(kw_only=True)
class ConvCache(LayerCache):
    """Raw inputs of a layer's conv, in two halves of [conv state, nodes of the last tree].

    A call writes the new tree into the half that does not hold the last one (`CacheState.parity`).
    With joint attainment all layers share `history`, and each has a conv state of its own.

    Attributes:
        history: (2, B, W − 1 + N, C or more).
        parity: (1,) the half of the last tree, shared by all layers.
        own_conv_state: (B, W − 1, C) with joint attainment, else None.
    """

    BUFFERS: ClassVar = {"own_conv_state": Buffer(STATES), "history": Buffer(NODES, 1, 2)}
    history: Tensor
    parity: Tensor
    own_conv_state: Tensor | None = None

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

    def for_chunk(self, num_nodes: int) -> Self:
        scratch = super().for_chunk(num_nodes)
        return replace(scratch, parity=torch.zeros_like(self.parity), own_conv_state=None)

    def taken(self, row: Tensor, scratch: Self) -> Self:
        taken = super().taken(row, scratch)
        if self.own_conv_state is not None:
            return taken
        return replace(taken, own_conv_state=self._lent_conv_states[self.parity, row])

    def put_back(self, row: Tensor, taken: Self) -> None:
        super().put_back(row, taken)
        if self.own_conv_state is None:
            assert taken.own_conv_state is not None
            self._lent_conv_states[self.parity, row] = taken.own_conv_state

    def clear(self, row: Which = EACH) -> None:
        super().clear(row)
        fill(self.history[:, :, : self.conv_state_shape()[0]], row, 1)

    def sharing(self, other: Self) -> Self:
        """Return this cache with what another layer's keeps of nodes, and its own conv state."""
        conv_state = torch.zeros_like(self.conv_state, memory_format=torch.contiguous_format)
        return replace(super().sharing(other), own_conv_state=conv_state)

    def save(self, length: int, row: int = 0) -> tuple[Tensor, ...]:
        saved = super().save(length, row)
        if self.own_conv_state is not None:
            return saved
        return self._lent_conv_states[:, row].index_select(0, self.parity)[0], *saved

    def load(self, saved: tuple[Tensor, ...], row: int = 0) -> None:
        if self.own_conv_state is None:
            conv_state, *saved = saved  # type: ignore[assignment]
            self._lent_conv_states[:, row].index_copy_(0, self.parity, conv_state[None])
        super().load(saved, row)

    @property
    def _lent_conv_states(self) -> Tensor:
        """Conv states inside `history`, of both halves (2, B, W − 1, C)."""
        length, channels = self.conv_state_shape()
        return self.history[:, :, :length, :channels]

    def begin_joint(self) -> None:
        """Copy the layer's own conv state into the shared history, where the ops read it."""
        assert self.own_conv_state is not None
        self._lent_conv_states[0] = self.own_conv_state

    def end_joint(self) -> None:
        """Copy the conv state that the ops have left back to the layer's own."""
        assert self.own_conv_state is not None
        self.own_conv_state.copy_(self._lent_conv_states[0])


@dataclass(kw_only=True)
class ShortConvCache(ConvCache):
    """Cache of a short convolution: its inputs of [conv state, last tree], and no other state."""

    width: int  # of the convolution

    @classmethod
    def of(cls, config: HybridConfig, sizes: CacheSizes) -> Self:
        length = config.d_conv - 1 + sizes.max_nodes
        history = sizes.zeros(2, sizes.batch, length, config.d_model)
        return cls(
            max_nodes=sizes.max_nodes, history=history, parity=sizes.parity, width=config.d_conv
        )

    def conv_state_shape(self) -> tuple[int, int]:
        return self.width - 1, self.history.shape[-1]

    def apply_path(self, mixer: Any, cache_state: CacheState) -> None:
        """Advance the conv state along the accepted path."""
        self.conv_state = naive.short_conv_replay(self.history, self.width - 1, cache_state)


@dataclass(kw_only=True)
class RecurrentCache(ConvCache):
    """Cache of a recurrent layer: its state, and in `history` also the inputs of its gates.

    Attributes:
        state: (B, …), fp32 or fp64.
        shape: Dimensions of the mixer.

    A subclass names the two buffers of nodes in which the kernels keep for the replay what they
    compute of the inputs (`Derived`); these are None where plain PyTorch serves.
    """

    BUFFERS: ClassVar = {**ConvCache.BUFFERS, "state": Buffer(STATES)}
    DERIVED: ClassVar[tuple[str, str]]
    state: Tensor
    shape: Any

    @classmethod
    def empty(cls, shape: Any, sizes: CacheSizes, **more: Any) -> Self:
        """Return the cache of sequences without tokens, for a mixer of some dimensions."""
        history = sizes.zeros(2, sizes.batch, shape.tail + sizes.max_nodes, shape.num_kept)
        derived = ops.new_derived(shape, history)
        return cls(
            max_nodes=sizes.max_nodes, history=history, parity=sizes.parity, shape=shape,
            state=sizes.new_state(*shape.state_dims),
            **dict(zip(
                cls.DERIVED, (derived.convolved, derived.decays) if derived else (None, None),
                strict=True,
            )),
            **more,
        )

    @functools.cached_property
    def derived(self) -> Derived | None:
        """Buffers of nodes as the kernels take them."""
        convolved, decays = (getattr(self, name) for name in self.DERIVED)
        return None if convolved is None else Derived(convolved, decays)

    def conv_state_shape(self) -> tuple[int, int]:
        return self.shape.tail, self.shape.num_channels


@dataclass(kw_only=True)
class MambaCache(RecurrentCache):
    """Cache of a Mamba-2 layer: a state (B, H, P, S), conv inputs and dt.

    Attributes:
        x_and_B: (2, B, N, Cx + Cb), after the conv.
        dt_and_decay: (2, B, 2, N, H), dt and the log-decay from the root.
    """

    DERIVED: ClassVar = "x_and_B", "dt_and_decay"
    BUFFERS: ClassVar = {
        **RecurrentCache.BUFFERS,
        "x_and_B": Buffer(NODES, 1, 2), "dt_and_decay": Buffer(NODES, 1, 3),
    }
    x_and_B: Tensor | None
    dt_and_decay: Tensor | None

    @classmethod
    def of(cls, config: HybridConfig, sizes: CacheSizes) -> Self:
        return cls.empty(config.mixer_shape, sizes)

    def apply_path(self, mixer: Any, cache_state: CacheState) -> None:
        """Advance state and conv state along the accepted path."""
        kept = naive.mamba_replay(self.history, self.state, mixer.weights, self.shape, cache_state)
        self.conv_state = kept[..., : self.shape.num_channels]


@dataclass(kw_only=True)
class GatedDeltaCache(RecurrentCache):
    """Cache of a gated delta layer: state (B, H, K, V), conv inputs, a, and the tree's updates.

    Attributes:
        q_and_k: (2, B, N, 2·G·K), after the conv.
        gate_and_decay: (2, B, 2, N, H), a after its softplus and the log-decay from the root.
        updates: (B, N, H, V).
    """

    DERIVED: ClassVar = "q_and_k", "gate_and_decay"
    BUFFERS: ClassVar = {
        **RecurrentCache.BUFFERS, "q_and_k": Buffer(NODES, 1, 2),
        "gate_and_decay": Buffer(NODES, 1, 3), "updates": Buffer(NODES),
    }
    q_and_k: Tensor | None
    gate_and_decay: Tensor | None
    updates: Tensor

    @classmethod
    def of(cls, config: HybridConfig, sizes: CacheSizes) -> Self:
        return cls.empty(config.gated_delta_shape, sizes)

    @classmethod
    def empty(cls, shape: Any, sizes: CacheSizes, **more: Any) -> Self:
        updates = sizes.new_state(sizes.max_nodes, shape.num_heads, shape.value_dim)
        return super().empty(shape, sizes, updates=updates, **more)

    def apply_path(self, mixer: Any, cache_state: CacheState) -> None:
        """Advance state and conv state along the accepted path."""
        kept = naive.gated_delta_replay(
            self.history, self.updates, self.state, mixer.weights, self.shape, cache_state
        )
        self.conv_state = kept[..., : self.shape.num_channels]


@dataclass(kw_only=True)
class Mamba1Cache(LayerCache):
    """Cache of a Mamba-1 layer: `Mamba1Held`, in one half, as a program owns its channels.

    The inputs of nodes are read before the new ones are written, by the same program.
    """

    BUFFERS: ClassVar = {
        "conv_state": Buffer(STATES), "state": Buffer(STATES),
        "inputs": Buffer(NODES), "dt": Buffer(NODES), "B": Buffer(NODES),
    }
    conv_state: Tensor
    state: Tensor
    inputs: Tensor
    dt: Tensor
    B: Tensor

    @classmethod
    def of(cls, config: HybridConfig, sizes: CacheSizes) -> Self:
        shape, nodes = config.mamba1_shape, (sizes.batch, sizes.max_nodes)
        return cls(
            max_nodes=sizes.max_nodes,
            conv_state=sizes.zeros(sizes.batch, shape.tail, shape.d_inner),
            state=sizes.new_state(shape.d_inner, shape.d_state),
            inputs=sizes.zeros(*nodes, shape.d_inner), dt=sizes.zeros(*nodes, shape.d_inner),
            B=sizes.zeros(*nodes, shape.d_state),
        )

    @functools.cached_property
    def held(self) -> Mamba1Held:
        """Buffers as the ops take them."""
        return Mamba1Held(*(getattr(self, name) for name in Mamba1Held._fields))

    def sharing(self, other: Self) -> Self:
        states = {name: torch.zeros_like(each) for name, _, each in self.buffers(STATES)}
        return super().sharing(other)._with(**states)

    def apply_path(self, mixer: Any, cache_state: CacheState) -> None:
        """Advance state and conv state along the accepted path."""
        naive.mamba1_replay(self.held, mixer.weights, mixer.shape, cache_state)

