"""Time steps of many sequences of random weights, and decoding at a given τ.

Steps are compared with the floor of their products and the bytes of states and keys. Rows are those
of `bench_decode.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stree.batching.batch_decoder import BatchDecoder
from stree.batching.sequences import Request
from stree.batching.step_timing import tokens_of_row
from stree.common.clock import now
from stree.drafters.ngram import NGram
from stree.generation import GenerationConfig
from stree.models.joint import BACKTRACKING
from stree.models.layer_caches import AttentionCache
from stree.models.model import HybridModel
from stree.tree_policy.adaptive import PLAIN, AdaptiveTrees
from stree.tree_policy.policy import TreePolicy
from stree.trees.token_tree import StepTree, TokenTree
from stree_lab.benches.calls import cache_bytes, kept_bytes, weight_bytes
from stree_lab.benches.floor import Floor
from stree_lab.benches.steps import (
    GivenAcceptance,
    accepted_for,
    graphs_alone_us,
    graphs_of,
)
from stree_lab.benches.timing import Row, interleave, peak_field, side_by_side, us_fields
from stree_lab.papers.draft_rows import JointRows, ReplayRows
from stree_pipelines.evaluation.answering import gc_freeze

DECODED_FOR_PEAK = 12  # tokens
TREES = (PLAIN, TokenTree.chain(2), TokenTree.paper())


def steps_of_rows(
    target: HybridModel, drafter: HybridModel, trees: Sequence[StepTree], counts: Sequence[int],
    context: int, repeats: int, temperatures: Sequence[float] = (0.0,),
) -> Iterator[Row]:
    """Yield a row per number of rows, tree and temperature, plain decoding included: µs of a step.

    A step's time is that of its graphs: the draft, and the target's call with acceptance.

    The products of the same number of rows are timed interleaved with them. The bound adds the time
    that states take to be read and written, and keys to be read, at this run's bandwidths.
    """
    reading, in_place = _bytes_per_us(target.device)
    floor = Floor(target, max(counts) * max(tree.num_nodes for tree in trees))
    for count in counts:
        for tree, temperature in itertools.product((PLAIN, *trees), temperatures):
            decoder = _decoder(target, drafter, tree, count, context + 8 * (repeats + 8))
            functions = graphs_of(decoder, context, temperature)
            times = interleave(functions, target.device, repeats)
            products = {"floor": floor.products(count * tree.num_nodes)}
            times |= side_by_side(products, target.device, repeats)
            state_bytes, key_bytes = _memory_bytes(decoder, context)
            memory_us = 2 * state_bytes / in_place + key_bytes / reading
            bound = times["floor"]["median"] + memory_us
            yield dict(
                what="rows", num_rows=count, tree=tree.name, num_nodes=tree.num_nodes,
                context=context, temperature=temperature, us_memory=memory_us,
                state_bytes=state_bytes, key_bytes=key_bytes,
                bytes_per_us_read=reading, bytes_per_us_in_place=in_place,
                over_bound=times["target"]["median"] / bound,
                **us_fields(times),
            )
            del decoder, functions


def joint_of_rows(
    target: HybridModel, drafter: HybridModel, trees: Sequence[StepTree], counts: Sequence[int],
    context: int, repeats: int,
) -> Iterator[Row]:
    """Yield a row per number of rows and tree: µs of the target's graph under replay and `joint`.

    Under replay the accepted path is replayed, under `joint` it is fed again; both are interleaved
    with plain decoding. The row also has the products of each one's rows, the bytes of weights,
    of each one's cache, and of what each keeps there apart from states and keys, and on CUDA the
    peak of memory of each, when n-grams draft, from its buffers through the prompts to the end of
    a few steps.
    """
    peaks = {
        (count, tree): _peaks_of_ways(target, tree, count, context)
        for count, tree in itertools.product(counts, trees)
    }
    floor = Floor(target, max(counts) * max(tree.max_depth + 1 + tree.num_nodes for tree in trees))
    for count, tree in itertools.product(counts, trees):
        decoders = {
            name: _decoder(
                target, drafter, tree, count, context + 8 * (repeats + 8), backtracking=name
            )
            for name in BACKTRACKING
        }  # a graph does not keep the buffers that it reads
        decoders["plain"] = _decoder(target, drafter, PLAIN, count, context + 8 * (repeats + 8))
        targets, sizes = {}, {"weight_bytes": weight_bytes(target)}
        for name, decoder in decoders.items():
            targets[name] = graphs_of(decoder, context)["target"]
            sizes[f"cache_bytes_{name}"] = cache_bytes(decoder.cache)
            if name in BACKTRACKING:
                sizes[f"kept_bytes_{name}"] = kept_bytes(decoder.cache)
        path_nodes = tree.max_depth + 1
        times = interleave(targets, target.device, repeats)
        floors = {
            "floor_replay": floor.products(count * tree.num_nodes),
            "floor_joint": floor.products(count * (path_nodes + tree.num_nodes)),
        }
        times |= side_by_side(floors, target.device, repeats)
        yield dict(
            what="joint", num_rows=count, tree=tree.name, num_nodes=tree.num_nodes,
            path_nodes=path_nodes, context=context,
            joint_over_replay=times["joint"]["median"] / times["replay"]["median"], **sizes,
            **peaks[count, tree], **us_fields(times),
        )
        del decoder, decoders, targets


def _peaks_of_ways(
    target: HybridModel, tree: StepTree, count: int, context: int
) -> dict[str, int]:
    """Return the peaks of memory of both ways to backtrack and of plain decoding, as fields.

    A target without attention is also measured as in Snakes and Ladders, where each draft is a row
    of the batch with a state of its own. Each measurement reads prompts and decodes a few tokens.
    """
    target.pack()
    leaves = sum(not nodes for nodes in tree.shape.children)
    ways: dict[str, tuple[Any, str]] = {name: (target, name) for name in BACKTRACKING}
    if not target.config.attn_layers and target.config.num_ssm_heads:
        ways["replay_rows"] = ReplayRows(target, leaves), "replay"
        ways["joint_rows"] = JointRows(target, leaves), "replay"
    peaks: dict[str, int] = {}
    for way in (*ways, "plain"):

        def decode(way: str = way) -> None:
            model, backtracking = ways.get(way, (target, "replay"))
            plain = way == "plain"
            decoder = BatchDecoder(
                model, None if plain else NGram(), PLAIN if plain else tree, num_rows=count,
                max_length=context + 64, backtracking=backtracking,
            )
            vocab_size = target.config.vocab_size
            prompts = [tokens_of_row(row, context, vocab_size) for row in range(count)]
            decoder.generate(prompts, GenerationConfig(DECODED_FOR_PEAK, ignore_eos=True))

        peaks |= peak_field(f"peak_bytes_{way}", decode, target.device, weight_bytes(target))
    return peaks


class WithoutPrompts(AdaptiveTrees):
    """Adaptive trees for decoding alone: a drafter's time to read prompts does not count."""

    def learn_answer(self, prefill_s: float | None = None, catch_up_s: float | None = None) -> None:
        """Do nothing: answers have no end here."""


def serve_at(
    target: HybridModel, drafter: HybridModel, counts: Sequence[int], taus: Sequence[float],
    context: int, num_steps: int,
) -> Iterator[Row]:
    """Yield a row per number of rows and τ: tokens/s of plain decoding, the paper's tree and a
    choice.

    The choice is by measured cost. Host and acceptance are included, prompts are not, neither in
    the times nor in the choice. The share of a step that the host does not hide is as in
    `steps.decode_at`.
    """
    tree = TREES[-1]
    max_length = context + (tree.max_depth + 1) * (2 * num_steps + 4)
    ways: dict[str, StepTree | TreePolicy] = {
        "plain": PLAIN,
        "tree": tree,
        "modes": WithoutPrompts(TREES[1:]),
    }
    for count in counts:
        verifier = GivenAcceptance(accepted_for(1, tree.max_depth), target.device)
        decoders = {
            name: _decoder(target, drafter, way, count, max_length, verifier)
            for name, way in ways.items()
        }
        decoders["modes"].measure_step_times(counts=[count])  # all rows decode to the end
        print(f"{count} rows: costs measured", flush=True)
        for tau in taus:
            verifier.accepted.copy_(torch.tensor(accepted_for(tau, tree.max_depth)))
            speeds, shares = {}, {}
            for name, decoder in decoders.items():
                length = int(num_steps * (1 if name == "plain" else tau))
                speeds[name], us_step = _decoded_ready(decoder, context, length)
                speed = f"{name} {speeds[name]:,.0f} tokens/s, {us_step:,.0f} µs a step"
                print(f"{count} rows, τ = {tau:g}: {speed}", flush=True)
                if name != "modes":
                    shares[name] = 1 - graphs_alone_us(decoder, context, num_steps) / us_step
            yield dict(
                what="serve", num_rows=count, tau=tau, context=context,
                speedup_tree=speeds["tree"] / speeds["plain"],
                speedup_modes=speeds["modes"] / speeds["plain"],
                **{f"host_share_{name}": each for name, each in shares.items()},
                **{f"tokens_per_second_{name}": each for name, each in speeds.items()},
            )


def _decoder(
    target: HybridModel, drafter: HybridModel, tree: StepTree | TreePolicy, num_rows: int,
    max_length: int, verifier: Any = "coupled", backtracking: str = "replay",
) -> BatchDecoder:
    return BatchDecoder(
        target, None if tree == PLAIN else drafter, tree,
        num_rows=num_rows, max_length=max_length, verifier=verifier, backtracking=backtracking,
    )


def _decoded_ready(decoder: BatchDecoder, context: int, length: int) -> tuple[float, float]:
    """Call `_decoded` until a run captures no graph: the chosen trees differ from run to run."""
    captured: Any = getattr(decoder.worker.runner, "captured", ())
    _decoded(decoder, context, length)
    while True:
        known = len(captured)
        with gc_freeze.left_alone():
            found = _decoded(decoder, context, length)
        if len(captured) == known:
            return found


def _decoded(decoder: BatchDecoder, context: int, length: int) -> tuple[float, float]:
    """Return tokens/s of all rows together, after the last prompt has been read, and µs per
    step."""
    generation = GenerationConfig(length, ignore_eos=True)
    vocab_size = decoder.target.config.vocab_size
    rows = [
        decoder.admit(Request(tokens_of_row(row, context, vocab_size), generation))
        for row in range(decoder.num_rows)
    ]
    decoder.step()
    while any(len(decoder.tokens_of(row)) == 0 for row in rows):
        decoder.step()
    before = sum(len(decoder.tokens_of(row)) for row in rows)
    started = now(decoder.target.device)
    unfinished, steps = set(rows), 0
    while unfinished:
        steps += 1
        unfinished -= {report.row for report in decoder.step() if report.finish_reason}
    seconds = now(decoder.target.device) - started
    decoded = sum(len(decoder.release(row).tokens) for row in rows) - before
    return decoded / seconds, 1e6 * seconds / steps


def _memory_bytes(decoder: BatchDecoder, context: int) -> tuple[int, int]:
    """Count the bytes of all rows' states, and of keys and values of the committed tokens."""
    states = keys = 0
    for layer in decoder.cache.layers:
        if isinstance(layer, AttentionCache):
            keys += 2 * layer.keys[:, :, :context].nbytes
        elif isinstance(state := getattr(layer, "state", None), Tensor):
            states += state.nbytes
    return states, keys


def _bytes_per_us(device: torch.device) -> tuple[float, float]:
    """Measure the bandwidth of reading a GiB, and of reading and writing it in place, both counted.

    On the CPU the buffer is small enough for a test.
    """
    x = torch.ones(2**28 if device.type == "cuda" else 2**20, device=device)
    functions: dict[str, Callable[[], object]] = {
        "read": lambda: x.sum(),
        "in place": lambda: x.mul_(1.0),
    }
    times = side_by_side(functions, device, 10)
    return x.nbytes / times["read"]["median"], 2 * x.nbytes / times["in place"]["median"]
