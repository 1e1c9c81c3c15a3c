"""The static tree with the longest expected acceptance, by where measured paths ended.

The model: once its parent is accepted, a draft is accepted with a probability that depends on its
depth d and its rank r among its siblings alone. The expected number of accepted drafts of a tree is
then the sum over its nodes of the product of these probabilities from the root, and the best tree
of N nodes follows by dynamic programming over depth, rank and nodes, as in Sequoia (Chen et al.
2024), whose probabilities depend on the rank only. (EAGLE-2, Li et al. 2024, grows another tree at
each step from the drafter's confidence; these are static.) Dims: D depths, R ranks, N nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stree.errors import UsageError
from stree.speculation_profile import SuggestedTree, Tree, TreeCheck
from stree.tree import MAX_NODES, TokenTree
from stree_pipelines.records import ResultRow

# A rate's own calls and this many at its rank's rate over all depths: steadies the rare ones.
PRIOR_CALLS = 10


@dataclass(frozen=True)
class AcceptanceRates:
    """Counts behind the probabilities, [d − 1, r]: calls that accepted the parent of such a draft,
    and calls that accepted it too."""

    reached_DR: NDArray[np.int64]
    accepted_DR: NDArray[np.int64]

    @classmethod
    def of(cls, measured: Iterable[tuple[TokenTree, Mapping[int, int]]]) -> AcceptanceRates:
        """From trees and how many calls' paths ended at each of their nodes."""
        measured = list(measured)
        depth = max((tree.max_depth for tree, _ in measured), default=0)
        widest = max((len(nodes) for tree, _ in measured for nodes in tree.children), default=0)
        reached, accepted = np.zeros((2, depth, widest), dtype=np.int64)
        for tree, ends in measured:
            visits = [ends.get(node, 0) for node in range(tree.num_nodes)]
            for node in range(tree.num_nodes - 1, 0, -1):
                visits[tree.parents[node]] += visits[node]
            for parent, children in enumerate(tree.children):
                for rank, child in enumerate(children):
                    reached[tree.depths[parent], rank] += visits[parent]
                    accepted[tree.depths[parent], rank] += visits[child]
        return cls(reached, accepted)

    @property
    def max_depth(self) -> int:
        return int(self.reached_DR.any(axis=1).sum())

    def rate(self, depth: int, rank: int) -> float:
        """At a depth that no tree had, the rank's rate over all depths; 0 for an unknown rank."""
        if rank >= self.reached_DR.shape[1] or not self.reached_DR[:, rank].any():
            return 0.0
        prior = self.accepted_DR[:, rank].sum() / self.reached_DR[:, rank].sum()
        if depth > len(self.reached_DR):
            return float(prior)
        reached, accepted = self.reached_DR[depth - 1, rank], self.accepted_DR[depth - 1, rank]
        return float((accepted + PRIOR_CALLS * prior) / (reached + PRIOR_CALLS))

    def expected_drafts(self, tree: TokenTree) -> float:
        """Accepted drafts a call."""
        probability = [1.0] * tree.num_nodes
        for parent, children in enumerate(tree.children):
            for rank, child in enumerate(children):
                probability[child] = probability[parent] * self.rate(tree.depths[child], rank)
        return sum(probability[1:])


def best_tree(rates: AcceptanceRates, num_nodes: int, name: str | None = None) -> TokenTree:
    """The tree with the most expected drafts among all of at most `num_nodes` nodes, the root
    included. Raises UsageError for a size that no tree has."""
    if not 2 <= num_nodes <= MAX_NODES:
        raise UsageError(f"a tree of {num_nodes} nodes was asked for, wanted 2 to {MAX_NODES}")
    num_drafts, widest = num_nodes - 1, rates.reached_DR.shape[1]
    # below[d][n]: the most expected drafts below an accepted node of depth d, of n nodes in all.
    # share[d][r][n]: what of n nodes the child of rank r and those below it get, the rest going to
    # its later siblings; 0 ends the siblings.
    below = np.zeros(num_drafts + 1)
    share = np.zeros((num_drafts, widest, num_drafts + 1), dtype=np.int64)
    for depth in reversed(range(num_drafts)):
        later = np.zeros(num_drafts + 1)
        for rank in reversed(range(widest)):
            rate, best = rates.rate(depth + 1, rank), np.zeros(num_drafts + 1)
            for nodes in range(1, num_drafts + 1):
                values = rate * (1 + below[:nodes]) + later[:nodes][::-1]
                share[depth, rank, nodes] = 1 + values.argmax()
                best[nodes] = values.max()
            later = best
        below = later
    parents, queue = [-1], [(0, 0, num_drafts)]
    for node, depth, nodes in queue:
        for rank in range(widest):
            if nodes == 0:
                break
            given = int(share[depth, rank, nodes])
            queue.append((len(parents), depth + 1, given - 1))
            parents.append(node)
            nodes -= given
    return TokenTree(tuple(parents), name or f"suggested-{num_nodes}")


def suggest(rows: Sequence[ResultRow], temperature: float, num_nodes: int | None) -> SuggestedTree:
    """The best tree for rows of one checkpoint at one temperature; by default of as many nodes as
    the largest tree that was measured.

    Raises UsageError when no row says where its paths ended.
    """
    told = [row for row in rows if row.tree and row.end_nodes and row.temperature == temperature]
    if not told:
        raise UsageError(
            f"no row at T = {temperature:g} says at which nodes paths ended: evaluate again with "
            "--overwrite"
        )
    pairs = [(row.tree.to_token_tree(), row.end_nodes) for row in told if row.tree]
    rates = AcceptanceRates.of(pairs)
    calls = [sum(row.end_nodes.values()) for row in told]
    # New tokens that no draft was: a call's last one, unless a stop cut it off.
    own = sum((row.acceptance_length or 0.0) * n for row, n in zip(told, calls, strict=True))
    own -= sum(n * c for row in told for n, c in row.acceptance_histogram.items())

    def predicted(tree: TokenTree) -> float:
        return own / sum(calls) + rates.expected_drafts(tree)

    tree = best_tree(rates, num_nodes or max(tree.num_nodes for tree, _ in pairs))
    return SuggestedTree(
        temperature=temperature,
        tree=Tree(name=tree.name, parents=tree.parents),
        predicted_acceptance_length=predicted(tree),
        num_calls=sum(calls),
        num_extrapolated=sum(depth > rates.max_depth for depth in tree.depths),
        checks=tuple(
            TreeCheck(
                tree=each,
                predicted_acceptance_length=predicted(each.to_token_tree()),
                measured_acceptance_length=_tau([row for row in told if row.tree == each]),
            )
            for each in dict.fromkeys(row.tree for row in told if row.tree)
        ),
    )


def _tau(rows: Sequence[ResultRow]) -> float:
    """τ over the calls of several rows."""
    calls = [sum(row.end_nodes.values()) for row in rows]
    tokens = sum((row.acceptance_length or 0.0) * n for row, n in zip(rows, calls, strict=True))
    return tokens / sum(calls)
