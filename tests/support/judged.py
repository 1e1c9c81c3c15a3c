"""Compare steps of fused verification with its naive twin, on the same rows and random numbers.

A twin's choices are enumerated: for each there is a row that makes it at the lower end of the
random numbers for which the twin does, and one at the upper end. Where the kernels commit the same
there, their distribution is the twin's but for `EDGE` a choice.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton.language as tl
from kernel_cases import DEVICE
from torch import Tensor

from stree.trees.build import make_tree_batch
from stree.trees.token_tree import TokenTree
from stree_kernels import naive
from stree_kernels.contracts import Sampling
from stree_kernels.sampling import verification
from stree_kernels.sampling.drafts import Drafts

EDGE = 1e-9


@dataclass
class Case:
    """A target's logits, drafts, and how rows sample."""

    rule: str
    logits: Tensor
    drafts: Drafts
    sampling: Sampling
    active: Tensor

    def committed(self, module, **options) -> list[tuple]:
        """List what `module` commits for each row: its part of the report, path, block and row."""
        batch, longest = len(self.logits), len(self.drafts.levels) + 1
        path, block, root, length = (
            torch.full((batch, size), -7, device=DEVICE)
            for size in (longest + 2, longest + 1, 1, 1)
        )
        report = torch.full((batch, 2 + 2 * longest), -7, device=DEVICE)
        sampling = replace(self.sampling, position=self.sampling.position.clone())
        module.accept_drafts(
            self.rule, self.logits, self.drafts, sampling, self.active,
            path, length[:, 0], block, root, report, **options,
        )
        seen = []
        for row, (code, count, *rest) in enumerate(report.tolist()):
            assert length[row] == count
            idle = (block[row] == -7).all() and root[row] == -7
            assert idle or block[row, : 1 + count].tolist() == [count, *rest[:count]]
            assert idle or root[row] == rest[count - 1]
            nodes = path[row, :count].tolist()
            assert nodes == rest[longest : longest + count]
            position = int(sampling.position[row] - self.sampling.position[row])
            seen.append((code, bool(idle), position, tuple(rest[:count]), tuple(nodes)))
        return seen


def case(
    rule: str, trees: list[TokenTree], logits: Tensor, drawn: Tensor | None, temperature: Tensor,
    tokens: Tensor, points: Tensor | None = None, independent: bool = False,
) -> Case:
    """Make a case whose rows all decode, from seeds 0, 1, … at position 7."""
    tree_batch, batch = make_tree_batch(trees, torch.device(DEVICE)), len(trees)
    levels = tuple((level.nodes, level.places) for level in tree_batch.levels)
    drafts = Drafts(
        tokens, tree_batch.parents, tree_batch.children, levels, drawn, tree_batch.drawn_by, points,
        None, independent,
    )
    seeds = torch.arange(batch, device=DEVICE)
    sampling = Sampling(temperature, seeds, torch.full_like(seeds, 7))
    return Case(rule, logits, drafts, sampling, torch.ones_like(seeds, dtype=torch.bool))


def enumerated(
    rule: str, tree: TokenTree, target: Tensor, drawn: Tensor | None, points=None, independent=False
):
    """Yield every step of a tree at temperature 1, with random numbers that lead to it.

    Each item is tokens (N,), a random number for each place of use, and what the twin commits.

    Args:
        target: logits (N, V) at the tree's nodes.
        drawn: logits (I, V) that the drafts were drawn from, None when nothing was drawn.
    """
    scripts: list[list[int]] = [[]]
    one = torch.ones(1, dtype=torch.float64)
    while scripts:
        script, taken = scripts.pop(), []
        ends: dict[int, tuple[float, float]] = {}

        def choose(probs, places=None):
            chosen = []
            for at, row in enumerate(probs.reshape(-1, probs.shape[-1]).tolist()):
                possible = [index for index, prob in enumerate(row) if prob > 4 * EDGE]
                if len(taken) < len(script):
                    index = script[len(taken)]
                else:
                    index = possible[0]
                    scripts.extend([*taken, other] for other in possible[1:])
                taken.append(index)
                chosen.append(index)
                if places is not None:
                    total, below = sum(row), sum(row[:index])
                    low, high = below / total, (below + row[index]) / total
                    ends[int(places.flatten()[at])] = (low + EDGE, high - EDGE)
            return torch.tensor(chosen).reshape(probs.shape[:-1])

        tokens = draw_tree(tree, target, drawn, points, independent, choose)
        made = case(
            rule, [tree], target[None], None if drawn is None else drawn[None], one, tokens[None],
            points, independent,
        )
        (wanted,) = made.committed(naive, choose=choose)
        for end in (0, 1):
            yield tokens, {place: each[end] for place, each in ends.items()}, wanted


def draw_tree(tree, target, drawn, points, independent, choose) -> Tensor:
    """Draw a tree's tokens (N,) with `choose`, siblings without replacement unless `independent`.

    Nodes where `points` is true get the target's worst tokens.
    """
    tokens = torch.zeros(tree.num_nodes, dtype=torch.long)
    drawn_by = make_tree_batch([tree], torch.device("cpu")).drawn_by[0]
    for node, children in enumerate(tree.children):
        left = None if drawn is None else drawn[drawn_by[node]].softmax(-1)
        for rank, child in enumerate(children):
            if left is None or (points is not None and points[0, child]):
                tokens[child] = target[node].argsort()[rank]
            elif left.sum() > 0:
                tokens[child] = choose(left / left.sum())
                left[tokens[child]] *= independent
    return tokens


def disagreements(
    rule, tree, target, drawn, points=None, independent=False, most: int = 10**9, at_once: int = 16
):
    """Count the enumerated steps where the kernels commit something else than the twin.

    At most `most` steps are compared, and it stops at the first `at_once` of which any differs.
    Returns that count, and how many steps were to be compared.
    """
    steps = list(enumerated(rule, tree, target, drawn, points, independent))
    order = torch.randperm(len(steps), generator=torch.Generator().manual_seed(0)).tolist()[:most]
    wrong = 0
    for first in range(0, len(order), at_once):
        some = [steps[at] for at in order[first : first + at_once]]
        batch = len(some)
        made = case(
            rule, [tree] * batch, target.expand(batch, -1, -1),
            None if drawn is None else drawn.expand(batch, -1, -1),
            torch.ones(batch, dtype=torch.float64), torch.stack([each[0] for each in some]),
            None if points is None else points.expand(batch, -1).contiguous(), independent,
        )
        numbers = [each[1] for each in some]
        with told(numbers):
            got = made.committed(verification)
        wrong += sum(mine != each[2] for mine, each in zip(got, some, strict=True))
        if wrong:
            break
    return wrong, len(order)


class told:
    """Sets the kernels' random numbers, in a `with` block, to numbers[seed][place].

    Where there is none it is 0.5.
    """

    def __init__(self, numbers) -> None:
        self.numbers = numbers

    def __enter__(self) -> None:
        self.real = verification.uniform

        def uniform(seed, position, place):
            own = self.numbers[int(seed.handle.data.item())]
            value = place.to(tl.float64)
            values = [own.get(int(each), 0.5) for each in place.handle.data.flatten()]
            value.handle.data[:] = torch.tensor(values, dtype=torch.float64).numpy()
            return value

        verification.uniform = uniform

    def __exit__(self, *_) -> None:
        verification.uniform = self.real


@functools.cache
def distributions(seed: int, tree: TokenTree, relation: str = "random", vocabulary: int = 3):
    """Make logits (N, V) of a target and (I, V) of a drafter from a seed.

    `relation`: random, with zeros, with ties, equal, or without a token in common.
    """
    generator = torch.Generator().manual_seed(seed)
    inner = sum(1 for each in tree.children if each)

    def normal(size: int) -> Tensor:
        shape = (size, vocabulary)
        return 1.5 * torch.randn(shape, generator=generator, dtype=torch.float64)

    target, drawn = normal(tree.num_nodes), normal(inner)
    if relation == "zeros":
        target[:, seed % vocabulary] = -torch.inf
        drawn[:, (seed + 1) % vocabulary] = -torch.inf
    elif relation == "ties":
        target, drawn = target.round(), drawn.round()
    elif relation == "disjoint":
        target[:, ::2], drawn[:, 1::2] = -torch.inf, -torch.inf
    elif relation == "equal":
        nodes = [node for node, each in enumerate(tree.children) if each]
        drawn = target[nodes].clone()
    return target, drawn


def sampled_tree(trees, logits, drawn, temperature) -> Tensor:
    """Draw the tokens (B, N) of trees as a drafter does, by the product's op."""
    tree_batch = make_tree_batch(trees, torch.device(DEVICE))
    batch = len(trees)
    tokens = torch.zeros(batch, tree_batch.num_nodes, dtype=torch.long, device=DEVICE)
    seeds = torch.arange(batch, device=DEVICE) + 100
    sampling = Sampling(temperature, seeds, torch.full_like(seeds, 7))
    done = 0
    for level in tree_batch.levels:
        count = level.nodes.shape[1]
        finite = torch.zeros(batch, count, dtype=torch.bool, device=DEVICE)
        naive.choose_children(
            drawn[:, done : done + count], level.noise_at(True), sampling, level.places, tokens,
            finite,
        )
        done += count
    return tokens
