"""Speculative tree decoding for state-space and hybrid language models."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import stree.common.threads  # noqa: F401  (before torch is loaded)

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
    from stree.batching.batch_decoder import BatchDecoder
    from stree.batching.sequences import Request
    from stree.decoder import Decoder, generate
    from stree.generation import GenerationConfig, GenerationOutput
    from stree.hf_model import TransformersDecoder, from_transformers
    from stree.loading import load
    from stree.models.config import HybridConfig
    from stree.models.model import HybridModel
    from stree.tree_policy.adaptive import Modes
    from stree.tree_policy.bandit import Bandit
    from stree.tree_policy.step_times import Costs
    from stree.trees.token_tree import TokenTree
else:
    _PLACES = {
        "Bandit": "tree_policy.bandit",
        "BatchDecoder": "batching.batch_decoder",
        "Costs": "tree_policy.step_times",
        "Decoder": "decoder",
        "GenerationConfig": "generation",
        "GenerationOutput": "generation",
        "HybridConfig": "models.config",
        "HybridModel": "models.model",
        "Modes": "tree_policy.adaptive",
        "Request": "batching.sequences",
        "TokenTree": "trees.token_tree",
        "TransformersDecoder": "hf_model",
        "from_transformers": "hf_model",
        "generate": "decoder",
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
