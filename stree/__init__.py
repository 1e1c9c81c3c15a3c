"""Speculative tree decoding for state-space and hybrid language models."""

import stree.threads  # noqa: F401  (before torch is loaded)

from stree.batch import BatchDecoder, Request
from stree.engine import Decoder, generate
from stree.generation import GenerationConfig, GenerationOutput
from stree.loading import load
from stree.models.config import HybridConfig
from stree.models.hybrid import HybridModel
from stree.modes import Modes
from stree.tree import TokenTree

__version__ = "0.1.0"

__all__ = [
    "BatchDecoder",
    "Decoder",
    "GenerationConfig",
    "GenerationOutput",
    "HybridConfig",
    "HybridModel",
    "Modes",
    "Request",
    "TokenTree",
    "__version__",
    "generate",
    "load",
]
