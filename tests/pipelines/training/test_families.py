"""A drafter is distilled from a target of each family, saved, and decoded with."""

import json

import pytest
import torch
from families import FAMILIES, random_reference
from lanes import costly
from tiny_run import VOCAB_SIZE, distill_arguments, make_workspace, metric_rows

import stree
from stree.checkpoints.configs import load_config
from stree.checkpoints.load_save import load_model
from stree.generation import GenerationConfig
from stree_pipelines.commands import distill

SEEDS = {"granite": 3, "nemotron": 3, "qwen3_5": 1}  # with experts


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "family",
    [
        "nemotron", costly("mamba"),
        *(pytest.param(family, marks=pytest.mark.long)
          for family in (*FAMILIES, "falcon_mamba") if family != "nemotron"),
    ],
)
def test_a_drafter_is_distilled_and_decodes(tmp_path, family):
    workspace = make_workspace(tmp_path)
    target = workspace / "target"
    for path in target.iterdir():
        if path.suffix in (".safetensors", ".txt") or path.name == "MANIFEST.json":
            path.unlink()
    (target / "mamba_config.json").unlink()
    random_reference(family, SEEDS.get(family, 0), VOCAB_SIZE).save_pretrained(target)
    layers = () if family in ("falcon", "nemotron") else ("--model.drafter_layers", "[0]")
    distill.main(distill_arguments(workspace, tmp_path / "run", *layers, steps=2))
    drafter = tmp_path / "run/drafter/latest"
    assert load_config(drafter).num_layers == (1 if layers else 2)
    decoder = stree.load(target, drafter, tree="paper", dtype="float64", max_length=96)
    generation = GenerationConfig(max_new_tokens=16, ignore_eos=True)
    alone = stree.load(target, dtype="float64", max_length=96)
    prompt = [5, 6, 7]
    assert decoder.generate(prompt, generation).tokens == alone.generate(prompt, generation).tokens


@pytest.mark.costly
def test_a_mamba_1_drafter_of_a_hybrid_learns_and_drafts(tmp_path):
    """model.drafter.layer_types names the kind of layer; A is trained and not decayed."""
    workspace = make_workspace(tmp_path)
    drafter = dict(
        vocab_size=VOCAB_SIZE, d_model=24, num_layers=2, layer_types=["mamba1 mlp", "mamba1"],
        mamba1_channels=48, d_state=8, dt_rank=3, intermediate_size=32, tie_embeddings=True,
    )
    options = [word for key, value in drafter.items()
               for word in (f"--model.drafter.{key}", json.dumps(value))]
    more = (*options, "--model.optimizer.lr", "0.02")
    distill.main(distill_arguments(workspace, tmp_path / "run", *more, steps=12))
    losses = [float(row["loss"]) for row in metric_rows(tmp_path / "run") if row["loss"]]
    assert losses[-1] < 0.6 * losses[0]
    model = load_model(tmp_path / "run/drafter/latest")
    assert not model.model.layers[0].mamba1.A_log[0].exp().diff().allclose(torch.ones(7))
    target, prompt = workspace / "target", [5, 6, 7]
    for setting in (GenerationConfig(24), GenerationConfig(24, temperature=1.0, seed=3)):
        outputs = []
        for drafted in ({}, dict(drafter=tmp_path / "run/drafter/latest", tree="beam-2-3-6")):
            decoder = stree.load(target, **drafted, dtype="float64", max_length=96)
            outputs.append(decoder.generate(prompt, setting))
        assert outputs[0].tokens == outputs[1].tokens
