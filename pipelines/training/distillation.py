"""A drafter learns from its frozen target, or from a cache of that target's outputs."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from stree.errors import UsageError
from stree.models.config import HybridConfig
from stree.models.convert import load_config, load_model
from stree.models.hybrid import HybridModel
from stree.models.slicing import drafter_config_from, slice_drafter
from stree_pipelines.training.frozen_target import FrozenTarget, Placement, TargetInputs
from stree_pipelines.training.losses import (
    LossTerms,
    chunked_distillation_loss,
    chunked_top_k_loss,
)
from stree_pipelines.training.module import Batch, Training, shift_left
from stree_pipelines.training.optimization import OptimizerConfig
from stree_pipelines.training.sharding import own_part
from stree_pipelines.training.teachers import TopK


class Distillation(Training):
    """A drafter learns its frozen target's next-token law on the assistant's tokens."""

    has_drafter = True

    def __init__(
        self,
        target: str,
        drafter: HybridConfig | None = None,
        drafter_layers: list[int] | None = None,
        ce_weight: float = 0.0,
        temperature: float = 1.0,
        optimizer: OptimizerConfig = OptimizerConfig(),
        target_dtype: Literal["float32", "bfloat16"] = "float32",
        target_placement: Placement = "replicated",
        chunk_tokens: int | None = None,
        compile_layers: bool = False,
        teacher_cache: str | None = None,
        activation_checkpointing: bool = False,
    ) -> None:
        """
        Args:
            target: folder of the target's checkpoint; its tokenizer is the drafter's, too.
            drafter: architecture of a drafter with random weights; null slices one from the target.
            drafter_layers: the target's layers to copy into a sliced drafter; null takes the first
                and the last Mamba-2 layer.
            ce_weight: weight of the cross-entropy to the data beside the KL divergence.
            temperature: of both softmaxes in the KL divergence.
            optimizer: AdamW, with a learning rate that warms up and falls along a cosine.
            target_dtype: in which the frozen target's weights are held.
            target_placement: the whole frozen target on each device; its weights shared among the
                devices and gathered layer by layer, whatever the trainer's strategy; or on a GPU
                of its own beside each process's, where it can run ahead of the drafter.
            chunk_tokens: tokens whose logits exist at once; null chooses.
            compile_layers: compile each layer (a minute at the start, faster steps on a GPU).
            teacher_cache: folder that cache_teacher.py filled: the target's outputs are read from
                there, and it need not run. The divergence is then that of top k and tail.
            activation_checkpointing: keep the input of each trained layer only and compute the
                rest again in the backward pass: less memory, another forward pass.
        """
        super().__init__(optimizer, chunk_tokens, compile_layers, activation_checkpointing)
        self.target_path = target
        self.teacher_cache = teacher_cache
        self.ce_weight = ce_weight
        self.has_two_terms = ce_weight > 0
        self.temperature = temperature
        config = drafter_config_of(load_config(target), drafter, drafter_layers)
        model = None
        if teacher_cache is None or drafter is None:  # a cut-out drafter starts from its weights
            model = load_model(target, dtype=getattr(torch, target_dtype))
        if drafter is None:
            assert model is not None
            self.exported = slice_drafter(model, drafter_layers)
        else:
            self.exported = HybridModel(config)
        # No nn.Module itself: never in a checkpoint, an optimiser, DDP's buckets or .train().
        self.frozen: FrozenTarget | None = None
        if teacher_cache is None:
            assert model is not None
            self.frozen = FrozenTarget(model, target_placement)

    @property
    def target(self) -> HybridModel | None:
        """None where a cache has its outputs."""
        return None if self.frozen is None else self.frozen.model

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.frozen is not None:
            self.frozen.place(self.device, self.trainer.device_ids, self.trainer.world_size)

    def transfer_batch_to_device(
        self, batch: Batch, device: torch.device, dataloader_idx: int
    ) -> Batch:
        moved = super().transfer_batch_to_device(batch, device, dataloader_idx)
        inputs = None if self.frozen is None else self.frozen.inputs_of(batch)
        return moved if inputs is None else {**moved, "target_inputs": inputs}

    def compiled_models(self) -> list[HybridModel]:
        return [self.exported] if self.target is None else [self.exported, self.target]

    def first_frozen_weight_not_finite(self) -> str | None:
        weights = self.target.named_parameters() if self.target is not None else ()
        return next((name for name, each in weights if not own_part(each).isfinite().all()), None)

    def counted_mask(self, batch: Batch) -> Tensor:
        return batch["loss_mask"]

    def loss_terms(self, batch: Batch, normalizer: Tensor | None = None) -> LossTerms:
        tokens, segment_ids = batch["tokens"], batch["segment_ids"]
        mask = shift_left(self.counted_mask(batch))
        options: dict[str, Any] = dict(
            ce_labels=shift_left(tokens),
            ce_weight=self.ce_weight,
            temperature=self.temperature,
            chunk_tokens=self.chunk_tokens,
            normalizer=normalizer,
        )
        if self.frozen is None:
            parts = (batch[f"teacher_{name}"] for name in ("ids", "log_probs", "log_tail"))
            hidden = self.exported.hidden_states(tokens, segment_ids)
            head = self.exported.head_weight
            return chunked_top_k_loss(hidden, head, TopK(*parts), mask, **options)
        inputs = batch.get("target_inputs", TargetInputs(tokens, segment_ids))
        target_hidden = self.frozen.hidden_states(inputs, tokens.device)
        return chunked_distillation_loss(
            self.exported.hidden_states(tokens, segment_ids),
            self.exported.head_weight,
            target_hidden,
            self.frozen.head_weight,
            mask,
            **options,
        )


def require_same_vocabulary(drafter: HybridConfig, target: HybridConfig) -> None:
    if drafter.vocab_size != target.vocab_size:
        raise UsageError(
            f"the drafter's vocabulary has {drafter.vocab_size} tokens, the target's "
            f"{target.vocab_size}: set model.drafter.vocab_size to the target's"
        )


def drafter_config_of(
    target: HybridConfig, drafter: HybridConfig | None, layers: list[int] | None
) -> HybridConfig:
    """The architecture of the drafter that model.drafter or model.drafter_layers asks for.

    Raises UsageError when both are given, or the target does not go with them.
    """
    if drafter is None:
        return drafter_config_from(target, layers)
    if layers is not None:
        raise UsageError(
            "model.drafter describes a drafter with random weights and model.drafter_layers one "
            "that is sliced from the target: give one of them"
        )
    require_same_vocabulary(drafter, target)
    return drafter.replace(
        eos_token_ids=target.eos_token_ids,
        bos_token_id=target.bos_token_id,
        pad_token_id=target.pad_token_id,
    )
