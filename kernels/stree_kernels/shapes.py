"""Dimensions of mixers, as plain data: a config holds them, and importing them needs no PyTorch.

Names as in `contracts`, which has the records of tensors.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class ScanShape(NamedTuple):
    """Dimensions of a Mamba-2 scan, constants of its kernels. Heads read groups of x, B and C."""

    head_dim: int
    d_state: int
    heads_a_x: int
    heads_a_b: int
    heads_a_c: int
    b_channel: int  # of `Derived.convolved`, at which B begins


@dataclass(frozen=True)
class MixerShape:
    """Dimensions of a Mamba-2 mixer whose projection gives [z, x, B, C, dt] side by side.

    Head h reads x from group h // (num_heads // x_groups), likewise B and C. With
    `repeat_before_conv`, x and B have a conv channel a head all the same. With `gated`, the scan's
    output is multiplied by silu(z); else the caller does that, before or after a norm.
    """

    num_heads: int
    head_dim: int
    d_state: int
    x_groups: int
    b_groups: int
    c_groups: int
    width: int  # of the conv
    repeat_before_conv: bool = False
    dt_limit: tuple[float, float] = (0.0, math.inf)
    gated: bool = False

    # Derived once, because calls read them often
    d_inner: int = field(init=False, repr=False)
    xbc_dims: tuple[int, int, int] = field(init=False, repr=False)  # projected channels of x, B, C
    num_channels: int = field(init=False, repr=False)  # of these together
    num_kept: int = field(init=False, repr=False)  # that a call keeps of a node: x, B, C and dt
    # Groups and channels of x, B and C as conv and scan see them
    scan_groups: tuple[int, int, int] = field(init=False, repr=False)
    conv_dims: tuple[int, int, int] = field(init=False, repr=False)
    tail: int = field(init=False, repr=False)  # committed inputs that the conv looks back on
    largest_dim: int = field(init=False, repr=False)  # of a head or a state

    def __post_init__(self) -> None:
        def know(**values: Any) -> None:
            for name, value in values.items():
                object.__setattr__(self, name, value)

        def channels(x_groups: int, b_groups: int, c_groups: int) -> tuple[int, int, int]:
            return x_groups * self.head_dim, b_groups * self.d_state, c_groups * self.d_state

        groups = self.x_groups, self.b_groups, self.c_groups
        in_scan = (self.num_heads,) * 2 + groups[2:] if self.repeat_before_conv else groups
        know(d_inner=self.num_heads * self.head_dim, xbc_dims=channels(*groups))
        know(num_channels=sum(self.xbc_dims), scan_groups=in_scan, conv_dims=channels(*in_scan))
        know(num_kept=self.num_channels + self.num_heads, tail=self.width - 1)
        know(largest_dim=max(self.head_dim, self.d_state))

    @property
    def state_dims(self) -> tuple[int, int, int]:
        """Dimensions of a sequence's state."""
        return self.num_heads, self.head_dim, self.d_state

    @functools.cached_property
    def scan(self) -> ScanShape:
        x, b, c = (self.num_heads // groups for groups in self.scan_groups)
        return ScanShape(self.head_dim, self.d_state, x, b, c, self.conv_dims[0])


@dataclass(frozen=True)
class GatedDeltaShape:
    """Dimensions of a gated delta rule's mixer whose projection gives [z, q, k, v, a, b].

    Value head h reads q and k of key head h // (num_heads // num_key_heads). a becomes the decay of
    a head's state, b the strength with which a token writes to it: sigmoid(b), or twice that with
    `negative_eigenvalues`.
    """

    num_heads: int  # value heads: each has a state (key_dim, value_dim)
    num_key_heads: int
    key_dim: int
    value_dim: int
    width: int  # of the conv
    negative_eigenvalues: bool = False

    @property
    def d_inner(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def state_dims(self) -> tuple[int, int, int]:
        """Dimensions of a sequence's state."""
        return self.num_heads, self.key_dim, self.value_dim

    @property
    def conv_dims(self) -> tuple[int, int, int]:
        """Channels of q, k and v."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.d_inner

    @property
    def num_channels(self) -> int:
        """Channels of q, k and v together."""
        return sum(self.conv_dims)

    @property
    def num_kept(self) -> int:
        """Channels that a call keeps of a node: q, k, v and a."""
        return self.num_channels + self.num_heads

    @property
    def num_projected(self) -> int:
        """Channels of the projection: z, q, k, v, a and b."""
        return self.d_inner + self.num_kept + self.num_heads

    @property
    def tail(self) -> int:
        """Committed inputs that the conv looks back on."""
        return self.width - 1

    @property
    def largest_dim(self) -> int:
        """Return the larger of the head dimension and the state dimension."""
        return max(self.key_dim, self.value_dim)


@dataclass(frozen=True)
class Mamba1Shape:
    """Dimensions of a Mamba-1 mixer, whose projection gives [x, z] and whose conv is over x.

    A product of the conv's output gives [dt, B, C], dt of low rank. With `norm_eps` each of the
    three has a root mean square of 1 (FalconMamba).
    """

    d_inner: int  # channels of x, each with a state (d_state,)
    d_state: int
    dt_rank: int
    width: int  # of the conv
    norm_eps: float | None = None

    @property
    def tail(self) -> int:
        """Committed inputs that the conv looks back on."""
        return self.width - 1

    @property
    def selected_dims(self) -> tuple[int, int, int]:
        """Channels of low-rank dt, B and C."""
        return self.dt_rank, self.d_state, self.d_state

    @property
    def largest_dim(self) -> int:
        """Dimension of a channel's state."""
        return self.d_state
