"""Evaluate drafter checkpoints: acceptance length and speed of chain and tree, and losslessness.

All exports of a run, chosen checkpoints, prompts split over GPUs, two CPU processes:

    stree eval --run runs/quickstart
    stree eval --target T --checkpoint A B --out eval
    accelerate launch -m stree eval --run runs/quickstart
    torchrun --nproc-per-node 2 -m -- stree eval --run runs/quickstart
"""

from __future__ import annotations

import sys
from pathlib import Path

from stree.common.errors import CannotWrite, StreeError
from stree.drafters.names import DRAFTERS
from stree_pipelines.console.command_line import CommandParser
from stree_pipelines.console.input_checks import of_evaluation, require_there
from stree_pipelines.evaluation.context import Workers
from stree_pipelines.evaluation.estimates import describe_evaluation
from stree_pipelines.evaluation.evaluate import Evaluation
from stree_pipelines.evaluation.options import DEFAULTS, add_options
from stree_pipelines.evaluation.plan import resolve


def build_parser() -> CommandParser:
    """Make the parser; each option is also a key of the YAML file given with --config."""
    parser = CommandParser("stree eval", description=__doc__)
    add = parser.add_argument
    add("--config", action="config", help="YAML file with any of these options")
    add("--run", type=str | None, help="run folder: evaluates every drafter/step-* of it")
    add("--checkpoint", type=str, nargs="+", default=[],
        help=f"drafters to evaluate: {DRAFTERS}")
    add("--target", type=str | None, help="target folder (default: what the run was made with)")
    add("--out", type=str | None, help="folder of results.jsonl and samples (default: RUN/eval)")
    add_options(parser, DEFAULTS)
    return parser


def main(arguments: list[str] | None = None) -> None:
    options = build_parser().parse_args(arguments).as_dict()
    require_there(of_evaluation(options, options["checkpoint"]))
    settings, checkpoints = resolve(options)
    if options["dry_run"]:
        workers = Workers.unconnected()
        for line in describe_evaluation(Evaluation(settings, workers=workers), checkpoints):
            if workers.is_main:
                print(line, flush=True)
        return
    evaluation = Evaluation(settings)
    evaluation.announce(len(checkpoints))
    failures: list[tuple[str | None, StreeError]] = []
    for checkpoint in checkpoints:
        try:
            evaluation.evaluate(checkpoint)
        except StreeError as error:
            failures.append((checkpoint, error))
            if isinstance(error, CannotWrite):
                break  # the next one would meet the same disk
            if len(checkpoints) > 1:
                evaluation.progress.say(f"{checkpoint} failed: {error}")
    if (Path(settings.out) / "results.jsonl").exists():
        evaluation.progress.say(f"rows: {settings.out}/results.jsonl")
    evaluation.workers.leave()
    if failures and not evaluation.workers.is_main:
        sys.exit(failures[0][1].exit_code)  # the main process says why
    if failures and (len(checkpoints) == 1 or isinstance(failures[-1][1], CannotWrite)):
        raise failures[-1][1]
    if failures:
        names = ", ".join(str(checkpoint) for checkpoint, _ in failures)
        raise type(failures[0][1])(
            f"{len(failures)} of {len(checkpoints)} checkpoints failed, for the reasons above: "
            f"{names}"
        )
