"""What all parts of a layer have in common: norms, packed projections, and the three ways to run.

Shapes: B batch, T tokens, N tree nodes, Q of them in one call, D model width.

A layer says in one place how its blocks hang on the residual stream (`Layer.run`); how a stream is
added to, normed and given to a part is up to the pass: over whole sequences (`TrainingPass`), over
a piece that goes on from a cache (`PrefillPass`), or over nodes of token trees (`TreePass`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stree.models.layers.norm import RMSNorm
from stree_kernels import ops
from stree_kernels.contracts import Added, CacheState, Gated, Stream, Topology

if TYPE_CHECKING:
    from stree.models.hidden_states import HiddenStateTap


def product_dtype(x: Tensor) -> torch.dtype:
    """In which products of x run: autocast's where it is on, else that of x."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def has_products_in_8_bits(device: torch.device) -> bool:
    """All but GPUs from before compute capability 8.9."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


# Passes


@dataclass
class TrainingPass:
    """One pass over whole sequences: what its layers share. Streams are (B, T, D)."""

    rotary: Tensor | None = None  # (2, B, T, 1, P), see `whole_heads`
    segment_ids: Tensor | None = None  # (B, T)
    mask: Tensor | None = None  # (B, 1, T, L) bool; None is causal
    shared: Sequence[nn.Module] = ()  # transformer blocks of several layers
    embedded: Tensor | None = None  # the embeddings, for shared blocks
    bounds: Tensor | None = None  # in place of a mask of packed samples, see `packed_attention`

    def total(self, y: Tensor) -> Tensor:
        """What a part gave, as one tensor."""
        return y

    def add(self, x: Tensor | None, y: Tensor | None) -> Tensor:
        """The stream x with what is still to be added to it."""
        assert x is not None
        return x if y is None else x + self.total(y)

    def add_norm(
        self, x: Tensor | None, y: Tensor | None, norm: RMSNorm, beside: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x + y, and its norm, or that of it and what is beside it, next to each other."""
        x = self.add(x, y)
        return x, norm(x if beside is None else torch.cat([x, beside], dim=-1))

    def run(self, part: nn.Module, x: Tensor, slot: int | None, *adapters: Any) -> Tensor:
        """What a part gives for its normed input; slot, the place of its cache."""
        return part(x, self, *adapters)

    def project(self, projection: nn.Linear, x: Tensor) -> Tensor:
        return projection(x)

    def together(self, outputs: list[Tensor]) -> Tensor:
        """What parts side by side give together."""
        first, *others = outputs
        return sum(others, start=first)

    def enter(self, layer: int, x: Tensor) -> None:
        """Told of the stream ahead of each layer."""


@dataclass
class PrefillPass(TrainingPass):
    """The same over the next tokens of sequences that caches remember."""

    caches: Sequence[Any] = ()
    start: int = 0  # committed tokens
    features: HiddenStateTap | None = None

    def enter(self, layer: int, x: Tensor) -> None:
        if self.features is not None:
            self.features.take(layer - 1, x)

    def run(self, part: nn.Module, x: Tensor, slot: int | None, *adapters: Any) -> Tensor:
        if slot is None:
            return part(x, self, *adapters)
        return part.extend(x, self.caches[slot], self, *adapters)  # type: ignore[operator]


@dataclass
class TreePass:
    """One call over tree nodes: what its layers share. Streams are (B, Q, D); what is to be added
    to one comes as `Added`, with parts of sums (S, B, Q, D)."""

    READY: ClassVar[str] = "memory"  # a mixer's first launch comes after a product

    topology: Topology
    cache_state: CacheState
    first: int  # the tree's nodes that earlier calls have seen
    bound: int  # cache slots to look at
    caches: Sequence[Any]
    embedding: Tensor  # (V, D)
    tokens: Tensor  # (B, Q), or (B, N) of which `nodes` are new
    nodes: Tensor | None  # (B, Q), −1 for none
    shared: Sequence[nn.Module] = ()
    inputs: Tensor | None = None  # (B, Q, D), what is added to the embeddings
    features: HiddenStateTap | None = None
    embedded: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.cache_state = self.cache_state.of_a_call(self.READY)
        if self.shared:
            tokens = self.tokens
            if self.nodes is not None:
                tokens = tokens.gather(1, self.nodes.clamp(min=0))
            self.embedded = F.embedding(tokens, self.embedding)
            if self.inputs is not None:
                self.embedded = self.embedded + self.inputs

    def enter(self, layer: int, x: Tensor | Stream) -> None:
        """Told of the stream ahead of each layer."""
        if self.features is not None:
            self.features.take(layer - 1, rows_of(x))

    def total(self, y: Tensor) -> Tensor:
        return y[0] if len(y) == 1 else y.sum(0).to(self.embedding.dtype)

    def add_norm(
        self, x: Tensor | Stream | None, y: Added, norm: RMSNorm, beside: Tensor | None = None
    ) -> tuple[Stream, Stream]:
        """Before the first block there is no stream yet: it begins with the embeddings. It is added
        up and normed when a part reads it."""
        x, scale = self.embedded if x is None else rows_of(x), (norm.weight, norm.eps)
        if x is None:
            added = None if self.inputs is None else self.inputs[None]
            written = self.topology.written
            stream = Stream(self.embedding, *scale, added, self.tokens, self.nodes, written)
        else:
            stream = Stream(x, *scale, y, beside=beside)
        return stream, stream

    def run(self, part: Any, x: Stream, slot: int | None, *adapters: Any) -> Tensor:
        return part.tree(x, None if slot is None else self.caches[slot], self, *adapters)

    def over_nodes(
        self, cache: Any, op: Callable[..., Tensor], x: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """What a mixer's op(x, out, topology, cache_state, first) gives for the nodes, (B, Q, …),
        written to `out` if there is one."""
        return op(x, out, self.topology, self.cache_state, self.first)

    def after_a_mixer(self) -> TreePass:
        """The same for one that reads what the mixer before it has read: that product is no longer
        the launch ahead."""
        later = copy.copy(self)
        later.cache_state = replace(self.cache_state, ready="all")
        return later

    def end(self, hidden: Tensor) -> Tensor:
        """After all layers: hidden states (B, Q, D) of the nodes that were asked for."""
        if self.first == 0:
            ops.advance(self.cache_state, hidden)
        return hidden

    def project(self, projection: nn.Linear, x: Tensor) -> Tensor:
        return project_parts(x, projection)

    def together(self, outputs: list[Tensor]) -> Added:
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


Pass = TrainingPass | TreePass


def rows_of(x: Tensor | Stream) -> Tensor:
    """A stream (B, Q, D) that parts have read."""
    if isinstance(x, Tensor):
        return x
    assert x.is_sum
    return x.source


# Parts


class Part(nn.Module):
    """A mixer or an MLP of a layer: `forward(x, context)` for whole sequences, `tree(x, cache,
    call)` for tree nodes, and with a memory `extend(x, cache, context)`.

    With a memory, `tree` is the product of `reading`, then `mix(projected, cache, call, out)`, then
    that of `closing`; out (B, Q, C), where to write what is mixed, None for anywhere, or ahead of
    its gate and norm (`Gated`).
    packed, what `tree` reads: a `Joined` for each of `products`, since the last `pack`.
    keeps_rows, that weights stay stored output by output, for whoever else has them.
    """

    packed: tuple[Joined, ...] = ()
    keeps_rows = False

    def products(self) -> list[tuple[nn.Linear, ...]]:
        """Its projections; those of one input stand together, and are one product in a call."""
        return []

    def reading(self) -> tuple[nn.Linear, ...]:
        """A mixer's projections of its input."""
        return self.products()[0]

    def closing(self) -> nn.Linear:
        """A mixer's last projection."""
        return self.products()[-1][0]

    def product_sizes(self) -> list[tuple[int, int]]:
        """Rows and columns of the weights of a call's products."""
        return [
            (sum(each.out_features for each in together), together[0].in_features)
            for together in self.products()
        ]

    def pack(self) -> None:
        """Lay the weights out as calls over trees read them. Values and shapes stay."""
        products = self.products()
        before = self.packed or (None,) * len(products)
        self.packed = tuple(
            joined(together, was, self.keeps_rows)
            for together, was in zip(products, before, strict=True)
        )
        self.pack_own()

    def pack_own(self) -> None:
        """Lay out what is no product's."""


def put(y: Tensor, out: Tensor | None) -> Tensor:
    """y, where it is wanted."""
    return y if out is None else out.copy_(y)


def lay_channels_together(conv: nn.Conv1d) -> None:
    """Store a conv's weight (C, 1, W) tap by tap: a tree conv reads many channels of one tap at a
    time."""
    weight = conv.weight
    if weight.stride(0) != 1:
        weight.data = weight.data.permute(1, 2, 0).contiguous().permute(2, 0, 1)


def laid(weight: Tensor, keeps_rows: bool) -> Tensor:
    """A weight (E, D) stored as products of a few rows read it; or, kept, output by output."""
    return weight.contiguous() if keeps_rows else ops.laid(weight)


def lay_for_products(weight: Tensor, keeps_rows: bool = False) -> None:
    """Store a projection's weight as `laid`."""
    laid_weight = laid(weight.data, keeps_rows)
    if laid_weight.data_ptr() != weight.data_ptr():
        weight.data = laid_weight


@dataclass(frozen=True)
class Joined:
    """Projections' weights one above the other, as `lay_for_products` stores one, and their biases.
    What calls read instead of the projections themselves, so that it takes them no look-ups."""

    weight: Tensor
    bias: Tensor | None


def project(x: Tensor | Stream, to: Joined | nn.Linear) -> Tensor:
    """(…, E) of x (…, D), or of the norm of a stream, of joined projections side by side."""
    y = ops.linear(x, to.weight)
    return y if to.bias is None else y + to.bias


def project_parts(x: Tensor | Gated, to: Joined | nn.Linear) -> Tensor:
    """`project` of x (…, D), or of the norm of what is gated, as parts of a sum (S, …, E)."""
    parts = ops.linear_parts(x, to.weight)
    if to.bias is not None:
        parts[0] += to.bias
    return parts


def joined(
    projections: Sequence[nn.Linear], before: Joined | None = None, keeps_rows: bool = False
) -> Joined:
    """Weights and biases of projections, joined; as `before`, if they still lie there.

    Those of several become views: no memory is doubled, and whatever writes them in place writes
    the joined ones.
    """
    first = projections[0]
    if len(projections) == 1:
        lay_for_products(first.weight, keeps_rows)
        return Joined(first.weight, first.bias)
    if before is not None and _lie_in(before, projections):
        return before
    bias = None
    if any(each.bias is not None for each in projections):
        bias = _one_above_the_other([_bias_of(each) for each in projections], keeps_rows)
    return Joined(_one_above_the_other([each.weight for each in projections], keeps_rows), bias)


def _bias_of(projection: nn.Linear) -> Tensor:
    if projection.bias is None:  # beside one that has a bias
        return projection.weight.new_zeros(projection.out_features)
    return projection.bias


def _one_above_the_other(tensors: list[Tensor], keeps_rows: bool) -> Tensor:
    first, sizes = tensors[0], [tensor.shape[0] for tensor in tensors]
    if _lie_one_above_the_other(tensors):  # halves of a projection that is stored fused
        return first.detach().as_strided((sum(sizes), *first.shape[1:]), first.stride())
    joined = torch.cat([tensor.detach() for tensor in tensors])
    joined = laid(joined, keeps_rows) if joined.ndim == 2 else joined
    for tensor, piece in zip(tensors, joined.split(sizes), strict=True):
        tensor.data = piece
    return joined


def _lie_one_above_the_other(tensors: list[Tensor]) -> bool:
    storage, address = tensors[0].untyped_storage().data_ptr(), tensors[0].data_ptr()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == storage and tensor.data_ptr() == address
        if not (same and tensor.is_contiguous()):
            return False
        address += tensor.nbytes
    return True


def _lie_in(joined: Joined, projections: Sequence[nn.Linear]) -> bool:
    """Whether the projections' weights (and biases) are what `joined` consists of, in order."""
    for whole, pieces in (
        (joined.weight, [projection.weight for projection in projections]),
        (joined.bias, [projection.bias for projection in projections]),
    ):
        if whole is None:
            continue
        address, step = whole.data_ptr(), whole.stride(0) * whole.element_size()
        for projection, piece in zip(projections, pieces, strict=True):
            lies = piece is None or (piece.data_ptr() == address and piece.dtype == whole.dtype)
            if not lies:
                return False
            address += projection.out_features * step
    return True
