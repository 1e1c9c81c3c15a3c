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
from stree.models.config import HybridConfig
from stree_pipelines.commands.distill import DistillCLI
from stree_pipelines.console.input_checks import of_training, require_there
from stree_pipelines.data.datamodule import ConversationDataModule
from stree_pipelines.evaluation.context import Workers, describe_code, pick_device
from stree_pipelines.resources.estimates import (
    MemoryEstimate,
    config_lines,
    forward_memory,
    model_line,
    require_writable,
)
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
    "data.valid", "data.sequence_length", "data.batch_size", "data.template",
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
        device = pick_device(options["device"])
        precision = supported_precision(options["trainer"]["precision"])
        if workers.is_main:
            print(writer.describe(), flush=True)
            if options["dry_run"]:
                self._describe_run(data, config, device.type == "cuda", precision)
        writer.require_space()
        if options["dry_run"] or not writer.missing():
            return

        def say_waiting() -> None:
            print(f"waiting for another command that fills {writer.directory}", flush=True)

        with workers.locked(writer.directory, say_waiting):
            writer.require_same_cache()  # as the other command left it
            if writer.missing():
                self._fill(writer, data, workers, device, precision)
        if workers.is_main:
            left, total = len(writer.missing()), len(writer.shards)
            state = f"{total - left} of {total} shards are there, other processes are at the rest"
            print(
                f"{writer.directory}: {state if left else f'all {total} shards are there'}",
                flush=True,
            )

    def _fill(
        self, writer: CacheWriter, data: ConversationDataModule, workers: Workers,
        device: torch.device, precision: str,
    ) -> None:
        path, dtype = self.options["model"]["target"], self.options["model"]["target_dtype"]
        target = load_model(path, device, loaded_dtype(dtype))
        if dtype == "float8":
            require_float8(device)
            round_products(target)
        made_with = {
            "target": path, "target_dtype": dtype, "precision": precision, **describe_code()
        }
        writer.write(target, data.pad_id, data.batch_size, workers, made_with, precision)

    def _describe_run(
        self, data: ConversationDataModule, config: HybridConfig, on_cuda: bool, precision: str
    ) -> None:
        self._dump_config()
        shape = data.batch_size, data.sequence_length
        dtype = held_dtype(self.options["model"]["target_dtype"])
        print(config_lines(self.config_dump))
        print(model_line("target", config))
        memory = MemoryEstimate(forward_memory(config, shape, precision, on_cuda, dtype), on_cuda)
        print(memory, flush=True)
        require_writable(self.options["out"])
        memory.require("lower data.batch_size, or use model.target_dtype bfloat16")


def main(arguments: list[str] | None = None) -> None:
    CacheCLI(Distillation, arguments).make()
