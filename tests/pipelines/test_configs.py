"""Every shipped training config parses with nothing unknown in it, and is what it says it is."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from documented import Command, lines_written_in
from parsed import ParseOnly

from stree.checkpoints.configs import config_files
from stree.models.config import HybridConfig
from stree.models.model import HybridModel
from stree.models.multi_step import require_ahead
from stree.models.slicing import drafter_config_from, headed
from stree_lab.studies.plan import StudyRun, read_study
from stree_pipelines.commands.distill import DistillCLI
from stree_pipelines.commands.train_target import TargetCLI
from stree_pipelines.training.checkpoints.export import Exports
from stree_pipelines.training.distillation import Distillation, drafter_config_of
from stree_pipelines.training.hidden_states import FeatureConfig, default_layers
from stree_pipelines.training.module import TargetTraining
from stree_pipelines.training.optimization import OptimizerConfig
from stree_pipelines.training.parallel.sharding import STRATEGIES

CONFIGS = Path(__file__).parents[2] / "configs"
DISTILL = sorted((CONFIGS / "distill").glob("*.yaml"))
TARGET = sorted((CONFIGS / "target").glob("*.yaml"))
STUDY = sorted((CONFIGS / "study").glob("*.yaml"))
STRATEGY_FILES = sorted((CONFIGS / "strategies").glob("*.yaml"))


def parse(path: Path, *more: str):
    """The resolved config of a fit with this file; nothing is loaded or run."""
    distils = path.resolve() in DISTILL
    base, module = (DistillCLI, Distillation) if distils else (TargetCLI, TargetTraining)

    class Parsed(ParseOnly, base): ...

    return Parsed(module, ["fit", "--config", str(path), "--run_dir", "r", *more]).options


def parse_run(run: StudyRun):
    """The resolved config of a drafter of a study."""
    _, _, config, *more = run.arguments({})
    return parse(Path(config), *more)


def count_parameters(config: HybridConfig) -> int:
    with torch.device("meta"):
        return HybridModel(config).num_parameters()


def architecture(name: str) -> HybridConfig:
    values = parse(CONFIGS / name)["model"]["architecture"]
    return HybridConfig.from_dict(dict(values))


@pytest.mark.quick(6)
@pytest.mark.parametrize(
    "path", [*DISTILL, *TARGET], ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_every_shipped_config_parses_and_fits_together(path):
    options = parse(path)
    OptimizerConfig(**options["model"]["optimizer"])
    Exports(**options["export"]).export_steps(options["trainer"]["max_steps"])
    assert options["trainer"]["max_steps"] > options["model"]["optimizer"]["warmup_steps"]
    assert options["data"]["train"] and options["data"]["seed"] == options["seed_everything"]


@pytest.mark.costly
@pytest.mark.parametrize("path", STUDY, ids=lambda path: path.stem)
def test_every_arm_of_a_shipped_study_is_options_of_its_config(path):
    schedules = set()
    study = read_study(str(path))
    for run in {run.arm.name: run for run in study.runs}.values():
        model = parse_run(run)["model"]
        assert model["target"]
        schedules.add(model["optimizer"]["schedule"])
    assert len(schedules) == 1  # no arm wins by its schedule


@pytest.mark.parametrize(
    "names", [("today", "Transformer"), ("two layers of 768", "Transformer of 768")], ids=" ".join
)
def test_a_transformer_s_rival_differs_in_its_mixer_only(names):
    """Both have equally many parameters without embedding and head, within 4 %."""
    runs = {run.arm.name: run for run in read_study(str(CONFIGS / "study/drafters-75m.yaml")).runs}
    (one, first), (other, second) = (
        (options, HybridConfig.from_dict(dict(options["model"].pop("drafter"))))
        for options in (parse_run(runs[name]) for name in names)
    )
    assert first.attn_layers == () and len(second.attn_layers) == second.num_layers
    shape = ("vocab_size", "d_model", "num_layers", "intermediate_size", "tie_embeddings")
    assert all(getattr(first, name) == getattr(second, name) for name in shape)
    assert first.tie_embeddings
    sizes = [count_parameters(each) - each.vocab_size * each.d_model for each in (first, second)]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.04)
    for part in ("model", "data", "trainer"):
        assert one[part] == other[part]


def strings_in(value):
    """Yield the texts in a YAML file's values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from strings_in(each)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*/*.yaml")), ids=lambda path: path.stem)
def test_a_config_s_files_are_shipped_public_or_made_by_its_commands(path):
    commands = [Command.of(line) for line in lines_written_in(path)]
    scripts = {command.script for command in commands}
    made = ["runs/", *(["data/python-docs/"] * ("pipelines/corpus.py" in scripts))]
    for command in commands:
        if "--out" in command.arguments:
            made.append(command.arguments[command.arguments.index("--out") + 1].split(".")[0])
    text = path.read_text(encoding="utf-8")
    made += re.findall(r"hf download .*(?:\n#)?.* --local-dir (\S+)", text)
    values = yaml.safe_load(text)
    for name in (word for each in strings_in(values) for word in re.split(r"[ ,:]+", each)):
        is_public = f"{name}:" in text and name.count("/") in (1, 2)  # owner/name/configuration
        if "/" in name and not is_public and not name.startswith(tuple(made)):
            assert (CONFIGS.parent / name).exists(), name
    if {"mt_bench", "gsm8k"} & {*strings_in(values)}:
        assert "pipelines/fetch_benchmarks.py" in scripts


def test_there_is_something_to_test():
    assert {path.stem for path in DISTILL} >= {"quickstart", "chat-75m", "llama3.1-8b"}
    assert {path.stem for path in TARGET} >= {"python-docs", "chat-75m"}
    assert {path.stem for path in STRATEGY_FILES} == {"fsdp2", "zero-2", "zero-3"}


def test_the_chats_drafter_that_reads_features_is_what_the_study_trained():
    study = read_study(str(CONFIGS / "study/drafters-75m.yaml"))
    name = "layer + features + head of rank 256 + half the batch + Muon at 4e-3"
    arm = parse_run(next(run for run in study.runs if run.arm.name == name))
    options = parse(CONFIGS / "distill/chat-75m-features.yaml")
    schedules = [each["model"]["optimizer"].pop("schedule") for each in (options, arm)]
    assert schedules == ["wsd", "cosine"]
    for part in ("model", "data", "seed_everything"):
        assert options[part] == arm[part]
    target = architecture("target/chat-75m.yaml")
    sliced = drafter_config_from(target, options["model"]["drafter_layers"])
    reading = FeatureConfig(**options["model"]["features"]).added_to(sliced, target)
    assert reading.feature_layers == default_layers(target.num_layers)
    require_ahead(reading)
    drafter = headed(reading, **options["model"]["head"])
    whole = drafter.vocab_size * drafter.d_model
    assert drafter.head_rank * (drafter.head_size + drafter.d_model) < whole / 3


def test_the_chats_eagle_head_differs_from_a_mamba_2_layer_in_its_layer_alone():
    options = parse(CONFIGS / "distill/chat-75m-eagle.yaml")
    (command,) = (
        command for command in lines_written_in(CONFIGS / "compare/chat-75m-eagle.yaml")
        if "chat-75m-features.yaml" in command
    )
    _, _, _, *more = Command.of(command).arguments
    rival = parse(CONFIGS / "distill/chat-75m-features.yaml", *more)
    features, ours = (FeatureConfig(**each["model"].pop("features")) for each in (options, rival))
    assert features == replace(ours, eagle=True) and features.ahead == 4
    layers = [each["model"].pop("drafter_layers") for each in (options, rival)]
    assert layers == [None, [0]]
    for part in ("model", "data", "seed_everything", "export"):
        assert options[part] == rival[part]
    assert options["trainer"]["max_steps"] == rival["trainer"]["max_steps"]
    target = architecture("target/chat-75m.yaml")
    head = drafter_config_of(target, None, None, None, features)
    assert head.eagle_inputs and head.feature_layers == default_layers(target.num_layers)
    sliced = drafter_config_from(target, [0])
    sizes = [count_parameters(each.replace(vocab_size=1)) for each in (head, sliced)]
    assert 1 < sizes[0] / sizes[1] < 1.6


def test_the_chats_drafters_see_as_many_tokens_at_each_export():
    seen, warm_up, rest = [], [], []
    for name in ("chat-75m", "chat-75m-features"):
        options = parse(CONFIGS / f"distill/{name}.yaml")
        data, trainer = options["data"], options["trainer"]
        rows = data.pop("batch_size")
        steps = Exports(**options["export"]).export_steps(trainer["max_steps"])
        seen.append([rows * data["sequence_length"] * step for step in steps])
        warm_up.append(rows * options["model"]["optimizer"]["warmup_steps"])
        rest.append((data, trainer["precision"], options["model"]["drafter_layers"]))
    assert seen[0] == seen[1] and seen[0][-1] == 1600 * 16 * 1024
    assert warm_up[0] == warm_up[1] and rest[0] == rest[1]


@pytest.mark.parametrize(
    "path", [each for each in TARGET if not each.stem.startswith("mamba-")],  # these are drafters
    ids=lambda path: path.stem,
)
def test_targets_are_hybrids_that_the_layout_can_hold(path):
    config = architecture(f"target/{path.name}")
    assert 2 * len(config.attn_layers) == config.num_layers
    assert config_files(config, "bfloat16")["mamba_config.json"]
    options = parse(path)
    if options["data"]["tokenizer"] == "runs/chat-75m/target/latest":
        assert architecture("target/chat-75m.yaml").vocab_size == config.vocab_size
    else:
        assert options["tokenizer"]["vocab_size"] == config.vocab_size
    assert options["export"]["dtype"] == "bfloat16"


def test_the_shipped_target_is_at_most_16_mb():
    assert 2 * count_parameters(architecture("target/python-docs.yaml")) <= 15.9e6


def test_the_chat_drafter_is_one_recurrent_layer_of_its_target():
    options = parse(CONFIGS / "distill/chat-75m.yaml")
    assert options["model"]["drafter"] is None
    target = architecture("target/chat-75m.yaml")
    drafter = drafter_config_from(target, options["model"]["drafter_layers"])
    assert drafter.attn_layers == () and drafter.num_layers == 1
    exports, max_steps = Exports(**options["export"]), options["trainer"]["max_steps"]
    assert exports.export_steps(max_steps) == [16, 50, 160, 500, 1600]
    exports.decays = OptimizerConfig(**options["model"]["optimizer"])
    assert exports.decays.branches
    assert exports.branches(max_steps) == [(13, 16), (40, 50), (128, 160), (400, 500)]


def test_the_chat_drafter_from_scratch_is_at_most_an_eighth_of_its_target():
    options = parse(CONFIGS / "distill/chat-75m-scratch.yaml")
    drafter = HybridConfig.from_dict(dict(options["model"]["drafter"]))
    target = architecture("target/chat-75m.yaml")
    assert 60e6 <= count_parameters(target) <= 120e6
    assert 8 * count_parameters(drafter) <= count_parameters(target)
    assert drafter.attn_layers == () and drafter.num_layers == 2
    assert drafter.vocab_size == target.vocab_size
    assert config_files(drafter, "float32")["mamba_config.json"]
    steps = Exports(**options["export"]).export_steps(options["trainer"]["max_steps"])
    assert steps == [16, 50, 160, 500, 1600]


def test_the_quickstart_drafter_is_sliced_and_exported_four_times():
    options = parse(CONFIGS / "distill/quickstart.yaml")
    assert options["model"]["drafter"] is None
    layers = options["model"]["drafter_layers"]
    sliced = drafter_config_from(architecture("target/python-docs.yaml"), layers)
    assert sliced.attn_layers == () and sliced.num_layers == 1
    steps = Exports(**options["export"]).export_steps(options["trainer"]["max_steps"])
    assert len(steps) == 4 and steps[-1] == options["trainer"]["max_steps"]


@pytest.mark.parametrize("path", STRATEGY_FILES, ids=lambda path: path.stem)
def test_a_strategy_s_file_goes_behind_a_run_s(path):
    options = parse(CONFIGS / "distill/llama3.1-8b.yaml", "--config", str(path))
    assert options["trainer"]["strategy"] in STRATEGIES[2:]
    assert options["trainer"]["max_steps"] == 20000


def test_overrides_win_over_the_file():
    options = parse(
        CONFIGS / "distill/quickstart.yaml", "--trainer.max_steps", "200",
        "--model.optimizer.lr=0.5", "--data.train", "[a.jsonl,b.jsonl]",
    )
    assert options["trainer"]["max_steps"] == 200
    assert options["model"]["optimizer"]["lr"] == 0.5
    assert options["data"]["train"] == ["a.jsonl", "b.jsonl"]
