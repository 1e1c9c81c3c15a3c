"""Name the sampling settings other than the temperature, of settings and rows."""

from __future__ import annotations

from typing import Any

from stree.generation import GenerationConfig

# The values that are off; rows from before these settings were recorded have them
OFF: dict[str, Any] = {
    name: getattr(GenerationConfig, name)
    for name in ("top_k", "top_p", "min_p", "repetition_penalty")
}


def sampling_of(holder: Any) -> dict[str, Any]:
    """Return {name: value} of settings, a row or a sample."""
    return {name: getattr(holder, name) for name in OFF}


def switched_on(holder: Any) -> dict[str, Any]:
    """Return the sampling settings that are not off."""
    return {name: value for name, value in sampling_of(holder).items() if value != OFF[name]}


def told_sampling(holder: Any, before: str = "") -> str:
    """Format the settings that are on, such as "top_p 0.9", after `before`; "" when all are off."""
    told = ", ".join(f"{name} {value:g}" for name, value in switched_on(holder).items())
    return before + told if told else ""
