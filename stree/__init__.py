"""Speculative tree decoding for state-space and hybrid language models."""

import stree.threads  # noqa: F401  (before torch is loaded)

from stree.engine import Decoder, GenerationConfig, GenerationOutput, generate
from stree.loading import load
from stree.models.config import HybridConfig
from stree.models.hybrid import HybridModel
from stree.tree import TokenTree

__all__ = [
    "Decoder",
    "GenerationConfig",
    "GenerationOutput",
    "HybridConfig",
    "HybridModel",
    "TokenTree",
    "generate",
    "load",
]
