"""Tables of names: each tensor of ours has the published names that its layout's table says."""

import torch

from stree.checkpoints.names import Names, in_layers
from stree.checkpoints.sources import named
from stree.models.config import HybridConfig

NAMES = Names(
    {
        "model.norm_f": "model.norm",
        **in_layers({
            "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj"),
            "moe.gate": "experts.router",
            "moe.up": "experts.up",
            "moe.*.w1.weight": "experts.up",
            "moe.*.w3.weight": "experts.up",
            "moe.gate.bias": "experts.correction_bias",
        }),
    },
    "backbone.",
)
CONFIG = HybridConfig(
    9, d_model=3, num_layers=13, layer_types=("mlp experts",) * 13, intermediate_size=2,
    num_experts=2, experts_per_token=1, expert_intermediate_size=5,
)
LAYER = "backbone.layers.12.moe"


def test_published_names():
    layer = "model.layers.12."
    assert NAMES.published("model.norm.weight") == ["backbone.norm_f.weight"]
    assert NAMES.published("lm_head.weight") == ["lm_head.weight"]
    assert NAMES.published("model.embed_tokens.weight") == ["backbone.embed_tokens.weight"]
    for ours in ("self_attn.q_proj.bias", "self_attn.k_proj.bias"):
        assert NAMES.published(layer + ours) == ["backbone.layers.12.attn.qkv.bias"]
    assert NAMES.published(layer + "experts.correction_bias") == [f"{LAYER}.gate.bias"]
    assert NAMES.published(layer + "experts.up") == [
        f"{LAYER}.up", f"{LAYER}.*.w1.weight", f"{LAYER}.*.w3.weight",
    ]


def test_experts_that_are_stored_apart_are_joined():
    ours = "model.layers.12.experts.up"
    together = named(NAMES, ours, CONFIG, {f"{LAYER}.up"})
    assert (together.names, together.shape) == ((f"{LAYER}.up",), None)
    apart = named(NAMES, ours, CONFIG, {f"{LAYER}.0.w1.weight"})
    assert apart.names == tuple(
        f"{LAYER}.{expert}.{projection}.weight" for expert in (0, 1) for projection in ("w1", "w3")
    )
    assert apart.shape == (5, 3)
    stacked = apart.make(*(torch.full((5, 3), float(number)) for number in range(4)))
    assert stacked.shape == (2, 10, 3)
    assert stacked[:, ::5, 0].tolist() == [[0, 1], [2, 3]]
