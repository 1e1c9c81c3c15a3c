"""Train a drafter on its frozen target's outputs."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from stree.checkpoints.configs import load_config
from stree.checkpoints.heads.mtp import plan_mtp, read_mtp_config
from stree.checkpoints.load_save import load_model
from stree.checkpoints.plan.build import build
from stree.common.errors import UsageError
from stree.drafters.names import MTP
from stree.models.config import HybridConfig
from stree.models.hidden_states import HiddenStateTap, require_features_of
from stree.models.model import HybridModel
from stree.models.slicing import (
    Layers,
    drafter_config_from,
    head_with_ends_of,
    headed,
    share_ends,
    slice_drafter,
    take_head,
    with_random_head,
    without_8_bits,
)
from stree_pipelines.resources.estimates import ModelPlan, numbers_in_8_bits
from stree_pipelines.training.drafter_head import HeadConfig
from stree_pipelines.training.hidden_states import FeatureConfig, features_of
from stree_pipelines.training.losses.distillation_loss import (
    LossSpec,
    LossTerms,
    chunked_loss,
    counted_rows,
    teacher_of,
)
from stree_pipelines.training.losses.divergences import LossConfig
from stree_pipelines.training.module import Batch, Training, shift_left
from stree_pipelines.training.optimization import OptimizerConfig
from stree_pipelines.training.teachers.frozen_target import (
    FrozenTarget,
    Placement,
    TargetDtype,
    held_dtype,
    loaded_dtype,
)


class Distillation(Training):
    """A drafter learns its frozen target's next-token distribution on the assistant's tokens."""

    def __init__(
        self,
        target: str,
        drafter: HybridConfig | None = None,
        drafter_layers: list[int] | Literal["first"] | None = None,
        start_from: str | None = None,
        features: FeatureConfig | None = None,
        head: HeadConfig = HeadConfig(),
        loss: LossConfig = LossConfig(),
        ce_weight: float = 0.0,
        temperature: float = 1.0,
        optimizer: OptimizerConfig = OptimizerConfig(),
        target_dtype: TargetDtype = "float32",
        target_placement: Placement = "replicated",
        chunk_tokens: int | None = None,
        compile_layers: bool = False,
        activation_checkpointing: bool = False,
        _target: HybridModel | None = None,
        _load: Callable[..., HybridModel] | None = None,
    ) -> None:
        """Make the drafter, and load the target.

        Args:
            target: folder of the target's checkpoint; its tokenizer is the drafter's, too.
            drafter: architecture of a drafter with random weights; null slices one from the target.
            drafter_layers: the target's layers to copy into a sliced drafter; "first" takes its
                first recurrent layer, null the first and the last.
            start_from: folder of a drafter of this target to go on from, with new optimiser state;
                mtp begins with the target's own head for multi-token prediction.
            features: hidden states of the target that the drafter reads with the tokens
                (docs/features.md); null is none, or with start_from those that the drafter reads.
            head: tokens and rank of the drafter's head (docs/losses.md).
            loss: the divergence from the target (docs/losses.md).
            ce_weight: weight of the cross-entropy to the data, added to the divergence.
            temperature: of both softmaxes in the divergence.
            optimizer: AdamW or Muon, with a learning rate that is a function of the step.
            target_dtype: dtype of the frozen target's weights; float8 rounds its projections and
                their inputs and holds the rest in bfloat16: twice as fast on a GPU of compute
                capability 8.9 or later.
            target_placement: replicated, the whole frozen target on each device; sharded, its
                weights shared among the devices and gathered layer by layer, under any trainer
                strategy.
            chunk_tokens: tokens whose logits exist at once; null chooses.
            compile_layers: compile each layer, and the loss (a minute at the start, faster steps on
                a GPU).
            activation_checkpointing: keep the input of each trained layer only and compute the
                rest again in the backward pass: less memory, another forward pass.
        """
        loss_spec = LossSpec(loss.divergence, ce_weight, temperature, chunk_tokens, compile_layers)
        super().__init__(optimizer, loss_spec, activation_checkpointing)
        self.target_config = load_config(target) if _target is None else _target.config
        self._target_folder = target
        self.target_dtype = held_dtype(target_dtype)
        load = load_model if _load is None else _load
        config = drafter_config_of(
            self.target_config, drafter, drafter_layers, start_from, features, head, target
        )
        require_no_labels_outside(config, ce_weight)
        self.features = features_of(config, features, activation_checkpointing)
        is_sliced = drafter is None and start_from is None
        model = load(target, dtype=loaded_dtype(target_dtype)) if _target is None else _target
        whole: HybridModel | None = None
        if start_from == MTP and _load is not None:
            whole = HybridModel(read_mtp_config(target).model)
        elif start_from == MTP:
            own = build(plan_mtp(target))
            share_ends(own, model)
            own = without_8_bits(copy.deepcopy(own))  # the target's embedding and head stay
            whole = own.float().train()
        elif start_from is not None:
            whole = without_8_bits(load(start_from)).train()
        elif is_sliced and config.eagle_inputs:
            whole = head_with_ends_of(model, config.feature_layers)
        elif is_sliced:
            whole = slice_drafter(model, drafter_layers, config.feature_layers, config.own_features)
        self._whole_head: Tensor | None = None  # (V, D), until the head has copied its rows
        if whole is None:
            self.exported = HybridModel(config)
        elif whole.config == config:
            self.exported = whole
        else:
            self.exported = with_random_head(whole, head.vocab_size, head.rank)
            self._whole_head = whole.head_weight.detach()
        self.frozen = FrozenTarget(model, target_placement, target_dtype)

    @classmethod
    def from_model(cls, target: HybridModel, **options: Any) -> Distillation:
        """Make a distillation from a target in memory, used as it is (device and dtype unchanged).

        `options` are the other arguments of the constructor.
        """
        return cls("", _target=target, **options)

    @classmethod
    def planned(cls, **options: Any) -> ModelPlan:
        def without_weights(folder: str, dtype: torch.dtype = torch.float32) -> HybridModel:
            return HybridModel(load_config(folder)).to(dtype)

        return super().planned(**options, _load=without_weights)

    def plan(self) -> ModelPlan:
        num_ahead = 0 if self.features is None else self.features.ahead
        return replace(
            super().plan(), target=self.target_config, target_dtype=self.target_dtype,
            target_in_8_bits=numbers_in_8_bits(self._target_folder),
            passes=1 + num_ahead, compiled=self.loss_spec.compiled and not num_ahead,
        )

    def begin_head(self, ids: Tensor | None, is_resumed: bool) -> None:
        """Give the drafter's head its tokens; call it once, before the first step.

        ids (K,) int64: the tokens of the head, ascending; None when the head keeps its own.
        """
        take_head(self.exported, None if is_resumed else self._whole_head, ids)
        self._whole_head = None

    @property
    def target(self) -> HybridModel:
        return self.frozen.model

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.frozen.place(self.device, self.trainer.world_size)

    def compiled_models(self) -> list[HybridModel]:
        reads_ahead = self.features is not None and self.features.ahead > 0
        return [*([] if reads_ahead else [self.exported]), self.target]  # passes ahead are eager

    def frozen_weights(self) -> Iterable[tuple[str, Tensor]]:
        return self.target.named_parameters()

    def counted_mask(self, batch: Batch) -> Tensor:
        return batch["loss_mask"]

    def loss_terms(self, batch: Batch, normalizer: Tensor | None = None) -> LossTerms:
        # The target runs first: the drafter's activations stay in memory for the backward pass.
        features = HiddenStateTap(self.exported.config.feature_layers)
        target_hidden = self.frozen.hidden_states(
            batch["tokens"], batch["segment_ids"], features, batch["bounds"]
        )
        hidden, *as_drafts = map(self.exported.head_inputs, self._drafter_hidden(batch, features))
        mask = shift_left(torch.from_numpy(batch["counted"]))
        terms = self._loss_of(batch, mask, hidden, target_hidden, normalizer)
        if as_drafts:
            terms = self._with_drafts(terms, batch, as_drafts, target_hidden, normalizer)
        return terms

    def _loss_of(
        self, batch: Batch, mask: Tensor, hidden: Tensor, target_hidden: Tensor,
        normalizer: Tensor | None,
    ) -> LossTerms:
        """Compare drafter and target where `mask` counts."""
        temperature, head = self.loss_spec.temperature, self.target.head_weight
        rows = counted_rows(mask, hidden)
        teacher = teacher_of(target_hidden, head, rows, hidden, temperature)
        return chunked_loss(
            hidden, self.exported.head_weight, teacher.over(self.exported.head_ids), rows,
            self.loss_spec, shift_left(batch["tokens"]), normalizer,
        )

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Draw also the depth at which each token of a training batch is read as a drafted one."""
        batch = super().on_before_batch_transfer(batch, dataloader_idx)
        if self.features is None or not self.features.ahead or "number" not in batch:
            return batch
        chance = _chance(batch, "depths", torch.device("cpu"))
        depths, there = self.features.depths(batch["segment_ids"], chance)
        mask = shift_left(torch.from_numpy(batch["counted"])) & there
        return {**batch, "depths": depths, "drafted": mask.numpy()}

    def _drafter_hidden(self, batch: Batch, features: HiddenStateTap) -> list[Tensor]:
        """Return the drafter's hidden states (B, T, D), then one tensor per multi-step pass.

        In a validation each token is read with its feature, in one pass.
        """
        tokens, segment_ids = batch["tokens"], batch["segment_ids"]
        if self.features is None:
            return [self.exported.hidden_states(tokens, segment_ids, bounds=batch["bounds"])]
        read, known, num_ahead = features.values, None, 0
        if torch.is_grad_enabled():
            num_ahead = self.features.ahead
            if self.features.share:
                known = self.features.known(
                    tokens.shape, _chance(batch, "known", tokens.device)
                )
        if num_ahead:
            return self.exported.hidden_ahead(tokens, segment_ids, read, known, num_ahead)
        return [
            self.exported.hidden_states(
                tokens, segment_ids, read=read, known=known, bounds=batch["bounds"]
            )
        ]

    def _with_drafts(
        self, terms: LossTerms, batch: Batch, as_drafts: list[Tensor], target_hidden: Tensor,
        normalizer: Tensor | None,
    ) -> LossTerms:
        """Add the loss of each token as a drafted one, at the depth that was drawn for it."""
        assert self.features is not None
        mask = torch.from_numpy(batch["drafted"])
        index = (batch["depths"] - 1)[None, ..., None].expand(-1, -1, -1, as_drafts[0].shape[2])
        hidden = torch.stack(as_drafts).gather(0, index)[0]
        drafts = self._loss_of(batch, mask, hidden, target_hidden, normalizer)
        weight = self.features.ahead_weight
        mixed = {
            name: (getattr(terms, name) + weight * getattr(drafts, name)) / (1 + weight)
            for name in ("loss", "divergence", "cross_entropy")
        }
        return replace(terms, **mixed)  # the acceptance stays that of first drafts


def _chance(batch: Batch, use: str, device: torch.device) -> torch.Generator:
    """Make a random generator that is a function of the micro-batch and `use` alone.

    A resumed training and an export's own decay phase then draw the same numbers.
    """
    digest = hashlib.sha256(f"{use} {batch['number']}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def drafter_config_of(
    target: HybridConfig, drafter: HybridConfig | None, layers: Layers,
    start_from: str | None = None, features: FeatureConfig | None = None,
    head: HeadConfig = HeadConfig(), target_folder: str = "",
) -> HybridConfig:
    """Build the drafter's architecture from model.drafter, drafter_layers or start_from.

    `features` adds the target's hidden states that it reads, `head` the size of its head;
    `target_folder` has the MTP head to start from.

    Raises UsageError when more than one is given, or the target does not go with it.
    """
    require_own_target(target)
    if start_from is not None:
        if drafter is not None or layers is not None:
            raise UsageError(
                "model.start_from names a drafter that is there already: leave model.drafter and "
                "model.drafter_layers out"
            )
        from_mtp = start_from == MTP
        config = read_mtp_config(target_folder).model if from_mtp else load_config(start_from)
        _require_same_vocabulary(
            f"model.start_from {start_from}", config, target,
            "name a drafter distilled from this target",
        )
        require_features_of(config, target)
        named = None if features is None else features.layers
        if features is not None and not config.feature_layers:
            raise UsageError(
                "model.features is given, the drafter of model.start_from reads no hidden states: "
                "leave model.features out, or begin a new drafter"
            )
        if named is not None and tuple(named) != config.feature_layers:
            raise UsageError(
                f"model.features asks for layers {named}, the drafter of model.start_from reads "
                f"{list(config.feature_layers)}: leave model.features.layers out, or begin a new "
                "drafter"
            )
        return headed(config, head.vocab_size, head.rank)
    if features is not None and features.eagle and drafter is None and layers is None:
        features.require_sensible()
        return headed(
            target.eagle_head(features.layers_of(target)), head.vocab_size, head.rank
        )
    if drafter is None:
        config = drafter_config_from(target, layers)
    elif layers is not None:
        raise UsageError(
            "model.drafter describes a drafter with random weights and model.drafter_layers one "
            "that is sliced from the target: give one of them"
        )
    elif drafter.feature_layers:
        raise UsageError(
            "model.drafter has feature_layers: say in model.features.layers what is read of the "
            "target"
        )
    else:
        remedy = "set model.drafter.vocab_size to the target's"
        _require_same_vocabulary("model.drafter", drafter, target, remedy)
        config = drafter.replace(
            eos_token_ids=target.eos_token_ids,
            bos_token_id=target.bos_token_id,
            pad_token_id=target.pad_token_id,
        )
    if features is not None:
        config = features.added_to(config, target)
    return headed(config, head.vocab_size, head.rank)


def _require_same_vocabulary(
    name: str, drafter: HybridConfig, target: HybridConfig, remedy: str
) -> None:
    if drafter.vocab_size != target.vocab_size:
        raise UsageError(
            f"{name} has a vocabulary of {drafter.vocab_size} tokens, the target one of "
            f"{target.vocab_size}: {remedy}"
        )


def require_own_target(target: HybridConfig) -> None:
    """Raise UsageError for a target that is itself a drafter of another model."""
    if target.feature_layers:
        raise UsageError(
            "the target reads features of another model, as drafters do: name that target itself"
        )
    if target.head_vocab_size or target.head_rank:
        raise UsageError(
            f"the target has a head over {target.head_size} tokens, of rank "
            f"{target.head_rank or target.d_model}, as drafters have: name the target itself"
        )


def require_no_labels_outside(drafter: HybridConfig, ce_weight: float) -> None:
    """Raise UsageError for cross-entropy to tokens that the drafter's head may lack."""
    if ce_weight and drafter.head_vocab_size:
        raise UsageError(
            f"model.ce_weight is {ce_weight:g}, and the drafter's head has {drafter.head_size} of "
            f"{drafter.vocab_size} tokens: the cross-entropy of the others is infinite; set "
            "model.ce_weight to 0, or leave model.head.vocab_size out"
        )
