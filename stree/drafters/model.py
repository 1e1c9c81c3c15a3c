"""A small language model that drafts, level by level, one call a level."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stree.batching.state import BatchState
from stree.drafters import Proposal, SiblingSampling
from stree.models.chunk_pass import PrefillScratch
from stree.models.hidden_states import HiddenStateProjection
from stree.models.layer_caches import Which
from stree.models.model import HybridModel, last_of, read_row
from stree.trees.build import make_tree_batch
from stree.trees.token_tree import TokenTree
from stree.trees.tree_batch import Level, TreeBatch
from stree_kernels import ops
from stree_kernels.contracts import Sampling, Stream, Topology


@dataclass(frozen=True)
class ModelDrafterSpec:
    """A model drafter to be, for any decoder.

    Args: model, of the target's vocabulary; siblings, how it draws them: without replacement;
    independently, each from all of its distribution (SpecInfer); or as points, its most probable
    tokens whatever the temperature (STree).
    """

    model: HybridModel
    siblings: SiblingSampling = SiblingSampling.WITHOUT_REPLACEMENT

    def for_decoder(
        self, target: Any, num_rows: int, max_length: int, max_nodes: int
    ) -> ModelDrafter:
        return ModelDrafter(self.model, num_rows, max_length, max_nodes, self.siblings)


class ModelDrafter:
    """Drafts with a model of the target's vocabulary.

    It first reads the tokens that became certain since its last draft, as a chain, then the inner
    nodes of the trees as trees of their own that grow level by level. Nothing of a draft but the
    certain tokens reaches its states. A model that reads features (`stree.models.hidden_states`)
    has those of the target at certain tokens, further down its own hidden states or none.

    At temperature 0 siblings are its most probable tokens, however they are drawn else.
    """

    capturable = True

    def __init__(
        self,
        model: HybridModel,
        num_rows: int,
        max_length: int,
        max_nodes: int,
        siblings: SiblingSampling = SiblingSampling.WITHOUT_REPLACEMENT,
    ) -> None:
        self.model, self.siblings = model, siblings
        self.drawn = siblings
        # What trees grow by are values of siblings that differ
        self.grows = siblings is not SiblingSampling.INDEPENDENT
        self.cache = model.new_cache(max_length, max_nodes, num_rows)
        self.cache.path[:] = torch.arange(max_nodes)  # certain tokens are a chain
        self.cache.variant.copy_(torch.arange(num_rows))
        self._chains: dict[tuple[int, int], Topology] = {}  # graphs hold their addresses
        # What nodes hold that no row's tree has must be tokens, too
        self._tokens = torch.zeros(num_rows * max_nodes, dtype=torch.long, device=model.device)
        self.feature_layers = model.config.feature_layers
        # What is added to the embeddings of each row's next tokens, from the target's features
        self.inputs: Tensor | None = None
        if self.feature_layers:
            shape = num_rows, max_nodes, model.config.d_model
            self.inputs = torch.zeros(shape, dtype=model.dtype, device=model.device)

    def clear(self, row: Which) -> None:
        self.cache.reset(row)
        if self.inputs is not None:
            self.inputs[row] = self._reader.unknown.detach()

    @torch.no_grad()
    def read(
        self,
        row: int,
        tokens: Tensor,
        features: Tensor | None = None,
        read_row: Callable[..., Tensor] = read_row,
    ) -> None:
        """features (T', F), of the last T' tokens up to the last of these, as many as are known;
        read_row, how an runner reads."""
        inputs = None if self.inputs is None else self._inputs_of(row, len(tokens), features)
        read_row(self.model, self.cache, row, tokens, inputs=inputs)

    def _inputs_of(self, row: int, count: int, features: Tensor | None) -> Tensor:
        """What is added to the row's next `count` tokens, (T, D); and that of the token after them
        is remembered."""
        assert self.inputs is not None
        inputs = self._reader.unknown.repeat(count, 1)
        if features is None:
            self.inputs[row, 0] = self._reader.unknown
            return inputs
        following = self._reader.of_tokens(features)
        if len(features) == count:
            inputs[0] = self.inputs[row, 0]
        known = following[:-1][-count:]
        inputs[count - len(known) :] = known
        self.inputs[row, 0] = following[-1]
        return inputs

    @torch.no_grad()
    def read_padded(
        self, tokens: Tensor, count: Tensor, skipped: Tensor, row: Tensor, scratch: PrefillScratch,
        bound: int, streams: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """`read` of the first of tokens (1, T) for graphs, as `HybridModel.prefill_padded`, but for
        the first `skipped` (1,) of these, fewer than there are; streams, the target's features at
        all of them, (1, T, ·) a layer."""
        places = (scratch.places + skipped).clamp(max=tokens.shape[1] - 1)
        tokens, inputs = tokens.gather(1, places), None
        if self.inputs is not None:
            following = self._reader.of_tokens(torch.cat(list(streams), -1))
            first = self.inputs[:, 0].index_select(0, row)
            inputs = torch.cat([first[:, None], following[:, :-1]], 1)[:, places[0]]
            after = torch.where(count > 0, last_of(following, count), first)
            self.inputs[:, 0].index_copy_(0, row, after)
        left = count - skipped
        self.model.prefill_padded(tokens, left, row, self.cache, scratch, bound, inputs=inputs)

    def take_features(self, features: Tensor, rows: BatchState, path: Tensor) -> None:
        """Remember what is added to the tokens of the rows' blocks: each token of a block comes
        after one of the accepted nodes, path (B, M); features (B, N, F) of all nodes."""
        assert self.inputs is not None
        batch, count = path.shape
        inputs, active = self.inputs[:batch, :count], rows.active[:, None, None]
        # Beyond its length a path has nodes of other trees, and nobody reads what comes of them
        torch.where(active, self._reader.of_nodes(features, path), inputs, out=inputs)

    def _inputs_of_drafts(self, hidden: Tensor, tree_batch: TreeBatch, number: int) -> Tensor:
        """What is added to the nodes of a level, (B, n, D), given hidden (B, m, D) of the level
        above."""
        shape = *tree_batch.levels[number].nodes.shape, hidden.shape[2]
        after = self._reader.of_drafts(hidden)
        if hidden.shape[1] == 1 or not self._reader.reads_own:
            return after[:, :1].expand(shape)
        return after.gather(1, tree_batch.above(number)[..., None].expand(shape))

    @property
    def _reader(self) -> HiddenStateProjection:
        return self.model.model.features

    def draft(
        self, rows: BatchState, tree_batch: TreeBatch, longest: int, bound: int, keep_logits: bool
    ) -> Proposal:
        batch, model = len(rows.active), self.model
        if (
            self.siblings is SiblingSampling.DETERMINISTIC
        ):  # the best tokens; what sampling leaves out is no matter
            rows, keep_logits = replace(rows, sampled=False, filtered=False), False
        independent = self.siblings is SiblingSampling.INDEPENDENT
        cache, width = self.cache.narrow(0, batch), model.config.d_conv
        bound = min(bound + max(longest, tree_batch.num_drawn_from), cache.num_slots)
        chains = self._chains_of(batch, longest)
        block = rows.block[:, : 1 + longest]
        inputs = None if self.inputs is None else self.inputs[:batch, :longest]
        call = model.tree_call(block[:, 1:], chains, cache, bound=bound, inputs=inputs)
        stream = model.tree_stream(call, ends=False)
        tokens = self._tokens[: batch * tree_batch.num_nodes].view(batch, -1)
        if tree_batch.pool is not None:
            tokens = tree_batch.pool
        hidden: Tensor | Stream = ops.take_roots(
            stream, block, rows.active, tokens, cache.cache_state
        )
        finite = torch.empty(
            batch, tree_batch.num_drawn_from, dtype=torch.bool, device=tokens.device
        )
        read = drawn = 0
        drawn_from = []
        for number, level in enumerate(tree_batch.levels):
            count = level.nodes.shape[1]
            if number:
                tree_batch.grow(number)
                inner = tree_batch.inner_topology(width)
                if inputs is not None:
                    inputs = self._inputs_of_drafts(_normed(hidden), tree_batch, number)
                call = model.tree_call(
                    tokens, inner, cache, read, bound, level.nodes, inputs=inputs
                )
                hidden = model.tree_stream(call)
                read += count
            chosen = (
                level.noise_at(keep_logits), None if independent else rows.sampling, level.places,
                tokens,
                finite[:, drawn : drawn + count], level.nodes, tree_batch.values,
            )  # fmt: skip
            if rows.leaves_out:
                drafts = tree_batch.drafts_at(rows, tokens, number)
                logits = rows.kept(model.head_logits(_normed(hidden)), drafts, model.head_ids)
                ops.choose_children(logits, *chosen, model.head_ids)
            else:
                logits = model.draw_children(hidden, *chosen)
            if independent and rows.sampling is not None:
                self._draw_each(logits, level, rows, rows.sampling, tokens, keep_logits)
            tree_batch.rate(number, logits, rows, tokens, model.head_ids)
            drawn += count
            drawn_from.append(logits)
        all_logits = None
        if keep_logits:
            all_logits = model.over_vocabulary(torch.cat(drawn_from, dim=1))
        points = None
        if independent:  # greedy rows have the best tokens, which differ
            points = (rows.temperature == 0)[:, None].repeat(1, tree_batch.num_nodes)
        return Proposal(tree_batch.finish(tokens), finite, all_logits, points, independent)

    def _draw_each(
        self, logits: Tensor, level: Level, rows: BatchState, sampling: Sampling, tokens: Tensor,
        unshared: bool,
    ) -> None:  # fmt: skip
        """Let rows that sample draw each child of a level's nodes from all of logits (B, n, K)."""
        count = level.places.shape[2]
        places = level.places.masked_fill((rows.temperature == 0)[:, None, None], -1)
        noise = level.noise_of_each(unshared).flatten(1)
        each = logits[:, :, None].expand(-1, -1, count, -1).flatten(1, 2)
        finite = torch.empty_like(noise, dtype=torch.bool)  # the level's own is known
        ops.choose_children(
            each, noise, sampling, places.flatten(1)[..., None], tokens, finite,
            ids=self.model.head_ids,
        )  # fmt: skip

    def _chains_of(self, batch: int, length: int) -> Topology:
        """As many chains, which certain tokens are read as."""
        if (batch, length) not in self._chains:
            tree_batch = make_tree_batch([TokenTree.chain(length - 1)] * batch, self.model.device)
            self._chains[batch, length] = tree_batch.topology(self.model.config.d_conv)
        return self._chains[batch, length]


def _normed(hidden: Tensor | Stream) -> Tensor:
    return ops.norm(hidden) if isinstance(hidden, Stream) else hidden
