"""Load the head for multi-token prediction that a published checkpoint carries, as a drafter."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from stree.checkpoints.configs import CheckpointConfig, read_checkpoint_config
from stree.checkpoints.load_save import open_weights, read_weights
from stree.common.errors import CheckpointRefused
from stree.models.model import HybridModel

MTP_FILE = "mtp.safetensors"  # in which quantised and merged checkpoints may keep the MTP head
# Parameters of the drafter that are the target's, and one that no checkpoint has
_SHARED = ("model.embed_tokens.", "lm_head.", "model.features.target_norm.")
_UNKNOWN = "model.features.unknown"


@torch.inference_mode(False)
def load_mtp(
    path: str | os.PathLike[str], device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> HybridModel:
    """Load the head for multi-token prediction of a checkpoint folder, as a drafter.

    Its tensors are in the checkpoint's own files, or in MTP_FILE. Embedding, head and the target's
    final norm are still to be shared (`HybridModel.share_ends`).

    Raises as `load_model` does, before a tensor is read, and CheckpointRefused for a checkpoint
    without such a head, or of a family whose head is not known.
    """
    directory = Path(path)
    checkpoint = read_mtp_config(directory)
    with torch.device("meta"):
        model = HybridModel(checkpoint.model)
    expected = {
        name: tuple(tensor.shape) for name, tensor in model.state_dict().items()
        if not name.startswith((*_SHARED, _UNKNOWN))
    }
    with open_weights(directory, MTP_FILE) as stored:
        mtp = {name: each for name, each in stored.items() if name.startswith("mtp.")}
        if not mtp:
            raise CheckpointRefused(
                f"{directory} holds no MTP head (mtp.*), whatever its config announces: copy "
                f"{MTP_FILE} or the shards with mtp.* of the published checkpoint, or take another "
                "drafter"
            )
        weights = read_weights(checkpoint, model, expected, mtp, directory, device, dtype)
    weights[_UNKNOWN] = torch.zeros(checkpoint.model.d_model, device=device, dtype=dtype)
    model.load_state_dict(weights, strict=False, assign=True)
    return model.eval()


def read_mtp_config(path: str | os.PathLike[str]) -> CheckpointConfig:
    """Return the config of the MTP head of a checkpoint folder. Raises as `load_mtp` does."""
    checkpoint = read_checkpoint_config(Path(path))
    if checkpoint.mtp is None:
        raise CheckpointRefused(
            f"{path} is of the layout {checkpoint.layout.name}, of which no MTP head is known: "
            "take another drafter"
        )
    return checkpoint.mtp()
