"""Compare the probabilities of a drafter's tokens with the target's, as a table and two figures.

    python pipelines/stree_lab/calibration.py TARGET DRAFTER runs/calibration --prompts gsm8k

After each token of the target's own answers one draft is drawn from the drafter's distribution q; p
is the target's. Written are calibration.json, reliability.svg (Mamba Drafters' Fig. 2b: its
expected calibration error is in the title) and acceptance.svg (DySpec's Fig. 2, on its Hypothesis
1: the more probable a draft, the more often it is accepted).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import stree.common.threads  # noqa: F401  (before torch is loaded)

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

import stree
from stree.checkpoints.load_save import load_model
from stree.common.errors import UsageError, exit_with_reason
from stree_kernels import ops
from stree_lab.papers import answered_prompts
from stree_pipelines.console.command_line import PlainParser, input_path
from stree_pipelines.evaluation.answering.drafter_readings import (
    drafter_log_probs,
    target_hidden,
)
from stree_pipelines.reports.plots import new_figure

NUM_BINS = 10  # of the drafter's probability, from 0 to 1
COLOURS = ("#2f81d6", "#8b949e")


@dataclass(frozen=True)
class Drafts:
    """Probabilities of drafted tokens, each (D,): q by the drafter, p by the target."""

    q: NDArray[np.float64]
    p: NDArray[np.float64]

    @property
    def accepted(self) -> NDArray[np.float64]:
        """Probabilities min(1, p / q) that speculative sampling accepts the drafts."""
        return np.minimum(1.0, self.p / self.q)


@dataclass(frozen=True)
class Bin:
    """Drafts whose q is in one of the bins: their share, and means over them."""

    share: float
    q: float
    p: float
    accepted: float


def bins_of(drafts: Drafts, num_bins: int = NUM_BINS) -> list[Bin]:
    """Group drafts by q into bins of one width; bins without drafts are left out."""
    numbers = np.minimum((drafts.q * num_bins).astype(int), num_bins - 1)
    bins = []
    for number in range(num_bins):
        inside = numbers == number
        if inside.any():
            means = (float(each[inside].mean()) for each in (drafts.q, drafts.p, drafts.accepted))
            bins.append(Bin(float(inside.mean()), *means))
    return bins


def calibration_error(bins: Sequence[Bin]) -> float:
    """Return the expected calibration error Σ share · |mean p − mean q| (Guo et al. 2017)."""
    return sum(each.share * abs(each.p - each.q) for each in bins)


def drafted(target: Tensor, drafter: Tensor, temperature: float, seed: int) -> Drafts:
    """Draw a draft after each of A tokens, given log-probabilities (A, V) of both models."""
    p, q = ((each.double() / temperature).softmax(-1).cpu() for each in (target, drafter))
    tokens = torch.multinomial(q, 1, generator=torch.Generator().manual_seed(seed))
    return Drafts(*(each.gather(-1, tokens)[:, 0].numpy() for each in (q, p)))


def reliability(bins: Sequence[Bin]) -> Figure:
    """Draw the mean p of each bin over its mean q, and the diagonal of perfect calibration."""
    figure, axes = new_figure()
    axes.plot([0, 1], [0, 1], "--", color=COLOURS[1])
    axes.plot([each.q for each in bins], [each.p for each in bins], "o-", color=COLOURS[0])
    axes.set(
        xlabel="drafter's probability q", ylabel="target's probability p", xlim=(0, 1), ylim=(0, 1),
        title=f"expected calibration error {calibration_error(bins):.3f}",
    )
    return figure


def acceptance(drafts: Drafts, bins: Sequence[Bin]) -> Figure:
    """Draw the density of min(1, p / q) in each column of q, and its mean."""
    figure, axes = new_figure()
    edges = np.linspace(0, 1, NUM_BINS + 1)
    counts, *_ = np.histogram2d(drafts.q, drafts.accepted, (edges, edges))
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axes.pcolormesh(edges, edges, shares.T, cmap="Blues", vmin=0, vmax=1)
    axes.plot([each.q for each in bins], [each.accepted for each in bins], "o-", color=COLOURS[1])
    axes.set(xlabel="drafter's probability q", ylabel="probability of acceptance", ylim=(0, 1))
    return figure


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = PlainParser("calibration.py", description=__doc__)
    answered_prompts.add_options(
        parser, "folder of a drafter with the target's tokenizer", limit=80, temperature=1.0
    )
    options = parser.parse_args(arguments)
    if options.temperature <= 0:
        raise UsageError(f"--temperature is {options.temperature}, wanted a number above 0")
    decoder = stree.load(input_path(options.target), device=options.device)
    target = decoder.target
    drafter = load_model(input_path(options.drafter), target.device, target.dtype).eval()
    found = []
    for tokens, answer, seed in answered_prompts.answers(options, decoder):
        text = torch.tensor([*tokens, *answer], device=target.device)
        with ops.current(target.device):
            hidden, inputs = target_hidden(target, drafter, text, len(tokens))
            both = (
                target.logits(hidden),
                drafter_log_probs(drafter, text, inputs, 0, len(tokens)),
            )
        found.append(drafted(*both, options.temperature, seed))
    drafts = Drafts(*(np.concatenate([getattr(e, name) for e in found]) for name in ("q", "p")))
    bins = bins_of(drafts)
    content = {
        "num_drafts": len(drafts.q), "temperature": options.temperature,
        "calibration_error": calibration_error(bins),
        "accepted": float(drafts.accepted.mean()), "bins": [asdict(each) for each in bins],
    }
    figures = {"reliability": reliability(bins), "acceptance": acceptance(drafts, bins)}
    answered_prompts.write(options.out, "calibration", target, content, figures)
    error = calibration_error(bins)
    print(f"{len(drafts.q):,} drafts, calibration error {error:.4f}: {options.out}")


if __name__ == "__main__":
    exit_with_reason(main)
