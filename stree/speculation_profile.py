"""Profile of a drafter (speculation_profile.json): its measurements, and recommended settings.

`pipelines/profile_drafter.py` writes it from an evaluation's rows, `stree.load` reads it. The
metrics' names mean what `stree.metrics` says.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stree.common.errors import CheckpointRefused
from stree.common.files import require_own_files
from stree.common.plain_data import read_text
from stree.trees.token_tree import BeamTree, StepTree, TokenTree

PROFILE_NAME = "speculation_profile.json"
PROFILE_VERSION = 1

Interval = tuple[float, float]  # 95 %, bootstrap over prompts
# A drafter's name (`stree.drafters.names`) where its folder is called so: the profile lies in it.
# It names no other file to read.
FOLDER = "FOLDER"
Form = Annotated[
    str,
    Field(
        pattern=rf"^(float8:)?(text:{FOLDER}|"
        rf"(temperature=[0-9]{{0,3}}\.?[0-9]{{1,6}}:)?(independent:|top:)?{FOLDER}"
        r"(\+ngram:[1-9][0-9]{0,3})?)$"
    ),
]


class Record(BaseModel):
    """Base of saved rows: no unknown field, no wrong type, no NaN or infinity.

    JSON has neither, and they would come back as null.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False
    )


class Tree(Record):
    """A saved token tree: its name, and every node's parent.

    A tree policy has the names of all its trees (`stree.tree_policy.names`), and a shape that
    holds them.
    """

    name: str
    parents: tuple[int, ...]

    def to_token_tree(self) -> StepTree:
        tree = BeamTree.named(self.name)
        return TokenTree(self.parents, self.name) if tree is None else tree


class TreeStepTimes(Record):
    """Seconds of a step with a tree (named `plain`: without drafts), by number of rows."""

    tree: Tree
    seconds: dict[Annotated[int, Field(ge=1)], Annotated[float, Field(gt=0)]]


class StepTimesRecord(Record):
    """Saved step times (`stree.tree_policy.step_times`), with device, dtype and temperature.

    catch_up_s is the drafter's seconds to catch up after plain steps, for one row.
    """

    device: str
    dtype: str
    temperature: Annotated[float, Field(ge=0)]
    catch_up_s: Annotated[float, Field(ge=0)]
    trees: tuple[TreeStepTimes, ...]


class Measurement(Record):
    """Figures of one method on one benchmark at one temperature.

    Attributes:
        verifier: None for plain decoding, as the next.
        drafter: Form in which the folder drafted, as in a recommendation.
        draft_length: Depth of the tree; 0 for plain decoding.
        batch_size: Prompts that were decoded at once.
        num_ended, num_cut: Answers that ended by themselves, and at max_new_tokens.
        num_stalled: Prompts an answer to which the machine held up.
        time_ms: Milliseconds of each part of a step.
    """

    benchmark: str
    temperature: float
    method: str
    tree: Tree | None
    verifier: str | None
    drafter: Form | None
    draft_length: int
    device: str
    dtype: str
    num_prompts: int
    max_new_tokens: int
    ignore_eos: bool
    batch_size: int
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    acceptance_length: float | None
    acceptance_length_interval: Interval | None
    depth_accept_rates: dict[int, float]
    tokens_per_second: float | None
    speedup: float | None
    speedup_interval: Interval | None
    num_ended: int | None
    num_cut: int | None
    num_stalled: int | None
    time_ms: dict[str, float]
    lossless_share: float | None
    git_sha: str | None


class Recommendation(Record):
    """The fastest method under some conditions; plain decoding if none is faster beyond noise.

    Its figures are those of the fastest speculation.

    Attributes:
        tree: None for plain decoding, as the next three.
        drafter: Form in which the folder drafts (`float8:FOLDER`, `FOLDER+ngram:6`).
        costs: Step times by which trees were chosen, if `tree` is a tree policy.
        reason: For people.
    """

    device: str
    device_type: str
    dtype: str
    batch_size: int
    temperature: float
    benchmarks: tuple[str, ...]
    num_prompts: int
    method: str
    tree: Tree | None
    verifier: str | None
    backtracking: str | None
    drafter: Form | None
    costs: StepTimesRecord | None
    acceptance_length: float
    speedup: float
    speedup_interval: Interval | None
    reason: str


class TreeCheck(Record):
    """A tree's measured τ, and the τ that the model of a suggestion predicts."""

    tree: Tree
    predicted_acceptance_length: float
    measured_acceptance_length: float


class SuggestedTree(Record):
    """The tree with the longest expected acceptance of its size, by the measured rates.

    Attributes:
        num_calls: Target calls from which the rates were measured.
        num_extrapolated: Nodes deeper than any that was measured.
        checks: Predictions for trees that were measured.
    """

    temperature: float
    tree: Tree
    predicted_acceptance_length: float
    predicted_acceptance_length_interval: Interval | None
    num_calls: int
    num_extrapolated: int
    checks: tuple[TreeCheck, ...]


class SpeculationProfile(Record):
    """The whole file: the profile of one drafter with one target."""

    version: int = PROFILE_VERSION
    step: int | None
    checkpoint_sha256: str
    target: str
    target_sha256: str
    measurements: tuple[Measurement, ...]
    recommendations: tuple[Recommendation, ...]
    suggested_trees: tuple[SuggestedTree, ...]

    def recommended(
        self, device_type: str, temperature: float, dtype: str, device: str = "",
        batch_size: int = 1,
    ) -> Recommendation | None:
        """Return the recommendation for a kind of device ("cpu", "cuda"), or None.

        Greedy and sampled decoding never stand in for each other, nor do batch sizes. Among the
        recommendations that fit, the same `device` comes first, then the same `dtype`, then the
        nearest temperature.
        """
        fitting = [
            each
            for each in self.recommendations
            if (each.device_type, each.batch_size) == (device_type, batch_size)
            and (each.temperature == 0) == (temperature == 0)
        ]
        return min(
            fitting,
            key=lambda each: (
                each.device != device,
                each.dtype != dtype,
                abs(each.temperature - temperature),
            ),
            default=None,
        )


def load_profile(directory: str | os.PathLike[str]) -> SpeculationProfile | None:
    """Return the profile in a drafter's folder, or None without one.

    Raises `CheckpointRefused`, naming the file, when it cannot be read or its trees are invalid.
    """
    path = Path(directory) / PROFILE_NAME
    require_own_files(directory)
    if not path.is_file():
        return None
    try:
        profile = SpeculationProfile.model_validate_json(read_text(path))
        trees = [each.tree for each in profile.suggested_trees]
        for each in profile.recommendations:
            trees += [] if each.tree is None else [each.tree]
            trees += [] if each.costs is None else [times.tree for times in each.costs.trees]
        for tree in trees:
            tree.to_token_tree()
    except ValidationError as error:
        raise _unreadable(path, first_fault(error)) from error
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if profile.version != PROFILE_VERSION:
        raise _unreadable(path, f"version {profile.version}, wanted {PROFILE_VERSION}")
    return profile


def first_fault(error: ValidationError) -> str:
    """Return where a record is wrong first, and why."""
    first = error.errors()[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


def _unreadable(path: Path, reason: object) -> CheckpointRefused:
    return CheckpointRefused(
        f"{path} cannot be read ({reason}): name a tree yourself, or write the profile again with "
        "profile_drafter.py"
    )
