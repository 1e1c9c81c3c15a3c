"""Philox is exact: the kernel equals its twin bit for bit, and both equal the published words."""

import torch
from kernel_cases import DEVICE

from stree_kernels import naive, uniforms


def both(seeds, positions, places):
    arguments = [torch.tensor(each, device=DEVICE) for each in (seeds, positions, places)]
    got, wanted = uniforms.uniforms(*arguments), naive.uniforms(*arguments)
    assert torch.equal(got, wanted)
    return wanted.cpu()


def test_known_answers():
    """Random123's vector for philox4x32-10 of zeros."""
    value = float(both([0], [0], [[0]]))
    assert value == ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53


def test_every_argument_counts():
    seeds, positions = [0, 1, 2**40, 2**63 - 1, 1], [0, 7, 2**33, 5, 6]
    places = torch.arange(300).repeat(5, 1).tolist()
    values = both(seeds, positions, places)
    assert values.unique().numel() == values.numel()
    assert (values >= 0).all() and (values < 1).all()


def test_they_are_uniform_along_each_argument():
    """20 cells of 4,000 numbers each: χ² with 19 degrees of freedom, above 54 once in 30,000."""
    count = 80_000
    running, same = torch.arange(count), torch.zeros(count, dtype=torch.long)
    for arguments in (
        (same[:1] + 3, same[:1] + 5, running[None]),
        (same, running, same[:, None]),
        (running, same, same[:, None]),
    ):
        cells = torch.histc(naive.uniforms(*arguments), 20, 0, 1)
        assert float(((cells - count / 20) ** 2).sum() / (count / 20)) < 54
