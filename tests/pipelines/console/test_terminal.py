"""A training on a real terminal: the bar's figures fit it, and Ctrl-C is typed."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from forked import DISTILL
from pseudo_terminal import CTRL_C, Shown, run_on_terminal
from run_checks import steps_in
from tiny_run import distill_arguments

FIGURES = re.compile(r" *loss \d+\.\d{4}  acceptance 0\.\d{3}  [\d,]+ tok/s")
BAR = re.compile(r"step [━╸╺]+ +(\d+)/(\d+) ETA ([-\d:]+)")


def on_terminal(workspace: Path, run_dir: Path, steps: int) -> list[str]:
    """Return the command as it is typed, which decides itself if there is a bar."""
    arguments = distill_arguments(workspace, run_dir, steps=steps)
    at = arguments.index("--trainer.enable_progress_bar")
    return [sys.executable, str(DISTILL), *arguments[:at], *arguments[at + 2 :]]


def bars_of(shown: Shown, columns: int) -> list[re.Match[str]]:
    """Return each bar that was drawn; bars and figures must be whole and fit the terminal."""
    bars = [match for match in map(BAR.fullmatch, shown.lines) if match]
    figures = [match for match in map(FIGURES.fullmatch, shown.lines) if match]
    assert bars and figures
    assert all(len(match[0]) <= columns for match in (*bars, *figures))
    assert not [line for line in shown.lines if "loss" in line and "…" in line]
    return bars


@pytest.mark.costly
def test_at_160_columns_a_run_shows_its_figures_to_the_end(workspace, tmp_path):
    run_dir = tmp_path / "run"
    shown = run_on_terminal(on_terminal(workspace, run_dir, 20), 160)
    assert shown.code == 0, shown.lines
    assert bars_of(shown, 160)[-1].groups() == ("20", "20", "0:00:00")
    assert any(re.match(r"step 8/20  validation loss \d", line) for line in shown.lines)
    assert any(line.endswith("/drafter/latest") for line in shown.lines[-3:])
    assert not [line for line in shown.lines if re.search("Epoch|v_num|Seed|TPU|GPU", line)]


@pytest.mark.costly
def test_at_80_columns_ctrl_c_saves_and_says_how_to_go_on(workspace, tmp_path):
    run_dir = tmp_path / "run"
    command = on_terminal(workspace, run_dir, 5000)
    shown = run_on_terminal(command, 80, keys=[(" tok/s", CTRL_C)])
    assert shown.code == 130, shown.lines
    assert {bar[2] for bar in bars_of(shown, 80)} == {"5000"}
    assert any(line.startswith("interrupted: stopping where") for line in shown.lines)
    said = re.sub(r"[\r\n]+", "", shown.raw[shown.raw.index("error: interrupted after") :])
    step, typed = re.search(r"after step (\d+); .* to go on, run: python (.*)$", said).groups()
    assert int(step) == max(steps_in(run_dir / "checkpoints"))
    assert shlex.split(typed) == command[1:]
    assert shown.raw.rindex("\x1b[?25h") > shown.raw.rindex("\x1b[?25l")  # the cursor is back
