"""Targets that verify each draft as a sequence of its own, with a copy of the state.

So the papers unroll trees: STree's baseline (Wu et al. 2025, section 5.1), and Snakes and Ladders
(Wu et al. 2024, section 3.1) with activation replay (`ReplayRows`) or joint attainment
(`JointRows`). A `BatchDecoder` takes either as its target, with any drafter, verifier and tree:

    stree.BatchDecoder(ReplayRows(model, 5), drafter, "beam-2-4", num_rows=1)

The engine's own way keeps one state a sequence. These targets read shapes on the host in each step,
so their steps are not captured; `joint_steps.py` captures steps of joint attainment. B sequences,
L paths from the root to a leaf, R rows, D depth of the trees.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stree.common.errors import UsageError
from stree.models.cache import HybridCache
from stree.models.layer_caches import EACH, KEYS, NODES, ConvCache
from stree.models.layers.part import PrefillPass
from stree.models.model import HybridModel
from stree.trees.token_tree import TokenTree
from stree.trees.tree_batch import TreeBatch, topology_of


@dataclass
class NoOpPass(PrefillPass):
    """Prefill in which each row has `counts` (R,) tokens; the rest are no-ops at its end.

    A no-op token leaves the state alone (Ā = 1, B̄ = 0), and the conv state passes over it. Mamba-2
    scans by chunks, or with `multi_step` by `multi_step_update`.
    """

    counts: Tensor | None = None
    multi_step: bool = False

    def scan(
        self, mixer: Any, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, state: Tensor
    ) -> Tensor:
        assert self.counts is not None
        places = torch.arange(dt.shape[1], device=dt.device)
        dt = dt.masked_fill((places >= self.counts[:, None])[..., None], 0)
        if self.multi_step:
            from stree_lab.papers.multi_step_update import multi_step_update  # needs Triton

            return multi_step_update(x, dt, mixer.A, B, C, mixer.D, state)
        return super().scan(mixer, x, dt, B, C, state)

    def last_inputs(self, seen: Tensor, count: int) -> Tensor:
        assert self.counts is not None
        places = self.counts[:, None] + torch.arange(count, device=seen.device)
        return seen.gather(1, places[..., None].expand(-1, -1, seen.shape[2]))


def read_with_no_ops(
    model: HybridModel, tokens: Tensor, counts: Tensor, cache: HybridCache,
    multi_step: bool = False,
) -> Tensor:
    """Commit the first counts (R,) of each row's tokens (R, T); return hidden states (R, T, D).

    All rows must be empty if the model has attention, whose keys have places in the cache. Mixers
    are those of `require_no_ops`. multi_step is as in `NoOpPass`.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    x, y = model.model.embed(tokens), None
    context = NoOpPass(
        model.model.rotary(places), shared=model.model.shared_blocks, embedded=x,
        caches=cache.layers, counts=counts, multi_step=multi_step,
    )
    layers: Any = model.model.layers
    for layer in layers:
        x, y = layer.run(x, y, context)
    cache.length += counts
    return model.model.norm(context.add(x, y))


def read_together(
    model: HybridModel, prompts: Sequence[Sequence[int]], cache: HybridCache
) -> Tensor:
    """Read prompts of different lengths in one call (Snakes and Ladders, section 4).

    Args:
        model: The target.
        prompts: One for each row of the cache, of at least one token.
        cache: An empty cache.

    Returns the logits (R, V) after each prompt. Raises UsageError for mixers that have no no-op
    tokens.
    """
    require_no_ops(model)
    counts = torch.tensor([len(prompt) for prompt in prompts], device=model.device)
    tokens = torch.zeros(len(prompts), int(counts.max()), dtype=torch.long, device=model.device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    hidden = read_with_no_ops(model, tokens, counts, cache)
    rows = torch.arange(len(prompts), device=model.device)
    return model.logits(hidden[rows, counts - 1])


def require_no_ops(model: HybridModel) -> None:
    """Raise UsageError unless all mixers are Mamba-2 or attention."""
    config = model.config
    kinds = {kind for layer in range(config.num_layers) for kind in config.mixers(layer)}
    if others := kinds - {"mamba", "attention"}:
        raise UsageError(
            f"no-op tokens are for Mamba-2 and attention layers, this model has "
            f"{', '.join(sorted(others))}"
        )


def copy_rows(cache: HybridCache, source: Tensor, other: HybridCache | None = None) -> None:
    """Give each row of a cache the states and keys of a row source (R,), of another cache if given.

    Keys are copied as far as both caches have slots.
    """
    other = cache if other is None else other
    for layer, theirs in zip(cache.layers, other.layers, strict=True):
        for name, buffer, tensor in theirs.buffers():
            if buffer.part != NODES:
                mine, taken = getattr(layer, name), tensor.index_select(buffer.sequences, source)
                slots = slice(min(mine.shape[2], taken.shape[2])) if buffer.part == KEYS else EACH
                mine[:, :, slots] = taken[:, :, slots]
        if isinstance(layer, ConvCache) and layer.own_conv_state is None:
            assert isinstance(theirs, ConvCache)
            layer.conv_state = theirs.conv_state.index_select(0, source)
    cache.length.copy_(other.length.index_select(0, source))


def copy_first_row(cache: HybridCache) -> None:
    """Copy the states and keys of row 0 to the other rows of a cache."""
    for layer in cache.layers:
        for _, buffer, tensor in layer.buffers():
            if buffer.part != NODES:
                tensor[1:] = tensor[:1]
        if isinstance(layer, ConvCache) and layer.own_conv_state is None:
            layer.conv_state = layer.conv_state[:1].expand_as(layer.conv_state)


class RowsCache:
    """Cache of B sequences with a number of rows each; `rows` are those of all sequences.

    Attributes:
        path, path_length, variant: The pending path, as in `HybridCache`.
        length: (B,) tokens in the states.
        tokens: (B, N) of the last trees.
        leaf: (B, N), the row of the sequence that holds a node of the last tree.
    """

    FIELDS = ("path", "path_length", "variant", "tokens", "leaf")

    def __init__(self, rows: HybridCache, batch: int, max_nodes: int) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(batch, *shape, dtype=torch.long, device=rows.device)

        self.rows, self.max_nodes = rows, max_nodes
        self.path, self.tokens, self.leaf = zeros(max_nodes), zeros(max_nodes), zeros(max_nodes)
        self.path_length, self.variant = zeros(), zeros()
        self.dtype, self.device, self.num_slots = rows.dtype, rows.device, rows.num_slots

    @property
    def copies(self) -> int:
        """Number of rows of a sequence."""
        return len(self.rows.length) // len(self.path)

    def narrow(self, first: int, count: int) -> RowsCache:
        view = copy.copy(self)
        for name in self.FIELDS:
            setattr(view, name, getattr(self, name).narrow(0, first, count))
        view.rows = self.rows.narrow(first * self.copies, count * self.copies)
        return view

    def at(self, row: int) -> RowsCache:
        return self.narrow(row, 1)

    def clear(self, row: int) -> None:
        self.path_length[row] = 0
        for each in range(row * self.copies, (row + 1) * self.copies):
            self.rows.clear(each)


class ReplayRows:
    """Target whose drafts are rows of a batch, backtracking by activation replay.

    Each of a sequence's `num_drafts` rows reads one path of the tree from the same state. Then the
    row of the accepted path replays it, and its state is copied to the other rows. For chains by
    the multi-step update (FSS) set STREE_CHAINS=multi_step.

    Args:
        model: The target.
        num_drafts: Most leaves of any tree.
    """

    more_rows = 0  # of a sequence, beside its drafts'

    def __init__(self, model: HybridModel, num_drafts: int) -> None:
        self.model, self.num_drafts = model, num_drafts
        self.config, self.device, self.dtype = model.config, model.device, model.dtype

    def new_cache(self, max_length: int, max_nodes: int, batch: int = 1) -> RowsCache:
        """Return a cache of `batch` sequences."""
        rows = batch * (self.num_drafts + self.more_rows)
        return RowsCache(self.model.new_cache(max_length, max_nodes, rows), batch, max_nodes)

    def prefill(self, tokens: Tensor, cache: RowsCache) -> Tensor:
        """Read tokens (1, T) once, and copy the state to all rows; return the logits (1, V)."""
        logits = self.model.prefill(tokens, cache.rows.at(0))
        copy_rows(cache.rows, torch.zeros_like(cache.rows.length))
        return logits

    def tree_batch_forward(
        self, tokens: Tensor, tree_batch: TreeBatch, cache: RowsCache, bound: int
    ) -> Tensor:
        """Return logits (B, N, V) of the nodes of one tree per sequence."""
        self._backtrack(cache)
        nodes = self._paths(tree_batch, cache)  # (B, L, D + 1)
        paths = tokens.gather(1, nodes.flatten(1)).view(-1, nodes.shape[2])
        chain = TokenTree.chain(nodes.shape[2] - 1)
        topology = replace(topology_of(chain, self.config.d_conv, self.device), chains=True)
        call = self.model.tree_call(paths, topology, cache.rows, bound=bound)
        return self._of_nodes(self.model.tree_hidden(call), tree_batch, cache)

    def _paths(self, tree_batch: TreeBatch, cache: RowsCache) -> Tensor:
        """Return the nodes (B, L, D + 1) of each row's path, the last one again at its end."""
        depth, paths = max(tree.max_depth for tree in tree_batch.trees), []
        for row, tree in enumerate(tree_batch.trees):
            leaves = [node for node in range(tree.num_nodes) if not tree.children[node]]
            if len(leaves) > self.num_drafts:
                raise UsageError(
                    f"{tree} has {len(leaves)} leaves, wanted at most {self.num_drafts}: give "
                    f"{type(self).__name__} a larger num_drafts"
                )
            of_row = [tree.path_to(leaf) for leaf in leaves]
            of_row += of_row[:1] * (self.num_drafts - len(of_row))
            for number, path in reversed(list(enumerate(of_row))):
                cache.leaf[row, path] = number + self.more_rows
            paths.append([path + path[-1:] * (depth + 1 - len(path)) for path in of_row])
        return torch.tensor(paths, device=self.device)

    def _of_nodes(
        self, hidden: Tensor, tree_batch: TreeBatch, cache: RowsCache, skipped: Tensor | int = 0
    ) -> Tensor:
        """Return logits (B, N, V), given hidden states (R, T, D) of which paths begin later."""
        count = tree_batch.num_nodes
        first = torch.arange(len(cache.path), device=self.device)[:, None] * cache.copies
        rows, places = first + cache.leaf[:, :count], tree_batch.depths.long() + skipped
        return self.model.logits(hidden[rows, places], wide=False)

    def _backtrack(self, cache: RowsCache) -> None:
        ends = cache.path.gather(1, (cache.path_length[:, None] - 1).clamp(min=0))
        first = torch.arange(len(cache.path), device=self.device) * cache.copies
        accepted = first + cache.leaf.gather(1, ends)[:, 0]
        rows = cache.rows
        rows.path.copy_(torch.arange(rows.path.shape[1], device=self.device).expand_as(rows.path))
        rows.path_length.zero_()
        rows.path_length[accepted] = cache.path_length
        self.model.apply_path(rows)
        copy_rows(rows, accepted.repeat_interleave(cache.copies))
        cache.path_length.zero_()


class JointRows(ReplayRows):
    """Target whose drafts are rows of a batch, backtracking by joint attainment.

    A further row of each sequence reads the tokens that the last call has accepted, and no-ops
    after them, while the others read them and their drafts. Its state then serves all rows. For
    models without attention.
    """

    more_rows = 1

    def __init__(self, model: HybridModel, num_drafts: int) -> None:
        super().__init__(model, num_drafts)
        require_no_ops(model)
        if self.config.attn_layers:
            raise UsageError("joint attainment by rows is for models without attention layers")

    def tree_batch_forward(
        self, tokens: Tensor, tree_batch: TreeBatch, cache: RowsCache, bound: int
    ) -> Tensor:
        """Return logits (B, N, V) of the nodes of one tree per sequence."""
        counts = cache.path_length.clone()  # accepted tokens that are in no state yet
        most = int(counts.max())
        nodes = self._paths(tree_batch, cache)
        batch, _, depth = nodes.shape
        told = cache.tokens.gather(1, cache.path[:, :most])
        shape = batch, cache.copies, most + depth
        fed = torch.zeros(shape, dtype=torch.long, device=self.device)
        fed[..., :most] = told[:, None]
        drafts = tokens.gather(1, nodes.flatten(1)).view_as(nodes)
        places = (counts[:, None, None] + torch.arange(depth, device=self.device)).expand_as(nodes)
        fed[:, 1:].scatter_(2, places, drafts)
        read = counts[:, None].repeat(1, cache.copies)
        read[:, 1:] += depth
        hidden = read_with_no_ops(self.model, fed.flatten(0, 1), read.flatten(), cache.rows)
        first = torch.arange(batch, device=self.device) * cache.copies
        copy_rows(cache.rows, first.repeat_interleave(cache.copies))
        cache.path_length.zero_()
        cache.tokens[:, : tokens.shape[1]] = tokens
        return self._of_nodes(hidden, tree_batch, cache, counts[:, None])
