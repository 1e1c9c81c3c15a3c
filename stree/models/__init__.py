"""Decoder models: one readable file a model, all key renaming in `convert`."""

from stree.models.config import HybridConfig
from stree.models.model import HybridModel

__all__ = ["HybridConfig", "HybridModel"]
