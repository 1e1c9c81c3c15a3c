"""Note where a model's packed weights are, to see when they have moved or were written."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

_version = attrgetter("_version")
# Modules, compared as objects, and the addresses of weights
Places = tuple[list[nn.Module], list[int]]


def versions_of(weights: Sequence[Tensor]) -> list[int]:
    """Return how often each tensor was written in place (`version_of`)."""
    try:
        return list(map(_version, weights))
    except RuntimeError:
        return list(map(version_of, weights))


def version_of(weight: Tensor) -> int:
    """Return how often a tensor was written in place; 0 if `torch.inference_mode` made it."""
    try:
        return weight._version
    except RuntimeError:  # `is_inference` denies it of a parameter whose data is such a tensor
        return 0


class PackedWeights:
    """The modules of a model, and the places of its weights, when they were laid out last."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._module_dicts: list[dict[str, Any]] = [
            each._modules for each in modules if each._modules
        ]
        self._weight_dicts: list[dict[str, Any]] = [
            each._parameters for each in modules if each._parameters
        ]
        self._projection_dicts: list[dict[str, Any]] = [
            each._parameters for each in modules if isinstance(each, nn.Linear)
        ]
        self._packed_at = self._places(_given(self._projection_dicts))

    def have_moved(self) -> bool:
        """Return whether weights of projections were moved, or modules replaced, since then."""
        return self._places(_given(self._projection_dicts)) != self._packed_at

    def state(self) -> tuple[Places, list[int]]:
        """Return the state (`weights_state`) of the weights that stood there then."""
        weights = _given(self._weight_dicts)
        return self._places(weights), versions_of(weights)

    def _places(self, weights: list[Tensor]) -> Places:
        modules = list(chain.from_iterable(map(dict.values, self._module_dicts)))
        return modules, list(map(Tensor.data_ptr, weights))


def weights_state(model: nn.Module) -> tuple[Places, list[int]]:
    """Return where a model's weights are, and how often each was written in place.

    Writes to tensors of `torch.inference_mode`, and writes through `.data`, are not counted.
    """
    packed = getattr(model, "packed_weights", None)
    if isinstance(packed, PackedWeights):
        return packed.state()
    weights = list(model.parameters())
    return ([], list(map(Tensor.data_ptr, weights))), versions_of(weights)


def _given(weight_dicts: list[dict[str, Any]]) -> list[Tensor]:
    """Return the weights that are not None."""
    weights = chain.from_iterable(map(dict.values, weight_dicts))
    return [each for each in weights if each is not None]
