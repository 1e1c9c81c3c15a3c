"""Drafter that drafts a tree as batch generation, as Mamba Drafters does (Choi et al. 2025, 3.1).

At step i a sequence has a row for each of its N₁·…·Nᵢ nodes. Each row takes one token, and its
state is then copied to the rows of the node's children. `ModelDrafter` reads the nodes of a level
as part of one tree call instead, and copies no state; both draft the same tokens.

Shapes: B sequences, n nodes of a level with children, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stree.drafters import DrafterSpec
from stree.drafters.model import ModelDrafter
from stree.models.cache import HybridCache
from stree.models.model import HybridModel
from stree.trees.token_tree import TokenTree
from stree.trees.tree_batch import TreeBatch, topology_of
from stree_kernels.contracts import Stream
from stree_lab.papers.draft_rows import copy_rows

ONE_TOKEN = TokenTree.chain(0)


@dataclass(frozen=True)
class CopiedStates(DrafterSpec):
    """Settings of a `CopyingDrafter`, from which any decoder makes one.

    Attributes:
        model: A model of the target's vocabulary, without features of the target.
        width: Most nodes with children in a level of any tree.
    """

    model: HybridModel
    width: int

    def for_decoder(
        self, target: Any, num_rows: int, max_length: int, max_nodes: int
    ) -> CopyingDrafter:
        """Return the drafter of a decoder of `num_rows` rows."""
        return CopyingDrafter(self.model, num_rows, max_length, max_nodes, self.width)


class CopyingDrafter(ModelDrafter):
    """Model drafter with a preallocated row of the state for each node of a level.

    Args:
        model, num_rows, max_length, max_nodes: As in `ModelDrafter`.
        width: Most nodes with children in a level of any tree.
    """

    def __init__(
        self, model: HybridModel, num_rows: int, max_length: int, max_nodes: int, width: int
    ) -> None:
        super().__init__(model, num_rows, max_length, max_nodes)
        self.copies = model.new_cache(max_length + max_nodes, 1, num_rows * width)
        self.copies.variant.zero_()  # one tree, of a token, is that of all rows
        self._one = topology_of(ONE_TOKEN, model.config.d_conv, model.device)

    def _read_level(
        self, tokens: Tensor, tree_batch: TreeBatch, number: int, cache: HybridCache, read: int,
        bound: int, inputs: Tensor | None,
    ) -> Tensor | Stream:
        nodes, above = tree_batch.levels[number].nodes, tree_batch.above(number)
        batch, count = nodes.shape
        source, rows_above = cache, 1
        if number > 1:
            rows_above = tree_batch.levels[number - 1].nodes.shape[1]
            source = self.copies.narrow(0, batch * rows_above)
        self.model.apply_path(source)  # the token of the level above, or all certain ones
        first = torch.arange(batch, device=nodes.device)[:, None] * rows_above
        copies = self.copies.narrow(0, batch * count)
        copy_rows(copies, (first + above * (number > 1)).flatten(), source)
        copies.path_length.zero_()  # of rows that the last draft had
        drafted = tokens.gather(1, nodes.clamp(min=0)).view(-1, 1)
        call = self.model.tree_call(drafted, self._one, copies, bound=bound)
        hidden = self.model.tree_hidden(call)
        copies.path_length.fill_(1)
        return hidden.view(batch, count, -1)
