"""Logits processors of a request's own, functions on the host that see the tokens before a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from stree.common.errors import UsageError, error_of_request


class LogitsProcessor(Protocol):
    """Protocol of a processor, which is that of `transformers`' LogitsProcessor.

    It is called for each node of a tree, parents first and also for drafts that are rejected later,
    but not after a token that it has left out: what it returns must depend on its arguments alone.
    """

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores to go on with.

        Args:
            input_ids: (1, T) int64, the prompt, the answer so far, and the drafts down to the node.
            scores: (1, V), the target's or a drafter's logits of the next token, after biases,
                penalties and barred words. They may be changed in place; −inf leaves a token out.
        """


@dataclass
class ProcessedText:
    """Processors of a row, and its tokens so far.

    Attributes:
        processors: Called one after the other.
        eos_ids: Tokens that end the answer; no processor is called after one.
        vocabulary: V of the target.
        tokens: Prompt and answer up to the root.
        error: What a processor has raised; from then on the row's logits are NaN, which ends it.

    Where the processors leave no token, the answer ends: all tokens but those of `eos_ids` are left
    out.
    """

    processors: Sequence[LogitsProcessor]
    eos_ids: frozenset[int]
    vocabulary: int
    tokens: list[int]
    error: Exception | None = None
    # Tokens (V,) that were left out after drafts, in the trees that are drafted or verified now
    _barred: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def process(self, logits: Tensor, paths: Sequence[list[int]], ids: Tensor | None) -> None:
        """Change logits (n, V) in place, those after the drafts of each path.

        A call whose paths begin with the root's, [], begins anew; later calls are of nodes below.
        """
        if [] in paths:
            self._barred.clear()
        try:
            for node, path in enumerate(paths):
                if self.error is None and self._may_come(path):
                    logits[node] = self._processed(logits[node].clone(), path, ids)
        except BaseException as error:
            self.error = error_of_request(error)
        if self.error is not None:
            logits.fill_(torch.nan)

    def _may_come(self, path: list[int]) -> bool:
        """Return whether the processors let the drafts of a path through, and none ends it."""
        if not path:
            return True
        barred = self._barred.get(tuple(path[:-1]))
        return barred is not None and path[-1] not in self.eos_ids and not bool(barred[path[-1]])

    def _processed(self, logits: Tensor, path: list[int], ids: Tensor | None) -> Tensor:
        scores = logits
        if ids is not None:
            scores = logits.new_full((self.vocabulary,), -torch.inf).index_copy(0, ids, logits)
        text = torch.tensor([[*self.tokens, *path]], device=logits.device)
        shape, scores = (1, len(scores)), scores[None]
        for processor in self.processors:
            scores = processor(text, scores)
            if not isinstance(scores, Tensor) or scores.shape != shape:
                got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
                raise UsageError(
                    f"a logits_processor returned {got}, wanted the scores, a tensor {shape}"
                )
        self._barred[tuple(path)] = scores[0] == -torch.inf
        left = scores[0] if ids is None else scores[0, ids]
        if bool((left > -torch.inf).any()):
            return left
        if ids is not None:  # the drafts below are barred, whatever they are
            return torch.zeros_like(left)
        if not self.eos_ids:
            raise UsageError(
                f"logits_processor leaves no token after {text[0, -8:].tolist()}, and none ends "
                "the answer: name one as eos_token_id, or allow another"
            )
        return left.index_fill(0, torch.tensor(sorted(self.eos_ids), device=left.device), 0.0)
