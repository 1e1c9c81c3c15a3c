"""GPT-NeoX (Pythia): attention and an MLP side by side or in turn, LayerNorms with a bias.

A LayerNorm is an RMS norm of the stream less its mean over channels. All that is added to the
stream is stored less its mean, so that the stream has none; scale and bias of a norm go into the
projections that read it. Only the last norm keeps its own, because the head has no bias.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from stree.checkpoints import config_parts
from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.names import Names, in_layers
from stree.checkpoints.sources import Layout, Rename, Source, as_stored, named, rotary_order
from stree.models.config import HybridConfig

if TYPE_CHECKING:
    from torch import Tensor

ROTARY_SHARE = 0.25
PARTS_OF_QKV = ("q_proj", "k_proj", "v_proj")  # of each head, in this order
QKV = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
QKV_BIAS = ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
NAMES = Names(
    {
        "model.embed_in": "model.embed_tokens",
        "model.final_layer_norm": "model.norm",
        "embed_out": "lm_head",
        "lm_head": "lm_head",  # as newer versions of transformers name it once it is loaded
        **in_layers({
            "attention.query_key_value.weight": (*QKV, *QKV_BIAS),
            "input_layernorm.weight": ("input_layernorm.weight", *QKV),
            "input_layernorm.bias": QKV_BIAS,
            "attention.query_key_value.bias": QKV_BIAS,
            "attention.dense.weight": ("self_attn.o_proj.weight", "self_attn.o_proj.bias"),
            "attention.dense.bias": "self_attn.o_proj.bias",
            "mlp.dense_h_to_4h.weight": ("mlp.up_proj.weight", "mlp.up_proj.bias"),
            "post_attention_layernorm.weight": (
                "post_attention_layernorm.weight", "mlp.up_proj.weight",
            ),
            "post_attention_layernorm.bias": "mlp.up_proj.bias",
            "mlp.dense_h_to_4h.bias": "mlp.up_proj.bias",
            "mlp.dense_4h_to_h": "mlp.down_proj",
        }),
    },
    prefix="gpt_neox.",
)
BUFFERS = re.compile(r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)")


def spec(values: CheckedJson) -> HybridConfig:
    values.require(hidden_act="gelu")
    d_model = values.integer("hidden_size")
    num_heads = values.integer("num_attention_heads", 64)
    head_dim = config_parts.quotient(values, d_model, "num_attention_heads", num_heads)
    values.require(num_key_value_heads=num_heads, head_dim=head_dim)
    common = config_parts.decoder(values, positions=2048, num_heads=64)
    parallel = values.boolean("use_parallel_residual", True)
    values.boolean("attention_bias", True)
    return HybridConfig(
        **{**common, "tie_embeddings": False},  # the embedding is stored less its mean
        layer_types=("attention+mlp" if parallel else "attention mlp",) * common["num_layers"],
        intermediate_size=values.integer("intermediate_size", 24576),
        rms_norm_eps=values.number("layer_norm_eps", 1e-5),
        final_norm_bias=True,
        attention_bias=True,
        mlp_kind="gelu",
        mlp_bias=True,
        **config_parts.rope(
            values, usual_theta=values.number("rotary_emb_base", 10000.0), head_dim=head_dim,
            usual_share=values.number("rotary_pct", ROTARY_SHARE),
        ),
    )


def rename(values: CheckedJson, config: HybridConfig, stored: Collection[str]) -> Rename:
    order, d_model, inner = rotary_order(config), config.d_model, config.intermediate_size
    tied = values.boolean("tie_word_embeddings", False)
    biased = values.boolean("attention_bias", True)

    def of_qkv(part: str) -> Callable[[Tensor], Tensor]:
        index = PARTS_OF_QKV.index(part)
        in_order = order if part != "v_proj" else lambda tensor: tensor

        def cut(tensor: Tensor) -> Tensor:
            heads = tensor.unflatten(0, (config.num_heads, 3, -1))
            return in_order(heads[:, index].flatten(0, 1))

        return cut

    def reading(name: str) -> Source:
        """Return the source of a projection that reads a norm, with the norm's scale and bias."""
        *_, projection, leaf = name.split(".")
        fused, places = projection in PARTS_OF_QKV, tuple(NAMES.published(name))
        cut = of_qkv(projection) if fused else as_stored
        shape = (3 * d_model, d_model) if fused else (inner, d_model)
        if leaf == "weight":

            def scaled(weight: Tensor, scale: Tensor) -> Tensor:
                return cut(weight).double() * scale.double()

            return Source(places, scaled, splits=((shape, (d_model,)),))

        def bias(weight: Tensor, shift: Tensor, *own: Tensor) -> Tensor:
            shifted = cut(weight).double() @ shift.double()
            return shifted + cut(own[0]) if own else shifted

        if fused and not biased:
            return Source(places[:2], bias, splits=((shape, (d_model,)),))
        return Source(places, bias, splits=((shape, (d_model,), shape[:1]),))

    def source(name: str) -> Source:
        if name.endswith("layernorm.weight"):
            (place,) = NAMES.published(name)
            return Source((place,), lambda scale: scale.new_ones(scale.shape))
        if re.search(r"\.(q|k|v|up)_proj\.", name):
            return reading(name)
        if name == "lm_head.weight":
            if not tied:
                return named(NAMES, name, config, stored)
            (place,) = NAMES.published("model.embed_tokens.weight")
            return Source((place,), copies=tuple(NAMES.published(name)))
        first, *others = NAMES.published(name)
        if ".o_proj.bias" in name and not biased:
            shape = (d_model, d_model)
            return Source((first,), lambda weight: weight.new_zeros(d_model), shape)
        (place,) = others or [first]  # o_proj's bias is published as its weight, or a bias
        if name == "model.embed_tokens.weight":
            return Source((place,), lambda tensor: _centred(tensor, 1))
        if ".o_proj." in name or ".down_proj." in name:
            return Source((place,), lambda tensor: _centred(tensor, 0))
        return Source((place,))

    return source


def _centred(tensor: Tensor, dim: int) -> Tensor:
    """Return what is added to the stream, less its mean over the stream's channels."""
    wide = tensor.double()
    return wide - wide.mean(dim, keepdim=True)


LAYOUT = Layout(
    "GPT-NeoX", ("gpt_neox",), spec, rename, frozenset({"classifier_dropout", "is_decoder"}),
    BUFFERS,
)
