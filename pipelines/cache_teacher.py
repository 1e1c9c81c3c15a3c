"""Compute a target's outputs once, for distillations that then do without it.

    python pipelines/cache_teacher.py --config configs/distill/quickstart.yaml \\
        --out runs/teacher-cache --top_k 64
    python pipelines/distill.py fit --config configs/distill/quickstart.yaml \\
        --model.features null --model.teacher_cache runs/teacher-cache --run_dir runs/from-cache

Reads the YAML files of distill.py, whose target and data it uses. Prints size and free disk before
it starts; --dry_run stops there. The same command again goes on where it was stopped; several
processes (accelerate launch, torchrun, srun) share the work.
"""

from __future__ import annotations

from typing import Any

import stree.common.threads  # noqa: F401  (before torch is loaded)

import torch

from stree.checkpoints.identity import checkpoint_sha256
from stree.checkpoints.load_save import load_config, load_model
from stree.checkpoints.tokenizer import fingerprint
from stree.common.device_memory import free_disk_bytes
from stree.common.errors import exit_with_reason
from stree.common.words import size
from stree_pipelines.console.input_checks import of_training, require_there
from stree_pipelines.data.datamodule import ConversationDataModule
from stree_pipelines.distill import DistillCLI
from stree_pipelines.evaluation.context import Workers, describe_code, pick_device
from stree_pipelines.resources.dry_run import (
    MemoryEstimate,
    config_lines,
    model_line,
    require_writable,
)
from stree_pipelines.resources.estimates import forward_memory
from stree_pipelines.training.distillation import Distillation, require_own_target
from stree_pipelines.training.parallel.float8 import require_float8, round_products
from stree_pipelines.training.parallel.precision import supported_precision
from stree_pipelines.training.run.parser import TrainingParser
from stree_pipelines.training.teachers.cache import CacheSpec
from stree_pipelines.training.teachers.cache_writer import CacheWriter
from stree_pipelines.training.teachers.frozen_target import held_dtype, loaded_dtype

# Options of a distillation's YAML files that decide its cache.
READ = {
    "help", "config", "model.target", "model.target_dtype", "model.temperature", "data.train",
    "data.valid", "data.sequence_length", "data.batch_size", "data.template", "data.strict",
    "data.limit", "data.mix", "data.hardest", "trainer.precision",
}


class CacheCLI(DistillCLI):
    """Command that parses a distillation's options, and makes its cache instead of training."""

    description = (
        "Compute a target's top-k outputs once; the same command goes on.\n"
        "Of a file of distill.py it reads the options below."
    )
    usage = "--config FILE --out FOLDER"
    trains = False

    def is_shown(self, name: str) -> bool:
        return name in READ or name in self._own_options

    def add_own_options(self, parser: TrainingParser) -> None:
        before = set(parser.known_options())
        add = parser.add_argument
        add("--out", type=str, required=True, help="Folder of the cache.")
        add("--top_k", "--top-k", type=int, default=64, help="Tokens kept of each prediction.")
        add("--dtype", type=str, choices=["float16", "float32"], default="float16",
            help="Of the log-probabilities.")
        add("--shard_positions", "--shard-positions", type=int, default=65536,
            help="Predictions in a shard: what a kill loses at most.")
        add("--device", type=str, default="auto", help="auto, cpu, cuda or cuda:N.")
        add("--dry_run", "--dry-run", action="store_true", help="Say what it would take, and exit.")
        self._own_options = {each.lstrip("-") for each in set(parser.known_options()) - before}

    def require_inputs(self) -> None:
        def value(section: str, name: str) -> Any:
            return self.options[section][name] if f"{section}.{name}" in READ else None

        require_there(of_training(value))

    def before_instantiate_classes(self) -> None:
        self.require_inputs()
        if torch.cuda.is_available():
            torch.set_float32_matmul_precision("high")

    def instantiate_classes(self) -> None:
        """Instantiate nothing: no training runs."""

    def make(self) -> None:
        options, model = self.options, self.options["model"]
        workers = Workers.unconnected()
        data = ConversationDataModule(**options["data"])
        data.setup()
        config = load_config(model["target"])
        require_own_target(config)
        spec = CacheSpec(
            target_sha256=checkpoint_sha256(model["target"]),
            tokenizer_fingerprint=fingerprint(data.tokenizer),
            vocab_size=config.vocab_size,
            sequence_length=data.sequence_length,
            temperature=model["temperature"],
            top_k=options["top_k"],
            dtype=options["dtype"],
            shard_positions=options["shard_positions"],
        )
        writer = CacheWriter(options["out"], spec, data.tables)
        device, dtype = pick_device(options["device"]), model["target_dtype"]
        precision = supported_precision(options["trainer"]["precision"])
        if workers.is_main:
            print(describe(writer), flush=True)
            if options["dry_run"]:
                self._describe_run(data, device.type == "cuda", held_dtype(dtype), precision)
        writer.require_space()
        if options["dry_run"] or not writer.missing():
            return

        def say_waiting() -> None:
            print(f"waiting for another command that fills {writer.directory}", flush=True)

        with workers.locked(writer.directory, say_waiting):
            writer.require_same_cache()  # as the other command left it
            if writer.missing():
                self._fill(writer, data, workers, device, precision)
        left = len(writer.missing())
        if workers.is_main:
            print(f"{writer.directory}: {_state(left, len(writer.shards))}", flush=True)

    def _fill(
        self, writer: CacheWriter, data: ConversationDataModule, workers: Workers,
        device: torch.device, precision: str,
    ) -> None:
        model = self.options["model"]
        dtype = model["target_dtype"]
        target = load_model(model["target"], device, loaded_dtype(dtype))
        if dtype == "float8":
            require_float8(device)
            round_products(target)
        made_with = {
            "target": model["target"],
            "target_dtype": dtype,
            "precision": precision,
            **describe_code(),
        }
        writer.write(target, data.pad_id, data.batch_size, workers, made_with, precision)

    def _describe_run(
        self, data: ConversationDataModule, on_cuda: bool, dtype: torch.dtype, precision: str
    ) -> None:
        self._dump_config()
        config = load_config(self.options["model"]["target"])
        shape = data.batch_size, data.sequence_length
        print(config_lines(self.config_dump))
        print(model_line("target", config))
        memory = MemoryEstimate(forward_memory(config, shape, precision, on_cuda, dtype), on_cuda)
        print(memory, flush=True)
        require_writable(self.options["out"])
        memory.require("lower data.batch_size, or use model.target_dtype bfloat16")


def describe(writer: CacheWriter) -> str:
    """Describe the cache's size and disk before any of it is computed."""
    spec, missing = writer.spec, writer.missing()
    sizes = ", ".join(
        f"{split} {plan.num_rows:,} predictions in {len(plan)} shards"
        for split, plan in writer.plans.items()
    )
    lines = [
        f"teacher cache {writer.directory}: {sizes}",
        f"{spec.top_k} of {spec.vocab_size:,} tokens and the tail: {spec.row_bytes} bytes a "
        f"prediction, {size(writer.num_bytes(writer.shards))} in all",
        f"{len(writer.shards) - len(missing)} of {len(writer.shards)} shards are there; the "
        f"others take {size(writer.num_bytes(missing))}, "
        f"{size(free_disk_bytes(writer.directory))} are free",
    ]
    return "\n".join(lines)


def _state(left: int, total: int) -> str:
    if not left:
        return f"all {total} shards are there"
    return f"{total - left} of {total} shards are there, other processes are at the rest"


def main(arguments: list[str] | None = None) -> None:
    CacheCLI(Distillation, arguments).make()


if __name__ == "__main__":
    exit_with_reason(main)
