"""What belongs to each sequence of a batch: its settings and its random numbers.

Shapes: B rows, V vocabulary. Everything is a tensor with a row a sequence, so that one step serves
any mixture of settings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from stree.generation import GenerationConfig
from stree_kernels import ops

# Places of use of a step's random numbers, the same whatever else its tree holds
DRAFT = 0  # + the node that is drawn
ACCEPT = 2**20  # + LEVEL · depth + the place among its siblings of the node that is judged
LEVEL = 2**11
AFTER = 2**31  # the token after the accepted path


@dataclass
class Rows:
    """Sampling settings and random numbers of B rows; temperature 0 is greedy.

    active (B,) bool; temperature (B,) and top_p (B,) fp64; top_k (B,), seed (B,) and position (B,)
    int64, position being that of the current step's root in its sequence. `sampled` and `filtered`
    are the host's knowledge: whether any row samples, and whether any has a top_k or top_p.
    """

    active: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    position: Tensor
    sampled: bool = False
    filtered: bool = False

    @classmethod
    def new(cls, batch: int, device: torch.device | str = "cpu") -> Rows:
        """Idle rows."""

        def zeros(dtype: torch.dtype) -> Tensor:
            return torch.zeros(batch, dtype=dtype, device=device)

        return cls(
            zeros(torch.bool), zeros(torch.float64), zeros(torch.long),
            zeros(torch.float64) + 1.0, zeros(torch.long), zeros(torch.long),
        )  # fmt: skip

    def set(self, row: int, generation: GenerationConfig) -> None:
        """Give a row to a request; it is idle until its prompt has been read."""
        self.active[row] = False
        self.temperature[row], self.top_p[row] = generation.temperature, generation.top_p
        self.top_k[row], self.seed[row] = generation.top_k, generation.seed

    def narrow(self, first: int, count: int, generations: Iterable[GenerationConfig]) -> Rows:
        """Some of the rows, as views; generations, what those of them are for that are active."""
        sampling = [each for each in generations if each.temperature > 0]
        filtered = any(each.top_k > 0 or each.top_p < 1 for each in sampling)

        def view(tensor: Tensor) -> Tensor:
            return tensor.narrow(0, first, count)

        return Rows(
            view(self.active), view(self.temperature), view(self.top_k), view(self.top_p),
            view(self.seed), view(self.position), bool(sampling), filtered,
        )  # fmt: skip

    def distribution(self, logits: Tensor) -> Tensor:
        """Each row's probabilities in fp64 of its logits, (B, V) or (B, n, V).

        After temperature, then top-k (ties with the k-th stay), then top-p (the smallest set of
        tokens whose probability reaches it), as `transformers` does; all of it on the best token at
        temperature 0.
        """
        rows = [-1] + [1] * (logits.dim() - 1)
        temperature = self.temperature.view(rows)
        greedy = temperature == 0
        scores = logits.double() / torch.where(greedy, 1.0, temperature)
        if self.filtered:
            scores = _only_top_k(scores, self.top_k.view(rows))
        probs = scores.softmax(-1)
        if self.filtered:
            probs = _only_top_p(probs, self.top_p.view(rows))
        best = torch.zeros_like(probs).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        return torch.where(greedy & probs.isfinite().all(-1, keepdim=True), best, probs)


def _only_top_k(scores: Tensor, top_k: Tensor) -> Tensor:
    vocabulary = scores.shape[-1]
    kth = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary) - 1
    threshold = scores.sort(dim=-1, descending=True).values.gather(
        -1, kth.expand(*scores.shape[:-1], 1)
    )
    return scores.masked_fill(scores < threshold, -torch.inf)


def _only_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    ascending, order = probs.sort(dim=-1, stable=True)
    dropped = (ascending.cumsum(-1) <= 1.0 - top_p) & (top_p < 1.0)
    dropped[..., -1] = False
    kept = probs.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), 0.0)
    return torch.where(top_p < 1.0, kept / kept.sum(-1, keepdim=True), probs)


class RowChooser:
    """Draws by inverting cumulative distributions with the rows' own random numbers."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __call__(self, probs: Tensor, places: Tensor) -> Tensor:
        """Indices (B, n) from probs (B, n, V), for places of use (B, n)."""
        cumulative = probs.cumsum(-1)
        uniform = ops.uniforms(self.rows.seed, self.rows.position, places)[..., None]
        # u < 1 times the total, and the first entry above it: never a token of probability 0
        threshold = uniform * cumulative[..., -1:]
        drawn = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
        return drawn.clamp(max=probs.shape[-1] - 1)
