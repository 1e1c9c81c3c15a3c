"""Bounds of packed samples."""

from __future__ import annotations

import torch

from stree_kernels.segments import sample_bounds


def test_bounds_are_where_samples_begin_in_the_rows_laid_end_to_end():
    segment_ids = torch.tensor([[0, 0, 0, 1, 1], [1, 2, 2, 2, 2]])  # a row begins a sample
    bounds = sample_bounds(segment_ids)
    assert bounds.tolist() == [0, 3, 5, 6, 10] and bounds.dtype == torch.int32
