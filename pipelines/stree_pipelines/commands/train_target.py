"""Train a hybrid target from scratch, with a tokenizer of its own if wanted.

    stree train fit --config configs/target/python-docs.yaml \\
        --run_dir runs/python-docs-hybrid

RUN/target/latest is the target in the MambaInLlama layout. The same command again goes on where the
run stopped.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import stree.common.threads  # noqa: F401  (before torch is loaded)

from lightning.pytorch.utilities import rank_zero_only

from stree.checkpoints.tokenizer import load_tokenizer
from stree.common.errors import UsageError
from stree_pipelines.data.tokenizer_training import texts_of, train_tokenizer
from stree_pipelines.training.module import TargetTraining
from stree_pipelines.training.run.cli import TrainingCLI
from stree_pipelines.training.run.console import say
from stree_pipelines.training.run.parser import TrainingParser

TOKENIZER_DEADLINE_S = 1800.0


class TargetCLI(TrainingCLI):
    """Command whose exports are targets; with `tokenizer.vocab_size` it trains the tokenizer
    first."""

    program = "stree train"
    description = "Train a hybrid target; the same command goes on where it stopped."
    export_folder = "target"
    evaluates = False
    _scratch: tempfile.TemporaryDirectory | None = None

    def add_arguments_to_parser(self, parser: TrainingParser) -> None:
        super().add_arguments_to_parser(parser)
        add = parser.add_argument
        add("--tokenizer.vocab_size", type=int | None, default=None,
            help="Train a tokenizer of this size on data.train first.")
        add("--tokenizer.limit", type=int | None, default=None,
            help="Conversations to train it on; all by default.")
        parser.set_defaults({"data.tokenizer": ""})

    def before_instantiate_classes(self) -> None:
        data, tokenizer = self.options["data"], self.options["tokenizer"]
        if bool(data["tokenizer"]) == bool(tokenizer["vocab_size"]):
            raise UsageError(
                "give data.tokenizer (a folder) or tokenizer.vocab_size (to train one), not both"
            )
        super().before_instantiate_classes()
        if self.is_finished:
            return
        if tokenizer["vocab_size"]:
            kept = Path(self.options["run_dir"] or "", "tokenizer")
            only_looks = self.options["show_mask"] or self.options["dry_run"]
            if only_looks and not kept.is_dir():
                self._scratch = tempfile.TemporaryDirectory()  # these options leave no files
                kept = Path(self._scratch.name, "tokenizer")
            data["tokenizer"] = str(kept)
            self._train_tokenizer(data, tokenizer)
        architecture = self.options["model"]["architecture"]
        loaded = load_tokenizer(data["tokenizer"])
        if not architecture["eos_token_ids"]:
            end = loaded.eos_token_id
            architecture["eos_token_ids"] = () if end is None else (end,)
            architecture["pad_token_id"] = loaded.pad_token_id

    def _train_tokenizer(self, data: Any, options: Any) -> None:
        folder = Path(data["tokenizer"])
        is_main = rank_zero_only.rank == 0  # type: ignore[attr-defined]
        if is_main and not folder.is_dir():
            say(f"training a tokenizer of {options['vocab_size']} ids")
            train = data["train"]
            sources = [train] if isinstance(train, str) else train
            texts = (text for source in sources for text in texts_of(source, options["limit"]))
            train_tokenizer(texts, options["vocab_size"], folder)
        deadline = time.monotonic() + TOKENIZER_DEADLINE_S
        while not folder.is_dir():  # other ranks; it appears whole
            if time.monotonic() > deadline:
                raise UsageError(f"no tokenizer appeared at {folder}: see the first rank's log")
            time.sleep(1.0)


def main(arguments: list[str] | None = None) -> None:
    TargetCLI(TargetTraining, arguments)
