"""Damage by the ten thousand: what is given is accepted or rejected with a reason, nothing else.

Seeded, so that a failure comes back. Any exception but the product's own fails a test.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from hostile_records import hostile_row
from mutations import ODD_VALUES, damaged_bytes, damaged_value
from parsed import ParseOnly

from stree.chat_encoding import ChatEncoder
from stree.common.errors import StreeError, UsageError
from stree.trees.token_tree import TokenTree
from stree_pipelines.commands import eval_spec
from stree_pipelines.commands.distill import DistillCLI
from stree_pipelines.data.conversations import Conversation, read_conversations
from stree_pipelines.data.raw_rows import REASONS
from stree_pipelines.data.tokenizer_training import train_tokenizer
from stree_pipelines.evaluation.plan import resolve
from stree_pipelines.evaluation.records import ResultRow
from stree_pipelines.evaluation.result_store import RESULTS_NAME, read_rows
from stree_pipelines.reports.run_data import RunData, arrange, load_run, open_results
from stree_pipelines.training.distillation import Distillation

NUM_LINES = 20_000
# How many of each of the other kinds: 10,000 together.
NUM_PARENTS, NUM_TREES, NUM_ROWS, NUM_EVAL, NUM_TRAINING = 4000, 1900, 3400, 600, 100
CONFIGS = Path(__file__).parents[2] / "configs"
WORDS = (
    "tree", "state", "Was ist", "12 + 30", "naïve 🦊", "<|end|>", "\n\n", "日本語", "`x`", "\\"
)


def accepted_of(given: Iterator[object], load: Callable[[object], object]) -> Counter[str]:
    """Count accepted and rejected values; what is no StreeError or exit code 2 passes through."""
    counts: Counter[str] = Counter()
    for each in given:
        try:
            load(each)
            counts["accepted"] += 1
        except StreeError as error:
            assert str(error).strip()
            counts["rejected"] += 1
        except SystemExit as leaving:
            assert leaving.code == 2
            counts["rejected"] += 1
    return counts


# Conversations


def conversation_rows(rng: random.Random) -> Iterator[dict]:
    """Yield good rows in both layouts, of one to five exchanges."""
    while True:
        turns = [
            (role, " ".join(rng.choices(WORDS, k=rng.randint(1, 30))) + "!")
            for _ in range(rng.randint(1, 5))
            for role in ("user", "assistant")
        ]
        if rng.random() < 0.5:
            yield {"messages": [{"role": role, "content": text} for role, text in turns]}
        else:
            names = {"user": "human", "assistant": "gpt"}
            said = [{"from": names[role], "value": text} for role, text in turns]
            yield {"id": str(rng.random()), "conversations": said}


def damaged_lines(rng: random.Random) -> Iterator[bytes]:
    for row in conversation_rows(rng):
        kind = rng.randrange(3)
        text = json.dumps(damaged_value(rng, row) if kind == 1 else row).encode()
        yield damaged_bytes(rng, text) if kind == 2 else text


@pytest.mark.costly
def test_fuzzed_conversations_add_up_in_flat_memory(tmp_path):
    rng = random.Random(20)
    path = tmp_path / "fuzzed.jsonl"
    lines = damaged_lines(rng)
    given = 0
    with path.open("wb") as file:
        while given < NUM_LINES:
            line = next(lines)
            file.write(line + b"\n")
            given += bool(line.strip())
    kept: list[Conversation] = []
    conversations, report = read_conversations(path)
    tracemalloc.start()
    for conversation in conversations:
        if len(kept) < 2000:
            kept.append(conversation)
            tracemalloc.reset_peak()
        else:
            break
    at_first, _ = tracemalloc.get_traced_memory()
    for _ in conversations:
        pass
    gc.collect()  # refusals hold their own frames until then
    at_last, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert report.given == given == report.accepted + report.rejected == NUM_LINES
    assert set(report.reasons) <= set(REASONS) and len(report.reasons) >= 5, report
    for conversation in kept:
        roles = [role for role, _ in conversation.turns]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
    assert 0.3 < report.accepted / given < 0.9
    # One row is held at a time. The largest here has some 50 kB as text, which Python's objects
    # make a few times larger; the whole file has 10 MB.
    assert path.stat().st_size > 8 << 20
    assert at_last - at_first < 64 << 10 and peak - at_first < 1 << 20

    tokenizer = train_tokenizer(list(WORDS), 320, tmp_path / "tokenizer")
    chats = ChatEncoder(tokenizer).encode_each([(each.turns, ()) for each in kept])
    assert len(chats) == 2000 and all(chat.assistant.any() for (chat,) in chats)


# Trees, configs, results


def random_parents(rng: random.Random) -> list:
    size = rng.choice((0, 1, 2, 5, 13, 64, 256, 257))
    parents: list = [-1, *(rng.randrange(node) for node in range(1, size))][:size]
    return damaged_value(rng, parents) if rng.random() < 0.6 and parents else parents


@pytest.mark.costly
def test_fuzzed_parents():
    rng = random.Random(21)

    def load(parents):
        assert TokenTree(tuple(parents)).num_nodes == len(parents)

    given = (
        each if isinstance(each := random_parents(rng), list) else [each]
        for _ in range(NUM_PARENTS)
    )
    counts = accepted_of(given, load)
    assert counts.total() == NUM_PARENTS and min(counts.values()) > NUM_PARENTS // 10


def yaml_texts(rng: random.Random, good: dict, number: int) -> Iterator[bytes]:
    """Yield texts damaged in structure, or in their bytes."""
    for _ in range(number):
        content = damaged_value(rng, good) if rng.random() < 0.6 else good
        try:
            text = yaml.safe_dump(content, allow_unicode=True).encode("utf-8", "surrogatepass")
        except ValueError:  # an integer of 10^400 is no text
            text = repr(content).encode("utf-8", "surrogatepass")
        yield damaged_bytes(rng, text, newlines=True) if rng.random() < 0.5 else text


def load_from(path: Path, load: Callable[[Path], object]) -> Callable[[object], object]:
    def write_and_load(content: object) -> object:
        path.write_bytes(content)  # type: ignore[arg-type]
        return load(path)

    return write_and_load


@pytest.mark.costly
def test_fuzzed_tree_files(tmp_path):
    good = {"name": "paper", "parents": [-1, 0, 0, 0, 1, 1, 2], "description": "Fig. 4a"}
    texts = yaml_texts(random.Random(22), good, NUM_TREES)
    counts = accepted_of(texts, load_from(tmp_path / "tree.yaml", TokenTree.load))
    assert counts.total() == NUM_TREES and min(counts.values()) > NUM_TREES // 20


@pytest.mark.costly
def test_fuzzed_evaluation_configs(tmp_path):
    good = yaml.safe_load((CONFIGS / "eval" / "quickstart.yaml").read_text())
    good |= {"target": "t", "out": "o", "checkpoint": ["c"], "limit": 3, "seed": 1}
    parser = eval_spec.build_parser()

    def load(path):
        with contextlib.redirect_stderr(io.StringIO()):
            resolve(parser.parse_args(["--config", str(path)]).as_dict())

    texts = yaml_texts(random.Random(23), good, NUM_EVAL)
    counts = accepted_of(texts, load_from(tmp_path / "eval.yaml", load))
    assert counts.total() == NUM_EVAL and min(counts.values()) > NUM_EVAL // 20


class Parsed(ParseOnly, DistillCLI): ...


@pytest.mark.costly
def test_fuzzed_training_configs(tmp_path):
    path = CONFIGS / "distill" / "quickstart.yaml"
    parser = Parsed(Distillation, ["fit", "--config", str(path), "--run_dir", "r"]).parser

    def load(path):
        with contextlib.redirect_stderr(io.StringIO()):
            parser.parse_args(["fit", "--config", str(path), "--run_dir", "r"])

    texts = yaml_texts(random.Random(24), yaml.safe_load(path.read_text()), NUM_TRAINING)
    counts = accepted_of(texts, load_from(tmp_path / "distill.yaml", load))
    assert counts.total() == NUM_TRAINING and min(counts.values()) >= NUM_TRAINING // 20


@pytest.mark.costly
def test_fuzzed_results(tmp_path):
    rng = random.Random(25)
    good = json.loads(hostile_row())
    run = tmp_path / "run"
    accepted: list[bytes] = []

    def lines():
        for _ in range(NUM_ROWS):
            kind = rng.randrange(3)
            text = json.dumps(damaged_value(rng, good) if kind else good).encode()
            yield (damaged_bytes(rng, text) if kind == 0 else text) + b"\n"

    def load(path):
        if read_rows(path, ResultRow):
            accepted.append(path.read_bytes())

    counts = accepted_of(lines(), load_from(tmp_path / RESULTS_NAME, load))
    assert counts.total() == NUM_ROWS and min(counts.values()) > NUM_ROWS // 20
    # What was accepted must do no harm where it is read.
    (run / "eval").mkdir(parents=True)
    (run / "eval" / RESULTS_NAME).write_bytes(b"".join(accepted))
    rows = open_results(run).results()
    for row in rows:
        arrange(RunData(run, [row]), open_results(run))
    with pytest.raises(UsageError, match="several decoding settings"):
        load_run(run)
    assert rows


def test_an_odd_value_in_each_place_of_a_tree_is_told(tmp_path):
    for value in ODD_VALUES:
        with contextlib.suppress(UsageError):
            TokenTree((-1, value, 0))
