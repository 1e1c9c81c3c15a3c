"""Compare training's simulated acceptance with the measured τ, and find where they diverge.

Simulated acceptance comes for free with the loss: the chance that a draft is accepted, averaged
over the tokens of the data's own text. Decoding drafts along text that the target writes. On data
that the target would not write the former can rise while the latter falls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stree.metrics import Interval, expected_acceptance_length
from stree_pipelines.evaluation.plan import CHAIN
from stree_pipelines.reports.run_data import RunData

CHAIN_DRAFTS = 4  # the paper's, when no chain was measured
CURVES = ("val_simulated_acceptance", "simulated_acceptance")  # of metrics.csv, the better first
# Least share of the promised drafts per call that decoding keeps. A good run of ours keeps 0.71
# (docs/results/h200-sharegpt, T = 1): below half, the promise is about another kind of text.
MIN_SHARE_KEPT = 0.5


@dataclass(frozen=True)
class Checkpoint:
    """An export's simulated acceptance of a draft, and τ measured with `num_drafts` in a row."""

    step: int
    acceptance: float
    num_drafts: int
    measured: float
    interval: Interval

    @property
    def promised(self) -> float:
        """τ of a chain, if each draft were accepted at the simulated rate."""
        return expected_acceptance_length(self.acceptance, self.num_drafts)


def find_parting(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """Return the checkpoint from which on the two diverge; None when they agree at the last one.

    A checkpoint is apart when it is worse than an earlier one though its simulated acceptance is
    higher, or keeps less than `MIN_SHARE_KEPT` of the promised drafts.
    """
    ordered = sorted(checkpoints, key=lambda each: each.step)
    since = None
    for index, each in enumerate(ordered):
        since = (since or each) if _is_apart(each, ordered[:index]) else None
    return since


def parting_sentence(data: RunData) -> str:
    """Explain a run's divergence, its cause and its remedy; "" without one, or when the two cannot
    be compared."""
    checkpoints = compared(data)
    since = find_parting(checkpoints)
    if since is None:
        return ""
    last = max(checkpoints, key=lambda each: each.step)
    best = max(checkpoints, key=lambda each: each.measured)
    fell = f", down from {best.measured:.2f} at step {best.step}" if best.step != last.step else ""
    return (
        f"Simulated acceptance and τ part ways from step {since.step} on: at step "
        f"{last.step} training simulates an acceptance of {last.acceptance:.2f}, which promises "
        f"{last.num_drafts} drafts in a row τ {last.promised:.2f}; measured is "
        f"{last.measured:.2f}{fell}. The simulated one is of the training data's own text, the "
        "measured one of what the target writes: where the target would not write the data, the "
        "drafter learns text that decoding never meets. Go by τ; distil on answers that the target "
        "itself wrote, and with its own chat template."
    )


def simulated_curve(data: RunData) -> list[tuple[float, float]]:
    """Return (step, simulated acceptance), of validation if it was logged."""
    return next((data.curves[name] for name in CURVES if data.curves.get(name)), [])


def num_drafts_of(data: RunData) -> int:
    """Return the depth of the chain that τ is compared with: the measured one, else the paper's."""
    method = _compared_method(data)
    tree = data.tree(method) if method else None
    return tree.to_token_tree().max_depth if tree else CHAIN_DRAFTS


def compared(data: RunData) -> list[Checkpoint]:
    """Pair each export's τ with the simulated acceptance logged last by then.

    τ is the chain's if one was measured (a tree holds a chain and more), at the temperature nearest
    to 1, the simulation's.
    """
    method, curve = _compared_method(data), simulated_curve(data)
    if method is None or not curve:
        return []
    temperature = min(data.temperatures, key=lambda each: abs(each - 1))
    found, num_drafts = [], num_drafts_of(data)
    for label in data.checkpoints:
        step, cell = data.steps[label], data.cell(label, method, data.scopes[0], temperature)
        logged = [acceptance for at, acceptance in curve if step is not None and at <= step]
        tau, interval = cell.gain("acceptance_length") if cell is not None else (None, None)
        if step is not None and logged and tau is not None:
            found.append(Checkpoint(step, logged[-1], num_drafts, tau, interval or (tau, tau)))
    return found


def _compared_method(data: RunData) -> str | None:
    chains = [method for method in data.methods if method.partition(":")[0] == CHAIN]
    return next(iter(chains or data.methods), None)


def _is_apart(checkpoint: Checkpoint, earlier: Sequence[Checkpoint]) -> bool:
    if checkpoint.measured - 1 < MIN_SHARE_KEPT * (checkpoint.promised - 1):
        return True
    return any(
        checkpoint.acceptance > before.acceptance and checkpoint.interval[1] < before.interval[0]
        for before in earlier
    )
