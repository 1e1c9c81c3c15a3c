r"""Measure distillation on several processes: tokens/s, scaling efficiency, loss distance.

    python pipelines/stree_lab/bench_training.py runs/bench/training.jsonl --processes "[1,2,4]"

    python pipelines/stree_lab/bench_training.py runs/bench/8b.jsonl --what "[step]" --shape 8b \
        --recipe configs/distill/llama3.1-8b.yaml --batch_size 2 --sequence_length 2048 --steps 6 \
        --more "[--model.optimizer.kind=muon]"

Target and data are random. All runs have the same rows per step in the same micro-batches; a
process alone accumulates the share of several, so that their losses should be one curve. `step`
times one training step of a recipe in its parts, with its memory and its share of the GPU's peak.
"""

from __future__ import annotations

import csv
import json
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
from stree.common.errors import UsageError, exit_with_reason, kind_of_code
from stree_lab.bench_report import interval
from stree_lab.benches.command import (
    device_of,
    measure_when_green,
    require_numbers,
    require_results_file,
    require_some,
)
from stree_lab.benches.models import OWN_SHAPES, random_model
from stree_lab.benches.timing import Row, spread
from stree_lab.benches.training_step import step_row
from stree_pipelines.console.command_line import CommandParser
from stree_pipelines.console.config_files import read_yaml
from stree_pipelines.data.tokenizer_training import train_tokenizer
from stree_pipelines.training.distillation import Distillation
from stree_pipelines.training.parallel.sharding import require_supported
from stree_pipelines.training.run.console import quieten
from stree_pipelines.training.run.parser import TrainingParser

TINY = OWN_SHAPES["tiny"].replace(num_layers=4, attn_layers=(1, 3), vocab_size=320)
TARGETS = {**OWN_SHAPES, "tiny": TINY}
ALONE = ("auto", 1)
TESTS = {  # by measurement
    "processes": ["pipelines/training/losses", "pipelines/training/parallel/test_scaling.py"],
    "step": ["pipelines/training/losses"],
}
LESS = "lower --batch_size or --sequence_length, or take a smaller --shape"


def measure(
    shape: str, strategies: list[str], processes: list[int], batch_size: int,
    sequence_length: int, steps: int, more: list[str], device: torch.device,
) -> Iterator[Row]:
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
            rates = spread([float(row["tokens_per_second"]) for row in run[2:]])  # step 1 is a row
            alone = alone or (losses, rates["median"])
            yield dict(
                what="distill", shape=shape, strategy=strategy, num_processes=count,
                rows_a_step=rows_a_step, batch_size=batch_size, sequence_length=sequence_length,
                num_steps=steps, options=more, tokens_per_second=rates, losses=losses,
                loss_distance=max(abs(a - b) / b for a, b in zip(losses, alone[0], strict=True)),
                efficiency=rates["median"] / alone[1] / count,
            )


def _runs(strategies: list[str], processes: list[int]) -> list[tuple[str, int]]:
    """Return strategy and number of processes of each run."""
    several = ((each, count) for count in processes if count > 1 for each in strategies)
    return list(dict.fromkeys([ALONE, *several]))


def measure_step(options: Any, device: torch.device) -> Iterator[Row]:
    """Yield the row of a step of a recipe with a target of this shape.

    Layers are compiled on a GPU.
    """
    model = recipe(options)
    row = step_row(
        TARGETS[options.shape], options.batch_size, options.sequence_length, options.steps, device,
        **{**model, "compile_layers": device.type == "cuda"},
    )
    features = model["features"]
    yield dict(
        shape=options.shape, recipe=options.recipe and Path(options.recipe).stem,
        options=_of_model(options.more), features=features.layers if features else [], **row,
    )


def recipe(options: Any) -> dict[str, Any]:
    """Return the options of `Distillation` in a config of distill.py, overridden by `more`.

    Missing options have their defaults. The random target is in bf16 when they say fp32.
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
    command = [sys.executable, "-m", "stree", "distil", "fit", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise kind_of_code(done.returncode)(
            f"distill.py {' '.join(arguments)} ended with code {done.returncode}: "
            f"{' | '.join(done.stderr.strip().splitlines()[-3:])}"
        )


def build_parser() -> CommandParser:
    parser = CommandParser("bench_training.py", description=__doc__)
    add = parser.add_argument
    add("out", type=str, help="file to write, JSON lines")
    add("--shape", type=str, default="chat", help=f"one of {sorted(TARGETS)}")
    add("--what", type=list[str], default=["processes"], help=f"of {', '.join(TESTS)}")
    add("--recipe", type=str | None, help="config of distill.py whose model section is the step's")
    add("--strategies", type=list[str], default=["ddp", "fsdp2"])
    add("--processes", type=list[int], default=[1, 2, 4])
    add("--batch_size", type=int, default=16)
    add("--sequence_length", type=int, default=1024)
    add("--steps", type=int, default=60)
    add("--device", type=str, default="cuda")
    add("--more", type=list[str], default=[],
        help="--NAME=VALUE of distill.py; a step has those of --model")
    return parser


def require_possible(options: Any) -> None:
    """Raise UsageError for options that cannot be measured, CannotWrite for the file."""
    require_some("shape", [options.shape], sorted(TARGETS))
    require_some("what", options.what, TESTS)
    require_numbers(options, "processes", "batch_size", "sequence_length", "steps")
    if options.steps < 3:
        raise UsageError(f"--steps: wanted at least 3 (2 warm up), got {options.steps}")
    for strategy in options.strategies:
        require_supported(strategy)
    for name in ("trainer.max_steps", "trainer.log_every_n_steps"):
        if any(name in each for each in options.more):
            raise UsageError(f"--more may not set {name}: --steps decides it")
    if "processes" not in options.what and len(_of_model(options.more)) < len(options.more):
        raise UsageError(
            f"--more {' '.join(options.more)}: a step alone has the options of --model only"
        )
    if options.recipe and "step" not in options.what:
        raise UsageError('--recipe is the recipe of a step: add --what "[step]", or leave it out')
    require_results_file(options.out)
    if "step" in options.what:
        recipe(options)


def main(arguments: list[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    quieten()
    device = device_of(options.device)
    require_possible(options)
    num_devices = max(options.processes) if "processes" in options.what else 1
    tests = sorted({each for what in options.what for each in TESTS[what]})
    measure_when_green(options.out, _measure_all(options, device), device, tests, LESS, num_devices)


def _measure_all(options: Any, device: torch.device) -> Iterator[Row]:
    if "step" in options.what:
        yield from measure_step(options, device)
    if "processes" in options.what:
        yield from measure(
            options.shape, options.strategies, options.processes, options.batch_size,
            options.sequence_length, options.steps, options.more, device,
        )


if __name__ == "__main__":
    exit_with_reason(main)
