"""Sampling laws, and the one seam through which every random choice goes."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from stree.errors import UsageError
from stree.tree import index_tensor


class Chooser(Protocol):
    """Draws from categorical laws; the decoder has no other source of randomness."""

    def __call__(self, probs: Tensor) -> Tensor:
        """Indices (…) drawn from probs (…, V), each row on its own."""
        ...


class RandomChooser:
    """Draws by inverting the cumulative law with uniforms from one seeded generator."""

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.on_cuda = self.generator.device.type == "cuda"

    def reseed(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def uniforms(self, *shape: int) -> Tensor:
        """fp64 in [0, 1), for kernels that invert laws themselves."""
        device = self.generator.device
        return torch.rand(shape, generator=self.generator, dtype=torch.float64, device=device)

    def __call__(self, probs: Tensor) -> Tensor:
        cumulative = probs.cumsum(-1)
        uniform = torch.rand(
            (*probs.shape[:-1], 1),
            generator=self.generator, dtype=probs.dtype, device=probs.device,
        )  # fmt: skip
        # u < 1 times the total, and the first entry above it: never a token of probability 0
        drawn = torch.searchsorted(cumulative, uniform * cumulative[..., -1:], right=True)
        return drawn.squeeze(-1).clamp(max=probs.shape[-1] - 1)


def sampling_law(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Probabilities in fp64 after temperature, then top-k, then top-p, as `transformers` does.

    Args: logits (…, V), temperature above 0, top_k (0: off; ties with the k-th stay), top_p in
    (0, 1]: the smallest set of tokens whose probability reaches it.
    """
    scores = logits.double() / temperature
    if 0 < top_k < scores.shape[-1]:
        threshold = scores.topk(top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < threshold, -torch.inf)
    probs = scores.softmax(-1)
    if top_p < 1.0:
        ascending, order = probs.sort(dim=-1, stable=True)
        dropped = ascending.cumsum(-1) <= 1.0 - top_p
        dropped[..., -1] = False
        probs = probs.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def without(law: Tensor, taken: Tensor) -> Tensor:
    """The law of the next sibling: `law` (…, V) given that the `taken` (…, V) tokens are out.

    Where the law has nothing left, uniform over the tokens that are: any law keeps verification
    exact as long as drafting and verification use the same one.
    """
    left = law.masked_fill(taken, 0.0)
    total = left.sum(-1, keepdim=True)
    open_tokens = (~taken).to(law.dtype)
    uniform = open_tokens / open_tokens.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, uniform)


def sample_siblings(laws: Tensor, counts: list[int], choose: Chooser) -> Tensor:
    """Draw the children of several nodes, each node's without replacement.

    Args: laws (n, V), one a parent; counts, how many children each wants.
    Returns (n, max(counts)); row i's entries past counts[i] mean nothing.
    """
    if max(counts) > laws.shape[-1]:
        raise UsageError(
            f"the tree wants {max(counts)} siblings, the vocabulary has {laws.shape[-1]} tokens"
        )
    drawn = torch.zeros(len(counts), max(counts), dtype=torch.long, device=laws.device)
    taken = torch.zeros_like(laws, dtype=torch.bool)
    for sibling in range(max(counts)):
        wanting = tuple(row for row, count in enumerate(counts) if count > sibling)
        rows = index_tensor(wanting, laws.device)
        tokens = choose(without(laws[rows], taken[rows]))
        drawn[rows, sibling] = tokens
        # scatter, not an assignment of True: that would copy a scalar from the host
        taken[rows] = taken[rows].scatter(-1, tokens[:, None], True)
    return drawn
