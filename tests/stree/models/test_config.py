"""Architectures that cannot be are refused with the number to change."""

from __future__ import annotations

import pytest
from toys import tiny_config

from stree.errors import UsageError
from stree.models.config import HybridConfig


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"d_conv": 1}, "d_conv is 1, .* at least 2"),
        ({"d_conv": 0}, "d_conv is 0"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"attn_layers": (3,)}, "distinct layer indices"),
        ({"num_kv_heads": 3}, "no multiple of num_kv_heads"),
        ({"head_dim": 7}, "needs it even"),
        ({"d_state": 0}, "set d_state above 0"),
    ],
)
def test_numbers_that_do_not_fit_are_named(changes, complaint):
    with pytest.raises(UsageError, match=complaint):
        tiny_config(**changes)


def test_attention_alone_needs_no_convolution():
    assert tiny_config(attn_layers=(0, 1, 2), d_conv=0).d_conv == 0


def test_unknown_keys_are_named():
    with pytest.raises(UsageError, match=r"\['width'\]; known: \["):
        HybridConfig.from_dict({"vocab_size": 8, "width": 3})
