"""Sizes that follow from a mixer's dimensions and a stream's parts, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from stree_kernels.contracts import Stream
from stree_kernels.shapes import MixerShape


@pytest.mark.parametrize(
    ("repeated", "scan_groups", "conv_dims"),
    [(False, (2, 1, 2), (16, 16, 32)), (True, (4, 4, 2), (32, 64, 32))],
)
def test_only_x_and_b_are_repeated_before_the_conv(repeated, scan_groups, conv_dims):
    shape = MixerShape(4, 8, 16, 2, 1, 2, 4, repeat_before_conv=repeated)
    assert (shape.scan_groups, shape.conv_dims) == (scan_groups, conv_dims)
    assert (shape.xbc_dims, shape.num_channels) == ((16, 16, 32), 64)  # projected and kept as it is
    assert (shape.d_inner, shape.num_kept, shape.tail) == (32, 68, 3)


@pytest.mark.parametrize(
    ("rows", "tokens", "nodes", "wanted"),
    [
        ((2, 3, 8), None, None, (2, 3)),
        ((11, 8), (2, 5), None, (2, 5)),
        ((11, 8), (2, 5), (2, 3), (2, 3)),
    ],
    ids=["rows", "tokens", "nodes of tokens"],
)
def test_a_stream_is_as_long_as_the_nodes_that_read_it(rows, tokens, nodes, wanted):
    tokens, nodes = (
        None if each is None else torch.zeros(each, dtype=torch.long) for each in (tokens, nodes)
    )
    assert Stream(torch.zeros(rows), tokens=tokens, nodes=nodes).shape == wanted
