"""Check, at the end of a training, that the target writes text like its data.

The target continues a few of the data's prompts itself, and the drafter is measured on both
continuations. Speculation drafts the target's own text. On text that the target would never write,
its predictions can be easy to imitate, so that the simulated acceptance on the data rises while τ
falls.
"""

from __future__ import annotations

from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from torch import Tensor

from stree_pipelines.data.packing import TokenTable
from stree_pipelines.training.distillation import Distillation
from stree_pipelines.training.module import Batch, shift_left
from stree_pipelines.training.parallel.zero import ZeroStrategy
from stree_pipelines.training.teachers.teacher import Teacher

NUM_ROWS, PROMPT_TOKENS, NEW_TOKENS = 8, 64, 24
# Acceptances of 192 tokens are known to about 0.03.
LESS_THAN_ON_DATA = 0.1
# A target that has seen such data has a mean −log p equal to its entropy; one nat more means that
# its tokens are e times less probable than the target expects.
MORE_THAN_EXPECTED = 1.0


@dataclass(frozen=True)
class OnPolicyResult:
    """Means over the first tokens of a few answers.

    `nll`, `entropy` and `on_data` are of the data's answers, `on_own` of answers that the target
    draws at temperature 1.
    """

    nll: float  # −log p of the target, nats a token
    entropy: float  # of the target at the same places; equals `nll` on text that it wrote
    on_data: float  # simulated acceptance
    on_own: float

    def __str__(self) -> str:
        data = (
            f"the data's answers: {self.nll:.2f} nats per token under the target, "
            f"{self.entropy:.2f} if it had written them; simulated acceptance: {self.on_data:.3f} "
            f"on them, {self.on_own:.3f} on what the target writes itself"
        )
        reasons = []
        if self.nll > self.entropy + MORE_THAN_EXPECTED:
            reasons.append("the data is not what the target writes")
        if self.on_own < self.on_data - LESS_THAN_ON_DATA:
            reasons.append("the drafter does worse on the target's own text than on the data")
        if not reasons:
            return data
        return (
            f"{data}\nwarning: {' and '.join(reasons)}: loss and acceptance on the data can "
            "improve while τ, which is about the target's own text, falls. Go by the τ of "
            "eval_spec.py, and distil on answers of the target itself (generate_data.py)"
        )


class OnPolicyCheck(pl.Callback):
    """Callback that measures at the end of the training.

    `found` is None when the target's weights cannot be gathered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: OnPolicyResult | None = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # ZeRO gathers weights in its own forward only
        if not isinstance(pl_module, Distillation) or isinstance(trainer.strategy, ZeroStrategy):
            return
        tables = trainer.datamodule.tables  # type: ignore[attr-defined]
        with (
            torch.no_grad(),
            trainer.precision_plugin.forward_context(),
            torch.compiler.set_stance("force_eager"),  # no kernels for shapes that come once
        ):
            self.found = measure(pl_module, tables["train"])


def measure(module: Distillation, table: TokenTable) -> OnPolicyResult | None:
    """Measure the drafter on the data's and on the target's own answers.

    All processes of a training must call it, and get the same. Returns None when no conversation of
    `table` begins with a prompt.
    """
    rows = first_answers(table)
    if not rows:
        return None
    data = _as_batch(rows)
    own = _continued(module, rows)
    log_p_MV = _target_log_probs(module, data, shift_left(data["loss_mask"]))
    labels_M = data["tokens"][data["loss_mask"]].to(log_p_MV.device)
    return OnPolicyResult(
        nll=-log_p_MV.gather(1, labels_M[:, None]).mean().item(),
        entropy=torch.special.entr(log_p_MV.exp()).sum(1).mean().item(),
        on_data=_acceptance(module, data),
        on_own=_acceptance(module, own),
    )


def first_answers(table: TokenTable) -> list[tuple[list[int], list[int]]]:
    """Return (prompt, answer) of the first conversations that begin with a prompt.

    Each is cut to the tokens next to the place where prompt and answer meet.
    """
    rows = []
    for begin, end in zip(table.offsets[:-1], table.offsets[1:], strict=True):
        tokens, mask = table.tokens[begin:end].tolist(), table.mask[begin:end]
        start = int(mask.argmax())
        if start == 0:  # no prompt, or no answer
            continue
        counts = mask[start : start + NEW_TOKENS]
        length = len(counts) if counts.all() else int(counts.argmin())
        prompt = tokens[max(start - PROMPT_TOKENS, 0) : start]
        rows.append((prompt, tokens[start : start + length]))
        if len(rows) == NUM_ROWS:
            break
    return rows


def _as_batch(rows: list[tuple[list[int], list[int]]]) -> Batch:
    """Make a batch on the host; padding follows each answer, where no earlier token sees it."""
    shape = len(rows), PROMPT_TOKENS + NEW_TOKENS
    batch = {
        "tokens": torch.zeros(shape, dtype=torch.long),
        "segment_ids": torch.zeros(shape, dtype=torch.long),
        "loss_mask": torch.zeros(shape, dtype=torch.bool),
    }
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        batch["tokens"][row, :end] = torch.tensor(prompt + answer)
        batch["loss_mask"][row, len(prompt) : end] = True
    return batch


def _continued(module: Distillation, rows: list[tuple[list[int], list[int]]]) -> Batch:
    """Make a batch of the prompts with answers that the target draws from its own distribution."""
    generator = torch.Generator().manual_seed(0)  # the training's random numbers stay as they are
    batch = _as_batch([(prompt, []) for prompt, _ in rows])
    eos, numbers = torch.tensor(module.exported.config.eos_token_ids), torch.arange(len(rows))
    ends = torch.tensor([len(prompt) for prompt, _ in rows])
    going = torch.ones(len(rows), dtype=torch.bool)
    for _ in range(NEW_TOKENS):  # as often on all processes: a sharded target gathers weights
        last = torch.zeros_like(batch["loss_mask"])
        last[numbers, ends - 1] = True
        p_RV = _target_log_probs(module, batch, last).exp().cpu()
        drawn = p_RV.multinomial(1, generator=generator).squeeze(1)
        batch["tokens"][numbers[going], ends[going]] = drawn[going]
        batch["loss_mask"][numbers[going], ends[going]] = True
        ends += going
        going &= ~torch.isin(drawn, eos)
    return batch


def _target_log_probs(module: Distillation, batch: Batch, places: Tensor) -> Tensor:
    """Return log-probabilities (M, V) of the token that follows each of the M `places` (R, T)."""
    moved = module.transfer_batch_to_device({**batch, "places": places}, module.device, 0)
    hidden_MD = module.frozen.hidden_states(moved["tokens"], moved["segment_ids"])[moved["places"]]
    head = module.target.head_weight
    return Teacher(hidden_MD.to(head.dtype), head).log_distribution()


def _acceptance(module: Distillation, batch: Batch) -> float:
    batch = module.on_before_batch_transfer(batch, 0)
    moved = module.transfer_batch_to_device(batch, module.device, 0)
    return module.loss_terms(moved).simulated_acceptance.item()
