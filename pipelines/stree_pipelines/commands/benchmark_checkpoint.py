"""Benchmark a drafter checkpoint against a baseline; exit with 70 when it is worse beyond noise.

    stree gate runs/new/drafter/latest \\
      --baseline baselines/main --target T --benchmarks gsm8k mt_bench --out gate \\
      --fail_below acceptance_length=-3% gsm8k.speedup=-5% \\
      depth_accept_rates[1]=-5%

Writes summary.md (for a pull request) and the rows of both. A threshold holds for all benchmarks'
prompts together, or for the one that it names; the sign of its change is part of it.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from stree.common.errors import UsageError
from stree.common.files import reporting_refusals, write_atomically
from stree.drafters.names import DRAFTERS, DrafterName
from stree_pipelines.comparison.gate import gate, summary
from stree_pipelines.comparison.gate.baseline import Baseline, folder_of, names_form
from stree_pipelines.console.command_line import CommandParser
from stree_pipelines.console.input_checks import drafter, of_evaluation, require_there
from stree_pipelines.evaluation.context import Workers
from stree_pipelines.evaluation.estimates import describe_evaluation
from stree_pipelines.evaluation.evaluate import Evaluation
from stree_pipelines.evaluation.options import DEFAULTS, add_options
from stree_pipelines.evaluation.plan import settings_of

EXAMPLE = (
    "stree gate runs/new/drafter/latest --baseline runs/old/drafter/latest --target T --fail_below "
    "acceptance_length=-3% speedup=-5% --out gate"
)


def build_parser() -> CommandParser:
    """Make the parser; options of the measurement are eval_spec.py's, whose YAML files it reads."""
    parser = CommandParser("stree gate", description=__doc__)
    parser.example = EXAMPLE
    add = parser.add_argument
    add("checkpoint", type=str, help=f"drafter to judge: {DRAFTERS}")
    add("--config", action="config", help="YAML file with any of these options")
    add("--baseline", type=str, required=True,
        help="drafter, as above, results of one (an --out), or symlink to either")
    add("--fail_below", type=str, nargs="+", required=True,
        help=f"{gate.SYNTAX}; METRIC: {', '.join(gate.METRICS)}")
    add("--promote", action="store_true",
        help="move the pointer --baseline to the checkpoint when it is better: all thresholds "
        "pass, a figure gained beyond noise, none lost")
    add("--target", type=str, required=True, help="target folder")
    add("--out", type=str, required=True, help="folder of the rows and the summary")
    gated = {"methods": ["plain", "tree"], "temperatures": [0.0]}
    add_options(parser, {**DEFAULTS, **gated})
    return parser


def main(arguments: list[str] | None = None) -> None:
    options = build_parser().parse_args(arguments).as_dict()
    given, checkpoint = options["baseline"], options["checkpoint"]
    page = Path(options["out"]) / "summary.md"
    look = ("--baseline", partial(folder_of, Path(given)))
    looks = drafter("--baseline", given) if names_form(given) else [look]
    require_there([*of_evaluation(options, [checkpoint], "checkpoint"), *looks])
    if options["promote"] and not DrafterName.parse(checkpoint).is_plain:
        raise UsageError(
            f"--promote lets the baseline lead to a folder, and {checkpoint} is a drafter's name: "
            "give its folder, or leave --promote out"
        )
    thresholds = [gate.Threshold.parse(text) for text in options["fail_below"]]
    baseline = Baseline.at(given, options["promote"])
    settings, dry_run = settings_of(options), options["dry_run"]
    if not dry_run and Workers.unconnected().is_main:
        with reporting_refusals(page, codes=None):
            page.unlink(missing_ok=True)  # an earlier checkpoint's must not stand for this one
    evaluation = Evaluation(settings, workers=Workers.unconnected() if dry_run else None)
    theirs = baseline.measured_rows(evaluation, checkpoint, thresholds)
    measured = [checkpoint] if theirs else [checkpoint, baseline.drafter]
    if dry_run:
        more = {"baseline": given, "fail_below": options["fail_below"]}
        for line in describe_evaluation(evaluation, measured, more):
            if evaluation.workers.is_main:
                print(line, flush=True)
        return
    evaluation.announce(len(measured))
    mine = evaluation.evaluate(checkpoint)
    theirs = theirs or evaluation.evaluate(baseline.drafter)
    findings = gate.judge(thresholds, baseline.pairs(mine, theirs, settings.out), settings.seed)
    try:
        if evaluation.workers.is_main:
            note = ""
            if options["promote"]:
                note = f"the baseline {given} stays: the checkpoint is not better beyond noise"
                if gate.is_better(findings):
                    baseline.promote(checkpoint)
                    note = f"the checkpoint is better beyond noise: {given} leads to it now"
            text = summary.markdown(findings, mine, theirs, note)
            write_atomically(page, text)
            print(text)
    finally:
        evaluation.workers.leave()  # together: a launcher ends all when the first one fails
    if gate.overall(findings) == gate.REGRESSION:
        if not evaluation.workers.is_main:
            sys.exit(gate.Regression.exit_code)  # the main process says why
        raise gate.Regression(summary.reason_to_fail(findings))
