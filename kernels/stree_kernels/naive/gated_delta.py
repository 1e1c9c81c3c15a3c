"""The gated delta rule in plain PyTorch: its scan, and a layer's tree call.

The functions are the twins of `gated_delta/scan.py`, `gated_delta/tree.py` and
`gated_delta/chain.py`.

Per value head S is a state (K, V), g ≤ 0 the log of its decay and β the strength of a write
(Yang et al. 2025, Gated Delta Networks). One token:

    u = β·(v − e^g·Sᵀ·k),  S ← e^g·S + k ⊗ u,  y = Sᵀ·q

Shapes: B batch, T tokens, N tree nodes, H value heads, G key heads, K and V head dims of keys and
values, C channels, W conv width, M places of an accepted path. Value head h reads key head
h // (H // G). q and k are given raw: their L2 norm, and q's scale K^−½, belong to the rule.
Sums run in fp32, or in fp64 when the inputs are. The derivation is in kernels/gated_delta.md.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stree_kernels.contracts import CacheState, Derived, GatedDeltaWeights, Topology
from stree_kernels.naive.conv import tree_conv
from stree_kernels.naive.dtypes import accumulation_dtype
from stree_kernels.shapes import GatedDeltaShape

NORM_EPS = 1e-6  # of q's and k's L2 norm, as published models have it


def gated_delta_scan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, *, chunk_size: int = 64,
    initial_state: Tensor | None = None, segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply the rule to a sequence, in chunks (Yang et al. 2024, section 3; 2025, section 3.3).

    Args:
        q: (B, T, G, K).
        k: (B, T, G, K).
        v: (B, T, H, V).
        log_decay: g (B, T, H).
        beta: (B, T, H).
        initial_state: (B, H, K, V), which reaches the first segment only; None is zeros.
        segment_ids: (B, T) non-decreasing: a token sees its own segment only; None is one segment.

    Returns y (B, T, H, V) in v's dtype and the state after the last token, (B, H, K, V).
    """
    batch, length, num_heads = log_decay.shape
    chunk_size = min(chunk_size, length)
    padding = -length % chunk_size
    out_dtype, dtype = v.dtype, accumulation_dtype(v.dtype)
    q, k = _scaled_queries(q, num_heads), _unit(k, num_heads)
    v, log_decay, beta = (part.to(dtype) for part in (v, log_decay, beta))
    if segment_ids is None:
        segment_ids = torch.zeros(batch, length, dtype=torch.long, device=v.device)
    if padding:  # β = 0 writes nothing and g = 0 keeps all: padding leaves the state alone
        q, k, v = (F.pad(part, (0, 0, 0, 0, 0, padding)) for part in (q, k, v))
        log_decay, beta = (F.pad(part, (0, 0, 0, padding)) for part in (log_decay, beta))
        segment_ids = torch.cat([segment_ids, segment_ids[:, -1:].expand(-1, padding)], dim=1)
    num_chunks = v.shape[1] // chunk_size

    def chunks(part: Tensor) -> Tensor:
        """Cut (B, T, H, …) into chunks of Q tokens, (B, chunks, H, Q, …)."""
        return part.unflatten(1, (num_chunks, chunk_size)).transpose(2, 3)

    q, k, v = chunks(q), chunks(k), chunks(v)
    log_decay, beta = chunks(log_decay[..., None]), chunks(beta[..., None])
    log_decay = log_decay.cumsum(3)  # c, from the chunk's start
    segments = segment_ids.unflatten(1, (num_chunks, chunk_size))

    # 1. Within a chunk: the lower triangle is the tree of a chain
    causal = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=v.device).tril()
    visible = (causal & (segments[..., :, None] == segments[..., None, :]))[:, :, None]
    decays = _decays(log_decay.squeeze(-1), visible)
    system = (k @ k.mT) * decays * beta  # its diagonal is not read: it is taken for 1
    scores = (q @ k.mT) * decays

    # 2. What a chunk's tokens see of the state at its start, which is of the segment before it
    last = segments[:, :, -1]
    carried = torch.cat([segments[:, :1, 0], last[:, :-1]], dim=1)
    reaches = (segments == carried[..., None])[:, :, None, :, None]
    from_start = log_decay.exp() * reaches
    writes = _solve(system, beta * v)
    reads = _solve(system, beta * from_start * k)

    # 3. The recurrence over chunks
    at_end = log_decay[..., -1:, :]
    to_end = (at_end - log_decay).exp() * (segments == last[..., None])[:, :, None, :, None]
    survives = at_end.exp() * (last == carried)[:, :, None, None, None]
    if initial_state is None:
        state = v.new_zeros(batch, num_heads, k.shape[-1], v.shape[-1])
    else:
        state = initial_state.to(dtype)
    outputs = []
    for chunk in range(num_chunks):
        updates = writes[:, chunk] - reads[:, chunk] @ state
        from_state = (q[:, chunk] @ state) * from_start[:, chunk]
        outputs.append(from_state + scores[:, chunk] @ updates)
        state = survives[:, chunk] * state + (k[:, chunk] * to_end[:, chunk]).mT @ updates
    y = torch.stack(outputs, dim=1).transpose(2, 3).flatten(1, 2)[:, :length]
    return y.to(out_dtype), state


def tree_delta(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, ancestors: Tensor,
    state: Tensor, updates: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute outputs and updates u of a tree's last Q nodes, from one state, which stays.

    Args:
        q: (B, Q, G, K) of these nodes.
        k: (B, N, G, K) of all nodes.
        v: (B, Q, H, V) of these nodes.
        log_decay: g (B, N, H) of all nodes.
        beta: (B, Q, H) of these nodes.
        ancestors: (N, N) bool, lower triangular: [i, j] is true when j is i or an ancestor of i.
        state: (B, H, K, V); `replay_updates` advances it.
        updates: (B, N − Q, H, V) of the nodes before.

    Returns y (B, Q, H, V) in v's dtype and u (B, Q, H, V).
    """
    num_heads = log_decay.shape[-1]
    num_read, out_dtype = updates.shape[1], v.dtype
    dtype = accumulation_dtype(out_dtype)
    q, k = _scaled_queries(q, num_heads).transpose(1, 2), _unit(k, num_heads).transpose(1, 2)
    v, beta = v.to(dtype).transpose(1, 2), beta.to(dtype).transpose(1, 2)[..., None]
    state, known = state.to(dtype), updates.to(dtype).transpose(1, 2)
    totals = torch.einsum("ij,bjh->bhi", ancestors.to(dtype), log_decay.to(dtype))
    decays = _decays(totals, ancestors)[:, :, num_read:]
    from_root = totals[..., num_read:, None].exp()
    new = k[:, :, num_read:]
    system, scores = (new @ k.mT) * decays * beta, (q @ k.mT) * decays
    wanted = beta * (v - from_root * (new @ state)) - system[..., :num_read] @ known
    u = _solve(system[..., num_read:], wanted)
    y = from_root * (q @ state) + scores @ torch.cat([known, u], dim=2)
    return y.transpose(1, 2).to(out_dtype), u.transpose(1, 2)


def replay_updates(
    state: Tensor, k: Tensor, updates: Tensor, log_decay: Tensor, counts: Tensor
) -> Tensor:
    """Return the state after an accepted path: S ← e^{Σ_j g_j}·S + Σ_j e^{Σ_{m>j} g_m}·k_j ⊗ u_j.

    Args:
        state: (B, H, K, V).
        k: (B, M, G, K) along the path.
        updates: u (B, M, H, V) along the path.
        log_decay: g (B, M, H) along the path.
        counts: (B, M) bool, nodes that are accepted; a row without any keeps its state.

    Returns the new state in state's dtype.
    """
    num_heads = log_decay.shape[-1]
    # where(), not a product: an uncounted place may hold anything, NaN included
    log_decay = torch.where(counts[..., None], log_decay, 0.0)
    k = torch.where(counts[..., None, None], _unit(k, num_heads), 0.0)
    updates = torch.where(counts[..., None, None], updates.to(k.dtype), 0.0)
    total = log_decay.sum(1)
    after = (total[:, None] - log_decay.cumsum(1)).exp()
    added = torch.einsum("bmh,bmhk,bmhv->bhkv", after, k, updates)
    return (total.exp()[..., None, None] * state.to(k.dtype) + added).to(state.dtype)


def gated_delta_tree(
    projected: Tensor, history: Tensor, derived: Derived | None, updates: Tensor, state: Tensor,
    weights: GatedDeltaWeights, shape: GatedDeltaShape, topology: Topology, cache_state: CacheState,
    num_read: int,
) -> Tensor:
    """Compute conv and delta rule between a layer's projections, for Q new nodes of trees.

    They come after the num_read nodes that earlier calls have read. With num_read = 0 a new
    tree begins: the last one's accepted path is replayed into the state, and the new one's inputs
    go to the other half of `history`. Else the tree continues. Writes history, updates and state.

    Args:
        projected: (B, Q, H·V + C + 2·H), z, the inputs that `history` keeps, and b.
        history: (2, B, W − 1 + N, C + H), two halves of raw conv inputs and a of [conv state,
            nodes]; `cache_state.parity` names the last tree's, and the caller flips it after all
            layers.
        derived: Written by the kernels (`ops.new_derived`); plain PyTorch needs none.
        updates: (B, N, H, V), u of the tree's nodes; the replay reads them before they are written.
        state: (B, H, K, V).

    Returns y (B, Q, H·V) in projected's dtype, before the gated norm.
    """
    batch, num_new, _ = projected.shape
    half = cache_state.parity
    if num_read == 0:
        tail = gated_delta_replay(history, updates, state, weights, shape, cache_state)
        half = 1 - half
        history[half, :, : shape.tail] = tail[None]
    _, kept, b = projected.split([shape.d_inner, shape.num_kept, shape.num_heads], dim=-1)
    last = num_read + num_new
    history[half, :, shape.tail + num_read : shape.tail + last] = kept[None]
    seen = history.index_select(0, half)[0, :, : shape.tail + last]
    beta = strengths(b, shape)
    outputs = []
    for row in range(batch):  # each sequence may have its own tree
        variant = cache_state.variant[row : row + 1]
        windows = topology.windows.index_select(0, variant)[0, :last].long()
        ancestors = topology.ancestors.index_select(0, variant)[0, :last, :last]
        line = seen[row : row + 1]
        q, k, v = convolved_heads(line[..., : shape.num_channels], weights, shape, windows)
        g = log_decays(line[:, shape.tail :, shape.num_channels :], weights)
        y, u = tree_delta(
            q[:, num_read:], k, v[:, num_read:], g, beta[row : row + 1], ancestors,
            state[row : row + 1], updates[row : row + 1, :num_read],
        )
        updates[row, num_read:last] = u[0]
        outputs.append(y.flatten(-2))
    return torch.cat(outputs)


def gated_delta_replay(
    history: Tensor, updates: Tensor, state: Tensor, weights: GatedDeltaWeights,
    shape: GatedDeltaShape, cache_state: CacheState,
) -> Tensor:
    """Advance a layer's state, in place, along the accepted path of the tree that `history` holds.

    Args as in `gated_delta_tree`. Returns the new conv state with a, (B, W − 1, C + H), for the
    caller to write.
    """
    seen = history.index_select(0, cache_state.parity)[0]
    sequences = torch.arange(seen.shape[0], device=seen.device)[:, None]
    path, path_length = cache_state.path, cache_state.path_length
    steps = torch.arange(path.shape[1], device=path.device)
    counts = steps < path_length[:, None]
    path = torch.where(counts, path, 0)
    # where(), not a product: an uncounted node may hold anything, NaN included
    walked = torch.where(counts[..., None], seen[sequences, shape.tail + path], 0.0)
    line = torch.cat([seen[:, : shape.tail], walked.to(seen.dtype)], dim=1)
    windows = steps[:, None] + torch.arange(shape.width, device=path.device)
    _, k, _ = convolved_heads(line[..., : shape.num_channels], weights, shape, windows)
    g = log_decays(walked[..., shape.num_channels :], weights)
    state.copy_(replay_updates(state, k, updates[sequences, path], g, counts))
    newest = path_length[:, None] + torch.arange(shape.tail, device=path.device)
    return line[sequences, newest]


def convolved_heads(
    line: Tensor, weights: GatedDeltaWeights, shape: GatedDeltaShape, windows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of raw inputs (B, W − 1 + N, C), [conv state, nodes], by windows (N, W)."""
    tail, nodes = line[:, : shape.tail], line[:, shape.tail :]
    convolved = tree_conv(nodes, tail, weights.conv, weights.conv_bias, windows)
    return split_heads(F.silu(convolved), shape)


def split_heads(convolved: Tensor, shape: GatedDeltaShape) -> tuple[Tensor, Tensor, Tensor]:
    """Split the conv's output (…, C) into q and k (…, G, K) and v (…, H, V)."""
    q, k, v = convolved.split(shape.conv_dims, dim=-1)
    keys = (shape.num_key_heads, shape.key_dim)
    return q.unflatten(-1, keys), k.unflatten(-1, keys), v.unflatten(-1, (shape.num_heads, -1))


def log_decays(a: Tensor, weights: GatedDeltaWeights) -> Tensor:
    """Return g (…, H) = −exp(A_log)·softplus(a + dt_bias) in the accumulation dtype."""
    dtype = accumulation_dtype(a.dtype)
    dt = F.softplus(a.to(dtype) + weights.dt_bias.to(dtype))
    return -weights.A_log.to(dtype).exp() * dt


def strengths(b: Tensor, shape: GatedDeltaShape) -> Tensor:
    """Return β (…, H) of the projected b: sigmoid(b), or 2·sigmoid(b) with negative eigenvalues.

    A token maps the state by I − β·k·kᵀ before it writes. Along k that is 1 − β, which is negative
    for a β above 1 (Grazzi et al. 2025, Unlocking State-Tracking in Linear RNNs).
    """
    beta = b.to(accumulation_dtype(b.dtype)).sigmoid()
    return 2 * beta if shape.negative_eigenvalues else beta


def _unit(keys: Tensor, num_heads: int) -> Tensor:
    """Scale (…, G, K) to length 1, repeated to (…, H, K), in the accumulation dtype."""
    keys = keys.to(accumulation_dtype(keys.dtype))
    keys = keys * (keys.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()
    return keys.repeat_interleave(num_heads // keys.shape[-2], dim=-2)


def _scaled_queries(q: Tensor, num_heads: int) -> Tensor:
    return _unit(q, num_heads) * q.shape[-1] ** -0.5


def _decays(totals: Tensor, visible: Tensor) -> Tensor:
    """Return e^{c_i − c_j} where j is visible to i, else 0, for totals c (…, N)."""
    # Off the mask the difference can be positive and overflow: mask before the exponent
    difference = totals[..., :, None] - totals[..., None, :]
    return difference.masked_fill(~visible, -torch.inf).exp()


def _solve(system: Tensor, wanted: Tensor) -> Tensor:
    """Solve (I + A)·X = wanted, where A is the strictly lower triangle of system (…, N, N)."""
    return torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
