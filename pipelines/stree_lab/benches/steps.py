"""Time whole decoding steps at a given acceptance length, with random drafters.

Random weights accept nothing. Here the target's own choice is overwritten, on the device, along one
path of the tree, so that each step accepts a given number of drafts; all the work is done.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stree.batching.batch_decoder import BatchDecoder
from stree.batching.runners import GraphRunner
from stree.batching.state import BatchState
from stree.batching.step import StepInputs
from stree.batching.step_timing import tokens_of_row
from stree.decoder import Decoder
from stree.drafters import Proposal
from stree.drafters.model import ModelDrafter
from stree.generation import GenerationConfig
from stree.models.model import HybridModel
from stree.trees.build import make_tree_batch
from stree.trees.token_tree import TokenTree
from stree.trees.tree_batch import TreeBatch
from stree.verifiers import fits, named
from stree.verifiers.coupled import Coupled
from stree_lab.benches.timing import Row, elapsed_us, interleave, spread, us_fields
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE, CHAIN, TREE

TREES = {AUTOREGRESSIVE: None, CHAIN: TokenTree.chain(4), TREE: TokenTree.paper()}
PERIOD = 20  # steps after which the numbers of accepted drafts repeat


@functools.cache
def index_tensor(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return indices as a tensor on a device, cached so that a decoding step copies nothing."""
    return torch.tensor(values, dtype=torch.long, device=device)


class GivenAcceptance(Coupled):
    """Verifier that accepts accepted[i % len(accepted)] drafts at step i, at most the tree's depth.

    It accepts along the deepest path of the tree, the same for all rows.
    """

    def __init__(self, accepted: list[int], device: torch.device) -> None:
        self.accepted = torch.tensor(accepted, device=device)
        self.turn = torch.zeros(1, dtype=torch.long, device=device)

    def choose(
        self, logits: Tensor, proposal: Proposal, tree_batch: TreeBatch, rows: BatchState
    ) -> tuple[Tensor, Tensor]:
        best, highest = super().choose(logits, proposal, tree_batch, rows)
        count = self.accepted.index_select(0, self.turn % len(self.accepted))
        self.turn += 1
        tree = tree_batch.trees[0]
        line = tree.path_to(max(range(tree.num_nodes), key=tree.depths.__getitem__))
        inner, after = (index_tensor(tuple(each), best.device) for each in (line[:-1], line[1:]))
        place = torch.arange(len(inner), device=best.device)
        # After the accepted drafts the target chooses a token that the row's tree has not
        other = (proposal.tokens.amax(1, keepdim=True) + 1) % logits.shape[-1]
        drafted = proposal.tokens.index_select(1, after)
        return best.index_copy(1, inner, torch.where(place < count, drafted, other)), highest


def accepted_for(tau: float, max_depth: int) -> list[int]:
    """Return the drafts to accept at each of `PERIOD` steps to reach τ.

    They are the two nearest whole numbers, spread evenly.
    """
    drafts = min(tau - 1, max_depth)
    return [int((i + 1) * drafts + 1e-9) - int(i * drafts + 1e-9) for i in range(PERIOD)]


def decode_at(
    target: HybridModel, drafter: HybridModel, taus: list[float], context: int, num_steps: int,
    repeats: int,
) -> Iterator[Row]:
    """Yield a row per τ: tokens/s of the paper's tree and of plain decoding, interleaved.

    The share of a step in which the GPU is idle is host time that is not hidden: 1 − the time of
    the graphs replayed one after the other over that of the steps.
    """
    tree = TokenTree.paper()
    max_length = context + (tree.max_depth + 1) * (num_steps + 2)
    plain = Decoder(target, max_length=max_length)
    prompt = tokens_of_row(0, context, target.config.vocab_size)
    for tau in taus:
        verifier = GivenAcceptance(accepted_for(tau, tree.max_depth), target.device)
        decoder = Decoder(target, drafter, tree, max_length=max_length, verifier=verifier)
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
        gpu_us = graphs_alone_us(decoder.batch, context, num_steps)
        yield dict(
            what="step", context=context, num_nodes=tree.num_nodes, tau=reached,
            us_graphs=gpu_us, host_share=1 - gpu_us / a_step["tree"]["median"],
            speedup=speedup, speedup_per_tau=speedup / reached, **us_fields(a_step),
        )


def graphs(
    target: HybridModel, drafter: HybridModel, context: int, repeats: int,
    verifiers: Sequence[str] = ("coupled",), num_rows: Sequence[int] = (1,),
) -> Iterator[Row]:
    """Time a step's two graphs in µs: the draft, and the target's call with acceptance.

    Rows are by number of sequences, temperature, method and, when sampled drafts are verified,
    verifier.
    """
    for count, temperature in itertools.product(num_rows, (0.0, 1.0)):
        for method, tree, verifier in compared(temperature, verifiers):
            max_length = context + ((tree.max_depth if tree else 0) + 1) * (repeats + 4)
            decoder = BatchDecoder(
                target, drafter if tree else None, tree, num_rows=count, max_length=max_length,
                verifier=verifier,
            )
            functions = graphs_of(decoder, context, temperature)
            times = interleave(functions, target.device, repeats)
            yield dict(
                what="graphs", context=context, num_rows=count, method=method, verifier=verifier,
                temperature=temperature, num_nodes=decoder.tree.num_nodes, **us_fields(times),
            )


def compared(
    temperature: float, verifiers: Sequence[str]
) -> Iterator[tuple[str, TokenTree | None, str]]:
    """Yield methods with their trees, and the verifiers that differ there and can judge the
    tree."""
    for method, tree in TREES.items():
        for name in verifiers if tree and temperature else verifiers[:1]:
            if tree is None or fits(named(name), tree):
                yield method, tree, name


def launcher(decoder: BatchDecoder, context: int, temperature: float = 0.0) -> Callable[[], None]:
    """Return a call that launches a step of all rows, as if `context` tokens were committed."""
    drafter = decoder.drafter
    for cache in (decoder.cache, drafter.cache if isinstance(drafter, ModelDrafter) else None):
        if cache is not None:
            cache.length.fill_(context)
            cache.path_length.zero_()
    generation = GenerationConfig(temperature=temperature)
    for row in range(decoder.num_rows):
        (first,) = tokens_of_row(row, 1, decoder.target.config.vocab_size)
        decoder.worker.state.set(row, replace(generation, seed=row))
        decoder.worker.state.begin(row, context, first)
    rows = decoder.worker.state.narrow(0, decoder.num_rows, [generation])
    tree_batch = make_tree_batch([decoder.tree] * decoder.num_rows, decoder.target.device)
    inputs = StepInputs(rows, tree_batch, decoder.tree.max_depth + 1, decoder.max_length)

    def launch() -> None:
        decoder.worker.runner.launch(inputs, lambda phase: None)
        decoder.worker.runner.drop()

    return launch


def graphs_of(
    decoder: BatchDecoder, context: int, temperature: float = 0.0
) -> dict[str, Callable[[], object]]:
    """Return calls that replay a step's two graphs after `context` tokens; no draft without a
    drafter."""
    launcher(decoder, context, temperature)()
    assert isinstance(decoder.worker.runner, GraphRunner)
    (graphs,) = decoder.worker.runner.step_graphs.values()
    found: dict[str, Callable[[], object]] = {"target": graphs.rest.replay}
    return found if graphs.draft is None else {"draft": graphs.draft.replay, **found}


def graphs_alone_us(decoder: BatchDecoder, context: int, num_steps: int) -> float:
    """Time a step in µs when the host only replays graphs, far in front of the device."""
    times, count = [], num_steps // 2
    for _ in range(3):
        launch = launcher(decoder, context)

        def launch_all(launch: Callable[[], None] = launch) -> None:
            for _ in range(count):
                launch()

        times.append(elapsed_us(launch_all, decoder.target.device) / count)
    return statistics.median(times)
