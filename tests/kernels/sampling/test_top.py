"""The chosen tokens of a row against `topk`: exact, ties to the lowest id, NaN reported."""

import itertools
import math

import pytest
import torch
from kernel_cases import DEVICE, normal
from lanes import quick_first

from stree_kernels import naive
from stree_kernels.contracts import Sampling, Slots
from stree_kernels.sampling import top


def depths_like(logits, depth=0):
    return torch.full(logits.shape[:2], depth, dtype=torch.int32, device=DEVICE)


def best_of(logits, count):
    """Return the `count` best of rows (n, V), and finite, through places of their own tree."""
    places = torch.arange(1, 1 + len(logits) * count, device=DEVICE).view(1, len(logits), count)
    tokens = torch.zeros(1, 1 + places.numel(), dtype=torch.long, device=DEVICE)
    finite = torch.zeros(1, len(logits), dtype=torch.bool, device=DEVICE)
    top.choose_children(logits[None], depths_like(logits[None]), None, places, tokens, finite)
    return tokens[0, 1:].view(-1, count), finite[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [5, 4096, 9001])
def test_best_tokens(vocabulary, dtype):
    wide = normal(3, vocabulary + 2, dtype=dtype)
    logits = wide[:, :vocabulary]
    logits[1] = logits[1].round()  # ties
    for count in (1, 4):
        tokens, _ = best_of(logits, count)
        wanted = logits.float().topk(count, dim=-1).values
        assert torch.equal(logits.float().gather(1, tokens), wanted)
        assert all(len(set(row)) == count for row in tokens.tolist())
    first = (logits[1] == logits[1].max()).nonzero()[0]
    best, highest = top.choose_best(logits[None], depths_like(logits[None]), None)
    assert best[0, 1] == first and torch.equal(highest[0], logits.float().amax(-1))
    logits[2, vocabulary // 2] = torch.nan
    for module in (naive, top):
        _, highest = module.choose_best(logits[None], depths_like(logits[None]), None)
        assert highest[0].isfinite().tolist() == [True, True, False]
    assert best_of(logits, 2)[1].tolist() == [True, True, False]
    logits[0] = -torch.inf
    tokens, finite = best_of(logits, 3)
    assert tokens[0].tolist() == [0, 1, 2] and not finite[0]


@pytest.mark.parametrize("count", [8, 9, 70, 255])
def test_best_tokens_of_wide_trees(count):
    logits = torch.randperm(5001, generator=torch.Generator().manual_seed(count)).float()
    tokens, finite = best_of(logits[None].to(DEVICE), count)
    assert tokens[0].tolist() == logits.topk(count).indices.tolist() and finite.all()


def sampling_of(temperatures):
    def row(values, dtype):
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    seeds = [3 + 2**40 * at for at in range(len(temperatures))]
    return Sampling(
        row(temperatures, torch.float64), row(seeds, torch.long), row([7, 2**33, 0], torch.long)
    )


@pytest.mark.parametrize(
    "vocabulary, dtype",
    quick_first(
        [(2901, torch.bfloat16)],
        [(vocabulary, dtype) for vocabulary in (5, 1024, 2901)
         for dtype in (torch.float32, torch.bfloat16)],
        [(5, torch.bfloat16), (1024, torch.float32)],
    ),
)
def test_rows_that_sample(vocabulary, dtype):
    """Kernel and twin choose the same tokens, for each sequence by its own settings."""
    wide = normal(3, 6, vocabulary + 3, dtype=dtype)
    logits, sampling = wide[..., :vocabulary], sampling_of([0.7, 0.0, 1.5])
    logits[1] = logits[1].argsort(-1).argsort(-1).to(dtype) / 64  # few ties, whose order may differ
    depths = torch.tensor([[0, 1, 1, 2, 3, 1]] * 3, dtype=torch.int32, device=DEVICE)
    best, highest = top.choose_best(logits, depths, sampling)
    wanted, score = naive.choose_best(logits, depths, sampling)
    assert torch.equal(best[[0, 2]], wanted[[0, 2]])
    torch.testing.assert_close(highest.double(), score, rtol=1e-6, atol=1e-6)
    assert torch.equal(logits[1].float().amax(-1), highest[1].float())
    greedy, _ = top.choose_best(logits, depths, None)
    assert torch.equal(best[1], greedy[1]) and not torch.equal(best[0], greedy[0])
    places = torch.tensor([[[1, 2, 9], [3, -1, -1], [4, 5, 6]]] * 3, device=DEVICE)
    places[1, 0] = torch.tensor([8, 7, -1])
    results = []
    for module in (naive, top):
        tokens = torch.full((3, 12), -7, device=DEVICE)
        finite = torch.zeros(3, 5, dtype=torch.bool, device=DEVICE)
        some, levels = logits[:, :3], depths[:, :3].contiguous()
        module.choose_children(some, levels, sampling, places, tokens, finite[:, 1:4])
        assert finite.tolist() == [[False, True, True, True, False]] * 3
        results.append(tokens)
    assert torch.equal(results[0][[0, 2]], results[1][[0, 2]])
    assert torch.equal(results[1][:, 3], top.choose_best(logits, depths, sampling)[0][:, 1])
    logits[0, 0, 1] = torch.nan
    assert not top.choose_best(logits, depths, sampling)[1][0, 0].isfinite()
    logits[2, 0] = -torch.inf
    assert not top.choose_best(logits, depths, sampling)[1][2, 0].isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [5, 4096, 9001])
def test_choose_children(vocabulary, dtype):
    """Rows have fewer children than the widest, in no order; other nodes keep their tokens."""
    logits = torch.stack([
        torch.randperm(vocabulary, generator=torch.Generator().manual_seed(row)) for row in range(4)
    ]).to(DEVICE, torch.float32)
    logits = torch.linspace(-3, 3, vocabulary, device=DEVICE)[logits.long()].to(dtype)
    wide = torch.full((2, 2, vocabulary + 3), torch.nan, device=DEVICE, dtype=dtype)
    wide[..., :vocabulary] = logits.view(2, 2, -1)
    logits = wide[..., :vocabulary]
    logits[1, 0, vocabulary // 2] = torch.nan
    logits[1, 1, 1] = torch.inf
    places = torch.tensor(
        [[[8, 2, -1], [3, -1, -1]], [[-1, -1, -1], [1, 5, 6]]], device=DEVICE
    )
    results = []
    for module in (naive, top):
        tokens = torch.full((2, 11), -7, device=DEVICE)
        finite = torch.tensor([[False, False, True, False]] * 2, device=DEVICE)
        arguments = (logits, depths_like(logits), None, places, tokens[:, 1:10], finite[:, 1:3])
        module.choose_children(*arguments)
        assert finite.tolist() == [[False, True, True, False], [False, False, False, False]]
        assert (tokens[0, [0, 1, 2, 5, 6, 7, 8, 10]] == -7).all()  # what no row has
        results.append(tokens)
    if dtype == torch.float32:  # no ties, whose order is the twin's own
        assert torch.equal(*results)


@pytest.mark.parametrize("vocabulary", [5, 2500])
@pytest.mark.parametrize("temperatures", [None, [0.7, 0.0, 1.5]], ids=["greedy", "sampled"])
def test_paths_values_are_sums_of_log_shares(temperatures, vocabulary):
    """Values are the softmax's of logits + temperature · noise in fp64, plus the parent's."""
    logits = 3 * normal(3, 2, vocabulary)
    logits[0, 1, 0] = -torch.inf
    sampling = temperatures and sampling_of(temperatures)
    depths = torch.tensor([[0, 1]] * 3, dtype=torch.int32, device=DEVICE)
    places = torch.tensor([[[2, 5, 4], [7, 6, -1]]] * 3, device=DEVICE)
    nodes = torch.tensor([[0, 3]] * 3, device=DEVICE)
    before = -torch.arange(27.0, device=DEVICE).view(3, 9)
    for module in (naive, top):
        values, tokens = before.clone(), torch.zeros(3, 8, dtype=torch.long, device=DEVICE)
        finite = torch.zeros(3, 2, dtype=torch.bool, device=DEVICE)
        module.choose_children(
            logits, depths, sampling, places, tokens, finite, nodes, values[:, :8]
        )
        wanted = before.double()
        for row, at, rank in ((r, a, k) for r in range(3) for a in range(2) for k in range(3)):
            temperature = temperatures[row] if temperatures else 0.0
            perturbed = logits[row, at].double()
            if temperature:
                position = sampling.position[row, None, None] + 1 + at
                noise = naive.token_noise(sampling.seed[row, None], position[0], vocabulary)
                perturbed = perturbed + temperature * noise[0, 0]
            place = int(places[row, at, rank])
            if place >= 0:
                share = perturbed.log_softmax(-1)[tokens[row, place]]
                wanted[row, place] = before[row, nodes[row, at]] + share
        torch.testing.assert_close(values.double(), wanted, rtol=1e-5, atol=1e-5)
        assert finite.all()


@pytest.mark.parametrize("temperatures", [None, [0.7, 0.0, 1.5]], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_ids", [6, 1500])
def test_some_tokens_are_drawn_as_of_all_where_the_others_have_none(num_ids, temperatures):
    """Columns of some tokens and the whole with −∞ elsewhere choose the same tokens, by their own
    noise, and paths have the same values."""
    ids = torch.randperm(4000, generator=torch.Generator().manual_seed(1))[:num_ids].sort().values
    ids = ids.to(DEVICE)
    logits = normal(3, 2, num_ids)
    whole = torch.full((3, 2, 4001), -torch.inf, device=DEVICE).index_copy(2, ids, logits)
    sampling = temperatures and sampling_of(temperatures)
    depths = torch.tensor([[0, 1]] * 3, dtype=torch.int32, device=DEVICE)
    places = torch.tensor([[[2, 5, 4], [7, 6, -1]]] * 3, device=DEVICE)
    nodes = torch.tensor([[0, 3]] * 3, device=DEVICE)
    results = []
    for module, columns, own in ((naive, whole, None), (naive, logits, ids), (top, logits, ids)):
        values, tokens = torch.zeros(3, 8, device=DEVICE), torch.full((3, 8), -7, device=DEVICE)
        finite = torch.zeros(3, 2, dtype=torch.bool, device=DEVICE)
        module.choose_children(
            columns, depths, sampling, places, tokens, finite, nodes, values, own
        )
        assert finite.all()
        results.append((tokens, values))
    for tokens, values in results[1:]:
        assert torch.equal(tokens, results[0][0])
        torch.testing.assert_close(values, results[0][1], rtol=1e-5, atol=1e-5)


@pytest.mark.quick(4)
@pytest.mark.parametrize("temperatures", [None, [0.7, 0.0, 1.5]], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_ids", [None, 37])
@pytest.mark.parametrize(
    ("nodes", "width", "vocabulary", "kind"),
    [(3, 4, 50, "random"), (1, 1, 50, "random"), (2, 7, 5001, "random"), (3, 4, 50, "one token"),
     (3, 4, 50, "few tokens"), (1, 9, 2500, "random")],
)
def test_slots_are_worth_what_their_elder_siblings_leave(
    nodes, width, vocabulary, kind, num_ids, temperatures
):
    """Twin and kernel give the values that fp64 gives by hand, without the tokens' noise."""
    generator = torch.Generator().manual_seed(nodes + width)
    ids = None
    if num_ids is not None:
        ids = torch.randperm(vocabulary, generator=generator)[:num_ids].sort().values.to(DEVICE)
    columns = vocabulary if ids is None else len(ids)
    logits = 3 * torch.randn(3, nodes, columns, generator=generator)
    if kind == "one token":
        logits[..., 1] = 200.0
    elif kind == "few tokens":
        logits[..., 3:] = -torch.inf
    size = 1 + nodes * (width + 1)
    above = torch.arange(1, 1 + nodes, device=DEVICE).repeat(3, 1)
    places = (1 + nodes + torch.arange(nodes * width, device=DEVICE)).view(nodes, width)
    places = places.repeat(3, 1, 1)
    paths = -torch.rand(3, size, generator=generator)
    drawn_at = (0.7, 1.0, 1.5)
    temperature = torch.tensor([0.7, 0.0, 1.5], dtype=torch.float64, device=DEVICE)
    for module in (naive, top):
        reached, worth = (each.clone().to(DEVICE) for each in (paths, torch.zeros(3, size)))
        tokens = torch.zeros(3, size, dtype=torch.long, device=DEVICE)
        finite = torch.zeros(3, nodes, dtype=torch.bool, device=DEVICE)
        module.choose_children(
            logits.to(DEVICE), torch.zeros(3, nodes, dtype=torch.int32, device=DEVICE),
            temperatures and sampling_of(temperatures), places, tokens, finite, above, reached, ids,
            Slots(worth, temperature),
        )
        for row, node in itertools.product(range(3), range(nodes)):
            chosen = tokens[row, places[row, node]]
            if ids is not None:
                chosen = torch.searchsorted(ids, chosen)
            probs = (logits[row, node].double() / drawn_at[row]).softmax(-1)[chosen.cpu()]
            left, start = 1.0, math.exp(paths[row, 1 + node])
            for rank, place in enumerate(places[row, node].tolist()):
                slot, path = float(worth[row, place]), float(reached[row, place])
                assert math.exp(slot) == pytest.approx(start * max(left, 0), rel=1e-4, abs=1e-5)
                wanted = min(start * float(probs[rank]), start * max(left, 0))
                assert math.exp(path) == pytest.approx(wanted, rel=1e-4, abs=1e-5)
                assert path <= slot <= paths[row, 1 + node] + 1e-6
                left -= float(probs[rank])
