"""Give a run's exported drafters their measured profile and a model card.

stree profile runs/quickstart
stree profile runs/quickstart/compare --drafter runs/quickstart/drafter/latest
`stree.load` decodes with the tree that speculation_profile.json recommends; README.md is the card.
Weights and result rows stay as they are; run it again after another evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from stree.checkpoints.identity import CURVE_NAME, checkpoint_sha256
from stree.checkpoints.partners import partner_remarks
from stree.common.errors import CheckpointRefused, StreeError, UsageError, shown
from stree.common.files import add_files, sweep_leftovers
from stree.drafters.names import DrafterName
from stree.speculation_profile import PROFILE_NAME, SpeculationProfile, load_profile
from stree_pipelines.console.command_line import CommandParser
from stree_pipelines.reports.plots import tau_vs_step, to_svg
from stree_pipelines.reports.profiles.drafter_profile import (
    profile_of,
    run_at_last_place,
    withheld,
)
from stree_pipelines.reports.profiles.model_card import CARD_NAME, may_write_card, model_card
from stree_pipelines.reports.run_data import RunData, open_results
from stree_pipelines.reports.settings import SHOW_HELP


def write_profile(
    data: RunData, drafter: Path, figures: dict[str, str], shown: Sequence[str]
) -> SpeculationProfile:
    """Write the run's profile of a drafter, and the card with its figures, into its folder.

    Raises UsageError when the run has no row of the drafter, CheckpointRefused when the folder is
    damaged.
    """
    run = data.folder
    sweep_leftovers(drafter.resolve().parent)
    sha256 = checkpoint_sha256(drafter)
    so_far = None
    with suppress(CheckpointRefused):  # one that cannot be read is written anew
        so_far = load_profile(drafter)
    profile = profile_of(open_results(run), run, sha256, shown, so_far)
    if profile is None:
        raise UsageError(f"no row of {run} is about {drafter}: evaluate it with eval_spec.py first")
    if (Path(profile.target) / "config.json").is_file():
        for remark in partner_remarks(profile.target, drafter):
            print(remark)
    contents = {PROFILE_NAME: profile.model_dump_json(indent=2) + "\n"}
    if may_write_card(drafter):
        card = model_card(profile, data, drafter, next(iter(figures), None))
        contents |= {CARD_NAME: card, **figures}
    add_files(drafter, contents)
    print(f"{drafter}: {', '.join(contents)}")
    return profile


def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser("stree profile", description=__doc__)
    add = parser.add_argument
    add("run", type=str, help="run folder, or an evaluation's or a comparison's folder")
    add("--drafter", type=str, nargs="+", default=[],
        help="drafter folders (default: RUN/drafter/step-*)")
    add("--show", type=str, nargs="+", default=[], help=SHOW_HELP)
    options = parser.parse_args(arguments)
    run = Path(options.run)
    for name in options.drafter:
        if str(DrafterName.parse(name).folder) != name:
            raise UsageError(
                f"--drafter is {name}, wanted the folder of an exported drafter, which its profile "
                "is written into"
            )
    drafters = [Path(name) for name in options.drafter] or sorted(run.glob("drafter/step-????????"))
    if not drafters:
        raise UsageError(f"{run}/drafter holds no step-* folder: name folders with --drafter")
    data = run_at_last_place(open_results(run), run, options.show)
    curve = tau_vs_step(data)
    figures = {CURVE_NAME: to_svg(curve, "τ against distillation step")} if curve else {}
    profiles: list[SpeculationProfile] = []
    failures: list[StreeError] = []
    for drafter in drafters:
        try:
            profiles.append(write_profile(data, drafter, figures, options.show))
        except StreeError as error:
            failures.append(error)
            print(f"{drafter} has no new profile: {error}")
    if profiles:
        print(shown(_recommendations(profiles[-1], withheld(data))))
    if failures:
        raise type(failures[0])(
            f"{len(failures)} of {len(drafters)} drafters have no new profile, for these reasons"
        )


def _recommendations(profile: SpeculationProfile, withheld: Sequence[str]) -> str:
    """Format the recommendations for the drafter distilled longest."""
    lines = [f"step {profile.step}:" if profile.step is not None else "recommended:"]
    for each in profile.recommendations:
        lines.append(f"  {each.device_type}, {each.dtype}, T = {each.temperature:g}: {each.reason}")
    return "\n".join([*lines, *(f"  {each}" for each in withheld)])
