"""Kinds of settings that the requests of a step have, by which graphs are chosen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from stree.generation import GenerationConfig


class Asked(NamedTuple):
    """Kinds of settings that a step's requests have, known to the host.

    Attributes:
        sampled: Whether any row samples.
        filtered: Whether any row that samples has a top_k, top_p or min_p.
        ranked: Whether any row that samples has a top_k or top_p, for which tokens are sorted.
        penalised: Whether any row has a repetition penalty.
        counted: Whether any row has a presence or frequency penalty.
        biased: Whether any row has a bias of logits.
        barred: Size of the rows' barred words (`LogitRules.size`); None if no row has any.
        processed: Whether any row has logits processors of its own, so that the step waits for the
            host.
        num_top: Most tokens of which any row wants log-probabilities besides its own token's,
            rounded up to a power of two; None if no row wants log-probabilities.
    """

    sampled: bool = False
    filtered: bool = False
    ranked: bool = False
    penalised: bool = False
    counted: bool = False
    biased: bool = False
    barred: tuple[int, int] | None = None
    processed: bool = False
    num_top: int | None = None

    @property
    def reads_paths(self) -> bool:
        """True if rules look at the drafts above each node."""
        barred = self.barred is not None
        return self.penalised or self.counted or barred or self.processed

    @property
    def has_rules(self) -> bool:
        """True if any row has a bias, a penalty, barred words or processors."""
        return self.reads_paths or self.biased


NOTHING_ASKED = Asked()


def asked_by(generations: Iterable[GenerationConfig], size: tuple[int, int]) -> Asked:
    """Return the kinds of settings that requests have; size is that of the rows' barred words."""
    generations = list(generations)
    sampling = [each for each in generations if each.temperature > 0]
    ranked = any(each.top_k > 0 or each.top_p < 1 for each in sampling)
    tops = [each.logprobs for each in generations if each.logprobs is not None]
    num_top = max(tops, default=None)
    if num_top:  # so that few graphs serve any number
        num_top = 1 << (num_top - 1).bit_length()
    return Asked(
        sampled=bool(sampling),
        filtered=ranked or any(each.min_p > 0 for each in sampling),
        ranked=ranked,
        penalised=any(each.repetition_penalty != 1 for each in generations),
        counted=any(each.counts_tokens for each in generations),
        biased=any(each.logit_bias for each in generations),
        barred=size if any(each.bars_words for each in generations) else None,
        processed=any(each.logits_processor for each in generations),
        num_top=num_top,
    )
