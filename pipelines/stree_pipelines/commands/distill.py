"""Distil a drafter from a frozen target.

    stree distil fit --config configs/distill/quickstart.yaml \\
        --run_dir runs/quickstart

Any key of the YAML can be overridden: --trainer.max_steps 200 --model.optimizer.lr 3e-4. The same
command again goes on where the run stopped. --show-mask prints which tokens count for the loss.
"""

from __future__ import annotations

from typing import Any

import stree.common.threads  # noqa: F401  (before torch is loaded)

import torch

from stree.checkpoints.identity import checkpoint_sha256
from stree.checkpoints.load_save import weights_fingerprint
from stree.checkpoints.partners import TARGET_WEIGHTS
from stree.checkpoints.tokenizer import require_same_tokenizer
from stree.drafters.names import MTP
from stree.models.config import HybridConfig
from stree_pipelines.resources.estimates import ModelPlan
from stree_pipelines.training.distillation import Distillation
from stree_pipelines.training.drafter_head import (
    count_tokens,
    coverage_line,
    coverage_of,
    most_frequent,
)
from stree_pipelines.training.run.cli import TrainingCLI
from stree_pipelines.training.run.console import say
from stree_pipelines.training.run.parser import TrainingParser


class DistillCLI(TrainingCLI):
    """Command whose data has the target's tokenizer, and whose exports are drafters."""

    program = "stree distil"
    description = (
        "Distil a drafter from a frozen target; the same command goes on where it stopped."
    )
    head_coverage: dict[str, float] | None = None  # of a head with some of the tokens

    def add_arguments_to_parser(self, parser: TrainingParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.link_arguments("model.target", "data.tokenizer")

    def before_instantiate_classes(self) -> None:
        if (drafter := self.options["model"]["drafter"]) is not None:
            HybridConfig.from_dict(dict(drafter))  # refuses invalid options
        super().before_instantiate_classes()

    def _prepare_data(self, vocab_size: int) -> None:
        super()._prepare_data(vocab_size)
        model = self.options["model"]
        if model["start_from"] not in (None, MTP):
            remark = require_same_tokenizer(str(self.target_path), model["start_from"])
            if remark:
                say(remark)
        self._prepare_head()

    def _prepare_head(self) -> None:
        """Choose the tokens of a drafter's smaller head, and print their share of the data."""
        model: Any = self.model
        is_trained = not isinstance(model, ModelPlan)
        config = model.exported.config if is_trained else model.trained
        given, tables, ids = self.options["model"], self.datamodule.tables, None
        chooses = given["head"]["vocab_size"] is not None or given["start_from"] is None
        if config.head_vocab_size and chooses:
            counts = count_tokens(tables["train"], config.vocab_size)
            special = {*config.eos_token_ids, *self.datamodule.tokenizer.all_special_ids}
            ids = most_frequent(counts, config.head_vocab_size, special)
        if is_trained:
            model.begin_head(None if ids is None else torch.from_numpy(ids), self.resume_step > 0)
            ids = None if model.exported.head_ids is None else model.exported.head_ids.numpy()
        if ids is not None:
            self.head_coverage = coverage_of(ids, tables, config.vocab_size)
            say(coverage_line(len(ids), config.vocab_size, self.head_coverage))

    def origin(self) -> dict[str, Any]:
        return {
            "target": self.target_path,
            "target_sha256": checkpoint_sha256(str(self.target_path)),
            TARGET_WEIGHTS: weights_fingerprint(str(self.target_path)),
            **({"head_coverage": self.head_coverage} if self.head_coverage else {}),
        }


def main(arguments: list[str] | None = None) -> None:
    DistillCLI(Distillation, arguments)
