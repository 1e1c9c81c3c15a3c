"""Measure what clients of `stree serve` get: requests and tokens a second, and how long they wait.

python pipelines/stree_lab/bench_serving.py serving.jsonl --target checkpoints/python-docs-hybrid
python pipelines/stree_lab/bench_serving.py serving.jsonl --target checkpoints/python-docs-hybrid \\
    --drafter runs/quickstart/drafter/latest --prompts data/python-docs/prompts.jsonl \\
    --modes plain chain tree chosen --concurrency 1 4 16 64
python pipelines/stree_lab/bench_serving.py 8b.jsonl --shape 8b --tau 2.5 --chain_tau 2 \\
    --modes plain chain tree chosen --concurrency 1 4 16 64

One server has all modes: plain decoding, a chain, a tree, and one of them chosen at each step.
Its requests name theirs by `speculation`. For each number of connections and each mode the batch
decoder alone decodes the requests first, in the server's process while that is idle. Then clients
in processes of their own send the same requests over that number of connections, whole and as
streams; a connection sends its next request as soon as it is answered. Each row is written when it
is measured, with the seconds of each phase. A shape has random weights: its drafts are accepted as
often as the options say. EOS is ignored.
"""

from __future__ import annotations

import http.client
import json
import random
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import cycle, islice, product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import stree.common.threads  # noqa: F401  (before torch is loaded)

import numpy as np

from stree.checkpoints.tokenizer import load_tokenizer
from stree.common.errors import InvariantBroken, UsageError, exit_with_reason
from stree.prompts import chat_prompt
from stree_lab.benches.command import require_numbers, require_results_file, require_some
from stree_lab.benches.models import SHAPES
from stree_lab.benches.serving import (
    MODES,
    PLAIN,
    Body,
    Clock,
    ask_at_once,
    decoder_of,
    figures_of,
    share,
    speculation_of,
)
from stree_pipelines.commands.serve import build_parser as server_parser
from stree_pipelines.commands.serve import listening, serve
from stree_pipelines.console.command_line import CommandParser
from stree_pipelines.evaluation.benchmarks import PROMPT_FORMAT, load_benchmark
from stree_pipelines.evaluation.result_store import append_line

FORK = get_context("fork")
KINDS: dict[str, Body] = {
    "whole": {}, "stream": {"stream": True, "stream_options": {"include_usage": True}},
}


def build_parser() -> CommandParser:
    parser = CommandParser("bench_serving.py", description=__doc__)
    add = parser.add_argument
    add("out", type=str, help="file to write, JSON lines")
    add("--target", type=str | None, help="target folder")
    add("--drafter", type=str | None, help="drafter folder or n-grams, for modes that draft")
    add("--shape", type=str | None, help=f"in place of a target: {', '.join(SHAPES)}")
    add("--tau", type=float, default=2.5, help="of a shape: acceptance length of the tree")
    add("--chain_tau", type=float, default=2.0, help="of a shape: of the chain")
    add("--modes", type=str, nargs="+", default=[PLAIN], help=f"of {', '.join(MODES)}")
    add("--chain", type=str, default="chain-2", help="tree of the mode chain")
    add("--tree", type=str, default="paper", help="tree of the mode tree")
    add("--prefix_memory", type=float, default=0.0,
        help="of the server; 0 keeps no prefixes, as the decoder alone keeps none")
    add("--concurrency", type=int, nargs="+", default=[16], help="connections")
    add("--num_rows", type=int | None,
        help="of the batch (default: the most connections); with fewer, a free row never waits for "
        "a client")
    add("--clients", type=int, default=4, help="processes that the connections are divided among")
    add("--num_requests", type=int, default=192,
        help="of a turn; fewer connections have as much less, at least 24")
    add("--prompts", type=str | None,
        help=f"file of questions (default: random tokens); {PROMPT_FORMAT}")
    add("--prompt_tokens", type=int, default=32, help="of a random prompt")
    add("--new_tokens", type=int, default=384,
        help="the most of an answer; half of it is the least")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--max_length", type=int, default=2048)
    add("--turns", type=int, default=3)
    add("--vocabulary", type=int, default=4096, help="random prompts have tokens below it")
    add("--dtype", type=str, default="auto")
    add("--device", type=str, default="auto")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    require_numbers(options, "concurrency", "clients", "num_requests", "new_tokens", "turns")
    require_some("modes", options.modes, MODES)
    if (options.target is None) == (options.shape is None):
        raise UsageError("--target and --shape: wanted one of them")
    if options.shape is not None:
        require_some("shape", [options.shape], SHAPES)
    elif options.drafter is None and set(options.modes) != {PLAIN}:
        raise UsageError(f"--modes {' '.join(options.modes)} need a drafter: give --drafter")
    require_results_file(options.out)
    for row, figures in measure(options, requests_of(options)):
        shown = ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
        about = f"{row['mode']}, {row['concurrency']} connections, {row['kind']}"
        print(f"{about}: {shown}", flush=True)
        append_line(Path(options.out), json.dumps({**row, **figures}))


def requests_of(options: Any) -> dict[int, list[Body]]:
    """Draw the requests of a turn, by the number of connections."""
    draw, vocabulary = random.Random(0), range(options.vocabulary)
    if options.prompts is None:
        prompts = [
            draw.choices(vocabulary, k=options.prompt_tokens) for _ in range(options.num_requests)
        ]
    else:
        tokenizer = load_tokenizer(options.target)
        prompts = [
            chat_prompt(tokenizer, [{"role": "user", "content": each.turns[0]}]).ids
            for each in load_benchmark(options.prompts).prompts
        ]
    bodies: list[Body] = [
        {
            "prompt": prompt,
            "max_tokens": draw.randint(options.new_tokens // 2, options.new_tokens),
            "temperature": options.temperature, "ignore_eos": True,
            **({"seed": number} if options.temperature else {}),
        }
        for number, prompt in enumerate(islice(cycle(prompts), options.num_requests))
    ]
    most = max(options.concurrency)
    return {
        each: bodies[: max(min(24, len(bodies)), len(bodies) * each // most)]
        for each in options.concurrency
    }


def measure(
    options: Any, asked: dict[int, list[Body]]
) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """Yield a row and its figures per number of connections, mode, kind of reply and turn."""
    names = ("target", "drafter", "shape", "prefix_memory", "new_tokens", "temperature", "prompts")
    given = {name: getattr(options, name) for name in names}
    drafting = {"chain": options.chain, "tree": options.tree}
    if options.shape is not None:
        drafting |= {"tau": options.tau, "chain_tau": options.chain_tau}
    clock, number = Clock(), FORK.Value("q", 0)
    # Forked while this process has one thread, so that no client imports torch
    with serving(options) as (address, link, device, start), FORK.Pool(
        options.clients, share, (number,)
    ) as clients:
        print(f"{clock}: the server is ready, {shown_seconds(start)}", flush=True)
        for (concurrency, bodies), mode in product(asked.items(), options.modes):
            def say(phase: str, about: str = f"{mode}, {concurrency} connections") -> None:
                print(f"{clock}: {about}, {phase}", flush=True)

            say("the decoder alone")
            few, phases = 2 * concurrency, Clock()  # a few capture what is not captured yet
            rate_alone(link, mode, bodies[:few], concurrency)
            rates = [rate_alone(link, mode, bodies, concurrency) for _ in range(options.turns)]
            phases.end("alone")
            num_clients = min(options.clients, concurrency)
            shares = [len(range(place, concurrency, num_clients)) for place in range(num_clients)]
            for kind, extra in KINDS.items():
                say(kind)
                more = {**extra, "speculation": speculation_of(options, mode)}
                sent = [each | more for each in bodies]
                for turn in range(1 + options.turns):
                    asks = [(address, sent if turn else sent[:few], each) for each in shares]
                    number.value = 0
                    several = clients.starmap(ask_at_once, asks, chunksize=1)
                    if not turn:
                        continue
                    figures = figures_of([each for part in several for each in part])
                    figures["ratio"] = figures["tokens_per_s"] / float(np.median(rates))
                    phases.end("requests")
                    yield {
                        **given, "mode": mode, **(drafting if mode != PLAIN else {}),
                        "concurrency": concurrency, "num_requests": len(bodies),
                        "num_rows": options.num_rows or max(options.concurrency),
                        "kind": kind, "turn": turn, "device": device,
                        "decoder_tokens_per_s": rates, "seconds": {**start, **phases.seconds},
                    }, figures


def rate_alone(link: Connection, mode: str, bodies: list[Body], concurrency: int) -> float:
    """Let the server's decoder alone decode requests; return its tokens/s."""
    link.send((mode, bodies, concurrency))
    rate = link.recv()
    if isinstance(rate, Exception):
        raise rate
    return float(rate)


def shown_seconds(seconds: dict[str, float]) -> str:
    """Return phases with their seconds, for people."""
    return ", ".join(f"{phase} {each:.1f} s" for phase, each in seconds.items())


@contextmanager
def serving(options: Any) -> Iterator[tuple[str, Connection, str, dict[str, float]]]:
    """Run a server inside the block.

    Yields its HOST:PORT, the connection to `tell_alone`, its device and the seconds of its start.
    """
    clock = Clock()
    with listening("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    served = server_parser().parse_args([
        options.target or options.shape, "--port", str(port),
        "--num_rows", str(options.num_rows or max(options.concurrency)),
        "--max_length", str(options.max_length),
        "--prefix_memory", str(options.prefix_memory),
        "--device", options.device, "--dtype", options.dtype,
        "--temperature", str(options.temperature),
    ])
    link, link_of_server = FORK.Pipe()
    values = vars(served) | {"bench": Namespace(**vars(options)), "link": link_of_server}
    process = FORK.Process(target=run_server, args=(Namespace(**values),))
    process.start()
    link_of_server.close()
    try:
        try:
            device, seconds = link.recv()
        except EOFError:
            raise InvariantBroken("the server has ended before it was ready") from None
        address = f"127.0.0.1:{port}"
        while not is_well(address):
            if not process.is_alive():
                raise InvariantBroken("the server has ended before it was ready")
            time.sleep(0.02)
        clock.end("start")
        yield address, link, device, seconds | clock.seconds
    finally:
        process.terminate()
        process.join()


def run_server(options: Namespace) -> None:
    """Serve the decoder of all modes, in a process of its own."""
    exit_with_reason(partial(serve, options, decoder_of))


def is_well(address: str) -> bool:
    """Ask a server whether it takes requests."""
    connection = http.client.HTTPConnection(address, timeout=5)
    with suppress(OSError):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


if __name__ == "__main__":
    exit_with_reason(main)
