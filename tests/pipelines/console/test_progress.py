"""What a long command shows on a terminal, and where there is none."""

from __future__ import annotations

import io
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pseudo_terminal import run_on_terminal

from stree_pipelines.console.progress import EvaluationProgress
from stree_pipelines.evaluation.evaluate import _so_far
from stree_pipelines.training.run import callbacks
from stree_pipelines.training.run.callbacks import LogMetrics

LABEL = "step 1600  sums_prompts T=0.7"
DETAIL = "stree τ 13.02, 97367 tok/s; vanilla_sd τ 12.57, 96471; autoregressive 95154"
SCRIPT = """
import sys
from stree_pipelines.console.progress import EvaluationProgress
label, detail = sys.argv[1:]
progress = EvaluationProgress()
progress.say("3 checkpoints")
with progress.task(label, 4) as task:
    for number in range(3):
        task.advance(detail)
        progress.say(f"said [b]during {number}[/b]")
"""


def test_plain_lines_off_a_terminal():
    stream = io.StringIO()
    with EvaluationProgress(stream).task("talk T=0", 2) as task:
        task.advance("stree τ 2.00")
        task.advance("stree τ 2.10")
    assert stream.getvalue() == "talk T=0  2/2  stree τ 2.10  ETA 0:00\n"


@pytest.mark.parametrize("columns", [80, 160])
def test_a_terminal_shows_bar_count_time_left_and_the_figures(columns):
    shown = run_on_terminal([sys.executable, "-c", SCRIPT, LABEL, DETAIL], columns)
    assert shown.code == 0 and shown.lines[0] == "3 checkpoints"
    assert max(map(len, shown.lines)) <= columns
    at = max(index for index, line in enumerate(shown.lines) if line.startswith(LABEL))
    said = [line for line in shown.lines if "during" in line]
    assert said == [f"said [b]during {number}[/b]" for number in range(3)]
    bar, figures = shown.lines[at:]
    assert bar.count("━") + bar.count("╸") + bar.count("╺") == 20
    assert re.search(r" 3/4 ETA \d:\d\d:\d\d$", bar)
    assert figures.strip() == DETAIL


def test_a_comparison_s_figures_are_as_short():
    """Compute the figures of the test above from samples."""
    measured = {
        "autoregressive": (1.0, 95154),
        "vanilla_sd": (12.57, 96471),
        "stree": (13.02, 97367),
    }
    finished = {
        method: {
            "a": SimpleNamespace(
                num_new_tokens=tau * 100, num_calls=100, decode_s=tau * 100 / speed
            )
        }
        for method, (tau, speed) in measured.items()
    }
    assert _so_far(finished) == DETAIL
    slow = {"a": SimpleNamespace(num_new_tokens=19, num_calls=10, decode_s=10.0)}
    assert _so_far({"stree": slow}) == "stree τ 1.90, 1.9 tok/s"


def test_a_training_s_line_fits_80_columns(capsys):
    trainer: Any = SimpleNamespace(progress_bar_callback=None, max_steps=100_000)
    row = {"loss": 10.12345, "simulated_acceptance": 0.7231, "tokens_per_second": 123_456.7}
    lines = LogMetrics()
    lines._pace._then -= 36_000
    lines._show(trainer, 50_000, row)
    line = capsys.readouterr().out.rstrip()
    assert line.endswith("ETA 10:00:00") and len(line) <= 80


def logged_rows(
    monkeypatch, num_steps: int, interval: int, device: str = "cpu"
) -> dict[int, dict[str, float]]:
    """Rows that LogMetrics writes, by step, of steps of 100 tokens that take 2 s: 1 s of the first
    step and 5 s more of the fourth are untimed."""
    now, rows = [0.0], {}
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: now[0])
    logger = SimpleNamespace(log_metrics=lambda row, step: rows.__setitem__(step, dict(row)))
    trainer: Any = SimpleNamespace(
        global_step=0, max_steps=num_steps, log_every_n_steps=interval, loggers=[logger],
        is_global_zero=device != "cpu", optimizers=[SimpleNamespace(param_groups=[{"lr": 0.1}])],
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(_should_accumulate=lambda: False)),
    )
    module: Any = SimpleNamespace(
        device=torch.device(device),
        tokens_seen=0,
        untimed_s=0.0,
        global_step_metrics=lambda: {"loss": 1.0},
    )
    log = LogMetrics()
    log.on_train_start(trainer, module)
    for step in range(1, num_steps + 1):
        trainer.global_step, module.tokens_seen = step, 100 * step
        untimed = {1: 1.0, 4: 5.0}.get(step, 0.0)
        module.untimed_s += untimed
        now[0] += 2.0 if step == 1 else 2.0 + untimed
        log.on_train_batch_end(trainer, module, None, None, 0)
    return rows


def test_the_first_and_the_last_step_have_rows_whatever_the_interval(monkeypatch):
    assert list(logged_rows(monkeypatch, num_steps=8, interval=3)) == [1, 3, 6, 8]


def test_a_training_on_a_gpu_says_its_peak_once(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
    monkeypatch.setattr(LogMetrics, "_show", lambda *_: None)
    logged_rows(monkeypatch, num_steps=3, interval=1, device="cuda")
    assert capsys.readouterr().out.count("peak of GPU memory in the first step: 3.0 GiB") == 1


def test_untimed_seconds_do_not_count_against_tokens_per_second(monkeypatch):
    rows = logged_rows(monkeypatch, num_steps=8, interval=3)
    rates = {step: row["tokens_per_second"] for step, row in rows.items()}
    assert rates == pytest.approx({1: 100.0, 3: 50.0, 6: 50.0, 8: 50.0})


def test_one_of_several_processes_is_silent():
    stream = io.StringIO()
    progress = EvaluationProgress(stream, enabled=False)
    progress.say("nothing")
    with progress.task("talk", 1) as task:
        task.advance("nothing")
    assert stream.getvalue() == ""
