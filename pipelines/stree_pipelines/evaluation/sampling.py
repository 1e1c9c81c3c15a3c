"""Define the sampling settings other than the temperature, of settings and rows."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from stree.generation import GenerationConfig


def option(text: str, default: Any = MISSING) -> Any:
    """Return a field of settings that is an option of the commands; `text` is its help."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings other than the temperature; at their defaults they are off.

    Chat, evaluation, gate and generated data have an option for each (options.py), rows and samples
    a column (records.py).
    """

    top_k: int = option(
        "sample from the k best tokens only; 0: all", GenerationConfig.top_k
    )
    top_p: float = option(
        "sample from the best tokens that have this probability together; 1: all",
        GenerationConfig.top_p,
    )
    min_p: float = option(
        "sample from tokens with at least this share of the best one's probability; 0: all",
        GenerationConfig.min_p,
    )
    repetition_penalty: float = option(
        "of tokens that prompt or answer has, greedy or not; 1: none",
        GenerationConfig.repetition_penalty,
    )


# The values that are off
OFF: dict[str, Any] = {each.name: each.default for each in fields(Sampling)}


def sampling_of(holder: Any) -> dict[str, Any]:
    """Return {name: value} of settings, a row or a sample."""
    return {name: getattr(holder, name) for name in OFF}


def sampling_text(holder: Any, before: str = "") -> str:
    """Format the settings that are on, such as "top_p 0.9", after `before`; "" when all are off."""
    settings = ", ".join(
        f"{name} {value:g}" for name, value in sampling_of(holder).items() if value != OFF[name]
    )
    return before + settings if settings else ""
