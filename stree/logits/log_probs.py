"""Log-probabilities of new tokens and of the best tokens in their places.

Shapes: B rows, M tokens of a row, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
        best, kept = (_best_of(each, num_top) for each in (of_logits, processed))
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
        temperature = torch.ones(1, dtype=torch.float64, device=target.device)
        for start in range(0, len(tokens) - 1, TEXT_CHUNK):
            stop = min(start + TEXT_CHUNK, len(tokens) - 1)
            logits = target.logits(hidden[:, start:stop])
            values = log_probs_of(
                logits, logits, ids[:, start + 1 : stop + 1], temperature, num_top
            )
            found += values[0].flatten(1).tolist()
    return [
        TokenLogprobs.of_values(token, values, num_top)
        for token, values in zip(tokens[1:], found, strict=True)
    ]


def log_probs_of(
    logits: Tensor, processed: Tensor, tokens: Tensor, temperature: Tensor, num_top: int
) -> Tensor:
    """Return the log-probabilities of tokens and of the best tokens in their places.

    Args:
        logits: (B, M, V) of the target.
        processed: (B, M, V), the same as `BatchState.processed` returns them.
        tokens: (B, M).
        temperature: (B,) fp64, by which `processed` are divided here; 0 counts as 1.
        num_top: k, the number of best tokens; at most V are returned.

    Returns:
        (B, M, 2, 1 + 2·k) fp64, by `logits` and by `processed`: the token's log-probability, then
        those of the k best tokens, then these tokens.
    """
    import torch  # only here: schedulers keep `TokenLogprobs` without it

    from stree_kernels import naive

    dtype = naive.accumulation_dtype(logits.dtype)
    temperature = torch.where(temperature == 0, 1.0, temperature).to(dtype)
    both = torch.stack([logits.to(dtype), processed.to(dtype) / temperature[:, None, None]], 2)
    scores = both.log_softmax(-1)
    chosen = scores.gather(-1, tokens[:, :, None, None].expand(-1, -1, 2, 1))
    best, ids = scores.topk(min(num_top, scores.shape[-1]))
    return torch.cat([chosen.double(), best.double(), ids.double()], -1)
