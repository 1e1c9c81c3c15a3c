"""Requests that arrive by chance, on a clock made by hand: a step takes a second."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny_evaluation import export, make_world, tiny_model

from stree.batching.batch_decoder import BatchDecoder
from stree.batching.sequences import Request
from stree.common.errors import InvariantBroken, UsageError
from stree.generation import GenerationConfig
from stree_lab import bench_queue, bench_report
from stree_lab.bench_report import rows_of_file
from stree_lab.queue import bench as queue_bench
from stree_lab.queue.queueing import (
    Policy,
    figures_of,
    poisson_arrivals,
    serve,
)

RESULTS = Path(__file__).parents[3] / "docs/results"
CONTINUOUS = Policy("continuous")


pytestmark = pytest.mark.usefixtures("one_thread")


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wait_until(self, moment: float) -> None:
        assert self.time < moment < math.inf
        self.time = moment


class SecondsLong(BatchDecoder):
    """A decoder whose steps take a second each; their starts are noted, with the rows taken."""

    def __init__(self, clock: Clock, num_rows: int = 2) -> None:
        super().__init__(tiny_model(0, 64), num_rows=num_rows, max_length=64)
        self.clock, self.steps = clock, []

    def step(self):
        self.steps.append((self.clock.time, self.num_rows - self.num_free_rows))
        self.clock.time += 1
        return super().step()


def served(lengths, arrivals, policy, **parts):
    """Serve requests of these lengths: one of n tokens takes n steps, and the first reads its
    prompt."""
    decoder = SecondsLong(Clock(), **parts)
    requests = [Request([1, 2], GenerationConfig(n, ignore_eos=True)) for n in lengths]
    return serve(decoder, requests, arrivals, policy, decoder.clock), decoder


def moments(traffic) -> list[tuple[float, float, float]]:
    return [(r.admitted, r.first_token, r.finished) for r in traffic.requests]


def test_continuous_admission_fills_a_row_as_soon_as_it_is_free():
    traffic, _ = served([3, 5, 3], [1.0, 1.0, 2.5], CONTINUOUS)
    # The third waits for the first one's row.
    assert moments(traffic) == [(1, 2, 4), (1, 2, 6), (4, 5, 7)]
    assert traffic.duration_s == 6
    figures = figures_of(traffic)
    assert figures["latency_s"]["mean"] == pytest.approx((3 + 5 + 4.5) / 3)
    assert figures["latency_s"]["p50"] == 4.5
    assert figures["time_to_first_token_s"]["mean"] == pytest.approx((1 + 1 + 2.5) / 3)
    assert figures["waiting_s"]["mean"] == pytest.approx(1.5 / 3)
    assert figures["throughput"] == 11 / 6 and figures["requests_per_second"] == 3 / 6
    assert figures["occupancy"] == pytest.approx(11 / 12) and figures["acceptance_length"] == 1


def test_a_queue_is_cleared_when_it_is_full_or_its_first_request_waited_long_enough():
    traffic, decoder = served([3] * 4, [1.0, 2.0, 9.0, 20.0], Policy("clearing", 2, 4.0))
    # Full at 2; the third is alone after 4 s, as is the fourth.
    assert moments(traffic) == [(2, 3, 5), (2, 3, 5), (13, 14, 16), (24, 25, 27)]
    assert [rows for _, rows in decoder.steps] == [2, 2, 2, 1, 1, 1, 1, 1, 1]
    assert figures_of(traffic)["occupancy"] == pytest.approx(12 / (2 * 26))


def test_a_queue_waits_from_its_first_request_whatever_comes_later():
    """Neither queue fills: one has its first at 1 s, the other at 10 s."""
    traffic, _ = served([2] * 4, [1.0, 3.0, 10.0, 13.5], Policy("clearing", 3, 4.0), num_rows=3)
    assert [r.admitted for r in traffic.requests] == [5, 5, 14, 14]


def test_a_cleared_queue_is_a_batch_of_its_own():
    """The row that is free early stays empty, and what waits too long waits for the batch."""
    traffic, _ = served([3, 7, 3, 3], [0.0, 0.0, 1.0, 1.0], Policy("clearing", 2, 2.0))
    assert moments(traffic) == [(0, 1, 3), (0, 1, 7), (7, 8, 10), (7, 8, 10)]
    better, _ = served([3, 7, 3, 3], [0.0, 0.0, 1.0, 1.0], CONTINUOUS)
    assert figures_of(better)["latency_s"]["mean"] < figures_of(traffic)["latency_s"]["mean"]


def test_no_more_than_the_rows_are_cleared_at_once():
    traffic, _ = served([3] * 3, [0.0, 0.0, 0.0], Policy("clearing", 1, 9.0))
    assert [r.admitted for r in traffic.requests] == [0, 0, 3]


def test_traffic_is_poisson_and_its_seed_s():
    arrivals = poisson_arrivals(4.0, 20_000, 1)
    gaps = np.diff(arrivals, prepend=0.0)
    assert (gaps > 0).all()
    # An exponential's mean and deviation are alike; five standard errors of 20,000.
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.036)
    assert gaps.std() == pytest.approx(1 / 4, rel=0.08)
    assert (poisson_arrivals(4.0, 9, 1) == arrivals[:9]).all()
    assert poisson_arrivals(8.0, 9, 1) == pytest.approx(arrivals[:9] / 2)
    assert (poisson_arrivals(4.0, 9, 2) != arrivals[:9]).all()


def test_an_error_leaves_the_rows_free():
    decoder = SecondsLong(Clock())
    step = decoder.step

    def failing():
        reports = step()
        reports[0].error = InvariantBroken("the target's logits are not finite")
        return reports

    decoder.step = failing
    with pytest.raises(InvariantBroken):
        serve(decoder, [Request([1], GenerationConfig(9))], [0.0], CONTINUOUS, decoder.clock)
    assert decoder.num_free_rows == 2


# The command


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


def options(world, out, *more: str) -> list[str]:
    return [
        str(out), "--target", str(world / "target"), "--drafter", str(export(world, 10)),
        "--prompts", str(world / "talk.jsonl"), "--rates", "200", "--num_requests", "6",
        "--batch_size", "3", "--max_new_tokens", "6", "--max_wait_s", "0.01", "--device", "cpu",
        "--temperature", "1", *more,
    ]


@pytest.mark.costly
def test_each_setting_is_a_row_that_is_measured_once(world, tmp_path, capsys, monkeypatch):
    out = tmp_path / "queue.jsonl"
    bench_queue.main(options(world, out))
    said = capsys.readouterr().err
    assert "4 settings of 6 requests, 4 to go" in said
    assert "clearing stree 200/s  6/6  latency" in said
    rows = list(rows_of_file(out))
    assert [(row["policy"], row["method"]) for row in rows] == [
        (policy, method) for method in ("autoregressive", "stree")
        for policy in ("continuous", "clearing")
    ]
    for row in rows:
        latency, first, waiting = (
            row[name] for name in ("latency_s", "time_to_first_token_s", "waiting_s")
        )
        assert latency["p50"] <= latency["p95"] <= row["duration_s"]
        assert waiting["mean"] <= first["mean"] <= latency["mean"]
        assert 0 < row["occupancy"] <= 1 and row["throughput"] > row["requests_per_second"]
        clears, drafts = row["policy"] == "clearing", row["method"] == "stree"
        assert (row["queue_size"], row["max_wait_s"]) == ((3, 0.01) if clears else (None, None))
        tree = row["tree"] and row["tree"]["name"]
        assert (row["step"], tree) == ((10, "paper") if drafts else (None, None))
    bench_report.main([str(tmp_path)])
    said = capsys.readouterr().out
    table = [line.split("|")[1:-1] for line in said.splitlines() if line.startswith("| ")]
    assert [cell.strip() for cell in table[0][:4]] == ["policy", "method", "rate", "latency s mean"]
    assert [float(line[3]) for line in table[1:]] == pytest.approx(
        [row["latency_s"]["mean"] for row in rows], rel=1e-3
    )

    more = options(world, out, "--queue_size", "2")
    bench_queue.main(more)
    again = list(rows_of_file(out))
    assert again[:4] == rows and [row["queue_size"] for row in again[4:]] == [2, 2]
    monkeypatch.setattr(
        queue_bench.QueueBench, "measure", lambda *_: pytest.fail("its row is there")
    )
    bench_queue.main(more)
    with open(out, "a") as file:
        file.write('{"policy": "clear')  # torn by a kill
    assert list(rows_of_file(out)) == again
    monkeypatch.undo()
    measured = []
    monkeypatch.setattr(queue_bench, "VERSION", 3)
    monkeypatch.setattr(
        queue_bench.QueueBench, "measure", lambda *_: measured.append(1) or rows[0]
    )
    bench_queue.main(more)
    assert len(measured) == 4, "rows of another version are others"
    assert list(rows_of_file(out)) == [*again, *[rows[0]] * 4]


def test_committed_rows_are_a_table(tmp_path, capsys):
    shutil.copy(RESULTS / "h200-batch/queue/queue.jsonl", tmp_path)
    bench_report.main([str(tmp_path)])
    assert "| clearing   | stree          | 400  | 0.09698" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--batch_size", "1"], "at least 2 rows"),
        (["--rates", "0"], "above 0"),
        (["--rates", "1", "1"], "above 0, each once"),
        (["--policies", "clearing", "clearing"], "each once"),
        (["--policies", "lifo"], "wanted some of continuous, clearing"),
        (["--queue_size", "4"], "wanted 1 to the 3 rows"),
        (["--max_wait_s", "-1"], "seconds from 0 on"),
        (["--num_requests", "0"], "at least 1"),
        (["--methods", "medusa"], "wanted some of"),
    ],
)
def test_what_makes_no_sense_is_refused(world, tmp_path, more, message):
    with pytest.raises(UsageError, match=message):
        bench_queue.main(options(world, tmp_path / "o.jsonl", *more))
    assert not list(tmp_path.iterdir())


def test_a_method_that_drafts_wants_a_drafter(world, tmp_path):
    with pytest.raises(UsageError, match="give --drafter"):
        bench_queue.main([
            str(tmp_path / "o"), "--target", str(world / "target"), "--methods", "stree",
        ])


def test_graphs_are_captured_before_the_clock_runs(captured_on_cpu):
    """Prompts of all sizes and steps of all numbers of rows have their graphs."""
    decoder = BatchDecoder(tiny_model(0, 64), num_rows=4, max_length=64)
    requests = [
        Request(list(range(1, 1 + count)), GenerationConfig(4, ignore_eos=True))
        for count in (3, 9, 20, 4, 30, 5)
    ]
    queue_bench.rehearse(decoder, requests)
    assert decoder.num_free_rows == 4
    runner = decoder.worker.runner
    ready = set(runner.step_graphs), set(runner.prefiller.graphs)
    assert ready[0] and ready[1]
    decoder.generate(requests)
    assert (set(runner.step_graphs), set(runner.prefiller.graphs)) == ready
