"""Measure a decoder's step times by number of rows and tree, before it serves requests."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from stree.batching.state import BatchState
from stree.batching.step import StepInputs
from stree.common.clock import now
from stree.common.errors import UsageError
from stree.common.words import counted, device_name, held_dtype
from stree.engine.row_store import SavedRow
from stree.engine.worker import Worker
from stree.generation import GenerationConfig
from stree.tree_policy.step_times import StepTimes
from stree.trees.build import make_tree_batch
from stree.trees.token_tree import StepTree
from stree.trees.tree_batch import TreeBatch

LOG = logging.getLogger(__name__)
NUM_TIMINGS = 5
NUM_UNTIMED = 2  # first steps of a timing
MAX_DEFAULT_CONTEXT = 32  # committed tokens before a timed step


def row_counts(most: int) -> list[int]:
    """Return the numbers of rows that graphs of steps are captured for: 1, 2, 4, …, most."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


def context_of(max_length: int) -> int:
    """Return the default number of committed tokens before a timed step."""
    return min(MAX_DEFAULT_CONTEXT, max_length // 4)


def length_to_time(tree: StepTree) -> int:
    """Return the least max_length with which a step of the tree can be timed."""
    return MAX_DEFAULT_CONTEXT + (NUM_UNTIMED + 1) * (tree.max_depth + 1)


def room_to_time(tree: StepTree, max_length: int, context: int) -> int:
    """Return how many steps can be timed after `context` tokens and NUM_UNTIMED other steps."""
    return (max_length - context) // (tree.max_depth + 1) - NUM_UNTIMED


def tokens_of_row(row: int, num_tokens: int, vocab_size: int) -> list[int]:
    """Return tokens to time a row on: other ones at each position than any other row has.

    Rows of equal tokens would choose the same experts in every layer, and steps of many rows would
    take too little time.

    Example:
        >>> tokens_of_row(0, 3, 2048), tokens_of_row(1, 3, 2048)
        ([1, 1776, 1503], [998, 725, 452])
    """
    return [(1 + 997 * row + 7919 * position) % vocab_size for position in range(num_tokens)]


@torch.no_grad()
def measure_step_times(
    worker: Worker, trees: Sequence[StepTree], context: int | None, num_steps: int,
    counts: Sequence[int] | None, generation: GenerationConfig, max_length: int,
    eos_token_ids: tuple[int, ...],
) -> StepTimes:
    """Time steps of a worker with each tree and number of rows.

    The trees have NUM_TIMINGS turns, after one that captures their graphs. A time is the least of
    its turns, so that a short disturbance of the machine does not favour one tree.

    Args:
        worker: All its rows must be free.
        trees: Trees to time.
        context: Committed tokens before the first step, the same ones in all rows; None is
            `context_of` max_length. Each row goes on with a token and a seed of its own.
        num_steps: Steps to time in a turn, after NUM_UNTIMED others.
        counts: Numbers of rows to time; None is 1, 2, 4, … up to all rows.
        generation: Settings of the rows: sampling takes longer, and top-k or top-p much longer.
        max_length: Tokens of the longest sequence.
        eos_token_ids: Tokens that end an answer.

    Raises:
        UsageError: When max_length leaves no room for a step.
    """
    worker.prepare_catching_up(0)
    began = time.perf_counter()
    target, cache = worker.step.target, worker.step.cache
    context = context_of(max_length) if context is None else context
    counts = row_counts(len(worker.state.active)) if counts is None else counts
    tokens = torch.tensor(tokens_of_row(0, context, target.config.vocab_size))
    tokens = tokens.to(target.device)
    cache.clear(0)
    target.prefill(tokens[None], cache.at(0))
    prefix = cache.save(0, context)
    costs = StepTimes(
        device=device_name(target.device), dtype=held_dtype(target),
        temperature=generation.temperature,
    )
    for count in counts:
        LOG.info(
            "timing steps of %s with %s", counted(count, "row"),
            ", ".join(tree.name for tree in trees),
        )
        seconds: dict[StepTree, list[float]] = {tree: [] for tree in trees}
        read_s = []
        for turn, tree in itertools.product(range(1 + NUM_TIMINGS), trees):
            room = room_to_time(tree, max_length, context)
            if room < 1:
                raise UsageError(
                    f"max_length {max_length} leaves no room to time steps of {tree} after "
                    f"{context} tokens: raise it, or lower the context"
                )
            timed = min(num_steps, room) if turn else 0
            read_s.append(_begin_after(
                worker, count, prefix, tokens, generation, generation.eos_ids(eos_token_ids)
            ))
            tree_batch = make_tree_batch([tree] * count, target.device)
            rows = worker.state.narrow(0, count, [generation])
            run = partial(_run_steps, worker, rows, tree_batch, context, max_length)
            run(range(NUM_UNTIMED))
            started = now(target.device)
            run(range(NUM_UNTIMED, NUM_UNTIMED + timed))
            if timed:
                seconds[tree].append((now(target.device) - started) / timed)
        costs.catch_up = min(read_s)
        costs.seconds |= {(count, tree): min(each) for tree, each in seconds.items()}
    worker.state.active.zero_()
    costs.took_s = time.perf_counter() - began
    return costs


def _run_steps(
    worker: Worker, rows: BatchState, tree_batch: TreeBatch, context: int, max_length: int,
    steps: range,
) -> None:
    """Launch steps without reading their reports, so that the host does not slow them down."""
    longest_block = tree_batch.max_depth + 1
    for step in steps:
        position = min(context + step * longest_block, max_length)
        inputs = StepInputs(rows, tree_batch, longest_block if step else 1, position)
        worker.runner.launch(inputs, lambda phase: None)
        worker.runner.drop()


def _begin_after(
    worker: Worker, count: int, prefix: SavedRow, tokens: Tensor, generation: GenerationConfig,
    eos_ids: frozenset[int],
) -> float:
    """Begin `count` rows after `tokens`; return the drafter's seconds to read those of the last."""
    target, cache, drafter = worker.step.target, worker.step.cache, worker.step.drafter
    seconds, vocab_size = 0.0, target.config.vocab_size
    for row in range(count):
        cache.clear(row)
        cache.load(prefix, row)
        own = replace(generation, seed=row)
        worker.state.set(row, own, tokens.tolist(), vocab_size, eos_ids)
        if drafter is not None:
            drafter.clear(row)
            started = now(target.device)
            worker.let_drafter_read(row, tokens)
            seconds = now(target.device) - started
        *_, root = tokens_of_row(row, len(tokens) + 1, vocab_size)
        worker.state.begin(row, len(tokens), root)
    return seconds
