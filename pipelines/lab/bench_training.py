"""Measure distillation on several processes: tokens/s, scaling efficiency, loss distance.

    python pipelines/lab/bench_training.py runs/bench/training.jsonl --processes "[1,2,4]"

    python pipelines/lab/bench_training.py runs/bench/8b.jsonl --what "[step]" --shape 8b \
        --recipe configs/distill/llama3.1-8b.yaml --batch_size 2 --sequence_length 2048 --steps 6 \
        --more "[--model.optimizer.kind=muon]" --teacher "[live,cached]"

Target and data are random. All runs have the same rows per step in the same micro-batches; a
process alone accumulates the share of several, so that their losses should be one curve. `step`
times one training step of a recipe in its parts, with its memory and its share of the GPU's peak;
the target runs, too, or its outputs come from a teacher cache, which has no features.
"""

from __future__ import annotations

import csv
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import stree.common.threads  # noqa: F401  (before torch is loaded)

import numpy as np
import torch

from stree.checkpoints.load_save import save_model
from stree.common.errors import UsageError, exit_with_reason, kind_of_code, naming_what_does_not_fit
from stree.models.slicing import drafter_config_from
from stree_pipelines import distill
from stree_pipelines.console.command_line import CommandParser, read_yaml
from stree_pipelines.console.progress import stage
from stree_pipelines.data.tokenizer_training import train_tokenizer
from stree_pipelines.lab.benches.intervals import interval
from stree_pipelines.lab.benches.models import OWN_SHAPES, random_model
from stree_pipelines.lab.benches.options import device_of, require_numbers, require_results_file
from stree_pipelines.lab.benches.timing import require_green, save_rows, write_rows
from stree_pipelines.lab.benches.training_step import PRECISION, TEACHERS, TeacherKind, step_row
from stree_pipelines.resources.dry_run import MemoryEstimate, model_line
from stree_pipelines.resources.estimates import ModelPlan, training_memory
from stree_pipelines.training.distillation import Distillation, drafter_config_of
from stree_pipelines.training.parallel.sharding import require_supported
from stree_pipelines.training.run.console import quieten
from stree_pipelines.training.run.parser import TrainingParser
from stree_pipelines.training.teachers.frozen_target import held_dtype

TINY = OWN_SHAPES["tiny"].replace(num_layers=4, attn_layers=(1, 3), vocab_size=320)
TARGETS = {**OWN_SHAPES, "tiny": TINY}
FROM_A_CACHE = {"target_dtype": "bfloat16", "features": None}  # overrides of any recipe
ALONE = ("auto", 1)
TESTS = {  # by measurement
    "processes": ["pipelines/training/losses", "pipelines/training/parallel/test_scaling.py"],
    "step": ["pipelines/training/losses"],
}
WHAT = tuple(TESTS)
LESS = "lower --batch_size or --sequence_length, or take a smaller --shape"


def measure(
    shape: str, strategies: list[str], processes: list[int], batch_size: int,
    sequence_length: int, steps: int, more: list[str], device: torch.device,
) -> Iterator[dict[str, Any]]:
    """Yield a row for one process, then one per larger number of processes and strategy.

    Args:
        batch_size: rows in a micro-batch; a step has batch_size · max(processes) rows.
        more: further arguments of distill.py.
    """
    rows_a_step = batch_size * max(processes)
    alone: tuple[list[float], float] | None = None  # the losses and tokens/s of one process
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = [
            *_make_workspace(folder, shape, sequence_length, device),
            "--data.sequence_length", str(sequence_length), "--data.batch_size", str(batch_size),
            "--data.global_batch_size", str(rows_a_step), "--trainer.max_steps", str(steps),
            "--trainer.accelerator", "gpu" if device.type == "cuda" else "cpu",
            "--trainer.log_every_n_steps", str(interval(steps)),
            "--trainer.enable_progress_bar", "false", "--checkpoint.every_n_steps", str(steps),
            *more,
        ]
        for strategy, count in _runs(strategies, processes):
            run_dir = folder / f"{strategy}-{count}"
            placed = ["--trainer.strategy", strategy, "--trainer.devices", str(count)]
            _distil(["--run_dir", str(run_dir), *arguments, *placed])
            with open(run_dir / "metrics.csv", newline="", encoding="utf-8") as file:
                run = list(csv.DictReader(file))
            losses = [float(row["loss"]) for row in run]
            rates = sorted(float(row["tokens_per_second"]) for row in run[2:])  # step 1 is a row
            median = statistics.median(rates)
            alone = alone or (losses, median)
            yield dict(
                what="distill", shape=shape, strategy=strategy, num_processes=count,
                rows_a_step=rows_a_step, batch_size=batch_size, sequence_length=sequence_length,
                num_steps=steps, options=more,
                tokens_per_second=dict(
                    median=median, p20=rates[len(rates) // 5], p80=rates[-1 - len(rates) // 5]
                ),
                losses=losses,
                loss_distance=max(abs(a - b) / b for a, b in zip(losses, alone[0], strict=True)),
                efficiency=median / alone[1] / count,
            )


def _runs(strategies: list[str], processes: list[int]) -> list[tuple[str, int]]:
    """Return strategy and number of processes of each run."""
    several = ((each, count) for count in processes if count > 1 for each in strategies)
    return list(dict.fromkeys([ALONE, *several]))


def describe(options: Any, on_cuda: bool) -> Iterator[str]:
    """Yield lines about the runs, and the memory of an unsharded process and of a step alone.

    The process is in fp32, the step under bf16 autocast. Raises OutOfMemory, after the last line,
    when there is less.
    """
    target = TARGETS[options.shape]
    yield model_line("target", target)
    estimates = []
    rows, length = options.batch_size, options.sequence_length
    if "step" in options.what:
        yield f"a step of {rows} rows of {length} tokens, {options.steps} times"
        for teacher in options.teacher:
            model = recipe(options, teacher)
            drafter = drafter_config_of(
                target, model["drafter"], model["drafter_layers"], model["start_from"],
                model["features"], model["head"],
            )
            plan = ModelPlan(
                drafter, target, held_dtype(model["target_dtype"]), cached=teacher != "live",
                compiled=on_cuda,
            )
            memory = training_memory(plan, (rows, length), PRECISION, on_cuda)
            estimates.append(MemoryEstimate(memory, on_cuda))
            yield model_line("drafter", drafter)
            in_8_bits = " in 8 bits" if model["target_dtype"] == "float8" else ""
            yield f"{teacher} teacher{in_8_bits}, {PRECISION}, {estimates[-1]}"
    if "processes" in options.what:
        several = _runs(options.strategies, options.processes)
        runs = ", ".join(f"{strategy} on {count}" for strategy, count in several)
        drafter = drafter_config_from(target)
        plan = ModelPlan(drafter, target)
        memory = training_memory(plan, (rows, length), "32-true", on_cuda)
        estimates.append(MemoryEstimate(memory, on_cuda))
        rows *= max(options.processes)
        yield f"runs: {runs}; each {options.steps} steps of {rows} rows of {length} tokens"
        yield model_line("drafter", drafter)
        yield f"each process, unsharded, 32-true, {estimates[-1]}"
    for estimate in estimates:
        estimate.require(LESS)


def measure_step(options: Any, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a row per teacher: a step of a recipe with a target of this shape.

    Layers are compiled on a GPU.
    """
    file = options.recipe and Path(options.recipe).stem
    for teacher in options.teacher:
        model = recipe(options, teacher)
        row = step_row(
            TARGETS[options.shape], teacher, options.batch_size, options.sequence_length,
            options.steps, device, **{**model, "compile_layers": device.type == "cuda"},
        )
        features = model["features"]
        unread = tuple(f"--model.{name}" for name in FROM_A_CACHE)
        yield dict(
            shape=options.shape, recipe=file,
            options=[
                each for each in _of_model(options.more)
                if teacher == "live" or not each.startswith(unread)
            ],
            features=features.layers if features else [], **row,
        )


def recipe(options: Any, teacher: TeacherKind) -> dict[str, Any]:
    """Return the options of `Distillation` in a config of distill.py, overridden by `more`.

    Missing options have their defaults. The random target is in bf16 when they say fp32. With a
    cached teacher there are no features.
    """
    content = read_yaml(Path(options.recipe)) if options.recipe else {"model": {}}
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise UsageError(f"{options.recipe} has no section `model`, wanted a config of distill.py")
    model = {**content["model"], "target": ""}
    parser = TrainingParser()
    parser.add_lightning_class_args(Distillation, "model")
    given = parser.parse_args(["--model", json.dumps(model), *_of_model(options.more)])
    as_given = (lambda _, **options: options, Distillation, False)
    found: dict[str, Any] = parser.instantiate(given, instantiators=[as_given]).model
    del found["target"]
    if teacher == "cached":
        return {**found, **FROM_A_CACHE}
    if found["target_dtype"] == "float32":
        found["target_dtype"] = "bfloat16"
    return found


def _of_model(more: list[str]) -> list[str]:
    return [each for each in more if each.startswith("--model.")]


def _make_workspace(
    folder: Path, shape: str, sequence_length: int, device: torch.device
) -> list[str]:
    """Write a random target and conversations that fill a row each; return their arguments."""
    rng = np.random.default_rng(0)
    words = [f"{chr(97 + i % 26)}{i}" for i in range(500)]
    texts = [" ".join(rng.choice(words, sequence_length)) for _ in range(64)]
    turns = ([{"from": "human", "value": text[:64]}, {"from": "gpt", "value": text}]
             for text in texts)
    lines = (json.dumps({"conversations": each}) + "\n" for each in turns)
    (folder / "train.jsonl").write_text("".join(lines))
    tokenizer = train_tokenizer(texts, 320, folder / "tokenizer")
    save_model(random_model(TARGETS[shape], device), folder / "target", tokenizer)
    return ["--model.target", str(folder / "target"), "--data.train", str(folder / "train.jsonl")]


def _distil(arguments: list[str]) -> None:
    command = [sys.executable, distill.__file__, "fit", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise kind_of_code(done.returncode)(
            f"distill.py {' '.join(arguments)} ended with code {done.returncode}: "
            f"{' | '.join(done.stderr.strip().splitlines()[-3:])}"
        )


def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser("bench_training.py", description=__doc__)
    parser.add_argument("out", type=str, help="file to write, JSON lines")
    parser.add_argument("--shape", type=str, default="chat", help=f"one of {sorted(TARGETS)}")
    parser.add_argument("--what", type=list[str], default=["processes"],
                        help=f"of {', '.join(WHAT)}")
    parser.add_argument("--recipe", type=str | None,
                        help="config of distill.py whose model section is the step's")
    parser.add_argument("--teacher", type=list[str], default=["live"],
                        help=f"of {', '.join(TEACHERS)}, for step")
    parser.add_argument("--strategies", type=list[str], default=["ddp", "fsdp2"])
    parser.add_argument("--processes", type=list[int], default=[1, 2, 4])
    parser.add_argument("--batch_size", "--batch-size", type=int, default=16)
    parser.add_argument("--sequence_length", "--sequence-length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", type=str, default="cuda")
    parser.add_argument("--more", type=list[str], default=[],
                        help="--NAME=VALUE of distill.py; a step has those of --model")
    parser.add_argument("--dry_run", "--dry-run", action="store_true", help="say what it takes")
    options = parser.parse_args(arguments)
    quieten()
    device = device_of(options.device)
    if options.shape not in TARGETS or options.steps < 3:
        raise UsageError(f"wanted a shape of {sorted(TARGETS)} and at least 3 steps (2 warm up)")
    require_numbers(
        processes=options.processes, batch_size=options.batch_size,
        sequence_length=options.sequence_length,
    )
    for strategy in options.strategies:
        require_supported(strategy)
    for name in ("trainer.max_steps", "trainer.log_every_n_steps"):
        if any(name in each for each in options.more):
            raise UsageError(f"--more may not set {name}: --steps decides it")
    for name, known in (("what", WHAT), ("teacher", TEACHERS)):
        given = getattr(options, name)
        if not given or set(given) - set(known):
            raise UsageError(f"--{name}: wanted some of {', '.join(known)}, got {given}")
    if "processes" not in options.what and len(_of_model(options.more)) < len(options.more):
        raise UsageError(
            f"--more {' '.join(options.more)}: a step alone has the options of --model only"
        )
    if options.recipe and "step" not in options.what:
        raise UsageError('--recipe is the recipe of a step: add --what "[step]", or leave it out')
    require_results_file(options.out)
    if options.dry_run:
        for line in describe(options, device.type == "cuda"):
            print(line, flush=True)
        return
    most = max(options.processes) if "processes" in options.what else 1
    if device.type == "cuda" and torch.cuda.device_count() < most:
        raise UsageError(
            f"{most} processes need as many CUDA devices, there are "
            f"{torch.cuda.device_count()}; --device cpu --shape tiny tries the script"
        )
    with stage("tests"):
        require_green(sorted({each for what in options.what for each in TESTS[what]}))
    rows = []
    if "step" in options.what:
        with naming_what_does_not_fit(LESS):
            rows += write_rows(options.out, measure_step(options, device), device)
    if "processes" not in options.what:
        return
    print("| strategy | processes | tokens/s | efficiency | loss distance |\n|:--|--:|--:|--:|--:|")
    for row in measure(
        options.shape, options.strategies, options.processes, options.batch_size,
        options.sequence_length, options.steps, options.more, device,
    ):
        rows.append(row)
        save_rows(options.out, rows, device)
        print(
            f"| {row['strategy']} | {row['num_processes']} | "
            f"{row['tokens_per_second']['median']:,.0f} | {row['efficiency']:.2f} | "
            f"{row['loss_distance']:.1e} |",
            flush=True,
        )


if __name__ == "__main__":
    exit_with_reason(main)
