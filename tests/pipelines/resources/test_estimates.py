"""Estimates of disk and memory are near what a run then takes.

Tolerances: a checkpoint has headers and a few counters beside its tensors, which a tiny model's
files show; activations are counted by the same hook on fake and on real tensors, so they are equal.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from dry_runs import CONFIG, bytes_under, evaluation_of, options_of
from families import random_reference
from in_8_bits import FLOAT8, write
from mtp_heads import save_with_head
from tiny_run import ARCHITECTURE

from stree.checkpoints.heads.mtp import plan_mtp
from stree.checkpoints.load_save import load_model, save_model
from stree.checkpoints.plan.build import build
from stree.checkpoints.tokenizer import load_tokenizer
from stree.drafters.names import DrafterName
from stree.models.cache import HybridCache
from stree.models.config import HybridConfig
from stree.models.model import HybridModel
from stree.models.slicing import drafter_config_from
from stree_lab import bench_training
from stree_pipelines.commands import distill, eval_spec
from stree_pipelines.resources import estimates
from stree_pipelines.resources.estimates import ModelPlan
from stree_pipelines.training import distillation
from stree_pipelines.training.hidden_states import FeatureConfig
from stree_pipelines.training.teachers.frozen_target import held_dtype

RESULTS = Path(__file__).parents[3] / "docs/results"
CONFIGS = Path(__file__).parents[3] / "configs"
MAMBA_KEYS = (
    "num_ssm_heads", "ssm_head_dim", "d_state", "num_x_groups", "num_b_groups", "num_c_groups"
)
ATTENTION_KEYS = ("num_heads", "num_kv_heads", "head_dim")
ATTENTION_ONLY = CONFIG.replace(attn_layers=(0, 1, 2, 3), **dict.fromkeys(MAMBA_KEYS, 0))
GATED_DELTA = CONFIG.replace(
    layer_types=("gated_delta mlp", "attention experts+shared_mlp"), num_layers=2, attn_layers=(),
    num_delta_heads=4, num_delta_key_heads=2, delta_key_dim=8, delta_value_dim=12,
    attention_gate=True, num_experts=4, experts_per_token=2, expert_intermediate_size=8,
    shared_intermediate_size=8, shared_gate=True,
)


# The estimates


def test_a_run_takes_the_disk_that_was_estimated(workspace, finished):
    drafter = HybridConfig(**{**ARCHITECTURE, "num_layers": 2, "attn_layers": []})
    parts = estimates.training_disk(
        drafter, saves=4, keep_last=2, exports=3, export_dtype=torch.float32,
        tokenizer=workspace / "target", logged_rows=10,
    )
    # One of the three is there only while the next is written.
    assert parts["checkpoints"] * 2 / 3 == pytest.approx(
        bytes_under(finished / "checkpoints"), rel=0.2
    )
    assert parts["exports"] == pytest.approx(bytes_under(finished / "drafter"), rel=0.1)
    logs = bytes_under(finished / "tensorboard") + (finished / "metrics.csv").stat().st_size
    assert logs / 2 < parts["logs"] < 3 * logs


@pytest.mark.costly
def test_an_evaluation_takes_at_most_the_disk_that_was_estimated(workspace, finished, capsys):
    eval_spec.main(evaluation_of(workspace, finished, "--dry_run"))
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("disk: "))
    value, unit = line.split()[1:3]
    assert unit == "KiB"
    eval_spec.main(evaluation_of(workspace, finished))
    taken = bytes_under(finished / "eval") / 1024
    assert taken < float(value) < 3 * taken
    eval_spec.main(evaluation_of(workspace, finished, "--dry_run"))
    assert "7 are there" in capsys.readouterr().out


def kept_bytes(model: HybridModel, dtype: torch.dtype | None = None) -> int:
    """Count what a forward pass of the model keeps for its backward pass, with real tensors."""
    tokens = torch.zeros(2, 48, dtype=torch.long)
    sizes, kept = {}, []

    def count(tensor):
        kept.append(tensor.untyped_storage())
        sizes[kept[-1].data_ptr()] = kept[-1].nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        model.hidden_states(tokens, torch.zeros_like(tokens))
    for parameter in model.parameters():
        sizes.pop(parameter.data_ptr(), None)
    return sum(sizes.values())


@pytest.mark.parametrize(
    ("precision", "dtype"), [("32-true", None), ("bf16-mixed", torch.bfloat16)]
)
@pytest.mark.parametrize("config", [CONFIG, GATED_DELTA], ids=["mamba", "gated-delta"])
def test_activations_are_those_of_the_real_model(config, precision, dtype):
    estimated = estimates.activation_bytes(config, (2, 48), precision)
    assert estimated == pytest.approx(kept_bytes(HybridModel(config), dtype), rel=0.02)


@pytest.mark.parametrize("config", [CONFIG, GATED_DELTA], ids=["mamba", "gated-delta"])
def test_caches_and_weights_are_counted_as_they_are(config):
    cache = HybridCache(config, 100, 13)
    values = [getattr(layer, f.name) for layer in cache.layers for f in fields(layer)]
    values = [value for value in values if value is not cache.parity]
    tensors = {v.data_ptr(): v.nbytes for v in values if isinstance(v, torch.Tensor)}
    assert estimates.cache_bytes(config, 100, 13, torch.float32) == sum(tensors.values())
    assert estimates.num_parameters(config) == HybridModel(config).num_parameters()


def test_of_the_target_s_pass_and_the_drafter_s_the_fuller_counts():
    wide = CONFIG.replace(num_heads=256, head_dim=64)  # its layer keeps more than a whole drafter
    narrow = CONFIG.replace(num_layers=1, attn_layers=())
    shape = 2, 48
    plan = ModelPlan(narrow, wide)
    while_it_runs = estimates.training_memory(plan, shape, "32-true", False)
    alone = estimates._one_layer_bytes(wide, shape, "32-true")
    assert while_it_runs["target's activations"] == alone
    assert "activations" not in while_it_runs and "loss" not in while_it_runs
    later = estimates.training_memory(replace(plan, passes=100), shape, "32-true", False)
    assert "activations" in later and "target's activations" not in later


@pytest.mark.costly
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(CONFIG, id="mamba"),
        pytest.param(GATED_DELTA, id="gated-delta", marks=pytest.mark.long),
    ],
)
def test_compiled_layers_keep_what_pytorch_s_partition_keeps(config):
    torch._dynamo.reset()
    model = HybridModel(config)
    for layer in model.model.layers:
        layer.compile(dynamic=False, backend="aot_eager_decomp_partition")
    kept = kept_bytes(model)
    compiled = estimates.activation_bytes(config, (2, 48), "32-true", compiled=True)
    assert compiled == pytest.approx(kept, rel=0.02)
    assert compiled < estimates.activation_bytes(config, (2, 48), "32-true")


@pytest.mark.long
def test_a_step_at_8b_takes_what_was_measured():
    """The estimate is near the rows of docs/results/h200-training/8b.jsonl. Their steps drop their
    gradients before the next one; a training's are there until its backward pass. Tolerance: what
    is counted and does not live at once (the loss's buffers are gone when its products are made) is
    an eighth at most, and nothing may be forgotten."""
    rows = RESULTS / "h200-training/8b.jsonl"
    target = bench_training.TARGETS["8b"]
    for row in map(json.loads, rows.read_text().splitlines()):
        drafter, kind = drafter_config_from(target), "adamw"
        if row["features"]:
            drafter = FeatureConfig(row["features"]).added_to(drafter, target)
        if "recipe" in row:
            file = CONFIGS / f"distill/{row['recipe']}.yaml"
            options = SimpleNamespace(recipe=str(file), more=row["options"])
            model = bench_training.recipe(options)
            parts = ("drafter", "drafter_layers", "start_from", "features", "head")
            drafter = distillation.drafter_config_of(target, *(model[part] for part in parts))
            kind = model["optimizer"].kind
        assert estimates.num_parameters(drafter) == row["drafter_parameters"]
        shape = row["batch_size"], row["sequence_length"]
        plan = ModelPlan(
            drafter, target if row["teacher"] == "live" else None,  # one row read a cache
            held_dtype(row.get("target_dtype", "bfloat16")), compiled=True, optimizer=kind,
        )
        parts = estimates.training_memory(plan, shape, "bf16-mixed", True)
        estimated = sum(parts.values()) - 4 * row["drafter_parameters"]
        assert row["peak_bytes"] < estimated < 1.125 * row["peak_bytes"], row


def test_recomputed_activations_take_less():
    plan = ModelPlan(CONFIG)
    kept, again = (
        estimates.training_memory(each, (2, 48), "32-true", False)
        for each in (plan, replace(plan, activation_checkpointing=True))
    )
    assert again["activations"] < kept["activations"] / 2


@pytest.mark.parametrize("layers", [(), (0, 1, 2, 3)], ids=["mamba", "attention"])
def test_one_kind_of_layer_is_enough(layers):
    """A config without Mamba-2 layers need not say how such a layer would look."""
    unused = dict.fromkeys(MAMBA_KEYS if layers else ATTENTION_KEYS, 0)
    config = CONFIG.replace(attn_layers=layers, **unused)
    plan = ModelPlan(config, config, activation_checkpointing=True)
    live = estimates.training_memory(plan, (2, 48), "32-true", False)
    one_layer = config.replace(num_layers=1, attn_layers=layers[:1])
    alone = estimates.activation_bytes(one_layer, (2, 48), "32-true")
    assert estimates._one_layer_bytes(config, (2, 48), "32-true") == alone
    assert live["activations"] == alone + 4 * config.num_layers * config.d_model * 2 * 48
    trees = {"vanilla": 5, "tree": 13}
    drafters = {DrafterName.parse("drafter"): config}
    assert estimates.decoding_memory(config, drafters, torch.float32, 100, trees)["caches"] > 0


def test_what_is_stored_in_8_bits_is_counted_so(tmp_path):
    write(random_reference("llama", 0).save_pretrained, tmp_path, "channel")
    folder = str(tmp_path / "stored")
    model, numbers = load_model(folder, dtype=torch.bfloat16), estimates.numbers_in_8_bits(folder)
    held = [each for name, each in model.state_dict().items() if not name.endswith(".scale")]
    counted = estimates.held_bytes(model.config, torch.bfloat16, stored_in_8_bits=numbers)
    assert counted == sum(each.nbytes for each in held) < 2 * model.num_parameters()
    drafter = DrafterName.parse(folder)
    assert estimates.numbers_in_8_bits(folder, drafter) == numbers
    both = estimates.decoding_memory(
        model.config, {drafter: model.config}, torch.bfloat16, 100, {}, folder=folder
    )
    assert both["target"] == both["drafter"] == counted
    assert estimates.numbers_in_8_bits(str(tmp_path / "plain")) == 0


def test_of_an_mtp_head_in_8_bits_counts_what_stays_so(tmp_path):
    """Its projection of embedding and hidden state is written out."""
    write(partial(save_with_head, family="qwen3_5", seed=0), tmp_path, "fp8")
    with pytest.warns(UserWarning, match=r"model\.features\.proj\.weight for one, cannot be"):
        head = build(plan_mtp(tmp_path / "stored"))
    held = [each for each in head.state_dict().values() if each.dtype == FLOAT8]
    counted = estimates.numbers_in_8_bits(str(tmp_path / "stored"), DrafterName.parse("mtp"))
    assert counted == sum(each.numel() for each in held) > 0


def test_a_drafter_whose_first_tokens_are_apart_keeps_activations():
    """As MTP and EAGLE heads do, whose first token has no hidden state before it."""
    head = CONFIG.eagle_head((0, 1, 2))
    kept = estimates.activation_bytes(head, (2, 48), "32-true")
    assert kept > estimates.activation_bytes(head.replace(intermediate_size=8), (2, 48), "32-true")


def test_of_a_hybrid_the_larger_layer_counts():
    hybrid, shape = CONFIG.replace(num_heads=256), (2, 48)  # its attention layers are the larger
    mamba, attention = (
        estimates.activation_bytes(
            hybrid.replace(num_layers=1, attn_layers=layers), shape, "32-true"
        )
        for layers in ((), (0,))
    )
    assert mamba < attention
    assert estimates._one_layer_bytes(hybrid, shape, "32-true") == attention


def test_a_target_of_attention_alone_says_what_it_takes(tmp_path, workspace, capsys):
    """A Llama checkpoint sets nothing of a Mamba-2 layer."""
    target = HybridModel(ATTENTION_ONLY)
    save_model(target, tmp_path / "target", load_tokenizer(workspace / "target"))
    options = ["--model.target", str(tmp_path / "target")]
    for name, value in {**ARCHITECTURE, "num_layers": 1, "attn_layers": []}.items():
        options += [f"--model.drafter.{name}", json.dumps(value)]
    distill.main(options_of(workspace, tmp_path / "run", "--dry_run", *options))
    said = capsys.readouterr().out
    assert "4 layers (4 attention)" in said and ", target " in said
    distill.main(options_of(workspace, tmp_path / "run", *options, "--trainer.max_steps", "1"))
    out = ["--out", str(tmp_path / "eval"), "--target", str(tmp_path / "target")]
    prompts = ["--benchmarks", str(workspace / "prompts.jsonl"), "--device", "cpu"]
    eval_spec.main(
        ["--checkpoint", str(tmp_path / "run/drafter/latest"), *out, *prompts, "--dry_run"]
    )
    assert "caches" in capsys.readouterr().out
