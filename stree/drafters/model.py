"""A small language model that drafts, level by level, one call a level."""

from __future__ import annotations

import torch
from torch import Tensor

from stree.drafters import Drawn, Proposal
from stree.forest import Forest
from stree.models.hybrid import HybridModel
from stree.rows import Rows
from stree.tree import TokenTree
from stree_kernels import ops
from stree_kernels.shapes import Topology


class ModelDrafter:
    """Drafts with a model of the target's vocabulary.

    It first reads the tokens that became certain since its last draft, as a chain, then the inner
    nodes of the trees as trees of their own that grow level by level. Nothing of a draft but the
    certain tokens reaches its states.
    """

    drawn = Drawn.WITHOUT_REPLACEMENT
    capturable = True
    grows = True

    def __init__(self, model: HybridModel, num_rows: int, max_length: int, max_nodes: int) -> None:
        self.model = model
        self.cache = model.new_cache(max_length, max_nodes, num_rows)
        self.cache.path[:] = torch.arange(max_nodes)  # certain tokens are a chain
        self.cache.variant.copy_(torch.arange(num_rows))
        self._chains: dict[tuple[int, int], Topology] = {}  # graphs hold their addresses
        # What nodes hold that no row's tree has must be tokens, too
        self._tokens = torch.zeros(num_rows * max_nodes, dtype=torch.long, device=model.device)

    def clear(self, row: int) -> None:
        self.cache.narrow(row, 1).reset()

    def read(self, row: int, tokens: Tensor) -> None:
        self.model.prefill(tokens[None], self.cache.at(row))

    def draft(
        self, rows: Rows, forest: Forest, longest: int, bound: int, keep_logits: bool
    ) -> Proposal:
        batch, model = len(rows.active), self.model
        cache, width = self.cache.narrow(0, batch), model.config.d_conv
        bound = min(bound + max(longest, forest.num_drawn_from), cache.num_slots)
        chains = self._chains_of(batch, longest)
        block = rows.block[:, : 1 + longest]
        hidden = model.tree_hidden(block[:, 1:], chains, cache, bound=bound)
        tokens = self._tokens[: batch * forest.num_nodes].view(batch, -1)
        if forest.pool is not None:
            tokens = forest.pool
        hidden = ops.take_roots(hidden, block, rows.active, tokens, cache.path_length)
        finite = torch.empty(batch, forest.num_drawn_from, dtype=torch.bool, device=tokens.device)
        read = drawn = 0
        drawn_from = []
        for number, level in enumerate(forest.levels):
            count = level.nodes.shape[1]
            if number:
                forest.grow(number)
                inner = forest.inner_topology(width)
                hidden = model.tree_hidden(tokens, inner, cache, read, bound, level.nodes)
                read += count
            logits = rows.kept(model.logits(hidden, wide=False))
            ops.choose_children(
                logits, level.noise_at(keep_logits), rows.sampling, level.places, tokens,
                finite[:, drawn : drawn + count], level.nodes, forest.values,
            )  # fmt: skip
            drawn += count
            drawn_from.append(logits)
        all_logits = torch.cat(drawn_from, dim=1) if keep_logits else None
        return Proposal(forest.finish(tokens), finite, all_logits)

    def _chains_of(self, batch: int, length: int) -> Topology:
        """As many chains, which certain tokens are read as."""
        if (batch, length) not in self._chains:
            forest = Forest.of([TokenTree.chain(length - 1)] * batch, self.model.device)
            self._chains[batch, length] = forest.topology(self.model.config.d_conv)
        return self._chains[batch, length]
