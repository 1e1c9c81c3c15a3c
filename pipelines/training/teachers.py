"""What a student is compared with: the live target's law, or its top k and one bucket for the rest.

Legend: M rows (tokens that count), C rows of a chunk, V vocabulary, Dt width of the teacher,
k tokens whose probabilities are known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor


class Teacher(Protocol):
    """What the chunked loss asks of a teacher; `rows` is a chunk of the M rows."""

    def __len__(self) -> int:
        """M."""

    def of(self, rows: Tensor) -> Teacher:
        """The same teacher of some of its rows, by their indices."""

    def log_law(self, rows: slice, log_q_CV: Tensor) -> Tensor:
        """A new (C, V) fp32 tensor: the log-probabilities to learn, given the student's own."""

    def overlap(self, rows: slice, p_CV: Tensor, q_CV: Tensor) -> Tensor:
        """Σ_v min(p_v, q_v) of each row (C,), as far as it is known: p_CV is exp(log_law)."""


@dataclass(frozen=True)
class LiveTeacher:
    """hidden (M, Dt) and head (V, Dt), both in the dtype of the matrix products."""

    hidden: Tensor
    head: Tensor
    temperature: float = 1.0

    def __len__(self) -> int:
        return len(self.hidden)

    def of(self, rows: Tensor) -> LiveTeacher:
        return replace(self, hidden=self.hidden[rows])

    def log_law(self, rows: slice, log_q_CV: Tensor) -> Tensor:
        logits_CV = (self.hidden[rows] @ self.head.T).float()
        if self.temperature != 1.0:
            logits_CV.div_(self.temperature)
        return torch.log_softmax(logits_CV, dim=-1)

    def overlap(self, rows: slice, p_CV: Tensor, q_CV: Tensor) -> Tensor:
        return torch.minimum(p_CV, q_CV).sum(1)


@dataclass(frozen=True)
class TopK:
    """The k most probable tokens of each row and the mass of all others.

    ids (M, k) int32, distinct in a row; log_probs (M, k) fp32; log_tail (M,) fp32, the log of the
    mass outside the k, −inf when there is none.
    """

    ids: Tensor
    log_probs: Tensor
    log_tail: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def of(self, rows: Tensor) -> TopK:
        return TopK(self.ids[rows], self.log_probs[rows], self.log_tail[rows])

    def log_law(self, rows: slice, log_q_CV: Tensor) -> Tensor:
        """The known log-probabilities, and the tail spread as the student spreads its own: an
        f-divergence from that law is the one of top k and tail bucket, gradient included."""
        ids_Ck = self.ids[rows].long()
        law_CV = log_q_CV.scatter(1, ids_Ck, -math.inf)
        tail_C = self.log_tail[rows]
        # No tail stays none, whatever the student says (−inf − −inf is NaN).
        shift_C = torch.where(tail_C == -math.inf, tail_C, tail_C - law_CV.logsumexp(1))
        return law_CV.add_(shift_C[:, None]).scatter_(1, ids_Ck, self.log_probs[rows])

    def overlap(self, rows: slice, p_CV: Tensor, q_CV: Tensor) -> Tensor:
        """Of the k only: what of the tail overlaps is unknown, so this is at most the whole."""
        return torch.minimum(self.log_probs[rows].exp(), q_CV.gather(1, self.ids[rows].long())).sum(
            1
        )


@torch.no_grad()
def top_k_of(teacher: LiveTeacher, k: int, chunk_rows: int) -> TopK:
    """The top k of a live teacher, `chunk_rows` rows of logits at a time, on its device."""
    ids, log_probs, log_tail = [], [], []
    for start in range(0, len(teacher.hidden), chunk_rows):
        law_CV = teacher.log_law(slice(start, start + chunk_rows), teacher.hidden)
        top = law_CV.topk(k, dim=-1)
        ids.append(top.indices.int())
        log_probs.append(top.values)
        # Summed over the tail itself: one minus the rest would lose all digits of a small one.
        log_tail.append(law_CV.scatter_(1, top.indices, -math.inf).logsumexp(1))
    return TopK(torch.cat(ids), torch.cat(log_probs), torch.cat(log_tail))
