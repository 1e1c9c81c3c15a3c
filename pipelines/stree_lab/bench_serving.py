"""Measure what serving costs: tokens a second through `stree serve`, and of its decoder alone.

python pipelines/stree_lab/bench_serving.py serving.jsonl --target checkpoints/python-docs-hybrid

The same requests (random prompts, EOS ignored) go to the batch decoder in this program, and to a
server as whole replies and as streams, from clients in processes of their own, each of which asks
again as soon as it is answered.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import stree.common.threads  # noqa: F401  (before torch is loaded)

import numpy as np

import stree
from stree.common.errors import InvariantBroken, exit_with_reason
from stree.common.words import device_name
from stree_lab.benches.command import ROOT, require_numbers, require_results_file
from stree_pipelines.console.command_line import CommandParser
from stree_pipelines.evaluation.answering import gc_freeze
from stree_pipelines.evaluation.result_store import append_line

SPAWN = get_context("spawn")
Body = dict[str, Any]


@dataclass
class Answered:
    """Moments of one request, in seconds of the host's clock, and the tokens of its answer."""

    asked: float
    tokens: int = 0
    events: list[float] = field(default_factory=list)


def alone(options: Any, bodies: Sequence[Body]) -> tuple[list[float], str]:
    """Return the tokens a second of each turn of the batch decoder, and the device's name."""
    decoder = stree.load(
        options.target, options.drafter, tree=options.tree, num_rows=options.concurrency,
        max_length=options.max_length, device=options.device, dtype=options.dtype, temperature=0.0,
    )
    requests = [
        stree.Request(
            each["prompt"], stree.GenerationConfig(each["max_tokens"], 0.0, ignore_eos=True)
        )
        for each in bodies
    ]
    decoder.warm_up(requests[0])
    decoder.generate(requests)
    rates = []
    with gc_freeze.left_alone():
        for _ in range(options.turns):
            started = time.perf_counter()
            tokens = sum(len(each.tokens) for each in decoder.generate(requests))
            rates.append(tokens / (time.perf_counter() - started))
    return rates, device_name(decoder.target.device)


@contextmanager
def serving(options: Any) -> Iterator[str]:
    """Run a server of the same decoder inside the block; yield its address as HOST:PORT."""
    command = [
        sys.executable, str(ROOT / "pipelines" / "serve.py"), options.target, "--port", "0",
        "--num_rows", str(options.concurrency), "--max_length", str(options.max_length),
        "--device", options.device, "--dtype", options.dtype, "--temperature", "0",
    ]
    for name in ("drafter", "tree", "prefix_memory"):
        value = getattr(options, name)
        command += [] if value is None else [f"--{name}", str(value)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"served at http://(\S+)/v1", line):
                break
        else:
            raise InvariantBroken("the server has ended before it was ready")
        try:
            yield found[1]
        finally:
            process.terminate()


def ask(address: str, bodies: Sequence[Body]) -> list[Answered]:
    """Ask one request after the other over one connection."""
    connection, answered = http.client.HTTPConnection(address, timeout=600), []
    for body in bodies:
        one = Answered(time.perf_counter())
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
        )
        reply, last = connection.getresponse(), b""
        for line in reply:
            if line.startswith((b"data: {", b"{")):
                one.events.append(time.perf_counter())
                last = line.removeprefix(b"data: ")
        reply.read()  # nothing is left; the connection is free then
        if reply.status != 200:
            raise InvariantBroken(f"the server answered {reply.status}: {last[:200]!r}")
        one.tokens = json.loads(last)["usage"]["completion_tokens"]
        answered.append(one)
    return answered


def ask_at_once(address: str, shares: Sequence[Sequence[Body]]) -> list[Answered]:
    """Ask each share's requests over a connection of its own, all of them at once."""
    with ThreadPoolExecutor(len(shares)) as pool:
        several = list(pool.map(ask, [address] * len(shares), shares))
    return [each for some in several for each in some]


def figures_of(answered: Sequence[Answered]) -> dict[str, Any]:
    """Compute tokens a second, and in milliseconds the first event's and the gaps' spread."""
    seconds = max(each.events[-1] for each in answered) - min(each.asked for each in answered)
    figures = {"tokens_per_s": sum(each.tokens for each in answered) / seconds}
    firsts = [each.events[0] - each.asked for each in answered]
    gaps = [float(gap) for each in answered for gap in np.diff(each.events)]
    for name, values in (("first_event_ms", firsts), ("gap_ms", gaps)):
        for percentile in (50, 99) if values else ():
            figures[f"{name}_p{percentile}"] = 1e3 * float(np.percentile(values, percentile))
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandParser("bench_serving.py", description=__doc__)
    add = parser.add_argument
    add("out", type=str, help="file to write, JSON lines")
    add("--target", type=str, required=True, help="target folder")
    add("--drafter", type=str | None, help="drafter folder or n-grams")
    add("--tree", type=str | None, help="tree or tree policy")
    add("--prefix_memory", "--prefix-memory", type=float | None,
        help="of the server; 0 keeps no prefixes, as the decoder alone keeps none")
    add("--concurrency", type=int, default=16, help="rows, and connections")
    add("--clients", type=int, default=4, help="processes that the connections are divided among")
    add("--num_requests", "--num-requests", type=int, default=192, help="of a turn")
    add("--prompt_tokens", "--prompt-tokens", type=int, default=32, help="the most of a prompt")
    add("--new_tokens", "--new-tokens", type=int, default=384, help="the most of an answer; half "
        "of it is the least")
    add("--max_length", "--max-length", type=int, default=2048)
    add("--turns", type=int, default=3)
    add("--vocabulary", type=int, default=4096, help="prompts have tokens below it")
    add("--dtype", type=str, default="auto")
    add("--device", type=str, default="auto")
    options = parser.parse_args(arguments)
    require_numbers(options, "concurrency", "clients", "num_requests", "new_tokens", "turns")
    require_results_file(options.out)
    draw = random.Random(0)
    bodies: list[Body] = [
        {
            "prompt": draw.choices(range(options.vocabulary), k=options.prompt_tokens),
            "max_tokens": draw.randint(options.new_tokens // 2, options.new_tokens),
            "temperature": 0, "ignore_eos": True,
        }
        for _ in range(options.num_requests)
    ]
    with SPAWN.Pool(1) as one:
        rates, device = one.apply(alone, (options, bodies))
    about = {
        name: getattr(options, name)
        for name in (
            "target", "drafter", "tree", "prefix_memory", "concurrency", "num_requests",
            "new_tokens",
        )
    }
    decoder_rate = float(np.median(rates))
    shares = [bodies[place :: options.concurrency] for place in range(options.concurrency)]
    print(f"{device}: the decoder alone {', '.join(f'{each:.0f}' for each in rates)} tokens/s")
    with serving(options) as address, SPAWN.Pool(options.clients) as clients:
        for kind in ("whole", "stream"):
            extra: Body = {"stream": True, "stream_options": {"include_usage": True}}
            asked = [
                [{**each, **(extra if kind == "stream" else {})} for each in share]
                for share in shares
            ]
            each_client = [asked[place :: options.clients] for place in range(options.clients)]
            for turn in range(1 + options.turns):
                several = clients.starmap(ask_at_once, [(address, each) for each in each_client])
                figures = figures_of([each for some in several for each in some])
                if not turn:
                    continue  # it captures the graphs of prompts
                figures["ratio"] = figures["tokens_per_s"] / decoder_rate
                told = ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
                print(f"{kind}: {told}", flush=True)
                row = {**about, "kind": kind, "turn": turn, "device": device, **figures}
                append_line(Path(options.out), json.dumps({**row, "decoder_tokens_per_s": rates}))


if __name__ == "__main__":
    exit_with_reason(main)
