"""Slicing copies the right weights: cutting nothing away leaves the target's own function."""

from __future__ import annotations

import pytest
import torch

from stree.common.errors import UsageError
from stree.models.config import HybridConfig
from stree.models.model import HybridModel
from stree.models.slicing import drafter_config_from, layers_to_copy, slice_drafter


def make_target(attn_layers=(1, 3), tie_embeddings=True, num_layers=5) -> HybridModel:
    torch.manual_seed(0)
    return HybridModel(
        HybridConfig(
            vocab_size=50, d_model=32, num_layers=num_layers, attn_layers=attn_layers,
            intermediate_size=48, tie_embeddings=tie_embeddings,
            num_heads=4, num_kv_heads=2, head_dim=8,
            num_ssm_heads=4, ssm_head_dim=8, d_state=8,
            num_x_groups=2, num_b_groups=2, num_c_groups=4, gated_norm_groups=4,
        )
    )


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_all_layers_sliced_is_the_target(tie_embeddings):
    target = make_target(tie_embeddings=tie_embeddings)
    drafter = slice_drafter(target, range(5))
    tokens = torch.arange(24).reshape(2, 12)
    assert torch.equal(drafter(tokens), target(tokens))
    with torch.no_grad():
        drafter.head_weight.zero_()
    assert target.head_weight.any(), "the drafter must own its weights"


def test_chosen_layers_keep_kind_order_and_weights():
    target = make_target()
    drafter = slice_drafter(target, [4, 1])
    assert drafter.config.num_layers == 2
    assert drafter.config.attn_layers == (1,)
    theirs = target.model.layers
    ours = drafter.model.layers
    assert torch.equal(ours[0].mamba.in_proj.weight, theirs[4].mamba.in_proj.weight)
    assert torch.equal(ours[1].self_attn.q_proj.weight, theirs[1].self_attn.q_proj.weight)
    assert torch.equal(ours[1].mlp.up_proj.weight, theirs[1].mlp.up_proj.weight)


def test_default_is_the_first_and_last_mamba_layer():
    config = make_target().config
    assert layers_to_copy(config, None) == [0, 4]
    assert layers_to_copy(config, "first") == [0] and layers_to_copy(config, [3, 1]) == [3, 1]
    later = config.replace(attn_layers=(0, 1, 2, 3))
    assert layers_to_copy(later, "first") == [4]
    config = drafter_config_from(make_target(attn_layers=(0, 4)).config)
    assert config.attn_layers == () and config.num_layers == 2


def test_a_bf16_target_gives_an_fp32_drafter():
    target = make_target().to(torch.bfloat16)
    target.pack()  # its weights lie as decoding reads them, the drafter's do not
    drafter = slice_drafter(target, feature_layers=(1, 4))
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.float32}
    assert all(each.is_contiguous() and each.requires_grad for each in drafter.parameters())
    assert not all(each.is_contiguous() for each in target.parameters())


@pytest.mark.parametrize(
    ("layers", "message"),
    [([], "no layers"), ([0, 5], "layer 5"), ([-1], "layer -1"), ([2, 2], "twice")],
)
def test_wrong_layers_are_refused(layers, message):
    with pytest.raises(UsageError, match=message):
        slice_drafter(make_target(), layers)


def test_a_target_without_two_mamba_layers_needs_a_choice():
    with pytest.raises(UsageError, match="1 recurrent layers"):
        slice_drafter(make_target(attn_layers=(0, 1, 2, 3)))
