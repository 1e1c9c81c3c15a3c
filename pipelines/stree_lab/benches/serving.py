"""Decoders that `bench_serving.py` serves, the same decoders alone, and the clients of a server."""

from __future__ import annotations

import http.client
import json
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import stree
from stree.batching.batch_decoder import BatchDecoder
from stree.batching.state import BatchState
from stree.common.errors import InvariantBroken
from stree.common.words import device_name
from stree.drafters import Proposal
from stree.trees.token_tree import PLAIN as PLAIN_TREE
from stree.trees.token_tree import StepTree, as_tree
from stree.trees.tree_batch import TreeBatch
from stree_lab.benches.models import random_drafter, random_target
from stree_lab.benches.steps import GivenAcceptance, accepted_for
from stree_pipelines.commands import serve
from stree_pipelines.evaluation.answering import gc_freeze

PLAIN, CHAIN, TREE, CHOSEN = MODES = ("plain", "chain", "tree", "chosen")
Body = dict[str, Any]


@dataclass
class Answered:
    """Moments of one request, in seconds of the host's clock, and the tokens of its answer."""

    asked: float
    tokens: int = 0
    events: list[float] = field(default_factory=list)


class AcceptanceByForm(GivenAcceptance):
    """Verifier that accepts as many drafts as are given: one τ for chains, another for trees."""

    def __init__(self, chain: list[int], tree: list[int], device: torch.device) -> None:
        super().__init__(tree, device)
        self.of_trees, self.of_chains = self.accepted, torch.tensor(chain, device=device)

    def choose(
        self, logits: Tensor, proposal: Proposal, tree_batch: TreeBatch, rows: BatchState
    ) -> tuple[Tensor, Tensor]:
        tree = tree_batch.trees[0]
        is_chain = tree.max_depth + 1 == tree.num_nodes
        self.accepted = self.of_chains if is_chain else self.of_trees
        return super().choose(logits, proposal, tree_batch, rows)


def speculation_of(bench: Namespace, mode: str) -> str | bool:
    """Return the `speculation` of a mode's requests: a tree's name, False for plain decoding."""
    return {CHAIN: bench.chain, TREE: bench.tree}.get(mode, mode == CHOSEN)


def tree_of(bench: Namespace, mode: str) -> StepTree | None:
    """Return the tree of a mode's requests, None for the decoder's choice."""
    name = speculation_of(bench, mode)
    return None if name is True else as_tree(name) if name else PLAIN_TREE


def decoder_of(options: Namespace) -> BatchDecoder:
    """Make one decoder for all modes, and let a thread measure what it reaches alone when asked.

    Args:
        options: Those of `stree serve`, with `bench`, the options of the bench, and `link`, over
            which go the device and the seconds of the start, then what `tell_alone` is asked.
    """
    bench, clock = options.bench, Clock()
    named = ((CHAIN, bench.chain), (TREE, bench.tree))
    trees = [name for mode, name in named if {mode, CHOSEN} & set(bench.modes)]
    options.tree = max(trees, key=lambda name: as_tree(name).num_nodes, default=None)
    if CHOSEN in bench.modes:
        options.tree = " or ".join(trees)
    options.drafter = bench.drafter if trees else None
    decoder = serve.decoder_of(options) if bench.shape is None else random_decoder(options)
    clock.end("load")
    for mode in bench.modes:
        serve.say(f"{clock}: preparing up to {decoder.num_rows} rows of the mode {mode}")
        settings = stree.GenerationConfig(4, bench.temperature, ignore_eos=True)
        decoder.warm_up(stree.Request([1, 2, 3], settings, tree_of(bench, mode)))
    clock.end("warm_up")
    options.link.send((device_name(decoder.target.device), clock.seconds))
    Thread(target=tell_alone, args=(decoder, options), daemon=True).start()
    return decoder


def tell_alone(decoder: BatchDecoder, options: Namespace) -> None:
    """Send the decoder's tokens/s for each mode, bodies and connections that the link brings."""
    with suppress(EOFError):
        while True:
            mode, bodies, concurrency = options.link.recv()
            try:
                rate: Any = alone(decoder, bodies, concurrency, tree_of(options.bench, mode))
            except Exception as error:
                rate = InvariantBroken(f"the decoder alone has failed: {error}")
            options.link.send(rate)


class Clock:
    """Seconds since it was made, and of each phase since then.

    Attributes:
        seconds: Seconds of each phase that has ended, by its name.
    """

    def __init__(self) -> None:
        self._made = self._since = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def end(self, phase: str) -> None:
        """End a phase, and begin the next."""
        before, self._since = self._since, time.perf_counter()
        self.seconds[phase] = self._since - before

    def __str__(self) -> str:
        return f"{time.perf_counter() - self._made:6.1f} s"


def random_decoder(options: Namespace) -> BatchDecoder:
    """Make a decoder of random weights in a shape, whose drafts are accepted as often as given."""
    bench = options.bench
    device = torch.device(
        bench.device if bench.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    )
    target = random_target(bench.shape, device)
    drafter = random_drafter(bench.shape, device) if options.tree else None
    chain, tree = (
        accepted_for(tau, as_tree(name).max_depth)
        for tau, name in ((bench.chain_tau, bench.chain), (bench.tau, bench.tree))
    )
    decoder = BatchDecoder(
        target, drafter, options.tree, num_rows=options.num_rows, max_length=options.max_length,
        tokenizer=tokenizer_of_numbers(target.config.vocab_size),
        verifier=AcceptanceByForm(chain, tree, device),
    )
    if decoder.tree_policy.needs_step_times:
        decoder.measure_step_times(generation=stree.GenerationConfig(temperature=bench.temperature))
    return decoder


def tokenizer_of_numbers(vocab_size: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer whose tokens are numbers, since random weights have none."""
    words = WordLevel({f"w{number}": number for number in range(vocab_size)}, unk_token="w0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))


def alone(
    decoder: BatchDecoder, bodies: Sequence[Body], concurrency: int, tree: StepTree | None = None
) -> float:
    """Return tokens/s of the batch decoder alone, with a given number of requests under way."""

    def requests() -> Iterator[stree.Request | None]:
        for each in bodies:
            while decoder.num_rows - decoder.num_free_rows >= concurrency:
                yield None
            settings = stree.GenerationConfig(
                each["max_tokens"], each["temperature"], seed=each.get("seed"), ignore_eos=True
            )
            yield stree.Request(each["prompt"], settings, tree)

    with gc_freeze.left_alone():
        started = time.perf_counter()
        tokens = sum(
            len(served.release().tokens)
            for served in decoder.serve(requests()) if served.report.finish_reason
        )
        return tokens / (time.perf_counter() - started)


# Clients

_next: Any = None  # number of the next request, which all clients' processes share


def share(number: Any) -> None:
    """Let a client's process take the number of its next request from a shared value."""
    global _next
    _next = number


def ask(address: str, bodies: Sequence[Body]) -> list[Answered]:
    """Ask over one connection, as soon as it is free, the request whose turn it is."""
    connection = http.client.HTTPConnection(address, timeout=600)
    answered: list[Answered] = []
    while True:
        with _next.get_lock():
            place = _next.value
            _next.value += 1
        if place >= len(bodies):
            return answered
        answered.append(ask_one(connection, bodies[place]))


def ask_one(connection: http.client.HTTPConnection, body: Body) -> Answered:
    """Ask one request, and note when each event with text comes."""
    one = Answered(time.perf_counter())
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
    )
    reply, last = connection.getresponse(), b""
    for line in reply:
        if line.startswith((b"data: {", b"{")):
            last = line.removeprefix(b"data: ")
            if b'"choices":[]' not in last:  # not that of the usage
                one.events.append(time.perf_counter())
    reply.read()  # nothing is left; the connection is free then
    if reply.status != 200:
        raise InvariantBroken(f"the server answered {reply.status}: {last[:200]!r}")
    one.tokens = json.loads(last)["usage"]["completion_tokens"]
    return one


def ask_at_once(address: str, bodies: Sequence[Body], connections: int) -> list[Answered]:
    """Ask requests over several connections at once."""
    with ThreadPoolExecutor(connections) as pool:
        several = list(pool.map(ask, [address] * connections, [bodies] * connections))
    return [each for some in several for each in some]


def figures_of(answered: Sequence[Answered]) -> dict[str, float]:
    """Compute requests and tokens a second, and the spread of times in milliseconds.

    A token's time is an answer's after its first event, divided by its tokens.
    """
    seconds = max(each.events[-1] for each in answered) - min(each.asked for each in answered)
    figures = {
        "requests_per_s": len(answered) / seconds,
        "tokens_per_s": sum(each.tokens for each in answered) / seconds,
    }
    streams = [each for each in answered if len(each.events) > 1]
    times = {
        "first_event_ms": [each.events[0] - each.asked for each in answered],
        "gap_ms": [float(gap) for each in streams for gap in np.diff(each.events)],
        "token_ms": [
            (each.events[-1] - each.events[0]) / max(1, each.tokens - 1) for each in streams
        ],
    }
    for name, values in times.items():
        for percentile in (50, 99) if values else ():
            figures[f"{name}_p{percentile}"] = 1e3 * float(np.percentile(values, percentile))
    return figures
