"""Keep the weights of a quantised checkpoint in fp8 e4m3 where that goes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from stree.checkpoints.layouts.quantisation import scale_grid
from stree.checkpoints.sources import Source, as_stored
from stree_kernels.contracts import Scaled

FLOAT8 = torch.float8_e4m3fn
ROUNDING = 1e-5  # of a product in fp32, relative; steps of e4m3 are 6 % apart


class ScaledTensor(NamedTuple):
    """A stored tensor in 8 bits: values (…, E, D), and a scale (…, E, G) for D / G inputs each."""

    values: Tensor
    scale: Tensor

    def numbers(self) -> Tensor:
        """Return the numbers in fp32, which holds them to 24 binary digits."""
        return self.values.float() * _in_groups(self, 1)


def scaled_tensor(values: Tensor, scale: Tensor, block: tuple[int, int]) -> ScaledTensor:
    """Return a weight (…, E, D) with its scale spread over rows and groups of inputs.

    The scale is one number, one for each matrix, (E,), (E, 1), or one for each block: a shape that
    `scale_grid` takes.
    """
    grid = scale_grid(tuple(values.shape), tuple(scale.shape), block)
    assert grid is not None
    *_, outputs, inputs = values.shape
    scale = scale.float().reshape(grid)
    if grid == (1, 1):
        return ScaledTensor(values, scale.expand(*values.shape[:-1], 1))
    by_rows = 1 if grid[-2] == outputs else outputs if grid[-2] == 1 else block[0]
    by_columns = inputs if grid[-1] == 1 else block[1]
    group = math.gcd(inputs, by_columns)
    scale = scale.repeat_interleave(by_rows, dim=-2)[..., :outputs, :]
    return ScaledTensor(values, scale[..., torch.arange(0, inputs, group) // by_columns])


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
