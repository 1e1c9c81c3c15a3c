"""Speculative tree decoding for state-space and hybrid language models."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import stree.threads  # noqa: F401  (before torch is loaded)

__version__ = "0.1.0"

CUSTOM_GENERATE = str(Path(__file__).with_name("speculate"))  # for transformers' custom_generate

__all__ = [
    "CUSTOM_GENERATE",
    "Bandit",
    "BatchDecoder",
    "Costs",
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

if TYPE_CHECKING:
    from stree.bandit import Bandit
    from stree.batch import BatchDecoder
    from stree.costs import Costs
    from stree.engine import Decoder, generate
    from stree.generation import GenerationConfig, GenerationOutput
    from stree.loading import load
    from stree.models.config import HybridConfig
    from stree.models.hybrid import HybridModel
    from stree.modes import Modes
    from stree.requests import Request
    from stree.transformers_decoder import TransformersDecoder, from_transformers
    from stree.tree import TokenTree
else:
    _PLACES = {
        "Bandit": "bandit",
        "BatchDecoder": "batch",
        "Costs": "costs",
        "Decoder": "engine",
        "GenerationConfig": "generation",
        "GenerationOutput": "generation",
        "HybridConfig": "models.config",
        "HybridModel": "models.hybrid",
        "Modes": "modes",
        "Request": "requests",
        "TokenTree": "tree",
        "TransformersDecoder": "transformers_decoder",
        "from_transformers": "transformers_decoder",
        "generate": "engine",
        "load": "loading",
    }

    def __getattr__(name: str) -> Any:
        """Import what is asked for, and PyTorch with it: `stree --help` needs neither."""
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)

    def __dir__() -> list[str]:
        """With what was not asked for yet, for completion in a shell or notebook."""
        return sorted({*globals(), *__all__})
