"""--dry_run writes nothing, says what a run takes, and refuses what the run would refuse."""

from __future__ import annotations

import json
import re
import shutil
from collections import namedtuple
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import eagle_heads
import numpy as np
import pytest
import torch
from dry_runs import (
    CONFIG,
    architecture_options,
    evaluation_of,
    everything_under,
    options_of,
)
from tiny_run import ARCHITECTURE, VOCAB_SIZE

from stree.checkpoints.configs import load_config
from stree.common.errors import CannotWrite, NotFound, OutOfMemory, StreeError, UsageError
from stree.models.model import HybridModel
from stree_lab import study
from stree_pipelines.commands import (
    benchmark_checkpoint,
    compare,
    distill,
    eval_spec,
    generate_data,
    train_target,
)
from stree_pipelines.data.micro_batches import MicroBatches
from stree_pipelines.data.packing import TokenTable, pack
from stree_pipelines.resources import estimates
from stree_pipelines.resources.estimates import ModelPlan
from stree_pipelines.training import distillation
from stree_pipelines.training.run import estimates as training_estimates

# What is missing is all told at once, each with what asks for it


MISSING = {
    "distil": ("model.target: no folder T", "model.start_from: no folder S",
               "data.valid: V.jsonl: no such file",
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
}


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
    }
    (tmp_path / "study.yaml").write_text(json.dumps(plan))
    config = Path(__file__).parents[3] / "configs/distill/quickstart.yaml"
    commands = {
        "distil": (distill.main, ["fit", "--config", str(config), "--run_dir", "r",
                   "--model.target", "T", "--model.start_from", "S", "--data.train", "starter",
                   "--data.valid", "V.jsonl", "--data.template", "none.jinja"]),
        "eval": (eval_spec.main, ["--run", "nowhere", "--target", "T", "--benchmarks", "b1",
                 "b2.jsonl", "--tree", "chain-2 or X.yaml", "--chat_template", "none"]),
        "gate": (benchmark_checkpoint.main, ["C", "--baseline", "B", "--target", "T", "--out", "o",
                 "--fail_below", "speedup=-5%", "--benchmarks", "b1"]),
        "answers": (generate_data.main, ["--target", "T", "--drafter", "D", "--prompts", "P.jsonl",
                    "--out", "o", "--tree", "X", "--chat_template", "none"]),
        "compare": (compare.main, ["compare.yaml"]),
        "study": (study.main, ["train", "study.yaml"]),
    }
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
    ):
        assert expected in printed, expected


@pytest.mark.costly
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
    ):
        line = training_estimates.arithmetic_line(plan, batches, 4, steps, processes)
        assert f"at least {time} at" in line and "target" in line


def test_a_target_s_training_says_what_it_takes(workspace, tmp_path, capsys, monkeypatch):
    """A tokenizer that the training would make first is trained and thrown away."""
    monkeypatch.chdir(tmp_path)
    train_target.main([
        "fit", "--run_dir", "run", *architecture_options(), "--tokenizer.vocab_size",
        str(VOCAB_SIZE), "--data.train", str(workspace / "train.jsonl"), "--dry_run",
        "--data.sequence_length", "64", "--trainer.accelerator", "cpu",
    ])
    assert f"target: {HybridModel(CONFIG).num_parameters():,} parameters" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def caches_in(printed: str) -> float:
    """Return the bytes of the caches that a dry run names."""
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
    ])
    printed = capsys.readouterr().out
    assert "rows: 3 (2 checkpoints, 2 methods" in printed and "acceptance_length=-3%" in printed
    assert everything_under(workspace, finished, tmp_path) == before


def test_an_evaluation_of_an_eagle_head_says_what_it_takes(workspace, tmp_path, capsys):
    config, head = load_config(workspace / "target"), tmp_path / "head"
    sizes = SimpleNamespace(
        hidden_size=config.d_model, num_hidden_layers=config.num_layers,
        vocab_size=config.vocab_size,
    )
    target = SimpleNamespace(config=sizes, get_input_embeddings=lambda: None)
    eagle_heads.save_head(head, target, layers=[1, 2], whole_head=True)
    eval_spec.main([
        "--target", str(workspace / "target"), "--checkpoint", f"eagle:{head}", "--out",
        str(tmp_path / "rows"), "--benchmarks", str(workspace / "prompts.jsonl"), "--device", "cpu",
        "--dry_run",
    ])
    printed = capsys.readouterr().out
    assert re.search(rf"{head}: .* 1 layer", printed) and "each process: memory" in printed


def test_a_finished_run_says_so(workspace, finished, capsys):
    before = everything_under(finished)
    distill.main(options_of(workspace, finished, "--dry_run"))
    assert "is finished: 8 of 8 steps are done" in capsys.readouterr().out
    assert everything_under(finished) == before


def test_what_is_left_of_a_run_is_what_is_counted(workspace, finished, capsys):
    distill.main([*options_of(workspace, finished, "--dry_run"), "--trainer.max_steps", "20"])
    assert "steps: 12 from step 8 on" in capsys.readouterr().out


# What would be refused is refused


@pytest.mark.costly
@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (("--data.train", "absent.jsonl"), NotFound),
        (("--model.target", "absent"), NotFound),
        (("--model.drafter_layers", "[0,9]"), UsageError),
        (("--export.every_n_steps", "3"), UsageError),
        (("--data.global_batch_size", "3"), UsageError),
        (("--trainer.max_steps", "0"), UsageError),
        (("--evaluation.mode", "inline", "--evaluation.config", "eval.yaml"), StreeError),
        (tuple(f"--model.drafter.{k}={json.dumps(v)}" for k, v in
               {**ARCHITECTURE, "vocab_size": 384}.items()), UsageError),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
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
                )
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


@pytest.mark.quick(1)
@pytest.mark.parametrize("command", ["distill", "evaluation", "answers"])
def test_a_long_run_begins_with_a_warning_of_a_disk_that_is_too_small(
    command, workspace, finished, tmp_path, monkeypatch, capsys
):
    usage = namedtuple("usage", "total used free")
    main, arguments, part = {
        "distill": (distill.main, options_of(workspace, tmp_path / "run"), "checkpoints"),
        "evaluation": (
            eval_spec.main,
            evaluation_of(workspace, finished, "--limit", "1", "--out", str(tmp_path / "run")),
            "samples",
        ),
        "answers": (generate_data.main, [
            "--target", str(workspace / "target"), "--prompts", str(workspace / "train.jsonl"),
            "--limit", "3", "--max_new_tokens", "100", "--max_length", "256", "--device", "cpu",
            "--out", str(tmp_path / "run"),
        ], "answers"),
    }[command]
    for free in (1 << 40, 1000):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage(1 << 41, 0, free))
        with suppress(CannotWrite):  # what is written first may be too large, too
            main(arguments)
        told = capsys.readouterr()
        wanted = rf"warning: \S*run needs up to .*{part} .*1000 B are free: free some"
        assert bool(re.search(wanted, told.out + told.err)) == (free == 1000)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "command", ["distill", "target", "evaluation", "gate"]
)
def test_memory_that_is_too_small_is_code_71(
    command, workspace, finished, tmp_path, monkeypatch, capsys
):
    """The command ends after its last line, and the error says how much is wanted and free."""
    monkeypatch.setattr(estimates, "free_memory_bytes", lambda on_cuda: 1000)
    target, train = str(workspace / "target"), str(workspace / "train.jsonl")
    checkpoint = str(finished / "drafter/step-00000008")
    main, arguments = {
        "distill": (distill.main, options_of(workspace, tmp_path / "run")),
        "target": (train_target.main, [
            "fit", "--run_dir", str(tmp_path / "run"), *architecture_options(), "--data.tokenizer",
            target, "--data.train", train, "--trainer.accelerator", "cpu",
        ]),
        "evaluation": (eval_spec.main, evaluation_of(workspace, finished)),
        "gate": (benchmark_checkpoint.main, [
            checkpoint, "--baseline", checkpoint, "--target", target, "--out",
            str(tmp_path / "gate"), "--fail-below", "acceptance_length=-3%", "--benchmarks",
            str(workspace / "prompts.jsonl"), "--device", "cpu",
        ]),
    }[command]
    with pytest.raises(OutOfMemory, match=r"of memory are needed, 1000 B are free: \w") as refused:
        main([*arguments, "--dry_run"])
    assert refused.value.exit_code == 71
    assert "1000 B are free — TOO LITTLE" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_without_a_gpu_a_training_that_is_not_for_the_cpu_is_not_judged(
    workspace, tmp_path, capsys, monkeypatch
):
    """A recipe for a GPU can be looked at on a laptop."""
    monkeypatch.setattr(estimates, "free_memory_bytes", lambda on_cuda: 1000)
    auto = ("--trainer.accelerator", "auto", "--dry_run")
    distill.main(options_of(workspace, tmp_path / "run", *auto))
    said = capsys.readouterr().out
    assert "on a GPU, which is not here" in said and "TOO LITTLE" not in said
