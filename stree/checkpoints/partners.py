"""Check a drafter folder against a target folder: tokenizer, weights it was made for, context."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from stree.checkpoints.configs import load_config
from stree.checkpoints.load_save import weights_fingerprint
from stree.checkpoints.tokenizer import require_same_tokenizer
from stree.common.errors import CheckpointRefused, shown
from stree.common.files import MANIFEST_NAME, read_manifest

TARGET_WEIGHTS = "target_weights"  # the entry of a drafter's MANIFEST.json


def partner_remarks(
    target: str | os.PathLike[str], drafter: str | os.PathLike[str], max_length: int | None = None
) -> Iterator[str]:
    """Yield a sentence for each reason to doubt that the drafter suits the target.

    Text of files in it (a recorded hash, a folder's name) is safe to print.

    Args:
        target: The target's checkpoint folder.
        drafter: The drafter's checkpoint folder.
        max_length: Tokens of the longest sequence; None is as long as the target's positions.

    Raises:
        CheckpointRefused: When their tokenizers give other tokens (`require_same_tokenizer`).
    """
    longest, most = load_config(target).num_positions, load_config(drafter).num_positions
    if other_tokenizer := require_same_tokenizer(target, drafter):
        yield shown(other_tokenizer)
    if made_for := _other_weights(target, drafter):
        yield shown(made_for)
    length = min((each for each in (longest, max_length) if each is not None), default=None)
    if most is not None and (length is None or length > most):
        yield shown(
            f"the drafter {drafter} has {most} positions, sequences may have "
            f"{length or 'any number'}: beyond {most} tokens its drafts are accepted less often; "
            "keep sequences shorter, or use a drafter with a longer context"
        )


def require_made_for(target: str | os.PathLike[str], drafter: str | os.PathLike[str]) -> None:
    """Raise CheckpointRefused when the drafter records the weights of another target."""
    recorded = _recorded(drafter)
    if recorded is not None and (remark := _other_weights(target, drafter)):
        raise CheckpointRefused(remark)


def _other_weights(target: str | os.PathLike[str], drafter: str | os.PathLike[str]) -> str:
    recorded, weights = _recorded(drafter), weights_fingerprint(target)
    if recorded == weights:
        return ""
    if recorded is not None:
        return (
            f"the drafter {drafter} was made for other weights ({recorded[:12]}…) than those of "
            f"{target} ({weights[:12]}…): use a drafter that was distilled from this target"
        )
    if weights_fingerprint(drafter) == weights:  # the target, drafting for itself
        return ""
    return (
        f"the drafter {drafter} does not record its target's weights, so it may have been made for "
        f"others than those of {target}: distil it again to have them recorded"
    )


def _recorded(drafter: str | os.PathLike[str]) -> str | None:
    if not (Path(drafter) / MANIFEST_NAME).exists():
        return None
    recorded = read_manifest(Path(drafter)).get(TARGET_WEIGHTS)
    return recorded if isinstance(recorded, str) else None
