"""Plan the head for multi-token prediction that a published checkpoint carries, as a drafter."""

from __future__ import annotations

import os
from pathlib import Path

from stree.checkpoints.configs import CheckpointConfig, read_checkpoint_config
from stree.checkpoints.plan.load_plan import LoadPlan, plan_head
from stree.checkpoints.plan.stored import stored_tensors
from stree.common.errors import CheckpointRefused

MTP_FILE = "mtp.safetensors"  # in which quantised and merged checkpoints may keep the MTP head
_LENT = ("model.embed_tokens.", "lm_head.", "model.features.target_norm.")  # by the target


def plan_mtp(path: str | os.PathLike[str]) -> LoadPlan:
    """Return the plan of loading the MTP head of a checkpoint folder, as a drafter.

    Its tensors are in the checkpoint's own files, or in MTP_FILE. Embedding, head and final norm
    are lent by the target (`share_ends`). Raises as `plan_model` does, and
    CheckpointRefused for a checkpoint without such a head, or of a family whose head is not known.
    """
    directory = Path(path)
    checkpoint = read_mtp_config(directory)
    stored = stored_tensors(directory, MTP_FILE)
    mtp = {name: each for name, each in stored.items() if name.startswith("mtp.")}
    if not mtp:
        raise CheckpointRefused(
            f"{directory} holds no MTP head (mtp.*), whatever its config announces: copy "
            f"{MTP_FILE} or the shards with mtp.* of the published checkpoint, or take another "
            "drafter"
        )
    return plan_head(directory, checkpoint, mtp, _LENT)


def read_mtp_config(path: str | os.PathLike[str]) -> CheckpointConfig:
    """Return the config of the MTP head of a checkpoint folder. Raises as `plan_mtp` does."""
    checkpoint = read_checkpoint_config(Path(path))
    if checkpoint.mtp is None:
        raise CheckpointRefused(
            f"{path} is of the layout {checkpoint.layout.name}, of which no MTP head is known: "
            "take another drafter"
        )
    return checkpoint.mtp()
