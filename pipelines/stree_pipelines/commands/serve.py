"""Serve a target and its drafter behind OpenAI's API.

    python pipelines/serve.py checkpoints/python-docs-hybrid \\
        --drafter runs/quickstart/drafter/latest --port 8000

Applications, OpenAI's clients, lm-eval and load generators reach it at http://127.0.0.1:8000/v1;
a page to chat is at /. Requests share the rows of one batch, each with its own settings. The first
SIGTERM or Ctrl-C lets answers end and takes no more requests, the second stops at once.
"""

from __future__ import annotations

import socket
import sys
import warnings
from pathlib import Path
from types import FrameType

import stree.common.threads  # noqa: F401  (before other libraries are loaded)

import stree
from stree.common.errors import UsageError
from stree.common.words import counted
from stree.generation import GenerationConfig
from stree.loading import DTYPE_HELP
from stree.tree_policy.names import as_tree_policy
from stree_pipelines.console.command_line import PlainParser, input_path
from stree_pipelines.evaluation.options import add_pair

SWITCH_S = 2e-4  # after which a thread lets another go on: steps are short beside Python's 5 ms


def build_parser() -> PlainParser:
    parser = PlainParser("serve.py", description=__doc__)
    add = parser.add_argument
    add_pair(parser)
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is every one")
    add("--port", type=int, default=8000, help="0 takes a free one")
    add("--num_rows", "--num-rows", type=int, default=8, help="answers at once")
    add("--max_length", "--max-length", type=int, default=2048,
        help="tokens of the longest conversation")
    add("--max_waiting", "--max-waiting", type=int, default=256,
        help="requests that wait for a row at most; others are told to ask again later")
    add("--num_prefixes", "--num-prefixes", type=int,
        help="conversations' beginnings to keep (default: four a row)")
    add("--temperature", type=float, default=1.0,
        help="of the requests to expect, for the drafter's profile and the steps' times")
    add("--served_model_name", "--served-model-name",
        help="the model's name in requests (default: the target's folder)")
    add("--api_key", "--api-key", help="that requests must bring (default: none)")
    add("--timeout_s", "--timeout-s", type=float, help="an answer is given up after it")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--dtype", default="auto", help=DTYPE_HELP)
    return parser


def main(arguments: list[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    try:
        import uvicorn

        from stree_pipelines.serving.app import Server, make_app
        from stree_pipelines.serving.speculation import speculation_lines
    except ModuleNotFoundError as error:
        raise UsageError(
            f"serving needs {error.name}: pip install 'stree-spec[serve]'"
        ) from error
    listener = listening(options.host, options.port)
    num_rows, num_prefixes = options.num_rows, options.num_prefixes
    num_prefixes = 4 * num_rows if num_prefixes is None else num_prefixes
    target = input_path(options.target)
    with warnings.catch_warnings(record=True) as told:
        decoder = stree.load(
            target, options.drafter and input_path(options.drafter),
            tree=options.tree and as_tree_policy(options.tree, input_path),
            temperature=options.temperature, device=options.device, dtype=options.dtype,
            max_length=options.max_length, verifier=options.verifier,
            backtracking=options.backtracking, num_prefixes=num_prefixes, num_rows=num_rows,
            offload=options.offload, target_dtype=options.target_dtype,
        )
    for line in dict.fromkeys(str(each.message) for each in told):
        say(f"note: {line}")
    if decoder.tokenizer is None:
        raise UsageError(f"{target} has no tokenizer, and a server reads and writes texts")
    asked = GenerationConfig(4, options.temperature, ignore_eos=True)
    decoder.warm_up(stree.Request([1, 2, 3], asked))
    say(f"{decoder}, {counted(num_prefixes, 'prefix')} kept")
    for line in speculation_lines(decoder):
        say(line)
    sys.setswitchinterval(SWITCH_S)
    with stree.Engine(decoder, options.max_waiting) as engine:
        name = options.served_model_name or Path(target).name
        server = Server(engine, name, options.api_key, options.timeout_s)

        class Draining(uvicorn.Server):
            """Takes no more requests after a first signal, and stops at once after a second."""

            def handle_exit(self, sig: int, frame: FrameType | None) -> None:
                server.is_draining = True
                self.force_exit = self.should_exit
                self.should_exit = True

        running = Draining(uvicorn.Config(
            make_app(server), log_level="warning", access_log=False, lifespan="off",
        ))
        host, port = listener.getsockname()[:2]
        say(f"{name} is served at http://{host}:{port}/v1, a page to chat at http://{host}:{port}")
        running.run(sockets=[listener])
        if running.force_exit:
            engine.close(drain=False)


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
