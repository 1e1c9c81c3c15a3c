"""The table of names and shapes of weights; the oracle is the `state_dict` of the model itself."""

import json

import pytest
import torch
from families import LAYOUTS, random_reference

from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.configs import checkpoint_config_of
from stree.models.config import HybridConfig
from stree.models.config.weights import weight_shapes
from stree.models.model import HybridModel

ATTENTION = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "intermediate_size": 24}
MAMBA = {
    "num_ssm_heads": 4, "ssm_head_dim": 8, "d_state": 16, "num_x_groups": 2, "num_b_groups": 1,
    "num_c_groups": 1,
}
SMALL = HybridConfig(64, d_model=16, num_layers=2, attn_layers=(1,), **ATTENTION, **MAMBA)
CONFIGS = {
    "part of a vocabulary": SMALL.replace(head_vocab_size=9),
    "low rank": SMALL.replace(head_rank=4),
    "features": SMALL.reading((0, 1), SMALL),
    "own features": SMALL.reading((1,), SMALL, own=True),
    "mtp": SMALL.mtp_head(["attention mlp"]),
    "eagle": SMALL.eagle_head((0, 1)),
    "eagle with norms": SMALL.eagle_head((0, 1)).replace(eagle_norms=("each", "residual", "own")),
    "repeated before conv": SMALL.replace(repeat_before_conv=True, gated_norm="gate"),
}


def require_equal(config):
    with torch.device("meta"):
        state = HybridModel(config).state_dict()
    wanted = [(name, tuple(tensor.shape)) for name, tensor in state.items()]
    assert list(weight_shapes(config).items()) == wanted


@pytest.mark.parametrize("name", CONFIGS)
def test_it_has_the_weights_of_each_model(name):
    require_equal(CONFIGS[name])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", LAYOUTS)
def test_it_has_the_weights_of_each_family(family, seed, tmp_path):
    text = random_reference(family, seed).config.to_json_string()
    require_equal(checkpoint_config_of(CheckedJson(json.loads(text), tmp_path)).model)
