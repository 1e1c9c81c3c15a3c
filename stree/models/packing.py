"""Weights laid out as calls over token trees read them, and laid out again when they have moved."""

from __future__ import annotations

from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from stree.models.config import HybridConfig
from stree.models.head import HeadedModel
from stree.models.layers.layer import Layer, SharedTransformer
from stree.models.layers.part import Part, lay_for_products


def version_of(weight: Tensor) -> int:
    """Return how often a tensor was written in place; 0 if `torch.inference_mode` made it."""
    try:
        return weight._version
    except RuntimeError:  # `is_inference` denies it of a parameter whose data is such a tensor
        return 0


class PackedModel(HeadedModel):
    """A model that packs its weights, and knows the addresses and versions of all of them."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        self._read: list[nn.Linear] = []  # projections that are packed
        self._packed_at: list[int] | None = None  # their addresses at the last `pack`
        self._packed_ids: list[int] = []  # of all modules at the last `pack`
        self._packed_modules: list[nn.Module] = []  # kept, so that no other gets the id of one
        self._module_dicts: list[dict[str, Any]] = []  # children and weights of all modules
        self._weight_dicts: list[dict[str, Any]] = []

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
        lay_for_products(self.head_weight, any(part.keeps_rows for part in parts))
        if self.head_in_8_bits is not None:
            self.put_head_in_8_bits()
        self._read = [
            projection for part in parts for product in part.products() for projection in product
        ]
        self._packed_at = self._packed_addresses()
        modules = list(self.modules())
        self._packed_modules = modules[1:]  # a model that held itself would be freed late
        self._module_dicts = [each._modules for each in modules if each._modules]
        self._weight_dicts = [each._parameters for each in modules if each._parameters]
        self._packed_ids = self._module_ids()

    def pack_what_moved(self) -> None:
        """Call `pack` if weights were moved, or modules replaced, since the last call."""
        if self._packed_addresses() != self._packed_at or self._module_ids() != self._packed_ids:
            self.pack()

    def addresses(self) -> list[int]:
        """Return the addresses of all modules and weights that existed at the last `pack`."""
        weights = chain.from_iterable(map(dict.values, self._weight_dicts))
        there = [each for each in weights if each is not None]
        return [*self._module_ids(), *map(Tensor.data_ptr, there)]

    def versions(self) -> list[int]:
        """Return how often each weight of `addresses` was written in place.

        Writes to tensors of `torch.inference_mode`, and writes through `.data`, are not counted.
        """
        weights = chain.from_iterable(map(dict.values, self._weight_dicts))
        there = [each for each in weights if each is not None]
        return list(map(version_of, there))

    def _module_ids(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, self._module_dicts))))

    def _packed_addresses(self) -> list[int]:
        """Return the addresses of the weights that are packed."""
        return [
            each.data_ptr()
            for projection in self._read for each in projection._parameters.values()
            if each is not None
        ]
