"""Base of all parts of a layer: packed projections, and the three passes over a model.

Shapes: B batch, T tokens, N tree nodes, Q of them in one call, D model width.

`Layer.run` says in one place how blocks read the residual stream and add to it. A pass says how the
stream is added up, normed and given to a part: over whole sequences (`TrainingPass`), over a chunk
that continues a cache (`PrefillPass`), or over nodes of token trees (`TreePass`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stree.common.errors import UsageError
from stree.models.layer_caches import LayerCache
from stree.models.layers.norm import RMSNorm
from stree.models.layers.packed_linear import PackedLinear, weight_of
from stree_kernels import ops
from stree_kernels.contracts import Added, CacheState, Gated, Stream, Topology
from stree_kernels.mamba.chunk_scan import chunk_scan

if TYPE_CHECKING:
    from stree.models.hidden_states import HiddenStateTap, NormedEmbeddings


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of products of x: autocast's if it is on, else that of x."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def has_products_in_8_bits(device: torch.device) -> bool:
    """Return False for GPUs below compute capability 8.9, which have no products in float8."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def require_products_in_8_bits(device: torch.device, instead: str) -> None:
    """Raise `UsageError` for a GPU without products in float8, saying what to do instead."""
    if not has_products_in_8_bits(device):
        raise UsageError(
            "weights in float8 need a GPU of compute capability 8.9 or more, "
            f"{torch.cuda.get_device_name(device)} is older: {instead}"
        )


# Passes


@dataclass
class TrainingPass:
    """Values that all layers share in one pass over whole sequences; streams are (B, T, D).

    Attributes:
        rotary: (2, B, T, 1, P), see `whole_heads`; None without attention.
        segment_ids: (B, T), numbers of the samples packed into rows; None for one sample a row.
        mask: (B, 1, T, L) bool; None is causal.
        shared: Transformer blocks of several layers.
        embedded: The embeddings, for shared blocks.
        bounds: Bounds of packed samples (`sample_bounds`); attention reads them without a mask.
    """

    rotary: Tensor | None = None
    segment_ids: Tensor | None = None
    mask: Tensor | None = None
    shared: Sequence[nn.Module] = ()
    embedded: Tensor | None = None
    bounds: Tensor | None = None

    def total(self, y: Tensor) -> Tensor:
        """Return a part's output as one tensor."""
        return y

    def add(self, x: Tensor | None, y: Tensor | None) -> Tensor:
        """Return the stream x + y, where y is the output still to be added."""
        assert x is not None
        return x if y is None else x + self.total(y)

    def add_norm(
        self, x: Tensor | None, y: Tensor | None, norm: RMSNorm | None, beside: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return x + y and its norm, or with `beside` the norm of [x + y, beside].

        Without a norm, return x + y twice.
        """
        x = self.add(x, y)
        if norm is None:
            return x, x
        return x, norm(x if beside is None else torch.cat([x, beside], dim=-1))

    def beside_embeddings(self, x: Any, normed: Any, replaced: bool) -> tuple[Any, Any]:
        """Return the stream x and [embeddings, its norm], as an EAGLE head's attention reads it.

        With `replaced` the norm is the stream.
        """
        assert self.embedded is not None
        return normed if replaced else x, torch.cat([self.embedded, normed], dim=-1)

    def norm_after(self, y: Tensor, norm: RMSNorm) -> Tensor:
        """Return the norm of parts' outputs, to be added to the stream."""
        return norm(self.total(y))

    def run(self, part: nn.Module, x: Tensor, cache_index: int | None, *adapters: Any) -> Tensor:
        """Return a part's output for its normed input; cache_index is that of its cache."""
        return part(x, self, *adapters)

    def project(self, projection: nn.Linear, x: Tensor) -> Tensor:
        return projection(x)

    def together(self, outputs: list[Tensor]) -> Tensor:
        """Return the sum of the outputs of parts that run side by side."""
        first, *others = outputs
        return sum(others, start=first)

    def enter(self, layer: int, x: Tensor) -> None:
        """Note the stream before each layer, for a tap on hidden states."""


@dataclass
class PrefillPass(TrainingPass):
    """A pass over the next tokens of sequences whose earlier tokens are in caches."""

    caches: Sequence[Any] = ()
    start: int = 0  # committed tokens
    features: HiddenStateTap | None = None

    def enter(self, layer: int, x: Tensor) -> None:
        if self.features is not None:
            self.features.take(layer - 1, x)

    def scan(
        self, mixer: Any, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, state: Tensor
    ) -> Tensor:
        """Scan a Mamba-2 mixer's tokens on from a state (B, H, P, S), and advance it.

        Takes the arguments of `chunk_scan`, and returns its result y (B, T, H, P).
        """
        y, after = chunk_scan(
            x, dt, mixer.A, B, C, mixer.D, chunk_size=mixer.chunk_size, initial_state=state
        )
        state.copy_(after)
        return y

    def last_inputs(self, seen: Tensor, count: int) -> Tensor:
        """Return the last `count` inputs (B, count, C) of a conv, given seen (B, count + T, C)."""
        return seen[:, -count:]

    def run(self, part: nn.Module, x: Tensor, cache_index: int | None, *adapters: Any) -> Tensor:
        if cache_index is None:
            return part(x, self, *adapters)
        return part.extend(x, self.caches[cache_index], self, *adapters)  # type: ignore[operator]


class Nodes(NamedTuple):
    """Nodes that one call of a mixer's ops is over; the fields are `TreePass`'s."""

    topology: Topology
    cache_state: CacheState
    num_read: int
    bound: int


@dataclass
class TreePass:
    """Values that all layers share in one call over tree nodes; streams are (B, Q, D).

    Outputs that are still to be added to a stream come as `Added`, parts of sums (S, B, Q, D): the
    product that reads the stream adds them up and norms them in its own launch. Adding them here
    would be a launch more for each block.

    Attributes:
        topology: The trees.
        cache_state: Where caches stand, and which accepted paths are pending.
        num_read: Number of the tree's nodes that earlier calls have read.
        bound: Cache slots to attend to.
        caches: One a mixer.
        embedding: (V, D).
        tokens: (B, Q), or (B, N) of which `nodes` are new.
        nodes: (B, Q) indices of the new nodes, −1 for none; None for `num_read` and the next ones.
        shared: Transformer blocks of several layers.
        inputs: (B, Q, D), added to the embeddings; None adds nothing.
        features: Takes hidden states for a drafter.
        embedded: Embeddings of the nodes, for shared blocks.
    """

    READY: ClassVar[str] = "memory"  # a mixer's first launch comes after a product

    topology: Topology
    cache_state: CacheState
    num_read: int
    bound: int
    caches: Sequence[Any]
    embedding: Tensor
    tokens: Tensor
    nodes: Tensor | None
    shared: Sequence[nn.Module] = ()
    inputs: Tensor | None = None
    features: HiddenStateTap | None = None
    embedded: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.cache_state = self.cache_state.of_a_call(self.READY)
        if self.shared:
            self.embedded = self._embed()

    def _embed(self) -> Tensor:
        tokens = self.tokens
        if self.nodes is not None:
            tokens = tokens.gather(1, self.nodes.clamp(min=0))
        embedded = F.embedding(tokens, self.embedding)
        return embedded if self.inputs is None else embedded + self.inputs

    def begin(self, head: NormedEmbeddings) -> Tensor:
        """Return the stream (B, Q, D) before the first layer of an MTP or EAGLE head."""
        norm, written = head.embedding_norm, self.topology.written
        embedded = Stream(
            self.embedding, norm.weight, norm.eps, None, self.tokens, self.nodes, written
        )
        x, self.embedded = head.of_stream(embedded, self.inputs)
        return x

    def enter(self, layer: int, x: Tensor | Stream) -> None:
        """Note the stream before each layer, for a tap on hidden states."""
        if self.features is not None:
            self.features.take(layer - 1, rows_of(x))

    def total(self, y: Tensor) -> Tensor:
        return y[0] if len(y) == 1 else y.sum(0).to(self.embedding.dtype)

    def add_norm(
        self, x: Tensor | Stream | None, y: Added, norm: RMSNorm | None,
        beside: Tensor | None = None,
    ) -> tuple[Stream, Stream]:
        """Return x + y and its norm as a `Stream`, which the part that reads it adds up and norms.

        x is None before the first block: the stream begins with the embeddings. Without a norm,
        x + y is added up at once.
        """
        if norm is None:
            stream = Stream(self._added_up(x, y))
            stream.normed = stream.source
            return stream, stream
        x, scale = self.embedded if x is None else rows_of(x), (norm.weight, norm.eps)
        if x is None:
            added = None if self.inputs is None else self.inputs[None]
            written = self.topology.written
            stream = Stream(self.embedding, *scale, added, self.tokens, self.nodes, written)
        else:
            stream = Stream(x, *scale, y, beside=beside)
        return stream, stream

    def beside_embeddings(
        self, x: Stream, normed: Stream, replaced: bool
    ) -> tuple[Stream, Stream]:
        assert self.embedded is not None
        rows = ops.norm(normed)
        wide = Stream(rows)
        wide.normed = torch.cat([self.embedded, rows], dim=-1)
        return Stream(rows) if replaced else x, wide

    def _added_up(self, x: Tensor | Stream | None, y: Added) -> Tensor:
        if x is not None:
            total = rows_of(x)
        else:
            total = self._embed() if self.embedded is None else self.embedded
        return total if y is None else total + self.total(_parts(y))

    def norm_after(self, y: Added, norm: RMSNorm) -> Added:
        """Return the norm of parts' outputs as (1, B, Q, D), to be added to the stream."""
        total = self.total(_parts(y))
        return ops.add_rms_norm(total, None, norm.weight, norm.eps)[1][None]

    def run(self, part: Any, x: Stream, cache_index: int | None, *adapters: Any) -> Tensor:
        cache = None if cache_index is None else self.caches[cache_index]
        return part.tree(x, cache, self, *adapters)

    def over_nodes(
        self, mixer: Mixer, projected: Tensor, cache: Any, out: Tensor | None = None
    ) -> Tensor:
        """Return a mixer's output (B, Q, …) at the nodes, written to `out` if given."""
        nodes = Nodes(self.topology, self.cache_state, self.num_read, self.bound)
        return mixer.over_nodes(projected, cache, nodes, out)

    def after_a_mixer(self) -> TreePass:
        """Return a copy of the pass for the next of several mixers side by side.

        The kernel launched just before it is a mixer, not the input projection, so all of its
        inputs are ready.
        """
        later = copy.copy(self)
        later.cache_state = replace(self.cache_state, ready="all")
        return later

    def end(self, hidden: Tensor) -> Tensor:
        """End the call after all layers; return the hidden states (B, Q, D) of its nodes."""
        if self.num_read == 0:
            ops.advance(self.cache_state, hidden)
        return hidden

    def project(self, projection: nn.Linear, x: Tensor) -> Tensor:
        return ops.linear_parts(x, weight_of(projection))

    def together(self, outputs: list[Tensor]) -> Added:
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


Pass = TrainingPass | TreePass


def _parts(y: Added) -> Tensor:
    """Return the parts (S, B, Q, D) of one sum or of several."""
    assert y is not None
    return torch.cat(y) if isinstance(y, tuple) else y


def rows_of(x: Tensor | Stream) -> Tensor:
    """Return the rows (B, Q, D) of a stream that a part has read, and so added up."""
    if isinstance(x, Tensor):
        return x
    assert x.is_sum
    return x.source


# Parts


class Part(nn.Module):
    """A mixer or an MLP of a layer.

    `forward(x, context)` runs over whole sequences, `tree(x, cache, call)` over tree nodes.

    Attributes:
        packed: Weights that `tree` reads, one for each of `products`, since the last `pack`.
        keeps_rows: Whether weights stay stored output by output, because other code shares them.
    """

    packed: tuple[PackedLinear, ...] = ()
    keeps_rows = False

    def products(self) -> list[tuple[nn.Linear, ...]]:
        """Return the projections; those of one input stand together as one product of a call."""
        return []

    def in_8_bits(self) -> list[nn.Linear]:
        """Return the projections that `put_in_8_bits` takes."""
        return [each for together in self.products() for each in together]

    def pack(self) -> None:
        """Lay the weights out as calls over trees read them; values and shapes stay."""
        products = self.products()
        before = self.packed or (None,) * len(products)
        self.packed = tuple(
            PackedLinear(together, was, self.keeps_rows)
            for together, was in zip(products, before, strict=True)
        )
        self.pack_own()

    def pack_own(self) -> None:
        """Lay out weights that belong to no product."""


class Mixer(Part):
    """A part with a cache, which `extend(x, cache, context)` continues by more tokens.

    Over trees the first of its products reads the input (`project`), and the last gives the output.
    Between the two, `advance` runs the conv and replays the accepted path, and `mix` runs the rest:
    `inner_products`, and the scan or attention. Where no product comes between, one op does both in
    `mix`, since its scan reads what its conv has written. A gate or norm for all nodes is last.

    Attributes:
        cache_class: Class of its caches.
        gates_after: Whether `gate` follows `mix`.
    """

    cache_class: ClassVar[type[LayerCache]]
    gates_after = False

    def inner_products(self) -> list[nn.Linear]:
        """Return projections that `mix` applies."""
        return []

    def tree(self, x: Stream, cache: Any, call: TreePass) -> Tensor:
        return self.packed[-1].parts(self.between(self.project(x), cache, call))

    def project(self, x: Stream) -> Tensor:
        """Return the product (B, Q, …) of the input."""
        return self.packed[0].linear(x)

    def between(
        self, projected: Tensor, cache: Any, call: TreePass, out: Tensor | None = None
    ) -> Tensor | Gated:
        """Return the nodes (B, Q, C) between the two products, written to `out` if given.

        Without `out` the tensor is new, and may lack its gate and norm (`Gated`).
        """
        if not self.gates_after:
            return call.over_nodes(self, projected, cache, out)
        return self.gate(call.over_nodes(self, projected, cache), projected, out)

    def over_nodes(
        self, projected: Tensor, cache: Any, nodes: Nodes, out: Tensor | None
    ) -> Tensor:
        """Return the mixed nodes (B, Q, …) of one call of the ops, written to `out` if given."""
        return self.mix(self.advance(projected, cache, nodes), cache, nodes, out)

    def advance(self, projected: Tensor, cache: Any, nodes: Nodes) -> Any:
        """Run the conv, and replay the accepted path; return what `mix` reads."""
        return projected

    def mix(self, advanced: Any, cache: Any, nodes: Nodes, out: Tensor | None) -> Tensor:
        """Return the scan's or attention's output (B, Q, …), written to `out` if given."""
        raise NotImplementedError

    def gate(self, y: Tensor, projected: Tensor, out: Tensor | None) -> Tensor | Gated:
        """Gate and norm the output of `mix`, if `gates_after`."""
        raise NotImplementedError


def put(y: Tensor, out: Tensor | None) -> Tensor:
    """Return y, copied to `out` if it is given."""
    return y if out is None else out.copy_(y)
