"""--dry_run writes nothing, refuses what the run would refuse, and its estimates are near what the
run then takes.

Tolerances: a checkpoint has headers and a few counters beside its tensors, which a tiny model's
files show; activations are counted by the same hook on fake and on real tensors, so they are equal.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import namedtuple
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from tiny_run import ARCHITECTURE, VOCAB_SIZE, distill_arguments, make_workspace

from stree.checkpoints.load_save import save_model
from stree.checkpoints.tokenizer import load_tokenizer
from stree.common.errors import CannotWrite, NotFound, OutOfMemory, StreeError, UsageError
from stree.common.words import size
from stree.models.cache import HybridCache
from stree.models.config import HybridConfig
from stree.models.model import HybridModel
from stree.models.slicing import drafter_config_from
from stree_pipelines import (
    benchmark_checkpoint,
    cache_teacher,
    compare,
    distill,
    eval_spec,
    generate_data,
    train_target,
)
from stree_pipelines.data.micro_batches import MicroBatches
from stree_pipelines.data.packing import TokenTable, pack
from stree_pipelines.lab import bench_decode, bench_kernels, bench_training, study
from stree_pipelines.resources import dry_run, estimates
from stree_pipelines.resources.estimates import ModelPlan
from stree_pipelines.training import distillation
from stree_pipelines.training.hidden_states import FeatureConfig
from stree_pipelines.training.run import estimates as needs
from stree_pipelines.training.teachers.frozen_target import held_dtype

CONFIG = HybridConfig(**ARCHITECTURE)
TINY = bench_training.TINY
RESULTS = Path(__file__).parents[3] / "docs/results"
CONFIGS = Path(__file__).parents[3] / "configs"
MAMBA_KEYS = (
    "num_ssm_heads", "ssm_head_dim", "d_state", "num_x_groups", "num_b_groups", "num_c_groups"
)  # fmt: skip
ATTENTION_KEYS = ("num_heads", "num_kv_heads", "head_dim")
ATTENTION_ONLY = CONFIG.replace(attn_layers=(0, 1, 2, 3), **dict.fromkeys(MAMBA_KEYS, 0))
GATED_DELTA = CONFIG.replace(
    layer_types=("gated_delta mlp", "attention experts+shared_mlp"), num_layers=2, attn_layers=(),
    num_delta_heads=4, num_delta_key_heads=2, delta_key_dim=8, delta_value_dim=12,
    attention_gate=True, num_experts=4, experts_per_token=2, expert_intermediate_size=8,
    shared_intermediate_size=8, shared_gate=True,
)  # fmt: skip
PROMPTS = [{"id": str(i), "category": "sums", "turns": [f"What is {i} plus 2?"]} for i in range(3)]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    folder = make_workspace(tmp_path_factory.mktemp("workspace"))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return folder


@pytest.fixture(scope="module")
def finished(workspace, tmp_path_factory) -> Path:
    """A run that keeps two checkpoints and has three exports."""
    run_dir = tmp_path_factory.mktemp("finished")
    distill.main(options_of(workspace, run_dir))
    return run_dir


def options_of(workspace: Path, run_dir: Path, *more: str) -> list[str]:
    kept = ("--checkpoint.every_n_steps", "2", "--checkpoint.keep_last", "2")
    return distill_arguments(workspace, run_dir, *kept, "--export.steps", "[2,5]", *more)


def evaluation_of(workspace: Path, run: Path, *more: str) -> list[str]:
    return [
        "--run", str(run), "--benchmarks", str(workspace / "prompts.jsonl"), "--device", "cpu",
        "--max-new-tokens", "8", "--ignore-eos", "--temperatures", "0", *more,
    ]  # fmt: skip


def everything_under(*folders: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for f in folders for path in (f, *f.rglob("*"))}


def bytes_under(folder: Path) -> int:
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    parents = {path.resolve() for path in paths}
    return sum(path.stat().st_size for path in parents)


def architecture_options(**changes) -> list[str]:
    values = {**ARCHITECTURE, **changes}
    return [f"--model.architecture.{key}={json.dumps(value)}" for key, value in values.items()]


# What is missing is all told at once, each with what asks for it


MISSING = {
    "distil": ("model.target: no folder T", "model.start_from: no folder S",
               "data.valid: V.jsonl: no such file", "model.loss.reference: no folder R",
               "data.template: no chat template 'none.jinja'"),
    "cache": ("model.target: no folder T", "data.valid: V.jsonl: no such file",
              "data.template: no chat template 'none.jinja'"),
    "eval": ("--run: no folder nowhere", "--target: no folder T",
             "--benchmarks: no benchmark file b2.jsonl; no benchmark 'b1' in",
             "--tree: no tree 'X.yaml'", "--chat_template: no chat template 'none'"),
    "gate": ("--target: no folder T", "; checkpoint: no folder C", "--benchmarks: no benchmark",
             "--baseline: B leads to no folder"),
    "answers": ("--target: no folder T", "--drafter: no folder D", "--prompts: P.jsonl: no such",
                "--tree: no tree 'X'", "--chat_template: no chat template 'none'"),
    "compare": ("target: no folder T", "benchmarks: no benchmark file b2.jsonl",
                "chat_template: no chat template 'none'", "drafter of arm one: no folder D",
                "drafter of arm two: there is no corpus F",
                "tree of arm two: no tree 'X'"),
    "study": ("hold_back.train: no file H", "hold_back.prompts: no file I",
              "distil of arm two: no file none.yaml", "model.target of arm one: no folder T",
              "data.valid of arm one: V.jsonl: no such"),
}  # fmt: skip


@pytest.mark.parametrize("command", MISSING)
def test_all_that_is_missing_is_one_error_that_says_what_asks_for_it(
    command, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "distil.yaml").write_text("model: {target: T}\ndata: {valid: V.jsonl}\n")
    arms = [{"name": "one", "drafter": "D"}, {"name": "two", "drafter": "ngram:3,F", "tree": "X"}]
    comparison = {"target": "T", "benchmarks": ["starter", "b2.jsonl"], "chat_template": "none"}
    (tmp_path / "compare.yaml").write_text(json.dumps({**comparison, "out": "o", "arms": arms}))
    plan = {
        "out": "o", "distil": "distil.yaml", "trees": ["paper"], "compare": comparison,
        "arms": [{"name": "one"}, {"name": "two", "distil": "none.yaml"}],
        "hold_back": {"source": "s", "train": "H", "prompts": "I"},
    }  # fmt: skip
    (tmp_path / "study.yaml").write_text(json.dumps(plan))
    config = Path(__file__).parents[3] / "configs/distill/quickstart.yaml"
    commands = {
        "distil": (distill.main, ["fit", "--config", str(config), "--run_dir", "r",
                   "--model.target", "T", "--model.start_from", "S", "--data.train", "starter",
                   "--data.valid", "V.jsonl", "--model.loss.reference", "R",
                   "--model.loss.keep", "0.5", "--data.template", "none.jinja"]),
        "cache": (cache_teacher.main, ["--config", str(config), "--out", "o", "--model.target", "T",
                  "--model.start_from", "not read here", "--data.train", "starter",
                  "--data.valid", "V.jsonl", "--data.template", "none.jinja"]),
        "eval": (eval_spec.main, ["--run", "nowhere", "--target", "T", "--benchmarks", "b1",
                 "b2.jsonl", "--tree", "chain-2 or X.yaml", "--chat_template", "none"]),
        "gate": (benchmark_checkpoint.main, ["C", "--baseline", "B", "--target", "T", "--out", "o",
                 "--fail_below", "speedup=-5%", "--benchmarks", "b1"]),
        "answers": (generate_data.main, ["--target", "T", "--drafter", "D", "--prompts", "P.jsonl",
                    "--out", "o", "--tree", "X", "--chat_template", "none"]),
        "compare": (compare.main, ["compare.yaml"]),
        "study": (study.main, ["train", "study.yaml"]),
    }  # fmt: skip
    main, arguments = commands[command]
    with pytest.raises(NotFound) as refused:
        main([*arguments, "--dry_run"])
    assert all(each in str(refused.value) for each in MISSING[command]), str(refused.value)
    assert str(refused.value).count(": no folder T") <= 1
    assert "not read here" not in str(refused.value)
    assert not (tmp_path / "o").exists() and not (tmp_path / "r").exists()


# Nothing is written, and no model is loaded


def test_a_distillation_says_what_it_takes(workspace, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(distillation, "load_model", None)
    before = everything_under(workspace, tmp_path)
    distill.main(options_of(workspace, tmp_path / "not/yet/there", "--dry-run"))
    printed = capsys.readouterr().out
    assert everything_under(workspace, tmp_path) == before
    for expected in (
        "max_steps: 8\n", "sequence_length: 64\n", "drafter: ", " parameters, 2 layers",
        "target: ", "4 layers (2 attention)", "steps: 8, each 2 rows of 64 tokens",
        "exports at steps 2, 5, 8; a checkpoint every 2 steps, the last 2 stay",
        "memory: about", "are free", "disk: ",
    ):  # fmt: skip
        assert expected in printed, expected


def test_a_distillation_in_bf16_says_how_long_its_arithmetic_takes_at_least(
    workspace, tmp_path, capsys
):
    def said(*more: str) -> str:
        distill.main(options_of(workspace, tmp_path / "run", "--dry_run", *more))
        lines = capsys.readouterr().out.splitlines()
        return next((line for line in lines if line.startswith("arithmetic: ")), "")

    rows = ("--data.batch_size", "1", "--data.global_batch_size", "2")
    bf16 = (*rows, "--trainer.precision", "bf16-mixed")
    one, two = said(*bf16), said(*bf16, "--trainer.devices", "2")
    assert one.startswith("arithmetic: ") and "(drafter " in one and ", target " in one
    assert one.split(";")[0] == two.split(";")[0]  # as many rows a step
    assert one.endswith("the bf16 peak of 1 NVIDIA H200") and two.endswith(" of 2 NVIDIA H200")
    assert not said()


def test_time_of_the_arithmetic():
    tokens, mask = np.zeros(200, np.int32), np.arange(200) % 100 >= 40
    table = TokenTable(tokens, mask, np.array([0, 100, 200]))
    batches = MicroBatches(table, pack(table, 100, [0, 1]), 1, seed=0, pad_id=0)
    parts = estimates.distillation_operations(ModelPlan(CONFIG, CONFIG), 400, 240)
    steps = round(7200 * estimates.PEAKS["NVIDIA H200"] / sum(parts.values()))
    for plan, processes, time in (
        (ModelPlan(CONFIG, CONFIG), 1, "2:00:00"),
        (ModelPlan(CONFIG, CONFIG), 2, "1:00:00"),
        (ModelPlan(CONFIG, CONFIG, beside=True), 1, "1:00:00"),
        (ModelPlan(CONFIG, CONFIG, cached=True), 1, "1:30:00"),  # 6 of 8 operations
    ):
        line = needs.arithmetic_line(plan, batches, 4, steps, processes)
        assert f"at least {time} at" in line and ("target" in line) != plan.cached


def test_a_target_on_a_gpu_of_its_own_is_counted_there(workspace, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(needs, "CUDAAccelerator", CPUAccelerator)  # as if this were a GPU
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    more = ("--model.target_placement", "beside", "--dry_run")
    distill.main(options_of(workspace, tmp_path / "run", *more))
    lines = capsys.readouterr().out.splitlines()
    trained, beside = (next(each for each in lines if name in each) for name in (
        "each process, unsharded, ", "beside each, on a GPU of its own, "
    ))  # fmt: skip
    assert "target's head" in trained and "target's activations" not in trained
    assert "(target " in beside and "target's activations" in beside
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match="needs a second GPU for each of 1 processes"):
        distill.main(options_of(workspace, tmp_path / "run", *more))


def test_a_target_s_training_says_what_it_takes(workspace, tmp_path, capsys, monkeypatch):
    """With a tokenizer that is to be trained first: it is, and thrown away."""
    monkeypatch.chdir(tmp_path)
    train_target.main([
        "fit", "--run_dir", "run", *architecture_options(), "--tokenizer.vocab_size",
        str(VOCAB_SIZE), "--data.train", str(workspace / "train.jsonl"), "--dry_run",
        "--data.sequence_length", "64", "--trainer.accelerator", "cpu",
    ])  # fmt: skip
    assert f"target: {HybridModel(CONFIG).num_parameters():,} parameters" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_teacher_cache_says_what_it_takes(workspace, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cache_teacher, "load_model", None)
    cache_teacher.main([
        "--model.target", str(workspace / "target"), "--data.train", str(workspace / "train.jsonl"),
        "--data.sequence_length", "64", "--out", str(tmp_path / "cache"), "--dry_run",
    ])  # fmt: skip
    printed = capsys.readouterr().out
    assert "0 of 1 shards are there" in printed and "memory: about" in printed
    assert "top_k: 64" in printed
    assert not list(tmp_path.iterdir())


def caches_in(printed: str) -> float:
    """Bytes of the caches that a dry run names."""
    value, unit = re.search(r"caches ([\d.]+) (\wiB)", printed).groups()
    return float(value) * {"KiB": 2**10, "MiB": 2**20}[unit]


def test_an_evaluation_and_the_gate_say_what_they_take(workspace, finished, tmp_path, capsys):
    before = everything_under(workspace, finished, tmp_path)
    eval_spec.main(evaluation_of(workspace, finished, "--dry-run"))
    printed = capsys.readouterr().out
    assert "rows: 7 (3 checkpoints, 3 methods, 1 temperatures, 1 benchmarks), 0 are" in printed
    assert "answers: 27 prompts × methods to go, 9 of them plain decoding" in printed
    assert "at most 216 tokens; 0 more are journalled" in printed
    assert "untimed: 7 warm-ups of 8 tokens, and prefill where" in printed
    alone = caches_in(printed)
    eval_spec.main(evaluation_of(workspace, finished, "--dry-run", "--batch_size", "3"))
    printed = capsys.readouterr().out
    assert "batches: 3 prompts at once\nuntimed: 7 warm-ups of 4 tokens\n" in printed
    assert caches_in(printed) == pytest.approx(3 * alone, rel=0.01)
    eval_spec.main(evaluation_of(workspace, finished, "--dry-run", "--tree", "chain-1 or paper"))
    assert "; 9 answers to first prompts, for what chooses trees\n" in capsys.readouterr().out
    new, old = (finished / f"drafter/step-{step:08d}" for step in (8, 2))
    benchmark_checkpoint.main([
        str(new), "--baseline", str(old), "--target", str(workspace / "target"), "--out",
        str(tmp_path / "gate"), "--fail-below", "acceptance_length=-3%", "--benchmarks",
        str(workspace / "prompts.jsonl"), "--device", "cpu", "--dry-run",
    ])  # fmt: skip
    printed = capsys.readouterr().out
    assert "rows: 3 (2 checkpoints, 2 methods" in printed and "acceptance_length=-3%" in printed
    assert everything_under(workspace, finished, tmp_path) == before


@pytest.mark.parametrize(
    ("benchmark", "said"),
    [
        (
            bench_decode,
            "beams, memory, steps, graphs, rows, joint, serve, orders, draft_lengths, "
            "prompts; calls over 1, 5, 13, 16, 32, 64, 128 nodes, 1024",
        ),
        (
            bench_kernels,
            "over 1, 2, 4, 5, 8, 10, 13, 16, 32, 64, 128 nodes, 16 layers, 1024 committed",
        ),
        (bench_training, "runs: auto on 1, ddp on 2, fsdp2 on 2, ddp on 4, fsdp2 on 4; each 60"),
    ],
)
def test_a_benchmark_says_what_it_takes(benchmark, said, tmp_path, capsys):
    benchmark.main([str(tmp_path / "out.jsonl"), "--shape", "tiny", "--dry_run"])
    printed = capsys.readouterr().out
    assert said in printed and "memory: about" in printed
    assert not list(tmp_path.iterdir())


def test_a_step_s_benchmark_says_what_a_step_takes(tmp_path, capsys):
    options = ("--shape", "tiny", "--device", "cpu", "--dry_run", "--what", "[step]")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {features: {layers: [1, 3]}}")
    more = ("--teacher", "[live,cached]", "--recipe", str(recipe))
    bench_training.main([str(tmp_path / "out.jsonl"), *options, *more])
    printed = capsys.readouterr().out
    assert "a step of 16 rows of 1024 tokens" in printed and "runs:" not in printed
    live, cached = re.findall(r"(\w+) teacher, bf16-mixed, memory: about .*\((.*)\)", printed)
    assert live[0] == "live" and "target " in live[1]
    assert cached[0] == "cached" and "target " not in cached[1]
    drafters = re.findall(r"drafter: ([\d,]+) parameters", printed)
    read = FeatureConfig([1, 3]).added_to(drafter_config_from(TINY), TINY)
    assert drafters == [f"{estimates.num_parameters(each):,}" for each in (
        read, drafter_config_from(TINY)
    )]  # fmt: skip


def test_a_finished_run_says_so(workspace, finished, capsys):
    before = everything_under(finished)
    distill.main(options_of(workspace, finished, "--dry_run"))
    assert "is finished: 8 of 8 steps are done" in capsys.readouterr().out
    assert everything_under(finished) == before


def test_what_is_left_of_a_run_is_what_is_counted(workspace, finished, capsys):
    distill.main([*options_of(workspace, finished, "--dry_run"), "--trainer.max_steps", "20"])
    assert "steps: 12 from step 8 on" in capsys.readouterr().out


# What would be refused is refused


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (("--data.train", "absent.jsonl"), NotFound),
        (("--model.target", "absent"), NotFound),
        (("--model.drafter_layers", "[0,9]"), UsageError),
        (("--export.every_n_steps", "3"), UsageError),
        (("--model.teacher_cache", "absent"), NotFound),
        (("--data.global_batch_size", "3"), UsageError),
        (("--trainer.max_steps", "0"), UsageError),
        (("--evaluation.mode", "inline", "--evaluation.config", "eval.yaml"), StreeError),
        (tuple(f"--model.drafter.{k}={json.dumps(v)}" for k, v in
               {**ARCHITECTURE, "vocab_size": 384}.items()), UsageError),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)  # fmt: skip
def test_the_error_is_the_run_s_own(options, kind, workspace, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("eval.yaml").write_text("benchmarks: [absent]\n")
    told = []
    for dry in ((), ("--dry_run",)):
        arguments = options_of(workspace, tmp_path / f"run{len(dry)}", *options, *dry)
        with pytest.raises(kind) as refused:
            distill.main(arguments)
        told.append((str(refused.value), refused.value.exit_code))
    assert told[0] == told[1]
    assert not (tmp_path / "run1").exists()


def test_an_evaluation_s_error_is_its_own(workspace, finished, tmp_path):
    broken = tmp_path / "step-1"
    shutil.copytree(finished / "drafter/latest/", broken)
    (broken / "tokenizer.json").unlink()
    for options in (("--benchmarks", "nowhere"), ("--checkpoint", str(broken))):
        told = []
        for dry in ((), ("--dry_run",)):
            out = tmp_path / f"eval{len(dry)}"
            with pytest.raises(StreeError) as refused:
                eval_spec.main(
                    evaluation_of(
                        workspace, finished, "--limit", "1", "--out",
                        str(out), *options, *dry,
                    )
                )  # fmt: skip
            told.append(refused.value.exit_code)
        assert told[0] == told[1]
        assert not (tmp_path / "eval1").exists()


def test_a_disk_that_is_too_small_is_code_73(workspace, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(9000, 8000, 1000))
    with pytest.raises(CannotWrite, match=r"needs .*checkpoints .*1000 B are free") as refused:
        distill.main(options_of(workspace, tmp_path / "run", "--dry_run"))
    assert refused.value.exit_code == 73
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CannotWrite, match="choose another folder"):
        distill.main(options_of(workspace, tmp_path / "file/run", "--dry_run"))


@pytest.mark.parametrize(
    "command", ["distill", "target", "cache", "evaluation", "gate", "decode", "kernels", "training"]
)
def test_memory_that_is_too_small_is_code_71(
    command, workspace, finished, tmp_path, monkeypatch, capsys
):
    """When all is said: the line says how much it is of what."""
    monkeypatch.setattr(dry_run, "free_memory_bytes", lambda on_cuda: 1000)
    target, train = str(workspace / "target"), str(workspace / "train.jsonl")
    checkpoint = str(finished / "drafter/step-00000008")
    tiny = [str(tmp_path / "out"), "--shape", "tiny", "--device", "cpu"]
    main, arguments = {
        "distill": (distill.main, options_of(workspace, tmp_path / "run")),
        "target": (train_target.main, [
            "fit", "--run_dir", str(tmp_path / "run"), *architecture_options(), "--data.tokenizer",
            target, "--data.train", train, "--trainer.accelerator", "cpu",
        ]),
        "cache": (cache_teacher.main, [
            "--model.target", target, "--data.train", train, "--out", str(tmp_path / "cache"),
            "--device", "cpu",
        ]),
        "evaluation": (eval_spec.main, evaluation_of(workspace, finished)),
        "gate": (benchmark_checkpoint.main, [
            checkpoint, "--baseline", checkpoint, "--target", target, "--out",
            str(tmp_path / "gate"), "--fail-below", "acceptance_length=-3%", "--benchmarks",
            str(workspace / "prompts.jsonl"), "--device", "cpu",
        ]),
        "decode": (bench_decode.main, [*tiny, "--what", "[calls]"]),
        "kernels": (bench_kernels.main, tiny),
        "training": (bench_training.main, tiny),
    }[command]  # fmt: skip
    with pytest.raises(OutOfMemory, match=r"of memory are needed, 1000 B are free: \w") as refused:
        main([*arguments, "--dry_run"])
    assert refused.value.exit_code == 71
    assert "1000 B are free — TOO LITTLE" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_without_a_gpu_a_training_that_is_not_for_the_cpu_is_not_judged(
    workspace, tmp_path, capsys, monkeypatch
):
    """A recipe for a GPU can be looked at on a laptop."""
    monkeypatch.setattr(dry_run, "free_memory_bytes", lambda on_cuda: 1000)
    auto = ("--trainer.accelerator", "auto", "--dry_run")
    distill.main(options_of(workspace, tmp_path / "run", *auto))
    said = capsys.readouterr().out
    assert "on a GPU, which is not here" in said and "TOO LITTLE" not in said


# The estimates


def test_a_run_takes_the_disk_that_was_estimated(workspace, finished):
    drafter = HybridConfig(**{**ARCHITECTURE, "num_layers": 2, "attn_layers": []})
    parts = estimates.training_disk(
        drafter, saves=4, keep_last=2, exports=3, export_dtype=torch.float32,
        tokenizer=workspace / "target", logged_rows=10,
    )  # fmt: skip
    # One of the three is there only while the next is written.
    assert parts["checkpoints"] * 2 / 3 == pytest.approx(
        bytes_under(finished / "checkpoints"), rel=0.2
    )
    assert parts["exports"] == pytest.approx(bytes_under(finished / "drafter"), rel=0.1)
    logs = bytes_under(finished / "tensorboard") + (finished / "metrics.csv").stat().st_size
    assert logs / 2 < parts["logs"] < 3 * logs


def test_an_evaluation_takes_at_most_the_disk_that_was_estimated(workspace, finished, capsys):
    eval_spec.main(evaluation_of(workspace, finished, "--dry_run"))
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("disk: "))
    value, unit = line.split()[1:3]
    assert unit == "KiB"
    eval_spec.main(evaluation_of(workspace, finished))
    taken = bytes_under(finished / "eval") / 1024
    assert taken < float(value) < 3 * taken
    eval_spec.main(evaluation_of(workspace, finished, "--dry_run"))
    assert "7 are there" in capsys.readouterr().out


@pytest.mark.parametrize("config", [CONFIG, GATED_DELTA], ids=["mamba", "gated-delta"])
def test_activations_are_those_of_the_real_model(config):
    """On the model itself, with real tensors, precision by precision."""
    model = HybridModel(config)
    tokens = torch.zeros(2, 48, dtype=torch.long)
    for precision, dtype in (("32-true", None), ("bf16-mixed", torch.bfloat16)):
        sizes, kept = {}, []

        def count(tensor, sizes=sizes, kept=kept):
            kept.append(tensor.untyped_storage())
            sizes[kept[-1].data_ptr()] = kept[-1].nbytes()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            model.hidden_states(tokens, torch.zeros_like(tokens))
        for parameter in model.parameters():
            sizes.pop(parameter.data_ptr(), None)
        estimated = estimates.activation_bytes(config, (2, 48), precision)
        assert estimated == pytest.approx(sum(sizes.values()), rel=0.02)


@pytest.mark.parametrize("config", [CONFIG, GATED_DELTA], ids=["mamba", "gated-delta"])
def test_caches_and_weights_are_counted_as_they_are(config):
    cache = HybridCache(config, 100, 13)
    values = [getattr(layer, f.name) for layer in cache.layers for f in fields(layer)]
    values = [value for value in values if value is not cache.parity]
    tensors = {v.data_ptr(): v.nbytes for v in values if isinstance(v, torch.Tensor)}
    assert estimates.cache_bytes(config, 100, 13, torch.float32) == sum(tensors.values())
    assert estimates.num_parameters(config) == HybridModel(config).num_parameters()


def test_a_cached_target_takes_no_memory():
    live, cached = (
        estimates.training_memory(ModelPlan(CONFIG, CONFIG, cached=each), (2, 48), "32-true", False)
        for each in (False, True)
    )
    assert live["target"] == 4 * HybridModel(CONFIG).num_parameters()
    assert sum(live.values()) - sum(cached.values()) == live["target"]


def test_of_the_target_s_pass_and_the_drafter_s_the_fuller_counts():
    wide = CONFIG.replace(num_heads=256, head_dim=64)  # its layer keeps more than a whole drafter
    narrow = CONFIG.replace(num_layers=1, attn_layers=())
    shape = 2, 48
    plan = ModelPlan(narrow, wide)
    while_it_runs = estimates.training_memory(plan, shape, "32-true", False)
    alone = estimates.forward_memory(wide, shape, "32-true", False, torch.float32)
    assert while_it_runs["target's activations"] == alone["target's activations"]
    assert "activations" not in while_it_runs and "loss" not in while_it_runs
    later = estimates.training_memory(replace(plan, passes=100), shape, "32-true", False)
    assert "activations" in later and "target's activations" not in later


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(CONFIG, id="mamba"),
        pytest.param(GATED_DELTA, id="gated-delta", marks=pytest.mark.long),
    ],
)
def test_compiled_layers_keep_what_pytorch_s_partition_keeps(config):
    """The same count on the model itself, with real tensors."""
    torch._dynamo.reset()
    model, tokens = HybridModel(config), torch.zeros(2, 48, dtype=torch.long)
    for layer in model.model.layers:
        layer.compile(dynamic=False, backend="aot_eager_decomp_partition")
    sizes, kept = {}, []

    def count(tensor):
        kept.append(tensor.untyped_storage())
        sizes[kept[-1].data_ptr()] = kept[-1].nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        model.hidden_states(tokens, torch.zeros_like(tokens))
    for parameter in model.parameters():
        sizes.pop(parameter.data_ptr(), None)
    compiled = estimates.activation_bytes(config, (2, 48), "32-true", compiled=True)
    assert compiled == pytest.approx(sum(sizes.values()), rel=0.02)
    assert compiled < estimates.activation_bytes(config, (2, 48), "32-true")


@pytest.mark.long
def test_a_step_at_8b_takes_what_was_measured():
    """The rows of docs/results/h200-training/8b.jsonl, whose steps drop their gradients before the
    next one; a training's are there until its backward pass. Tolerance: what is counted and does
    not live at once (the loss's buffers are gone when its products are made) is an eighth at most,
    and nothing may be forgotten."""
    rows = RESULTS / "h200-training/8b.jsonl"
    target = bench_training.TARGETS["8b"]
    for row in map(json.loads, rows.read_text().splitlines()):
        drafter, kind = drafter_config_from(target), "adamw"
        if row["features"]:
            drafter = FeatureConfig(row["features"]).added_to(drafter, target)
        if "recipe" in row:
            file = CONFIGS / f"distill/{row['recipe']}.yaml"
            options = SimpleNamespace(recipe=str(file), more=row["options"])
            model = bench_training.recipe(options, row["teacher"])
            parts = ("drafter", "drafter_layers", "start_from", "features", "head")
            drafter = distillation.drafter_config_of(target, *(model[part] for part in parts))
            kind = model["optimizer"].kind
        assert estimates.num_parameters(drafter) == row["drafter_parameters"]
        shape = row["batch_size"], row["sequence_length"]
        plan = ModelPlan(
            drafter, target, held_dtype(row.get("target_dtype", "bfloat16")),
            cached=row["teacher"] != "live", compiled=True, optimizer=kind,
        )  # fmt: skip
        parts = estimates.training_memory(plan, shape, bench_training.PRECISION, True)
        estimated = sum(parts.values()) - 4 * row["drafter_parameters"]
        assert row["peak_bytes"] < estimated < 1.125 * row["peak_bytes"], row


def test_recomputed_activations_take_less():
    plan = ModelPlan(CONFIG)
    kept, again = (
        estimates.training_memory(each, (2, 48), "32-true", False)
        for each in (plan, replace(plan, activation_checkpointing=True))
    )
    assert again["activations"] < kept["activations"] / 2


@pytest.mark.parametrize("layers", [(), (0, 1, 2, 3)], ids=["mamba", "attention"])
def test_one_kind_of_layer_is_enough(layers):
    """A config without Mamba-2 layers need not say how such a layer would look."""
    unused = dict.fromkeys(MAMBA_KEYS if layers else ATTENTION_KEYS, 0)
    config = CONFIG.replace(attn_layers=layers, **unused)
    plan = ModelPlan(config, config, activation_checkpointing=True)
    live = estimates.training_memory(plan, (2, 48), "32-true", False)
    one_layer = config.replace(num_layers=1, attn_layers=layers[:1])
    alone = estimates.activation_bytes(one_layer, (2, 48), "32-true")
    asked = estimates.forward_memory(config, (2, 48), "32-true", False, torch.float32)
    assert asked["target's activations"] == alone
    assert live["activations"] == alone + 4 * config.num_layers * config.d_model * 2 * 48
    trees = {"vanilla": 5, "tree": 13}
    assert estimates.decoding_memory(config, config, torch.float32, 100, trees)["caches"] > 0


def test_of_a_hybrid_the_larger_layer_counts():
    hybrid, shape = CONFIG.replace(num_heads=256), (2, 48)  # its attention layers are the larger
    mamba, attention = (
        estimates.activation_bytes(
            hybrid.replace(num_layers=1, attn_layers=layers), shape, "32-true"
        )
        for layers in ((), (0,))
    )  # fmt: skip
    assert mamba < attention
    memory = estimates.forward_memory(hybrid, shape, "32-true", False, torch.float32)
    assert memory["target's activations"] == attention


def test_a_target_of_attention_alone_says_what_it_takes(tmp_path, workspace, capsys):
    """As a Llama checkpoint is read: nothing of a Mamba-2 layer is set."""
    target = HybridModel(ATTENTION_ONLY)
    save_model(target, tmp_path / "target", load_tokenizer(workspace / "target"))
    options = ["--model.target", str(tmp_path / "target")]
    for name, value in {**ARCHITECTURE, "num_layers": 1, "attn_layers": []}.items():
        options += [f"--model.drafter.{name}", json.dumps(value)]
    distill.main(options_of(workspace, tmp_path / "run", "--dry_run", *options))
    said = capsys.readouterr().out
    assert "4 layers (4 attention)" in said and ", target " in said
    distill.main(options_of(workspace, tmp_path / "run", *options, "--trainer.max_steps", "1"))
    out = ["--out", str(tmp_path / "eval"), "--target", str(tmp_path / "target")]
    prompts = ["--benchmarks", str(workspace / "prompts.jsonl"), "--device", "cpu"]
    eval_spec.main(
        ["--checkpoint", str(tmp_path / "run/drafter/latest"), *out, *prompts, "--dry_run"]
    )
    assert "caches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB")]
)
def test_sizes_are_readable(num_bytes, text):
    assert size(num_bytes) == text
