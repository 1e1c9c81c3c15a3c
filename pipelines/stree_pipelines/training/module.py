"""Share the training loop of all models, and train a target on its data.

Legend: B batch, T tokens, D width, V vocabulary.

Batches are dicts of `tokens` (B, T) int64, `segment_ids` (B, T) int64 and `loss_mask` (B, T) bool;
`loss_mask[b, t]` says that predicting token t counts; the hidden state at t − 1 predicts it.
Training batches also have `totals`, the token counts of the whole global batch
(`MicroBatches.totals`).
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from stree.checkpoints.load_save import load_model
from stree.common.errors import UsageError
from stree.models.config import HybridConfig
from stree.models.in_8_bits import plain_state
from stree.models.model import HybridModel
from stree_kernels.segments import sample_bounds
from stree_pipelines.resources.estimates import ModelPlan
from stree_pipelines.training.finite_guard import FiniteGuard
from stree_pipelines.training.losses.distillation_loss import (
    LossSpec,
    LossTerms,
    chunked_loss,
    counted_rows,
)
from stree_pipelines.training.optimization import OptimizerConfig, learning_rate, make_optimizer
from stree_pipelines.training.parallel.host_memory import keep_freed_memory, to_device
from stree_pipelines.training.parallel.sharding import clip_norm, shard

Batch = dict[str, Any]


class Training(pl.LightningModule):
    """Base of both kinds of training; `exported` is the model that is trained."""

    exported: HybridModel
    finite: FiniteGuard  # from the fit's start on
    loss_on: Literal["assistant", "all"] = "assistant"  # whose tokens count

    def __init__(
        self, optimizer: OptimizerConfig, loss_spec: LossSpec, activation_checkpointing: bool,
    ) -> None:
        super().__init__()
        self.last_step: int | None = None  # end of the learning rate's schedule; None: max_steps
        self.activation_checkpointing = activation_checkpointing
        self.optimizer_config = optimizer
        self.loss_spec = loss_spec
        self.tokens_seen = 0  # tokens trained on, without padding, over all ranks
        self.untimed_s = 0.0  # spent in `untimed`
        # The last step's, this rank's share, on the device: reading them is a host sync.
        self.step_metrics: dict[str, Tensor] = {}
        self.validation_metrics: dict[str, float] = {}
        self._validation_sums: Tensor | None = None

    @classmethod
    def planned(cls, **options: Any) -> ModelPlan:
        """Return the plan of a training with these options, without loading or making weights.

        Raises the constructor's errors.
        """
        with torch.device("meta"):
            return cls(**options).plan()

    def plan(self) -> ModelPlan:
        return ModelPlan(
            self.exported.config, activation_checkpointing=self.activation_checkpointing,
            compiled=self.loss_spec.compiled, optimizer=self.optimizer_config.kind,
        )

    @abstractmethod
    def loss_terms(self, batch: Batch, normalizer: Tensor | None = None) -> LossTerms:
        """Compute the loss of a batch that is on the device."""

    # Batches

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Find on the host what depends on the data's values, so that no step waits for a GPU.

        Adds `bounds`, the bounds of the packed samples, and `counted`, the mask of the tokens that
        count, as a NumPy array, which stays on the host.
        """
        return {
            **batch, "bounds": sample_bounds(batch["segment_ids"]),
            "counted": self.counted_mask(batch).numpy(),
        }

    def transfer_batch_to_device(
        self, batch: Batch, device: torch.device, dataloader_idx: int
    ) -> Batch:
        return {
            name: to_device(value, device) if isinstance(value, Tensor) else value
            for name, value in batch.items()
        }

    # Optimisation

    def configure_model(self) -> None:
        if self.device_mesh is not None and not isinstance(self.exported, FSDPModule):
            shard(self.exported, self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        fused = self.device.type == "cuda"
        return make_optimizer(self.named_parameters(), self.optimizer_config, fused)

    @property
    def num_decay_steps(self) -> int:
        return self.last_step or self.optimizer_config.decay_steps or self.trainer.max_steps

    @property
    def step_learning_rate(self) -> float:
        return learning_rate(self.trainer.global_step, self.num_decay_steps, self.optimizer_config)

    def on_fit_start(self) -> None:
        if self.device.type == "cpu":
            keep_freed_memory()
        self.finite = FiniteGuard(self)
        self.prepare_layers()

    def prepare_layers(self) -> None:
        """Wrap layers for activation checkpointing and compile them, once, on the device."""
        if self.activation_checkpointing:
            for layer in self.exported.model.layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]
        if self.loss_spec.compiled:
            for model in self.compiled_models():
                for layer in model.model.layers:
                    layer.compile(dynamic=False)

    def compiled_models(self) -> list[HybridModel]:
        """Return the models whose layers model.compile_layers compiles."""
        return [self.exported]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        accumulate = self.trainer.accumulate_grad_batches
        totals = batch["totals"]
        # The trainer averages the returned loss over micro-batches and ranks; this divisor makes
        # that the mean over all tokens, even when micro-batches have different numbers of them.
        share = max(totals[self.loss_on], 1) / (accumulate * self.trainer.world_size)
        terms = self.loss_terms(batch, torch.full((), share, device=self.device))
        metrics = {name: value / accumulate for name, value in terms.logged().items()}
        if batch_idx % accumulate:
            metrics = {name: self.step_metrics[name] + value for name, value in metrics.items()}
        else:
            self.tokens_seen += totals["tokens"]
        self.step_metrics = metrics
        return terms.loss

    def global_step_metrics(self) -> dict[str, float]:
        """Average `step_metrics` over all ranks; a collective and a host sync."""
        names, values = zip(*self.step_metrics.items(), strict=True)
        stacked = torch.stack([value.float() for value in values])
        if self.trainer.world_size > 1:
            stacked = self.trainer.strategy.reduce(stacked, reduce_op="mean")
        return dict(zip(names, stacked.tolist(), strict=True))

    @abstractmethod
    def counted_mask(self, batch: Batch) -> Tensor:
        """Mark the tokens whose prediction counts for the loss, in a batch on the host.

        Returns (B, T) bool.
        """

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self.step_learning_rate

    def configure_gradient_clipping(
        self, optimizer: torch.optim.Optimizer, gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        # Lightning's own refuses fused AdamW even without a loss scaler, and does not return the
        # norm.
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.note_grad_norm(clip_norm(gradients, gradient_clip_val or math.inf))

    def note_grad_norm(self, norm: Tensor) -> None:
        """Log the gradient's norm before it was clipped; a step that has none is not finite."""
        self.step_metrics["grad_norm"] = norm
        self.finite.watch(self.step_metrics["loss"], norm)

    def frozen_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Yield the weights that are used and not trained, with their names."""
        return ()

    # Validation: means over all counted tokens of the validation set

    def on_validation_epoch_start(self) -> None:
        self._validation_sums = torch.zeros(3, device=self.device)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        terms = self.loss_terms(batch)
        count = int(batch["counted"].sum())
        row = torch.stack([terms.loss, terms.simulated_acceptance, torch.ones_like(terms.loss)])
        assert self._validation_sums is not None
        self._validation_sums += row * count

    def on_validation_epoch_end(self) -> None:
        sums = self.trainer.strategy.reduce(self._validation_sums, reduce_op="sum")
        loss, acceptance, count = sums.tolist()
        self.validation_metrics = {"val_loss": loss / max(count, 1.0)}
        if self.loss_spec.divergence is not None:
            self.validation_metrics["val_simulated_acceptance"] = acceptance / max(count, 1.0)

    # State beyond the weights

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.finite.require_weights()
        checkpoint["tokens_seen"] = self.tokens_seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.tokens_seen = checkpoint["tokens_seen"]

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Leave the time spent inside out of tokens per second."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.untimed_s += time.perf_counter() - start


class TargetTraining(Training):
    """Training of a target on its data by next-token cross-entropy."""

    def __init__(
        self,
        architecture: HybridConfig,
        loss_on: Literal["assistant", "all"] = "all",
        optimizer: OptimizerConfig = OptimizerConfig(),
        chunk_tokens: int | None = None,
        compile_layers: bool = False,
        activation_checkpointing: bool = False,
        start_from: str | None = None,
    ) -> None:
        """
        Args:
            architecture: of the target, random weights unless start_from names others.
            loss_on: the assistant's tokens only, or all tokens of a conversation.
            optimizer: AdamW or Muon, with a learning rate that is a function of the step.
            chunk_tokens: tokens whose logits exist at once; null chooses.
            compile_layers: compile each layer, and the loss (a minute at the start, faster steps on
                a GPU).
            activation_checkpointing: keep the input of each trained layer only and compute the
                rest again in the backward pass: less memory, another forward pass.
            start_from: folder of a model of this architecture whose weights to begin with, as
                fine-tuning on chats after training on plain text; take its tokenizer, too.
        """
        loss_spec = LossSpec(
            None, ce_weight=1.0, chunk_tokens=chunk_tokens, compiled=compile_layers
        )
        super().__init__(optimizer, loss_spec, activation_checkpointing)
        self.loss_on = loss_on
        if architecture.head_vocab_size:
            raise UsageError(
                f"model.architecture.head_vocab_size is {architecture.head_vocab_size}: a target "
                "needs all of its vocabulary, only drafters do with less; leave it out"
            )
        self.exported = HybridModel(architecture)
        if start_from is not None:
            _begin_with(self.exported, start_from)

    def counted_mask(self, batch: Batch) -> Tensor:
        if self.loss_on == "assistant":
            return batch["loss_mask"]
        segment_ids = batch["segment_ids"]
        mask = real_tokens(segment_ids, batch["loss_mask"])
        mask[:, 0] = False
        mask[:, 1:] &= segment_ids[:, 1:] == segment_ids[:, :-1]
        return mask

    def loss_terms(self, batch: Batch, normalizer: Tensor | None = None) -> LossTerms:
        hidden = self.exported.hidden_states(
            batch["tokens"], batch["segment_ids"], bounds=batch["bounds"]
        )
        hidden = self.exported.head_inputs(hidden)
        mask = shift_left(torch.from_numpy(batch["counted"]))
        return chunked_loss(
            hidden, self.exported.head_weight, None, counted_rows(mask, hidden), self.loss_spec,
            shift_left(batch["tokens"]), normalizer,
        )


def _begin_with(model: HybridModel, folder: str) -> None:
    """Give a model the weights of a folder. Raises UsageError for another architecture."""
    try:
        begun = load_model(folder, torch.device("cpu"), torch.float32)
        model.load_state_dict(plain_state(begun))
    except RuntimeError as error:
        raise UsageError(
            f"model.start_from {folder} is of another architecture than model.architecture: "
            + str(error).splitlines()[1].strip()
        ) from error


def shift_left(values_BT: Tensor) -> Tensor:
    """Return the value of t + 1 at each t; the last column is zero (False)."""
    shifted = torch.zeros_like(values_BT)
    shifted[:, :-1] = values_BT[:, 1:]
    return shifted


def real_tokens(segment_ids: Tensor, loss_mask: Tensor) -> Tensor:
    """Mark real tokens (B, T) bool; padding is a segment after the last one with a loss."""
    last_segment = torch.where(loss_mask, segment_ids, -1).amax(dim=1, keepdim=True)
    return segment_ids <= last_segment
