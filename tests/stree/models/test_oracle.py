"""The model against the fp64 recurrent oracle: training forward, prefill, step, tree, commit.

Tolerances are relative to the largest logit. fp64: 1e-9, room for sums taken in another order and
nothing else (seen: 2e-14). fp32: 1e-4, the parity that is promised (seen: 4e-6).
"""

import numpy as np
import oracle
import pytest
import torch
from lanes import quick_first
from torch import nn

from stree.models.config import HybridConfig
from stree.models.model import HybridModel
from stree.trees.token_tree import TokenTree

CHUNK = 8
VOCAB = 41
PRECISIONS = {"fp64": (torch.float64, 1e-9), "fp32": (torch.float32, 1e-4)}

ATTENTION = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope_theta": 1000.0}
MAMBA_IN_LLAMA = {
    "num_ssm_heads": 4, "ssm_head_dim": 8, "d_state": 8,
    "num_x_groups": 2, "num_b_groups": 2, "num_c_groups": 4, "gated_norm_groups": 4,
}
MAMBA2 = {
    "num_ssm_heads": 6, "ssm_head_dim": 4, "d_state": 10,
    "num_x_groups": 6, "num_b_groups": 3, "num_c_groups": 3, "gated_norm_groups": 3,
}
LLAMA3_SCALING = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def config(**values):
    return HybridConfig(vocab_size=VOCAB, d_model=24, chunk_size=CHUNK, **values)


CONFIGS = {
    "half-attention": config(
        num_layers=4, attn_layers=(0, 3), intermediate_size=20, **ATTENTION, **MAMBA_IN_LLAMA
    ),
    "attention-only-llama3-rope": config(
        num_layers=2, attn_layers=(0, 1), intermediate_size=20, rope_scaling=LLAMA3_SCALING,
        **ATTENTION,
    ),
    "pure-mamba-with-mlp": config(num_layers=2, intermediate_size=20, **MAMBA_IN_LLAMA),
    "repeat-before-conv-tied": config(
        num_layers=2, attn_layers=(1,), intermediate_size=20, repeat_before_conv=True,
        tie_embeddings=True, **ATTENTION, **MAMBA_IN_LLAMA,
    ),
    "mamba2-no-mlp-groups": config(num_layers=3, gated_norm_eps=1e-3, **MAMBA2),
    "mamba2-no-conv-bias-dt-limit": config(
        num_layers=2, conv_bias=False, d_conv=3, dt_limit=(0.2, 0.9), **MAMBA2
    ),
}


def random_model(config):
    """Return an fp64 model with weights so large that every part of it shows in the logits."""
    torch.manual_seed(0)
    model = HybridModel(config).to(torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("A_log"):
                parameter.uniform_(-2.0, 1.0)
            elif parameter.dim() == 1:
                parameter.normal_()
            else:
                fan_in = 1 if "embed" in name else parameter[0].numel()
                nn.init.normal_(parameter, std=fan_in**-0.5)
    return model.eval()


def weights_of(model):
    return {name: value.double().numpy() for name, value in model.state_dict().items()}


def assert_close(got, wanted, tolerance):
    wanted = torch.as_tensor(wanted)
    assert got.shape == wanted.shape
    error = (got.double() - wanted).abs().max() / wanted.abs().max()
    assert error <= tolerance, f"relative error {error:.1e}, wanted at most {tolerance:.0e}"


@pytest.fixture(scope="module", params=CONFIGS)
def reference(request):
    """Return an fp64 model, its weights, tokens, and the oracle's logits after each of them."""
    torch.manual_seed(1)
    tokens = torch.randint(VOCAB, (2 * CHUNK + 3,))
    model = random_model(CONFIGS[request.param])
    weights = weights_of(model)
    return model, weights, tokens, oracle.logits_of_sequence(model.config, weights, tokens)


def in_precision(reference, dtype):
    model = HybridModel(reference[0].config).to(dtype)
    model.load_state_dict(reference[0].state_dict())
    return model.eval()


LENGTHS = [1, 2, 3, 4, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3]


@pytest.mark.quick(6)
@pytest.mark.parametrize("precision", PRECISIONS)
@torch.no_grad()
def test_training_forward_and_prefill_in_one_piece_and_in_several(reference, precision):
    dtype, tolerance = PRECISIONS[precision]
    _, _, tokens, wanted = reference
    model = in_precision(reference, dtype)
    for length in LENGTHS:
        assert_close(model(tokens[None, :length])[0], wanted[:length], tolerance)
        for piece in (2048, 5):
            cache = model.new_cache(max_length=32, max_nodes=1)
            logits = model.prefill(tokens[None, :length], cache, chunk=piece)
            assert_close(logits[0], wanted[length - 1], tolerance)


TREES = [
    TokenTree.paper(), TokenTree.chain(0), TokenTree.chain(4), TokenTree.chain(0),
    TokenTree((-1, 0, 0, 1, 2, 2, 0, 4, 7, 8)),
]


@pytest.mark.quick(6)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "prompt", quick_first([(CHUNK,)], [(2,), (CHUNK - 1,), (CHUNK + 1,)], [(1,), (3,)])
)
def test_trees_one_after_another(reference, precision, prompt):
    """Each tree sees exactly what earlier trees' accepted paths committed."""
    dtype, tolerance = PRECISIONS[precision]
    _, weights, tokens, _ = reference
    model = in_precision(reference, dtype)
    cache = model.new_cache(max_length=64, max_nodes=13)
    model.prefill(tokens[None, :prompt], cache)
    committed = tokens[:prompt].tolist()
    chooser = np.random.default_rng(prompt)
    for tree in TREES:
        nodes = torch.from_numpy(chooser.integers(VOCAB, size=tree.num_nodes))
        logits = model.tree_forward(nodes[None], tree, cache)
        wanted = oracle.logits_of_tree(model.config, weights, committed, nodes, tree.parents)
        assert_close(logits[0], wanted, tolerance)
        path = oracle.path_to(int(chooser.integers(tree.num_nodes)), tree.parents)
        cache.commit(path)
        committed += nodes[path].tolist()


@pytest.mark.parametrize("part", ["rope_theta", "dt_limit", "gated_norm_groups", "d_conv"])
@torch.no_grad()
def test_the_oracle_notices(part):
    """Each of these changes alone moves the oracle away from the model."""
    name, value = {
        "rope_theta": ("half-attention", 2000.0),
        "dt_limit": ("mamba2-no-conv-bias-dt-limit", (0.0, 0.9)),
        "gated_norm_groups": ("mamba2-no-mlp-groups", 1),
        "d_conv": ("pure-mamba-with-mlp", 3),
    }[part]
    model = random_model(CONFIGS[name])
    tokens = torch.arange(12)
    wanted = oracle.logits_of_sequence(
        model.config.replace(**{part: value}), weights_of(model), tokens
    )
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(model(tokens[None])[0], wanted, 1e-3)


@torch.no_grad()
def test_a_config_set_later_holds_in_every_pass():
    """Whole sequences, prompts and trees rotate alike, as the config says that was set last."""
    model = random_model(CONFIGS["half-attention"])
    model.config = model.config.replace(rope_theta=2000.0)
    tokens, tree = torch.arange(12), TokenTree.chain(2)
    wanted = oracle.logits_of_sequence(model.config, weights_of(model), tokens)
    assert_close(model(tokens[None])[0], wanted, 1e-9)
    cache = model.new_cache(max_length=16, max_nodes=tree.num_nodes)
    assert_close(model.prefill(tokens[None, :9], cache)[0], wanted[8], 1e-9)
    assert_close(model.tree_forward(tokens[None, 9:], tree, cache)[0], wanted[9:], 1e-9)
