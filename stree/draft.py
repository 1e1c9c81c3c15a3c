"""Growing token trees with a drafter."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from stree.graphs import Capture
from stree.models.cache import HybridCache
from stree.models.hybrid import HybridModel
from stree.sampling import Chooser, RandomChooser, sample_siblings, sampling_law
from stree.tree import TokenTree, index_tensor


@dataclass(frozen=True)
class SamplingRule:
    """Temperature 0 is greedy; see `sampling_law` for the rest."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def law(self, logits: Tensor) -> Tensor:
        return sampling_law(logits, self.temperature, self.top_k, self.top_p)


@dataclass
class Draft:
    """A filled token tree.

    tokens (N,); laws (I, V), the law that each node with children drew them from, in the order
    of `parents_of(tree)` (None when greedy); finite, a scalar bool: no NaN was met.
    """

    tokens: Tensor
    laws: Tensor | None
    finite: Tensor


class Drafter(Protocol):
    """Anything that fills token trees."""

    def reset(self) -> None: ...

    def catch_up(self, sequence: list[int]) -> None:
        """Read a prompt; `sequence` ends before the root."""

    def draft(
        self, sequence: list[int], tree: TokenTree, rule: SamplingRule, choose: Chooser
    ) -> Draft:
        """Fill `tree` from a sequence whose last token is the root."""
        ...


@functools.lru_cache(maxsize=256)
def parents_of(tree: TokenTree) -> tuple[int, ...]:
    """Nodes with children, level by level: the rows of `Draft.laws`."""
    return tuple(node for level in tree.levels for node in level if tree.children[node])


@functools.lru_cache(maxsize=256)
def law_rows(tree: TokenTree) -> tuple[int, ...]:
    """(N,) the row of each node in `Draft.laws`, −1 for a leaf."""
    rows = {node: row for row, node in enumerate(parents_of(tree))}
    return tuple(rows.get(node, -1) for node in range(tree.num_nodes))


class ModelDrafter:
    """A small language model that drafts, level by level, one batch a level.

    A recurrent drafter copies its state along every branch and only ever commits tokens that
    are certain, so it never has to go back. One with attention layers calls itself on the part
    of the tree that is known so far. On CUDA a recurrent drafter's whole draft is one graph.
    """

    def __init__(self, model: HybridModel, max_length: int, max_nodes: int) -> None:
        self.model = model
        self.cache = model.new_cache(max_length, max_nodes)
        self.captured: dict[Any, CapturedDraft] = {}

    def reset(self) -> None:
        self.cache.reset()

    def catch_up(self, sequence: list[int]) -> None:
        """Commit what the cache lacks of `sequence`."""
        missing = sequence[self.cache.num_committed :]
        if missing:
            self.model.prefill(self._row(missing), self.cache)

    def draft(
        self, sequence: list[int], tree: TokenTree, rule: SamplingRule, choose: Chooser
    ) -> Draft:
        if self.model.is_recurrent and isinstance(choose, RandomChooser) and choose.on_cuda:
            key = (tree, rule, choose)
            if key not in self.captured:
                self.captured[key] = CapturedDraft(self, tree, rule, choose)
            return self.captured[key](sequence[self.cache.num_committed :])
        if self.model.is_recurrent:
            root_logits = self._advance(sequence[self.cache.num_committed :])
            return grow_recurrent(
                self.model, root_logits, self.model.step_states(self.cache),
                self._row(sequence[-1:])[0], tree, rule, choose,
            )  # fmt: skip
        self.catch_up(sequence[:-1])
        return self._grow_by_trees(sequence[-1], tree, rule, choose)

    def _advance(self, tokens: list[int]) -> Tensor:
        """Commit certain tokens, the root last; the logits (1, V) after it."""
        if len(tokens) > self.cache.max_nodes:
            return self.model.prefill(self._row(tokens), self.cache)
        chain = TokenTree.chain(len(tokens) - 1)
        logits = self.model.tree_forward(self._row(tokens), chain, self.cache)
        self.cache.commit(range(len(tokens)))
        self.model.settle(self.cache)
        return logits[:, -1]

    def _grow_by_trees(
        self, root: int, tree: TokenTree, rule: SamplingRule, choose: Chooser
    ) -> Draft:
        tokens = self._row([root] + [0] * (tree.num_nodes - 1))[0]
        laws, finite = [], torch.tensor(True, device=self.model.device)
        for depth in range(tree.max_depth):
            part, nodes = known_part(tree, depth)
            logits = self.model.tree_forward(tokens[list(nodes)][None], part, self.cache)[0]
            parents = [node for node in tree.levels[depth] if tree.children[node]]
            logits = logits[[nodes.index(node) for node in parents]]
            drawn, law, is_finite = draw_children(logits, parents, tree, rule, choose)
            tokens[[child for node in parents for child in tree.children[node]]] = drawn
            laws.append(law)
            finite = finite & is_finite
        return Draft(tokens, _stack(laws), finite)

    def _row(self, tokens: list[int]) -> Tensor:
        return torch.tensor([tokens], device=self.model.device)


class CapturedDraft:
    """Catching up with the accepted tokens and growing a tree, as one CUDA graph."""

    def __init__(
        self, drafter: ModelDrafter, tree: TokenTree, rule: SamplingRule, choose: RandomChooser
    ) -> None:
        self.drafter, self.tree, self.rule = drafter, tree, rule
        model = drafter.model
        self.chain = TokenTree.chain(tree.max_depth)
        self.tokens = torch.zeros(1, self.chain.num_nodes, dtype=torch.long, device=model.device)
        self.count = torch.ones(1, dtype=torch.long, device=model.device)
        scratch = model.new_cache(self.chain.num_nodes, drafter.cache.max_nodes)
        for cache in (scratch, drafter.cache):
            cache.path[:, : self.chain.num_nodes] = torch.arange(self.chain.num_nodes)
        scratch_choose = RandomChooser(0, model.device)
        self.capture = Capture(
            lambda: self._run(drafter.cache, choose),
            lambda: self._run(scratch, scratch_choose),
            (choose.generator,),
        )

    def __call__(self, tokens: list[int]) -> Draft:
        """Draft after 1 to max_depth + 1 certain tokens, the root last."""
        cache = self.drafter.cache
        cache.reserve(len(tokens))
        padded = tokens + [0] * (self.chain.num_nodes - len(tokens))
        self.tokens.copy_(torch.tensor([padded]))
        self.count.fill_(len(tokens))
        cache.num_committed += len(tokens)
        return self.capture.replay()

    def _run(self, cache: HybridCache, choose: Chooser) -> Draft:
        model = self.drafter.model
        logits = model.tree_forward(self.tokens, self.chain, cache)[0]
        cache.path_length.copy_(self.count)
        model.settle(cache)
        last = self.count - 1
        return grow_recurrent(
            model, logits.index_select(0, last), model.step_states(cache),
            self.tokens[0].index_select(0, last), self.tree, self.rule, choose,
        )  # fmt: skip


def grow_recurrent(
    model: HybridModel,
    root_logits: Tensor,
    states: list[tuple[Tensor, Tensor]],
    root: Tensor,
    tree: TokenTree,
    rule: SamplingRule,
    choose: Chooser,
) -> Draft:
    """Grow a tree from the state after its root, copying states along the branches.

    Args: root_logits (1, V), states of the root (`HybridModel.step_states`), root (1,).
    Nothing in it waits for the device.
    """
    tokens: list[Tensor] = [root[0]] * tree.num_nodes
    logits, laws = root_logits, []
    finite = torch.ones((), dtype=torch.bool, device=root.device)
    rows = {0: 0}  # the row of a parent in `states` and `logits`
    for level in tree.levels[:-1]:
        parents = [node for node in level if tree.children[node]]
        logits = _rows(logits, [rows[node] for node in parents])
        drawn, law, is_finite = draw_children(logits, parents, tree, rule, choose)
        laws.append(law)
        finite = finite & is_finite
        children = [child for node in parents for child in tree.children[node]]
        for index, child in enumerate(children):
            tokens[child] = drawn[index]
        grown = [child for child in children if tree.children[child]]
        if grown:
            origin = [rows[tree.parents[child]] for child in grown]
            copies = [(_rows(tail, origin), _rows(state, origin)) for tail, state in states]
            logits, states = model.step(torch.stack([tokens[child] for child in grown]), copies)
            rows = {child: row for row, child in enumerate(grown)}
    return Draft(torch.stack(tokens), _stack(laws), finite)


def draw_children(
    logits: Tensor, parents: list[int], tree: TokenTree, rule: SamplingRule, choose: Chooser
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Children of some nodes, from logits (n, V): the top k, or a sample without replacement.

    Returns the tokens of all children in order, the laws (n, V) (None when greedy), and whether
    all logits that matter were finite.
    """
    counts = [len(tree.children[node]) for node in parents]
    finite = logits.amax(-1).isfinite().all()
    if rule.greedy:
        law = None
        drawn = logits.topk(max(counts), dim=-1).indices
    else:
        law = rule.law(logits)
        drawn = sample_siblings(law, counts, choose)
    return torch.cat([drawn[row, :count] for row, count in enumerate(counts)]), law, finite


@functools.lru_cache(maxsize=256)
def known_part(tree: TokenTree, depth: int) -> tuple[TokenTree, tuple[int, ...]]:
    """The tree cut below `depth`, and which nodes of the whole it keeps."""
    nodes = tuple(node for node in range(tree.num_nodes) if tree.depths[node] <= depth)
    parents = tuple(nodes.index(tree.parents[node]) if node else -1 for node in nodes)
    return TokenTree(parents, f"{tree.name}/{depth}"), nodes


def _rows(tensor: Tensor, rows: list[int]) -> Tensor:
    if rows == list(range(tensor.shape[0])):
        return tensor
    return tensor.index_select(0, index_tensor(tuple(rows), tensor.device))


def _stack(laws: list[Tensor | None]) -> Tensor | None:
    given = [law for law in laws if law is not None]
    return torch.cat(given) if given else None
