"""A model of the layers that its config describes: training, prefill, tree verification, commit.

Shapes: B batch, T tokens, N tree nodes, V vocabulary, D model width, K tokens of the head, R its
rank (K = V and R = D unless the config says otherwise). Parameters have MambaInLlama's names.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stree.common.errors import UsageError
from stree.models.backbone import Backbone, initialise
from stree.models.cache import HybridCache
from stree.models.chunk_pass import ChunkPass, PrefillScratch
from stree.models.config import HybridConfig
from stree.models.hidden_states import HiddenStateTap
from stree.models.joint import JointPass
from stree.models.layers.layer import Layer, SharedTransformer
from stree.models.layers.packed_linear import FLOAT8, lay_for_products, weight_of
from stree.models.layers.part import Part, TrainingPass, TreePass, require_products_in_8_bits
from stree.models.packing import PackedWeights
from stree.trees.token_tree import TokenTree
from stree.trees.tree_batch import TreeBatch, topology_of
from stree_kernels import naive, ops
from stree_kernels.contracts import Sampling, Scaled, Slots, Stream, Topology

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


def last_of(values: Tensor, count: Tensor) -> Tensor:
    """Return value `count` − 1 of values (1, T, D) as (1, D), or the first for count (1,) = 0."""
    return values.index_select(1, (count - 1).clamp(min=0))[:, 0]


Method = TypeVar("Method", bound=Callable[..., Any])


def on_own_gpu(method: Method) -> Method:
    """Make a model's method run with the model's GPU as the current one."""

    @functools.wraps(method)
    def run(self: HybridModel, *arguments: Any, **options: Any) -> Any:
        with ops.current(self.device):
            return method(self, *arguments, **options)

    return cast(Method, run)


def _product() -> Callable[[Tensor, Tensor], Tensor]:
    return F.linear if torch.is_grad_enabled() else ops.linear  # which has no gradient


class HybridModel(nn.Module):
    """A causal language model of the layers that a `HybridConfig` describes.

    Attributes:
        head_ids: (K,) int64 ascending, the tokens of a head over a part of the vocabulary; None
            for a head over all tokens.
        head_in_8_bits: The copy of the head that decoding reads; None without one, also if the head
            itself is held in 8 bits.
        packed_weights: Where the weights stood when they were last laid out; None if never.

    Example:
        >>> import stree, torch
        >>> sizes = dict(attn_layers=(0,), num_heads=2, num_kv_heads=1, head_dim=8)
        >>> model = stree.HybridModel(stree.HybridConfig(64, d_model=16, num_layers=1, **sizes))
        >>> model(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 64])
    """

    head_ids: Tensor | None
    lacks_embedding = False  # and shares its target's

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.model = Backbone(config)
        if config.head_rank:
            self.head_down = nn.Linear(config.d_model, config.head_rank, bias=False)
        if not config.tie_embeddings:
            width = config.head_rank or config.d_model
            self.lm_head = nn.Linear(width, config.head_size, bias=False)
        ids = torch.arange(config.head_vocab_size) if config.head_vocab_size else None
        self.register_buffer("head_ids", ids)
        self.head_in_8_bits: Scaled | None = None
        self.packed_weights: PackedWeights | None = None
        self.offload: Any = None  # the `Offload` of a model with streamed layers
        self.tokens_sha256: str | None = None  # known for a checkpoint with a manifest
        if self.device.type != "meta":
            initialise(self, config.num_layers)

    @property
    def config(self) -> HybridConfig:
        """Config of the head and the backbone; both follow another one that is set."""
        return self.model.config

    @config.setter
    def config(self, config: HybridConfig) -> None:
        self.model.config = config

    @property
    def is_in_8_bits(self) -> bool:
        """True if weights of products are held in fp8 e4m3."""
        return any(each.dtype == FLOAT8 for each in self.parameters())

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
            self.model.rotary(positions), shared=self.model.shared_blocks, embedded=beside
        )
        for index, layer in enumerate(self.model.layers):
            x = layer(x, context)
            if not bool(x.isfinite().all()):
                return f"its finite weights overflow in layer {index}"
        return None

    # The head

    @property
    def head_weight(self) -> Tensor:
        """Weight (K, R) of the head, which is the embedding when the two are tied.

        Of a head that is held in 8 bits it is a copy in the model's dtype.
        """
        if self.config.tie_embeddings:
            return self.model.embed_tokens.weight
        weight = weight_of(self.lm_head)
        return weight if isinstance(weight, Tensor) else naive.dequantised(weight, self.dtype)

    @property
    def head(self) -> Tensor | Scaled:
        """Weight (K, R) by which logits are computed."""
        if self.head_in_8_bits is not None:
            return self.head_in_8_bits
        tied = self.config.tie_embeddings
        return self.model.embed_tokens.weight if tied else weight_of(self.lm_head)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the embedding, and so of most weights."""
        return self.model.embed_tokens.weight.dtype

    @on_own_gpu
    def logits(self, hidden: Tensor, *, wide: bool = True) -> Tensor:
        """Return logits (…, V) of hidden states (…, D); −∞ for tokens outside the head.

        With `wide` they are fp32 or wider, else in the product's dtype, which is enough to choose.
        """
        logits = self.over_vocabulary(self.head_logits(hidden))
        return logits.to(naive.accumulation_dtype(logits.dtype)) if wide else logits

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Return the head's logits (…, K) of hidden states (…, D), in the product's dtype."""
        inputs, head = self.head_inputs(hidden), self.head
        if isinstance(head, Scaled):
            return (naive if torch.is_grad_enabled() else ops).linear(inputs, head)
        return _product()(inputs, head.to(hidden.dtype))

    def head_inputs(self, hidden: Tensor) -> Tensor:
        """Return the inputs (…, R) of `head_weight` for hidden states (…, D)."""
        if not self.config.head_rank:
            return hidden
        return _product()(hidden, self.head_down.weight.to(hidden.dtype))

    def draw_children(
        self, stream: Tensor | Stream, depths: Tensor, sampling: Sampling | None, places: Tensor,
        tokens: Tensor, finite: Tensor, nodes: Tensor | None, values: Tensor | None,
        slots: Slots | None = None,
    ) -> Tensor:
        """Draw children by the model's head, as `ops.draw_children`.

        stream is hidden states (B, n, D), or a stream before the final norm.
        """
        if self.config.head_rank:
            stream = ops.linear(stream, self.head_down.weight)
        where = (depths, sampling, places, tokens, finite, nodes, values, self.head_ids, slots)
        return ops.draw_children(stream, self.head, *where)

    @torch.no_grad()
    def put_head_in_8_bits(self) -> None:
        """Compute logits from now on by a copy of the head in fp8 e4m3, with one scale a token.

        The copy has half the bytes of one in bf16, and is made again by each `pack`. For a low-rank
        head it is the second product. Embeddings stay as they are, also those tied to the head, and
        a head that is held in 8 bits itself.

        Raises `UsageError` for a GPU without float8.
        """
        require_products_in_8_bits(self.device, "draft with the head as it is stored")
        if self.head_in_8_bits is None and isinstance(self.head, Scaled):
            return
        made, held = naive.in_8_bits(self.head_weight), self.head_in_8_bits
        if held is None or held.values.device != self.device:
            self.head_in_8_bits = made
        else:  # graphs hold its address
            held.values.copy_(made.values)
            held.scale.copy_(made.scale)

    def over_vocabulary(self, logits: Tensor) -> Tensor:
        """Spread the head's logits (…, K) over the vocabulary (…, V), −∞ for other tokens."""
        if self.head_ids is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -math.inf)
        return whole.index_copy_(-1, self.head_ids, logits)

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
        """Return hidden states (B, T, D) after the final norm, as `Backbone.hidden_states`."""
        return self.model.hidden_states(
            tokens, segment_ids, features=features, read=read, known=known, bounds=bounds
        )

    @on_own_gpu
    def hidden_ahead(
        self, tokens: Tensor, segment_ids: Tensor | None, read: Tensor, known: Tensor | None,
        ahead: int,
    ) -> list[Tensor]:
        """Return the passes of multi-step training, as `Backbone.hidden_ahead`."""
        return self.model.hidden_ahead(tokens, segment_ids, read, known, ahead)

    # Decoding

    @torch.inference_mode(False)  # weights laid out inside it could not be trained any more
    @torch.no_grad()
    def pack(self) -> None:
        """Lay the weights out as calls over trees read them, in place; done by `new_cache`.

        Values, shapes and memory stay. Weights that are moved afterwards (another device, a
        `load_state_dict(assign=True)`) and modules that are replaced are laid out again by the next
        call.
        """
        for each in [*self.model.layers, *self.model.shared_blocks]:
            cast(Layer | SharedTransformer, each).pack()
        parts = [module for module in self.modules() if isinstance(module, Part)]
        if isinstance(self.head, Tensor) or self.head_in_8_bits is not None:
            lay_for_products(self.head_weight, any(part.keeps_rows for part in parts))
        if self.head_in_8_bits is not None:
            self.put_head_in_8_bits()
        self.packed_weights = PackedWeights(self)

    def pack_what_moved(self) -> None:
        """Call `pack` if weights were moved, or modules replaced, since the last call."""
        if self.packed_weights is None or self.packed_weights.have_moved():
            self.pack()

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
            hidden = self.model.extend(tokens[:, part], cache, features, added)
        return self.logits(self.model.norm(hidden[:, -1]))

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
        stream = self.model.tree_stream(call)
        hidden = ops.norm(stream)
        call.enter(self.config.num_layers, stream)
        return call.end(hidden)

    @torch.no_grad()
    @on_own_gpu
    def tree_stream(self, call: TreePass, *, ends: bool = True) -> Stream:
        """Run a pass; return the stream of its nodes before the final norm.

        `draw_children` reads it. `ops.take_roots` reads it with `ends` = False, and ends the pass.
        """
        stream = self.model.tree_stream(call)
        if ends:
            call.end(stream.source)
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
            self.model.extend(cache.last_tree.on(cache.path[:, :count]), cache)
