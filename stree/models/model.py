"""A model of the layers that its config describes: training, prefill, tree verification, commit.

Shapes: B batch, T tokens, N tree nodes, V vocabulary, D model width, K tokens of the head, R its
rank (K = V and R = D unless the config says otherwise). Parameters have MambaInLlama's names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from stree.common.errors import UsageError
from stree.models.backbone import initialise
from stree.models.cache import HybridCache
from stree.models.chunk_pass import ChunkPass, PrefillScratch
from stree.models.config import HybridConfig
from stree.models.head import on_own_gpu
from stree.models.hidden_states import HiddenStateTap, first_apart
from stree.models.joint import JointPass
from stree.models.layers.attention import takes_packed
from stree.models.layers.layer import Layer
from stree.models.layers.part import PrefillPass, TrainingPass, TreePass, product_dtype
from stree.models.layers.rotary import positions_of, rotary_angles
from stree.models.multi_step import MultiStepPass
from stree.models.packing import PackedModel
from stree.trees.token_tree import TokenTree
from stree.trees.tree_batch import TreeBatch, topology_of
from stree_kernels import naive, ops
from stree_kernels.contracts import Stream, Topology
from stree_kernels.index_plan import whole_heads
from stree_kernels.segments import sample_bounds

READ_AT_ONCE = 2048  # tokens of a prompt in one chunk, by default


def read_row(
    model: Any, cache: Any, row: int, tokens: Tensor, features: HiddenStateTap | None = None,
    inputs: Tensor | None = None,
) -> Tensor:
    """Prefill one sequence of a cache with tokens (T,); return the logits (1, V) after the last.

    features takes hidden states for a drafter; inputs (T, D) are added to the embeddings.
    """
    options: dict[str, Any] = {} if features is None else {"features": features}
    if inputs is not None:
        options["inputs"] = inputs[None]
    return model.prefill(tokens[None], cache.at(row), **options)


def _causal(mask: Tensor, start: int, window: int) -> Tensor:
    """Return a mask (…, T, L) less the keys after each token, and those before its window.

    start is the position of the first token, window the positions that a token sees; 0 is all.
    """
    mask = mask.tril(start)
    return mask.triu(start + 1 - window) if window else mask


def last_of(values: Tensor, count: Tensor) -> Tensor:
    """Return value `count` − 1 of values (1, T, D) as (1, D), or the first for count (1,) = 0."""
    return values.index_select(1, (count - 1).clamp(min=0))[:, 0]


class HybridModel(PackedModel):
    """A causal language model of the layers that a `HybridConfig` describes.

    Example:
        >>> import stree, torch
        >>> sizes = dict(attn_layers=(0,), num_heads=2, num_kv_heads=1, head_dim=8)
        >>> model = stree.HybridModel(stree.HybridConfig(64, d_model=16, num_layers=1, **sizes))
        >>> model(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 64])
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        self.tokens_sha256: str | None = None  # known for a checkpoint with a manifest
        if self.device.type != "meta":
            initialise(self, config.num_layers)

    def num_parameters(self) -> int:
        """Return the number of all parameters; tied ones count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @torch.no_grad()
    @on_own_gpu
    def first_non_finite(self, tokens: Sequence[int]) -> str | None:
        """Return where a NaN or an infinity first appears, in a weight or after a layer.

        tokens are a sequence to run through the model. Returns None when everything is finite.
        """
        for name, parameter in self.named_parameters():
            if not bool(parameter.isfinite().all()):
                return f"its weights are not finite in {name}"
        row = torch.tensor([list(tokens)], device=self.device)
        positions = torch.arange(row.shape[1], device=self.device)[None]
        x, beside = self.model.begin(row, None)
        context = TrainingPass(
            self._rotary(positions), shared=self.model.shared_blocks, embedded=beside
        )
        for index, layer in enumerate(self.model.layers):
            x = layer(x, context)
            if not bool(x.isfinite().all()):
                return f"its finite weights overflow in layer {index}"
        return None

    # Training

    def forward(self, tokens: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        """Return logits (B, T, V) of whole sequences, tokens (B, T).

        segment_ids as in `hidden_states`.
        """
        return self.logits(self.hidden_states(tokens, segment_ids))

    @on_own_gpu
    def hidden_states(
        self, tokens: Tensor, segment_ids: Tensor | None = None, *,
        features: HiddenStateTap | None = None, read: Tensor | None = None,
        known: Tensor | None = None, bounds: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states (B, T, D) after the final norm.

        Args:
            tokens: (B, T) int64.
            segment_ids: (B, T), non-decreasing along T, the numbers of samples packed into one
                row: attention, conv, state and positions start anew with each. None is one sample
                a row.
            features: Takes hidden states for a drafter.
            read: (B, T, F), the target's features of the same tokens, for a drafter: each token
                reads those of the token before it.
            known: (B, T) bool, which of `read` are known; None is all.
            bounds: `sample_bounds` of `segment_ids`; None finds them, which waits for a GPU.
        """
        inputs = None if read is None else self.model.features(read, segment_ids, known)
        if inputs is not None and self.model.features.skips_first:
            segment_ids, bounds = first_apart(tokens, segment_ids), None
        positions, mask = positions_of(tokens, segment_ids), None
        if segment_ids is not None:
            bounds = sample_bounds(segment_ids) if bounds is None else bounds
            # A compiled layer is not compiled again for another number of samples.
            torch._dynamo.maybe_mark_dynamic(bounds, 0)
            has_window = 0 < self.config.sliding_window < tokens.shape[1]
            if self.config.attn_layers and (has_window or not self._attends_packed()):
                same = segment_ids[:, :, None] == segment_ids[:, None, :]
                mask = _causal(same, 0, self.config.sliding_window)[:, None]
        elif 0 < self.config.sliding_window < tokens.shape[1]:
            every = torch.ones(1, *[tokens.shape[1]] * 2, dtype=torch.bool, device=tokens.device)
            mask = _causal(every, 0, self.config.sliding_window)[:, None]
        x, beside = self.model.begin(tokens, inputs)
        context = TrainingPass(
            self._rotary(positions), segment_ids, mask,
            shared=self.model.shared_blocks, embedded=beside, bounds=bounds,
        )
        for index, layer in enumerate(self.model.layers):
            x = layer(x, context)
            if features is not None:
                features.take(index, x)
        return self.model.norm(x)

    def _attends_packed(self) -> bool:
        dtype = product_dtype(self.model.embed_tokens.weight)
        return takes_packed(self.config.head_dim, dtype, self.device)

    @on_own_gpu
    def hidden_ahead(
        self, tokens: Tensor, segment_ids: Tensor | None, read: Tensor, known: Tensor | None,
        ahead: int,
    ) -> list[Tensor]:
        """Return hidden states (B, T, D) of 1 + `ahead` passes of multi-step training.

        Pass 0 is `hidden_states`; pass k reads each token as the k-th of a draft
        (`stree.models.multi_step`).

        Args:
            tokens: (B, T) int64.
            segment_ids: As in `hidden_states`.
            read: (B, T, F), the target's features of the same tokens.
            known: As in `hidden_states`.
            ahead: Number of passes after the first; 0 is none.
        """
        reader = self.model.features
        hidden: list[Tensor] = []
        embedded, inputs = self.model.embed(tokens), reader(read, segment_ids, known)
        if reader.skips_first:
            segment_ids = first_apart(tokens, segment_ids)
        rotary = self._rotary(positions_of(tokens, segment_ids))
        scanned: dict[int, list[Any]] = {}
        for depth in range(1 + ahead):
            x, beside = reader.joined(embedded, inputs)
            context = MultiStepPass(rotary, segment_ids, embedded=beside, scanned=scanned)
            for layer in cast(list[Layer], self.model.layers):
                x = layer.forward(x, context)
            hidden.append(self.model.norm(x))
            if depth < ahead:
                own = x if reader.reads_stream else hidden[-1]
                inputs = reader.of_drafts(own.roll(1, dims=1))
        return hidden

    # Decoding

    def new_cache(
        self, max_length: int, max_nodes: int, batch: int = 1, backtracking: str = "replay"
    ) -> HybridCache:
        """Return static buffers for sequences, and pack the weights.

        Args:
            max_length: Most committed tokens of a sequence.
            max_nodes: Most nodes of a tree, the root included.
            batch: Number of sequences.
            backtracking: "replay" or "joint" (`HybridCache`).
        """
        self.pack()
        return HybridCache(
            self.config, max_length, max_nodes,
            batch=batch, device=self.device, dtype=self.dtype, backtracking=backtracking,
        )

    @torch.no_grad()
    @on_own_gpu
    def prefill(
        self, tokens: Tensor, cache: HybridCache, chunk: int = READ_AT_ONCE, *,
        features: HiddenStateTap | None = None, inputs: Tensor | None = None,
    ) -> Tensor:
        """Commit tokens (B, T) to the cache, in chunks; return the logits (B, V) after the last.

        Args:
            tokens: (B, T) int64, T ≥ 1.
            cache: Of B sequences.
            chunk: Tokens of a chunk.
            features: Takes hidden states for a drafter.
            inputs: (B, T, D), added to the embeddings; None adds nothing.

        Raises:
            UsageError: For an empty prompt, or one that does not fit the cache.
        """
        if tokens.shape[1] == 0:
            raise UsageError("the prompt is empty; give at least one token")
        cache.reserve(tokens.shape[1])
        self.apply_path(cache)
        for start in range(0, tokens.shape[1], chunk):
            part = slice(start, start + chunk)
            added = None if inputs is None else inputs[:, part]
            hidden = self._extend(tokens[:, part], cache, features, added)
        return self.logits(self.model.norm(hidden[:, -1]))

    def _extend(
        self, tokens: Tensor, cache: HybridCache, features: HiddenStateTap | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        start, num_tokens = cache.num_committed, tokens.shape[1]
        bound = start + num_tokens
        mask = None
        if self.config.attn_layers and (start or 0 < self.config.sliding_window < bound):
            mask = torch.ones(num_tokens, bound, dtype=torch.bool, device=tokens.device)
            mask = _causal(mask, start, self.config.sliding_window)[None, None]
        positions = torch.arange(start, bound, device=tokens.device).expand_as(tokens)
        (x, beside), y = self.model.begin(tokens, inputs), None
        context = PrefillPass(
            self._rotary(positions), mask=mask, shared=self.model.shared_blocks, embedded=beside,
            caches=cache.layers, start=start, features=features,
        )
        for layer in cast(list[Layer], self.model.layers):
            x, y = layer.run(x, y, context)
        x = context.add(x, y)
        context.enter(self.config.num_layers, x)
        cache.length += num_tokens
        cache.num_committed += num_tokens
        return x

    @torch.no_grad()
    @on_own_gpu
    def prefill_padded(
        self, tokens: Tensor, count: Tensor, row: Tensor, cache: HybridCache,
        scratch: PrefillScratch, bound: int, *, features: HiddenStateTap | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Commit the first `count` tokens of a padded chunk, without waiting for the device.

        Unlike `prefill`, it can be captured: only the device knows row and count.

        Args:
            tokens: (1, T), padding included.
            count: (1,) tokens that count.
            row: (1,) the sequence that reads them; no accepted path of it may be pending.
            cache: Of all sequences.
            scratch: Buffers for chunks of T tokens.
            bound: Cache slots to attend to, at least those used after all T tokens.
            features: Takes hidden states for a drafter, padding included.
            inputs: (1, T, D), added to the embeddings; None adds nothing.

        Returns the hidden state (1, D) of the last token that counts.
        """
        self.pack_what_moved()
        call = ChunkPass.of(
            tokens, count, row, cache, scratch, bound, inputs,
            embedding=self.model.embed_tokens.weight, shared=self.model.shared_blocks,
            features=features,
        )
        return last_of(self.tree_hidden(call), count)

    @torch.no_grad()
    def tree_forward(
        self, tokens: Tensor, tree: TokenTree, cache: HybridCache, bound: int | None = None, *,
        wide: bool = True,
    ) -> Tensor:
        """Return logits (B, N, V) of every node of a tree, in one call.

        The call first replays the last accepted path. A tree of one node is an ordinary step.

        Args:
            tokens: (B, N), the root first.
            tree: Shape of the tree of all sequences.
            cache: Of B sequences.
            bound: Cache slots to attend to, at least the committed ones and N; None is just these.
            wide: As in `logits`.
        """
        if tokens.shape[1] != tree.num_nodes:
            raise UsageError(f"{tokens.shape[1]} tokens for the {tree.num_nodes} nodes of {tree}")
        topology = topology_of(tree, self.config.d_conv, tokens.device)
        call = self.tree_call(tokens, topology, cache, bound=bound)
        return self.logits(self.tree_hidden(call), wide=wide)

    @torch.no_grad()
    @on_own_gpu
    def tree_batch_forward(
        self, tokens: Tensor, tree_batch: TreeBatch, cache: HybridCache, bound: int,
        features: HiddenStateTap | None = None, longest_path: int | None = None,
    ) -> Tensor:
        """Return logits (B, N, V) of the nodes of one tree per sequence, in the product's dtype.

        Args:
            tokens: (B, N), the roots first.
            tree_batch: The tree of each sequence.
            cache: Of B sequences.
            bound: Cache slots to attend to, as in `tree_forward`.
            features: Takes hidden states of the nodes for a drafter.
            longest_path: Most nodes of any pending path, for a cache with joint backtracking; None
                asks the device.
        """
        topology = tree_batch.topology(self.config.d_conv)
        call = self.tree_call(
            tokens, topology, cache, bound=bound, features=features, longest_path=longest_path
        )
        return self.logits(self.tree_hidden(call), wide=False)

    @torch.no_grad()
    @on_own_gpu
    def tree_call(
        self, tokens: Tensor, topology: Topology, cache: HybridCache, num_read: int = 0,
        bound: int | None = None, nodes: Tensor | None = None, *, inputs: Tensor | None = None,
        features: HiddenStateTap | None = None, longest_path: int | None = None,
    ) -> TreePass:
        """Return a pass over nodes num_read … num_read + Q − 1 of trees.

        `tree_hidden` or `tree_stream` runs it.

        Args:
            tokens: (B, Q) of the new nodes; with `nodes`, (B, N) of all nodes of the trees.
            topology: Trees, of which `cache.variant` names that of each sequence.
            cache: Of B sequences.
            num_read: Nodes of the trees that earlier calls have read; 0 begins new trees after the
                accepted paths of the last ones.
            bound: As in `tree_forward`.
            nodes: (B, Q) indices into tokens (B, N), −1 for none; None for tokens (B, Q).
            inputs: (B, Q, D), added to the embeddings; None adds nothing.
            features: Takes hidden states of the nodes for a drafter.
            longest_path: As in `tree_batch_forward`.
        """
        self.pack_what_moved()
        used = cache.num_committed + num_read + (tokens if nodes is None else nodes).shape[-1]
        model: dict[str, Any] = dict(
            embedding=self.model.embed_tokens.weight, shared=self.model.shared_blocks,
            inputs=inputs, features=features,
        )
        if cache.last_tree is not None:
            return JointPass.of(tokens, topology, cache, bound or used, longest_path, **model)
        return TreePass(
            topology, cache.cache_state, num_read, bound or used, cache.layers,
            tokens=tokens, nodes=nodes, **model,
        )

    @torch.no_grad()
    @on_own_gpu
    def tree_hidden(self, call: TreePass) -> Tensor:
        """Run a pass; return the hidden states (B, Q, D) of its nodes after the final norm."""
        stream = self._run_tree(call)
        hidden = ops.norm(stream)
        call.enter(self.config.num_layers, stream)
        return call.end(hidden)

    @torch.no_grad()
    @on_own_gpu
    def tree_stream(self, call: TreePass, *, ends: bool = True) -> Stream:
        """Run a pass; return the stream of its nodes before the final norm.

        `draw_children` reads it. `ops.take_roots` reads it with `ends` = False, and ends the pass.
        """
        stream = self._run_tree(call)
        if ends:
            call.end(stream.source)
        return stream

    def _run_tree(self, call: TreePass) -> Stream:
        inputs = self.model.normed_embeddings
        x, y = None if inputs is None else call.begin(inputs), None
        for layer in cast(list[Layer], self.model.layers):
            x, y = layer.run(x, y, call)
        stream = call.add_norm(x, y, self.model.norm)[0]
        self.model.norm.add_bias(stream)
        return stream

    @torch.no_grad()
    @on_own_gpu
    def apply_path(self, cache: HybridCache) -> None:
        """Advance states, conv states and keys along the pending accepted path, if any."""
        if cache.last_tree is not None:
            return self._read_path(cache)
        mixers = dict(self.model.mixers())
        for cache_index, layer_cache in enumerate(cache.layers):
            layer_cache.apply_path(mixers.get(cache_index), cache.cache_state)
        cache.length += cache.path_length
        cache.path_length.zero_()

    def _read_path(self, cache: HybridCache) -> None:
        """Feed the pending accepted path again (`stree.models.joint`).

        The paths of several sequences must be equally long.
        """
        assert cache.last_tree is not None
        count = int(cache.path_length.max())
        if count:
            assert bool((cache.path_length == count).all())
            cache.path_length.zero_()
            cache.num_committed -= count
            self._extend(cache.last_tree.on(cache.path[:, :count]), cache)

    def _rotary(self, positions: Tensor) -> Tensor | None:
        """Return angles (2, B, T, 1, D) of positions (B, T) for `whole_heads`; None if unused."""
        if not self.config.attn_layers:
            return None
        dtype = naive.accumulation_dtype(self.dtype)
        return whole_heads(rotary_angles(self.config, positions, dtype)[..., None, :])
