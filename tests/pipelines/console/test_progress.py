"""Progress of a long command, on a terminal and without one."""

from __future__ import annotations

import io
import re
import sys
from types import SimpleNamespace

import pytest
from pseudo_terminal import run_on_terminal

from stree_pipelines.console.progress import EvaluationProgress, clock
from stree_pipelines.evaluation.evaluate import _so_far

LABEL = "step 1600  sums_prompts T=0.7"
DETAIL = "tree τ 13.02, 97367 tok/s; chain τ 12.57, 96471; plain 95154"
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
        task.advance("tree τ 2.00")
        task.advance("tree τ 2.10")
    assert stream.getvalue() == "talk T=0  2/2  tree τ 2.10  ETA 0:00\n"


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
        method: [
            SimpleNamespace(num_new_tokens=tau * 100, num_calls=100, decode_s=tau * 100 / speed)
        ]
        for method, (tau, speed) in measured.items()
    }
    assert _so_far(finished) == DETAIL
    slow = SimpleNamespace(num_new_tokens=19, num_calls=10, decode_s=10.0)
    assert _so_far({"stree": [slow]}) == "tree τ 1.90, 1.9 tok/s"


def test_one_of_several_processes_is_silent():
    stream = io.StringIO()
    progress = EvaluationProgress(stream, enabled=False)
    progress.say("nothing")
    with progress.task("talk", 1) as task:
        task.advance("nothing")
    assert stream.getvalue() == ""


def test_times_read_like_a_clock():
    assert [clock(s) for s in (0, 61.4, 3725)] == ["0:00", "1:01", "1:02:05"]
