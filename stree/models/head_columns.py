"""Where a head that is over some tokens has them."""

from __future__ import annotations

import torch
from torch import Tensor


def columns_of(tokens: Tensor, ids: Tensor) -> Tensor:
    """The columns (…) of tokens (…) in a head over ids (K,), ascending; K for those that it has
    not."""
    columns = torch.searchsorted(ids, tokens).clamp(max=len(ids) - 1)
    return torch.where(ids[columns] == tokens, columns, len(ids))
