"""Serve requests that arrive by chance; measure what each waits for, by policy and method.

python pipelines/stree_lab/bench_queue.py queue.jsonl --target T --drafter D --rates 0.5 1 2
A policy says when a request gets a row: continuous, as soon as one is free; clearing, the
periodic-clearing queue, whose batches begin when --queue_size requests wait or the first of them
has waited --max_wait_s. Traffic is Poisson, and the same for all policies and methods. Rows that
exist are kept: the same command goes on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import stree.common.threads  # noqa: F401  (before torch is loaded)

from stree.common.errors import exit_with_reason
from stree_lab.bench_report import rows_of_file
from stree_lab.benches.command import require_results_file
from stree_lab.queue.bench import SETTINGS, QueueBench
from stree_lab.queue.queueing import POLICIES
from stree_pipelines.console.command_line import CommandParser
from stree_pipelines.evaluation.benchmarks import DEFAULT_BENCHMARKS, PROMPT_FORMAT
from stree_pipelines.evaluation.options import DEFAULTS, add_options
from stree_pipelines.evaluation.plan import METHODS
from stree_pipelines.evaluation.result_store import append_line


def build_parser() -> CommandParser:
    parser = CommandParser("bench_queue.py", description=__doc__)
    add = parser.add_argument
    add("out", type=str, help="file to write, JSON lines")
    add("--config", action="config", help="YAML file with any of these options")
    add("--target", type=str, required=True, help="target folder")
    add("--drafter", type=str | None, help="drafter folder, for methods that draft")
    add("--prompts", type=str, default=DEFAULT_BENCHMARKS[0],
        help="a name in --benchmark_dir, or a JSONL file, whose prompts' first turns are asked in "
        f"turn; {PROMPT_FORMAT}")
    add("--methods", type=str, nargs="+", default=[],
        help=f"of {', '.join(METHODS)} (default: the first and, with a drafter, the last)")
    add("--policies", type=str, nargs="+", default=list(POLICIES), help=", ".join(POLICIES))
    add("--rates", type=float, nargs="+", default=[1.0], help="requests a second, on average")
    add("--num_requests", type=int, default=64, help="of a setting")
    add("--queue_size", type=int | None,
        help="of clearing: requests that clear the queue (default: as many as rows)")
    add("--max_wait_s", type=float, default=1.0,
        help="of clearing: seconds after which the first request clears it")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add_options(parser, {**DEFAULTS, "batch_size": 8, "max_new_tokens": 64}, SETTINGS)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    require_results_file(options.out)
    out, bench = Path(options.out), QueueBench(options)
    done = {row["setting_hash"] for row in rows_of_file(out)} if out.exists() else set()
    to_go = [each for each in bench.wanted if each.hash not in done]
    bench.announce(len(to_go))
    for setting in to_go:
        append_line(out, json.dumps(bench.measure(setting), ensure_ascii=False))
    print(f"{out}: bench_report.py {out.parent} makes a table of it")


if __name__ == "__main__":
    exit_with_reason(main)
