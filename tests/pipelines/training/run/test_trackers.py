"""Loggers of trainer.logger get every row, however they are given; Weights & Biases is a stand-in
here, with the calls that Lightning makes."""

from __future__ import annotations

import csv
import json
import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest
from lightning.pytorch.loggers import wandb as lightning_wandb
from tiny_run import distill_arguments

from stree.common.errors import UsageError
from stree_pipelines.commands import distill
from stree_pipelines.training.checkpoints.saving import TrainingCheckpoints


class Run:
    """Stand-in of what `wandb.init` returns; `told` is all that was ever said to one."""

    told: list[tuple]

    def __init__(self, **options) -> None:
        self.told.append(("init", options))
        self.id, self.name, self.config = "1", "run", self

    def update(self, values, **options) -> None:
        self.told.append(("config", values))

    def log(self, values, **options) -> None:
        self.told.append(("log", dict(values)))

    def finish(self, exit_code=None) -> None:
        self.told.append(("finish", exit_code))

    def define_metric(self, *arguments, **options) -> None:
        pass


@pytest.fixture
def told(monkeypatch) -> list[tuple]:
    """Install a stand-in of wandb, and return what its run is told."""
    monkeypatch.setattr(Run, "told", [], raising=False)
    contents = {
        "wandb": {"run": None, "init": Run}, "wandb.wandb_run": {"Run": Run}, "wandb.sdk": {},
        "wandb.sdk.lib": {"RunDisabled": Run},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(lightning_wandb, "_WANDB_AVAILABLE", True)
    return Run.told


@pytest.mark.quick(1)
@pytest.mark.parametrize("in_list", [False, True])
def test_a_logger_gets_every_row_given_alone_or_in_a_list(in_list, workspace, tmp_path):
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": str(tmp_path / "own")}}
    given = ("--trainer.logger", json.dumps([logger] if in_list else logger))
    distill.main(distill_arguments(workspace, tmp_path / "run", *given, steps=3))
    (path,) = (tmp_path / "own").rglob("metrics.csv")
    rows = list(csv.DictReader(path.open()))
    assert [row["step"] for row in rows if row["loss"]] == ["1", "2", "3"]
    assert (tmp_path / "run/metrics.csv").exists() and (tmp_path / "run/tensorboard").exists()


def test_weights_and_biases_get_configuration_rows_and_the_end(told, workspace, tmp_path):
    given = ("--trainer.logger", "WandbLogger", "--trainer.logger.project", "drafters")
    distill.main(distill_arguments(workspace, tmp_path / "run", *given, steps=2))
    kinds = [kind for kind, _ in told]
    assert kinds[:2] == ["init", "config"] and kinds[-1] == "finish"
    contents = {kind: value for kind, value in told if kind != "log"}
    assert contents["init"]["project"] == "drafters"
    assert contents["config"]["model"]["target"] == str(workspace / "target")
    rows = [values for kind, values in told if kind == "log"]
    assert [row["trainer/global_step"] for row in rows if "loss" in row] == [1, 2]
    assert contents["finish"] == 0


def test_a_run_that_fails_ends_as_failed(told, workspace, tmp_path, monkeypatch):
    def fail(*arguments) -> None:
        raise RuntimeError("node lost")

    monkeypatch.setattr(TrainingCheckpoints, "on_train_batch_start", fail)
    given = ("--trainer.logger", "WandbLogger")
    with pytest.raises(RuntimeError, match="node lost"):
        distill.main(distill_arguments(workspace, tmp_path / "run", *given, steps=2))
    assert told[-1] == ("finish", 1)


@pytest.mark.parametrize(
    "given", ["WandbLogger", '[{"class_path": "WandbLogger"}]'], ids=["alone", "in a list"]
)
def test_a_package_that_is_not_installed_is_one_line(given, workspace, tmp_path, monkeypatch):
    class Absent:
        def __bool__(self) -> bool:
            return False

        def __str__(self) -> str:  # as lightning_utilities' RequirementCache
            return "Requirement 'wandb>=0.12.10' not met. HINT: Try running `pip install`"

    monkeypatch.setattr(lightning_wandb, "_WANDB_AVAILABLE", Absent())
    wanted = r"^WandbLogger needs wandb>=0\.12\.10, .* pip install 'wandb>=0\.12\.10'$"
    with pytest.raises(UsageError, match=wanted):
        distill.main(
            distill_arguments(workspace, tmp_path / "run", "--trainer.logger", given, steps=1)
        )
    assert not (tmp_path / "run").exists()


def test_a_logger_that_cannot_start_is_one_line(told, workspace, tmp_path, monkeypatch):
    def refuse(**options) -> None:
        raise RuntimeError("No API key configured.\nUse `wandb login`.")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    given = ("--trainer.logger", "WandbLogger")
    arguments = distill_arguments(workspace, tmp_path / "run", *given, steps=1)
    refusal = r"WandbLogger cannot start: No API key configured\.; "
    with pytest.raises(UsageError, match=refusal):
        distill.main(arguments)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/notes.txt").touch()  # a folder that was there stays
    with pytest.raises(UsageError, match=refusal):
        distill.main(arguments)
    assert (tmp_path / "run/notes.txt").exists()


def test_lightning_s_banners_are_left_out(workspace, tmp_path, capfd):
    """Its handlers write to the stderr of the import, so they are asked what they would write."""
    distill.main(distill_arguments(workspace, tmp_path / "run", steps=1))
    output = capfd.readouterr().out
    assert (
        f"{tmp_path}/run: 1 of 1 steps are done; the drafter is {tmp_path}/run/drafter/latest\n"
    ) in output
    (handler,) = logging.getLogger("lightning").handlers
    lightning, ours = Path(lightning_wandb.__file__), Path(distill.__file__)

    def is_written(path: Path, level: int) -> bool:
        record = logging.LogRecord("lightning", level, str(path), 1, "said", None, None)
        return bool(handler.filter(record))

    assert not is_written(lightning, logging.INFO)
    assert is_written(lightning, logging.WARNING) and is_written(ours, logging.INFO)
