"""Exports load by name, are whole or absent, and are evaluated without touching the training."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from lanes import costly
from run_checks import assert_same_state
from tiny_run import distill_arguments, metric_rows

from stree.checkpoints.load_save import load_model, weights_fingerprint
from stree.checkpoints.tokenizer import require_same_tokenizer
from stree.common.errors import CannotWrite, UsageError
from stree.common.files import verify_manifest
from stree_pipelines.commands import distill
from stree_pipelines.commands.eval_spec import main as eval_spec
from stree_pipelines.evaluation.evaluate import Evaluation
from stree_pipelines.evaluation.result_store import ResultStore
from stree_pipelines.training.checkpoints.export import Exports, log_spaced_steps
from stree_pipelines.training.checkpoints.saving import SafeCheckpointIO
from stree_pipelines.training.run import callbacks
from stree_pipelines.training.run.callbacks import (
    EvaluateExports,
    EvaluationFailed,
    untouched_training_state,
)


@pytest.fixture(scope="module")
def run_dir(workspace, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    distill.main(distill_arguments(workspace, run_dir, "--export.steps", "[2,4]", steps=6))
    return run_dir


# When


def test_log_spacing_covers_first_to_last_at_equal_ratios():
    assert log_spaced_steps(40, 4000, 5) == [40, 126, 400, 1265, 4000]
    assert log_spaced_steps(1, 3, 10) == [1, 2, 3]
    assert log_spaced_steps(7, 7, 4) == [7]
    assert log_spaced_steps(5, 100, 1) == [100]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [100]),
        ({"steps": [40, 10, 400]}, [10, 40, 100]),
        ({"every_n_steps": 30}, [30, 60, 90, 100]),
        ({"every_n_steps": 50}, [50, 100]),
        ({"log_spaced": 3, "first": 1}, [1, 10, 100]),
        ({"log_spaced": 2, "first": 500}, [100]),
    ],
)
def test_the_last_step_is_always_exported(options, steps):
    assert Exports(**options).export_steps(100) == steps


@pytest.mark.parametrize(
    "options",
    [{"steps": [1], "log_spaced": 3}, {"steps": [0]}, {"every_n_steps": 0}],
)
def test_contradicting_options_are_refused(options):
    with pytest.raises(UsageError, match="export"):
        Exports(**options)


# What


def test_exports_are_complete_and_load(run_dir, workspace):
    drafter = run_dir / "drafter"
    assert sorted(path.name for path in drafter.iterdir()) == [
        "latest", "step-00000002", "step-00000004", "step-00000006",
    ]
    for step in (2, 4, 6):
        folder = drafter / f"step-{step:08d}"
        manifest = verify_manifest(folder)
        assert manifest["step"] == step and len(manifest["config_hash"]) == 64
        assert manifest["target_weights"] == weights_fingerprint(workspace / "target")
        names = {"config.json", "model.safetensors", "tokenizer.json", "provenance.json"}
        assert names <= manifest["files"].keys()
        assert require_same_tokenizer(workspace / "target", folder) == ""
    assert os.readlink(drafter / "latest") == "step-00000006"


def test_an_export_holds_the_weights_of_its_step(run_dir):
    state = SafeCheckpointIO().load_checkpoint(run_dir / "checkpoints/step-00000004")["state_dict"]
    exported = load_model(run_dir / "drafter/step-00000004").state_dict()
    assert exported.keys() == {name.removeprefix("exported.") for name in state}
    for name, weight in exported.items():
        assert torch.equal(weight, state[f"exported.{name}"])


def test_provenance_says_where_it_comes_from(run_dir, workspace):
    provenance = json.loads((run_dir / "drafter/step-00000004/provenance.json").read_text())
    row = next(row for row in metric_rows(run_dir) if row["step"] == "4" and row["loss"])
    assert provenance["step"] == 4
    assert provenance["target"] == str(workspace / "target")
    assert provenance["tokens_seen"] == int(row["tokens_seen"])
    assert provenance["loss"] == float(row["loss"])
    assert provenance["simulated_acceptance"] == float(row["simulated_acceptance"])
    for name in ("target_sha256", "tokenizer_fingerprint", "config_hash"):
        assert len(provenance[name]) == 64
    assert "torch" in provenance["versions"] and "git_sha" in provenance


@pytest.mark.costly
def test_bf16_exports_are_half_the_size(workspace, tmp_path):
    more = ("--export.dtype", "bfloat16")
    distill.main(distill_arguments(workspace, tmp_path, *more, steps=1))
    model = load_model(tmp_path / "drafter/latest", dtype=torch.bfloat16)
    checkpoint = SafeCheckpointIO().load_checkpoint(tmp_path / "checkpoints/step-00000001")
    weight = checkpoint["state_dict"]["exported.model.embed_tokens.weight"]
    assert torch.equal(model.model.embed_tokens.weight, weight.bfloat16())


# Whole or absent


def test_a_resumed_run_keeps_good_exports_and_replaces_damaged_ones(workspace, run_dir, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy, symlinks=True)
    for step in range(2, 7):
        shutil.rmtree(copy / f"checkpoints/step-{step:08d}")
    good, damaged = (copy / f"drafter/step-{step:08d}" for step in (2, 4))
    (damaged / "config.json").write_text("{}")
    (copy / "drafter/.tmp-leftover").mkdir()
    os.utime(copy / "drafter/.tmp-leftover", (0, 0))
    before = good.stat().st_ino
    distill.main(distill_arguments(workspace, copy, "--export.steps", "[2,4]", steps=6))
    assert good.stat().st_ino == before
    for step in (2, 4, 6):
        name = f"drafter/step-{step:08d}/model.safetensors"
        assert (copy / name).read_bytes() == (run_dir / name).read_bytes()
        verify_manifest((copy / name).parent)
    assert not (copy / "drafter/.tmp-leftover").exists()


# Evaluation while training goes on


@pytest.fixture
def evaluation_config(tmp_path) -> Path:
    prompts = tmp_path / "sums.jsonl"
    prompts.write_text(
        "".join(
            json.dumps({"id": str(i), "category": "sums", "turns": [f"What is {i} plus 3?"]}) + "\n"
            for i in range(2)
        )
    )
    path = tmp_path / "eval.yaml"
    options = {
        "benchmarks": [str(prompts)], "temperatures": [0.0, 1.0], "max_new_tokens": 6,
        "methods": ["autoregressive", "vanilla_sd", "stree"], "device": "cpu",
    }
    path.write_text(yaml.safe_dump(options))
    return path


def result_rows(run_dir: Path) -> list[tuple]:
    lines = (run_dir / "eval/results.jsonl").read_text().splitlines()
    return sorted(
        (str(row["step"]), row["method"], row["temperature"], row["acceptance_length"])
        for row in map(json.loads, lines)
    )


@pytest.mark.costly
def test_evaluating_inline_leaves_the_training_as_it_was(workspace, tmp_path, evaluation_config):
    """Curve and weights stay, and each export and method has rows at both temperatures."""
    plain, evaluated = tmp_path / "plain", tmp_path / "evaluated"
    more = ("--export.steps", "[2]")
    distill.main(distill_arguments(workspace, plain, *more, steps=4))
    more += ("--evaluation.mode", "inline", "--evaluation.config", str(evaluation_config))
    distill.main(distill_arguments(workspace, evaluated, *more, steps=4))
    assert metric_rows(plain) == metric_rows(evaluated)
    assert_same_state(*(run / "checkpoints/step-00000004" for run in (plain, evaluated)))
    rows = result_rows(evaluated)
    assert len(rows) == 2 + 2 * 2 * 2  # autoregressive, then 2 exports x 2 methods, all twice
    assert {row[0] for row in rows} == {"None", "2", "4"}


@pytest.mark.costly
def test_evaluating_in_a_process_gives_the_rows_by_the_end(
    workspace, tmp_path, evaluation_config, monkeypatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run_dir = tmp_path / "run"
    more = ("--evaluation.mode", "process", "--evaluation.config", str(evaluation_config))
    distill.main(distill_arguments(workspace, run_dir, *more, steps=2))
    assert {row[0] for row in result_rows(run_dir)} == {"None", "2"}


def test_an_evaluation_that_fails_is_told_and_the_training_finishes(
    workspace, tmp_path, evaluation_config, monkeypatch, capfd
):
    monkeypatch.setattr(callbacks, "EVALUATION", (sys.executable, str(tmp_path / "fails.py")))
    (tmp_path / "fails.py").write_text("import sys; sys.exit(66)")
    more = ("--evaluation.mode", "process", "--evaluation.config", str(evaluation_config))
    with pytest.raises(EvaluationFailed, match="1 of its evaluations failed") as failed:
        distill.main(distill_arguments(workspace, tmp_path / "run", *more, steps=2))
    assert failed.value.exit_code == 66
    assert "ended with code 66" in capfd.readouterr().err
    assert (tmp_path / "run/drafter/latest").exists()


@pytest.mark.costly
@pytest.mark.parametrize(
    ("error", "code", "told"),
    [(CannotWrite("no space"), 73, "no space"), (ValueError("odd"), 1, "ValueError: odd")],
    ids=["no space", "a bug"],
)
def test_an_inline_evaluation_that_fails_is_told_and_the_training_finishes(
    workspace, tmp_path, evaluation_config, monkeypatch, capfd, error, code, told
):
    """The first export's evaluation finds no space, or is at fault; the second one's does not."""
    original, left = Evaluation.evaluate, [error]

    def refuse_once(self, checkpoint):
        if left:
            raise left.pop()
        return original(self, checkpoint)

    monkeypatch.setattr(Evaluation, "evaluate", refuse_once)
    more = ("--evaluation.mode", "inline", "--evaluation.config", str(evaluation_config))
    with pytest.raises(EvaluationFailed) as failed:
        distill.main(
            distill_arguments(workspace, tmp_path / "run", *more, "--export.steps", "[1]", steps=2)
        )
    assert failed.value.exit_code == code
    assert f"step-00000001 failed: {told}" in capfd.readouterr().err
    assert {row[0] for row in result_rows(tmp_path / "run")} == {"None", "2"}


@pytest.mark.costly
def test_the_training_state_is_saved_before_the_evaluation(
    workspace, tmp_path, evaluation_config, monkeypatch
):
    """Step 3 exports without a validation, step 4 with one, behind which the state is saved."""
    saved = []

    def look(self, checkpoint):
        step = Path(checkpoint).name
        saved.append((step, (tmp_path / "run/checkpoints" / step).is_dir()))

    monkeypatch.setattr(Evaluation, "evaluate", look)
    more = ("--evaluation.mode", "inline", "--evaluation.config", str(evaluation_config))
    more += ("--export.steps", "[3]")
    distill.main(distill_arguments(workspace, tmp_path / "run", *more, steps=4))
    assert saved == [("step-00000003", True), ("step-00000004", True)]


@pytest.mark.costly
def test_the_command_gives_the_rows_of_the_callback(workspace, tmp_path, evaluation_config):
    """`eval_spec.py --run` gives the same rows in the same order, but for the clock's."""
    run_dir = tmp_path / "run"
    more = ("--evaluation.mode", "inline", "--evaluation.config", str(evaluation_config))
    more += ("--export.steps", "[2]")
    distill.main(distill_arguments(workspace, run_dir, *more, steps=4))
    eval_spec([
        "--config", str(evaluation_config), "--run", str(run_dir), "--out", str(tmp_path / "again"),
        "--batch_size", "8",
    ])
    timings = {
        "tokens_per_second", "tokens_per_second_e2e", "speedup", "speedup_per_tau",
        "speedup_prompt_median", "time_ms", "baseline_time_ms", "confidence_intervals",
        "environment",
    }
    theirs, ours = (
        [row.model_dump(exclude=timings) for row in ResultStore(folder).results()]
        for folder in (run_dir / "eval", tmp_path / "again")
    )
    assert len(theirs) == 2 + 2 * 2 * 2
    assert ours == theirs
    assert {row["batch_size"] for row in ours} == {8}


def test_how_many_prompts_are_decoded_at_once_is_said_by_the_option_then_the_config(tmp_path):
    sizes = {}
    for given in (None, 2):
        for name, content in {"plain": "benchmarks: [x]\n", "own": "batch_size: 3\n"}.items():
            (tmp_path / name).write_text(content)
            callback = EvaluateExports("inline", str(tmp_path / name), batch_size=given)
            callback.target, callback.out = "target", tmp_path / "run/eval"
            sizes[given, name] = callback._settings().batch_size
    assert sizes == {(None, "plain"): 8, (None, "own"): 3, (2, "plain"): 2, (2, "own"): 2}
    assert callback._completing_command() == (
        f"eval_spec.py --run {tmp_path}/run --config {tmp_path}/own --batch_size 2"
    )


@pytest.mark.quick(3)
@pytest.mark.parametrize("mode", ["inline", costly("process"), costly("slurm")])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("methods: [guessing]", "guessing"),
        ("benchmarks: [absent.jsonl]", "no benchmark file absent"),
        ("tree: oak", "no tree 'oak'"),
        ("top_p: 2", "top_p is 2.0, wanted above 0"),
    ],
)
def test_wrong_evaluation_options_are_refused_at_the_start(
    workspace, tmp_path, evaluation_config, mode, content, reason
):
    options = {**yaml.safe_load(evaluation_config.read_text()), **yaml.safe_load(content)}
    evaluation_config.write_text(yaml.safe_dump(options))
    more = ("--evaluation.mode", mode, "--evaluation.config", str(evaluation_config))
    with pytest.raises(UsageError, match=reason):
        distill.main(distill_arguments(workspace, tmp_path / "run", *more, steps=2))
    assert not list((tmp_path / "run/checkpoints").iterdir())


def test_random_numbers_inside_do_not_count():
    def draw():
        return torch.rand(1).item(), np.random.rand(), random.random()

    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    first, want = draw(), draw()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    assert draw() == first
    with untouched_training_state():
        torch.manual_seed(9), np.random.seed(9), random.seed(9)
        draw()
    assert draw() == want
