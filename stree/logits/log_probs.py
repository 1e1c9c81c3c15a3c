"""Log-probabilities of new tokens and of the best tokens in their places.

Shapes: B rows, M tokens of a row, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stree.trees.token_tree import MAX_CHILDREN

if TYPE_CHECKING:
    from torch import Tensor

TEXT_CHUNK = 256  # tokens of a text whose logits are in memory at once


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The target's log-probabilities of a new token, given all tokens before it.

    Attributes:
        token: The token.
        logprob: Its natural log-probability by the target's own logits.
        processed_logprob: The same after penalties, temperature and filters (top_k, top_p, min_p),
            by which a request that samples draws the token; at temperature 0, as at temperature 1
            without filters.
        top: The best tokens with their logprobs, the best first; as many as were asked for.
        processed_top: The best tokens with their processed logprobs, without those that filters
            leave out.
    """

    token: int
    logprob: float
    processed_logprob: float
    top: tuple[tuple[int, float], ...] = ()
    processed_top: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of_values(cls, token: int, values: Sequence[float], num_top: int) -> TokenLogprobs:
        """Return the record of a token by its values (2·(1 + 2·k),) of `log_probs_of`.

        num_top, at most k, best tokens are taken.
        """
        half = len(values) // 2
        of_logits, processed = values[:half], values[half:]
        best = kept = _best_of(of_logits, num_top)
        if processed != of_logits:
            kept = _best_of(processed, num_top)
            kept = tuple(each for each in kept if each[1] > -math.inf)
        return cls(token, of_logits[0], processed[0], best, kept)


def _best_of(values: Sequence[float], num_top: int) -> tuple[tuple[int, float], ...]:
    """Return token and log-probability of the best tokens in a half of a token's values."""
    k = len(values) // 2
    ids = map(int, values[1 + k : 1 + k + num_top])
    return tuple(zip(ids, values[1 : 1 + num_top], strict=False))


def log_probs_of_text(target: Any, tokens: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Return the log-probabilities of the tokens of a text but the first, and of the best ones.

    Args:
        target: A `HybridModel`.
        tokens: (T,), T ≥ 1.
        num_top: As in `GenerationConfig.logprobs`.
    """
    import torch

    with torch.no_grad():
        ids = torch.tensor([tokens], device=target.device)
        hidden, found = target.hidden_states(ids), []
        for start in range(0, len(tokens) - 1, TEXT_CHUNK):
            stop = min(start + TEXT_CHUNK, len(tokens) - 1)
            logits = target.logits(hidden[:, start:stop])
            values = log_probs_of(logits, logits, ids[:, start + 1 : stop + 1], None, num_top)
            found += values[0].flatten(1).tolist()
    return [
        TokenLogprobs.of_values(token, values, num_top)
        for token, values in zip(tokens[1:], found, strict=True)
    ]


def log_probs_of(
    logits: Tensor, processed: Tensor, tokens: Tensor, temperature: Tensor | None, num_top: int
) -> Tensor:
    """Return the log-probabilities of tokens and of the best tokens in their places.

    Args:
        logits: (B, M, V) of the target.
        processed: (B, M, V), the same as `BatchState.processed` returns them; `logits` itself where
            nothing changes them.
        tokens: (B, M).
        temperature: (B,) fp64, by which `processed` are divided here; 0 counts as 1. None if no row
            samples.
        num_top: k, the number of best tokens; at most V are returned.

    Returns:
        (B, M, 2, 1 + 2·k) fp64, by `logits` and by `processed`: the token's log-probability, then
        those of the k best tokens, then these tokens.
    """
    import torch  # only here: schedulers keep `TokenLogprobs` without it

    from stree_kernels import naive

    of_logits = of_processed = _log_probs_by(logits, tokens, num_top)
    if temperature is not None:
        dtype = naive.accumulation_dtype(processed.dtype)
        temperature = torch.where(temperature == 0, 1.0, temperature).to(dtype)
        processed = processed.to(dtype) / temperature[:, None, None]
    if processed is not logits:
        of_processed = _log_probs_by(processed, tokens, num_top)
    return torch.stack([of_logits, of_processed], 2)


def _log_probs_by(logits: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    """Return the half (B, M, 1 + 2·k) of `log_probs_of` that is by these logits (B, M, V)."""
    import torch

    from stree_kernels import naive, ops

    dtype, k = naive.accumulation_dtype(logits.dtype), min(num_top, logits.shape[2])
    shape, logits, tokens = tokens.shape, logits.flatten(0, 1), tokens.reshape(-1, 1)
    if k > MAX_CHILDREN:
        best, ids = logits.to(dtype).log_softmax(-1).topk(k)
    else:  # as the best children of roots, whose paths have the log-probability 0
        root = tokens.new_zeros(len(tokens), 1)
        places = torch.arange(1, 1 + max(k, 1), device=tokens.device).repeat(len(tokens), 1, 1)
        ids = root.repeat(1, 1 + max(k, 1))
        best, finite = ids.to(dtype), root.bool()
        ops.choose_children(logits[:, None], root.int(), None, places, ids, finite, root, best)
        best, ids = best[:, 1:], ids[:, 1:]
    below = logits.gather(1, tokens).to(dtype) - logits.gather(1, ids[:, :1]).to(dtype)
    parts = [(best[:, :1] + below).double(), best[:, :k].double(), ids[:, :k].double()]
    return torch.cat(parts, 1).view(*shape, -1)
