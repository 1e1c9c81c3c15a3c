"""Sources of parameters: the stored tensors, and the function that makes a parameter of them.

A layout's multipliers are folded into the weights, so that no call pays for them; fused projections
are cut, lists of experts stacked, channels of a head put in our order. All that happens after names
and shapes were checked: before, sizes are those that an untrusted file claims. Sources are found
without PyTorch, which only the functions import when they are called.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, TypeAlias

from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.names import Names
from stree.models.config import HybridConfig

if TYPE_CHECKING:
    from torch import Tensor

Make: TypeAlias = "Callable[[Tensor], Tensor]"


def as_stored(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Source:
    """The stored tensors of a parameter.

    Attributes:
        names: Names of the stored tensors.
        make: Makes the parameter of them.
        shape: Shape of each stored tensor; None is the parameter's.
        splits: Where the stored tensors' shapes differ, the shapes of all in each known layout.
        wide: Whether the parameter stays in fp32 in a model of any dtype.
        stacks: Whether `make` only stacks the tensors or joins them along their outputs.
        copies: Other names under which a single tied tensor may be stored, in addition or instead.
    """

    names: tuple[str, ...]
    make: Callable[..., Tensor] = as_stored
    shape: tuple[int, ...] | None = None
    splits: tuple[tuple[tuple[int, ...], ...], ...] = ()
    wide: bool = False
    stacks: bool = False
    copies: tuple[str, ...] = ()

    def among(self, stored: Collection[str]) -> Source:
        """Return the source with the first stored name of a tied tensor, and its stored copies."""
        if not self.copies:
            return self
        found = [each for each in (*self.names, *self.copies) if each in stored] or self.names
        return replace(self, names=(found[0],), copies=tuple(found[1:]))


Rename = Callable[[str], Source]  # maps a parameter's name to its source
MtpHead = tuple[HybridConfig, Callable[[Collection[str]], Rename]]


@dataclass(frozen=True)
class Layout:
    """One kind of checkpoint.

    Attributes:
        name: For people.
        model_types: Values of `model_type` in config.json.
        spec: Reads the config.
        rename: Given config and stored names, returns the map from parameters to sources.
        without_effect: Keys that transformers' config class knows and that change no logit, in
            addition to `config_keys.TRAINING_AND_GENERATION`.
        dropped: Names of stored tensors that the model does not need.
        mtp: Given config.json and the model's config, returns the config of its MTP head as a
            drafter, and the map from the head's parameters; None for layouts without one.
    """

    name: str
    model_types: tuple[str, ...]
    spec: Callable[[CheckedJson], HybridConfig]
    rename: Callable[[CheckedJson, HybridConfig, Collection[str]], Rename]
    without_effect: frozenset[str] = frozenset()
    dropped: re.Pattern[str] | None = None
    mtp: Callable[[CheckedJson, HybridConfig], MtpHead] | None = None


def as_it_is(values: CheckedJson, config: HybridConfig, stored: Collection[str]) -> Rename:
    """Return the map of a layout that has our names."""
    return lambda name: Source((name,))


def after_each_other(*steps: Make) -> Make:
    return lambda tensor: reduce(lambda value, step: step(value), steps, tensor)


def scaled(factor: float) -> Make:
    """Return a function that multiplies by a number in fp32 or wider, so that it rounds once."""
    if factor == 1:
        return lambda tensor: tensor
    return lambda tensor: _wide(tensor) * factor


def scaled_rows(factors: Sequence[float], sizes: Sequence[int]) -> Make:
    """Return `scaled` with several factors, each for as many rows as its size."""

    def make(tensor: Tensor) -> Tensor:
        wide = _wide(tensor)
        pairs = zip(factors, sizes, strict=True)
        rows = wide.new_tensor([factor for factor, size in pairs for _ in range(size)])
        return wide * rows.view(-1, *[1] * (wide.dim() - 1))

    return make


def plus_one(tensor: Tensor) -> Tensor:
    """Return the scale 1 + w of a norm that is stored as w, in fp32 or wider.

    In bf16 the sum would lose most digits of w, so the source must be `wide`.
    """
    return _wide(tensor) + 1


def _wide(tensor: Tensor) -> Tensor:
    """Return the numbers in fp32, or in fp64 if they are stored so."""
    from stree_kernels import naive

    return tensor.to(naive.accumulation_dtype(tensor.dtype))


def joined(*tensors: Tensor) -> Tensor:
    """Return tensors above each other, along their outputs."""
    import torch

    return torch.cat(tensors)


def half(second: bool) -> Make:
    """Return a function that takes one of two projections, stacked along their outputs."""
    return lambda tensor: tensor.chunk(2)[second]


EAGLE_KEYS = ("draft_vocab_size", "speculators_model_type", "eagle_config")  # of a config.json
FUSED = ("model.features.embedding_proj.weight", "model.features.proj.weight")


def half_of_fused(names: Names, name: str, width: int) -> Source:
    """Return the source of a projection in FUSED: half of a stored one (D, 2·D), by its inputs."""
    second = FUSED.index(name)
    return Source(
        tuple(names.published(name)), lambda fused: fused.chunk(2, 1)[second], (width, 2 * width)
    )


def named(
    names: Names, name: str, config: HybridConfig, stored: Collection[str], make: Make | None = None
) -> Source:
    """Return the source of a tensor that is stored as it is in the model, under another name.

    Of several published names the first that is stored counts. The weights of a layer's experts
    may be stored apart instead: projections that are published for one of ours are joined along
    their outputs.

    Args:
        names: The layout's names.
        name: Ours.
        config: Config of the model.
        stored: Names of all stored tensors.
        make: Makes the parameter of the stored tensor; None takes it as it is.
    """
    places = names.published(name)
    whole = [place for place in places if "*" not in place]
    found = next((place for place in whole if place in stored), None)
    projections = [place for place in places if "*" in place]
    if found is not None or not projections:
        place = found or whole[0]
        return Source((place,)) if make is None else Source((place,), make)
    inner, outer = config.expert_intermediate_size, config.expert_latent_size or config.d_model
    each = tuple(
        place.replace("*", str(expert))
        for expert in range(config.num_experts) for place in projections
    )

    def stacked(*tensors: Tensor) -> Tensor:
        import torch

        step = len(projections)
        if step == 1:
            return torch.stack(tensors)
        starts = range(0, len(tensors), step)
        return torch.stack([joined(*tensors[start : start + step]) for start in starts])

    shape = (outer, inner) if name.endswith(".down") else (inner, outer)
    return Source(each, stacked, shape, stacks=True)


def rotary_order(config: HybridConfig) -> Make:
    """Return a function that reorders a projection of q or k.

    The stored rotated channels are the first of a head, ours the first of each of its halves.
    """
    dim, rotated = config.head_dim, config.rotary_dim
    if rotated is None or rotated in (0, dim):
        return scaled(1)

    def make(tensor: Tensor) -> Tensor:
        channels, middle = list(range(dim)), (rotated + dim) // 2
        low, high = channels[: rotated // 2], channels[rotated // 2 : rotated]
        order = [*low, *channels[rotated:middle], *high, *channels[middle:]]
        return tensor.unflatten(0, (-1, dim))[:, order].flatten(0, 1)

    return make
