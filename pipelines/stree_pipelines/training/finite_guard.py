"""Stop a training whose loss, gradients or weights are not finite, before anything is saved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stree.common.errors import InvariantBroken
from stree_pipelines.training.parallel.sharding import own_part


class FiniteGuard:
    """Memory of the first step of a training module whose loss or gradient was not finite."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._first_bad_step = torch.full((), -1, dtype=torch.long, device=module.device)

    def watch(self, loss: Tensor, norm: Tensor) -> None:
        """Look at the loss and the gradient's norm of a step.

        A CPU looks at once. On a GPU looking is a host sync, so it happens only when rows are
        logged and before any save.
        """
        step = self.module.trainer.global_step
        good = (norm - norm) == (loss - loss)  # 0 of finite numbers, NaN of all others
        seen = good | (self._first_bad_step >= 0)
        self._first_bad_step = torch.where(seen, self._first_bad_step, step)
        interval = self.module.trainer.log_every_n_steps
        if self.module.device.type == "cpu" or (step + 1) % interval == 0:
            self._require_finite()

    def _require_finite(self) -> None:
        """Raise InvariantBroken naming the step, and the parameter while its gradient is there."""
        step = int(self._first_bad_step)
        if step < 0:
            return
        where = ""
        if step == self.module.trainer.global_step:
            gradients = ((name, each.grad) for name, each in self.module.named_parameters())
            bad = _first_not_finite((name, each) for name, each in gradients if each is not None)
            where = f" (gradient of {bad})" if bad else " (loss)"
        frozen = _first_not_finite(self.module.frozen_weights())
        raise InvariantBroken(
            f"loss or gradient is not finite at step {step}{where}: training stopped and nothing "
            "was saved after it; "
            + (
                f"the target's {frozen} is not finite: check that checkpoint"
                if frozen
                else "lower the learning rate or look at that batch, then run again"
            )
        )

    def require_weights(self) -> None:
        """Raise InvariantBroken for weights that are not finite, before anything is written."""
        self._require_finite()
        bad, trainer = _first_not_finite(self.module.named_parameters()), self.module.trainer
        if not trainer.strategy.reduce_boolean_decision(bad is None):
            raise InvariantBroken(
                f"{bad or 'a weight of another process'} is not finite after step "
                f"{trainer.global_step}: nothing was saved; lower the learning rate and resume "
                "from the last checkpoint"
            )


def _first_not_finite(named: Any) -> str | None:
    return next((name for name, each in named if not own_part(each).isfinite().all()), None)
