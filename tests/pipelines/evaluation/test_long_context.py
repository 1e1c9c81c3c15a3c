"""Questions repeated after more and more text: their prompts, readings and report."""

from __future__ import annotations

import gzip
import json
import math

import pytest
import torch
from hand_made_run import make_row, make_sample
from tiny_evaluation import quiet, settings_for
from toys import FEATURE_LAYERS, reading, tiny_model

from stree.chat_encoding import chat_encoder
from stree.checkpoints.load_save import load_model, save_model
from stree.common.errors import BadData, UsageError
from stree.models.hidden_states import HiddenStateTap
from stree_lab import paper_tables
from stree_lab.papers import comparisons
from stree_pipelines.commands.ask_conversations import main as ask
from stree_pipelines.commands.report import write_records, write_report
from stree_pipelines.data.tokenizer_training import train_tokenizer
from stree_pipelines.evaluation import evaluate
from stree_pipelines.evaluation.answering import drafter_readings as reading_module
from stree_pipelines.evaluation.benchmarks import load_benchmark
from stree_pipelines.evaluation.records import Reading, ReadingKey
from stree_pipelines.evaluation.result_store import ResultStore
from stree_pipelines.reports.run_data import load_run
from stree_pipelines.reports.tables import by_length
from stree_pipelines.reports.tables.tables import MISSING

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = (60, 200)
POSITIONS = 96  # that the target was made for


def write_conversations(folder, count: int = 12) -> str:
    """Write conversations of one to three exchanges, every fourth of them long."""
    rows = []
    for number in range(count):
        turns = []
        for turn in range(1 + number % 3):
            said = "and more " * (20 if number % 4 == 3 else 1)
            turns.append({"from": "human", "value": f"question {number} {turn} {said}"})
            turns.append({"from": "gpt", "value": f"answer {number} {turn} is <|end|> {said}"})
        rows.append({"id": f"row-{number}", "source": "talk", "conversations": turns})
    path = folder / "valid.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return str(path)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Conversations, prompts of LENGTHS, a target with few positions and a drafter that reads its
    hidden states."""
    root = tmp_path_factory.mktemp("world")
    tokenizer = train_tokenizer(["question answer and more is"] * 3, 320, root / "tokenizer")
    target = tiny_model(1, vocab_size=320, max_position_embeddings=POSITIONS, eos_token_ids=(1,))
    save_model(target, root / "target", tokenizer)
    drafter = reading(target)
    save_model(
        drafter, root / "drafter/step-00000001", tokenizer,
        extra_files={"provenance.json": json.dumps({"step": 1})},
    )
    ask([
        write_conversations(root), "--out", str(root / "long.jsonl"), "--limit", "3",
        "--turns", "1", "--tokenizer", str(root / "target"), "--lengths", *map(str, LENGTHS),
    ])
    return root


def settings_of(world, out, **changes):
    changes = {"max_new_tokens": 5, "dtype": "float64", "beyond_positions": True, **changes}
    benchmarks = tuple(str(world / f"long-{length}.jsonl") for length in LENGTHS)
    return settings_for(world, out, benchmarks=benchmarks, **changes)


@pytest.fixture(scope="module")
def evaluated(world, tmp_path_factory):
    out = tmp_path_factory.mktemp("evaluated")
    quiet(settings_of(world, out)).evaluate(world / "drafter/step-00000001")
    return out


def test_a_longer_prompt_asks_the_same_and_begins_earlier(world):
    shorter, longer = (load_benchmark(str(world / f"long-{each}.jsonl")) for each in LENGTHS)
    encoder = chat_encoder(quiet(settings_of(world, world / "none")).decoders.tokenizer)
    for less, more in zip(shorter.prompts, longer.prompts, strict=True):
        assert (less.id, less.turns) == (more.id, more.turns)
        assert less.reference_answer == more.reference_answer
        assert less.reference_answer.startswith(f"answer {less.id[4:]} 0")
        assert more.history[-len(less.history) :] == less.history
        roles = [role for role, _ in more.history]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert not any(f"question {less.id[4:]} " in text for _, text in more.history)
        for prompt, length in ((less, LENGTHS[0]), (more, LENGTHS[1])):
            tokens = encoder.encode_prompt([*prompt.history, ("user", prompt.turns[0])])
            assert 0.65 * length < len(tokens) <= length
    assert shorter.prompts_hash != longer.prompts_hash
    provenance = json.loads((world / "long.provenance.json").read_text())
    assert provenance["conversations"].endswith("valid.jsonl.gz") and provenance["sha256"]


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        (["--lengths", "100"], UsageError, "give both"),
        (["--lengths", "-1", "--tokenizer", "target"], UsageError, "--lengths has -1"),
        (["--lengths", "100000", "--tokenizer", "target"], BadData, "too little text for 100000"),
    ],
)
def test_lengths_that_cannot_be_made_are_refused(world, tmp_path, more, error, words):
    more = [str(world / each) if each == "target" else each for each in more]
    with pytest.raises(error, match=words):
        ask([str(world / "valid.jsonl.gz"), "--out", str(tmp_path / "out.jsonl"), *more])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"history": ["only the user"]}, "history: .*wanted a list of texts"),
        ({"history": ["user", ""]}, "history.1.1: .*match"),
        ({"reference_answer": 3}, "reference_answer: .*valid string"),
    ],
)
def test_a_history_that_is_none_is_refused(tmp_path, changes, words):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"id": "a", "turns": ["hello"], **changes}))
    with pytest.raises(BadData, match=words):
        load_benchmark(str(path))


def test_beyond_its_positions_a_target_decodes_only_when_asked(world, tmp_path):
    with pytest.raises(UsageError, match=rf"made for {POSITIONS} positions.*--beyond_positions"):
        quiet(settings_of(world, tmp_path, beyond_positions=False))


def test_answers_of_the_data_are_read_as_by_one_forward_pass(world, tmp_path, monkeypatch):
    """Pieces change nothing; begun anew, the drafter reads the question only, with the target's
    features of all."""
    monkeypatch.setattr(reading_module, "FEATURES_CHUNK", 16)
    evaluation = quiet(settings_of(world, tmp_path))
    (job,) = {job for job in evaluation.plan(world / "drafter/step-00000001")
              if job.method == "stree" and job.benchmark.name == "long-200"}
    prompt = job.benchmark.prompts[0]
    key = ReadingKey("d", "t", "float64", None, "long-200", "p", prompt.id)
    found = reading_module.read_answer(evaluation.decoders, job.drafter, prompt, key)
    assert found.key == key

    target = load_model(world / "target", dtype=torch.float64)
    drafter = load_model(world / "drafter/step-00000001", dtype=torch.float64)
    encoder = chat_encoder(evaluation.decoders.tokenizer)
    asked = [*prompt.history, ("user", prompt.turns[0])]
    start = len(encoder.encode_prompt(asked))
    question = start - len(encoder.encode_prompt(asked[-1:]))
    whole = encoder.encode([*asked, ("assistant", prompt.reference_answer)])[-1].tokens
    tokens = torch.tensor(whole)[None].long()
    features = HiddenStateTap(FEATURE_LAYERS)
    with torch.no_grad():
        p = target.logits(target.hidden_states(tokens, features=features))[0].softmax(-1)
        read = features.values
        q = drafter.logits(drafter.hidden_states(tokens, read=read))[0].softmax(-1)
        anew = drafter.hidden_states(tokens[:, question:], read=read[:, question:])
        r = drafter.logits(anew)[0].softmax(-1)
    answer = slice(start - 1, tokens.shape[1] - 1)
    labels = tokens[0, start:]
    p, q, r = p[answer], q[answer], r[answer.start - question : answer.stop - question]
    assert (found.num_prompt_tokens, found.num_tokens) == (start, len(labels))
    for loss, probs in ((found.target_loss, p), (found.drafter_loss, q)):
        assert loss == pytest.approx(-probs.gather(1, labels[:, None]).log().sum().item())
    assert found.overlap == pytest.approx(torch.minimum(p, q).sum().item())
    assert found.overlap_begun_anew == pytest.approx(torch.minimum(p, r).sum().item())
    assert abs(found.overlap_begun_anew - found.overlap) > 1e-6
    assert found.same_choice == int((p.argmax(-1) == q.argmax(-1)).sum())


@pytest.mark.costly
def test_an_evaluation_reads_each_answer_once(world, evaluated, monkeypatch):
    readings = ResultStore(evaluated).readings()
    assert len(readings) == len({each.key for each in readings}) == 3 * len(LENGTHS)
    monkeypatch.setattr(evaluate, "read_answer", None)  # not called
    quiet(settings_of(world, evaluated)).evaluate(world / "drafter/step-00000001")
    assert ResultStore(evaluated).readings() == readings


@pytest.mark.costly
def test_a_report_has_a_table_by_length(evaluated, tmp_path, capsys):
    data = load_run(evaluated)
    paths, _ = write_report(data, tmp_path)
    names = {path.name for path in paths}
    assert {"by_length.md", "tau_by_length.svg"} <= names
    text = (tmp_path / "by_length.md").read_text()
    (rungs,) = by_length.ladders(data)
    for rung in rungs:
        cell = data.cell(data.last, "stree", rung.benchmark, 0.0)
        assert f"| {rung.length} " in text and f"| {cell['acceptance_length']:.2f} " in text
    assert text.count("Answers that ended by themselves and that were cut") == len(
        data.temperatures
    )
    assert "By prompt length" in (tmp_path / "report.html").read_text()
    write_records(data, tmp_path)
    assert ResultStore(tmp_path).readings() == ResultStore(evaluated).readings()
    paper_tables.main(["drafters-table-3", "--rows", str(evaluated)])
    assert "55.09 (2.91)" in capsys.readouterr().out


def test_table_3_has_lengths_and_peaks_of_memory(tmp_path):
    """The ladder's plain rows and tree, and the memory of the tree's prompts of the longer one."""
    make_ladder(tmp_path, (20, 30))
    paper = [("Method", "1k", "2k"), ("Mamba", "55", "45")]
    lines, rows = comparisons.drafters_3(tmp_path, paper)
    assert lines[:2] == [("Method", "1k", "2k", "16k"), ("Mamba, paper", "55", "45", MISSING)]
    assert [line[0] for line in lines[2:]] == ["Autoregressive, ours", "STree, ours"]
    assert lines[3][2] == MISSING and len(list(rows)) == 4
    peak = {
        "what": "prompt_memory", "method": "stree", "benchmark": "long-16000",
        "peak_bytes": 1_500_000_000, "environment": {"git_sha": "0"},
    }
    on_a_cpu = {**peak, "method": "autoregressive"}
    del on_a_cpu["peak_bytes"]
    lines_of_file = [json.dumps(each) + "\n" for each in (on_a_cpu, peak)]
    (tmp_path / "memory.jsonl").write_text("".join(lines_of_file))
    with_peaks, rows = comparisons.drafters_3(tmp_path, paper)
    assert with_peaks[:4] == lines and peak in list(rows)
    assert with_peaks[4] == ("Peak memory, GB, Autoregressive, ours", *[MISSING] * 3)
    assert with_peaks[5] == ("Peak memory, GB, STree, ours", MISSING, MISSING, "1.50")


def make_ladder(folder, calls, target_loss=(2.0, 2.0), overlap=(0.8, 0.8), anew=(0.8, 0.8)):
    """Two lengths of six questions, and 60 new tokens each; with these calls, and these means over
    the data's answers of 10 tokens."""
    store = ResultStore(folder)
    for at, length in enumerate((1000, 16000)):
        name = f"long-{length}"
        rows = [("autoregressive", None, 60), ("stree", 100, calls[at])]
        for method, step, count in rows:
            samples = []
            for index in range(6):
                num_calls = count + index % 2 if step else count
                sample = make_sample(method, step, name, index, 0.0, num_calls)
                turn = sample.turns[0].model_copy(
                    update={"num_prompt_tokens": length, "tokens": (1, 2, 3, 4) * 2}
                )
                samples.append(sample.model_copy(update={"turns": (turn,)}))
            store.publish(make_row(method, step, name, samples, 0.0), samples)
        store.save_readings([
            Reading(
                checkpoint_sha256="100", target_sha256="7a", dtype="float32",
                chat_template_sha256=None, benchmark=name, prompts_hash="p", prompt_id=f"q{index}",
                num_prompt_tokens=length, num_tokens=10, target_loss=10 * target_loss[at] + index,
                drafter_loss=30, overlap=10 * overlap[at] - index / 10, same_choice=5,
                overlap_begun_anew=10 * anew[at] - index / 10,
            )
            for index in range(6)
        ])
    return load_run(folder)


def test_of_several_drafters_the_one_that_is_shown_is_named(tmp_path):
    data = make_ladder(tmp_path, (20, 20))
    assert by_length.introduction(data).endswith(" The drafter is step 100.")
    row = next(row for row in data.rows if row.step == 100 and row.benchmark == "long-1000")
    samples = ResultStore(tmp_path).samples(row)
    other = [each.model_copy(update={"checkpoint_sha256": "50", "step": 50}) for each in samples]
    ResultStore(tmp_path).publish(make_row("stree", 50, "long-1000", other, 0.0), other)
    data, said = load_run(tmp_path), "is step 100, the last of 2 here; the others are not shown."
    _, printed = write_report(data, tmp_path)
    for name in ("by_length.md", "report.html"):
        assert said in (tmp_path / name).read_text()
    assert said in " ".join(printed.split())  # lines are wrapped for a terminal


@pytest.mark.parametrize(
    ("ladder", "words"),
    [
        ({"calls": (20, 20)}, ("does not change beyond noise", "Neither reads worse there.")),
        ({"calls": (30, 20)}, ("T = 0 rises", "Neither reads worse there.")),
        ({"calls": (20, 40)}, ("T = 0 falls, from 16,000", "text that is harder to draft")),
        (
            {"calls": (20, 40), "target_loss": (2.0, 3.0), "overlap": (0.8, 0.6)},
            ("T = 0 falls", "The target fails, from 16,000 tokens on"),
        ),
        (
            {"calls": (20, 40), "overlap": (0.8, 0.6), "anew": (0.8, 0.7)},
            ("T = 0 falls", "The drafter fails, from 16,000 tokens on: by its own state"),
        ),
        (
            {"calls": (20, 40), "overlap": (0.8, 0.6), "anew": (0.8, 0.6)},
            ("T = 0 falls", "not by what its state has read"),
        ),
    ],
)
def test_what_makes_it_fall_is_told(tmp_path, ladder, words):
    data = make_ladder(tmp_path, **ladder)
    (rungs,) = by_length.ladders(data)
    said = " ".join(by_length.verdicts(data, rungs))
    for each in words:
        assert each in said


def test_figures_are_paired_by_question(tmp_path):
    data = make_ladder(tmp_path, calls=(20, 40), target_loss=(2.0, 3.0))
    (rungs,) = by_length.ladders(data)
    taus = by_length.acceptance(data, rungs, "stree", 0.0)
    assert [each.value for each in taus] == pytest.approx([360 / 123, 360 / 243])
    assert taus[1].change == pytest.approx(360 / 243 - 360 / 123)
    loss = by_length.read(rungs, "target_loss")[1]
    # Every question's loss is one nat a token more: no noise is left
    assert loss.interval == pytest.approx((1.0, 1.0)) and loss.change == pytest.approx(1.0)
    table = by_length.reading_table(rungs)
    assert table.rows[2][2] == f"{math.e:.2f} [{math.e:.2f}, {math.e:.2f}]"
    # Of eight tokens, the second four repeat the first
    assert by_length.repeated(data, "long-1000", 0.0) == pytest.approx(1 / 8)


def test_other_questions_are_no_ladder(tmp_path):
    data = make_ladder(tmp_path, calls=(20, 20))
    for key, cell in data.cells.items():
        if key[2] == "long-16000":
            for sample in cell.samples:
                object.__setattr__(sample, "prompt_id", f"other-{sample.prompt_id}")
    assert by_length.ladders(data) == []
