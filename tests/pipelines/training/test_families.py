"""A drafter is distilled from a target of each family, saved, and decoded with."""

import pytest
from families import FAMILIES, random_reference
from tiny_run import VOCAB_SIZE, distill_arguments, make_workspace

import stree
from stree.checkpoints.load_save import load_config
from stree.generation import GenerationConfig
from stree_pipelines.commands import distill

SEEDS = {"granite": 3, "nemotron": 3, "qwen3_5": 1}  # with experts


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family == "nemotron" else [pytest.mark.long])
        for family in FAMILIES
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
