"""Evaluation on a tiny target through the real engine."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import toys
from damage import flip_last_byte
from lanes import quick_first
from tiny_evaluation import (
    Lies,
    export,
    make_world,
    quiet,
    row_of,
    samples_without_timings,
    settings_for,
    tiny_model,
    without_timings,
)

from stree.checkpoints.identity import checkpoint_sha256
from stree.checkpoints.load_save import load_model, save_model
from stree.checkpoints.tokenizer import load_tokenizer
from stree.common.errors import BadData, CheckpointRefused, InvariantBroken, OutOfMemory, UsageError
from stree.decoder import Decoder
from stree_kernels import naive
from stree_pipelines.console.command_line import typed_command
from stree_pipelines.console.progress import EvaluationProgress
from stree_pipelines.data.tokenizer_training import train_tokenizer
from stree_pipelines.eval_spec import build_parser
from stree_pipelines.eval_spec import main as eval_spec
from stree_pipelines.evaluation.answering import answers, decoders
from stree_pipelines.evaluation.context import Workers
from stree_pipelines.evaluation.evaluate import Evaluation, require_lossless
from stree_pipelines.evaluation.plan import prompt_seed, resolve
from stree_pipelines.evaluation.records import Divergence
from stree_pipelines.evaluation.result_store import ResultStore
from stree_pipelines.reports.run_data import load_run

REPOSITORY = Path(__file__).resolve().parents[3]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def complete(world, tmp_path_factory):
    """All three checkpoints at T = 0 and 1, in one process."""
    out = tmp_path_factory.mktemp("complete")
    evaluation = quiet(settings_for(world, out, temperatures=(0.0, 1.0)))
    for step in (1, 10, 100):
        evaluation.evaluate(export(world, step))
    return ResultStore(out)


def test_a_target_of_which_no_eos_is_known_is_refused_unless_eos_is_ignored(world, tmp_path):
    """Its rows would say that answers end at EOS."""
    model, tokenizer = load_model(world / "target"), load_tokenizer(world / "target")
    model.config = model.config.replace(eos_token_ids=())
    save_model(model, tmp_path / "asked", tokenizer)
    tokenizer.eos_token = None
    save_model(model, tmp_path / "endless", tokenizer)
    quiet(settings_for(world, tmp_path / "out", target=str(tmp_path / "asked"), ignore_eos=False))
    settings = {"target": str(tmp_path / "endless"), "chat_template": "stree-chat"}
    quiet(settings_for(world, tmp_path / "out", **settings))
    with pytest.raises(UsageError, match=r"neither the config of .*/endless nor its tokenizer"):
        quiet(settings_for(world, tmp_path / "out", **settings, ignore_eos=False))


def test_answers_with_and_without_ignore_eos_are_rows_apart_in_one_folder(world, tmp_path):
    for ignored in (True, False):
        settings = settings_for(world, tmp_path, methods=["autoregressive"], ignore_eos=ignored)
        quiet(settings).evaluate(None)
    store = ResultStore(tmp_path)
    rows = store.results()
    assert [row.ignore_eos for row in rows] == [True, False]
    assert (rows[0].num_ended, rows[0].num_cut) == (0, 5)  # prompt b has two turns
    assert rows[1].num_ended + rows[1].num_cut == 5
    assert all(len(store.samples(row)) == row.num_prompts for row in rows)


def test_one_row_per_checkpoint_method_and_temperature(complete):
    keys = [(row.step, row.method, row.temperature) for row in complete.results()]
    expected = [(None, "autoregressive", t) for t in (0.0, 1.0)]
    expected += [(s, m, t) for s in (1, 10, 100) for m in ("vanilla_sd", "stree") for t in (0, 1)]
    assert sorted(keys, key=str) == sorted(expected, key=str)


def test_autoregressive_is_the_unit(complete):
    row = row_of(complete, None, "autoregressive")
    assert row.acceptance_length == row.nodes_per_call == row.speedup == 1
    assert row.tree is None and row.verifier is None and row.checkpoint is None
    # 12 new tokens a turn, the prefill's first not counted, five turns
    samples = complete.samples(row)
    assert sum(s.num_new_tokens for s in samples) == 5 * 11
    assert row.num_prompts == 4


def test_acceptance_orders_the_drafters(complete):
    """The target as its own drafter fills every call: 11 tokens take ⌈11 / 5⌉ = 3 calls."""
    for method in ("vanilla_sd", "stree"):
        stranger, noisy, same = (
            row_of(complete, step, method).acceptance_length for step in (1, 10, 100)
        )
        assert stranger < noisy < same
        assert same == pytest.approx(11 / 3)
    assert row_of(complete, 10, "stree").nodes_per_call == 13
    assert row_of(complete, 10, "vanilla_sd").nodes_per_call == 5


def test_tokens_equal_autoregressive_ones(complete):
    """At every temperature: samples of the verifier coupled are plain decoding's."""
    for row in complete.results():
        if row.method == "autoregressive":
            assert row.lossless is None
        else:
            assert row.lossless.num_prompts == 4
            assert row.lossless.share == 1


def test_rows_are_consistent_with_their_samples(complete):
    for row in complete.results():
        samples = complete.samples(row)
        assert [s.prompt_id for s in samples] == ["a", "b", "c", "d"]
        calls = sum(s.num_calls for s in samples)
        assert row.acceptance_length == sum(s.num_new_tokens for s in samples) / calls
        assert sum(row.acceptance_histogram.values()) == calls
        step_ms = 1e3 * sum(s.decode_s for s in samples) / calls
        assert sum(row.time_ms.values()) == pytest.approx(step_ms)
        if row.step is not None:
            new = sum(s.baseline.num_new_tokens for s in samples)
            baseline = new / sum(s.baseline.decode_s for s in samples)
            assert row.speedup == pytest.approx(row.tokens_per_second / baseline)


def test_the_second_turn_sees_the_models_own_first_answer(complete, world):
    sample = complete.samples(row_of(complete, None, "autoregressive"))[1]
    first, second = sample.turns
    assert second.num_prompt_tokens > first.num_prompt_tokens + len(first.text)


def test_no_journals_are_left(complete):
    assert not list((complete.directory / "journals").glob("*"))


def test_a_second_run_measures_nothing(complete, world):
    def refuse(*_, **__):
        raise AssertionError("a decoder was made although all rows exist")

    before = (complete.directory / "results.jsonl").read_bytes()
    settings = settings_for(world, complete.directory, temperatures=(0.0, 1.0))
    rows = quiet(settings, make_decoder=refuse).evaluate(export(world, 10))
    assert len(rows) == 6
    assert (complete.directory / "results.jsonl").read_bytes() == before


def test_overwrite_measures_again_but_the_baseline_s_row_once_a_process(world, tmp_path):
    quiet(settings_for(world, tmp_path)).evaluate(export(world, 1))
    before = {row.key: row for row in ResultStore(tmp_path).results()}
    made = []

    def counting(*args, **kwargs):
        made.append(kwargs["tree"])
        return Decoder(*args, **kwargs)

    again = quiet(settings_for(world, tmp_path, overwrite=True), make_decoder=counting)
    first = again.evaluate(export(world, 1))
    second = again.evaluate(export(world, 10))
    assert made.count(None) == 1 and len(made) == 5
    after = {row.key: row for row in first}
    assert set(after) == set(before)
    assert all(after[key].tokens_per_second != before[key].tokens_per_second for key in before)
    assert second[0] == first[0]  # the autoregressive row


def test_a_damaged_drafter_has_no_rows_and_loses_none(world, tmp_path):
    """Also where nothing of it would have to be loaded, because its rows are there."""
    drafter = tmp_path / "step-00000001"
    shutil.copytree(export(world, 1), drafter)
    quiet(settings_for(world, tmp_path / "out")).evaluate(drafter)
    before = (tmp_path / "out/results.jsonl").read_bytes()
    flip_last_byte(drafter / "model.safetensors")
    for overwrite in (False, True):
        evaluation = quiet(settings_for(world, tmp_path / "out", overwrite=overwrite))
        with pytest.raises(CheckpointRefused, match="its bytes changed"):
            evaluation.evaluate(drafter)
        assert (tmp_path / "out/results.jsonl").read_bytes() == before


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


@pytest.mark.long
def test_sigkill_while_writing_then_the_same_command_completes(world, tmp_path, complete):
    command = [
        sys.executable, "pipelines/eval_spec.py", "--target", str(world / "target"),
        "--benchmarks", str(world / "talk.jsonl"), "--temperatures", "0", "1",
        "--max-new-tokens", "12", "--device", "cpu", "--ignore-eos", "--out", str(tmp_path),
        "--checkpoint", str(export(world, 10)),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(tmp_path.glob("journals/*")):
        time.sleep(0.001)
    process.kill()
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert len(ResultStore(tmp_path).results()) < 6
    rows = quiet(settings_for(world, tmp_path, temperatures=(0.0, 1.0))).evaluate(export(world, 10))
    by_key = {row.key: row for row in complete.results()}
    assert without_timings(rows) == without_timings([by_key[row.key] for row in rows])


def test_a_resumed_run_does_not_repeat_finished_prompts(world, tmp_path):
    """Killed after the first prompt's three methods: warm-up and answer of each."""
    settings = settings_for(world, tmp_path)
    with pytest.raises(Killed):
        quiet(settings, make_decoder=DiesAfter(6)).evaluate(export(world, 10))
    asked = []
    evaluation = quiet(settings, make_decoder=heard_by(lambda *call: asked.append(call[1:3])))
    evaluation.evaluate(export(world, 10))
    first_prompt = evaluation.answerer.prompt_ids(evaluation.benchmarks[0].prompts[0])
    assert first_prompt not in [prompt_ids for prompt_ids, _ in asked]
    # 3 methods × 4 turns of the other three prompts
    assert sum(not is_warm_up(generation) for _, generation in asked) == 12


def heard_by(listen):
    """A decoder that lets `listen(tree, prompt_ids, generation, output)` hear of each call."""

    def make(*args, **kwargs):
        decoder = Decoder(*args, **kwargs)
        generate = decoder.generate

        def heard(prompt_ids, generation):
            output = generate(prompt_ids, generation)
            listen(kwargs["tree"], prompt_ids, generation, output)
            return output

        decoder.generate = heard
        return decoder

    return make


def is_warm_up(generation) -> bool:
    """By the seed, which no answer has: it is a hash."""
    return generation.seed == 0


@pytest.mark.long  # through the launcher; tests/faults/test_eval_workers.py starts them itself
def test_two_processes_give_the_rows_of_one(world, tmp_path, complete):
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
        "--main_process_port", "0", "pipelines/eval_spec.py",
        "--target", str(world / "target"), "--checkpoint", str(export(world, 10)),
        "--benchmarks", str(world / "talk.jsonl"), "--temperatures", "0", "1",
        "--max-new-tokens", "12", "--device", "cpu", "--ignore-eos", "--out", str(tmp_path),
    ]  # fmt: skip
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


@pytest.mark.long
def test_evaluations_of_one_folder_take_turns(world, tmp_path):
    """As callbacks with a process for each export have them: same baseline, same results file."""
    command = [
        sys.executable, "pipelines/eval_spec.py", "--target", str(world / "target"),
        "--benchmarks", str(world / "talk.jsonl"), "--temperatures", "0", "--max-new-tokens", "12",
        "--device", "cpu", "--ignore-eos", "--out", str(tmp_path), "--checkpoint",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [*command, str(export(world, step))], cwd=REPOSITORY, env=environment,
            stderr=subprocess.PIPE, text=True,
        )
        for step in (1, 10)
    ]  # fmt: skip
    errors = [process.communicate(timeout=200)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], errors
    keys = [(row.step, row.method) for row in ResultStore(tmp_path).results()]
    assert len(keys) == len(set(keys)) == 5


def test_prompts_are_shared_each_exactly_once():
    shares = [Workers(rank, 3).share(range(10)) for rank in range(3)]
    assert sorted(item for share in shares for item in share) == list(range(10))


def test_seeds_depend_on_what_is_asked_only():
    seeds = {prompt_seed(s, "b", p, t) for s in (0, 1) for p in ("x", "y") for t in (0, 1)}
    assert len(seeds) == 8
    assert prompt_seed(0, "b", "x", 0) == prompt_seed(0, "b", "x", 0)
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_lossy_decoder_is_found_out_with_position_and_gap(world, tmp_path, temperature):
    settings = settings_for(world, tmp_path, limit=1, temperatures=[temperature])
    evaluation = quiet(settings, make_decoder=Lies)
    with pytest.raises(InvariantBroken, match=r"prompt a, turn 0, position 3 has token") as fault:
        evaluation.evaluate(export(world, 100))
    assert fault.value.exit_code == 70
    baseline, chain, tree = ResultStore(tmp_path).results()  # saved all the same
    for row in (chain, tree):
        assert row.lossless.share == 0
        (divergence,) = row.lossless.divergences
        assert (divergence.prompt_id, divergence.turn, divergence.position) == ("a", 0, 3)
        assert divergence.token == divergence.autoregressive_token + 1
        # The gap by hand: logits of the plain model after the prompt and three tokens, and noise.
        prompt = evaluation.answerer.prompt_ids(evaluation.benchmarks[0].prompts[0])
        tokens = ResultStore(tmp_path).samples(baseline)[0].turns[0].tokens[:3]
        with torch.no_grad():
            logits = evaluation.decoders.target(torch.tensor([[*prompt, *tokens]]))[0, -1].double()
        if temperature:
            seed = torch.tensor([prompt_seed(0, row.benchmark, "a", 0)])
            position = torch.tensor([[len(prompt) + 3]])
            logits += naive.token_noise(seed, position, len(logits))[0, 0]
        first, second = logits.topk(2).values.tolist()
        assert divergence.logit_gap == pytest.approx(first - second, abs=1e-6)
    # Rows that exist are still no good.
    with pytest.raises(InvariantBroken, match="not lossless"):
        quiet(settings).evaluate(export(world, 100))


def test_in_bf16_divergences_are_only_reported(world, tmp_path):
    settings = settings_for(world, tmp_path, limit=1, dtype="bfloat16")
    rows = quiet(settings, make_decoder=Lies).evaluate(export(world, 100))
    assert [row.lossless.share for row in rows if row.lossless] == [0, 0]


@pytest.mark.parametrize(
    ("dtype", "gap", "token", "is_fault"),
    [
        ("float32", 9e-4, 5, False),
        ("float32", 2e-3, 5, True),
        ("float32", 0.0, None, True),  # it ended: nothing to tie with
        ("float64", 9e-4, 5, True),
        ("float64", 1e-10, 5, False),
        ("bfloat16", 1.0, 5, False),
    ],
)
def test_a_tie_of_rounding_s_size_is_no_fault(complete, dtype, gap, token, is_fault):
    row = row_of(complete, 10, "stree")
    divergence = Divergence(
        prompt_id="a", turn=0, position=2, token=token, autoregressive_token=6, logit_gap=gap
    )
    lossless = row.lossless.model_copy(update={"divergences": (divergence,)})
    environment = row.environment.model_copy(update={"dtypes": {"weights": dtype}})
    row = row.model_copy(update={"lossless": lossless, "environment": environment})
    with pytest.raises(InvariantBroken) if is_fault else nullcontext():
        require_lossless([row])


def test_everything_is_warmed_up_before_anything_is_timed(world, tmp_path):
    """Each tree at each temperature; with the next checkpoint its own decoders."""
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
        })  # fmt: skip
    assert speeds[0] == speeds[1]


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


def test_a_speedup_is_over_plain_decoding_right_before(world, tmp_path):
    """Of the same prompt, beside each checkpoint, however much busier the machine has become."""
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
    """Though somebody keeps the error, as the command does until its last line."""
    made = []

    def breaking(*args, **kwargs):
        decoder = heard_by(listen)(*args, **kwargs)
        made.append(weakref.ref(decoder))
        return decoder

    def listen(tree, prompt_ids, generation, output):
        if failing == "paper" and tree is not None and tree.name == "paper":
            raise InvariantBroken("NaN")

    evaluation = quiet(settings_for(world, tmp_path), make_decoder=breaking)
    load_model = decoders.load_model

    def loading(path, *rest):
        model = load_model(path, *rest)
        if path != evaluation.settings.target:
            made.append(weakref.ref(model))
            if failing == "loading":
                raise torch.OutOfMemoryError("CUDA out of memory")
        return model

    monkeypatch.setattr(decoders, "load_model", loading)
    with pytest.raises(InvariantBroken if failing == "paper" else OutOfMemory) as failure:
        evaluation.evaluate(export(world, 10))
    kept = failure.value
    del failure
    assert kept.exit_code in (70, 71)
    alive = [each() for each in made if each() is not None]
    assert [each.tree.num_nodes for each in alive] == [1]  # plain decoding's


@pytest.mark.parametrize(("dtype", "state"), [("float64", "float64"), ("bfloat16", "float32")])
def test_rows_say_the_dtype_of_the_state(world, tmp_path, dtype, state):
    evaluation = quiet(settings_for(world, tmp_path, limit=1, dtype=dtype))
    row, *_ = evaluation.evaluate(None)
    assert row.environment.dtypes == {"weights": dtype, "state": state}
    assert row.environment.command_line == typed_command()
    cache = evaluation.decoders.target.new_cache(8, 1)
    held = {layer.state.dtype for layer in cache.layers if hasattr(layer, "state")}
    assert held == {getattr(torch, state)}


def test_a_conversation_that_outgrows_its_room_gets_more(world, tmp_path, complete, monkeypatch):
    """As when an answer comes back through the tokenizer as many more tokens than it had."""
    monkeypatch.setattr(answers.Answerer, "max_length", 1)
    rows = quiet(settings_for(world, tmp_path)).evaluate(export(world, 10))
    by_key = {row.key: row for row in complete.results()}
    assert without_timings(rows) == without_timings([by_key[row.key] for row in rows])


def test_a_checkpoint_is_all_its_files(world, tmp_path):
    shutil.copytree(export(world, 10), tmp_path / "copy")
    before = checkpoint_sha256(tmp_path / "copy")
    assert before == checkpoint_sha256(export(world, 10))
    (tmp_path / "copy/MANIFEST.json").unlink()
    assert checkpoint_sha256(tmp_path / "copy") == before
    (tmp_path / "copy/provenance.json").write_text("{}")
    (tmp_path / "copy/README.md").write_text("about")
    assert checkpoint_sha256(tmp_path / "copy") == before
    changed = {before}
    for name in ("mamba_config.json", "tokenizer.json", "chat_template.jinja", "config.json"):
        with open(tmp_path / "copy" / name, "a") as file:
            file.write(" ")
        changed.add(checkpoint_sha256(tmp_path / "copy"))
    assert len(changed) == 5


def test_another_template_under_the_same_name_is_another_decoding(world, tmp_path):
    template = tmp_path / "mine.jinja"
    hashes = set()
    for word in ("user", "human"):
        template.write_text("{% for m in messages %}" + word + ": {{ m.content }}{% endfor %}")
        settings = settings_for(world, tmp_path, chat_template=str(template))
        evaluation = quiet(settings)
        job = evaluation._job("autoregressive", None, evaluation.benchmarks[0], 0.0)
        hashes.add(job.decoding_hash)
    assert len(hashes) == 2


@pytest.mark.parametrize("name", ["chain-2 or paper", "bandit chain-2 or paper"])
def test_a_tree_may_be_chosen_step_by_step(world, tmp_path, name, capsys):
    eval_spec([
        "--target", str(world / "target"), "--checkpoint", str(export(world, 10)), "--tree", name,
        "--benchmarks", str(world / "talk.jsonl"), "--limit", "1", "--max_new_tokens", "8",
        "--temperatures", "0", "--device", "cpu", "--ignore_eos", "--out", str(tmp_path),
    ])  # fmt: skip
    rows = {row.method: row for row in ResultStore(tmp_path).results()}
    assert rows["stree"].tree.name == name and rows["stree"].lossless.share == 1.0
    assert rows["stree"].tree_shares.keys() <= {"plain", "chain-2", "paper"}
    assert sum(rows["stree"].tree_shares.values()) == pytest.approx(1.0)
    assert rows["vanilla_sd"].tree_shares == {} and rows["vanilla_sd"].measuring_costs_s is None
    said = capsys.readouterr().err
    assert f"measuring what steps cost, plain and with {name}, at T = 0, to choose by" in said
    costs, took_s = rows["stree"].costs, rows["stree"].measuring_costs_s
    assert [each.tree.name for each in costs.trees] == ["plain", "chain-2", "paper"]
    assert all(each.seconds.keys() == {1} for each in costs.trees) and costs.temperature == 0
    assert costs.device == rows["stree"].environment.device and costs.dtype == "float32"
    assert rows["vanilla_sd"].costs is None
    assert re.search(rf"a step of 1 row: plain .* ms; measured in {took_s:.1f} s\n", said)
    (told,) = [note for note in load_run(tmp_path).notes if name in note]
    assert all(tree in told for tree in rows["stree"].tree_shares)


def test_a_choice_of_a_deep_tree_has_room_to_be_timed(world, tmp_path):
    settings = settings_for(
        world, tmp_path, methods=("stree",), tree="chain-1 or chain-99", limit=1, max_new_tokens=1
    )
    (row,) = quiet(settings).evaluate(export(world, 10))
    assert row.tree.name == "chain-1 or chain-99"


def test_without_the_baseline_nothing_is_relative(world, tmp_path):
    settings = settings_for(world, tmp_path, methods=("stree",), limit=1)
    (row,) = quiet(settings).evaluate(export(world, 10))
    assert row.speedup is None and row.lossless is None
    assert row.acceptance_length >= 1


def test_without_a_checkpoint_only_the_baseline_runs(world, tmp_path):
    (row,) = quiet(settings_for(world, tmp_path, limit=1)).evaluate(None)
    assert row.method == "autoregressive"


def test_a_drafter_of_another_tokenizer_is_refused(world, tmp_path):
    other = train_tokenizer(["entirely different words"] * 3, 384, tmp_path / "tokenizer")
    save_model(tiny_model(0, vocab_size=384), tmp_path / "drafter", other)
    with pytest.raises(CheckpointRefused, match="tokenizer"):
        quiet(settings_for(world, tmp_path / "out")).evaluate(tmp_path / "drafter")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ("medusa",)}, "wanted some of"),
        ({"temperatures": (-1.0,)}, r"temperature is -1\.0, wanted 0 \(greedy\) or"),
        ({"temperatures": (0.0, float("nan"))}, "temperature is nan"),
        ({"temperatures": (1e-9,)}, "temperature is 1e-09"),
        ({"benchmarks": ()}, "at least one"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"seed": -1}, "seed is -1"),
        ({"methods": ("stree", "stree")}, "each once"),
        ({"temperatures": (0.0, 0.0)}, "each once"),
    ],
)
def test_settings_that_make_no_sense_are_refused(world, tmp_path, changes, message):
    with pytest.raises(UsageError, match=message):
        settings_for(world, tmp_path, **changes)


def test_what_may_go_beyond_the_target_s_positions_is_refused_at_start(world, tmp_path):
    """Two turns of up to 2,048 tokens each, and the questions, in 4,096 positions; without
    attention there are none."""
    settings = settings_for(world, tmp_path, max_new_tokens=2048)
    quiet(settings)
    refusal = r"talk prompt b has \d+ tokens, and answers of up to 4096: the target was made"
    with pytest.raises(UsageError, match=refusal):
        quiet(settings, target_model=toys.tiny_model(1, torch.float32))


def test_an_unknown_tree_is_refused_at_start(world, tmp_path):
    with pytest.raises(UsageError, match="no tree"):
        quiet(settings_for(world, tmp_path, tree="oak"))


def test_command_evaluates_a_run_and_goes_on_past_a_broken_export(world, tmp_path, capsys):
    run = tmp_path / "run"
    (run / "drafter").mkdir(parents=True)
    (run / "command.json").write_text((world / "command.json").read_text())
    for step in (1, 10, 100):
        (run / f"drafter/step-{step:08d}").symlink_to(export(world, step))
    broken = tiny_model(3)
    with torch.no_grad():
        broken.head_weight.fill_(float("nan"))
    from stree.checkpoints.tokenizer import load_tokenizer

    (run / "drafter/step-00000010").unlink()
    save_model(broken, run / "drafter/step-00000010", load_tokenizer(world / "target"))
    arguments = [
        "--run", str(run), "--benchmarks", str(world / "talk.jsonl"), "--temperatures", "0",
        "--limit", "1", "--max-new-tokens", "4", "--device", "cpu",
    ]  # fmt: skip
    with pytest.raises(InvariantBroken, match=r"1 of 3 checkpoints failed.*step-00000010"):
        eval_spec(arguments)
    said = capsys.readouterr().err
    assert "3 checkpoints × 3 methods × 1 temperatures × 1 prompts of talk: 9 answers" in said
    assert "plain decoding beside each checkpoint" in said
    steps = {row.step for row in ResultStore(run / "eval").results()}
    assert steps == {None, 1, 100}


def test_command_says_what_is_missing(tmp_path):
    with pytest.raises(UsageError, match="--target"):
        eval_spec(["--out", str(tmp_path)])
    with pytest.raises(UsageError, match="no step-"):
        eval_spec(["--run", str(tmp_path)])
    with pytest.raises(UsageError, match="stree need a drafter: give --checkpoint or --run"):
        eval_spec(["--out", str(tmp_path), "--target", str(tmp_path), "--methods", "stree"])


@pytest.mark.long
def test_a_failure_is_told_once(world, tmp_path):
    """One checkpoint: by the last line alone. Several: each where it happened, the last line names
    them."""
    command = [
        sys.executable, "pipelines/eval_spec.py", "--target", str(world / "target"), "--out",
        str(tmp_path / "out"), "--benchmarks", str(world / "talk.jsonl"), "--device", "cpu",
        "--checkpoint",
    ]  # fmt: skip
    for missing in (["nowhere-1"], ["nowhere-1", "nowhere-2"]):
        done = subprocess.run(
            [*command, *missing], cwd=REPOSITORY, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 2
        for name in missing:
            assert done.stderr.count(f"no folder {name}") == 1
        assert done.stderr.splitlines()[-1].startswith("error: ")


def test_an_unknown_option_is_one_line(tmp_path, capsys):
    broken = tmp_path / "broken.yaml"
    broken.write_text("benchmarks: [\n  a: 3")
    for arguments in (["--nope", "3"], ["--config", str(broken)], ["--limit", "few"]):
        with pytest.raises(SystemExit) as refused:
            eval_spec(arguments)
        assert refused.value.code == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "eval_spec.py --help" in error


@pytest.mark.parametrize("config", sorted((REPOSITORY / "configs/eval").glob("*.yaml")))
def test_shipped_configs_are_understood(config, tmp_path):
    options = build_parser().parse_args(["--config", str(config), "--out", "o", "--target", "t"])
    settings, checkpoints = resolve(options.as_dict())
    assert settings.methods == ("autoregressive", "vanilla_sd", "stree")
    assert checkpoints == [None]
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(config.read_text() + "\nmax_new_token: 3\n")
    with pytest.raises(SystemExit) as refused:
        build_parser().parse_args(["--config", str(wrong)])
    assert refused.value.code == 2


def test_progress_says_the_tree_s_figures_first(world, tmp_path):
    """The others' behind them, plain decoding's also where its row is there already."""
    settings = settings_for(world, tmp_path, limit=1)
    said = []
    for step in (1, 10):
        stream = io.StringIO()
        Evaluation(
            settings, workers=Workers(), progress=EvaluationProgress(stream)
        ).evaluate(export(world, step))  # fmt: skip
        lines = stream.getvalue().splitlines()  # a remark on the drafter's weights may come first
        said.append([line for line in lines if line.startswith("step ")])
    for step, (warm_up, measured) in zip((1, 10), said, strict=True):
        assert warm_up.startswith(f"step {step}  warm-up  3/3")
        assert re.sub(r"(τ|,|;|ive|sd τ x,) \d+(\.\d+)?", r"\1 x", measured) == (
            f"step {step}  talk T=0  1/1  stree τ x, x tok/s; vanilla_sd τ x, x; autoregressive x"
            "  ETA 0:00"
        )


def test_a_damaged_results_file_is_named(world, tmp_path):
    (tmp_path / "results.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(BadData, match=r"results.jsonl:1"):
        quiet(settings_for(world, tmp_path)).evaluate(None)
