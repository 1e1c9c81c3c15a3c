"""Config of a model, its layers and their parts."""

from stree.models.config.hybrid import MAX_LAYERS, HybridConfig
from stree.models.config.layer_types import MIXERS, Block
from stree.models.config.mixers import MLP_KINDS, ROPE_LENGTH, ROPE_NUMBERS, UNGATED

__all__ = [
    "MAX_LAYERS", "MIXERS", "MLP_KINDS", "ROPE_LENGTH", "ROPE_NUMBERS", "UNGATED", "Block",
    "HybridConfig",
]
