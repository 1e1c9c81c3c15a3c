"""A small head's product with the best tokens of it, in two launches, against four of the twin."""

import math

import pytest
import torch
from kernel_cases import DEVICE, normal, relative_error
from lanes import costly

from stree_kernels import naive
from stree_kernels.contracts import Sampling, Stream
from stree_kernels.products import head
from stree_kernels.sampling import top


def drawn(draw, x, temperatures, count, ids=None):
    """Return the logits, tokens and finite flags of `draw`, whose last draft has no place (-1)."""
    batch, num_nodes = x.shape[:2]
    sampling = None
    if temperatures is not None:
        sampling = Sampling(
            torch.tensor(temperatures, dtype=torch.float64, device=DEVICE),
            torch.tensor([3 + 2**40 * row for row in range(batch)], device=DEVICE),
            torch.tensor([2**33 + 7 * row for row in range(batch)], device=DEVICE),
        )
    depths = torch.arange(num_nodes, dtype=torch.int32, device=DEVICE).expand(batch, -1)
    places = torch.arange(1, 1 + num_nodes * count, device=DEVICE).view(1, num_nodes, count)
    places = places.repeat(batch, 1, 1)
    places[-1, -1, -1] = -1
    tokens = torch.full((batch, 2 + num_nodes * count), -7, device=DEVICE)
    finite = torch.zeros(batch, num_nodes + 1, dtype=torch.bool, device=DEVICE)[:, :num_nodes]
    logits = draw(x, depths.contiguous(), sampling, places, tokens, finite, ids=ids)
    return logits, tokens, finite


def by(weight):
    return lambda x, *others, ids: head.draw_children(x, weight, *others, ids=ids)


@pytest.mark.quick(2)
@pytest.mark.parametrize("temperatures", [None, (1.0, 0.0, 0.7)], ids=str)
@pytest.mark.parametrize("of_some", [False, True])
@pytest.mark.parametrize("num_nodes, count", [(2, 1), costly(1, 3), costly(5, 4)])
def test_children_are_the_best_of_the_logits(num_nodes, count, of_some, temperatures):
    """They are compared by the returned logits, as rounding decides which of two nearly equal ones
    is the best."""
    width, vocabulary = 200, 333
    weight = normal(vocabulary, width, seed=3, dtype=torch.bfloat16)
    ids = None
    if of_some:
        order = torch.randperm(2000, generator=torch.Generator().manual_seed(4))
        ids = order[:vocabulary].sort().values.to(DEVICE)
    x = normal(3, num_nodes, width, dtype=torch.bfloat16)
    added, scale = normal(1, *x.shape, seed=1, dtype=torch.bfloat16), normal(width, seed=2)
    wide = Stream(x.double(), scale.double(), 1e-5, added.double())
    for given in (x, Stream(x, scale, 1e-5, added)):
        logits, tokens, finite = drawn(by(weight), given, temperatures, count, ids)
        exact = naive.linear(wide if isinstance(given, Stream) else x.double(), weight.double())
        assert relative_error(logits, exact) < 8 * 2**-8
        wanted = drawn(top.choose_children, logits, temperatures, count, ids)
        assert torch.equal(tokens, wanted[1]) and torch.equal(finite, wanted[2])
        assert finite.all()


@pytest.mark.parametrize("temperatures", [None, (1.0, 0.0)], ids=str)
def test_what_is_not_finite_shows(temperatures):
    weight = normal(333, 64, seed=3, dtype=torch.bfloat16)
    for value in (math.nan, math.inf):
        x = normal(2, 2, 64, dtype=torch.bfloat16)
        x[1, 0, 5] = value
        _, _, finite = drawn(by(weight), x, temperatures, 3)
        assert finite.tolist() == [[True, True], [False, True]]


def test_ties_go_to_the_smaller_token():
    weight = torch.ones(333, 64, device=DEVICE, dtype=torch.bfloat16)
    _, tokens, _ = drawn(by(weight), normal(1, 1, 64, dtype=torch.bfloat16), None, 3)
    assert tokens[0, 1:3].tolist() == [0, 1]
