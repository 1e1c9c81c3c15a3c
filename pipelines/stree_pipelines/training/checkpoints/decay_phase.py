"""Run a decay phase for each export of a training whose learning rate stays high.

An export at step s is then what a training of s steps would have ended with. All exports share the
steps before their decay; each decay but the last runs on a branch, after which the training goes on
from where it was.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from stree_pipelines.training.lightning_internals import to_device
from stree_pipelines.training.module import Training


@contextmanager
def as_it_was(trainer: pl.Trainer, module: Training) -> Iterator[None]:
    """Restore weights, optimiser and counts on exit, bit for bit.

    A copy of them is in the host's memory meanwhile.
    """
    loop = trainer.fit_loop.epoch_loop
    progress = loop.automatic_optimization.optim_progress
    optimizer = trainer.optimizers[0]
    rates = [group["lr"] for group in optimizer.param_groups]
    weights = [_copy(each) for each in module.parameters()]
    moments = {
        parameter: {name: _copy(each) for name, each in state.items()}
        for parameter, state in optimizer.state.items()
    }
    counts, ready = deepcopy(progress.state_dict()), loop.batch_progress.current.ready
    kept = module.tokens_seen, module.step_metrics
    yield
    with torch.no_grad():
        for parameter, weight in zip(module.parameters(), weights, strict=True):
            parameter.copy_(weight)
        for owner in list(optimizer.state):
            if owner not in moments:  # before the first step there are none
                del optimizer.state[owner]
        for owner, state in moments.items():
            for name, value in state.items():
                optimizer.state[owner][name].copy_(value)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    progress.load_state_dict(counts)
    loop.batch_progress.current.ready = ready
    module.tokens_seen, module.step_metrics = kept


def run_decay(
    trainer: pl.Trainer, module: Training, first: int, last: int, told: Callable[[], bool],
) -> bool:
    """Run steps first + 1 … last of a training that ends with step `last`, by Lightning's own loop.

    The steps read the batches that they have in the whole training. `told` is asked after each
    step; returns False if it told to stop before the last step was done, else True.
    """
    loop, optimizer = trainer.fit_loop.epoch_loop, trainer.optimizers[0]
    accumulate, data = trainer.accumulate_grad_batches, trainer.datamodule  # type: ignore[attr-defined]
    batches = data.micro_batches(trainer.global_rank, trainer.world_size, accumulate)
    end, module.last_step = module.last_step, last
    try:
        for number in range(first * accumulate, last * accumulate):
            loop.batch_progress.current.ready = number + 1
            batch = to_device(trainer, module, batches[number])
            inputs = OrderedDict(batch=batch, batch_idx=number)
            loop.automatic_optimization.run(optimizer, number, inputs)
            step, micro_batch = divmod(number + 1, accumulate)
            if not micro_batch and step < last and told():
                return False
        return True
    finally:
        module.last_step = end


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
