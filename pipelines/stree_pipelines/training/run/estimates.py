"""Print a training's --dry_run: its steps, and their memory, disk and arithmetic.

The model is not made: `ModelPlan` stands where LightningCLI would instantiate it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import CUDAAccelerator

from stree.common.words import counted
from stree_pipelines.console.progress import clock
from stree_pipelines.data.datamodule import ConversationDataModule
from stree_pipelines.data.micro_batches import MicroBatches
from stree_pipelines.data.packing import count_rows
from stree_pipelines.resources.disk import require_disk
from stree_pipelines.resources.estimates import (
    PEAKS,
    MemoryEstimate,
    ModelPlan,
    checkpoint_bytes,
    distillation_operations,
    model_line,
    training_disk,
    training_memory,
)
from stree_pipelines.training.checkpoints.export import Exports
from stree_pipelines.training.checkpoints.saving import TrainingCheckpoints
from stree_pipelines.training.parallel.precision import AUTOCAST

SMALLER_TRAINING = (
    "lower data.batch_size (and raise trainer.accumulate_grad_batches by the same factor, unless "
    "the run has a checkpoint to go on from) or data.sequence_length"
)


def describe_training(
    plan: ModelPlan, data: ConversationDataModule, trainer: pl.Trainer,
    callbacks: tuple[Exports, TrainingCheckpoints], run_dir: Path, resume_step: int, name: str,
    accelerator: str,
) -> Iterator[str]:
    """Yield, line by line, everything about a training that is known before its first step.

    `data` is set up. accelerator: as given by the user. "auto" without a GPU says the memory that a
    GPU needs, and refuses nothing, so that a recipe can be tried on a laptop.

    Raises CannotWrite when the disk is too small and, after the last line, OutOfMemory when the
    memory is.
    """
    exports, checkpoints = callbacks
    on_cuda = isinstance(trainer.accelerator, CUDAAccelerator) or (
        accelerator == "auto" and not torch.cuda.is_available()
    )
    max_steps, length = trainer.max_steps, data.sequence_length
    left = max_steps - resume_step
    rows = data.batch_size * trainer.world_size * trainer.accumulate_grad_batches
    num_rows = len(data.micro_batches().packing)
    steps = exports.export_steps(max_steps)
    shape = data.batch_size, length
    memory = training_memory(plan, shape, trainer.precision, on_cuda)
    if exports.branches(max_steps) and not on_cuda:
        memory["copy during decays"] = checkpoint_bytes(plan.trained, plan.optimizer)
    yield model_line(name, plan.trained)
    if plan.target is not None:
        yield model_line("target", plan.target)
    if layers := plan.trained.feature_layers:
        passes = counted(plan.passes, "pass")
        yield f"features of the target: layers {', '.join(map(str, layers))}; {passes}"
    yield (
        f"steps: {left:,}" + (f" from step {resume_step:,} on" if resume_step else "")
        + f", each {counted(rows, 'row')} of {length} tokens "
        f"({counted(trainer.world_size, 'process')} × {counted(data.batch_size, 'row')} × "
        f"{counted(trainer.accumulate_grad_batches, 'micro-batch')}); "
        f"{left * rows / num_rows:.2f} passes over {num_rows:,} rows, at most "
        f"{left * rows * length:,} tokens"
    )
    if plan.target is not None and AUTOCAST[trainer.precision] is torch.bfloat16:
        yield arithmetic_line(plan, data.micro_batches(), rows, left, trainer.world_size)
    further = sum(end - begin for begin, end in exports.branches(max_steps) if begin >= resume_step)
    yield (
        f"exports at steps {', '.join(map(str, steps))}"
        + (f", with {further:,} further steps for decays of their own" if further else "")
        + f"; a checkpoint every {checkpoints.every_n_steps} steps, the last "
        f"{checkpoints.keep_last} stay"
    )
    estimate = MemoryEstimate(memory, on_cuda)
    yield f"each process, unsharded, {estimate}"
    yield require_disk(run_dir, disk_of(plan, data, trainer, callbacks, run_dir, resume_step))
    estimate.require(SMALLER_TRAINING)


def disk_of(
    plan: ModelPlan, data: ConversationDataModule, trainer: pl.Trainer,
    callbacks: tuple[Exports, TrainingCheckpoints], run_dir: Path, resume_step: int,
) -> dict[str, int]:
    """Estimate the bytes by part that a training adds to its folder, as `training_disk` does."""
    exports, checkpoints = callbacks
    left = trainer.max_steps - resume_step
    interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    disk = training_disk(
        plan.trained, -(-left // checkpoints.every_n_steps), checkpoints.keep_last,
        sum(step > resume_step for step in exports.export_steps(trainer.max_steps)), exports.dtype,
        data.tokenizer_path, left // interval + 1, plan.optimizer,
    )
    # New checkpoints take the place of those that are there
    there = (each for each in (run_dir / "checkpoints").rglob("*") if each.is_file())
    disk["checkpoints"] -= min(disk["checkpoints"], sum(each.stat().st_size for each in there))
    return disk


def arithmetic_line(
    plan: ModelPlan, data: MicroBatches, rows: int, steps: int, num_processes: int
) -> str:
    """Estimate the arithmetic of a distillation's steps, and the least time that they take.

    The time is that of this machine's GPUs, or of H200s without any.
    """
    counted_tokens = count_rows(data.table, data.packing)["assistant"].mean() * rows
    num_tokens = rows * data.packing.sequence_length
    parts = distillation_operations(plan, num_tokens, round(counted_tokens))
    total = sum(parts.values())
    shares = ", ".join(f"{name} {count / total:.0%}" for name, count in parts.items())
    line = f"arithmetic: {total / 1e12:,.3g} TFLOP a step ({shares})"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "NVIDIA H200"
    if gpu not in PEAKS:
        return line
    least = clock(steps * total / PEAKS[gpu] / num_processes)
    return f"{line}; all steps take at least {least} at the bf16 peak of {num_processes} {gpu}"
