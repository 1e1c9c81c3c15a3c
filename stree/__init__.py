"""Speculative tree decoding for state-space and hybrid language models."""

from pathlib import Path

import stree.threads  # noqa: F401  (before torch is loaded)

from stree.bandit import Bandit
from stree.batch import BatchDecoder
from stree.engine import Decoder, generate
from stree.generation import GenerationConfig, GenerationOutput
from stree.loading import load
from stree.models.config import HybridConfig
from stree.models.hybrid import HybridModel
from stree.modes import Modes
from stree.requests import Request
from stree.transformers_decoder import TransformersDecoder, from_transformers
from stree.tree import TokenTree

__version__ = "0.1.0"

CUSTOM_GENERATE = str(Path(__file__).with_name("speculate"))  # for transformers' custom_generate

__all__ = [
    "CUSTOM_GENERATE",
    "Bandit",
    "BatchDecoder",
    "Decoder",
    "GenerationConfig",
    "GenerationOutput",
    "HybridConfig",
    "HybridModel",
    "Modes",
    "Request",
    "TokenTree",
    "TransformersDecoder",
    "__version__",
    "from_transformers",
    "generate",
    "load",
]
