"""Every use of Lightning's private attributes, for which pyproject.toml pins its minor version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl


def is_within_step(trainer: pl.Trainer) -> bool:
    """Return True between the micro-batches of one optimizer step."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def is_validation_due(trainer: pl.Trainer) -> bool:
    """Return True if a validation follows the batch that has just ended."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    return trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def uncount_next_batch(trainer: pl.Trainer) -> None:
    """Take the batch that has been fetched, and not trained on, out of the loop's counts."""
    loop = trainer.fit_loop.epoch_loop
    counts = loop.batch_progress.total, loop.batch_progress.current
    for count in counts:
        count.ready -= 1
    loop._batches_that_stepped -= 1  # Lightning counts it after either kind of save
    if not is_validation_due(trainer):  # else the save comes after a validation
        for count in counts:
            count.completed -= 1


def to_device(trainer: pl.Trainer, module: pl.LightningModule, batch: Any) -> Any:
    """Return a batch as the module's hooks and the strategy hand it to a training step."""
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def handle_signals_ourselves(trainer: pl.Trainer, handler: Callable[..., None]) -> None:
    """Let a handler of ours answer SIGTERM in the place of Lightning's.

    All ranks ask each other after each step (`TrainingCheckpoints.must_stop`). Lightning would ask
    before each micro-batch, and wait for the device's answer.
    """
    trainer._signal_connector._sigterm_notifier_fn = handler  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
