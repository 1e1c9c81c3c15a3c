"""Time an evaluation's answers so that no figure depends on what ran before."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from tiny_evaluation import export, heard_by, is_warm_up, quiet, settings_for

from stree.common.errors import InvariantBroken, OutOfMemory
from stree.drafters.names import DrafterName
from stree_pipelines.evaluation.answering import decoders
from stree_pipelines.evaluation.result_store import ResultStore

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.costly
def test_everything_is_warmed_up_before_anything_is_timed(world, tmp_path):
    """Each tree warms up at each temperature, and each checkpoint's own decoders do."""
    calls = []
    settings = settings_for(world, tmp_path, temperatures=(0.0, 0.5, 1.0), limit=1)
    evaluation = quiet(settings, make_decoder=heard_by(lambda *call: calls.append(call)))
    for step, trees in ((10, [None, "chain-4", "paper"]), (100, ["chain-4", "paper"])):
        calls.clear()
        evaluation.evaluate(export(world, step))
        is_timed = [not is_warm_up(generation) for _, _, generation, _ in calls]
        warmed = [
            (tree and tree.name, generation.temperature)
            for tree, _, generation, _ in calls[: is_timed.index(True)]
        ]
        assert warmed == [(tree, t) for t in (0.0, 0.5, 1.0) for tree in trees]


class FirstCallsAreSlow:
    """A decoder with a clock made by hand: a step takes 10 ms, the first steps of a tree at a
    temperature a second more; prefill 10 ms, the first of a prompt's length in the process 1 s."""

    def __init__(self) -> None:
        self.rules, self.lengths = set(), set()

    def __call__(self, *args, **kwargs):
        return heard_by(self.time)(*args, **kwargs)

    def time(self, tree, prompt_ids, generation, output):
        stats, rule = output.stats, (tree, generation.temperature)
        if stats.num_calls:
            stats.decode_s = 0.01 * stats.num_calls + (rule not in self.rules)
            stats.time_ms = {"verify": 1e3 * stats.decode_s}
            self.rules.add(rule)
        stats.prefill_s = 0.01 if len(prompt_ids) in self.lengths else 1.0
        self.lengths.add(len(prompt_ids))


@pytest.mark.costly
def test_no_figure_depends_on_what_ran_first(world, tmp_path):
    speeds = []
    for order in (("autoregressive", "vanilla_sd", "stree"), ("stree", "autoregressive")):
        out = tmp_path / order[0]
        settings = settings_for(world, out, methods=order, temperatures=(1.0, 0.0))
        rows = quiet(settings, make_decoder=FirstCallsAreSlow()).evaluate(export(world, 10))
        samples = [s for row in rows for s in ResultStore(out).samples(row)]
        assert all(s.prefill_s == pytest.approx(0.01 * len(s.turns)) for s in samples)
        assert all(s.decode_s == pytest.approx(0.01 * s.num_calls) for s in samples)
        speeds.append({
            (row.method, row.temperature): (row.tokens_per_second_e2e, row.speedup)
            for row in rows if row.method != "vanilla_sd"
        })
    assert speeds[0] == speeds[1]


@pytest.mark.costly
def test_of_long_prompts_only_what_differs_is_read_twice(world, tmp_path, monkeypatch):
    """Read in pieces of 8 tokens: before it answers, a decoder has read each kind of them, and a
    prompt that was as long; but for the first one's, a warm-up has three pieces at most."""
    monkeypatch.setattr(decoders, "READ_AT_ONCE", 8)
    prompts = [
        {"id": str(count), "turns": [" ".join(["why"] * count)]} for count in (60, 50, 20, 51, 4)
    ]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    calls: dict[str, list[tuple[int, bool]]] = {"plain": [], "chain-4": [], "paper": []}

    def listen(tree, prompt_ids, generation, output):
        name = tree.name if tree else "plain"
        calls[name].append((len(prompt_ids), is_warm_up(generation)))

    settings = settings_for(
        world, tmp_path / "out", benchmarks=[str(tmp_path / "long.jsonl")], temperatures=[0.0, 1.0]
    )
    quiet(settings, make_decoder=heard_by(listen)).evaluate(export(world, 10))

    def pieces(length: int) -> set[tuple[int, bool]]:
        return {(min(8, length - start), start > 0) for start in range(0, length, 8)}

    for heard in calls.values():
        read: list[int] = []
        for length, is_untimed in heard:
            if is_untimed:
                read.append(length)
            else:
                assert length <= max(read)
                assert pieces(length) <= set().union(*map(pieces, read))
        first, second, *others = read  # the first prompt, at each temperature
        assert first == second > 24 and 0 < len(others) <= 4 and max(others) <= 24


class BusierAndBusier:
    """A decoder on a machine where each prompt takes half as long again as the one before; a step
    of plain decoding would take 10 ms, another 20 ms, without that."""

    def __init__(self) -> None:
        self.load = 1.0

    def __call__(self, *args, **kwargs):
        return heard_by(self.time)(*args, **kwargs)

    def time(self, tree, prompt_ids, generation, output):
        if tree is None and not is_warm_up(generation):
            self.load *= 1.5
        stats = output.stats
        stats.decode_s = self.load * stats.num_calls * (0.01 if tree is None else 0.02)
        stats.time_ms = {"verify": 1e3 * stats.decode_s}


@pytest.mark.costly
def test_a_speedup_is_over_plain_decoding_right_before(world, tmp_path):
    """Plain decoding answers the same prompt right before, however busy the machine gets."""
    prompts = [{"id": str(i), "turns": [f"What is {i}?"]} for i in range(3)]
    (tmp_path / "short.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    settings = settings_for(
        world, tmp_path / "out", benchmarks=[str(tmp_path / "short.jsonl")], temperatures=[0.0, 1.0]
    )
    evaluation = quiet(settings, make_decoder=BusierAndBusier())
    for step in (1, 10):
        evaluation.evaluate(export(world, step))
    store = ResultStore(tmp_path / "out")
    drafting = [row for row in store.results() if row.step]
    assert len(drafting) == 8
    for row in drafting:
        for sample in store.samples(row):
            assert sample.decode_s / sample.num_calls == pytest.approx(
                2 * sample.baseline.decode_s / sample.baseline.num_new_tokens
            )
        # What the row says of plain decoding is of the same runs.
        per_call_ms = sum(row.baseline_time_ms.values())
        assert row.speedup == pytest.approx(row.tokens_per_second * per_call_ms / 1e3)
    plain = [sum(row.baseline_time_ms.values()) for row in drafting if row.method == "stree"]
    assert plain == sorted(plain) and plain[-1] > 5 * plain[0]


@pytest.mark.parametrize("failing", ["paper", "loading"])
def test_a_checkpoint_that_failed_leaves_no_memory_in_use(world, tmp_path, failing, monkeypatch):
    """Decoders are freed although the command keeps the error until its last line."""
    made = []

    def breaking(*args, **kwargs):
        decoder = heard_by(listen)(*args, **kwargs)
        made.append(weakref.ref(decoder))
        return decoder

    def listen(tree, prompt_ids, generation, output):
        if failing == "paper" and tree is not None and tree.name == "paper":
            raise InvariantBroken("NaN")

    evaluation = quiet(settings_for(world, tmp_path), make_decoder=breaking)
    load = DrafterName.load

    def loading(self, *given):
        model = load(self, *given)
        made.append(weakref.ref(model))
        if failing == "loading":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model

    monkeypatch.setattr(DrafterName, "load", loading)
    with pytest.raises(InvariantBroken if failing == "paper" else OutOfMemory) as failure:
        evaluation.evaluate(export(world, 10))
    kept = failure.value
    del failure
    assert kept.exit_code in (70, 71)
    alive = [each() for each in made if each() is not None]
    assert [each.tree.num_nodes for each in alive] == [1]  # plain decoding's


@pytest.mark.costly
def test_a_choice_of_a_deep_tree_has_room_to_be_timed(world, tmp_path):
    settings = settings_for(
        world, tmp_path, methods=("stree",), tree="chain-1 or chain-99", limit=1, max_new_tokens=1
    )
    (row,) = quiet(settings).evaluate(export(world, 10))
    assert row.tree.name == "chain-1 or chain-99"
