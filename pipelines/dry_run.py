"""--dry_run: refuse what would be refused, say what a command takes, write nothing.

A training's model is not made: `ModelPlan` stands where LightningCLI would instantiate it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from lightning.pytorch.accelerators import CUDAAccelerator

from stree.errors import CannotWrite, OutOfMemory
from stree.models.config import HybridConfig
from stree_pipelines.data.datamodule import ConversationDataModule
from stree_pipelines.estimates import (
    itemised,
    num_parameters,
    size,
    training_disk,
    training_memory,
)
from stree_pipelines.free_resources import free_disk_bytes, free_memory_bytes
from stree_pipelines.training.checkpointing import TrainingCheckpoints
from stree_pipelines.training.export import Exports
from stree_pipelines.training.frozen_target import device_beside

SMALLER_TRAINING = (
    "lower data.batch_size (and raise trainer.accumulate_grad_batches by the same factor, unless "
    "the run has a checkpoint to go on from) or data.sequence_length"
)


@dataclass(frozen=True)
class ModelPlan:
    """The architectures of a training. `target` runs with what is trained; `cached` says that
    its outputs come from a cache instead, `beside` that it has a GPU of its own. `reference` is the
    drafter that tokens are chosen by."""

    trained: HybridConfig
    target: HybridConfig | None = None
    target_dtype: torch.dtype = torch.float32
    cached: bool = False
    beside: bool = False
    activation_checkpointing: bool = False
    reference: HybridConfig | None = None


def require_writable(path: str | os.PathLike[str]) -> None:
    """Raise CannotWrite when a folder `path` could not be made or filled."""
    absolute = Path(path).absolute()
    existing = next(each for each in (absolute, *absolute.parents) if os.path.lexists(each))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise CannotWrite(f"cannot write in {path} ({existing} forbids it): choose another folder")


def require_disk(path: str | os.PathLike[str], parts: Mapping[str, int]) -> str:
    """The line about the disk. Raises CannotWrite when it is too small."""
    wanted, free = sum(parts.values()), free_disk_bytes(path)
    if wanted > free:
        raise CannotWrite(
            f"{path} needs {itemised(parts)}, {size(free)} are free: free some or choose another "
            "folder"
        )
    return f"disk: {itemised(parts)}; {size(free)} are free at {path}"


class MemoryNeeds:
    """What a command needs of which memory, as a line, and whether that is there."""

    def __init__(self, parts: Mapping[str, int], on_cuda: bool) -> None:
        self.parts, self.kind = parts, "GPU memory" if on_cuda else "memory"
        is_here = torch.cuda.is_available() or not on_cuda
        self.free = free_memory_bytes(on_cuda) if is_here else None

    @property
    def too_little(self) -> bool:
        return self.free is not None and sum(self.parts.values()) > self.free

    def __str__(self) -> str:
        if self.free is None:
            return f"memory: about {itemised(self.parts)} on a GPU, which is not here"
        judged = " — TOO LITTLE" if self.too_little else ""
        return f"{self.kind}: about {itemised(self.parts)}; {size(self.free)} are free{judged}"

    def require(self, remedy: str) -> None:
        """Raise OutOfMemory when there is too little; `remedy` says what needs less."""
        if self.free is not None and self.too_little:
            raise OutOfMemory(
                f"about {size(sum(self.parts.values()))} of {self.kind} are needed, "
                f"{size(self.free)} are free: {remedy}"
            )


def model_line(name: str, config: HybridConfig) -> str:
    return (
        f"{name}: {num_parameters(config):,} parameters, {config.num_layers} layers "
        f"({len(config.attn_layers)} attention), width {config.d_model}, vocabulary "
        f"{config.vocab_size:,}"
    )


def config_lines(config: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(config))  # tuples are lists in YAML
    return "config:\n" + yaml.safe_dump(plain, sort_keys=False).rstrip()


def describe_training(
    plan: ModelPlan,
    data: ConversationDataModule,
    trainer: pl.Trainer,
    callbacks: tuple[Exports, TrainingCheckpoints],
    run_dir: Path,
    resume_step: int,
    name: str,
) -> Iterator[str]:
    """Everything of a training that is known before its first step, line by line; `data` is set up.

    Raises CannotWrite when the disk is too small and, when all is said, OutOfMemory when the memory
    is.
    """
    exports, checkpoints = callbacks
    on_cuda = isinstance(trainer.accelerator, CUDAAccelerator)
    max_steps, length = trainer.max_steps, data.sequence_length
    left = max_steps - resume_step
    rows = data.batch_size * trainer.world_size * trainer.accumulate_grad_batches
    num_rows = len(data.micro_batches().packing)
    steps = exports.export_steps(max_steps)
    interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    memory = training_memory(
        plan.trained, (data.batch_size, length), trainer.precision, on_cuda,
        None if plan.cached else plan.target, plan.target_dtype, plan.activation_checkpointing,
        plan.reference,
    )  # fmt: skip
    own_gpu = {}
    if plan.beside and plan.target is not None and on_cuda:
        device_beside(torch.device("cuda", trainer.device_ids[0]), trainer.device_ids)
        own_gpu = {name: memory.pop(name) for name in ("target", "target's activations")}
        memory["target's head"] = (
            plan.target_dtype.itemsize * plan.target.vocab_size * plan.target.d_model
        )
    disk = training_disk(
        plan.trained, -(-left // checkpoints.every_n_steps), checkpoints.keep_last,
        sum(step > resume_step for step in steps), exports.dtype, data.tokenizer_path,
        left // interval + 1,
    )  # fmt: skip
    yield model_line(name, plan.trained)
    if plan.target is not None:
        cached = ", its outputs come from the cache" if plan.cached else ""
        yield model_line("target", plan.target) + cached
    if plan.reference is not None:
        yield model_line("reference", plan.reference)
    yield (
        f"steps: {left:,}" + (f" from step {resume_step:,} on" if resume_step else "")
        + f", each {rows} rows of {length} tokens ({trainer.world_size} processes × "
        f"{data.batch_size} rows × {trainer.accumulate_grad_batches} micro-batches); "
        f"{left * rows / num_rows:.2f} passes over {num_rows:,} rows, at most "
        f"{left * rows * length:,} tokens"
    )  # fmt: skip
    yield (
        f"exports at steps {', '.join(map(str, steps))}; a checkpoint every "
        f"{checkpoints.every_n_steps} steps, the last {checkpoints.keep_last} stay"
    )
    needs = [MemoryNeeds(memory, on_cuda)]
    yield f"each process, unsharded, {needs[0]}"
    if own_gpu:
        needs.append(MemoryNeeds(own_gpu, on_cuda))
        yield f"beside each, on a GPU of its own, {needs[1]}"
    yield require_disk(run_dir, disk)
    for each in needs:
        each.require(SMALLER_TRAINING)
