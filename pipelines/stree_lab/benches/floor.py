"""The floor of a call: its matrix products and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from stree.models.config import HybridConfig
from stree.models.hidden_states import MtpInputs
from stree.models.layers.layer import Layer
from stree.models.layers.mlp import Experts
from stree.models.layers.parallel import SideBySide
from stree.models.layers.part import Mixer, Part
from stree.models.model import HybridModel
from stree_kernels import naive, ops


def product_sizes(model: HybridModel, num_nodes: int) -> list[tuple[int, int]]:
    """List rows and columns of the weights of one call's matrix products over `num_nodes` nodes.

    Products of one input count as one. Experts count as the weights that random routing chooses, in
    two products.
    """
    sizes = []
    model.pack()

    def add(projection: nn.Linear) -> None:
        sizes.append((projection.out_features, projection.in_features))

    def add_part(part: Part | SideBySide) -> None:
        weights = (weight for each in part.packed for weight in each.weights)
        sizes.extend((weight.shape[0], weight.shape[1]) for weight in weights)
        mixers = [each for each, _ in part.mixers] if isinstance(part, SideBySide) else [part]
        for mixer in mixers:
            if isinstance(mixer, Mixer):
                for inner in mixer.inner_products():
                    add(inner)
        if isinstance(part, Experts):
            chosen = round(chosen_experts(part.config, num_nodes))
            for weight in (part.up, part.down):
                sizes.append((chosen * weight.shape[1], weight.shape[2]))

    if isinstance(fused := model.model.normed_embeddings, MtpInputs):
        add(fused.embedding_proj)
        add(fused.proj)
    for layer in cast(list[Layer], model.model.layers):
        for block in layer.blocks:
            if block.shared is not None:
                for module in model.model.shared_blocks[block.shared].modules():
                    if isinstance(module, Part):
                        add_part(module)
                for module in layer.shared_use.modules():
                    if isinstance(module, nn.Linear):
                        add(module)
            for part, _ in layer.parts(block):
                add_part(part)
    if model.config.head_rank:
        add(model.head_down)
    num_tokens, width = model.head.shape
    return [*sizes, (num_tokens, width)]


def chosen_experts(config: HybridConfig, num_nodes: int) -> float:
    """Return the mean number of experts of a layer that `num_nodes` tokens choose at random."""
    unchosen = 1 - config.experts_per_token / config.num_experts
    return config.num_experts * (1 - unchosen**num_nodes)


class Floor:
    """A call's matrix products and nothing else, over weights of their own.

    So reading them leaves no weight of the model in a cache. most_nodes: the most nodes that
    products will have.
    """

    def __init__(self, model: HybridModel, most_nodes: int) -> None:
        self.model = model
        self.weights = [
            torch.empty(rows * columns, device=model.device, dtype=model.dtype).normal_(std=0.02)
            for rows, columns in product_sizes(model, most_nodes)
        ]

    def products(self, num_nodes: int) -> Callable[[], object]:
        """Return a call of the product of each weight with `num_nodes` rows."""
        weights = [
            weight[: rows * columns].view(rows, columns)
            for weight, (rows, columns) in zip(
                self.weights, product_sizes(self.model, num_nodes), strict=True
            )
        ]
        inputs = {
            weight.shape[1]: torch.randn_like(weight[:1].expand(num_nodes, -1))
            for weight in weights
        }
        held: list[Any] = weights
        if self.model.is_in_8_bits:
            held = list(map(naive.in_8_bits, weights))
        return lambda: [ops.linear(inputs[weight.shape[1]], weight) for weight in held]
