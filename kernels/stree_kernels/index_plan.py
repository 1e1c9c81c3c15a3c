"""Index plan of a tree call in plain PyTorch: indices that it reads and writes, found once a call.

Shapes: B batch, Q new nodes, N tree nodes, K places of an accepted path, L cache slots, W conv
width, G query heads a key head, D attention head dim.

The plan follows from topology and cache state, which all layers share. A call keeps it in
`CacheState.shared`. Where the host may read values without waiting, the plan also leaves out work
that has no effect: paths are as long as the longest row's, and no key moves to its own place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from stree_kernels.contracts import CacheState, Topology

T = TypeVar("T")
Index = tuple[Tensor, ...]


def on_host(tensor: Tensor) -> bool:
    """Return True if the host may read a tensor's values: on a CPU and outside of graph capture."""
    return tensor.device.type == "cpu"


def once(cache_state: CacheState, what: tuple[Any, ...], find: Callable[[], T]) -> T:
    """Return the result of `find`, computed by the first layer of this call that asks for it."""
    shared = cache_state.shared
    if shared is None:
        return find()
    if what not in shared:
        shared[what] = find()
    return shared[what]


def accepted_path(cache_state: CacheState) -> tuple[Tensor, Tensor | None]:
    """Return the last tree's accepted nodes (B, K), 0 for others, and a mask (B, K) of them.

    The mask is None if all nodes count.
    """
    path, lengths = cache_state.path, cache_state.path_length
    if on_host(path):
        known = lengths.tolist()
        path = path.narrow(1, 0, max(1, *known))
        if min(known) == path.shape[1]:
            return path, None
    counts = torch.arange(path.shape[1], device=path.device) < lengths[:, None]
    return torch.where(counts, path, 0), counts


@dataclass(frozen=True)
class ConvPlaces:
    """Index plan of a convolution over history (2, B, W − 1 + N, …): halves of [conv state, nodes].

    The convolution runs over one line a sequence: entries of `history`, then the new nodes. For a
    new tree these entries are the conv state and the K nodes of the accepted path; for later nodes
    of a tree they are the conv state and the tree's nodes so far.

    Attributes:
        before: (B, …), flat indices of these entries in the first three dims of `history`.
        windows: (B, K + n, W), inputs of the convolution at the path's nodes (only of a new tree)
            and at n of the tree's, oldest first, as flat indices in all lines; None if each input
            follows the one before in its line.
        path: K.
        counts: (B, K), which nodes of the path count; None is all.
        kept: Flat indices (B, …) of the entries that are written back to half `half` (1,) of the
            history, from entry `written` on; an int n is all but the first n.
        written: First entry that is written.
        half: (1,) the half that is written.
    """

    before: Tensor
    windows: Tensor | None
    path: int
    counts: Tensor | None
    kept: Tensor | int
    half: Tensor
    written: int


def conv_places(
    history: Tensor, tail: int, topology: Topology, cache_state: CacheState, start: int,
    num_read: int, num_new: int,
) -> ConvPlaces:
    """Return the plan of `num_new` nodes after `num_read` others, with windows from `start` on.

    tail is W − 1, the length of the conv state.
    """

    def find() -> ConvPlaces:
        chosen = topology.windows.index_select(0, cache_state.variant)
        windows = chosen[:, start : num_read + num_new].long()
        # Whatever the windows of padding hold: a node's last input is its own
        end = tail + num_read + num_new
        windows[..., -1] = torch.arange(tail + start, end, device=windows.device)
        if num_read:
            before = torch.arange(tail + num_read, device=windows.device).expand(len(windows), -1)
            before = _counted(before, history.shape[2], cache_state.parity)
            windows = _counted(windows, tail + num_read + num_new)
            return ConvPlaces(
                before, windows, 0, None, tail + num_read, cache_state.parity, tail + num_read
            )
        last = path_places(history, tail, cache_state, num_new)
        if last.counts is None:
            windows = windows + last.path
        else:  # the newest inputs are at the path's end
            lengths = cache_state.path_length[:, None, None]
            windows = windows + torch.where(windows < tail, lengths, last.path)
        ordered = torch.arange(last.path + num_new, device=windows.device)[:, None]
        ordered = ordered + torch.arange(tail + 1, device=windows.device)
        if on_host(windows) and bool((windows == ordered[last.path :]).all()):
            return last
        along = ordered[: last.path].expand(len(windows), -1, -1)
        windows = torch.cat([along, windows], dim=1)
        return replace(last, windows=_counted(windows, tail + last.path + num_new))

    return once(cache_state, ("conv", history.shape[:3], tail, start, num_read, num_new), find)


def path_places(
    history: Tensor, tail: int, cache_state: CacheState, num_new: int = 0
) -> ConvPlaces:
    """Return the plan of the accepted path and `num_new` nodes of a chain after it."""
    path, counts = accepted_path(cache_state)
    steps = torch.arange(tail, device=path.device)
    before = torch.cat([steps.expand(len(path), -1), tail + path], dim=1)
    before = _counted(before, history.shape[2], cache_state.parity)
    length = path.shape[1]
    kept: Tensor | int = length
    if counts is not None:
        newest = cache_state.path_length[:, None] + steps
        new = torch.arange(tail + length, tail + length + num_new, device=path.device)
        ends = torch.cat([newest, new.expand(len(path), -1)], dim=1)
        kept = _counted(ends, tail + length + num_new)
    return ConvPlaces(before, None, length, counts, kept, 1 - cache_state.parity, 0)


def _counted(places: Tensor, length: int, half: Tensor | int = 0) -> Tensor:
    """Turn indices (B, …) in lines of a length into flat indices in all B lines, in half (1,)."""
    batch = len(places)
    if batch == 1:
        return places if isinstance(half, int) else places + half * length
    sequences = torch.arange(batch, device=places.device).view(-1, *[1] * (places.dim() - 1))
    return places + (half * batch + sequences) * length


def ancestors_of(
    topology: Topology, cache_state: CacheState, num_read: int, num_new: int, dtype: torch.dtype
) -> Tensor:
    """Return (B, N, N), 1 where j is i or an ancestor of i, else 0; N = num_read + num_new."""

    def find() -> Tensor:
        nodes = num_read + num_new
        return topology.ancestors.index_select(0, cache_state.variant)[:, :nodes, :nodes].to(dtype)

    return once(cache_state, ("ancestors", num_read, num_new, dtype), find)


@dataclass(frozen=True)
class AttentionPlaces:
    """Index plan of attention to a cache (B, Hkv, L, D).

    Attributes:
        moves: Rows and slots of accepted keys, and the slots that they are moved to; None if all
            stay.
        slots: (B, Hkv, Q, D), the new nodes' slots.
        rotary: (2, B, 1, Q, D), see `whole_heads`.
        bound: Number of slots to attend to.
        mask: (B, 1, G·Q, bound), 0 or −∞, by group and then by node; None if all are visible.
        unused: (B, 1, bound, 1), mask of empty slots; None if there are none.
    """

    moves: Index | None
    slots: Tensor
    rotary: Tensor
    bound: int
    mask: Tensor | None
    unused: Tensor | None


def attention_places(
    topology: Topology, cache_state: CacheState, num_read: int, num_new: int, bound: int,
    rotary: Tensor, num_heads: tuple[int, int], dtype: torch.dtype, window: int,
) -> AttentionPlaces:
    """Return the plan of a call with the arguments of `naive.attend_tree`.

    num_heads are those of queries and of keys; dtype is the mask's.
    """

    def find() -> AttentionPlaces:
        length, moves, most = cache_state.length, None, bound
        if num_read == 0:
            moves = moved_slots(length, cache_state.path, cache_state.path_length)
            length = length + cache_state.path_length
        nodes = num_read + num_new
        depths = topology.depths.index_select(0, cache_state.variant)[:, num_read:nodes]
        positions = length[:, None] + depths
        angles = rotary.index_select(1, positions.flatten())
        angles = whole_heads(angles.view(2, len(length), 1, num_new, -1))
        slots = length[:, None] + torch.arange(num_read, nodes, device=length.device)
        if on_host(length):
            most = min(bound, max(length.tolist()) + nodes)
        chosen = topology.ancestors.index_select(0, cache_state.variant)[:, num_read:nodes, :nodes]
        mask, unused = attention_mask(length, chosen, most, dtype)
        if window:
            whole = topology.depths.index_select(0, cache_state.variant)[:, :nodes]
            far = _beyond_window(length, whole, positions, most, window)
            mask = torch.zeros(far.shape, dtype=dtype, device=far.device) if mask is None else mask
            mask = mask.masked_fill(far, -torch.inf)
        if mask is not None:
            mask = mask.repeat(1, groups, 1)[:, None]
        slots = slots[:, None, :, None].expand(-1, num_kv_heads, -1, angles.shape[-1])
        return AttentionPlaces(moves, slots, angles, most, mask, unused)

    num_kv_heads, groups = num_heads[1], num_heads[0] // num_heads[1]
    key = ("attention", num_read, num_new, bound, num_heads, dtype, window)
    return once(cache_state, key, find)


def whole_heads(rotary: Tensor) -> Tensor:
    """Repeat cosines and sines (2, …, D / 2) for both halves of a head, (2, …, D).

    The sine of the first half is negated.
    """
    cos, sin = rotary
    return torch.stack([torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)])


def moved_slots(length: Tensor, path: Tensor, path_length: Tensor) -> Index | None:
    """Return rows, and slots from and to which a path's keys move; None if all stay."""
    if on_host(path):
        lengths = path_length.tolist()
        paths = path.narrow(1, 0, max(lengths)).tolist()
        if all(
            nodes[:count] == list(range(count)) for nodes, count in zip(paths, lengths, strict=True)
        ):
            return None
    rows = torch.arange(path.shape[0], device=path.device)[:, None]
    steps = torch.arange(path.shape[1], device=path.device)
    path = torch.where(steps < path_length[:, None], path, steps)
    source, target = length[:, None] + path, length[:, None] + steps
    if on_host(path):
        moving = path != steps
        rows, source, target = rows.expand_as(path)[moving], source[moving], target[moving]
    return rows, source, target


def attention_mask(
    length: Tensor, ancestors: Tensor, num_slots: int, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Return the attention mask and the mask of empty slots.

    The attention mask (B, Q, L) is 0 for slots that a node sees, the committed ones and those of
    its ancestors, and −∞ for others; None if the host knows that all are seen. The mask of empty
    slots is (B, 1, L, 1) bool; None if the host knows that there are none.

    Args:
        length: (B,) committed slots.
        ancestors: (B, Q, N) bool.
    """
    num_nodes = ancestors.shape[-1]
    hidden = torch.where(ancestors, 0.0, -torch.inf).to(dtype)
    if on_host(length) and all(each == num_slots - num_nodes for each in length.tolist()):
        if num_nodes == 1 or bool(ancestors.all()):
            return None, None
        return torch.nn.functional.pad(hidden, (num_slots - num_nodes, 0)), None
    # A column for the committed slots, and one for those past the tree
    table = torch.nn.functional.pad(hidden, (1, 1))
    table[..., -1] = -torch.inf
    slots = torch.arange(num_slots, device=ancestors.device)
    column = (slots - length[:, None] + 1).clamp(0, num_nodes + 1)
    mask = table.gather(2, column[:, None].expand(-1, table.shape[1], -1))
    return mask, (column > num_nodes)[:, None, :, None]


def _beyond_window(
    length: Tensor, depths: Tensor, positions: Tensor, num_slots: int, window: int
) -> Tensor:
    """Return the slots that lie before the window of each node, (B, Q, L) bool.

    Args:
        length: (B,) committed slots.
        depths: (B, N) of the tree's nodes, which have the slots after them.
        positions: (B, Q) of the nodes that attend.
        num_slots: L.
        window: Positions that a node sees, its own included.
    """
    slots = torch.arange(num_slots, device=length.device).expand(len(length), -1)
    node = slots - length[:, None]
    below = depths.gather(1, node.clamp(0, depths.shape[1] - 1))
    at = torch.where(node < 0, slots, length[:, None] + below)
    return at[:, None, :] <= positions[:, :, None] - window


def columns_of(tokens: Tensor, ids: Tensor) -> Tensor:
    """Return the columns (…) of tokens (…) in a head over ids (K,), ascending; K for no column."""
    columns = torch.searchsorted(ids, tokens).clamp(max=len(ids) - 1)
    return torch.where(ids[columns] == tokens, columns, len(ids))
