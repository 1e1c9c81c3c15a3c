"""Growing token trees with a drafter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from stree.graphs import Capture, LastUsed
from stree.models.cache import HybridCache
from stree.models.hybrid import HybridModel, topology_of
from stree.sampling import Chooser, RandomChooser, sample_siblings, sampling_law
from stree.tree import TokenTree, index_tensor, parents_of
from stree_kernels import ops
from stree_kernels.shapes import Topology


@dataclass(frozen=True)
class SamplingRule:
    """Temperature 0 is greedy; see `sampling_law` for the rest."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def law(self, logits: Tensor, finite: Tensor | None = None) -> Tensor:
        """Laws (…, V) of logits (…, V); finite (…), if given, is told whether each row's were."""
        only_tempered = self.top_k == 0 and self.top_p == 1.0
        if only_tempered and logits.dim() == 2 and ops.samples_fused(logits):
            return ops.temperature_law(logits, self.temperature, finite)
        if finite is not None:
            finite.copy_(logits.amax(-1).isfinite())
        return sampling_law(logits, self.temperature, self.top_k, self.top_p)


@dataclass
class Draft:
    """A filled token tree.

    tokens (N,); laws (I, V), the law that each node with children drew them from, in the order
    of `parents_of(tree)`, or None when they were not drawn (greedy, or from a text seen before);
    finite, bools: no NaN was met.
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


class ModelDrafter:
    """A small language model that drafts, level by level, one call a level.

    It first reads the tokens that became certain since its last draft, as a chain, then the
    inner nodes of the tree as trees of their own that grow level by level. Nothing of a draft
    but the certain tokens reaches its states. On CUDA a whole draft is one graph.
    """

    def __init__(self, model: HybridModel, max_length: int, max_nodes: int) -> None:
        self.model = model
        self.cache = model.new_cache(max_length, max_nodes)
        self.cache.path[:] = torch.arange(max_nodes)  # certain tokens are a chain
        self.captured: LastUsed[Any, CapturedDraft] = LastUsed()

    def reset(self) -> None:
        self.cache.reset()

    def catch_up(self, sequence: list[int]) -> None:
        """Commit what the cache lacks of `sequence`."""
        missing = sequence[self.cache.num_committed :]
        if missing:
            self.model.prefill(torch.tensor([missing], device=self.model.device), self.cache)

    def draft(
        self, sequence: list[int], tree: TokenTree, rule: SamplingRule, choose: Chooser
    ) -> Draft:
        tokens = sequence[self.cache.num_committed :]
        if isinstance(choose, RandomChooser) and choose.on_cuda:
            return self.capture(tree, rule, choose)(tokens)
        return StaticDraft(self, tree, rule, choose)(tokens)

    def capture(self, tree: TokenTree, rule: SamplingRule, choose: RandomChooser) -> CapturedDraft:
        """The CUDA graph of such drafts, captured when first asked for."""
        key = (tree, rule, choose)
        if key not in self.captured:
            self.captured[key] = CapturedDraft(self, *key)
        return self.captured[key]


class StaticDraft:
    """Drafts of one tree shape: reads the certain tokens, then grows the tree.

    All that it reads and writes is static tensors, and nothing waits for the device.
    """

    def __init__(
        self, drafter: ModelDrafter, tree: TokenTree, rule: SamplingRule, choose: Chooser
    ) -> None:
        model = drafter.model
        self.model, self.cache = model, drafter.cache
        self.tree, self.rule, self.choose = tree, rule, choose
        self.chain = topology_of(TokenTree.chain(tree.max_depth), model.config.d_conv, model.device)
        self.inner = inner_nodes(tree, model.config.d_conv, model.device)
        # How many certain tokens there are to read, and the tokens
        self.block = torch.tensor([[1] + [0] * (tree.max_depth + 1)], device=model.device)

    def __call__(self, tokens: list[int]) -> Draft:
        """Draft after 1 to max_depth + 1 certain tokens, the root last."""
        self._read(tokens)
        return self._run(self.cache, self.choose)

    def _read(self, tokens: list[int]) -> None:
        self.cache.reserve(len(tokens))
        padded = tokens + [0] * (self.block.shape[1] - 1 - len(tokens))
        self.block.copy_(torch.tensor([[len(tokens), *padded]]))
        self.cache.num_committed += len(tokens)

    def _run(self, cache: HybridCache, choose: Chooser, bound: int | None = None) -> Draft:
        model, first = self.model, 0

        def advance(tokens: Tensor, nodes: tuple[int, ...]) -> Tensor:
            nonlocal first
            rows = index_tensor(nodes, tokens.device)
            hidden = model.tree_hidden(tokens[None], self.inner, cache, first, bound, rows)[0]
            first += len(nodes)
            return model.logits(hidden, wide=False)

        hidden = model.tree_hidden(self.block[:, 1:], self.chain, cache, bound=bound)[0]
        tokens = torch.empty(self.tree.num_nodes, dtype=torch.long, device=model.device)
        hidden = ops.take_root(hidden, self.block[0], tokens, cache.path_length)
        logits = model.logits(hidden, wide=False)
        return grow(advance, logits, tokens, self.tree, self.rule, choose)


class CapturedDraft(StaticDraft):
    """A `StaticDraft` that runs as one CUDA graph."""

    def __init__(
        self, drafter: ModelDrafter, tree: TokenTree, rule: SamplingRule, choose: RandomChooser
    ) -> None:
        super().__init__(drafter, tree, rule, choose)
        model, cache = self.model, self.cache
        scratch = model.new_cache(tree.num_nodes, cache.max_nodes)
        scratch.path.copy_(cache.path)
        scratch_choose = RandomChooser(0, model.device)
        self.capture = Capture(
            model.device,
            lambda: self._run(cache, choose, cache.num_slots),
            lambda: self._rehearse(scratch, scratch_choose),
            (choose.generator,),
        )

    def __call__(self, tokens: list[int]) -> Draft:
        self._read(tokens)
        return self.capture.replay()

    def _rehearse(self, scratch: HybridCache, choose: RandomChooser) -> None:
        scratch.reset()
        self._run(scratch, choose, scratch.num_slots)


@functools.lru_cache(maxsize=256)
def inner_nodes(tree: TokenTree, width: int, device: torch.device) -> Topology:
    """The nodes that a drafter must read to grow a tree, in the order it reads them.

    These are the nodes with children, without the root: by then the root is committed, so its
    children begin trees of their own.
    """
    nodes = [node for level in tree.levels[1:] for node in level if tree.children[node]]
    index = {node: row for row, node in enumerate(nodes)}
    paths = [[index[each] for each in tree.path_to(node)[1:]] for node in nodes]
    ancestors = torch.zeros(1, len(nodes), len(nodes), dtype=torch.bool)
    windows = torch.zeros(1, len(nodes), width, dtype=torch.int32)
    for row, path in enumerate(paths):
        ancestors[0, row, path] = True
        seen = list(range(width - 1)) + [width - 1 + each for each in path]
        windows[0, row] = torch.tensor(seen[-width:])
    depths = torch.tensor([[len(path) - 1 for path in paths]], dtype=torch.int32)
    return Topology(ancestors.to(device), depths.to(device), windows.to(device))


def grow(
    advance: Callable[[Tensor, tuple[int, ...]], Tensor],
    logits: Tensor,
    tokens: Tensor,
    tree: TokenTree,
    rule: SamplingRule,
    choose: Chooser,
) -> Draft:
    """Grow a tree level by level from its root, the first of tokens (N,), and the logits (1, V)
    after it; writes the other tokens.

    advance(tokens (N,), nodes) gives the logits (n, V) after the nodes with children of one
    level, in the order of `TokenTree.levels`. Nothing here waits for the device.
    """
    finite = torch.empty(len(parents_of(tree)), dtype=torch.bool, device=tokens.device)
    laws, done = [], 0
    for level in tree.levels[:-1]:
        parents = tuple(node for node in level if tree.children[node])
        if done:
            logits = advance(tokens, parents)
        rows = finite[done : done + len(parents)]
        laws.append(draw_children(logits, parents, tree, rule, choose, tokens, rows))
        done += len(parents)
    return Draft(tokens, _stack(laws), finite)


def draw_children(
    logits: Tensor,
    parents: tuple[int, ...],
    tree: TokenTree,
    rule: SamplingRule,
    choose: Chooser,
    tokens: Tensor,
    finite: Tensor,
) -> Tensor | None:
    """Children of some nodes, from logits (n, V): the top k, or a sample without replacement.

    Writes them to tokens (N,), and to finite (n,) whether each row's logits were, where it
    matters. Returns the laws (n, V), None when greedy.
    """
    if rule.greedy:
        ops.choose_children(logits, places_of(tree, parents, tokens.device), tokens, finite)
        return None
    law = rule.law(logits, finite)
    if isinstance(choose, RandomChooser) and ops.samples_fused(law):
        places = places_of(tree, parents, tokens.device)
        ops.sample_children(law, places, choose.uniforms(*places.T.shape), tokens)
        return law
    counts = [len(tree.children[node]) for node in parents]
    drawn = sample_siblings(law, counts, choose)
    wanted = tuple(
        row * max(counts) + rank for row, count in enumerate(counts) for rank in range(count)
    )
    drawn = drawn.flatten()
    if len(wanted) < len(drawn):
        drawn = drawn.index_select(0, index_tensor(wanted, drawn.device))
    children = tuple(child for node in parents for child in tree.children[node])
    tokens.index_copy_(0, index_tensor(children, tokens.device), drawn)
    return law


@functools.cache
def places_of(tree: TokenTree, parents: tuple[int, ...], device: torch.device) -> Tensor:
    """(n, widest): the children of each node, and −1 where it has fewer than the widest."""
    children = [tree.children[node] for node in parents]
    widest = max(map(len, children))
    padded = [[*nodes, *[-1] * (widest - len(nodes))] for nodes in children]
    return torch.tensor(padded, device=device)


def _stack(laws: list[Tensor | None]) -> Tensor | None:
    given = [law for law in laws if law is not None]
    return torch.cat(given) if given else None
