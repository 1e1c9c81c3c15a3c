"""Evaluations that are killed, resumed, shared or take turns give the rows of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lanes import quick_first
from other_days import DATED, set_day
from tiny_evaluation import (
    export,
    heard_by,
    is_warm_up,
    quiet,
    samples_without_timings,
    settings_for,
    without_timings,
)

from stree.decoder import Decoder
from stree_pipelines.evaluation.context import Workers
from stree_pipelines.evaluation.plan import prompt_seed
from stree_pipelines.evaluation.result_store import ResultStore

REPOSITORY = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.usefixtures("one_thread")


class Killed(Exception):
    pass


class DiesAfter:
    """A decoder that works a number of times, then goes as a kill goes: without any clean-up."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self, *args, **kwargs):
        decoder = Decoder(*args, **kwargs)
        generate = decoder.generate

        def counted(*args, **kwargs):
            if self.left == 0:
                raise Killed
            self.left -= 1
            return generate(*args, **kwargs)

        decoder.generate = counted
        return decoder


@pytest.mark.costly
@pytest.mark.parametrize("survived", quick_first([(12,)], [(0,), (5,), (22,)]))
def test_killed_and_resumed_gives_the_same_rows(world, tmp_path, survived, complete):
    settings = settings_for(world, tmp_path, temperatures=(0.0, 1.0))
    with pytest.raises(Killed):
        quiet(settings, make_decoder=DiesAfter(survived)).evaluate(export(world, 10))
    for journal in (tmp_path / "journals").glob("*"):
        with open(journal, "ab") as file:
            file.write(b'{"version":1,"method":"torn')
    rows = quiet(settings).evaluate(export(world, 10))
    expected = [r for r in complete.results() if r.step in (None, 10)]
    by_key = {row.key: row for row in expected}
    assert without_timings(rows) == without_timings([by_key[row.key] for row in rows])
    # Every speculative prompt has a baseline of the process that measured it.
    store = ResultStore(tmp_path)
    assert all(s.baseline for row in rows if row.step for s in store.samples(row))


def test_a_resumed_run_does_not_repeat_finished_prompts(world, tmp_path):
    """The kill comes after warm-up and answer of the first prompt's three methods."""
    settings = settings_for(world, tmp_path)
    with pytest.raises(Killed):
        quiet(settings, make_decoder=DiesAfter(6)).evaluate(export(world, 10))
    asked = []
    evaluation = quiet(settings, make_decoder=heard_by(lambda *call: asked.append(call[1:3])))
    evaluation.evaluate(export(world, 10))
    first_prompt = evaluation.decoders.prompt_ids(evaluation.benchmarks[0].prompts[0])
    assert first_prompt not in [prompt_ids for prompt_ids, _ in asked]
    # 3 methods × 4 turns of the other three prompts
    assert sum(not is_warm_up(generation) for _, generation in asked) == 12


def test_a_template_that_prints_the_date_has_one_in_all_prompts(world, tmp_path, monkeypatch):
    """The second half is answered on the next day."""
    (tmp_path / "dated.jinja").write_text(DATED)
    settings = settings_for(
        world, tmp_path / "out", chat_template=str(tmp_path / "dated.jinja"), methods=("stree",)
    )
    set_day(monkeypatch, 26)
    with pytest.raises(Killed):
        quiet(settings, make_decoder=DiesAfter(6)).evaluate(export(world, 10))
    set_day(monkeypatch, 27)
    asked = []
    evaluation = quiet(settings, make_decoder=heard_by(lambda *call: asked.append(call[1])))
    rows = evaluation.evaluate(export(world, 10))
    assert {row.template_date for row in rows} == {"2024-07-26"}
    for ids in asked:
        assert evaluation.decoders.tokenizer.decode(ids).startswith("Today is 26 July 2024.")
    assert all(sample.turns for row in rows for sample in evaluation.store.samples(row))


@pytest.mark.costly
@pytest.mark.long  # through the launcher; tests/faults/test_eval_workers.py starts them itself
def test_two_processes_give_the_rows_of_one(world, tmp_path, complete):
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
        "--main_process_port", "0", "pipelines/eval_spec.py",
        "--target", str(world / "target"), "--checkpoint", str(export(world, 10)),
        "--benchmarks", str(world / "talk.jsonl"), "--temperatures", "0", "1",
        "--max-new-tokens", "12", "--device", "cpu", "--ignore-eos", "--out", str(tmp_path),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    store = ResultStore(tmp_path)
    rows = store.results()
    assert {row.environment.num_processes for row in rows} == {2}
    by_key = {row.key: row for row in complete.results()}
    assert without_timings(rows) == without_timings([by_key[row.key] for row in rows])
    expected = samples_without_timings(complete)
    assert all(sample in expected for sample in samples_without_timings(store))


def test_prompts_are_shared_each_exactly_once():
    shares = [Workers(rank, 3).share(range(10)) for rank in range(3)]
    assert sorted(item for share in shares for item in share) == list(range(10))


def test_seeds_depend_on_what_is_asked_only():
    seeds = {prompt_seed(s, "b", p, t) for s in (0, 1) for p in ("x", "y") for t in (0, 1)}
    assert len(seeds) == 8
    assert prompt_seed(0, "b", "x", 0) == prompt_seed(0, "b", "x", 0)
    assert all(0 <= seed < 2**63 for seed in seeds)
