"""Measure a decoder's step times by number of rows and tree, before it serves requests."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

from stree.common.threads import for_decoding

import torch

from stree.batching.sequences import Request
from stree.batching.serve import Rows
from stree.common.clock import now
from stree.common.errors import InvariantBroken, UsageError
from stree.common.words import counted, device_name, held_dtype
from stree.engine.scheduler import Scheduler
from stree.engine.worker import Worker
from stree.generation import GenerationConfig
from stree.tree_policy.step_times import StepTimes
from stree.trees.token_tree import StepTree

LOG = logging.getLogger(__name__)
NUM_TIMINGS = 5
NUM_UNTIMED = 2  # first steps of a timing
MAX_DEFAULT_CONTEXT = 32  # committed tokens before a timed step


def row_counts(most: int) -> list[int]:
    """Return the numbers of rows that graphs of steps are captured for: 1, 2, 4, …, most."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


def length_to_time(tree: StepTree) -> int:
    """Return the least max_length for steps of the tree after MAX_DEFAULT_CONTEXT tokens."""
    return MAX_DEFAULT_CONTEXT + 1 + (NUM_UNTIMED + 2) * (tree.max_depth + 1)


def context_of(tree: StepTree, max_length: int) -> int:
    """Return the default number of prompt tokens before timed steps of trees up to this one."""
    left = max_length - length_to_time(tree) + MAX_DEFAULT_CONTEXT
    return max(1, min(MAX_DEFAULT_CONTEXT, max_length // 4, left))


def room_to_time(tree: StepTree, max_length: int, context: int) -> int:
    """Return how many steps can be timed after `context` tokens and NUM_UNTIMED other steps.

    Room is left for the request's first token, and for the nodes of one more tree.
    """
    return (max_length - context - 1) // (tree.max_depth + 1) - NUM_UNTIMED - 1


def tokens_of_row(row: int, num_tokens: int, vocab_size: int) -> list[int]:
    """Return tokens to time a row on: other ones at each position than any other row has.

    Rows of equal tokens would choose the same experts in every layer, and steps of many rows would
    take too little time.

    Example:
        >>> tokens_of_row(0, 3, 2048), tokens_of_row(1, 3, 2048)
        ([1, 1776, 1503], [998, 725, 452])
    """
    return [(1 + 997 * row + 7919 * position) % vocab_size for position in range(num_tokens)]


def measure_step_times(
    decoder: Rows, scheduler: Scheduler, worker: Worker, trees: Sequence[StepTree],
    context: int | None, num_steps: int, counts: Sequence[int] | None,
    generation: GenerationConfig, max_length: int,
) -> StepTimes:
    """Time steps of requests with each tree and number of rows, the host's work on them included.

    With a small model on a fast device the host's work takes longer than the device's. The trees
    have NUM_TIMINGS turns, after one that captures their graphs. A time is the least of its turns,
    so that a short disturbance of the machine does not favour one tree.

    Args:
        decoder: All its rows must be free.
        scheduler, worker: The decoder's.
        trees: Trees to time.
        context: Tokens of each row's prompt; None is `context_of` the deepest tree. Steps of the
            trees follow each other in the same rows until these are full.
        num_steps: Steps to time in a turn, after NUM_UNTIMED others.
        counts: Numbers of rows to time; None is 1, 2, 4, … up to all rows.
        generation: Settings of the rows, but for what ends an answer: sampling takes longer, and
            top-k or top-p much longer.
        max_length: Tokens of the decoder's longest sequence.

    Raises:
        UsageError: When max_length or the target's positions leave no room for a step.
        StreeError: The error of a step, or of reading a prompt.
    """
    began = perf_counter()
    target, deepest = worker.step.target, max(trees, key=lambda tree: tree.max_depth)
    if (positions := target.config.num_positions) is not None:
        max_length = min(max_length, positions + deepest.max_depth + 1)
    context = context_of(deepest, max_length) if context is None else context
    if (most := room_to_time(deepest, max_length, context)) < 1:
        raise UsageError(
            f"{max_length} tokens (max_length, or the target's positions) leave no room to time "
            f"steps of {deepest} after {context} tokens: raise max_length, or lower the context"
        )
    counts = row_counts(scheduler.limits.num_rows) if counts is None else counts
    costs = StepTimes(
        device=device_name(target.device), dtype=held_dtype(target),
        temperature=generation.temperature, catch_up=_catch_up_s(worker, context),
    )
    for count in counts:
        LOG.info(
            "timing steps of %s with %s", counted(count, "row"),
            ", ".join(tree.name for tree in trees),
        )
        seconds: dict[StepTree, list[float]] = {tree: [] for tree in trees}
        left = 0
        try:
            for turn, tree in itertools.product(range(1 + NUM_TIMINGS), trees):
                timed = min(num_steps, most) if turn else 0
                needed = (NUM_UNTIMED + timed) * (tree.max_depth + 1)
                with scheduler.only(tree):
                    # The first step reported is in flight already, perhaps with a deeper tree
                    if needed + deepest.max_depth > left:
                        _release_all(decoder, scheduler)
                        left = max_length - context - deepest.max_depth - 2
                        prompts = [
                            tokens_of_row(row, context, target.config.vocab_size)
                            for row in range(count)
                        ]
                        _begin(decoder, prompts, replace(generation, max_new_tokens=1 + left))
                    left -= needed
                    seconds[tree].append(_step_s(decoder, count, timed))
        finally:
            with scheduler.only(deepest):  # the policy learns nothing of these answers
                _release_all(decoder, scheduler)
        costs.seconds |= {(count, tree): min(each[1:]) for tree, each in seconds.items()}
    costs.took_s = perf_counter() - began
    return costs


def _begin(decoder: Rows, prompts: Sequence[list[int]], generation: GenerationConfig) -> None:
    """Admit rows that only their number of tokens ends, and step until all prompts are read."""
    endless = replace(
        generation, min_new_tokens=0, ignore_eos=True, stop_strings=(), num_return_sequences=1
    )
    reading = {
        decoder.admit(Request(prompt, replace(endless, seed=seed).without_unread()))
        for seed, prompt in enumerate(prompts)
    }
    while reading:
        reading -= _step(decoder)


def _release_all(decoder: Rows, scheduler: Scheduler) -> None:
    for row in list(scheduler.sequences):
        decoder.release(row)


def _step(decoder: Rows) -> set[int]:
    """Step, and return the rows with outputs; raise the error of a row, or that none is left."""
    outputs = decoder.step()
    for each in outputs:
        if each.error is not None:
            raise each.error
    if not outputs:
        raise InvariantBroken("rows have ended while their steps were timed")
    return {each.row for each in outputs}


def _step_s(decoder: Rows, count: int, num_steps: int) -> float:
    """Return the seconds of one of `num_steps` steps after NUM_UNTIMED others; 0.0 of none."""
    for _ in range(NUM_UNTIMED):
        told = _step(decoder)
    started = perf_counter()
    for _ in range(num_steps):
        told = _step(decoder)
    seconds = (perf_counter() - started) / max(1, num_steps)
    if len(told) != count:
        raise InvariantBroken(f"only rows {sorted(told)} of {count} were timed to the end")
    return seconds


def _catch_up_s(worker: Worker, num_tokens: int) -> float:
    """Return the seconds of the fastest of several reads of `num_tokens` tokens by the drafter."""
    if (drafter := worker.step.drafter) is None:
        return 0.0
    target, seconds = worker.step.target, []
    tokens = torch.tensor(tokens_of_row(0, num_tokens, target.config.vocab_size))
    tokens = tokens.to(target.device)
    with for_decoding(target), torch.no_grad():
        worker.prepare_catching_up(0)
        for _ in range(1 + NUM_TIMINGS):
            drafter.clear(0)
            started = now(target.device)
            worker.let_drafter_read(0, tokens)
            seconds.append(now(target.device) - started)
    return min(seconds)
