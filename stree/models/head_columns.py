"""Columns of tokens in a head over a part of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor


def columns_of(tokens: Tensor, ids: Tensor) -> Tensor:
    """Return the columns (…) of tokens (…) in a head over ids (K,), ascending; K for no column."""
    columns = torch.searchsorted(ids, tokens).clamp(max=len(ids) - 1)
    return torch.where(ids[columns] == tokens, columns, len(ids))
