"""Mixers side by side on one input: their first projections are one product, their last another.

Their outputs are summed, so the last projections' weights, laid next to each other, are one weight
of the mixers' outputs, laid next to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stree.models.layers.part import Joined, TrainingPass, TreePass, joined, lie_in, project
from stree_kernels import ops
from stree_kernels.contracts import Stream


@dataclass
class SideBySide:
    """Several mixers as one part of a layer.

    Attributes:
        mixers: Each mixer with the slot of its cache.
        packed: Weights of their first and last products, since the last `pack`.
    """

    mixers: list[tuple[Any, int]]
    packed: tuple[Joined, ...] = ()

    def __call__(self, x: Tensor, context: TrainingPass) -> Tensor:
        return context.together([context.run(mixer, x, slot) for mixer, slot in self.mixers])

    def tree(self, x: Stream, cache: None, call: TreePass) -> Tensor:
        (read, last), closing = self.packed, self._closing()
        products = [mixer.products()[0] for mixer, _ in self.mixers]
        widths = [sum(each.out_features for each in product) for product in products]
        projected = project(x, read)
        inner = [each.in_features for each in closing]
        y = projected.new_empty(*projected.shape[:-1], sum(inner))
        for (mixer, slot), own, out in zip(
            self.mixers, projected.split(widths, dim=-1), y.split(inner, dim=-1), strict=True
        ):
            mixer.mix(own, call.caches[slot], call, out)
            call = call.after_a_mixer()
        parts = ops.linear_parts(y, last.weight)
        for each in closing:
            if each.bias is not None:
                parts[0] += each.bias
        return parts

    def pack(self) -> None:
        """Pack the weights of all mixers (`Part.pack`)."""
        read, last = self.packed or (None, None)
        keeps_rows = any(mixer.keeps_rows for mixer, _ in self.mixers)
        reading = joined(self._reading(), read, keeps_rows)
        self.packed = reading, next_to_each_other(self._closing(), last)
        for mixer, _ in self.mixers:
            mixer.pack_own()

    def _reading(self) -> list[nn.Linear]:
        return [each for mixer, _ in self.mixers for each in mixer.products()[0]]

    def _closing(self) -> list[nn.Linear]:
        return [mixer.products()[-1][0] for mixer, _ in self.mixers]


def next_to_each_other(projections: Sequence[nn.Linear], before: Joined | None = None) -> Joined:
    """Return the weights (E, D₁ + D₂ + …) of projections whose results are summed.

    Returns `before` if they still lie there. The projections' weights become views, as those of
    `joined` do.
    """
    sizes = [each.in_features for each in projections]
    weights = [each.weight for each in projections]
    if before is not None and lie_in(before.weight, weights, sizes, dim=1):
        return before
    with torch.inference_mode(weights[0].is_inference()):
        weight = ops.laid(torch.cat([each.detach() for each in weights], dim=1))
        for own, piece in zip(weights, weight.split(sizes, dim=1), strict=True):
            own.data = piece
    return Joined(weight, None)
