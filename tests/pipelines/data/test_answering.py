"""Answers of a target as training data: what is written, and how a stopped command goes on.

In fp64, so that which requests share a batch cannot round a token to another.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
import torch
from generating import NUM_PROMPTS, TEMPERATURES, arguments, generate, refuses, rows_of, shards_of
from lanes import quick_first

from stree import Decoder, GenerationConfig
from stree.chat_encoding import encode_prompt
from stree.chat_templates import STREE_CHAT
from stree.checkpoints.load_save import load_model
from stree.checkpoints.tokenizer import load_tokenizer
from stree.common.errors import BadData, UsageError
from stree_pipelines.commands import generate_data
from stree_pipelines.console.progress import EvaluationProgress
from stree_pipelines.data import answering
from stree_pipelines.data.answering import seed_of
from stree_pipelines.data.conversations import read_conversations
from stree_pipelines.evaluation.context import Workers


def description(folder: Path) -> dict:
    return json.loads((folder / "generation.json").read_text())


def answers_of(folder: Path, greedy: bool = False) -> list[list[int]]:
    """Return the tokens of all answers, or of the greedy ones."""
    rows = rows_of(folder)
    return [row["answer_tokens"] for row in rows if not greedy or row["temperature"] == 0]


# What is written


def test_every_answer_is_what_its_request_gets_alone(workspace, whole):
    target = load_model(workspace / "target", dtype=torch.float64)
    tokenizer = load_tokenizer(workspace / "target")
    conversations = list(read_conversations(workspace / "train.jsonl", limit=NUM_PROMPTS)[0])
    rows = rows_of(whole)
    assert [(row["prompt"], row["sample"]) for row in rows] == [
        (prompt, sample) for prompt in range(NUM_PROMPTS) for sample in range(3)
    ]
    plain = Decoder(target, max_length=128, tokenizer=tokenizer)
    for row in rows:
        conversation = conversations[row["prompt"]]
        assert row["prompt_id"] == conversation.id
        assert row["prompt_tokens"] == encode_prompt(tokenizer, conversation.turns[:1])
        assert row["temperature"] == TEMPERATURES[row["sample"]]
        assert row["seed"] == seed_of(7, row["prompt"], row["sample"])
        assert 1 <= len(row["answer_tokens"]) <= 12
        ended = row["answer_tokens"][-1] in target.config.eos_token_ids
        assert row["finish_reason"] == ("eos" if ended else "length")
        if row["temperature"] == 0:
            generation = GenerationConfig(max_new_tokens=12)
            assert plain.generate(row["prompt_tokens"], generation).tokens == row["answer_tokens"]
    sampled = [tuple(row["answer_tokens"]) for row in rows if row["temperature"]]
    assert len(set(sampled)) > NUM_PROMPTS  # samples of a prompt differ
    alone = generate(workspace, whole.parent / "alone", "--num_rows", "1")
    assert rows_of(alone) == rows
    content = description(whole)
    assert content["num_prompts"] == NUM_PROMPTS and content["temperatures"] == list(TEMPERATURES)
    assert len(content["model_sha256"]) == len(content["drafter_sha256"]) == 64
    assert content["made_with"]["prompts"] == str(workspace / "train.jsonl")
    assert {"git_sha", "versions"} <= content["made_with"].keys()
    assert content["made_with"]["template_date"] is None


def test_the_date_that_a_template_prints_is_recorded(workspace, tmp_path):
    dated = "{{- strftime_now('%d %B %Y') -}}" + STREE_CHAT
    data = generate(workspace, tmp_path / "data", "--chat_template", dated, "--limit", "1")
    assert description(data)["made_with"]["template_date"] == "2024-07-26"
    prompt = load_tokenizer(workspace / "target").decode(rows_of(data)[0]["prompt_tokens"])
    assert prompt.startswith("26 July 2024")


def test_seeds_are_a_function_of_seed_prompt_and_sample():
    assert seed_of(0, 1, 2) == int(hashlib.sha256(b"0 1 2").hexdigest()[:16], 16) >> 1
    seeds = {seed_of(seed, n, k) for seed in range(3) for n in range(30) for k in range(12)}
    assert len(seeds) == 3 * 30 * 12 and max(seeds) < 2**63


def test_prompts_of_benchmarks_and_of_later_turns(workspace, tmp_path):
    tokenizer = load_tokenizer(workspace / "target")
    asked = tmp_path / "asked.jsonl"
    asked.write_text('\n{"id": "a", "turns": ["What is 3 plus 4?", "And 5?"]}\n')
    (prompt,) = answering.read_prompts(str(asked), tokenizer, "first")
    assert (prompt.id, prompt.number) == ("a", 0)
    assert prompt.tokens == encode_prompt(tokenizer, [("user", "What is 3 plus 4?")])
    turns = [("user", "1 plus 1?"), ("assistant", "2"), ("user", "2 plus 2?"), ("assistant", "4")]
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": [{"role": r, "content": t} for r, t in turns]}))
    for turn, end in (("first", 1), ("last", 3)):
        (prompt,) = answering.read_prompts(str(chats), tokenizer, turn)
        assert prompt.tokens == encode_prompt(tokenizer, turns[:end])


# Going on


@pytest.fixture
def generate_until(workspace, monkeypatch):
    """Return a call that generates a number of answers, and is stopped then."""

    def run(stop_after, out, *options):
        made = []

        def answer(generation, number, output, original=answering.Generation._answer):
            if len(made) == stop_after:
                raise KeyboardInterrupt
            made.append(number)
            return original(generation, number, output)

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(answering.Generation, "_answer", answer)
            generate(workspace, out, *options)

    return run


def require_finished_alike(workspace, out, whole, *options):
    """Go on, and expect the shards of `whole`, among them those that are there."""
    there = shards_of(out)
    assert 0 < len(there) < len(shards_of(whole))
    generate(workspace, out, *options)
    assert shards_of(out) == shards_of(whole)
    assert there.items() <= shards_of(out).items()


def test_stopped_anywhere_it_becomes_the_same(workspace, whole, tmp_path, generate_until):
    out = tmp_path / "data"
    for stop_after in (3, 4, 6):
        generate_until(stop_after, out)
        (out / ".tmp-1-00000000-elsewhere").mkdir(exist_ok=True)  # of a writer that was killed
    require_finished_alike(workspace, out, whole)


@pytest.mark.costly
def test_repeated_ids_are_told_apart_however_often_it_was_stopped(
    workspace, tmp_path, generate_until
):
    lines = (workspace / "train.jsonl").read_text().splitlines()[:4]
    rows = [{**json.loads(line), "id": name} for line, name in zip(lines, "aaba", strict=True)]
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--prompts", str(asked), "--shard_samples", "2")
    whole, out = generate(workspace, tmp_path / "whole", *options), tmp_path / "data"
    generate_until(5, out, *options)
    require_finished_alike(workspace, out, whole, *options)
    found = rows_of(out)
    assert [row["prompt_id"] for row in found[::3]] == ["a", "a#2", "b", "a#3"]
    assert len({row["seed"] for row in found}) == len(found) == 12


@pytest.mark.long  # a process of its own
def test_killed_for_good_it_goes_on(workspace, tmp_path):
    small = ("--shard_samples", "1")
    whole, killed = generate(workspace, tmp_path / "whole", *small), tmp_path / "killed"
    running = subprocess.Popen(
        [sys.executable, "-m", "stree", "answers", *arguments(workspace, killed, *small)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 200
    while not list(killed.glob("shard-*")) and time.monotonic() < deadline:
        time.sleep(0.002)
    running.send_signal(signal.SIGKILL)
    running.wait()
    refuses(workspace, killed, "the data is not finished")
    require_finished_alike(workspace, killed, whole, *small)
    assert not list(killed.glob(".tmp-*"))


def test_what_is_there_is_not_made_again(workspace, whole, monkeypatch, capsys):
    monkeypatch.setattr(generate_data, "load_model", None)
    generate(workspace, whole)
    assert "4 of 4 shards are there" in capsys.readouterr().err


@pytest.mark.parametrize("seed", ["7", "8"])
def test_a_second_command_waits_and_looks_again(workspace, whole, tmp_path, monkeypatch, seed):
    """The second command waits while the first fills the folder, then compares the settings."""
    first, said = ExitStack(), []
    first.enter_context(Workers().locked(tmp_path / "data", pytest.fail))

    def say(progress, line):
        said.append(line)
        if "waiting for another command" in line:
            shutil.copytree(whole, tmp_path / "data", dirs_exist_ok=True)
            first.close()

    monkeypatch.setattr(EvaluationProgress, "say", say)
    monkeypatch.setattr(generate_data, "load_model", None)
    with nullcontext() if seed == "7" else pytest.raises(UsageError, match="seed was 7, now 8"):
        generate(workspace, tmp_path / "data", "--seed", seed)
    assert f"waiting for another command that fills {tmp_path / 'data'}" in said
    assert shards_of(tmp_path / "data") == shards_of(whole)


@pytest.mark.quick(1)
@pytest.mark.parametrize("order", ["10", "01"])
def test_processes_share_the_shards_and_need_not_meet(
    workspace, whole, tmp_path, monkeypatch, capsys, order
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    own, told = [], ""
    for rank, left in zip(order, (2, 0), strict=True):
        monkeypatch.setenv("RANK", rank)
        generate(workspace, tmp_path / "data")
        assert len(list((tmp_path / "data").glob("shard-*"))) == 4 - left
        rows = rows_of(tmp_path / "data")
        own.append(sum(len(row["answer_tokens"]) for row in rows) - sum(own))
        told = capsys.readouterr().err
        if rank == "0" or not left:
            assert f"{own[-1]:,} tokens in" in told and f"by process {rank} of 2" in told
    assert f"all 4 shards are there, of {sum(own):,} tokens" in told
    assert shards_of(tmp_path / "data") == shards_of(whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed", "8"], "holds other generated data .*seed was 7, now 8"),
        (["--samples", "4", "--out", "new"], "samples is 4, temperatures are 0, 0.7, 1 in tu"),
        (["--temperatures", "-1", "--out", "new"], "temperature is -1.0, wanted 0"),
        (["--samples", "0", "--out", "new"], "samples is 0, wanted at least 1"),
        (["--top_p", "2", "--out", "new"], "top_p is 2.0"),
        (["--compare", "-1"], "compare is -1, wanted 0 or more"),
        (["--limit", "0"], "limit is 0, wanted at least 1"),
        (["--verifier", "block"], "judges chains only"),
        (["--verifier", "traversal", "--tree", "bandit chain-1 or chain-2"],
         "tosses coins .* differ by --num_rows"),
        (["--drafter", "ngram:3", "--tree", "beam-2-2-4"], "n-grams fill trees of one shape"),
        (["--tree", "chain-2 or chain-30", "--max_length", "100", "--limit", "1"],
         "100 tokens .* chain-30 .*: raise --max_length"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message, workspace, whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(generate_data, "load_model", None)
    with pytest.raises(UsageError, match=message):
        generate(workspace, whole, *options)


def test_prompts_without_room_are_left_out_or_refused(workspace, tmp_path, capsys):
    with pytest.raises(BadData, match="none of 6 prompts has at most 0 tokens"):
        generate(workspace, tmp_path / "data", "--max_length", "17")
    asked = tmp_path / "asked.jsonl"
    turns = ["What is 3 plus 4?", "What is 3 plus 4? " * 9, "What is 5 plus 6?"]
    rows = [json.dumps({"id": str(n), "turns": [turn]}) + "\n" for n, turn in enumerate(turns)]
    asked.write_text("".join(rows))
    given = ("--prompts", str(asked), "--samples", "1", "--max_length", "60")
    generate(workspace, tmp_path / "data", *given)
    assert "1 prompts are left out" in capsys.readouterr().err
    kept = [(row["prompt_id"], row["prompt"], row["seed"]) for row in rows_of(tmp_path / "data")]
    assert kept == [(str(n), n, seed_of(7, n, 0)) for n in (0, 2)]


def test_a_dry_run_says_what_it_takes_and_writes_nothing(workspace, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generate_data, "load_model", None)
    generate(workspace, tmp_path / "data", "--dry_run")
    said = capsys.readouterr()
    assert "6 prompts, 3 answers each; 0 of 4 shards are there" in said.err
    assert "memory: about" in said.out and "disk: " in said.out and "drafter " in said.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("more", [(), ("--target_dtype", "float8")], ids=["whole", "8 bits"])
def test_a_dry_run_counts_the_target_s_bytes_as_they_are_held(
    more, workspace, tmp_path, monkeypatch
):
    counted = []
    estimate = generate_data.MemoryEstimate
    monkeypatch.setattr(
        generate_data, "MemoryEstimate",
        lambda parts, on_cuda: counted.append(parts) or estimate(parts, on_cuda),
    )
    generate(workspace, tmp_path / "data", "--dtype", "float32", "--dry_run", *more)
    model = load_model(workspace / "target", "cpu", torch.float32, bool(more))
    weights = [*model.parameters(), *model.buffers()]
    if (copy := model.head_in_8_bits) is not None:
        weights += [copy.values, copy.scale]
    assert [each["target"] for each in counted] == [sum(each.nbytes for each in weights)]


def test_speed_is_told_beside_plain_decoding_s(workspace, tmp_path, capsys):
    generate(workspace, tmp_path / "data", "--compare", "2")
    said = capsys.readouterr().err
    assert "on a sample: " in said and " without, " in said
    assert "answers  18/18  τ " in said and "tokens/s  ETA 0:00" in said
    assert "all 4 shards are there" in said
    compared = description(tmp_path / "data")["made_with"]["compared"]
    drafted, plain = compared["speculation"], compared["plain"]
    assert drafted["num_tokens"] == plain["num_tokens"] > 0
    assert drafted["num_calls"] < plain["num_calls"] == plain["num_called_tokens"]


@pytest.mark.costly
def test_a_tree_may_be_chosen_step_by_step(workspace, whole, tmp_path, capsys):
    name = "chain-2 or paper"
    data = generate(workspace, tmp_path / "data", "--tree", name, "--compare", "1")
    said = capsys.readouterr().err
    assert "plain and with chain-2 or paper, at T = 1, to choose by" in said
    made = description(data)
    took_s = made["made_with"]["measuring_costs_s"]
    assert re.search(
        r"a step of 4 rows: plain [\d.]+ ms, chain-2 [\d.]+ ms, paper [\d.]+ ms; "
        rf"measured in {took_s:.1f} s\n",
        said,
    )
    assert made["tree"].startswith(name)
    assert answers_of(data) == answers_of(whole)


@pytest.mark.costly
@pytest.mark.parametrize(
    "form",
    quick_first(
        [("ngram:3",), ("float8:{}",), ("{}+ngram:3",), ("independent:{}",)],
        [("text:{}",), ("float8:{}+ngram:3",), ("top:{}",)],
    ),
)
def test_every_name_of_a_drafter_gives_the_target_s_answers(form, workspace, whole, tmp_path):
    name = form.format(workspace / "drafter")
    generate(workspace, tmp_path / "data", "--drafter", name, "--dry_run")
    data = generate(workspace, tmp_path / "data", "--drafter", name)
    assert answers_of(data) == answers_of(whole)
    described, plain = map(description, (data, whole))
    assert described["drafter_sha256"] != plain["drafter_sha256"]
    assert described["made_with"]["drafter"] == name


def test_a_verifier_is_of_the_description_and_greedy_answers_are_the_same(
    workspace, whole, tmp_path
):
    data = generate(workspace, tmp_path / "data", "--verifier", "multi_step")
    described, first = map(description, (data, whole))
    assert (described["verifier"], first["verifier"]) == ("multi_step", "coupled")
    assert answers_of(data, greedy=True) == answers_of(whole, greedy=True)
    assert answers_of(data) != answers_of(whole)
    with pytest.raises(UsageError, match="verifier was 'coupled', now 'multi_step'"):
        generate(workspace, whole, "--verifier", "multi_step")
    with pytest.raises(UsageError, match="verifier was 'multi_step', now 'coupled'"):
        generate(workspace, data)


def test_without_a_drafter_the_target_answers_alone(workspace, whole, tmp_path, capsys):
    given = arguments(workspace, tmp_path / "data", "--samples", "1")
    at = given.index("--drafter")
    generate_data.main(given[:at] + given[at + 2 :])
    assert re.search(r"\d sequences at once, .* a sequence .* more\n", capsys.readouterr().err)
    assert answers_of(tmp_path / "data") == answers_of(whole, greedy=True)


def test_answers_of_a_target_in_8_bits_are_its_own(workspace, tmp_path):
    options = ["--limit", "1", "--target_dtype", "float8"]
    data = generate(workspace, tmp_path / "data", *options)
    assert description(data)["dtype"] == "float64, target in float8"
    target = load_model(workspace / "target", dtype=torch.float64, in_8_bits=True)
    plain = Decoder(target, max_length=128)
    for row in rows_of(data):
        settings = GenerationConfig(12, temperature=row["temperature"], seed=row["seed"])
        assert plain.generate(row["prompt_tokens"], settings).tokens == row["answer_tokens"]
    with pytest.raises(UsageError, match="dtype was 'float64, target in float8', now 'float64'"):
        generate(workspace, data, "--limit", "1")


def test_answers_have_each_setting_of_sampling(workspace, tmp_path, recwarn):
    """A greedy answer in between is no reason to warn of them."""
    served = {"top_k": 9, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3}
    options = [str(each) for name, value in served.items() for each in (f"--{name}", value)]
    data = generate(workspace, tmp_path / "data", *options, "--limit", "1")
    assert {name: description(data)[name] for name in served} == served
    target, tokenizer = load_model(workspace / "target"), load_tokenizer(workspace / "target")
    plain = Decoder(target, max_length=128, tokenizer=tokenizer)
    for row in rows_of(data):
        settings = {**served, "temperature": row["temperature"], "seed": row["seed"]}
        if not row["temperature"]:
            settings = {"repetition_penalty": 1.3}
        settings = GenerationConfig(max_new_tokens=12, **settings)
        assert plain.generate(row["prompt_tokens"], settings).tokens == row["answer_tokens"]
    assert not any("temperature is 0" in str(each.message) for each in recwarn)
    with pytest.warns(UserWarning, match="does not read top_k: set a temperature"):
        generate(workspace, tmp_path / "greedy", "--top_k", "9", "--temperatures", "0",
                 "--samples", "1", "--dry_run")
