"""Measure steps of training, and report them in one table."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench_reports import CPU, report
from process_group import run_together
from torch.utils.flop_counter import FlopCounterMode

from stree.common.errors import UsageError
from stree_lab import bench_report, bench_training
from stree_lab.benches import models, timing, training_step
from stree_pipelines.data.micro_batches import MicroBatches
from stree_pipelines.data.packing import pack
from stree_pipelines.resources.estimates import ModelPlan, distillation_operations
from stree_pipelines.training.distillation import Distillation
from stree_pipelines.training.hidden_states import FeatureConfig


@pytest.mark.long
def test_processes_are_measured_against_one(forks, tmp_path, monkeypatch):
    def distil(arguments):
        count = int(arguments[-1])
        log = tmp_path / "log"
        codes = run_together(forks, count, ["fit", *arguments], log)
        assert codes == [0] * count, Path(f"{log}.0").read_text()

    monkeypatch.setattr(bench_training, "_distil", distil)
    rows = list(bench_training.measure("tiny", ["fsdp2"], [1, 2], 2, 64, 4, [], CPU))
    assert [(row["strategy"], row["num_processes"]) for row in rows] == [("auto", 1), ("fsdp2", 2)]
    assert all(row["rows_a_step"] == 4 and row["loss_distance"] < 1e-5 for row in rows)
    assert all(row["tokens_per_second"]["median"] > 0 for row in rows)
    assert rows[0]["efficiency"] == 1.0 and rows[1]["efficiency"] > 0
    assert all(len(row["losses"]) == len(bench_report.logged_steps(4)) == 4 for row in rows)


def test_processes_are_a_table_and_curves_over_their_steps(tmp_path, capsys):
    row = dict(what="distill", strategy="auto", num_processes=1, num_steps=40, efficiency=1.0)
    row |= dict(losses=[1.0] * 11, loss_distance=0.0, tokens_per_second=dict(median=1e5))
    four = {**row, "num_processes": 4, "strategy": "ddp", "efficiency": 0.912}
    assert bench_report.logged_steps(40) == [1, *range(4, 41, 4)]
    assert bench_report.logged_steps(25) == [1, *range(2, 25, 2), 25]
    cells, figures = report(tmp_path, (row, four), capsys)
    assert cells[-1] == ["ddp", "4", "100,000", "0.912", "0"] and figures == {"losses"}


@pytest.fixture
def short_conversations(monkeypatch):
    monkeypatch.setattr(training_step, "SEGMENT", 16)
    monkeypatch.setattr(training_step, "PROMPT", 4)


@pytest.mark.costly
def test_a_step_of_training_in_its_parts(short_conversations, tmp_path, capsys):
    recipe = tmp_path / "tiny-recipe.yaml"
    recipe.write_text(
        "model: {features: {layers: [1]}, optimizer: {kind: muon}}\ndata: {train: x}\n"
    )
    options = SimpleNamespace(
        shape="tiny", batch_size=2, sequence_length=40, steps=1,
        recipe=str(recipe), more=["--trainer.precision=bf16-mixed"],
    )

    def measured(*more):
        given = SimpleNamespace(**{**vars(options), "more": more})
        return bench_training.measure_step(given, CPU)

    made = [*measured(), *measured("--model.target_dtype=float8")]
    usual, rounded = timing.write_rows(tmp_path / "rows.jsonl", made, CPU)
    stages = capsys.readouterr().err.splitlines()
    assert len(stages) == 5 + 5 and all(
        re.fullmatch(r".* … \d+\.\d s", line) for line in stages
    )
    assert rounded["operations"] == usual["operations"]
    for row in (usual, rounded):
        assert row["counted_tokens"] == 2 * (12 + 12 + 4)  # of 16, 16 and 8 tokens
        target = models.random_model(bench_training.TINY, CPU)
        assert row["target_parameters"] == target.num_parameters() > row["drafter_parameters"] > 0
        assert row["us_step"]["median"] > 0
    assert set(usual["us_parts"]) == {"data", "target", "drafter", "update"}
    assert set(usual["operations"]) == {"target", "drafter"}
    cells, _ = report(tmp_path, (usual, rounded), capsys)
    assert [line[:7] for line in cells[2:]] == [
        ["tiny", "2", "40", usual["target_dtype"], "1", "tiny-recipe", "–"],
        ["tiny", "2", "40", "float8", "1", "tiny-recipe", "--model.target_dtype=float8"],
    ]
    smaller = measured("--model.drafter_layers=first", "--model.head.vocab_size=64")
    [smaller] = timing.write_rows(tmp_path / "rows.jsonl", smaller, CPU)
    assert smaller["drafter_parameters"] < usual["drafter_parameters"]


@pytest.mark.costly
def test_an_update_in_a_training_step_is_of_all_weights(short_conversations, monkeypatch):
    """All weights have gradients, the head's too if it is not the embedding."""
    config = bench_training.TINY.replace(tie_embeddings=False)
    updated, step = [], torch.optim.AdamW.step

    def noted(optimizer, *arguments):
        weights = [each for group in optimizer.param_groups for each in group["params"]]
        updated.append(all(each.grad is not None for each in weights))
        return step(optimizer, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", noted)
    training_step.step_row(config, 1, 32, 1, CPU)
    assert len(updated) > 4 and all(updated)


def test_steps_of_training_that_cannot_be_timed_are_refused(tmp_path):
    out = str(tmp_path / "o.jsonl")
    with pytest.raises(UsageError, match="longer --sequence_length, got 200"):
        training_step.step_row(bench_training.TINY, 1, 200, 1, CPU)
    recipe = ["--recipe", "configs/distill/quickstart.yaml"]
    tiny = [out, "--shape", "tiny", "--device", "cpu", *recipe]
    with pytest.raises(UsageError, match="--recipe is the recipe of a step"):
        bench_training.main(tiny)
    with pytest.raises(UsageError, match="a step alone has the options of --model only"):
        bench_training.main([*tiny, "--what", "[step]", "--more", "[--trainer.precision=32-true]"])
    data = tmp_path / "data.yaml"
    data.write_text("data: {train: x}")
    with pytest.raises(UsageError, match="has no section `model`"):
        bench_training.main([*tiny[:-1], str(data), "--what", "[step]"])


@pytest.mark.costly
def test_operations_of_a_training_step(short_conversations):
    """The operations are those of the products with weights, as PyTorch counts a step's `mm` and
    in-place `addmm_`; batched products are others."""
    target = models.random_model(bench_training.TINY, CPU)
    table = training_step._conversations(target.config, 2, 40)
    module = Distillation.from_model(target, features=FeatureConfig([0, 3]))
    batches = MicroBatches(table, pack(table, 40, range(len(table))), 2, 0, 0)
    step = training_step._Step(module, batches, CPU)
    in_place = {torch.ops.aten.addmm_: lambda _, a, b, **kwargs: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        step.whole()
    plan = ModelPlan(module.exported.config, target.config)
    operations = distillation_operations(plan, 80, step.num_counted)
    counted = counter.get_flop_counts()["Global"]
    products = counted[torch.ops.aten.mm] + counted[torch.ops.aten.addmm_]
    assert sum(operations.values()) == products


@pytest.mark.long
def test_a_training_that_fails_is_named():
    with pytest.raises(UsageError, match=r"--nonsense ended with code 2: error"):
        bench_training._distil(["--nonsense"])
