"""What a student is compared with: the live target's distribution, or its top k and one bucket for
the rest.

Legend: M rows (tokens that count), C rows of a chunk, V vocabulary, Dt width of the teacher,
k tokens whose probabilities are known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from stree.models.head_columns import columns_of


class Teacher(Protocol):
    """What the chunked loss asks of a teacher of M rows, or of C of them. The V columns are the
    tokens that the student's head is over; is_partial, whether there are more."""

    @property
    def is_partial(self) -> bool: ...

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """What there is of each row, (M, …)."""

    def __len__(self) -> int:
        """M."""

    def of(self, rows: Tensor | slice) -> Teacher:
        """The same teacher of some of its rows, by their indices."""

    def over(self, ids: Tensor | None) -> Teacher:
        """The same teacher for a student whose head is over the tokens ids (K,), ascending; None is
        all of them. Probabilities stay what they are, and do not sum to one then."""

    def log_distribution(self, log_q_CV: Tensor) -> Tensor:
        """A new (C, V) fp32 tensor: the log-probabilities to learn, given the student's own."""

    def overlap(self, p_CV: Tensor, q_CV: Tensor) -> Tensor:
        """Σ_v min(p_v, q_v) of each row (C,), as far as it is known, from p_CV =
        exp(log_distribution)."""


@dataclass(frozen=True)
class LiveTeacher:
    """hidden (M, Dt) and head (V, Dt), both in the dtype of the matrix products; ids as `over`."""

    hidden: Tensor
    head: Tensor
    temperature: float = 1.0
    ids: Tensor | None = None

    @property
    def is_partial(self) -> bool:
        return self.ids is not None

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (self.hidden,)

    def __len__(self) -> int:
        return len(self.hidden)

    def of(self, rows: Tensor | slice) -> LiveTeacher:
        return replace(self, hidden=self.hidden[rows])

    def over(self, ids: Tensor | None) -> LiveTeacher:
        return replace(self, ids=ids)

    def log_distribution(self, log_q_CV: Tensor) -> Tensor:
        logits_CV = (self.hidden @ self.head.T).float()
        if self.temperature != 1.0:
            logits_CV.div_(self.temperature)
        if self.ids is None:
            return torch.log_softmax(logits_CV, dim=-1)
        return logits_CV[:, self.ids].sub_(logits_CV.logsumexp(1, keepdim=True))

    def overlap(self, p_CV: Tensor, q_CV: Tensor) -> Tensor:
        return torch.minimum(p_CV, q_CV).sum(1)


@dataclass(frozen=True)
class TopK:
    """The k most probable tokens of each row and the mass of all others.

    ids (M, k) int, distinct in a row; log_probs (M, k) fp32; log_tail (M,) fp32, the log of the
    mass outside the k, −inf when there is none. Where it is partial, ids are the student's columns,
    of which those that it has not are one behind the last.
    """

    ids: Tensor
    log_probs: Tensor
    log_tail: Tensor
    is_partial: bool = False

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.ids, self.log_probs, self.log_tail

    def __len__(self) -> int:
        return len(self.ids)

    def of(self, rows: Tensor | slice) -> TopK:
        ids, log_probs, log_tail = (part[rows] for part in self.parts)
        return TopK(ids, log_probs, log_tail, self.is_partial)

    def over(self, ids: Tensor | None) -> TopK:
        if ids is None:
            return self
        return replace(self, ids=columns_of(self.ids.long(), ids), is_partial=True)

    def log_distribution(self, log_q_CV: Tensor) -> Tensor:
        """The known log-probabilities, and the tail spread as the student spreads its own: an
        f-divergence from that distribution is the one of top k and tail bucket, gradient
        included."""
        ids_Ck, size = self.ids.long(), log_q_CV.shape[1]
        if self.is_partial:
            log_q_CV = F.pad(log_q_CV, (0, 1), value=-math.inf)  # takes what the student has not
        log_p_CV = log_q_CV.scatter(1, ids_Ck, -math.inf)
        tail_C = self.log_tail
        # No tail stays none, whatever the student says (−inf − −inf is NaN).
        shift_C = torch.where(tail_C == -math.inf, tail_C, tail_C - log_p_CV.logsumexp(1))
        return log_p_CV.add_(shift_C[:, None]).scatter_(1, ids_Ck, self.log_probs)[:, :size]

    def overlap(self, p_CV: Tensor, q_CV: Tensor) -> Tensor:
        """Of the k only: what of the tail overlaps is unknown, so this is at most the whole."""
        ids_Ck, last = self.ids.long(), q_CV.shape[1] - 1
        q_Ck = q_CV.gather(1, ids_Ck.clamp(max=last)).masked_fill(ids_Ck > last, 0.0)
        return torch.minimum(self.log_probs.exp(), q_Ck).sum(1)


@torch.no_grad()
def top_k_of(teacher: LiveTeacher, k: int, chunk_rows: int) -> TopK:
    """The top k of a live teacher, `chunk_rows` rows of logits at a time, on its device."""
    ids, log_probs, log_tail = [], [], []
    for start in range(0, len(teacher.hidden), chunk_rows):
        log_p_CV = teacher.of(slice(start, start + chunk_rows)).log_distribution(teacher.hidden)
        top = log_p_CV.topk(k, dim=-1)
        ids.append(top.indices.int())
        log_probs.append(top.values)
        # Summed over the tail itself: one minus the rest would lose all digits of a small one.
        log_tail.append(log_p_CV.scatter_(1, top.indices, -math.inf).logsumexp(1))
    return TopK(torch.cat(ids), torch.cat(log_probs), torch.cat(log_tail))
