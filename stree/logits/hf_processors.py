"""Logits processors that transformers has prepared: as settings of ours, or called at each node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stree.common.errors import UsageError
from stree.settings import THEIRS

# Processors of transformers that remember their calls, which a tree makes for drafts too
_STATEFUL = (
    "UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor"
)


def settings_of(
    processors: Sequence[Any], sampled: bool, eos_ids: Sequence[int], prompt_length: int,
    mask: Tensor | None,
) -> tuple[dict[str, Any], list[Any]]:
    """Return our settings for transformers' logits processors, and the processors to be called.

    Settings change logits first (penalties, bad words, least lengths) or last (temperature, top-k,
    top-p, min-p). A processor without a setting is called in between, and so are its neighbours in
    the list which would change places with it otherwise.

    Args:
        processors: What transformers has prepared, in its order.
        sampled: Whether answers are sampled; greedy ones get no temperature.
        eos_ids: Tokens that end an answer.
        prompt_length: T of the padded prompts.
        mask: (B, T), zero for padding; None without padding.

    Raises:
        UsageError: For a processor that remembers its calls, by its name.
    """
    from transformers.generation import logits_process as theirs

    last_ones = {
        theirs.TemperatureLogitsWarper: "temperature", theirs.TopKLogitsWarper: "top_k",
        theirs.TopPLogitsWarper: "top_p", theirs.MinPLogitsWarper: "min_p",
    }
    first_ones = {
        theirs.RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
        theirs.NoBadWordsLogitsProcessor: ("bad_words_ids", "bad_word_ids"),
        theirs.MinLengthLogitsProcessor: ("min_new_tokens", "min_length"),
        theirs.MinNewTokensLengthLogitsProcessor: ("min_new_tokens", "min_new_tokens"),
    }
    found: list[tuple[str, Any] | None] = []
    for each in processors:
        if type(each).__name__ in _STATEFUL:
            raise UsageError(f"generate cannot honour {type(each).__name__}: {THEIRS}")
        name, theirs_is = first_ones.get(type(each), (last_ones.get(type(each), ""),) * 2)
        value: Any = getattr(each, theirs_is) if name else None
        if name == "min_new_tokens":  # transformers states it as both lengths
            value = value - prompt_length if theirs_is == "min_length" else value
            name = name if set(each.eos_token_id.tolist()) == set(eos_ids) else ""
        unseen = getattr(each, "prompt_ignore_length", None)
        if unseen is not None:  # padding is no part of our prompts
            padding = 0 if mask is None else (mask != 0).int().argmax(1)
            name = name if bool((torch.as_tensor(unseen) == padding).all()) else ""
        found.append((name, value) if name else None)
    num_called = max((place for place, each in enumerate(found, 1) if each is None), default=0)
    asked: dict[str, Any] = {"temperature": 1.0} if sampled else {}
    called: list[Any] = []
    for place, (each, setting) in enumerate(zip(processors, found, strict=True)):
        is_last = type(each) in last_ones
        if setting is None or (is_last and place < num_called) or (called and not is_last):
            called.append(each)
        elif sampled or not is_last:
            name, value = setting
            asked[name] = max(value, asked.get(name, 0)) if name == "min_new_tokens" else value
    return asked, called


class CalledForRow:
    """Processors of transformers, called for one row of a padded batch as transformers does.

    Args:
        processors: Called one after the other.
        row: Number of the sequence in the batch, which `prefix_allowed_tokens_fn` is given.
        padding: (1, P), the tokens before its prompt.
    """

    def __init__(self, processors: Sequence[Any], row: int, padding: Tensor) -> None:
        self.processors, self.row, self.padding = processors, row, padding

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        from transformers import PrefixConstrainedLogitsProcessor as Prefix

        ids = torch.cat([self.padding, input_ids], dim=1)
        for each in self.processors:
            if type(each) is Prefix:
                each = Prefix(partial(self._allowed, each._prefix_allowed_tokens_fn), 1)
            scores = each(ids, scores)
        return scores

    def _allowed(self, ask: Callable[[int, Tensor], list[int]], _: int, sent: Tensor) -> list[int]:
        return ask(self.row, sent)
