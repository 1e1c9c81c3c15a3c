"""Answers that the machine held up: found, marked, and asked for once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hand_made_run import make_sample
from tiny_evaluation import export, make_world, quiet, row_of, settings_for

from stree.decoder import Decoder
from stree_pipelines.evaluation.answering.stalls import (
    outliers,
    stalled,
    waiting_s,
    waiting_share,
)
from stree_pipelines.evaluation.records import BaselineTiming
from stree_pipelines.evaluation.result_store import ResultStore

RESULTS = Path(__file__).parents[4] / "docs/results"
STEP_S, STALL_S = 0.001, 0.25
HELD_UP = "Question three?"


def answers(count=6, method="autoregressive", calls=60):
    step = None if method == "autoregressive" else 100
    return [make_sample(method, step, "mt_bench", index, 0.0, calls) for index in range(count)]


def held_up(sample, seconds, part="host"):
    """Return the sample with a wait, which counts as this part of its steps."""
    times = {**sample.time_ms, part: sample.time_ms.get(part, 0.0) + 1e3 * seconds}
    return sample.model_copy(update={"decode_s": sample.decode_s + seconds, "time_ms": times})


def test_an_answer_that_waited_is_an_outlier_of_its_row():
    samples = answers()
    assert outliers(samples) == []
    assert outliers([*samples[:2], held_up(samples[2], 0.4), *samples[3:]]) == [2]
    assert outliers([*samples[:2], held_up(samples[2], 0.2), *samples[3:]]) == []  # a third of it


def test_an_answer_of_slow_steps_is_one_without_any_wait():
    samples = answers()
    slow = held_up(samples[0], 1.1 * samples[0].decode_s, "verify")
    assert waiting_s(slow) == pytest.approx(waiting_s(samples[0]))
    assert outliers([slow, *samples[1:]]) == [0]


def test_a_short_wait_of_a_short_answer_moves_no_figure():
    samples = answers()
    tenth = {"num_calls": 6, "num_new_tokens": 6, "decode_s": samples[0].decode_s / 10}
    short = samples[0].model_copy(update={**tenth, "time_ms": {"verify": 60.0}})
    assert outliers([held_up(short, 0.04), *samples]) == []
    assert outliers([held_up(short, 0.08), *samples]) == [0]


def test_of_few_answers_none_is_an_outlier():
    samples = answers(4)
    assert outliers([held_up(samples[0], 9.0), *samples[1:]]) == []


def test_plain_decoding_drafts_nothing_so_that_it_waits_whatever_the_time_is_called():
    plain, drafted = answers(1)[0], answers(1, "stree", 20)[0]
    before = waiting_s(plain)
    assert waiting_s(held_up(plain, 0.25, "draft")) == pytest.approx(before + 0.25)
    assert waiting_s(held_up(drafted, 0.25, "draft")) == 0
    assert waiting_s(held_up(drafted, 0.25)) == pytest.approx(0.25)
    assert waiting_s(plain.model_copy(update={"time_ms": {}})) is None


def test_a_plain_answer_that_waited_marks_what_is_compared_with_it():
    samples = answers(6, "stree", 20)
    waited = BaselineTiming(num_new_tokens=60, prefill_s=0.01, decode_s=2.0)
    samples[3] = samples[3].model_copy(update={"baseline": waited})
    assert [each.prompt_id for each in stalled(samples)] == ["q3"]


def test_rows_are_judged_each_by_itself():
    """Half would be outliers of two rows together, one of which is three times as fast."""
    fast = [each.model_copy(update={"decode_s": each.decode_s / 3}) for each in answers()]
    other = [each.model_copy(update={"benchmark": "gsm8k"}) for each in fast]
    assert stalled([*answers(), *other]) == []


def test_a_batch_is_judged_by_its_steps_not_by_shares_of_them():
    """The last answer is alone, and bears its steps by itself."""
    full = {"batch_size": 4, "time_ms": {}, "call_share": 15.0}
    samples = [
        each.model_copy(update={**full, "decode_s": 15 * 0.01, "baseline": None})
        for each in answers(6, "stree", 60)
    ]
    alone = samples[0].model_copy(update={"call_share": 60.0, "decode_s": 60 * 0.01})
    assert stalled([*samples[:5], alone]) == []
    slow = alone.model_copy(update={"decode_s": 60 * 0.03})
    assert stalled([*samples[:5], slow]) == [slow]


def test_the_committed_answer_that_waited_251_of_279_ms_shows():
    store = ResultStore(RESULTS / "h200-drafters/batches-alone")
    rows = [row for row in store.results() if row.benchmark == "mt_bench" and row.temperature]
    for row in rows:
        (found,) = stalled(store.samples(row))
        assert found.prompt_id == "mt_bench-89"
        assert waiting_share(row.baseline_time_ms) == pytest.approx(0.44, abs=0.005)
    plain = next(row for row in rows if row.tree is None)
    (found,) = stalled(store.samples(plain))
    assert 1e3 * waiting_s(found) == pytest.approx(251, abs=0.5)
    assert 1e3 * found.decode_s == pytest.approx(279, abs=0.5)


class Machine:
    """Makes decoders whose steps take as long as each other, but for one prompt's plain answers,
    some of which wait."""

    def __init__(self, num_waits: int) -> None:
        self.num_waits = num_waits

    def __call__(self, *args, **kwargs):
        machine = self

        class Timed(Decoder):
            def generate(self, prompt, generation_config=None, **more):
                output = super().generate(prompt, generation_config, **more)
                stats = output.stats
                is_warm_up = stats.num_calls < 11
                waited_s = STALL_S if not is_warm_up and machine.holds_up(self, prompt) else 0.0
                stats.decode_s = stats.num_calls * STEP_S + waited_s
                stats.time_ms = {"verify": 1e3 * stats.num_calls * STEP_S, "host": 1e3 * waited_s}
                return output

        return Timed(*args, **kwargs)

    def holds_up(self, decoder, prompt) -> bool:
        text = decoder.tokenizer.decode(prompt)
        if decoder.drafter is not None or HELD_UP not in text or not self.num_waits:
            return False
        self.num_waits -= 1
        return True


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = make_world(tmp_path_factory.mktemp("world"))
    words = ("one", "two", "three", "four", "five", "six")
    prompts = [{"id": each, "category": "", "turns": [f"Question {each}?"]} for each in words]
    (root / "questions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in prompts))
    return root


def evaluated(world, out, num_waits, **changes):
    questions = (str(world / "questions.jsonl"),)
    settings = settings_for(world, out, benchmarks=questions, methods=("autoregressive", "stree"))
    evaluation = quiet(settings, make_decoder=Machine(num_waits), **changes)
    evaluation.evaluate(export(world, 10))
    return ResultStore(out)


@pytest.fixture(scope="module")
def quietly(world, tmp_path_factory):
    return evaluated(world, tmp_path_factory.mktemp("quiet"), 0)


@pytest.mark.costly
def test_what_is_held_up_marks_what_is_compared_with_it(world, tmp_path, quietly):
    """Its first answer stays: a later one that is kept for being faster would bend the speeds."""
    store = evaluated(world, tmp_path, 1)
    for step, method in ((None, "autoregressive"), (10, "stree")):
        row = row_of(store, step, method)
        assert row.num_stalled == 1
        assert [s.prompt_id for s in store.samples(row) if s.is_stalled] == ["three"]
    plain = {s.prompt_id: s for s in store.samples(row_of(store, None, "autoregressive"))}
    assert plain["three"].decode_s > STALL_S > plain["two"].decode_s
    drafted = row_of(store, 10, "stree")
    assert drafted.speedup > 3 * drafted.speedup_prompt_median  # which one answer does not move
    assert drafted.speedup_prompt_median == pytest.approx(
        row_of(quietly, 10, "stree").speedup_prompt_median
    )
