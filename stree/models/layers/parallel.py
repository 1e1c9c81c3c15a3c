"""Mixers side by side on one input: their first projections are one product, their last another.

Their outputs are summed, so the last projections' weights, laid next to each other, are one weight
of the mixers' outputs, laid next to each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from stree.models.layers.packed_linear import PackedLinear
from stree.models.layers.part import TrainingPass, TreePass
from stree_kernels.contracts import Stream


@dataclass
class SideBySide:
    """Several mixers as one part of a layer.

    Attributes:
        mixers: Each mixer with the index of its cache.
        packed: Weights of their first and last products, since the last `pack`.
    """

    mixers: list[tuple[Any, int]]
    packed: tuple[PackedLinear, ...] = ()

    def __call__(self, x: Tensor, context: TrainingPass) -> Tensor:
        return context.together([context.run(mixer, x, index) for mixer, index in self.mixers])

    def tree(self, x: Stream, cache: None, call: TreePass) -> Tensor:
        read, last = self.packed
        products = [mixer.products()[0] for mixer, _ in self.mixers]
        widths = [sum(each.out_features for each in product) for product in products]
        projected = read.linear(x)
        inner = [each.in_features for each in self._closing()]
        y = projected.new_empty(*projected.shape[:-1], sum(inner))
        for (mixer, cache_index), own, out in zip(
            self.mixers, projected.split(widths, dim=-1), y.split(inner, dim=-1), strict=True
        ):
            mixer.between(own, call.caches[cache_index], call, out)
            call = call.after_a_mixer()
        return last.parts(y)

    def pack(self) -> None:
        """Pack the weights of all mixers (`Part.pack`)."""
        read, last = self.packed or (None, None)
        keeps_rows = any(mixer.keeps_rows for mixer, _ in self.mixers)
        self.packed = (
            PackedLinear(self._reading(), read, keeps_rows),
            PackedLinear(self._closing(), last, dim=1),
        )
        for mixer, _ in self.mixers:
            mixer.pack_own()

    def _reading(self) -> list[nn.Linear]:
        return [each for mixer, _ in self.mixers for each in mixer.products()[0]]

    def _closing(self) -> list[nn.Linear]:
        return [mixer.products()[-1][0] for mixer, _ in self.mixers]
