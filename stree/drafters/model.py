"""Model drafter: a small language model drafts the trees, one call a level."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stree.batching.prefillers import Prefiller, chunk_sizes
from stree.batching.state import BatchState
from stree.drafters import Drafter, DrafterSpec, Proposal, SiblingSampling
from stree.engine.row_store import RowStore, SavedRow
from stree.models.cache import HybridCache
from stree.models.chunk_pass import PrefillScratch
from stree.models.hidden_states import DraftInputs
from stree.models.layer_caches import Which
from stree.models.model import HybridModel, last_of, read_row
from stree.trees.build import make_tree_batch
from stree.trees.token_tree import TokenTree
from stree.trees.tree_batch import Level, TreeBatch
from stree_kernels import ops
from stree_kernels.contracts import Sampling, Stream, Topology


@dataclass(frozen=True)
class ModelDrafterSpec(DrafterSpec):
    """Settings of a model drafter, from which any decoder makes one.

    Attributes:
        model: A model of the target's vocabulary.
        siblings: How it draws siblings: without replacement; independently, each from all of its
            distribution (SpecInfer); or deterministic, its most probable tokens at any temperature
            (STree).
        temperature: Temperature at which it draws siblings, whatever the request's (DySpec: 0.6);
            None draws at the request's.
    """

    model: HybridModel
    siblings: SiblingSampling = SiblingSampling.WITHOUT_REPLACEMENT
    temperature: float | None = None

    @property
    def partner(self) -> HybridModel:
        return self.model

    def for_decoder(
        self, target: Any, num_rows: int, max_length: int, max_nodes: int
    ) -> ModelDrafter:
        """Return the drafter of a decoder of `num_rows` rows."""
        return ModelDrafter(
            self.model, num_rows, max_length, max_nodes, self.siblings, self.temperature
        )


class ModelDrafter(Drafter):
    """Drafter that runs a model of the target's vocabulary.

    It first reads the tokens that became certain since its last draft, as a chain, then the inner
    nodes of the trees as trees of their own that grow level by level. Only the certain tokens
    change its states. A model that reads features (`stree.models.hidden_states`) has those of the
    target at certain tokens, and its own hidden states or none further down.

    At temperature 0 siblings are its most probable tokens, in every way of drawing them. With a
    temperature of its own they are drawn for greedy requests, too.
    """

    capturable = True
    reads_alongside = True

    def __init__(
        self, model: HybridModel, num_rows: int, max_length: int, max_nodes: int,
        siblings: SiblingSampling = SiblingSampling.WITHOUT_REPLACEMENT,
        temperature: float | None = None,
    ) -> None:
        self.model, self.siblings = model, siblings
        self.drawn = siblings
        self.temperatures: Tensor | None = None  # (B,) fp64, where drafts have one of their own
        if temperature is not None:
            self.temperatures = torch.full(
                (num_rows,), temperature, dtype=torch.float64, device=model.device
            )
        # Dynamic trees are chosen by the values of different siblings
        self.grows = siblings is not SiblingSampling.INDEPENDENT
        self.cache = model.new_cache(max_length, max_nodes, num_rows)
        self.cache.path[:] = torch.arange(max_nodes)  # certain tokens are a chain
        self.cache.variant.copy_(torch.arange(num_rows))
        self._chains: dict[tuple[int, int], Topology] = {}  # graphs hold their addresses
        # Nodes that no row's tree has must hold valid tokens, too
        self._tokens = torch.zeros(num_rows * max_nodes, dtype=torch.long, device=model.device)
        self.feature_layers = model.config.feature_layers
        # Projected features of the target, added to the embeddings of each row's next tokens
        self.inputs: Tensor | None = None
        if self.feature_layers:
            shape = num_rows, max_nodes, model.config.d_model
            self.inputs = torch.zeros(shape, dtype=model.dtype, device=model.device)

    @property
    def row_store(self) -> RowStore:
        return self

    @property
    def skips_first(self) -> bool:
        """True if it reads rows from the second token on (`DraftInputs`)."""
        return self.inputs is not None and self._projection.skips_first

    def clear(self, row: Which) -> None:
        self.cache.clear(row)
        if self.inputs is not None:
            self.inputs[row] = self._projection.unknown.detach()

    def save(self, row: int, most: int) -> SavedRow:
        """Return copies of a row's cache, and of the input of its next token."""
        saved = self.cache.save(row, most)
        following = None if self.inputs is None else self.inputs[row, 0].clone()
        skipped = self.skips_first * (saved.length > 0)
        return SavedRow(saved.length + skipped, (saved, following))

    def load(self, saved: SavedRow, row: int) -> None:
        """Write the copies of `save` into a row."""
        of_cache, following, *_ = saved.parts
        self.cache.load(of_cache, row)
        if self.inputs is not None:
            self.inputs[row, 0] = following

    def bytes_per_row(self) -> int:
        """Return the bytes that a row takes."""
        inputs = 0 if self.inputs is None else self.inputs.nbytes // len(self.inputs)
        return self.cache.bytes_per_row() + inputs

    @torch.no_grad()
    def read(
        self, row: int, tokens: Tensor, features: Tensor | None = None,
        read_row: Callable[..., Tensor] = read_row,
    ) -> None:
        """Read the next tokens (T,) of a row's prompt.

        features (T', F) are those of the last T' of all tokens read, as far as they are known;
        read_row is the prefiller's.
        """
        inputs = None if self.inputs is None else self._inputs_of(row, len(tokens), features)
        if not len(tokens):
            return
        read_row(self.model, self.cache, row, tokens, inputs=inputs)

    def read_by(
        self, prefiller: Prefiller, row: int, tokens: Tensor, features: Tensor | None = None,
        start: int | None = None,
    ) -> None:
        if start == 0 and self.skips_first:
            tokens, start = tokens[1:], 1
        self.read(row, tokens, features, partial(prefiller.read_row, start=start))

    def prepare_reads(self, prefiller: Prefiller, row: int, start: int, count: int | None) -> None:
        most, reads_inputs = self.cache.max_length, self.inputs is not None
        for size in chunk_sizes(most) if count is None else [count]:
            tokens = min(size, most)
            prefiller.prepare(self.model, self.cache, row, start, tokens, (), reads_inputs)

    def _inputs_of(self, row: int, count: int, features: Tensor | None) -> Tensor:
        """Return the inputs (T, D) of the row's next `count` tokens; keep that of the one after."""
        assert self.inputs is not None
        inputs = self._projection.unknown.repeat(count, 1)
        if features is None:
            self.inputs[row, 0] = self._projection.unknown
            return inputs
        following = self._projection.of_tokens(features)
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
    ) -> None:
        if self.skips_first:
            skipped = skipped.clamp(min=(self.cache.length.index_select(0, row) == 0).long())
        places = (scratch.places + skipped).clamp(max=tokens.shape[1] - 1)
        tokens, inputs = tokens.gather(1, places), None
        if self.inputs is not None:
            following = self._projection.of_tokens(torch.cat(list(streams), -1))
            first = self.inputs[:, 0].index_select(0, row)
            inputs = torch.cat([first[:, None], following[:, :-1]], 1)[:, places[0]]
            after = torch.where(count > 0, last_of(following, count), first)
            self.inputs[:, 0].index_copy_(0, row, after)
        left = (count - skipped).clamp(min=0)
        self.model.prefill_padded(tokens, left, row, self.cache, scratch, bound, inputs=inputs)

    def take_features(self, features: Tensor, rows: BatchState, path: Tensor) -> None:
        """Keep the inputs of the tokens of the rows' blocks.

        Each token of a block comes after one of the accepted nodes, path (B, M); features
        (B, N, F) are those of all nodes.
        """
        assert self.inputs is not None
        batch, count = path.shape
        inputs, active = self.inputs[:batch, :count], rows.active[:, None, None]
        # Beyond its length a path has nodes of other trees, whose inputs are never read
        torch.where(active, self._projection.of_nodes(features, path), inputs, out=inputs)

    def _inputs_of_drafts(self, hidden: Tensor, tree_batch: TreeBatch, number: int) -> Tensor:
        """Return the inputs (B, n, D) of a level's nodes, given hidden (B, m, D) of those above."""
        shape = *tree_batch.levels[number].nodes.shape, hidden.shape[2]
        after = self._projection.of_drafts(hidden)
        if hidden.shape[1] == 1 or not self._projection.reads_own:
            return after[:, :1].expand(shape)
        return after.gather(1, tree_batch.above(number)[..., None].expand(shape))

    @property
    def _reads_stream(self) -> bool:
        return self.inputs is not None and self._projection.reads_stream

    def _own(self, hidden: Tensor | Stream) -> Tensor:
        """Return the model's own hidden states (B, n, D) that further drafts read."""
        normed = _normed(hidden)
        return hidden.source if self._reads_stream and isinstance(hidden, Stream) else normed

    @property
    def _projection(self) -> DraftInputs:
        return self.model.model.features

    def draft(
        self, rows: BatchState, tree_batch: TreeBatch, longest_block: int, bound: int,
        keep_logits: bool,
    ) -> Proposal:
        batch, model, given = len(rows.active), self.model, rows.temperature
        if self.temperatures is not None:
            asked = rows.asked._replace(sampled=True)
            rows = replace(rows, asked=asked, temperature=self.temperatures[:batch])
        if self.siblings is SiblingSampling.DETERMINISTIC:  # best tokens, which no filter drops
            asked = rows.asked._replace(sampled=False, filtered=False)
            rows, keep_logits = replace(rows, asked=asked), False
        independent = self.siblings is SiblingSampling.INDEPENDENT
        cache = self.cache.narrow(0, batch)
        bound = min(bound + max(longest_block, tree_batch.num_drawn_from), cache.num_slots)
        chains = self._chains_of(batch, longest_block)
        block = rows.block[:, : 1 + longest_block]
        inputs = None if self.inputs is None else self.inputs[:batch, :longest_block]
        call = model.tree_call(block[:, 1:], chains, cache, bound=bound, inputs=inputs)
        stream = model.tree_stream(call, ends=False)
        tokens = self._tokens[: batch * tree_batch.num_nodes].view(batch, -1)
        if tree_batch.pool is not None:
            tokens = tree_batch.pool
        if self._reads_stream:
            ops.norm(stream)  # which adds the stream up
            stream.normed = stream.source
        hidden: Tensor | Stream = ops.take_roots(
            stream, block, rows.active, tokens, cache.cache_state
        )
        if self._reads_stream:
            assert isinstance(hidden, Tensor)
            hidden = Stream(hidden, model.model.norm.weight, model.model.norm.eps)
        finite = torch.empty(
            batch, tree_batch.num_drawn_from, dtype=torch.bool, device=tokens.device
        )
        read = drawn = 0
        drawn_from = []
        for number, level in enumerate(tree_batch.levels):
            count = level.nodes.shape[1]
            if number:
                tree_batch.grow(number)
                if inputs is not None:
                    inputs = self._inputs_of_drafts(self._own(hidden), tree_batch, number)
                hidden = self._read_level(tokens, tree_batch, number, cache, read, bound, inputs)
                read += count
            chosen = (
                level.noise_at(keep_logits), None if independent else rows.sampling, level.places,
                tokens,
                finite[:, drawn : drawn + count], level.nodes, tree_batch.values,
            )
            slots = tree_batch.slots_at(rows.temperature)
            if rows.leaves_out:
                paths = tree_batch.paths_at(tokens, number, rows.asked.reads_paths)
                logits = rows.processed(model.head_logits(_normed(hidden)), paths, model.head_ids)
                ops.choose_children(logits, *chosen, model.head_ids, slots)
            else:
                logits = model.draw_children(hidden, *chosen, slots=slots)
            if independent and rows.sampling is not None:
                self._draw_each(logits, level, rows, rows.sampling, tokens, keep_logits)
            drawn += count
            drawn_from.append(logits)
        all_logits = None
        if keep_logits:
            all_logits = model.over_vocabulary(torch.cat(drawn_from, dim=1))
            if self.temperatures is not None:
                all_logits = as_drawn_at(all_logits, rows.temperature, given)
        points = None
        # Greedy rows of independent siblings have the best tokens, which differ; and they accept a
        # draft or not by its token alone, whatever it was drawn from
        if independent or (keep_logits and self.temperatures is not None):
            points = (given == 0)[:, None].repeat(1, tree_batch.num_nodes)
        return Proposal(tree_batch.finish(tokens), finite, all_logits, points, independent)

    def _read_level(
        self, tokens: Tensor, tree_batch: TreeBatch, number: int, cache: HybridCache, read: int,
        bound: int, inputs: Tensor | None,
    ) -> Tensor | Stream:
        """Read a level's nodes (B, n), after `read` nodes of the levels above.

        Returns their hidden states (B, n, D), or the stream before the final norm.
        """
        inner = tree_batch.inner_topology(self.model.config.d_conv)
        nodes = tree_batch.levels[number].nodes
        call = self.model.tree_call(tokens, inner, cache, read, bound, nodes, inputs=inputs)
        return self.model.tree_stream(call)

    def _draw_each(
        self, logits: Tensor, level: Level, rows: BatchState, sampling: Sampling, tokens: Tensor,
        unshared: bool,
    ) -> None:
        """Draw each child of a level's nodes from all of logits (B, n, K), in rows that sample."""
        count = level.places.shape[2]
        places = level.places.masked_fill((rows.temperature == 0)[:, None, None], -1)
        noise = level.noise_of_each(unshared).flatten(1)
        each = logits[:, :, None].expand(-1, -1, count, -1).flatten(1, 2)
        finite = torch.empty_like(noise, dtype=torch.bool)  # the level's own is known
        ops.choose_children(
            each, noise, sampling, places.flatten(1)[..., None], tokens, finite,
            ids=self.model.head_ids,
        )

    def _chains_of(self, batch: int, length: int) -> Topology:
        """Return the topology of `batch` chains of `length` tokens, to read certain tokens."""
        if (batch, length) not in self._chains:
            tree_batch = make_tree_batch([TokenTree.chain(length - 1)] * batch, self.model.device)
            self._chains[batch, length] = tree_batch.topology(self.model.config.d_conv)
        return self._chains[batch, length]


def as_drawn_at(logits: Tensor, drawn_at: Tensor, temperature: Tensor) -> Tensor:
    """Return logits whose distribution at the rows' temperatures is that of the drafts.

    Verifiers divide all logits by a row's temperature.

    Args:
        logits: (B, I, V) that the drafts were drawn from.
        drawn_at: (B,) fp64, temperatures above 0 that the drafts were drawn at.
        temperature: (B,) fp64, temperatures of the rows; greedy ones keep their logits.

    Returns:
        (B, I, V) in fp32 or wider: a rounded distribution would not be that of the drafts.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    ratio = torch.where(temperature > 0, temperature / drawn_at, 1.0)
    return logits.to(wide) * ratio[:, None, None].to(wide)


def _normed(hidden: Tensor | Stream) -> Tensor:
    return ops.norm(hidden) if isinstance(hidden, Stream) else hidden
