"""Whole decoding steps at a given acceptance length, with drafters that know nothing.

Random weights accept nothing. Here the target's own choice is overwritten, on the device, along one
path of the tree, so that a step accepts as many drafts as its turn says; all the work is done.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stree.draft import ModelDrafter, SamplingRule
from stree.engine import Decoder
from stree.generation import GenerationConfig
from stree.models.hybrid import HybridModel
from stree.steps import DeviceSteps
from stree.tree import TokenTree
from stree_pipelines.benches.timing import in_turns, spread
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE, CHAIN, TREE

TREES = {AUTOREGRESSIVE: None, CHAIN: TokenTree.chain(4), TREE: TokenTree.paper()}
PERIOD = 20  # steps after which the numbers of accepted drafts come round again


class GivenAcceptance(DeviceSteps):
    """Greedy steps that accept accepted[i % len(accepted)] drafts at step i, along the deepest
    path of the tree."""

    def __init__(self, decoder: Decoder, draft: Any, accepted: list[int]) -> None:
        tree, device = decoder.tree, decoder.target.device
        deepest = max(range(tree.num_nodes), key=lambda node: tree.depths[node])
        self.line = torch.tensor(tree.path_to(deepest), device=device)
        self.accepted = torch.tensor(accepted, device=device)
        self.turn = torch.zeros(1, dtype=torch.long, device=device)
        assert isinstance(decoder.target, HybridModel)
        super().__init__(
            decoder.target, tree, decoder.cache, draft, SamplingRule(), decoder._random
        )

    def _choices(self, logits: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
        best, highest = super()._choices(logits, nodes)
        count = self.accepted.index_select(0, self.turn % len(self.accepted))
        self.turn += 1
        inner, drafted = self.line[:-1], nodes[0].index_select(0, self.line[1:])
        place = torch.arange(len(inner), device=best.device)
        # Where it ends, the target wants what the tree does not have
        other = ((nodes.max() + 1) % logits.shape[1]).expand_as(drafted)
        chosen = torch.where(place < count, drafted, other)
        return best.flatten().index_copy(0, inner, chosen)[:, None], highest


def accepted_for(tau: float, max_depth: int) -> list[int]:
    """Drafts to accept at each of `PERIOD` steps so that τ comes out: the two nearest whole
    numbers, spread evenly."""
    drafts = min(tau - 1, max_depth)
    return [int((i + 1) * drafts + 1e-9) - int(i * drafts + 1e-9) for i in range(PERIOD)]


def decode_at(
    target: HybridModel,
    drafter: HybridModel,
    taus: list[float],
    context: int,
    num_steps: int,
    repeats: int,
) -> list[dict[str, Any]]:
    """A row a τ: tokens/s of the paper's tree beside autoregressive decoding, in turns.

    The share of a step that the GPU is not busy is what the host does not hide: 1 − the time of
    the graphs replayed one after the other over that of the steps.
    """
    tree = TokenTree.paper()
    longest = context + (tree.max_depth + 1) * (num_steps + 2)
    plain = Decoder(target, max_length=longest)
    prompt = [1] * context
    rows = []
    for tau in taus:
        decoder = Decoder(target, drafter, tree, max_length=longest)
        assert isinstance(decoder.drafter, ModelDrafter)
        draft = decoder.drafter.capture(tree, SamplingRule(), decoder._random)
        steps = GivenAcceptance(decoder, draft, accepted_for(tau, tree.max_depth))
        decoder._steps[SamplingRule()] = steps
        seconds: dict[str, list[float]] = {"plain": [], "tree": []}
        reached = 0.0
        for _ in range(repeats + 1):  # the first one warms up
            for name, each, length in (("plain", plain, 1.0), ("tree", decoder, tau)):
                generation = GenerationConfig(int(length * num_steps) + 1, ignore_eos=True)
                stats = each.generate(prompt, generation).stats
                seconds[name].append(stats.decode_s / stats.num_calls)
                reached = stats.acceptance_length
        a_step = {
            name: spread([1e6 * each for each in times[1:]]) for name, times in seconds.items()
        }
        speedup = reached * a_step["plain"]["median"] / a_step["tree"]["median"]
        gpu_us = _graphs_alone_us(steps, context, num_steps)
        rows.append(dict(
            what="step", context=context, num_nodes=tree.num_nodes, tau=reached,
            us_plain=a_step["plain"], us_tree=a_step["tree"], us_graphs=gpu_us,
            host_share=1 - gpu_us / a_step["tree"]["median"],
            speedup=speedup, speedup_per_tau=speedup / reached,
        ))  # fmt: skip
    return rows


def graphs(
    target: HybridModel, drafter: HybridModel, context: int, repeats: int
) -> list[dict[str, Any]]:
    """µs of a step's two graphs, the draft and the target's call with acceptance, by method and
    temperature; the last row of a temperature is the tree's."""
    rows = []
    for temperature in (0.0, 1.0):
        for method, tree in TREES.items():
            rule = SamplingRule(temperature)
            longest = context + ((tree.max_depth if tree else 0) + 1) * (repeats + 4)
            decoder = Decoder(target, drafter if tree else None, tree, max_length=longest)
            draft = None
            if isinstance(decoder.drafter, ModelDrafter):
                draft = decoder.drafter.capture(decoder.tree, rule, decoder._random)
            steps = DeviceSteps(target, decoder.tree, decoder.cache, draft, rule, decoder._random)
            _begin(steps, context)
            functions: dict[str, Callable[[], object]] = {"target": steps.verify.replay}
            if draft is not None:
                functions = {"draft": draft.capture.replay, **functions}
            times = in_turns(functions, target.device, repeats)
            row = dict(what="graphs", context=context, method=method, temperature=temperature)
            row["num_nodes"] = decoder.tree.num_nodes
            rows.append({**row, **{f"us_{name}": each for name, each in times.items()}})
    return rows


def _begin(steps: DeviceSteps, context: int) -> None:
    """As if so many tokens were committed."""
    for cache in (steps.cache, steps.draft.cache if steps.draft else None):
        if cache is not None:
            cache.length.fill_(context)
            cache.path_length.zero_()
    steps.begin(1)


def _graphs_alone_us(steps: DeviceSteps, context: int, num_steps: int) -> float:
    """A step's time when the host only replays graphs, far ahead of the device."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(3):
        _begin(steps, context)
        before.record()
        for _ in range(num_steps // 2):
            steps.launch(lambda phase: None)
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) * 1e3 / (num_steps // 2))
    return statistics.median(times)
