"""Keep the weights of a quantised checkpoint in fp8 e4m3 where that goes.

Its scales of activations and of keys and values are passed over, because activations are not
rounded here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from stree.checkpoints.layouts.quantisation import Quantisation
from stree.checkpoints.sources import Source, StoredTensor, as_stored
from stree.common.errors import CheckpointRefused
from stree_kernels.contracts import Scaled

FLOAT8, FLOAT8_FORMAT = torch.float8_e4m3fn, "F8_E4M3"  # the latter is safetensors' word
ROUNDING = 1e-5  # of a product in fp32, relative; steps of e4m3 are 6 % apart
SCALES = ("_scale_inv", "_scale")  # behind a weight's name
OTHER_SCALES = re.compile(r".*\.(input|output|activation|[kqv]|kv|prob)_scale(_inv)?")


class ScaledTensor(NamedTuple):
    """A stored tensor in 8 bits: values (…, E, D), and a scale (…, E, G) for D / G inputs each."""

    values: Tensor
    scale: Tensor

    def numbers(self) -> Tensor:
        """Return the numbers in fp32, which holds them to 24 binary digits."""
        return self.values.float() * _in_groups(self, 1)


def scaled_tensor(values: Tensor, scale: Tensor, block: tuple[int, int]) -> ScaledTensor:
    """Return a weight (…, E, D) with its scale spread over rows and groups of inputs.

    The scale is one number, (E,), (E, 1), or one for each block. Raises `ValueError` for another
    shape.
    """
    *_, outputs, inputs = values.shape
    scale = scale.float()
    if scale.numel() == 1:
        return ScaledTensor(values, scale.reshape(1, 1).expand(*values.shape[:-1], 1))
    if scale.ndim == 1:
        scale = scale[:, None]
    if scale.ndim == 4 and values.ndim == 2:  # ModelOpt's blocks: (E / 128, 1, D / 128, 1)
        scale = scale[:, 0, :, 0]
    rows, columns = scale.shape[-2:]
    by_rows = 1 if rows == outputs else block[0]
    by_columns = inputs if columns == 1 else block[1]
    if scale.ndim != values.ndim or rows != -(-outputs // by_rows):
        raise ValueError
    if columns != -(-inputs // by_columns):
        raise ValueError
    group = math.gcd(inputs, by_columns)
    scale = scale.repeat_interleave(by_rows, dim=-2)[..., :outputs, :]
    return ScaledTensor(values, scale[..., torch.arange(0, inputs, group) // by_columns])


def with_scales(
    stored: Mapping[str, StoredTensor], quantisation: Quantisation, directory: Path
) -> dict[str, StoredTensor]:
    """Return stored tensors, those in 8 bits with their scales, and no scale by itself.

    Raises `CheckpointRefused` for a weight without a scale; reading one does for a scale that has
    another shape.
    """
    scales: dict[str, str] = {}
    for name, tensor in stored.items():
        if tensor.number_format == FLOAT8_FORMAT:
            found = [f"{name}{end}" for end in SCALES if f"{name}{end}" in stored]
            if not found:
                raise CheckpointRefused(
                    f"{directory} has no scale of {name}, which is in 8 bits: copy the checkpoint "
                    "again"
                )
            scales[name] = found[0]

    def read(name: str) -> ScaledTensor:
        values, scale = stored[name].read(), stored[scales[name]].read()
        try:
            return scaled_tensor(values, scale, quantisation.block)
        except ValueError:
            raise CheckpointRefused(
                f"{scales[name]} in {directory} has shape {tuple(scale.shape)}, which is neither a "
                f"scale an output nor one a block of {quantisation.block} for a weight of shape "
                f"{tuple(values.shape)}: use weights and config of the same checkpoint"
            ) from None

    taken = set(scales.values())
    return {
        name: stored[name]._replace(read=partial(read, name)) if name in scales else stored[name]
        for name in stored if name not in taken and not OTHER_SCALES.fullmatch(name)
    }


def make_parameter(
    source: Source, tensors: list[Tensor | ScaledTensor], keeps: bool
) -> Tensor | Scaled:
    """Return a parameter, made of stored tensors; in 8 bits if all are and `keeps` is set.

    What the layout does to the tensors it does to their scales: rows that it takes or reorders keep
    theirs, and a factor becomes a part of the scale. Where that does not give the layout's numbers,
    because it mixes them or their groups of inputs, the parameter is returned as numbers.
    """
    scaled = [each for each in tensors if isinstance(each, ScaledTensor)]
    numbers = (each if isinstance(each, Tensor) else each.numbers() for each in tensors)
    if not keeps or len(scaled) < len(tensors):
        return source.make(*numbers)
    group = math.gcd(*(each.values.shape[-1] // each.scale.shape[-1] for each in scaled))
    if source.stacks or source.make is as_stored:
        scales = (_in_groups(each, group) for each in scaled)
        values = source.make(*(each.values for each in scaled))
        return Scaled(values, source.make(*scales).contiguous())
    made = source.make(*numbers)
    if made.shape[-1] % group:
        return made
    scale = source.make(*(_in_groups(each, 1) for each in scaled)).float()
    in_groups = scale.unflatten(-1, (-1, group))
    if not bool((in_groups == in_groups[..., :1]).all()):
        return made
    values = torch.where(scale == 0, 0.0, made.float() / scale).to(FLOAT8)
    if not torch.allclose(values.float() * scale, made.float(), rtol=ROUNDING, atol=0):
        return made
    return Scaled(values, in_groups[..., 0].contiguous())


def _in_groups(tensor: ScaledTensor, group: int) -> Tensor:
    """Return the scales (…, E, D / group) of smaller groups of inputs."""
    repeats = tensor.values.shape[-1] // tensor.scale.shape[-1] // group
    return tensor.scale.repeat_interleave(repeats, dim=-1)
