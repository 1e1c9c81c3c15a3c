"""Give the distribution that a student learns: the target's, from its hidden states and head.

Legend: M rows (tokens that count), C rows of a chunk, V vocabulary, Dt width of the teacher.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Teacher:
    """Teacher from hidden (M, Dt) and head (V, Dt), both in the dtype of the products.

    ids (K,) int64, ascending: the tokens of a student's smaller head; None is all.
    """

    hidden: Tensor
    head: Tensor
    temperature: float = 1.0
    ids: Tensor | None = None

    def __len__(self) -> int:
        """Return the number of rows M."""
        return len(self.hidden)

    def of(self, rows: Tensor | slice) -> Teacher:
        """Return the teacher restricted to some of its rows, by their indices."""
        return replace(self, hidden=self.hidden[rows])

    def over(self, ids: Tensor | None) -> Teacher:
        """Return the teacher for a student whose head has the tokens `ids`; None is all.

        Probabilities keep their values, and do not sum to one then.
        """
        return replace(self, ids=ids)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that it gives a probability."""
        return len(self.head if self.ids is None else self.ids)

    def log_distribution(self) -> Tensor:
        """Make a new (M, V) fp32 tensor of log-probabilities; (M, K) of the tokens `ids`."""
        logits_MV = (self.hidden @ self.head.T).float()
        if self.temperature != 1.0:
            logits_MV.div_(self.temperature)
        if self.ids is None:
            return torch.log_softmax(logits_MV, dim=-1)
        return logits_MV[:, self.ids].sub_(logits_MV.logsumexp(1, keepdim=True))
