"""What a parameter is made of: which stored tensors, and what is done with them when they are read.

Multipliers that a layout keeps beside its weights are folded into them, so that no call pays for
them; fused projections are cut, lists of experts stacked, channels of a head put in our order.
All that happens after names and shapes were checked: before, a size is what a stranger's file says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from stree.checkpoints.checked_json import CheckedJson
from stree.models.config import HybridConfig
from stree_kernels import naive

Make = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Source:
    """The stored tensors of a parameter, and what makes it of them.

    shape, each stored tensor's; None: that of the parameter. wide: it stays in fp32 whatever the
    rest is loaded in.
    """

    names: tuple[str, ...]
    make: Callable[..., Tensor] = lambda tensor: tensor
    shape: tuple[int, ...] | None = None
    wide: bool = False


Rename = Callable[[str], Source]  # our parameter's name to where it comes from


@dataclass(frozen=True)
class Layout:
    """One kind of checkpoint.

    spec reads its config; rename says, with the names that are stored, where each of our parameters
    comes from; without_effect, keys that transformers' class of the config knows and that change no
    logit (beside `config_keys.TRAINING_AND_GENERATION`); dropped, names of stored tensors that the
    model does without.
    """

    name: str
    model_types: tuple[str, ...]
    spec: Callable[[CheckedJson], HybridConfig]
    rename: Callable[[CheckedJson, HybridConfig, Collection[str]], Rename]
    without_effect: frozenset[str] = frozenset()
    dropped: re.Pattern[str] | None = None

    def matches(self, values: CheckedJson) -> bool:
        """Whether config.json is one of this layout."""
        return values.get("model_type") in self.model_types


def as_it_is(values: CheckedJson, config: HybridConfig, stored: Collection[str]) -> Rename:
    """Of a layout whose names are ours."""
    return lambda name: Source((name,))


def translated(name: str, words: Mapping[str, str]) -> str:
    """A parameter's name with words in it replaced, in the order given."""
    return reduce(lambda text, word: text.replace(word, words[word]), words, name)


def after_each_other(*steps: Make) -> Make:
    return lambda tensor: reduce(lambda value, step: step(value), steps, tensor)


def scaled(factor: float) -> Make:
    """Times a number, in fp32 or wider, so that it is rounded once."""
    if factor == 1:
        return lambda tensor: tensor
    return lambda tensor: tensor.to(naive.accumulation_dtype(tensor.dtype)) * factor


def scaled_rows(factors: Sequence[float], sizes: Sequence[int]) -> Make:
    """`scaled`, with each factor for as many rows as its size."""

    def make(tensor: Tensor) -> Tensor:
        wide = tensor.to(naive.accumulation_dtype(tensor.dtype))
        rows = torch.tensor(factors, dtype=wide.dtype).repeat_interleave(torch.tensor(sizes))
        return wide * rows.view(-1, *[1] * (wide.dim() - 1))

    return make


def plus_one(tensor: Tensor) -> Tensor:
    """The scale 1 + w of a norm that is stored as w, in fp32 or wider: in bf16 most of w's digits
    would be lost beside the 1 (load it `wide`)."""
    return tensor.to(naive.accumulation_dtype(tensor.dtype)) + 1


def half(second: bool) -> Make:
    """One of two projections that are stored one above the other."""
    return lambda tensor: tensor.chunk(2)[second]


def stacked(*tensors: Tensor) -> Tensor:
    return torch.stack(tensors)


def stacked_pairs(*tensors: Tensor) -> Tensor:
    """Each first of two above its second."""
    return torch.stack([torch.cat(pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)])


def rotary_order(config: HybridConfig) -> Make:
    """A projection of q or k whose rotated channels are the first of a head, as ours: the first of
    each of its halves."""
    dim, rotated = config.head_dim, config.rotary_dim
    if rotated is None or rotated in (0, dim):
        return scaled(1)

    def make(tensor: Tensor) -> Tensor:
        channels = torch.arange(dim)
        low, high = channels[:rotated].chunk(2)
        more_low, more_high = channels[rotated:].chunk(2)
        order = torch.cat([low, more_low, high, more_high])
        return tensor.unflatten(0, (-1, dim))[:, order].flatten(0, 1)

    return make
