"""The bench of serving asks as many at once as it says, and computes its figures from moments."""

from __future__ import annotations

import json
from argparse import Namespace
from multiprocessing import Pipe
from threading import Thread

import pytest

from stree.common.errors import UsageError
from stree_lab import bench_serving
from stree_lab.benches import serving

TINY = ["--shape", "tiny", "--device", "cpu", "--vocabulary", "64", "--max_length", "96"]


@pytest.mark.parametrize(("mode", "tau"), [("plain", 1.0), ("chain", 1.75), ("tree", 2.5)])
def test_the_decoder_alone_has_as_many_under_way_and_the_given_acceptance(mode, tau):
    taus = ("--tau", "2.5", "--chain_tau", "1.75")
    bench = bench_serving.build_parser().parse_args(["o", *TINY, *taus])
    decoder = serving.random_decoder(
        Namespace(bench=bench, tree=bench.tree, num_rows=3, max_length=96)
    )
    under_way, calls, accepted, step = [], [], [], decoder.step

    def watched():
        under_way.append(decoder.num_rows - decoder.num_free_rows)
        outputs = step()
        calls.extend(each.row for each in outputs if each.tokens)
        accepted.extend(each.num_accepted for each in outputs)
        return outputs

    decoder.step = watched
    bodies = [{"prompt": [1, 2, each], "max_tokens": 41, "temperature": 0.0} for each in range(4)]
    assert serving.alone(decoder, bodies, 2, serving.tree_of(bench, mode)) > 0
    assert max(under_way) == 2
    firsts = len(bodies)  # outputs without a step
    assert 1 + sum(accepted) / (len(calls) - firsts) == pytest.approx(tau, abs=0.1)


def test_figures_are_of_the_moments():
    answered = [
        serving.Answered(0.0, 5, [1.0, 2.0, 5.0]), serving.Answered(1.0, 3, [1.5, 4.5]),
        serving.Answered(2.0, 2, [10.0]),
    ]
    figures = serving.figures_of(answered)
    assert figures["requests_per_s"] == 0.3 and figures["tokens_per_s"] == 1.0
    assert figures["first_event_ms_p50"] == 1000.0  # of 1, 0.5 and 8 s
    assert figures["gap_ms_p50"] == 3000.0 and figures["token_ms_p50"] == 1250.0


def test_what_cannot_be_measured_is_refused(tmp_path):
    out = str(tmp_path / "rows.jsonl")
    for wrong, named in (
        (["--target", "t", *TINY], "wanted one of them"), ([], "wanted one of them"),
        (["--target", "t", "--modes", "tree"], "give --drafter"),
        ([*TINY, "--modes", "fast"], "wanted some of plain, chain"),
    ):
        with pytest.raises(UsageError, match=named):
            bench_serving.main([out, *wrong])


@pytest.mark.costly
def test_a_server_of_a_shape_is_measured(tmp_path):
    out = tmp_path / "rows.jsonl"
    bench_serving.main([
        str(out), *TINY, "--modes", "plain", "chosen", "--concurrency", "2", "--clients", "1",
        "--num_requests", "4", "--new_tokens", "6", "--turns", "1", "--prompt_tokens", "5",
    ])
    rows = list(map(json.loads, out.read_text().splitlines()))
    assert [(each["mode"], each["kind"]) for each in rows] == [
        ("plain", "whole"), ("plain", "stream"), ("chosen", "whole"), ("chosen", "stream"),
    ]
    for each in rows:
        assert each["ratio"] > 0 < each["first_event_ms_p99"]
        seconds = each["seconds"]
        assert set(seconds) == {"load", "warm_up", "start", "alone", "requests"}
        assert seconds["load"] + seconds["warm_up"] < seconds["start"]


def test_a_failure_of_the_decoder_alone_is_told():
    ours, link = Pipe()
    bench = bench_serving.build_parser().parse_args(["o", *TINY])
    thread = Thread(target=serving.tell_alone, args=(None, Namespace(bench=bench, link=link)))
    thread.start()
    ours.send(("plain", [], 1))
    assert "alone has failed: " in str(ours.recv())
    ours.close()
    thread.join()
