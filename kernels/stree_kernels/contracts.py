"""Records of tensors that the ops of a tree call share: weights, the trees, the call's state.

Shapes: B batch, N tree nodes, H heads, P head dim, S state, G groups, C channels, W conv width,
K places of an accepted path, Z trees.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Terms to be added to a stream (…, D): none, parts of a sum (S, …, D), or several such
Added = Tensor | tuple[Tensor, ...] | None


@dataclass(frozen=True)
class MixerWeights:
    """Parameters of conv and scan: conv (C, W) and (C,) or None; dt_bias, A_log and D (H,)."""

    conv: Tensor
    conv_bias: Tensor | None
    dt_bias: Tensor
    A_log: Tensor
    D: Tensor


@dataclass(frozen=True)
class GatedDeltaWeights:
    """Parameters of conv and decay: conv (C, W) and (C,) or None; dt_bias and A_log (H,)."""

    conv: Tensor
    conv_bias: Tensor | None
    dt_bias: Tensor
    A_log: Tensor


@dataclass(frozen=True)
class Mamba1Weights:
    """Parameters of conv and scan: conv (E, W) and (E,) or None; dt_bias and D (E,); A_log (E, S).

    E are channels, S the dimension of a channel's state. C is multiplied by `c_scale` (S,), if any,
    after its norm.
    """

    conv: Tensor
    conv_bias: Tensor | None
    dt_bias: Tensor
    A_log: Tensor
    D: Tensor
    c_scale: Tensor | None = None


class Mamba1Held(NamedTuple):
    """Buffers of a Mamba-1 layer: states, and values of the last tree's nodes for the replay.

    conv_state (B, W − 1, E) and state (B, E, S), after the committed tokens; inputs (B, N, E), raw,
    of the conv; dt (B, N, E), before bias and softplus; B (B, N, S).
    """

    conv_state: Any
    state: Any
    inputs: Any
    dt: Any
    B: Any


class NodeArgs(NamedTuple):
    """`Derived` as kernels take it; Any is a tensor on the host and a pointer on the device."""

    convolved: Any
    convolved_strides: Any  # of halves, sequences and nodes
    decays: Any
    decays_strides: Any  # of halves, sequences, dt or log-decay, and nodes


@dataclass(frozen=True)
class Derived:
    """Values that the fused kernels keep of a tree's nodes with their raw inputs, double-buffered.

    convolved (2, B, N, Cx + Cb), silu(conv) of x and B, or of q and k; decays (2, B, 2, N, H) fp32,
    dt and then the log-decay from the root (included). Replay and later levels read them; plain
    PyTorch does not.
    """

    convolved: Tensor
    decays: Tensor

    @functools.cached_property
    def args(self) -> NodeArgs:
        convolved, decays = self.convolved, self.decays
        return NodeArgs(convolved, convolved.stride()[:3], decays, decays.stride()[:4])


class TreeArgs(NamedTuple):
    """`Topology` as kernels take it."""

    ancestors: Any  # as uint8
    depths: Any
    windows: Any
    size: Any  # N


@dataclass(frozen=True)
class Topology:
    """Z trees of N nodes on a device; every parent comes before its children.

    Attributes:
        ancestors: (Z, N, N) bool: [z, i, j] is true when j is i or an ancestor of i.
        depths: (Z, N) int32.
        windows: (Z, N, W) int32, inputs of a causal conv at each node, oldest first, as indices
            into [the W − 1 last committed inputs, the nodes].
        written: Whether launches of the same step write the trees (`launch.py`).
        chains: Whether all trees are chains, known before the step.
    """

    ancestors: Tensor
    depths: Tensor
    windows: Tensor
    written: bool = False
    chains: bool = False

    def comes_in_steps(self, num_read: int) -> bool:
        """Return whether a recurrence takes a call's new nodes one after the other.

        So it does in an ordinary step, of one token a sequence. With `STREE_CHAINS=multi_step` in
        the environment it does so for all chains, as vanilla speculative decoding in STree (Wu et
        al. 2025) has it, where the scan of trees is faster. num_read: nodes of the trees before.
        """
        by_updates = self.chains and os.environ.get("STREE_CHAINS") == "multi_step"
        return num_read == 0 and (by_updates or self.depths.shape[1] == 1)

    @functools.cached_property
    def args(self) -> TreeArgs:
        ancestors = self.ancestors.view(torch.uint8)
        return TreeArgs(ancestors, self.depths, self.windows, self.depths.shape[1])


class CacheArgs(NamedTuple):
    """`CacheState` as kernels take it, without lengths and rows."""

    path: Any
    path_stride: Any
    path_size: Any  # K
    path_lengths: Any
    variants: Any
    parities: Any


@dataclass(frozen=True)
class CacheState:
    """Device-side integers that tell a captured call where it stands; all int64.

    Attributes:
        length: (B,) committed tokens in the states.
        path: (B, K) nodes of the last tree.
        path_length: (B,) nodes of `path` that are accepted but not yet in the states.
        variant: (B,) tree of the `Topology` that each sequence uses.
        parity: (1,) the buffer, of two, that holds the last tree's inputs.
        rows: (B,) sequences of keys and values; None for the first B.
        shared: Index plan of the call in plain PyTorch (`index_plan.py`), else None.
        ready: Inputs that a mixer's first kernel may read before it waits for the previous launch
            (`launch.py`): "none"; "memory", the layer's caches, if the previous launch is of
            another op; "all", also the op's inputs, if the previous launch does not write them.
    """

    length: Tensor
    path: Tensor
    path_length: Tensor
    variant: Tensor
    parity: Tensor
    rows: Tensor | None = None
    shared: dict[Any, Any] | None = None
    ready: str = "none"

    @functools.cached_property
    def args(self) -> CacheArgs:
        path, length = self.path, self.path_length
        return CacheArgs(path, path.stride(0), path.shape[1], length, self.variant, self.parity)

    def of_a_call(self, ready: str) -> CacheState:
        """Return a copy for one call, whose layers share the index plan."""
        return replace(self, shared={}, ready=ready)


@dataclass(frozen=True)
class Scaled:
    """A weight in 8 bits: values (…, E, D) in fp8 e4m3, and scales (…, E, G) in fp32.

    Each row has a scale for each of its G groups of D / G inputs: one, or with the published blocks
    of 128 × 128 one for 128 inputs.
    """

    values: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        """Return (…, E, D)."""
        return self.values.shape

    @property
    def group(self) -> int:
        """Return the inputs of a scale."""
        return self.values.shape[-1] // self.scale.shape[-1]

    def __getitem__(self, index: Any) -> Scaled:
        """Return the rows, or the matrices of a stack, at an index of the first dimension."""
        return Scaled(self.values[index], self.scale[index])

    def to(self, device: torch.device | str) -> Scaled:
        """Return the weight on a device."""
        return Scaled(self.values.to(device), self.scale.to(device))


@dataclass(frozen=True)
class Split:
    """Rows in bf16 as two in e4m3 each, whose sum times the row's unit they are.

    Attributes:
        pieces: (2, …, D) in e4m3.
        unit: (2, …) in fp32, the same number for both pieces of a row.
        padded: The pieces as rows (N, D) with further rows behind them, whose numbers are any, so
            that products of many rows have a number of rows that libraries multiply fast.
    """

    pieces: Tensor
    unit: Tensor
    padded: Tensor


@dataclass
class Stream:
    """A residual stream before a norm, of Q nodes of B sequences, width D, not yet added up.

    The op that reads its norm first adds up the terms.

    Attributes:
        source: Rows (B, Q, D), or an embedding (V, D) that `tokens` index.
        scale: (D,) of the norm; None reads the sum itself.
        eps: Of the norm.
        added: Terms still to be added.
        tokens: (B, Q), or (B, N) of which those at `nodes` are read; None for rows.
        nodes: (B, Q), −1 for none.
        written: Whether launches of the same step write the nodes (`launch.py`).
        beside: (B, Q, E); the norm is then of [stream, beside], by a scale (D + E,).
        normed: (B, Q, D + E), once it is computed.
        split: The norm, once a product by 8 bits has asked for it so.
    """

    source: Tensor
    scale: Tensor | None = None
    eps: float = 0.0
    added: Added = None
    tokens: Tensor | None = None
    nodes: Tensor | None = None
    written: bool = False
    beside: Tensor | None = None
    normed: Tensor | None = field(default=None, init=False)
    split: Split | None = field(default=None, init=False)

    @property
    def shape(self) -> tuple[int, int]:
        """Return (B, Q) of the stream."""
        rows = self.source if self.tokens is None else self.tokens
        batch, num_nodes = (rows if self.nodes is None else self.nodes).shape[:2]
        return batch, num_nodes

    @property
    def is_sum(self) -> bool:
        """Return True if nothing is left to look up or to add: source is the stream."""
        return self.added is None and self.tokens is None

    @property
    def is_plain(self) -> bool:
        """Return True if a single sum is normed and no second output is wanted."""
        return self.beside is None and not isinstance(self.added, tuple)

    def set_total(self, total: Tensor) -> None:
        """Keep the stream (B, Q, D) that an op has added up."""
        self.source, self.added, self.tokens, self.nodes = total, None, None, None

    def norm_by(self, embed_norm: Callable[..., Any], add_rms_norm: Callable[..., Any]) -> Tensor:
        """Return the norm (B, Q, D + E), computed by one of these ops at the first call."""
        if self.normed is not None:
            return self.normed
        if self.tokens is None:
            total, y = add_rms_norm(self.source, self.added, self.scale, self.eps, self.beside)
        else:
            added = None if self.added is None else self.added[0]
            total, y = embed_norm(
                self.source, self.tokens, self.nodes, self.scale, self.eps, self.written, added
            )
        self.set_total(total)
        self.normed = y
        return y


@dataclass(frozen=True)
class Gated:
    """A mixer's output y (B, Q, C) before its gate, the gate (B, Q, C), and the norm to come.

    The norm is of y·silu(gate), over groups of channels, with scale (C,) and eps.
    """

    y: Tensor
    gate: Tensor
    scale: Tensor
    eps: float
    groups: int

    def norm_by(self, gated_rms_norm: Callable[..., Tensor]) -> Tensor:
        """Return the norm (B, Q, C), computed by an op."""
        return gated_rms_norm(self.y, self.gate, self.scale, self.eps, self.groups)


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of each of B sequences, on the device.

    temperature (B,) fp64, 0 for the best token; seed (B,) and position (B,) int64, position being
    that of the current tree's root in its sequence.
    """

    temperature: Tensor
    seed: Tensor
    position: Tensor


class Slots(NamedTuple):
    """Slots of trees that grow (DySpec); `choose_children` writes their values.

    values (B, P) fp32 are logarithms; temperature (B,) fp64 is that of the drafter's distribution,
    where 0 means 1.
    """

    values: Tensor
    temperature: Tensor


@dataclass(frozen=True)
class Router:
    """Rule by which a token's router logits choose its experts.

    With `softmax` the `top` best logits are chosen, and weighed by a softmax over these if
    `normalised`, else over all. Without it the scores are sigmoids (DeepSeek-V3): the best are
    chosen within the `top_groups` best of `groups` of experts, by scores with a correction that the
    weights do not have; `normalised` divides the weights by their sum + `floor`. All weights are
    multiplied by `scale`.
    """

    top: int
    softmax: bool = True
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    floor: float = 1e-20
