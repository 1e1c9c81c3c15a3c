"""What belongs to each sequence of a batch: its settings, and where its step begins.

Shapes: B rows, V vocabulary, M tokens that a step yields at most. Everything is a tensor with a row
a sequence, so that one step serves any mixture of settings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from stree.generation import GenerationConfig
from stree_kernels import naive_verification
from stree_kernels.shapes import Sampling


@dataclass
class Rows:
    """Settings of B sequences and the tokens that their next step begins with.

    active (B,) bool: an idle row's step changes nothing of it. temperature (B,), 0 is greedy, and
    top_p (B,) fp64; top_k (B,) and seed (B,) int64. position (B,) int64: where in its sequence the
    root of the next tree stands, so how many tokens are committed before it. root (B, 1) int64, its
    token. block (B, 1 + M) int64: how many tokens the last step yielded, and the tokens, the root
    last. `sampled` and `filtered` are the host's knowledge: whether any row samples, and whether
    any of these has a top_k or top_p.
    """

    active: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    position: Tensor
    root: Tensor
    block: Tensor
    sampled: bool = False
    filtered: bool = False

    @classmethod
    def new(cls, batch: int, longest: int = 1, device: torch.device | str = "cpu") -> Rows:
        """Idle rows, for blocks of up to `longest` tokens."""

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(batch, *shape, dtype=dtype, device=device)

        return cls(
            zeros(dtype=torch.bool), zeros(dtype=torch.float64), zeros(dtype=torch.long),
            zeros(dtype=torch.float64) + 1.0, zeros(dtype=torch.long), zeros(dtype=torch.long),
            zeros(1, dtype=torch.long), zeros(1 + longest, dtype=torch.long),
        )  # fmt: skip

    def set(self, row: int, generation: GenerationConfig) -> None:
        """Give a row to a request; it is idle until its prompt has been read."""
        self.active[row] = False
        self.temperature[row], self.top_p[row] = generation.temperature, generation.top_p
        self.top_k[row], self.seed[row] = generation.top_k, generation.seed

    def begin(self, row: int, position: int, root: int) -> None:
        """Decode from a root that stands at `position` and is in no cache; all before it is."""
        self.position[row], self.root[row] = position, root
        self.block[row, :2] = torch.tensor([1, root])
        self.active[row] = True

    def narrow(self, first: int, count: int, generations: Iterable[GenerationConfig]) -> Rows:
        """Some of the rows, as views; generations, what those of them are for that are active."""
        sampling = [each for each in generations if each.temperature > 0]
        filtered = any(each.top_k > 0 or each.top_p < 1 for each in sampling)

        def view(tensor: Tensor) -> Tensor:
            return tensor.narrow(0, first, count)

        return Rows(
            view(self.active), view(self.temperature), view(self.top_k), view(self.top_p),
            view(self.seed), view(self.position), view(self.root), view(self.block),
            bool(sampling), filtered,
        )  # fmt: skip

    @property
    def sampling(self) -> Sampling | None:
        """How tokens are chosen; None when all rows are greedy."""
        if not self.sampled:
            return None
        return Sampling(self.temperature, self.seed, self.position)

    def kept(self, logits: Tensor) -> Tensor:
        """Logits (B, …, V), −∞ for the tokens that a row's top-k and then top-p leave out.

        Ties with the k-th stay; top-p is the smallest set of tokens whose probability at the row's
        temperature reaches it, as in `transformers`.
        """
        if not self.filtered:
            return logits
        rows = [-1] + [1] * (logits.dim() - 1)
        temperature, top_k = self.temperature.view(rows), self.top_k.view(rows)
        scores = logits.double() / torch.where(temperature == 0, 1.0, temperature)
        dropped = _beyond_top_k(scores, top_k)
        probs = scores.masked_fill(dropped, -torch.inf).softmax(-1)
        dropped = dropped | _beyond_top_p(probs, self.top_p.view(rows))
        return logits.masked_fill(dropped & (temperature > 0), -torch.inf)

    def distribution(self, logits: Tensor) -> Tensor:
        """Each row's probabilities, fp64, of logits (B, …, V) as they are left by `kept`, at its
        temperature; at 0 all of it on the best token."""
        return naive_verification.distribution(logits, self.temperature)


def _beyond_top_k(scores: Tensor, top_k: Tensor) -> Tensor:
    vocabulary = scores.shape[-1]
    kth = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary) - 1
    threshold = scores.sort(dim=-1, descending=True).values.gather(
        -1, kth.expand(*scores.shape[:-1], 1)
    )
    return scores < threshold


def _beyond_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    ascending, order = probs.sort(dim=-1, stable=True)
    dropped = (ascending.cumsum(-1) <= 1.0 - top_p) & (top_p < 1.0)
    dropped[..., -1] = False
    return torch.zeros_like(dropped).scatter(-1, order, dropped)
