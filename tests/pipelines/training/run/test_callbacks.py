"""Rows of metrics come at the right steps, and their tokens per second count training alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from stree_pipelines.training import module
from stree_pipelines.training.run import callbacks, progress
from stree_pipelines.training.run.callbacks import LogMetrics
from stree_pipelines.training.run.progress import Pace

TOKENS, STEP_S = 100, 2.0  # of a step


class Rehearsal:
    """Training without a model, by a clock that its steps, validations and exports move on."""

    def __init__(self, monkeypatch, num_steps, interval, device="cpu"):
        self.now, self.rows = 1000.0, {}
        for each in (callbacks, module, progress):
            monkeypatch.setattr(each, "time", SimpleNamespace(perf_counter=lambda: self.now))
        optimizer = SimpleNamespace(param_groups=[{"lr": 0.5}])
        waits = SimpleNamespace(_should_accumulate=lambda: False)
        self.trainer = SimpleNamespace(
            global_step=0, max_steps=num_steps, log_every_n_steps=interval,
            is_global_zero=device != "cpu", progress_bar_callback=None,
            optimizers=[optimizer], loggers=[SimpleNamespace(log_metrics=self.log)],
            fit_loop=SimpleNamespace(epoch_loop=waits),
        )
        self.model = SimpleNamespace(
            tokens_seen=0, untimed_s=0.0, device=torch.device(device), validation_metrics={},
            global_step_metrics=lambda: {"loss": 1.0},
        )
        self.callback = LogMetrics()
        self.callback.on_train_start(self.trainer, self.model)

    def log(self, row, step):
        if "tokens_per_second" in row:
            self.rows[step] = row["tokens_per_second"]

    def step(self):
        self.now += STEP_S
        self.model.tokens_seen += TOKENS
        self.trainer.global_step += 1
        self.callback.on_train_batch_end(self.trainer, self.model, None, None, 0)

    def validate(self, seconds):
        self.callback.on_validation_start(self.trainer, self.model)
        self.now += seconds
        self.callback.on_validation_end(self.trainer, self.model)

    def export(self, seconds):
        with module.Training.untimed(self.model):
            self.now += seconds


@pytest.mark.parametrize(("interval", "logged"), [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [1, 3, 6, 7])])
def test_the_first_and_the_last_step_are_logged(interval, logged, monkeypatch):
    training = Rehearsal(monkeypatch, 7, interval)
    for _ in range(7):
        training.step()
    assert list(training.rows) == logged
    assert set(training.rows.values()) == {TOKENS / STEP_S}


def test_validations_and_exports_slow_no_training(monkeypatch):
    """Each stands between two rows; the last one ahead of a row is left out of it, too."""
    training = Rehearsal(monkeypatch, 6, 2)
    training.export(3.0)
    for _ in range(3):
        training.step()
        training.validate(50.0)
        training.step()
        training.export(7.0)
    assert training.rows == dict.fromkeys((1, 2, 4, 6), TOKENS / STEP_S)


def test_a_training_on_a_gpu_says_its_peak_once(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
    training = Rehearsal(monkeypatch, 3, 1, device="cuda")
    for _ in range(3):
        training.step()
    assert capsys.readouterr().out.count("peak of GPU memory in the first step: 3.0 GiB") == 1


def test_a_line_fits_80_columns(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1)
    training = Rehearsal(monkeypatch, 100_000, 1, device="cuda")
    row = {"loss": 10.12345, "simulated_acceptance": 0.7231}
    training.model.global_step_metrics = lambda: row
    training.trainer.global_step = 49_999
    training.callback._pace = Pace(0)
    training.now += 36_000 - STEP_S
    training.model.tokens_seen = 123_456 * 36_000
    training.step()
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.endswith("123,456 tok/s  ETA 10:00:00") and len(line) <= 80
