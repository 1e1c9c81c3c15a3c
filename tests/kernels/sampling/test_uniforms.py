"""Philox is exact: the kernel equals its twin bit for bit, and both equal the published words."""

import torch
import triton
import triton.language as tl
from kernel_cases import DEVICE

from stree_kernels import naive
from stree_kernels.sampling.uniforms import uniform


@triton.jit
def uniforms_kernel(seeds, positions, places, out, count, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    place = tl.load(places + row * count + at, mask=at < count, other=0)
    value = uniform(tl.load(seeds + row), tl.load(positions + row), place)
    tl.store(out + row * count + at, value, mask=at < count)


def both(seeds, positions, places):
    arguments = [torch.tensor(each, device=DEVICE) for each in (seeds, positions, places)]
    wanted = naive.uniforms(*arguments)
    got, count = torch.empty_like(wanted), wanted.shape[1]
    uniforms_kernel[(len(seeds),)](*arguments, got, count, triton.next_power_of_2(count))
    assert torch.equal(got, wanted)
    return wanted.cpu()


def test_known_answers():
    """Philox4x32-10 of zeros gives Random123's vector."""
    value = float(both([0], [0], [[0]]))
    assert value == ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53


def test_every_argument_counts():
    seeds, positions = [0, 1, 2**40, 2**63 - 1, 1], [0, 7, 2**33, 5, 6]
    places = torch.arange(300).repeat(5, 1).tolist()
    values = both(seeds, positions, places)
    assert values.unique().numel() == values.numel()
    assert (values >= 0).all() and (values < 1).all()


def test_they_are_uniform_along_each_argument():
    """χ² of 20 cells of 4,000 numbers each is above 54 once in 30,000."""
    count = 80_000
    running, same = torch.arange(count), torch.zeros(count, dtype=torch.long)
    for arguments in (
        (same[:1] + 3, same[:1] + 5, running[None]),
        (same, running, same[:, None]),
        (running, same, same[:, None]),
    ):
        cells = torch.histc(naive.uniforms(*arguments), 20, 0, 1)
        assert float(((cells - count / 20) ** 2).sum() / (count / 20)) < 54


def noise(seeds, positions, num_tokens):
    seeds = torch.as_tensor(seeds)
    return naive.token_noise(seeds, torch.as_tensor(positions), num_tokens)


def test_noise_depends_on_seed_position_and_token_alone():
    values = noise([1, 2**40 + 1, 2**63 - 1], [[0, 7, 2**33]] * 3, 301)
    assert values.isfinite().all() and values.unique().numel() == values.numel()
    assert torch.equal(noise([2**40 + 1], [[7]], 12)[0, 0], values[1, 1, :12])


def test_noise_is_gumbel_along_each_argument():
    """exp(−exp(−g)) is uniform: χ² of 20 cells is above 54 once in 30,000."""
    count, same = 80_000, torch.zeros(80_000, dtype=torch.long)
    running = torch.arange(count)
    for values in (
        noise(same[:1] + 3, same[:1, None] + 5, count),
        noise(running, same[:, None], 1),
        noise(same[:1] + 4, running[None], 1),
        noise(same[:1] + 4, running[None], 2)[..., 1],
    ):
        cells = torch.histc((-(-values.flatten()).exp()).exp(), 20, 0, 1)
        assert float(((cells - count / 20) ** 2).sum() / (count / 20)) < 54


def test_the_best_k_are_samples_without_replacement():
    """χ² of the 12 ordered pairs of the two best of 4 tokens is above 39.8 once in 26,000."""
    logits, count = torch.tensor([0.3, -1.0, 1.1, 0.0]).double(), 60_000
    scores = logits + noise([5], torch.arange(count)[None], 4)[0]
    pairs = scores.topk(2).indices
    probs, statistic = logits.softmax(-1), 0.0
    for first in range(4):
        for second in set(range(4)) - {first}:
            wanted = float(count * probs[first] * probs[second] / (1 - probs[first]))
            got = int((pairs == torch.tensor([first, second])).all(1).sum())
            statistic += (got - wanted) ** 2 / wanted
    assert statistic < 39.8
