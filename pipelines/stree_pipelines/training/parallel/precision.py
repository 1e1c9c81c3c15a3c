"""Name the number formats of a training: fp32, or bf16 products over fp32 weights."""

from __future__ import annotations

import torch

from stree.common.errors import UsageError

AUTOCAST = {"32-true": None, "bf16-mixed": torch.bfloat16}
_SHORT_NAMES = {"None": "32-true", "32": "32-true", "bf16": "bf16-mixed"}


def supported_precision(given: str | int | None) -> str:
    """Return the full name of trainer.precision.

    Raises UsageError for formats that would train wrongly.
    """
    name = _SHORT_NAMES.get(str(given), str(given))
    if name not in AUTOCAST:
        raise UsageError(
            f"trainer.precision is {name}, wanted {' or '.join(AUTOCAST)}: weights, moments and "
            "losses are fp32 here, and the loss makes its gradients before a loss scale could keep "
            "them from vanishing in fp16"
        )
    return name
