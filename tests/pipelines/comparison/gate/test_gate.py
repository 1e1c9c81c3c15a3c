"""The gate on tiny models: the target as its own drafter is the best there is, the target with
noise a fair baseline, and a stranger the worse checkpoint that must not get through."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from damage import flip_last_byte
from tiny_run import make_workspace

from stree import Decoder
from stree.checkpoints.load_save import load_model, save_model, weights_fingerprint
from stree.checkpoints.partners import TARGET_WEIGHTS
from stree.checkpoints.tokenizer import load_tokenizer
from stree.common.errors import CheckpointRefused, NotFound, UsageError
from stree.tree_policy.adaptive import PLAIN
from stree.tree_policy.step_times import StepTimes
from stree_pipelines.commands.benchmark_checkpoint import build_parser
from stree_pipelines.commands.benchmark_checkpoint import main as benchmark_checkpoint
from stree_pipelines.comparison.gate import gate
from stree_pipelines.evaluation.result_store import RESULTS_NAME, ResultStore, write_rows
from stree_pipelines.reports.run_data import told_shares

REPOSITORY = Path(__file__).resolve().parents[4]
STEPS = {"worse": 1, "fair": 10, "better": 100}
TAU = "acceptance_length=-3%"
pytestmark = pytest.mark.usefixtures("one_thread", "calm")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """target/, drafter/{worse,fair,better}, two benchmarks, and out/, which all tests share: what
    one has measured the next one reads."""
    root = make_workspace(tmp_path_factory.mktemp("world"))
    tokenizer = load_tokenizer(root / "target")
    for (name, step), noise in zip(STEPS.items(), (10.0, 0.3, 0.0), strict=True):
        model = load_model(root / "target")
        torch.manual_seed(7)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += noise * parameter.std(correction=0) * torch.randn_like(parameter)
        save_model(
            model, root / "drafter" / name, tokenizer,
            extra_files={"provenance.json": json.dumps({"step": step})},
        )
    for benchmark, count in {"sums": 8, "few": 3}.items():
        prompts = [{"id": f"{i}", "turns": [f"What is {i} plus {i + 3}?"]} for i in range(count)]
        (root / f"{benchmark}.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    return root


def arguments(world: Path, name: str, *more: str, baseline: Path | None = None) -> list[str]:
    return [
        str(world / "drafter" / name), "--baseline", str(baseline or world / "drafter/fair"),
        "--target", str(world / "target"), "--out", str(world / "out"), "--device", "cpu",
        "--benchmarks", str(world / "sums.jsonl"), "--max_new_tokens", "12", "--ignore_eos", *more,
    ]


def judge(world: Path, name: str, *more: str, below=(TAU,), baseline: Path | None = None) -> None:
    given = arguments(world, name, "--fail_below", *below, *more, baseline=baseline)
    benchmark_checkpoint(given)


def summary(world: Path) -> str:
    return (world / "out/summary.md").read_text()


def test_a_worse_checkpoint_fails(world):
    with pytest.raises(gate.Regression, match=r"acceptance_length of tree on .*regression") as got:
        judge(world, "worse", below=(TAU, "depth_accept_rates[1]=-5%"))
    assert got.value.exit_code == 70
    assert "depth_accept_rates[1]" in str(got.value)
    assert summary(world).startswith("## Checkpoint benchmark: regression\n")


def test_the_same_checkpoint_passes(world, tmp_path):
    link = tmp_path / "main"
    link.symlink_to(world / "drafter/fair")
    wanted = (TAU, "speedup=-5%", "tokens_per_second=-0%")
    judge(world, "fair", "--promote", below=wanted, baseline=link)
    assert summary(world).startswith("## Checkpoint benchmark: no regression\n")
    assert f"- baseline: `{world}/drafter/fair`, step 10" in summary(world)
    assert "the same weights" in summary(world)
    assert link.resolve() == world / "drafter/fair", "equal is not better"
    assert "stays" in summary(world)


def test_a_better_checkpoint_becomes_the_baseline_only_when_told(world, tmp_path):
    pointer = tmp_path / "main"
    pointer.symlink_to(os.path.relpath(world / "drafter/fair", tmp_path))
    judge(world, "better", baseline=pointer)
    assert pointer.resolve() == world / "drafter/fair"
    judge(world, "better", "--promote", baseline=f"{pointer}/")
    assert pointer.is_symlink() and pointer.resolve() == world / "drafter/better"
    assert "leads to it now" in summary(world)
    assert not list(tmp_path.glob(".tmp-*"))
    # The pointer is the next run's baseline, and yesterday's checkpoint does not pass any more.
    with pytest.raises(gate.Regression):
        judge(world, "fair", "--promote", baseline=pointer)
    assert pointer.resolve() == world / "drafter/better"


def test_an_older_text_file_as_pointer_is_refused_with_what_to_do(world, tmp_path):
    pointer = tmp_path / "main"
    pointer.write_text(f"{world}/drafter/fair\n")
    with pytest.raises(NotFound, match="make a symlink to the folder"):
        judge(world, "fair", "--promote", baseline=pointer)


@pytest.mark.costly
def test_a_damaged_checkpoint_is_not_judged_by_what_it_was(world, tmp_path):
    """Existing rows do not save a damaged checkpoint or baseline, and no earlier summary stays."""
    wanted = ["--fail_below", TAU]
    judge(world, "better")
    for damaged, whole in (("better", "fair"), ("fair", "better")):
        copy = tmp_path / damaged
        shutil.copytree(world / "drafter" / damaged, copy)
        flip_last_byte(copy / "model.safetensors")
        given = arguments(world, whole, *wanted, baseline=copy)
        if damaged == "better":
            given = [str(copy), *arguments(world, damaged, *wanted)[1:]]
        with pytest.raises(CheckpointRefused, match="its bytes changed"):
            benchmark_checkpoint(given)
        assert not (world / "out/summary.md").exists()


@pytest.mark.costly
def test_a_run_that_is_too_small_says_so(world):
    judge(world, "worse", "--benchmarks", str(world / "few.jsonl"))
    assert "inconclusive, the run is too small to tell" in summary(world).splitlines()[0]
    assert "too few prompts: 3," in summary(world)


@pytest.mark.costly
def test_thresholds_of_one_benchmark_look_at_that_one(world):
    both = ["--benchmarks", str(world / "sums.jsonl"), str(world / "few.jsonl")]
    with pytest.raises(gate.Regression) as got:
        judge(world, "worse", *both, below=(f"sums.{TAU}", f"few.{TAU}", TAU))
    assert "on sums at" in str(got.value) and "on few at" not in str(got.value)
    assert "| few " in summary(world)
    assert "| all benchmarks " in summary(world)


@pytest.mark.costly
def test_a_gate_in_batches_says_so_and_finds_what_one_at_a_time_finds(world):
    judge(world, "better", "--batch_size", "3")
    assert "new tokens a turn, in batches of 3, seed 0" in summary(world)
    with pytest.raises(gate.Regression):
        judge(world, "worse", "--batch_size", "3")
    rows = {(row.checkpoint, row.method, row.batch_size): row
            for row in ResultStore(world / "out").results()}
    worse = str(world / "drafter/worse")
    alone, together = (rows[worse, "stree", batch_size] for batch_size in (1, 3))
    assert together.acceptance_length == alone.acceptance_length
    assert together.lossless.share == 1 and together.rows_per_call > 2


@pytest.mark.costly
def test_a_gate_under_a_penalty_says_so_and_both_checkpoints_have_it(world):
    judge(world, "better", "--repetition_penalty", "1.3")
    assert "new tokens a turn, repetition_penalty 1.3, seed 0" in summary(world)
    rows = [row for row in ResultStore(world / "out").results() if row.repetition_penalty == 1.3]
    assert [Path(row.checkpoint or "plain").name for row in rows] == ["plain", "better", "fair"]
    assert all(row.lossless is None or row.lossless.share == 1 for row in rows)


@pytest.mark.costly
def test_a_gate_of_a_tree_that_is_chosen_step_by_step_names_it(world):
    name = "bandit chain-2 or paper"
    judge(world, "fair", "--tree", name, "--benchmarks", str(world / "few.jsonl"))
    rows = ResultStore(world / "out").results()
    (row,) = [row for row in rows if row.tree and row.tree.name == name]
    assert sum(row.tree_shares.values()) == pytest.approx(1.0)
    shares = told_shares(row)
    assert f"of the baseline {shares}; of the checkpoint {shares}\n" in summary(world)


@pytest.mark.costly
def test_a_choice_that_took_plain_decoding_says_so(world, monkeypatch):
    def measured(decoder, *_):
        costs = {(1, tree): 1e-6 if tree == PLAIN else 1.0 for tree in decoder.tree_policy.trees}
        decoder.tree_policy.costs = StepTimes(costs)
        return decoder.tree_policy.costs

    monkeypatch.setattr(Decoder, "measure_step_times", lambda each, **_: measured(each.batch))
    judge(world, "fair", "--tree", "chain-2 or chain-3")
    told = summary(world)
    assert told.startswith("## Checkpoint benchmark: inconclusive")
    assert "of the baseline plain 100%; of the checkpoint plain 100%; plain ones draft" in told
    assert "inconclusive, plain decoding was chosen for every step of both" in told


@pytest.mark.costly
def test_results_of_an_earlier_run_are_a_baseline(world, tmp_path):
    """Nothing is measured for the baseline: its checkpoint may be gone."""
    old = tmp_path / "old"
    judge(world, "fair", "--out", str(old))
    before = (old / "results.jsonl").read_bytes()
    with pytest.raises(gate.Regression):
        judge(world, "worse", baseline=old)
    assert (old / "results.jsonl").read_bytes() == before
    same = arguments(world, "worse", "--fail_below", TAU, baseline=old)
    others = [[*same, name, value] for name, value in
              (("--max_new_tokens", "9"), ("--batch_size", "2"), ("--top_p", "0.9"))]
    for given in (*others, [each for each in same if each != "--ignore_eos"]):
        with pytest.raises(UsageError, match="of this target, tree, prompts and decoding options"):
            benchmark_checkpoint(given)
    with pytest.raises(UsageError, match="of several checkpoints"):
        judge(world, "better", baseline=world / "out")


@pytest.mark.costly
def test_speeds_of_a_cpu_shared_out_otherwise_are_no_baseline_and_other_figures_say_so(
    world, tmp_path
):
    old = tmp_path / "old"
    judge(world, "fair", "--out", str(old))
    rows = [
        row.model_copy(update={
            "environment": row.environment.model_copy(update={"num_threads": 7, "git_sha": "old"})
        })
        for row in ResultStore(old).results()
    ]
    write_rows(old / RESULTS_NAME, rows)
    with pytest.raises(UsageError, match=r"\(1 × 7 threads\), this is .*\(1 × 1 threads\)"):
        judge(world, "fair", below=["speedup=-3%"], baseline=old)
    judge(world, "fair", baseline=old)
    (line,) = (text for text in summary(world).splitlines() if text.startswith("- measured apart"))
    assert "7 threads, code old; this on" in line and "1 threads" in line


@pytest.mark.costly
def test_a_drafter_s_name_is_judged_and_a_baseline_and_never_a_pointer_s(world, tmp_path):
    fair, out = world / "drafter/fair", ("--out", str(tmp_path / "out"), "--limit", "2")
    given = arguments(world, "fair", "--fail_below", TAU, *out, baseline=f"float8:{fair}")
    benchmark_checkpoint([*given, "--dry_run"])
    benchmark_checkpoint(given)
    summary = (tmp_path / "out/summary.md").read_text()
    assert f"- baseline: `float8:{fair}`, step 10" in summary
    assert f"- checkpoint: `{fair}`, step 10" in summary
    with pytest.raises(UsageError, match="--promote moves a symlink"):
        benchmark_checkpoint([*given, "--promote"])
    (tmp_path / "pointer").symlink_to(fair)
    given = arguments(
        world, "fair", "--fail_below", TAU, "--promote", baseline=tmp_path / "pointer"
    )
    with pytest.raises(UsageError, match="--promote lets the baseline lead to a folder"):
        benchmark_checkpoint([f"float8:{fair}", *given[1:]])
    with pytest.raises(NotFound, match="--baseline: no folder nowhere"):
        judge(world, "fair", baseline="float8:nowhere")


@pytest.mark.parametrize(
    ("threshold", "reason"),
    [
        ("acceptance_length", "is no threshold"),
        ("acceptance_length=3%", "the change has a sign"),
        ("acceptance_length=-three%", "is no threshold"),
        ("acceptance=-3%", "is no threshold"),
        ("tokens_per_second_e2e=-3%", "METRIC is one of"),
        ("depth_accept_rates=-3%", "with a depth from 1"),
        ("depth_accept_rates[0]=-3%", "with a depth from 1"),
        ("speedup[1]=-3%", "with a depth from 1"),
        ("speedup=-100%", "nothing can lose all"),
        ("gsm8k.speedup=-3%", "no benchmark 'gsm8k' is measured, only sums"),
        ("depth_accept_rates[40]=-3%", "depth 40 is below the tree"),
    ],
)
def test_a_bad_threshold_is_one_clear_line(world, threshold, reason):
    with pytest.raises(UsageError) as got:
        judge(world, "worse", below=[threshold])
    assert reason in str(got.value) and threshold in str(got.value)
    assert "\n" not in str(got.value)


def test_what_cannot_work_is_refused_before_anything_is_measured(world, tmp_path):
    out = ["--out", str(tmp_path / "out")]
    for reason, more in {
        "add plain": ["--methods", "tree"],
        "nothing that drafts": ["--methods", "autoregressive"],
        "leads to no folder": ["--baseline", str(tmp_path / "nowhere")],
        "--promote moves a symlink": ["--promote"],
    }.items():
        with pytest.raises(UsageError, match=reason):
            judge(world, "worse", *out, *more, below=["speedup=-5%"])
    assert not (tmp_path / "out/results.jsonl").exists()


def test_the_workflow_types_no_option_that_the_command_lacks():
    text = (REPOSITORY / ".github/workflows/checkpoint-benchmark.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    scripts = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    calls = [s.split("benchmark_checkpoint.py")[1] for s in scripts if "benchmark_checkpoint" in s]
    assert len(calls) == len(jobs) == 2
    known = set(re.findall(r"--[\w-]+", build_parser().format_help()))
    for call in calls:
        used = set(re.findall(r"--[\w-]+", call))
        assert used and used <= known


def test_a_drafter_of_another_target_is_no_candidate(world, tmp_path):
    """Its own target has the same tokenizer and shape."""
    drafter = tmp_path / "drafter"
    record = {TARGET_WEIGHTS: weights_fingerprint(world / "drafter/worse")}
    model, tokenizer = load_model(world / "drafter/fair"), load_tokenizer(world / "target")
    save_model(model, drafter, tokenizer, manifest_extra=record)
    for first, second in ((drafter, "fair"), (world / "drafter/fair", drafter)):
        baseline = world / "drafter" / second
        with pytest.raises(CheckpointRefused, match="was made for other weights"):
            judge(world, str(first), baseline=baseline)
