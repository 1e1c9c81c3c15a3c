"""Serve a target and its drafter behind OpenAI's API.

    stree serve checkpoints/python-docs-hybrid \\
        --drafter runs/quickstart/drafter/latest --port 8000

Applications, OpenAI's clients, lm-eval and load generators reach it at http://127.0.0.1:8000/v1;
a page to chat is at /. Requests share the rows of one batch, each with its own settings. The first
SIGTERM or Ctrl-C lets answers end and takes no more requests, the second stops at once.
"""

from __future__ import annotations

import gc
import logging
import math
import signal
import socket
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import stree.common.threads  # noqa: F401  (before other libraries are loaded)

import torch

import stree
from stree.batching.batch_decoder import BatchDecoder
from stree.common.errors import InvariantBroken, StreeError, UsageError, exit_with_reason
from stree.common.words import counted, size
from stree.generation import GenerationConfig
from stree.tree_policy.names import as_tree_policy
from stree_pipelines.console.command_line import PlainParser, input_path
from stree_pipelines.evaluation.options import DEFAULTS, add_options, add_pair

if TYPE_CHECKING:
    from stree_pipelines.serving.app import Server

LOG = logging.getLogger("stree.serve")
COMPILING_S = 5.0  # between two lines on compiled kernels, at least
MAX_PREFIXES = 1024  # that a prompt is compared with
KEEP_ALIVE_S = 75  # of an idle connection: longer than clients keep theirs, which may reuse it
STOP_S = 10.0  # after which an engine's process that does not end is killed


def build_parser() -> PlainParser:
    parser = PlainParser("stree serve", description=__doc__)
    add = parser.add_argument
    add_pair(parser)
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is every one")
    add("--port", type=int, default=8000, help="0 takes a free one")
    add("--num_rows", type=int, default=8, help="answers at once")
    add("--max_length", type=int, default=2048, help="tokens of the longest conversation")
    add("--max_waiting", type=int, default=256,
        help="requests that wait for a row at most; others are told to ask again later")
    add("--prefix_memory", type=float,
        help="GB of conversations' beginnings to keep (default: a quarter of what is free)")
    add("--plan_log", metavar="FILE",
        help="write every plan of a step and its report there, prompts' and answers' tokens "
             "included, as JSON lines")
    add("--temperature", type=float, default=1.0,
        help="of the requests to expect, for the drafter's profile and the steps' times")
    add("--served_model_name", help="the model's name in requests (default: the target's folder)")
    add("--api_key", help="that requests must bring (default: none)")
    add("--timeout_s", type=float, help="an answer is given up after it")
    add("--replicas", type=int, help="servers on Ray Serve, each on a GPU of its own, or on a CPU "
        "core (default: one without Ray)")
    add("--max_replicas", type=int, help="replicas under load at most (default: "
        "as many as --replicas)")
    add_options(parser, DEFAULTS, ["device", "dtype"])
    return parser


def main(arguments: list[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    if options.replicas is None and options.max_replicas is None:
        serve(options, decoder_of)
    else:
        from stree_pipelines.serving.replicas import serve_replicas

        serve_replicas(options, partial(loaded, make_decoder=decoder_of))


def serve(options: Namespace, make_decoder: Callable[[Namespace], BatchDecoder]) -> None:
    """Serve until a signal ends it.

    Args:
        options: Of the command, as its parser gives them.
        make_decoder: Called with the options in the engine's process, so it can be pickled.
    """
    import uvicorn

    from stree_pipelines.serving.app import make_app

    listener = listening(options.host, options.port)
    with loaded(options, make_decoder) as (server, process):
        engine = server.engine

        class Draining(uvicorn.Server):
            """Takes no more requests after a first signal, and stops at once after a second."""

            def handle_exit(self, sig: int, frame: FrameType | None) -> None:
                server.is_draining = True
                self.force_exit = self.should_exit
                self.should_exit = True

            def end(self) -> None:
                """Let the answers that the engine's end has cut reach their clients."""
                self.should_exit = True

        config = uvicorn.Config(
            make_app(server), log_level="warning", access_log=False, timeout_keep_alive=KEEP_ALIVE_S
        )
        running = Draining(config)
        engine.on_end = running.end
        host, port = listener.getsockname()[:2]
        name = server.name
        say(f"{name} is served at http://{host}:{port}/v1, a page to chat at http://{host}:{port}")
        gc.freeze()
        running.run(sockets=[listener])
        if not engine.is_alive:
            process.join(STOP_S)
            raise InvariantBroken(
                f"the engine's process has ended by itself (exit code {process.exitcode}): start "
                "the server again"
            )


@contextmanager
def loaded(
    options: Namespace, make_decoder: Callable[[Namespace], BatchDecoder]
) -> Iterator[tuple[Server, BaseProcess]]:
    """Load the models in a process that ends with the block; yield what speaks to it, and it."""
    from stree_pipelines.serving.app import Server
    from stree_pipelines.serving.engine_client import EngineClient
    from stree_pipelines.serving.messages import received

    link, link_of_engine = socket.socketpair()
    process = get_context("spawn").Process(
        target=run_engine, args=(options, make_decoder, link_of_engine)
    )
    process.start()
    link_of_engine.close()
    is_loaded = False
    try:
        try:
            facts = received(link.makefile("rb"))
        except EOFError:
            raise InvariantBroken("the engine's process has ended before it was ready") from None
        if isinstance(facts, Exception):
            raise facts
        is_loaded = True
        name = options.served_model_name or Path(options.target).name
        yield Server(EngineClient(link, facts), name, options.api_key, options.timeout_s), process
    finally:
        link.close()  # the engine's process ends then
        process.join(STOP_S if is_loaded else 0)
        process.kill()


def run_engine(
    options: Namespace, make_decoder: Callable[[Namespace], BatchDecoder], link: socket.socket
) -> None:
    """Load the models and serve requests that come over a socket, in a process of its own."""
    for each in (signal.SIGINT, signal.SIGTERM):  # the other process says when to end
        signal.signal(each, signal.SIG_IGN)
    from stree_pipelines.serving.messages import packed

    try:
        from stree_pipelines.serving.engine_end import EngineEnd

        with preparation_told():
            decoder = make_decoder(options)
        end = EngineEnd(decoder, options.max_waiting, link)
    except (StreeError, ModuleNotFoundError) as error:
        link.sendall(packed(error))
        return
    gc.collect()
    gc.freeze()  # or a full collection scans all of torch in the middle of an answer
    exit_with_reason(end.run)


def decoder_of(options: Namespace) -> BatchDecoder:
    """Load and warm up the decoder, and say what it is."""
    from stree_pipelines.serving.engine_end import speculation_lines

    target, memory = input_path(options.target), options.prefix_memory
    LOG.info("loading %s", target)
    if memory is not None and not 0 <= memory < math.inf:
        raise UsageError(f"--prefix_memory is {memory}, wanted GB from 0 on")
    with warnings.catch_warnings(record=True) as told:
        decoder = stree.load(
            target, options.drafter and input_path(options.drafter),
            tree=options.tree and as_tree_policy(options.tree, input_path),
            temperature=options.temperature, device=options.device, dtype=options.dtype,
            max_length=options.max_length, verifier=options.verifier,
            backtracking=options.backtracking, num_prefixes=MAX_PREFIXES,
            num_rows=options.num_rows, offload=options.offload, target_dtype=options.target_dtype,
        )
    for line in dict.fromkeys(str(each.message) for each in told):
        say(f"note: {line}")
    if decoder.tokenizer is None:
        raise UsageError(f"{target} has no tokenizer, and a server reads and writes texts")
    asked = GenerationConfig(4, options.temperature, ignore_eos=True)
    decoder.warm_up(stree.Request([1, 2, 3], asked))
    say(f"{decoder}")
    num_bytes = decoder.room.free_bytes // 4 if memory is None else int(memory * 1e9)
    num_prefixes = decoder.limit_prefixes(num_bytes)
    say(
        f"{size(num_bytes)} for prefixes: {num_prefixes:,} of {decoder.max_length:,} tokens each, "
        f"up to {MAX_PREFIXES:,} shorter ones"
    )
    for line in speculation_lines(decoder):
        say(line)
    if options.plan_log:
        decoder.log_plans(options.plan_log)
    return decoder


@contextmanager
def preparation_told() -> Iterator[None]:
    """Print inside the block what decoders prepare, with the seconds since its beginning.

    Where Triton compiles kernels, a line now and then says how many it has compiled.
    """
    began = reported = time.perf_counter()
    num_compiled = 0

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(f"{time.perf_counter() - began:6.1f} s: {self.format(record)}")

    def count(*_: Any, cache_hit: bool, **__: Any) -> None:
        nonlocal num_compiled, reported
        num_compiled += not cache_hit
        if not cache_hit and time.perf_counter() > reported + COMPILING_S:
            reported = time.perf_counter()
            LOG.info("%s compiled, which Triton keeps for later starts",
                     counted(num_compiled, "kernel"))

    handler, log = Said(), logging.getLogger("stree")
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        with compilations_told_to(count):
            yield
    finally:
        log.setLevel(logging.NOTSET)
        log.removeHandler(handler)


@contextmanager
def compilations_told_to(listener: Callable[..., None]) -> Iterator[None]:
    """Let Triton call `listener` for each kernel inside the block, where there is a GPU."""
    if not torch.cuda.is_available() or find_spec("triton") is None:
        yield  # a process without a GPU need not load Triton
        return
    from triton import knobs

    before, knobs.compilation.listener = knobs.compilation.listener, listener
    try:
        yield
    finally:
        knobs.compilation.listener = before


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens, before a model is loaded. Raises `UsageError`."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"nobody can listen at {host}:{port}: {error}; give another --host or --port"
        ) from error


def say(line: str) -> None:
    """Print a line at once, also into a pipe."""
    print(line, flush=True)
