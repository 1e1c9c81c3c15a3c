"""What a long command shows on a terminal, and where there is none."""

from __future__ import annotations

import io
import re
import sys

import pytest
from pseudo_terminal import run_on_terminal

from stree_pipelines.progress import EvaluationProgress

LABEL = "step 1600  sums_prompts T=0.7"
TREE = "stree τ 3.02, 7366.9 tok/s"
DETAIL = f"{TREE}; vanilla_sd τ 2.57, 6470.8 tok/s; autoregressive 5154.1 tok/s"
SCRIPT = """
import sys
from stree_pipelines.progress import EvaluationProgress
label, detail = sys.argv[1:]
progress = EvaluationProgress()
progress.say("3 checkpoints")
with progress.task(label, 4) as task:
    for _ in range(3):
        task.advance(detail)
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
    bar, *figures = shown.lines[at:]
    assert bar.count("━") + bar.count("╸") + bar.count("╺") == 20
    assert re.search(r" 3/4 ETA \d:\d\d:\d\d$", bar)
    assert figures[0].strip().startswith(TREE)
    assert " ".join(" ".join(figures).split()) == DETAIL


def test_one_of_several_processes_is_silent():
    stream = io.StringIO()
    progress = EvaluationProgress(stream, enabled=False)
    progress.say("nothing")
    with progress.task("talk", 1) as task:
        task.advance("nothing")
    assert stream.getvalue() == ""
