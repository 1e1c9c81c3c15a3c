"""A decoder of the layers that its config describes: training, prefill, step, token tree, commit.

Shapes: B batch, T tokens, N tree nodes, V vocabulary, D model width; K tokens that the head is
over, R numbers that it multiplies (V and D, unless the config says otherwise). Parameters carry
MambaInLlama's names.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stree.common.errors import UsageError
from stree.models.backbone import Backbone
from stree.models.cache import HybridCache
from stree.models.chunk_pass import ChunkPass, PrefillScratch
from stree.models.config import HybridConfig
from stree.models.hidden_states import HiddenStateTap
from stree.models.initialisation import initialise
from stree.models.joint import JointPass
from stree.models.layers.attention import sample_bounds, takes_packed
from stree.models.layers.layer import Layer, SharedTransformer
from stree.models.layers.part import (
    Part,
    PrefillPass,
    TrainingPass,
    TreePass,
    has_products_in_8_bits,
    lay_for_products,
    product_dtype,
)
from stree.models.layers.rotary import rotary_angles
from stree.models.multi_step import MultiStepPass, Scanned
from stree.trees.token_tree import TokenTree
from stree.trees.tree_batch import TreeBatch, topology_of
from stree_kernels import naive, ops
from stree_kernels.contracts import Sampling, Scaled, Stream, Topology
from stree_kernels.index_plan import whole_heads

Method = TypeVar("Method", bound=Callable[..., Any])

READ_AT_ONCE = 2048  # tokens of a prompt, unless told


def read_row(
    model: Any,
    cache: Any,
    row: int,
    tokens: Tensor,
    features: HiddenStateTap | None = None,
    inputs: Tensor | None = None,
) -> Tensor:
    """`HybridModel.prefill` of tokens (T,) by one sequence of a cache, with inputs (T, D)."""
    options: dict[str, Any] = {} if features is None else {"features": features}
    if inputs is not None:
        options["inputs"] = inputs[None]
    return model.prefill(tokens[None], cache.at(row), **options)


def last_of(values: Tensor, count: Tensor) -> Tensor:
    """(1, D) of the last of the first `count` (1,) of values (1, T, D); of the first for none."""
    return values.index_select(1, (count - 1).clamp(min=0))[:, 0]


def on_own_gpu(method: Method) -> Method:
    """A model's method, with the model's GPU as the current one."""

    @functools.wraps(method)
    def run(self: HybridModel, *arguments: Any, **options: Any) -> Any:
        with ops.current(self.device):
            return method(self, *arguments, **options)

    return cast(Method, run)


def _product() -> Callable[[Tensor, Tensor], Tensor]:
    return F.linear if torch.is_grad_enabled() else ops.linear  # which has no gradient


class HybridModel(nn.Module):
    """A causal language model of the layers that a `HybridConfig` describes.

    head_ids (K,) int64 ascending, the tokens of a head over some of the vocabulary; None with all.
    """

    head_ids: Tensor | None

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        self.tokenizer_fingerprint: str | None = None  # known for a checkpoint with a manifest
        self.model = Backbone(config)
        if config.head_rank:
            self.head_down = nn.Linear(config.d_model, config.head_rank, bias=False)
        if not config.tie_embeddings:
            width = config.head_rank or config.d_model
            self.lm_head = nn.Linear(width, config.head_size, bias=False)
        ids = torch.arange(config.head_vocab_size) if config.head_vocab_size else None
        self.register_buffer("head_ids", ids)
        self.head_in_8_bits: Scaled | None = None  # what decoding multiplies by instead, if any
        self._read: list[nn.Linear] = []  # what is packed, and where it lay when it was
        self._packed_at: list[int] | None = None
        self._module_dicts: list[dict[str, Any]] = []  # all that have any, and all with weights
        self._weight_dicts: list[dict[str, Any]] = []
        if self.device.type != "meta":
            initialise(self, config.num_layers)

    @property
    def head_weight(self) -> Tensor:
        """(K, R), the embedding itself when tied."""
        tied = self.config.tie_embeddings
        return self.model.embed_tokens.weight if tied else self.lm_head.weight

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed_tokens.weight.dtype

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    @torch.no_grad()
    @on_own_gpu
    def first_non_finite(self, tokens: Sequence[int]) -> str | None:
        """Says where a NaN or an infinity first appears: in a weight, or after a layer.

        tokens, a sequence to run through the model. None when everything is finite.
        """
        for name, parameter in self.named_parameters():
            if not bool(parameter.isfinite().all()):
                return f"its weights are not finite in {name}"
        row = torch.tensor([list(tokens)], device=self.device)
        positions = torch.arange(row.shape[1], device=self.device)[None]
        x = self.model.embed_tokens(row)
        context = TrainingPass(self._rotary(positions), shared=self.model.shared_blocks, embedded=x)
        for index, layer in enumerate(self.model.layers):
            x = layer(x, context)
            if not bool(x.isfinite().all()):
                return f"its finite weights overflow in layer {index}"
        return None

    # Training

    def forward(self, tokens: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of whole sequences, tokens (B, T); see `hidden_states`."""
        return self.logits(self.hidden_states(tokens, segment_ids))

    @on_own_gpu
    def hidden_states(
        self,
        tokens: Tensor,
        segment_ids: Tensor | None = None,
        *,
        features: HiddenStateTap | None = None,
        read: Tensor | None = None,
        known: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (B, T, D) after the final norm.

        segment_ids (B, T), non-decreasing along T: samples packed into one row see nothing of
        each other (attention, conv and state start anew) and positions restart. features takes
        what a drafter reads; read (B, T, F), what a drafter has of its target at the same tokens,
        of which each token sees that of the one before, where known (B, T) says so (None: all).
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        mask = bounds = None
        if segment_ids is not None:
            starts = torch.ones_like(segment_ids, dtype=torch.bool)
            starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
            positions = positions - torch.where(starts, positions, 0).cummax(1).values
            if self.config.attn_layers and self._attends_packed():
                bounds = sample_bounds(starts)
            elif self.config.attn_layers:
                same = segment_ids[:, :, None] == segment_ids[:, None, :]
                mask = same.tril()[:, None]
        x = self.model.embed_tokens(tokens)
        if read is not None:
            x = x + self.model.features(read, segment_ids, known)
        context = TrainingPass(
            self._rotary(positions), segment_ids, mask,
            shared=self.model.shared_blocks, embedded=x, bounds=bounds,
        )  # fmt: skip
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
        self,
        tokens: Tensor,
        segment_ids: Tensor | None,
        read: Tensor,
        known: Tensor | None,
        ahead: int,
    ) -> list[Tensor]:
        """What `hidden_states` gives, and of each token as the first, second, … to the `ahead`-th
        of a draft that begins so many tokens before (`stree.models.multi_step`): (B, T, D) each."""
        reader = self.model.features
        hidden: list[Tensor] = []
        embedded = self.model.embed_tokens(tokens)
        scanned: dict[int, list[Scanned]] = {}
        for depth in range(1 + ahead):
            if depth:
                x = embedded + reader.of_drafts(hidden[-1].roll(1, dims=1))
            else:
                x = embedded + reader(read, segment_ids, known)
            context = MultiStepPass(segment_ids=segment_ids, scanned=scanned)
            for layer in cast(list[Layer], self.model.layers):
                x = layer.forward(x, context)
            hidden.append(self.model.norm(x))
        return hidden

    @on_own_gpu
    def logits(self, hidden: Tensor, *, wide: bool = True) -> Tensor:
        """(…, V) in fp32 or wider; else as multiplied, which is enough to choose by. −∞ for tokens
        that the head is not over."""
        logits = self.over_vocabulary(self.head_logits(hidden))
        return logits.to(naive.accumulation_dtype(logits.dtype)) if wide else logits

    def head_logits(self, hidden: Tensor) -> Tensor:
        """(…, K), as multiplied."""
        inputs = self.head_inputs(hidden)
        if self.head_in_8_bits is not None:
            return ops.linear(inputs, self.head_in_8_bits)
        return _product()(inputs, self.head_weight.to(hidden.dtype))

    def head_inputs(self, hidden: Tensor) -> Tensor:
        """(…, R), what `head_weight` multiplies, of hidden states (…, D)."""
        if not self.config.head_rank:
            return hidden
        return _product()(hidden, self.head_down.weight.to(hidden.dtype))

    def draw_children(
        self,
        stream: Tensor | Stream,
        depths: Tensor,
        sampling: Sampling | None,
        places: Tensor,
        tokens: Tensor,
        finite: Tensor,
        nodes: Tensor | None,
        values: Tensor | None,
    ) -> Tensor:
        """`ops.draw_children` by the model's head: logits (B, n, K) after hidden states (B, n, D),
        or of a stream ahead of the final norm."""
        if self.config.head_rank:
            stream = ops.linear(stream, self.head_down.weight)
        head = self.head_weight if self.head_in_8_bits is None else self.head_in_8_bits
        return ops.draw_children(
            stream, head, depths, sampling, places, tokens, finite, nodes, values, self.head_ids
        )

    @torch.no_grad()
    def take_head(self, whole: Tensor | None, ids: Tensor | None) -> None:
        """Let the head be over the tokens ids (K,), ascending (None: as it is), with what it can
        hold of a whole head (V, D): those rows, or of a low rank their best approximation, on the
        principal directions. Without one, the weights stay."""
        if ids is not None:
            assert self.head_ids is not None
            self.head_ids.copy_(ids)
        if whole is None:
            return
        rows = whole if self.head_ids is None else whole[self.head_ids.to(whole.device)]
        if rank := self.config.head_rank:
            wide = rows.double()
            directions = torch.linalg.eigh(wide.T @ wide).eigenvectors[:, -rank:]  # (D, R)
            self.head_down.weight.copy_(directions.T)
            rows = wide @ directions
        self.lm_head.weight.copy_(rows)

    @torch.no_grad()
    def put_head_in_8_bits(self) -> None:
        """From now on let logits come of a copy of the head in fp8 e4m3, with a scale a token: half
        the bytes of one in bf16 to read. It is made again by each `pack`. Of a low-rank head it is
        the product up; embeddings stay as they are, also those that the head is tied to.

        Raises `UsageError` for a GPU without such numbers.
        """
        if not has_products_in_8_bits(self.device):
            raise UsageError(
                "a head in float8 needs a GPU of compute capability 8.9 or more, "
                f"{torch.cuda.get_device_name(self.device)} is older: draft with the head as it is "
                "stored"
            )
        made, held = naive.in_8_bits(self.head_weight), self.head_in_8_bits
        if held is None or held.values.device != self.device:
            self.head_in_8_bits = made
        else:  # graphs know where it lies
            held.values.copy_(made.values)
            held.scale.copy_(made.scale)

    def over_vocabulary(self, logits: Tensor) -> Tensor:
        """Those of the head (…, K) as (…, V), −∞ for all other tokens."""
        if self.head_ids is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -math.inf)
        return whole.index_copy_(-1, self.head_ids, logits)

    # Decoding

    @torch.inference_mode(False)  # what a step in it laid out could not be trained any more
    @torch.no_grad()
    def pack(self) -> None:
        """Lay the weights out as calls over trees read them, in place; done by `new_cache`.

        Values, shapes and memory stay. Weights that are moved afterwards (another device, a
        `load_state_dict(assign=True)`) are laid out again by the next call. Where a projection is
        replaced by another module, call this.
        """
        for each in [*self.model.layers, *self.model.shared_blocks]:
            cast(Layer | SharedTransformer, each).pack()
        parts = [module for module in self.modules() if isinstance(module, Part)]
        lay_for_products(self.head_weight, any(part.keeps_rows for part in parts))
        if self.head_in_8_bits is not None:
            self.put_head_in_8_bits()
        self._read = [
            projection for part in parts for product in part.products() for projection in product
        ]
        self._packed_at = self._packed_addresses()
        modules = list(self.modules())
        self._module_dicts = [each._modules for each in modules if each._modules]
        self._weight_dicts = [each._parameters for each in modules if each._parameters]

    def pack_what_moved(self) -> None:
        """`pack`, where weights were moved since."""
        if self._packed_addresses() != self._packed_at:
            self.pack()

    def addresses(self) -> list[int]:
        """Where all weights lie, and all modules, of those that there were at the last `pack`."""
        modules, weights = (
            chain.from_iterable(map(dict.values, each))
            for each in (self._module_dicts, self._weight_dicts)
        )
        there = [each for each in weights if each is not None]
        return [*map(id, modules), *map(Tensor.data_ptr, there)]

    def versions(self) -> list[int]:
        """Return how often each weight was written in place, of those of `addresses`.

        A tensor of `torch.inference_mode` counts no writes, and neither does what writes through
        `.data`: such changes are not seen.
        """
        weights = chain.from_iterable(map(dict.values, self._weight_dicts))
        there = [each for each in weights if each is not None]
        return [0 if each.is_inference() else each._version for each in there]

    def _packed_addresses(self) -> list[int]:
        """Where the weights lie that are packed."""
        return [
            each.data_ptr()
            for projection in self._read for each in projection._parameters.values()
            if each is not None
        ]  # fmt: skip

    def new_cache(
        self, max_length: int, max_nodes: int, batch: int = 1, backtracking: str = "replay"
    ) -> HybridCache:
        """Static buffers for `batch` sequences of max_length tokens and trees of max_nodes."""
        self.pack()
        return HybridCache(
            self.config, max_length, max_nodes,
            batch=batch, device=self.device, dtype=self.dtype, backtracking=backtracking,
        )  # fmt: skip

    @torch.no_grad()
    @on_own_gpu
    def prefill(
        self,
        tokens: Tensor,
        cache: HybridCache,
        chunk: int = READ_AT_ONCE,
        *,
        features: HiddenStateTap | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Commit whole sequences, tokens (B, T), to the cache, in chunks of `chunk` tokens.

        features takes what a drafter reads of them; inputs (B, T, D), what is added to the
        embeddings. Returns the logits (B, V) after the last token.
        """
        if tokens.shape[1] == 0:
            raise UsageError("the prompt is empty; give at least one token")
        cache.reserve(tokens.shape[1])
        self.apply_path(cache)
        for start in range(0, tokens.shape[1], chunk):
            piece = slice(start, start + chunk)
            added = None if inputs is None else inputs[:, piece]
            hidden = self._extend(tokens[:, piece], cache, features, added)
        return self.logits(self.model.norm(hidden[:, -1]))

    def _extend(
        self,
        tokens: Tensor,
        cache: HybridCache,
        features: HiddenStateTap | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        start, num_tokens = cache.num_committed, tokens.shape[1]
        bound = start + num_tokens
        mask = None
        if start and self.config.attn_layers:
            mask = torch.ones(num_tokens, bound, dtype=torch.bool, device=tokens.device)
            mask = mask.tril(start)[None, None]
        positions = torch.arange(start, bound, device=tokens.device).expand_as(tokens)
        x, y = self.model.embed_tokens(tokens), None
        if inputs is not None:
            x = x + inputs
        context = PrefillPass(
            self._rotary(positions), mask=mask, shared=self.model.shared_blocks, embedded=x,
            caches=cache.layers, start=start, features=features,
        )  # fmt: skip
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
        self,
        tokens: Tensor,
        count: Tensor,
        row: Tensor,
        cache: HybridCache,
        scratch: PrefillScratch,
        bound: int,
        *,
        features: HiddenStateTap | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """`prefill` of the first of tokens (1, T), for graphs: only the device knows how many they
        are, count (1,), and which of a cache's sequences reads them, row (1,).

        Nothing of its last tree may be pending. room, for pieces of T tokens; bound, slots to look
        at, at least as many as it has with all T. Returns the last token's hidden state (1, D);
        features has padding, too.
        """
        self.pack_what_moved()
        call = ChunkPass.of(
            tokens, count, row, cache, scratch, bound, inputs,
            embedding=self.model.embed_tokens.weight, shared=self.model.shared_blocks,
            features=features,
        )  # fmt: skip
        return last_of(self.tree_hidden(call), count)

    @torch.no_grad()
    def tree_forward(
        self,
        tokens: Tensor,
        tree: TokenTree,
        cache: HybridCache,
        bound: int | None = None,
        *,
        wide: bool = True,
    ) -> Tensor:
        """Logits of every node of a tree, in one call, after replaying the last accepted path.

        Args: tokens (B, N), the root first; bound, cache slots to read, at least the committed
        ones and N (default: just these); wide, as in `logits`. Returns (B, N, V).
        A single node is an ordinary step.
        """
        if tokens.shape[1] != tree.num_nodes:
            raise UsageError(f"{tokens.shape[1]} tokens for the {tree.num_nodes} nodes of {tree}")
        topology = topology_of(tree, self.config.d_conv, tokens.device)
        call = self.tree_call(tokens, topology, cache, bound=bound)
        return self.logits(self.tree_hidden(call), wide=wide)

    @torch.no_grad()
    @on_own_gpu
    def tree_batch_forward(
        self,
        tokens: Tensor,
        tree_batch: TreeBatch,
        cache: HybridCache,
        bound: int,
        features: HiddenStateTap | None = None,
    ) -> Tensor:
        """`tree_forward` of a tree a sequence: logits (B, N, V) of tokens (B, N), as multiplied.
        features takes what a drafter reads of the nodes."""
        topology = tree_batch.topology(self.config.d_conv)
        call = self.tree_call(tokens, topology, cache, bound=bound, features=features)
        return self.logits(self.tree_hidden(call), wide=False)

    @torch.no_grad()
    @on_own_gpu
    def tree_call(
        self,
        tokens: Tensor,
        topology: Topology,
        cache: HybridCache,
        first: int = 0,
        bound: int | None = None,
        nodes: Tensor | None = None,
        *,
        inputs: Tensor | None = None,
        features: HiddenStateTap | None = None,
    ) -> TreePass:
        """A call over nodes first … first + Q − 1 of trees, for `tree_hidden` or `tree_stream`.

        With first = 0 new trees begin, after the last ones' accepted paths; else the trees of
        the calls before grow. tokens (B, Q), or (B, N) of which the new nodes have those at
        nodes (B, Q), −1 for none; each sequence has the tree of `topology` that `cache.variant`
        names; bound as in `tree_forward`; inputs (B, Q, D) are added to the embeddings, and
        features takes what a drafter reads of the nodes.
        """
        self.pack_what_moved()
        used = cache.num_committed + first + (tokens if nodes is None else nodes).shape[-1]
        model: dict[str, Any] = dict(
            embedding=self.model.embed_tokens.weight, shared=self.model.shared_blocks,
            inputs=inputs, features=features,
        )  # fmt: skip
        if cache.last_tree is not None:
            return JointPass.of(tokens, topology, cache, bound or used, **model)
        return TreePass(
            topology, cache.cache_state, first, bound or used, cache.layers,
            tokens=tokens, nodes=nodes, **model,
        )  # fmt: skip

    @torch.no_grad()
    @on_own_gpu
    def tree_hidden(self, call: TreePass) -> Tensor:
        """Hidden states (B, Q, D) after the final norm of a call's nodes."""
        stream = self._run_tree(call)
        hidden = ops.norm(stream)
        call.enter(self.config.num_layers, stream)
        return call.end(hidden)

    @torch.no_grad()
    @on_own_gpu
    def tree_stream(self, call: TreePass, *, ends: bool = True) -> Stream:
        """The same, with replay, as a stream ahead of the final norm, for `draw_children`; or for
        `ops.take_roots`, which ends the call itself."""
        stream = self._run_tree(call)
        if ends:
            call.end(stream.source)
        return stream

    def _run_tree(self, call: TreePass) -> Stream:
        x, y = None, None
        for layer in cast(list[Layer], self.model.layers):
            x, y = layer.run(x, y, call)
        return call.add_norm(x, y, self.model.norm)[0]

    @torch.no_grad()
    @on_own_gpu
    def apply_path(self, cache: HybridCache) -> None:
        """Bring the accepted path that is pending, if any, into states, tails and keys."""
        if cache.last_tree is not None:
            return self._read_path(cache)
        mixers = dict(self.model.mixers())
        for slot, layer_cache in enumerate(cache.layers):
            layer_cache.apply_path(mixers.get(slot), cache.cache_state)
        cache.length += cache.path_length
        cache.path_length.zero_()

    def _read_path(self, cache: HybridCache) -> None:
        """`apply_path` where nothing of the last tree is kept but its tokens; of several sequences,
        the paths must be equally long."""
        assert cache.last_tree is not None
        count = int(cache.path_length.max())
        if count:
            assert bool((cache.path_length == count).all())
            cache.path_length.zero_()
            cache.num_committed -= count
            self._extend(cache.last_tree.on(cache.path[:, :count]), cache)

    def _rotary(self, positions: Tensor) -> Tensor | None:
        """(2, B, T, 1, D) for positions (B, T), see `whole_heads`; None without attention."""
        if not self.config.attn_layers:
            return None
        dtype = naive.accumulation_dtype(self.dtype)
        return whole_heads(rotary_angles(self.config, positions, dtype)[..., None, :])
