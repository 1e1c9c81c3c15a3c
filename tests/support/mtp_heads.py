"""Tiny checkpoints with a random MTP head; transformers' own class of such heads is the oracle."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from families import random_reference
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock

VOCAB = 8  # so few that random drafts are accepted
PUBLISHED = {  # names of Qwen's checkpoints, after those of `MtpModel`
    "enorm.": "pre_fc_norm_embedding.", "hnorm.": "pre_fc_norm_hidden.", "eh_proj.": "fc.",
    "post_norm.": "norm.", "mtp_block.": "layers.0.",
}


class NemotronHead(torch.nn.Module):
    """A head of NemotronH's blocks, after vLLM's NemotronHMultiTokenPredictor."""

    def __init__(self, target: PreTrainedModel) -> None:
        super().__init__()
        config, norm = copy.deepcopy(target.config), type(target.model.norm_f)
        config.layers_block_type = config.mtp_layers_block_type
        width, eps = config.hidden_size, config.layer_norm_epsilon
        self.layers = torch.nn.ModuleList(NemotronHBlock(config, layer) for layer in range(2))
        self.layers[0].enorm, self.layers[0].hnorm = norm(width, eps), norm(width, eps)
        self.layers[0].eh_proj = torch.nn.Linear(2 * width, width, bias=False)
        self.layers[1].final_layernorm = norm(width, eps)
        self.embeddings, self.shared_head = [target.get_input_embeddings()], target.lm_head

    def forward_layer(
        self, layer: int, hidden: Tensor, positions: Tensor, cache: None, input_ids: Tensor
    ) -> Tensor:
        first, last = self.layers
        x = torch.cat([first.enorm(self.embeddings[0](input_ids)), first.hnorm(hidden)], -1)
        return last.final_layernorm(last(first(first.eh_proj(x))))


def random_head(target: PreTrainedModel, seed: int = 0) -> MtpModel | NemotronHead:
    """Return a head with random weights: of transformers' class, or `NemotronHead`."""
    torch.manual_seed(seed)
    if target.config.model_type == "nemotron_h":
        head = NemotronHead(target)
        with torch.no_grad():
            for name, tensor in head.layers.named_parameters():
                tensor.normal_(std=1.2 * tensor.shape[-1] ** -0.5)
                if "norm" in name:
                    tensor.uniform_(0.5, 1.5)
        return head.eval()
    target.config.num_mtp_layers, target.config.mtp_layer_types = 1, ["full_attention"]
    head = MtpModel(target, 1)
    norm, layer = target.model.norm, head.layers[0]
    for name in ("enorm", "hnorm", "post_norm"):  # it takes the norm's class from the last layer
        setattr(layer, name, type(norm)(target.config.hidden_size, target.config.rms_norm_eps))
    with torch.no_grad():
        for name, tensor in published(head).items():
            if name.endswith("norm.weight") or "norm_" in name:
                tensor.uniform_(-0.5, 0.5)
            else:
                tensor.normal_(std=1.2 * tensor.shape[-1] ** -0.5)
    return head.eval()


def published(head: MtpModel | NemotronHead) -> dict[str, Tensor]:
    """Return the head's tensors by their names in a published checkpoint."""
    if isinstance(head, NemotronHead):
        return {f"mtp.layers.{name}": each for name, each in head.layers.state_dict().items()}
    tensors = {}
    for name, tensor in head.layers[0].state_dict().items():
        part = next(part for part in PUBLISHED if name.startswith(part))
        tensors["mtp." + PUBLISHED[part] + name.removeprefix(part)] = tensor
    return tensors


def save_with_head(
    folder: Path, family: str, seed: int, *, apart: bool = False, vocab: int = VOCAB
) -> tuple[PreTrainedModel, MtpModel | NemotronHead]:
    """Save a random target with a random head, in one file or apart in mtp.safetensors."""
    target = random_reference(family, seed, vocab)
    if family == "nemotron":
        target.config.num_nextn_predict_layers = 1
    target.save_pretrained(folder)
    head = random_head(target)
    tensors = {name: tensor.contiguous() for name, tensor in published(head).items()}
    if not apart:
        tensors |= load_file(folder / "model.safetensors")
    save_file(tensors, folder / ("mtp.safetensors" if apart else "model.safetensors"))
    return target, head


@torch.no_grad()
def head_logits(
    target: PreTrainedModel, head: MtpModel | NemotronHead, tokens: Tensor, num_certain: int
) -> Tensor:
    """Return the head's logits (T − num_certain + 1, V) after each of the last tokens (1, T).

    It reads the first `num_certain` tokens with the target's hidden states, others with its own.
    """
    certain = target.model(tokens[:, :num_certain], use_cache=False)
    hidden = certain.last_hidden_state[:, :-1]  # after the final norm
    logits = []
    for stop in range(num_certain, tokens.shape[1] + 1):
        read = tokens[:, 1:stop]
        positions = torch.arange(1, stop)[None]
        own = head.forward_layer(0, hidden, positions, None, input_ids=read)
        logits.append(head.shared_head(own[:, -1]))
        hidden = torch.cat([hidden, own[:, -1:]], 1)
    return torch.cat(logits)
