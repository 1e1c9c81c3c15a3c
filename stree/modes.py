"""Which tree a step has, by measured cost: of several trees, the chain and plain decoding among
them, the one with the most expected tokens by time for as many rows as are active.

A small tree is best for many rows and a large one for few, and how well drafts are accepted changes
with the text: so the choice is made again and again, from what each depth and rank of a draft was
accepted lately, and changed seldom.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from stree.costs import Costs
from stree.description import device_name, dtype_name
from stree.errors import UsageError
from stree.forest import Forest
from stree.generation import GenerationConfig
from stree.models.cache import SavedPrefix
from stree.rows import Rows
from stree.tree import BeamTree, TokenTree, as_tree

if TYPE_CHECKING:
    from stree.batch import BatchDecoder

HYSTERESIS = 0.01  # what another tree must promise more, to be changed to
PROBE_SHARE = 0.01  # of the time that may be lost to see whether drafts have become better
LEAST_LOSS = 0.3  # of a step, that one with another tree counts as losing
PROBE_STEPS = 4  # steps with a tree, one after the other, that make a probe
MEMORY = 0.99  # what a row's observation counts one step later
ANSWERS_MEMORY = 0.95  # what an answer counts one answer later
REVISED_AFTER = 8  # steps, since working out what to expect takes the host as long as one does
TRIED_FIRST = 8  # observations of each tree that shows what no other does, before any is judged
NUM_TIMINGS = 5
NUM_UNTIMED = 2  # first steps of a timing
MOST_CONTEXT = 32  # tokens before it, unless told
PRIOR_TRIES = 2  # what is assumed of a rate counts as so many observations
PRIOR_STEPS = 10  # what is assumed of a rank counts as so many steps
PLAIN = TokenTree.chain(0, "plain")


class AcceptRates:
    """How often the child of each rank is what the target says, by depth; the latest count most.

    Whether a child of some rank is accepted, given its parent, does not depend on what other
    children there are, so what one tree shows is true of all. What the trees of late have not
    shown is forgotten, too, and taken to be as at the depth above: where text has become easier
    for the drafter it has at all depths.
    """

    def __init__(self) -> None:
        self._tried: dict[tuple[int, int], float] = defaultdict(float)
        self._accepted: dict[tuple[int, int], float] = defaultdict(float)
        # Each observation weighs more than the one before it, so that none has to be made less
        self._weight = 1.0
        # Observations that are not worked in yet: batches have many in each step
        self._ended: dict[tuple[TokenTree, int], float] = defaultdict(float)

    def learn(self, tree: TokenTree, end: int, memory: float = MEMORY) -> None:
        """A step of `tree` has accepted the path to the node `end`; memory, what each observation
        before counts now. Plain decoding shows nothing, and nothing is forgotten meanwhile."""
        if tree.num_nodes == 1:
            return
        self._weight /= memory
        self._ended[tree, end] += self._weight
        if self._weight > 1e100:
            self._work_in()
            for counts in (self._tried, self._accepted):
                counts.update({key: count / self._weight for key, count in counts.items()})
            self._weight = 1.0

    def _work_in(self) -> None:
        for (tree, end), weight in self._ended.items():
            path = [*tree.path_to(end), -1]
            for depth, (node, child) in enumerate(itertools.pairwise(path)):
                for rank, each in enumerate(tree.children[node]):
                    self._tried[depth, rank] += weight
                    self._accepted[depth, rank] += weight * (each == child)
        self._ended.clear()

    def rate(self, depth: int, rank: int) -> float:
        """Assumed, and worth as much as PRIOR_TRIES observations: that of the depth above; at
        first ½ for the first rank, and half as much for each further one."""
        self._work_in()
        return self._rate(depth, rank)

    def _rate(self, depth: int, rank: int) -> float:
        assumed = self._rate(depth - 1, rank) if depth else 0.5 ** (rank + 1)
        weight = PRIOR_TRIES * self._weight
        accepted = self._accepted[depth, rank] + weight * assumed
        return accepted / (self._tried[depth, rank] + weight)

    def expected_tokens(self, tree: TokenTree) -> float:
        """Of a step: its drafts that are accepted, and the target's own token."""
        self._work_in()
        reached = [1.0] * tree.num_nodes
        for node, children in enumerate(tree.children):
            for rank, child in enumerate(children):
                reached[child] = reached[node] * self._rate(tree.depths[node], rank)
        return sum(reached)


class GrownRates:
    """How often the n-th best node is accepted of trees that grow with one width, as deep as the
    deepest of them; the latest steps count most.

    The smaller of two trees of one depth is the first nodes of the larger, so what a tree shows is
    true of all smaller ones. Of ranks that were tried little it is assumed that they go on from
    those next to them, the n-th best node as 1/n. A tree that is less deep is taken to accept as
    much less as paths end above its depth: what it misses shows in the deeper ones, and how often a
    path goes on from one depth to the next in all that have both.
    """

    def __init__(self, depth: int, num_nodes: int) -> None:
        """depth and num_nodes, the most of any such tree."""
        ranks = np.arange(num_nodes).clip(min=1)
        self._share = 1 / ranks
        # Twice or half the rank counts a sixteenth
        self._near = 16.0 ** -np.abs(np.log2(ranks[:, None] / ranks))
        # Each observation weighs more than the one before it, so that none has to be made less
        self._weight = 1.0
        self._trees = np.zeros(num_nodes + 1)  # by number of nodes
        self._accepted = np.zeros(num_nodes)
        self._paths = [TokenTree.chain(each) for each in range(depth + 1)]
        self._going_on = AcceptRates()
        self._parts = self._parts_by_depth()

    def learn(self, tree: BeamTree, path: Sequence[int], memory: float = MEMORY) -> None:
        """A step of a tree has accepted the nodes on a path, the root included; memory, what each
        observation before counts now."""
        self._going_on.learn(self._paths[tree.depth], len(path) - 1, memory)
        self._weight /= memory
        self._trees[tree.num_nodes] += self._weight * self._parts[tree.depth]
        for node in path[1:]:
            self._accepted[node] += self._weight
        if self._weight > 1e100:
            self._trees /= self._weight
            self._accepted /= self._weight
            self._weight = 1.0

    def revise(self) -> None:
        """Work out what is expected now."""
        self._parts = self._parts_by_depth()
        trees, accepted = self._trees / self._weight, self._accepted / self._weight
        tried = trees[:0:-1].cumsum()[::-1]  # node n, in trees of more than n nodes
        tried[0] = 0.0
        promised = self._near @ (self._share * tried)
        scale = (self._near @ accepted + 0.005) / (promised + 0.01)  # ½ to begin with
        prior = (scale * self._share).clip(max=1.0)
        rates = (accepted + PRIOR_STEPS * prior) / (tried + PRIOR_STEPS)
        rates[0] = 0.0  # the root
        self._drafts = rates.cumsum().tolist()

    def expected_tokens(self, tree: BeamTree) -> float:
        """Of a step, as of the last time that it was worked out."""
        return 1.0 + self._parts[tree.depth] * self._drafts[tree.num_nodes - 1]

    def _parts_by_depth(self) -> list[float]:
        """What trees of each depth accept, by what the deepest ones do."""
        drafts = [self._going_on.expected_tokens(each) - 1 for each in self._paths]
        return [each / drafts[-1] for each in drafts]


class Mean:
    """Of numbers of which the latest count most; `first` while there are none."""

    def __init__(self, first: float) -> None:
        self.value, self._weight = first, 0.0

    def learn(self, number: float) -> None:
        self._weight = ANSWERS_MEMORY * self._weight + 1
        share = 1 / self._weight
        self.value = number if share == 1 else self.value + share * (number - self.value)


class Modes:
    """Chooses among trees; plain decoding is always one of them.

    What drafting takes is its steps and, once for each request, the drafter's reading of the
    prompt: with many rows and short answers the latter decides. While plain decoding is best,
    drafters read no prompts (`drafts`).

    Args: trees, at most one a step for all rows that leave it to the decoder; costs, as measured
    by `BatchDecoder.measure_costs`.
    """

    def __init__(self, trees: Sequence[TokenTree | str], costs: Costs | None = None) -> None:
        given = dict.fromkeys(tree for tree in map(as_tree, trees) if tree.num_nodes > 1)
        if not given:
            raise UsageError(
                "modes without a tree: give one at least, to choose it or plain decoding"
            )
        self.trees = (PLAIN, *given)
        self._speeds: dict[int, dict[TokenTree, float]] = {}  # by number of rows
        self._answer_tokens = Mean(math.inf)
        self.costs = costs or Costs()
        self.rates = AcceptRates()
        self._telling = telling(self.trees[1:])
        self._untried = dict.fromkeys(self._telling, TRIED_FIRST)  # observations that are missing
        grown: dict[tuple[str, int], list[BeamTree]] = defaultdict(list)
        for tree in self.trees:
            if isinstance(tree, BeamTree):
                grown[tree.kind, tree.width].append(tree)
        self._grown = {
            key: GrownRates(max(t.depth for t in trees), max(t.num_nodes for t in trees))
            for key, trees in grown.items()
        }
        self._unseen_s = dict.fromkeys(self._telling, 0.0)  # since such a tree was tried
        self._expected: dict[TokenTree, float] = {}
        self._news = 0  # observations that it does not know of
        self._num_rows = 1  # of the last step: as many observations are one step
        self._revise()
        self.current = self.trees[-1]
        self._plain_s = 0.0  # since the last probe
        self._missed_s = 0.0  # of those, what drafting would have saved since it is best
        self._probing = 0  # steps of a probe that are left
        self._probed = deque(self._telling)  # the next probe's tree first

    def __str__(self) -> str:
        return " or ".join(tree.name for tree in self.trees[1:])

    @property
    def costs(self) -> Costs:
        return self._costs

    @costs.setter
    def costs(self, costs: Costs) -> None:
        self._costs, self._speeds = costs, {}
        self._reading_s = Mean(costs.catch_up)  # a request, by the drafter

    @property
    def drafts(self) -> bool:
        """Whether drafters have to read new prompts."""
        return self.current != PLAIN

    def choose(self, num_rows: int) -> TokenTree:
        """The tree of the next step of so many rows."""
        self._num_rows = num_rows
        if self._probing == 1 or self._news >= REVISED_AFTER * num_rows:
            self._revise()  # by what a probe has shown, or late steps
        speed = self._speed(num_rows)
        for tree in self._untried:
            if self._might_pay(tree, num_rows):
                return tree
        best = max(self.trees, key=speed.__getitem__)
        if self._probing:
            self._probing -= 1
            if not self._probing:
                self.current = best
        elif speed[best] > speed[self.current] * (1 if best == PLAIN else 1 + HYSTERESIS):
            if self.current != PLAIN or self._pays_for_reading(best, num_rows):
                self.current = best
        else:
            self._missed_s = 0.0
        if self.current == PLAIN:
            self._consider_a_probe(num_rows)
            return self.current
        self._missed_s = 0.0
        return self._unseen(num_rows) or self.current

    def _might_pay(self, tree: TokenTree, num_rows: int) -> bool:
        """Whether it would be faster than plain decoding were all of it accepted."""
        most = self._speed_of(num_rows, tree, tree.max_depth + 1)
        return most > self._speed_of(num_rows, PLAIN, 1.0)

    def _pays_for_reading(self, tree: TokenTree, num_rows: int) -> bool:
        """Whether steps that were plain instead of a tree's have lost what all rows' drafter takes
        to read what it has missed: then so much is given for the change, and not more often."""
        speed = self._speed(num_rows)
        self._missed_s += self.costs.of(num_rows, PLAIN) * (1 - speed[PLAIN] / speed[tree])
        return self._missed_s >= num_rows * self._reading_s.value

    def learn(self, tree: TokenTree, end: int) -> None:
        """A row's step of `tree` has accepted the path to the node `end`."""
        if tree.num_nodes == 1:
            return  # it shows nothing, of each row in each step where plain decoding is best
        if not isinstance(tree, BeamTree):
            self.rates.learn(tree, end, self._memory)
        self._count(tree)

    def learn_path(self, tree: TokenTree, path: Sequence[int]) -> None:
        """`learn`, given the accepted nodes, the root first. Of trees that grow these are ranks."""
        if isinstance(tree, BeamTree):
            self._grown[tree.kind, tree.width].learn(tree, path, self._memory)
        self.learn(tree, tree.end_of(path))

    def learn_answer(self, num_tokens: int, reading_s: float | None = None) -> None:
        """A request has got so many tokens; reading_s, what the drafter took to read for it, unless
        it did not."""
        self._answer_tokens.learn(max(num_tokens, 1))
        if reading_s is not None:
            self._reading_s.learn(reading_s)
        self._speeds = {}

    def _count(self, tree: TokenTree) -> None:
        """An observation of a tree: now and then expectations follow from all of them."""
        if tree in self._untried:
            self._untried[tree] -= 1
            if not self._untried[tree]:
                del self._untried[tree]
        self._news += 1

    @property
    def _memory(self) -> float:
        """What an observation counts one later: of many rows each is a small part of a step."""
        return MEMORY ** (1 / self._num_rows)

    def expected_tokens(self, tree: TokenTree) -> float:
        """Of a step, by what was accepted lately."""
        found = self._expected.get(tree)
        return self.rates.expected_tokens(tree) if found is None else found

    def _revise(self) -> None:
        for grown in self._grown.values():
            grown.revise()
        self._expected = {
            tree: self._grown[tree.kind, tree.width].expected_tokens(tree)
            if isinstance(tree, BeamTree)
            else self.rates.expected_tokens(tree)
            for tree in self.trees
        }
        self._speeds, self._news = {}, 0

    def _speed(self, num_rows: int) -> dict[TokenTree, float]:
        """Expected tokens a second and row, by tree."""
        if num_rows not in self._speeds:
            self._speeds[num_rows] = {
                tree: self._speed_of(num_rows, tree, tokens)
                for tree, tokens in self._expected.items()
            }
        return self._speeds[num_rows]

    def _speed_of(self, num_rows: int, tree: TokenTree, tokens: float) -> float:
        """Tokens a second and row of steps that yield so many, and of reading for all rows what
        these take of the drafter's prompts."""
        seconds = self.costs.of(num_rows, tree)
        if tree != PLAIN:
            seconds += num_rows * self._reading_s.value * tokens / self._answer_tokens.value
        return tokens / seconds

    def _unseen(self, num_rows: int) -> TokenTree | None:
        """Now and then a tree that alone shows what it accepts: the less it seems to lose, the more
        often."""
        speed = self._speed(num_rows)
        for tree in self._telling:
            if tree == self.current:
                self._unseen_s[tree] = 0.0
                continue
            self._unseen_s[tree] += self.costs.of(num_rows, self.current)
            slower = max(1 - speed[tree] / speed[self.current], LEAST_LOSS)
            if self._unseen_s[tree] > slower * self.costs.of(num_rows, tree) / PROBE_SHARE:
                self._unseen_s[tree] = 0.0
                return tree
        return None

    def _consider_a_probe(self, num_rows: int) -> None:
        """In turns: if only what looks best is tried, no other tree can show that it is better."""
        self._plain_s += self.costs.of(num_rows, PLAIN)
        tree = self._probed[0]
        lost = PROBE_STEPS * self.costs.of(num_rows, tree) + num_rows * self._reading_s.value
        if self._plain_s > lost / PROBE_SHARE:
            self._plain_s, self._probing, self.current = 0.0, PROBE_STEPS, tree
            self._probed.rotate(-1)


def trees_of(growth: TokenTree | Modes) -> tuple[TokenTree, ...]:
    """Those that a step may have: the tree itself, or what is chosen among."""
    return growth.trees if isinstance(growth, Modes) else (growth,)


def deepest_of(growth: TokenTree | Modes) -> TokenTree:
    return max(trees_of(growth), key=lambda tree: tree.max_depth)


def largest_of(growth: TokenTree | Modes) -> TokenTree:
    return max(trees_of(growth), key=lambda tree: tree.num_nodes)


def telling(trees: Sequence[TokenTree]) -> list[TokenTree]:
    """Those that show what none of the others does: none has all of their children by depth and
    rank; of trees that grow with one width, none is as deep and as large."""
    return [
        tree for number, tree in enumerate(trees)
        if not any(
            _shows_all_of(each, tree) and (other < number or not _shows_all_of(tree, each))
            for other, each in enumerate(trees) if other != number
        )
    ]  # fmt: skip


def _shows_all_of(tree: TokenTree, other: TokenTree) -> bool:
    if isinstance(tree, BeamTree) and isinstance(other, BeamTree):
        alike = (tree.kind, tree.width) == (other.kind, other.width)
        return alike and tree.depth >= other.depth and tree.num_nodes >= other.num_nodes
    if isinstance(tree, BeamTree) or isinstance(other, BeamTree):
        return False
    return _ranks(tree) >= _ranks(other)


def _ranks(tree: TokenTree) -> set[tuple[int, int]]:
    """Of the children of its nodes, by depth of these."""
    return {
        (depth, rank)
        for depth, children in zip(tree.depths, tree.children, strict=True)
        for rank in range(len(children))
    }


def row_counts(most: int) -> list[int]:
    """How many rows steps of at most so many have as graphs: 1, 2, 4, …, most."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


def context_of(max_length: int) -> int:
    """After how many tokens steps are timed unless told."""
    return min(MOST_CONTEXT, max_length // 4)


def length_to_time(tree: TokenTree) -> int:
    """A max_length that leaves room to time a step of it."""
    return MOST_CONTEXT + (NUM_UNTIMED + 1) * (tree.max_depth + 1)


def room_to_time(tree: TokenTree, max_length: int, context: int) -> int:
    """How many steps of it can be timed after `context` tokens, behind those that are not."""
    return (max_length - context) // (tree.max_depth + 1) - NUM_UNTIMED


@torch.no_grad()
def measure_costs(
    decoder: BatchDecoder,
    trees: Sequence[TokenTree],
    context: int,
    num_steps: int,
    counts: Sequence[int] | None = None,
    generation: GenerationConfig = GenerationConfig(),
) -> Costs:
    """Time a decoder's steps, whose rows are all free, of so many rows (by default 1, 2, 4, …) with
    each tree.

    generation, what rows ask for: sampled tokens take longer, with a top-k or top-p much longer for
    each node. context, how many tokens come before; num_steps, how many are timed, after
    NUM_UNTIMED more. The trees have NUM_TIMINGS turns, after one that captures their graphs, and a
    time is the least of its turns: what disturbs the machine for a while must not decide for one
    and against another.
    """
    began = time.perf_counter()
    counts = row_counts(decoder.num_rows) if counts is None else counts
    tokens = torch.zeros(context, dtype=torch.long, device=decoder.target.device)
    decoder.cache.reset(0)
    first = decoder.cache.at(0)
    decoder.target.prefill(tokens[None], first)
    prefix = first.save()
    costs = Costs(
        device=device_name(decoder.target.device), dtype=dtype_name(decoder.target.dtype),
        temperature=generation.temperature,
    )  # fmt: skip
    for count in counts:
        seconds: dict[TokenTree, list[float]] = {tree: [] for tree in trees}
        readings = []
        for turn, tree in itertools.product(range(1 + NUM_TIMINGS), trees):
            room = room_to_time(tree, decoder.max_length, context)
            if room < 1:
                raise UsageError(
                    f"max_length {decoder.max_length} leaves no room to time steps of {tree} after "
                    f"{context} tokens: raise it, or lower the context"
                )
            timed = min(num_steps, room) if turn else 0
            readings.append(_begin_after(decoder, count, prefix, tokens, generation))
            forest = Forest.of([tree] * count, decoder.target.device)
            rows = decoder.rows.narrow(0, count, [generation])
            _run_steps(decoder, rows, forest, context, range(NUM_UNTIMED))
            started = decoder.now()
            _run_steps(decoder, rows, forest, context, range(NUM_UNTIMED, NUM_UNTIMED + timed))
            if timed:
                seconds[tree].append((decoder.now() - started) / timed)
        costs.catch_up = min(readings)
        costs.seconds |= {(count, tree): min(each) for tree, each in seconds.items()}
    decoder.rows.active.zero_()
    costs.took_s = time.perf_counter() - began
    return costs


def _run_steps(
    decoder: BatchDecoder, rows: Rows, forest: Forest, context: int, steps: range
) -> None:
    """The host is ahead of them, as it is where its reading is hidden."""
    longest = forest.max_depth + 1
    for step in steps:
        position = min(context + step * longest, decoder.max_length)
        decoder.executor.launch(rows, forest, longest if step else 1, position, lambda phase: None)
        decoder.executor.drop()


def _begin_after(
    decoder: BatchDecoder,
    count: int,
    prefix: SavedPrefix,
    tokens: Tensor,
    generation: GenerationConfig,
) -> float:
    """Let `count` rows have read `tokens`; the seconds that the drafter took for the last one's."""
    seconds = 0.0
    for row in range(count):
        decoder.cache.reset(row)
        decoder.cache.narrow(row, 1).load(prefix)
        decoder.rows.set(row, generation, tokens.tolist(), decoder.target.config.vocab_size)
        if decoder.drafter is not None:
            decoder.drafter.clear(row)
            started = decoder.now()
            decoder.prefill.let_drafter_read(row, tokens)
            seconds = decoder.now() - started
        decoder.rows.begin(row, len(tokens), 0)
    return seconds
