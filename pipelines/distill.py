"""Distil a drafter from a frozen target.

    python pipelines/distill.py fit --config configs/distill/quickstart.yaml \\
        --run_dir runs/quickstart

Any key of the YAML can be overridden: --trainer.max_steps 200 --model.optimizer.lr 3e-4. The same
command again goes on where the run stopped. See what counts for the loss with --show-mask.
"""

from __future__ import annotations

from typing import Any

import stree.threads  # noqa: F401  (before torch is loaded)

import torch

from stree.checkpoint_identity import checkpoint_sha256
from stree.errors import exit_with_reason
from stree.models.config import HybridConfig
from stree.models.convert import load_config
from stree.tokenizer import fingerprint, require_same_tokenizer
from stree_pipelines.dry_run import ModelPlan
from stree_pipelines.training.cli import TrainingCLI
from stree_pipelines.training.distillation import (
    Distillation,
    drafter_config_of,
    require_reference_of,
    require_same_vocabulary,
)
from stree_pipelines.training.features import require_trainable
from stree_pipelines.training.parser import TrainingParser
from stree_pipelines.training.teacher_cache import TeacherCache


class DistillCLI(TrainingCLI):
    """Data is tokenised with the target's own tokenizer; exports are drafters."""

    description = (
        "Distil a drafter from a frozen target; the same command goes on where it stopped."
    )

    def add_arguments_to_parser(self, parser: TrainingParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.link_arguments("model.target", "data.tokenizer")

    def before_instantiate_classes(self) -> None:
        model = self.options["model"]
        if model["drafter"] is not None:
            config = HybridConfig.from_dict(dict(model["drafter"]))
            if not self.options["show_mask"]:
                require_same_vocabulary(config, load_config(model["target"]))
        super().before_instantiate_classes()

    def plan_model(self, model_class: Any, **options: Any) -> ModelPlan:
        target = load_config(options["target"])
        trained = drafter_config_of(
            target, options["drafter"], options["drafter_layers"], options["start_from"],
            options["features"],
        )  # fmt: skip
        dtype = getattr(torch, options["target_dtype"])
        loss = options["loss"]
        loss.require_fitting(options["teacher_cache"])
        require_trainable(
            options["features"], options["teacher_cache"], loss,
            options["activation_checkpointing"],
        )  # fmt: skip
        reference = None if loss.reference is None else load_config(loss.reference)
        if reference is not None:
            require_reference_of(target, loss.reference, reference)
        cached = options["teacher_cache"] is not None
        return ModelPlan(
            trained, target, dtype, cached,
            beside=options["target_placement"] == "beside" and not cached,
            activation_checkpointing=options["activation_checkpointing"], reference=reference,
        )  # fmt: skip

    def _prepare_data(self, vocab_size: int) -> None:
        super()._prepare_data(vocab_size)
        model = self.options["model"]
        for drafter in (model["start_from"], model["loss"]["reference"]):
            if drafter is not None:
                require_same_tokenizer(str(self.target_path), drafter)
        if model["teacher_cache"] is not None:
            cache = TeacherCache(model["teacher_cache"])
            cache.require(
                target_sha256=checkpoint_sha256(str(self.target_path)),
                tokenizer_fingerprint=fingerprint(self.datamodule.tokenizer),
                temperature=model["temperature"],
            )
            self.datamodule.use_teacher(cache)

    def origin(self) -> dict[str, Any]:
        return {
            "target": self.target_path,
            "target_sha256": checkpoint_sha256(str(self.target_path)),
        }


def main(arguments: list[str] | None = None) -> None:
    DistillCLI(Distillation, arguments)


if __name__ == "__main__":
    exit_with_reason(main)
