"""Give the distribution a student learns: the live target's, or its top k and one tail bucket.

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

from stree_kernels.index_plan import columns_of


class Teacher(Protocol):
    """Interface between a teacher and the chunked loss, for M rows or C of them.

    The V columns are the tokens of the student's head; is_partial says that the vocabulary has
    more.
    """

    @property
    def is_partial(self) -> bool: ...

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Tensors with an entry per row, (M, …)."""

    def __len__(self) -> int:
        """Return the number of rows M."""

    def of(self, rows: Tensor | slice) -> Teacher:
        """Return the teacher restricted to some of its rows, by their indices."""

    def over(self, ids: Tensor | None) -> Teacher:
        """Return the teacher for a student whose head has the tokens ids (K,), ascending; None is
        all.

        Probabilities keep their values, and do not sum to one then.
        """

    def log_distribution(self, log_q_CV: Tensor) -> Tensor:
        """Make a new (C, V) fp32 tensor of log-probabilities to learn, given the student's."""

    def overlap(self, p_CV: Tensor, q_CV: Tensor) -> Tensor:
        """Sum min(p_v, q_v) over v for each row (C,), as far as it is known.

        p_CV = exp(log_distribution).
        """


@dataclass(frozen=True)
class LiveTeacher:
    """Teacher from hidden (M, Dt) and head (V, Dt), both in the dtype of the products; ids as
    `over`."""

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
    mass outside the k, −inf when there is none. When it is partial, ids are columns of the
    student's head, and tokens outside that head have the column after the last.
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
        """Make (C, V) from the known log-probabilities, with the tail spread as the student's own.

        An f-divergence from that distribution equals the one between top k and tail bucket,
        gradient included.
        """
        ids_Ck, size = self.ids.long(), log_q_CV.shape[1]
        if self.is_partial:
            log_q_CV = F.pad(log_q_CV, (0, 1), value=-math.inf)  # for tokens outside the head
        log_p_CV = log_q_CV.scatter(1, ids_Ck, -math.inf)
        tail_C = self.log_tail
        # An empty tail stays empty for any student (−inf − −inf would be NaN).
        shift_C = torch.where(tail_C == -math.inf, tail_C, tail_C - log_p_CV.logsumexp(1))
        return log_p_CV.add_(shift_C[:, None]).scatter_(1, ids_Ck, self.log_probs)[:, :size]

    def overlap(self, p_CV: Tensor, q_CV: Tensor) -> Tensor:
        """Sum min(p_v, q_v) over the k known tokens only: a lower bound, as the tail's share is
        unknown."""
        ids_Ck, last = self.ids.long(), q_CV.shape[1] - 1
        q_Ck = q_CV.gather(1, ids_Ck.clamp(max=last)).masked_fill(ids_Ck > last, 0.0)
        return torch.minimum(self.log_probs.exp(), q_Ck).sum(1)


@torch.no_grad()
def top_k_of(teacher: LiveTeacher, k: int, chunk_rows: int) -> TopK:
    """Return the top k of a live teacher, `chunk_rows` rows of logits at a time, on its device."""
    ids, log_probs, log_tail = [], [], []
    for start in range(0, len(teacher.hidden), chunk_rows):
        log_p_CV = teacher.of(slice(start, start + chunk_rows)).log_distribution(teacher.hidden)
        top = log_p_CV.topk(k, dim=-1)
        ids.append(top.indices.int())
        log_probs.append(top.values)
        # Summed over the tail itself: one minus the rest would lose all digits of a small one.
        log_tail.append(log_p_CV.scatter_(1, top.indices, -math.inf).logsumexp(1))
    return TopK(torch.cat(ids), torch.cat(log_probs), torch.cat(log_tail))
