"""How tokens are chosen beside the temperature, as settings and rows of an evaluation say it."""

from __future__ import annotations

from typing import Any

from stree.generation import GenerationConfig

# With the values that are off, which rows from before these settings were recorded have
OFF: dict[str, Any] = {
    name: getattr(GenerationConfig, name)
    for name in ("top_k", "top_p", "min_p", "repetition_penalty")
}


def sampling_of(holder: Any) -> dict[str, Any]:
    """{name: value} of settings, a row or a sample."""
    return {name: getattr(holder, name) for name in OFF}


def switched_on(holder: Any) -> dict[str, Any]:
    """Those that are not off."""
    return {name: value for name, value in sampling_of(holder).items() if value != OFF[name]}


def told_sampling(holder: Any, before: str = "") -> str:
    """ "top_p 0.9, repetition_penalty 1.1" behind `before`; nothing where all is off."""
    told = ", ".join(f"{name} {value:g}" for name, value in switched_on(holder).items())
    return before + told if told else ""
