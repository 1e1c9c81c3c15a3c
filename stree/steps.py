"""Decoding steps that run on the device from end to end."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stree.draft import CapturedDraft, SamplingRule
from stree.graphs import Capture
from stree.models.cache import HybridCache
from stree.models.hybrid import HybridModel, topology_of
from stree.sampling import RandomChooser
from stree.tree import TokenTree
from stree.verify import tables, verify_sampled
from stree_kernels import ops


class DeviceSteps:
    """Draft, verify, accept and commit as two CUDA graphs, without the host in between.

    Tokens, the accepted path and all lengths stay on the device; the host reads a report of each
    step, and may do so while later ones run.

    Args: cache, the target's; draft, the drafter's graph, or None for autoregressive decoding;
    choose, where random choices come from (the draft's too).
    """

    def __init__(
        self,
        model: HybridModel,
        tree: TokenTree,
        cache: HybridCache,
        draft: CapturedDraft | None,
        rule: SamplingRule,
        choose: RandomChooser,
    ) -> None:
        self.model, self.tree, self.cache = model, tree, cache
        self.draft, self.rule = draft, rule
        longest, device = tree.max_depth + 1, model.device
        self.laws: Tensor | None = None
        if draft is not None:
            self.block = draft.block  # a step's new tokens are what the drafter reads next
            self.nodes = draft.capture.outputs.tokens[None]
            self.laws = draft.capture.outputs.laws
            self.drafts_are_finite = draft.capture.outputs.finite.view(1, -1)
        else:
            self.block = torch.tensor([[1, 0]], device=device)
            self.nodes = self.block[:, 1:]
            self.drafts_are_finite = torch.ones(1, 1, dtype=torch.bool, device=device)
        self.parents = torch.tensor(tree.parents, device=device)
        self.topology = topology_of(tree, model.config.d_conv, device)  # graphs hold its address
        self.tables = tables(tree, device)  # likewise
        root = torch.zeros(1, dtype=torch.long, device=device)
        self.alone = root, root + 1  # the path of a tree that is but a root, and its length
        shape = (1, 2 + 2 * longest)
        self.report = torch.zeros(shape, dtype=torch.long, device=device)
        self.pinned = [torch.zeros(shape, dtype=torch.long, pin_memory=True) for _ in range(2)]
        self.read = [torch.cuda.Event() for _ in range(2)]
        self.launched = self.collected = 0
        scratch = model.new_cache(longest, cache.max_nodes)
        some_nodes, some_block = torch.zeros_like(self.nodes), torch.zeros_like(self.block)
        scratch_choose = RandomChooser(0, device)
        self.verify = Capture(
            device,
            lambda: self._verify(cache, self.nodes, self.block, choose),
            lambda: self._verify(scratch, some_nodes, some_block, scratch_choose),
            () if rule.greedy else (choose.generator,),
        )

    def _verify(
        self, cache: HybridCache, nodes: Tensor, block: Tensor, choose: RandomChooser
    ) -> Tensor:
        logits = self.model.tree_forward(nodes, self.tree, cache, cache.num_slots, wide=False)[0]
        if self.rule.greedy:
            best, highest = self._choices(logits, nodes)
            ops.accept_greedy(
                best.T, highest[None], nodes, self.parents, self.drafts_are_finite,
                cache.path, cache.path_length, block, self.report,
            )  # fmt: skip
        else:
            self._sample(logits, cache, nodes[0], block, choose)
        return self.report

    def _choices(self, logits: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """The target's first choice (N, 1) at each node of nodes (1, N), and its logit (N,)."""
        return ops.top_tokens(logits, 1)

    def _sample(
        self,
        logits: Tensor,
        cache: HybridCache,
        tokens: Tensor,
        block: Tensor,
        choose: RandomChooser,
    ) -> None:
        """As `ops.accept_greedy`, by multi-step speculative sampling."""
        finite = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
        laws = self.rule.law(logits, finite)
        if self.laws is not None:
            decided = verify_sampled(laws, self.laws, tokens, self.tree, choose)
        elif ops.samples_fused(laws):
            decided = (*self.alone, ops.sample_siblings(laws, 1, choose.uniforms(1, 1))[0])
        else:
            decided = (*self.alone, choose(laws))
        ops.settle_sampled(
            *decided, tokens, finite, self.drafts_are_finite,
            cache.path, cache.path_length, block, self.report,
        )  # fmt: skip

    def begin(self, root: int) -> None:
        """Start from a root that neither cache holds; the prompt before it is committed."""
        self.block[:, 0] = 1
        self.block[:, 1] = root
        self.launched = self.collected = 0

    def launch(self, mark: Callable[[str], None]) -> None:
        """Start the next step; `mark` is told when each phase has been started."""
        if self.draft is not None:
            self.draft.capture.replay()
        mark("draft")
        report = self.verify.replay()
        mark("verify")
        half = self.launched % 2
        self.pinned[half].copy_(report, non_blocking=True)
        self.read[half].record()
        mark("accept")
        self.launched += 1

    def collect(self) -> tuple[bool, list[int], list[int]]:
        """The oldest step not yet collected: whether all logits were finite, the accepted path,
        and the new tokens."""
        half = self.collected % 2
        self.read[half].synchronize()
        finite, count, *rest = self.pinned[half][0].tolist()
        tokens, path = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        self.collected += 1
        for cache in (self.cache, self.draft.cache if self.draft is not None else None):
            if cache is not None:
                cache.num_committed += count
        return bool(finite), path[:count], tokens[:count]
