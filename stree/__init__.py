"""Speculative tree decoding for state-space and hybrid language models."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import stree.common.threads  # noqa: F401  (before torch is loaded)

__version__ = "0.1.0"

CUSTOM_GENERATE = str(Path(__file__).with_name("speculate"))  # for transformers' custom_generate

__all__ = [
    "CUSTOM_GENERATE", "AdaptiveTrees", "BadData", "BanditTrees", "BatchDecoder", "CannotWrite",
    "CheckpointRefused", "Decoder", "Engine", "GenerationConfig", "GenerationOutput", "Handle",
    "HybridConfig", "HybridModel", "InvariantBroken", "NotFound", "OutOfMemory", "QueueFull",
    "Request", "StepTimes", "StreeError", "TextStream", "TokenLogprobs", "TokenTree",
    "TransformersDecoder", "UsageError", "__version__", "from_transformers", "generate", "load",
]

if TYPE_CHECKING:
    from stree.batching.batch_decoder import BatchDecoder
    from stree.batching.sequences import Request
    from stree.common.errors import (
        BadData,
        CannotWrite,
        CheckpointRefused,
        InvariantBroken,
        NotFound,
        OutOfMemory,
        QueueFull,
        StreeError,
        UsageError,
    )
    from stree.decoder import Decoder, generate
    from stree.engine.engine import Engine, Handle
    from stree.generation import GenerationConfig, GenerationOutput
    from stree.hf_model import TransformersDecoder, from_transformers
    from stree.loading import load
    from stree.logits.log_probs import TokenLogprobs
    from stree.models.config import HybridConfig
    from stree.models.model import HybridModel
    from stree.text_stream import TextStream
    from stree.tree_policy.adaptive import AdaptiveTrees
    from stree.tree_policy.bandit import BanditTrees
    from stree.tree_policy.step_times import StepTimes
    from stree.trees.token_tree import TokenTree
else:
    _ERRORS = (
        "BadData", "CannotWrite", "CheckpointRefused", "InvariantBroken", "NotFound",
        "OutOfMemory", "QueueFull", "StreeError", "UsageError",
    )
    _PLACES = {
        **dict.fromkeys(_ERRORS, "common.errors"),
        "BanditTrees": "tree_policy.bandit",
        "BatchDecoder": "batching.batch_decoder",
        "StepTimes": "tree_policy.step_times",
        "Decoder": "decoder",
        "Engine": "engine.engine",
        "Handle": "engine.engine",
        "GenerationConfig": "generation",
        "GenerationOutput": "generation",
        "TokenLogprobs": "logits.log_probs",
        "HybridConfig": "models.config",
        "HybridModel": "models.model",
        "AdaptiveTrees": "tree_policy.adaptive",
        "Request": "batching.sequences",
        "TextStream": "text_stream",
        "TokenTree": "trees.token_tree",
        "TransformersDecoder": "hf_model",
        "from_transformers": "hf_model",
        "generate": "decoder",
        "load": "loading",
    }

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first asked for: `stree --help` needs no PyTorch."""
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)

    def __dir__() -> list[str]:
        """List all public names, for completion in a shell or notebook."""
        return sorted({*globals(), *__all__})
