"""Tiny checkpoints with a random MTP head; transformers' own class of such heads is the oracle."""

from __future__ import annotations

from pathlib import Path

import torch
from families import random_reference
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

VOCAB = 8  # so few that random drafts are accepted
PUBLISHED = {  # names of Qwen's checkpoints
    "enorm.": "pre_fc_norm_embedding.", "hnorm.": "pre_fc_norm_hidden.", "eh_proj.": "fc.",
    "post_norm.": "norm.", "mtp_block.": "layers.0.",
}


def random_head(target: PreTrainedModel, seed: int = 0) -> MtpModel:
    """Return transformers' head of one layer with attention, with random weights."""
    target.config.num_mtp_layers, target.config.mtp_layer_types = 1, ["full_attention"]
    head = MtpModel(target, 1)
    norm, layer = target.model.norm, head.layers[0]
    for name in ("enorm", "hnorm", "post_norm"):  # it takes the norm's class from the last layer
        setattr(layer, name, type(norm)(target.config.hidden_size, target.config.rms_norm_eps))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, tensor in published(head).items():
            if name.endswith("norm.weight") or "norm_" in name:
                tensor.uniform_(-0.5, 0.5)
            else:
                tensor.normal_(std=1.2 * tensor.shape[-1] ** -0.5)
    return head.eval()


def published(head: MtpModel) -> dict[str, Tensor]:
    """Return the head's tensors by their names in a published checkpoint."""
    tensors = {}
    for name, tensor in head.layers[0].state_dict().items():
        part = next(part for part in PUBLISHED if name.startswith(part))
        tensors["mtp." + PUBLISHED[part] + name.removeprefix(part)] = tensor
    return tensors


def save_with_head(
    folder: Path, family: str, seed: int, *, apart: bool = False
) -> tuple[PreTrainedModel, MtpModel]:
    """Save a random target with a random head, in one file or apart in mtp.safetensors."""
    target = random_reference(family, seed, VOCAB)
    target.save_pretrained(folder)
    head = random_head(target)
    tensors = {name: tensor.contiguous() for name, tensor in published(head).items()}
    if not apart:
        tensors |= load_file(folder / "model.safetensors")
    save_file(tensors, folder / ("mtp.safetensors" if apart else "model.safetensors"))
    return target, head


@torch.no_grad()
def head_logits(
    target: PreTrainedModel, head: MtpModel, tokens: Tensor, num_certain: int
) -> Tensor:
    """Return the head's logits (T − num_certain + 1, V) after each of the last tokens (1, T).

    It reads the first `num_certain` tokens with the target's hidden states, others with its own.
    """
    hidden = target(
        tokens[:, :num_certain], output_hidden_states=True, use_cache=False
    ).hidden_states[-1][:, :-1]
    logits = []
    for stop in range(num_certain, tokens.shape[1] + 1):
        read = tokens[:, 1:stop]
        positions = torch.arange(1, stop)[None]
        own = head.forward_layer(0, hidden, positions, None, input_ids=read)
        logits.append(head.shared_head(own[:, -1]))
        hidden = torch.cat([hidden, own[:, -1:]], 1)
    return torch.cat(logits)
