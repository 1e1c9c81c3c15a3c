"""Tiny EAGLE-3 heads with random weights, in both published layouts; the oracle of their logits.

The oracle is written after SafeAILab's eagle/model/cnets.py and vLLM's llama_eagle3.py, with
transformers' own layers.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from families import random_reference
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

VOCAB = 8  # so few that random drafts are accepted
DRAFT_TOKENS = [0, 1, 3, 4, 6, 7]  # of a head over a part of the vocabulary
NORM_KEYS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


class EagleHead(nn.Module):
    """One layer over [norm(embedding), norm(hidden)], and a head over some tokens."""

    def __init__(
        self, config: LlamaConfig | Qwen3Config, layers: list[int], width: int, tokens: list[int],
        options: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        inner, self.options, self.layers_read = config.hidden_size, options, layers
        self.config, self.tokens = config, tokens
        is_qwen = config.model_type == "qwen3"
        self.midlayer = (Qwen3DecoderLayer if is_qwen else LlamaDecoderLayer)(config, 0)
        attention = self.midlayer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(attention, name).out_features
            setattr(attention, name, nn.Linear(2 * inner, outputs, bias=False))
        eps = config.rms_norm_eps
        self.midlayer.hidden_norm = LlamaRMSNorm(inner, eps)
        self.fc = nn.Linear(len(layers) * width, inner, bias=False)
        if "norm_before_fc" in options:
            self.input_norm = LlamaRMSNorm(len(layers) * width, eps)
        if "fc_norm" in options:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(width, eps) for _ in layers)
        self.norm = LlamaRMSNorm(inner, eps)
        self.lm_head = nn.Linear(inner, len(tokens), bias=False)
        self.rotary = LlamaRotaryEmbedding(config)

    def combined(self, streams: list[Tensor]) -> Tensor:
        if "fc_norm" in self.options:
            streams = [norm(each) for norm, each in zip(self.fc_norm, streams, strict=True)]
        features = torch.cat(streams, -1)
        return self.fc(self.input_norm(features) if "norm_before_fc" in self.options else features)

    def forward(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (1, T, V), and the hidden states (1, T, D) that drafts go on from."""
        layer, count = self.midlayer, hidden.shape[1]
        normed = layer.hidden_norm(hidden)
        residual = normed if "norm_before_residual" in self.options else hidden
        both = torch.cat([layer.input_layernorm(embedded), normed], -1)
        mask = torch.full((count, count), -torch.inf, dtype=hidden.dtype).triu(1)[None, None]
        y, _ = layer.self_attn(
            both, position_embeddings=self.rotary(both, torch.arange(count)[None]),
            attention_mask=mask,
        )
        hidden = residual + y
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        normed = self.norm(hidden)
        own = self.lm_head(normed)
        logits = own.new_full((*own.shape[:-1], self.config.vocab_size), -torch.inf)
        logits[..., self.tokens] = own
        return logits, normed if "norm_output" in self.options else hidden


def random_target(family: str) -> PreTrainedModel:
    """Return a random target: one of `families`, or a Llama of 8 layers."""
    if family != "llama-8":
        return random_reference(family, 0, VOCAB)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=1,
    )
    model = LlamaForCausalLM(config).eval()
    for tensor in model.parameters():
        if tensor.dim() > 1:
            nn.init.normal_(tensor, std=0.6 * tensor.shape[-1] ** -0.5)
    return model


@torch.no_grad()
def save_head(
    folder: Path, target: PreTrainedModel, *, speculators: bool = False, kind: str = "llama",
    layers: list[int] | None = None, options: tuple[str, ...] = (), whole_head: bool = False,
    own_embedding: bool = False, seed: int = 3,
) -> EagleHead:
    """Write a head of a target to a folder, in SafeAILab's or in speculators' layout.

    layers are the numbers of the config, the layers whose inputs are read; None leaves them to the
    layout. whole_head has all tokens, own_embedding brings an embedding with the head.
    """
    width, count = target.config.hidden_size, target.config.num_hidden_layers
    vocab = target.config.vocab_size
    sizes = dict(
        vocab_size=vocab, hidden_size=width, intermediate_size=3 * width // 2,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        rms_norm_eps=1e-5, max_position_embeddings=256, attn_implementation="eager",
    )
    config = (Qwen3Config if kind == "qwen3" else LlamaConfig)(**sizes)
    tokens = list(range(vocab)) if whole_head else DRAFT_TOKENS
    read = layers or [2, count // 2, count - 3]
    torch.manual_seed(seed)
    head = EagleHead(config, read, width, tokens, options).eval()
    for name, tensor in head.named_parameters():
        if tensor.dim() == 1:
            tensor.uniform_(0.5, 1.5)
        else:
            gain = 2.0 if name == "lm_head.weight" else 1.0
            tensor.normal_(std=gain * tensor.shape[-1] ** -0.5)
    head.embedding = [target.get_input_embeddings()]  # in a list: no parameter of the head
    stored = {
        name: tensor.contiguous() for name, tensor in head.state_dict().items()
        if not name.startswith("rotary.")
    }
    if own_embedding:
        head.embedding = [nn.Embedding(vocab, width)]
        stored["embed_tokens.weight"] = head.embedding[0].weight.data
    if not whole_head:
        ids = torch.tensor(tokens)
        stored["d2t"] = ids - torch.arange(len(tokens))
        stored["t2d"] = torch.isin(torch.arange(vocab), ids)
    if speculators:
        stored = {name.replace("midlayer.", "layers.0."): each for name, each in stored.items()}
    own_keys = dict.fromkeys(options, True)
    if layers is not None:
        own_keys["eagle_aux_hidden_state_layer_ids"] = layers
    plain = {**{name: size for name, size in sizes.items() if name != "attn_implementation"},
             "model_type": kind, "hidden_act": "silu", "tie_word_embeddings": False}
    if speculators:
        written = {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
            "speculators_version": "0.3.0", "draft_vocab_size": len(tokens),
            "target_hidden_size": None, "embed_requires_grad": False,
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "target"}},
            "transformer_layer_config": plain, **own_keys,
        }
    else:
        written = {
            "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(tokens),
            "torch_dtype": "float16", **plain, **own_keys,
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(written))
    save_file(stored, folder / "model.safetensors")
    return head


@torch.no_grad()
def head_logits(
    target: PreTrainedModel, head: EagleHead, tokens: Tensor, num_certain: int
) -> Tensor:
    """Return the head's logits (T − num_certain + 1, V) after each of the last tokens (1, T).

    It reads the first `num_certain` tokens with the target's hidden states, others with its own.
    """
    certain = target.model(tokens[:, :num_certain], use_cache=False, output_hidden_states=True)
    streams = [certain.hidden_states[layer][:, :-1] for layer in head.layers_read]
    hidden, logits = head.combined(streams), []
    for stop in range(num_certain, tokens.shape[1] + 1):
        out, own = head(head.embedding[0](tokens[:, 1:stop]), hidden)
        logits.append(out[:, -1])
        hidden = torch.cat([hidden, own[:, -1:]], 1)
    return torch.cat(logits)
