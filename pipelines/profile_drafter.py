"""Give a run's exported drafters their measured profile and a model card.

python pipelines/profile_drafter.py runs/quickstart
`stree.load` decodes with the tree that speculation_profile.json recommends; README.md is the card.
Weights and result rows stay as they are; run it again after another evaluation.
"""

from __future__ import annotations

from pathlib import Path

from stree.errors import StreeError, UsageError, exit_with_reason
from stree.files import add_files, sweep_leftovers
from stree.speculation_profile import PROFILE_NAME
from stree_pipelines.command_line import CommandParser
from stree_pipelines.evaluation.context import CURVE_NAME, checkpoint_sha256
from stree_pipelines.reports.drafter_profile import profile_of
from stree_pipelines.reports.model_card import CARD_NAME, may_write_card, model_card
from stree_pipelines.reports.plots import tau_vs_step, to_svg
from stree_pipelines.reports.run_data import RunData, load_run, open_results


def write_profile(
    data: RunData, drafter: Path, figures: dict[str, str], num_nodes: int | None = None
) -> None:
    """Put the profile that the run's rows give, and the card with its figures, into the folder.

    Raises UsageError when no row is about it, CheckpointRefused when the folder is damaged.
    """
    run = data.folder
    sweep_leftovers(drafter.resolve().parent)
    profile = profile_of(open_results(run), run, checkpoint_sha256(drafter), num_nodes)
    if profile is None:
        raise UsageError(f"no row of {run} is about {drafter}: evaluate it with eval_spec.py first")
    contents = {PROFILE_NAME: profile.model_dump_json(indent=2) + "\n"}
    if may_write_card(drafter):
        card = model_card(profile, data, drafter, next(iter(figures), None))
        contents |= {CARD_NAME: card, **figures}
    add_files(drafter, contents)
    print(f"{drafter}: {', '.join(contents)}")
    for each in profile.recommendations:
        print(f"  {each.device_type}, {each.dtype}, T = {each.temperature:g}: {each.reason}")


def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser("profile_drafter.py", description=__doc__)
    add = parser.add_argument
    add("run", type=str, help="run folder, or an evaluation's folder")
    add("--drafter", type=str, nargs="+", default=[],
        help="drafter folders (default: RUN/drafter/step-*)")  # fmt: skip
    add("--nodes", type=int | None, help="of the suggested tree (default: as many as measured)")
    options = parser.parse_args(arguments)
    run = Path(options.run)
    drafters = [Path(name) for name in options.drafter] or sorted(run.glob("drafter/step-????????"))
    if not drafters:
        raise UsageError(f"{run}/drafter holds no step-* folder: name folders with --drafter")
    data = load_run(run)
    curve = tau_vs_step(data)
    figures = {CURVE_NAME: to_svg(curve, "τ against distillation step")} if curve else {}
    failures: list[StreeError] = []
    for drafter in drafters:
        try:
            write_profile(data, drafter, figures, options.nodes)
        except StreeError as error:
            failures.append(error)
            print(f"{drafter} has no new profile: {error}")
    if failures:
        raise type(failures[0])(
            f"{len(failures)} of {len(drafters)} drafters have no new profile, for these reasons"
        )


if __name__ == "__main__":
    exit_with_reason(main)
