"""Plan a study: the drafters to train, and their comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stree.common.errors import UsageError
from stree_pipelines.console.command_line import input_path, read_yaml

_KEYS = ("out", "distil", "arms", "seeds", "set", "hold_back", "trees", "compare")
DONE = "trained"  # file in a run's folder that says that all of its steps are done
_ARM_KEYS = ("name", "distil", "seeds", "set")


@dataclass(frozen=True)
class HeldBack:
    """Conversations of one source that no drafter is trained on, used as prompts instead.

    train and prompts: ShareGPT files whose rows name their `source`. Rows of `train` whose source
    begins with `source` are left out; the first `turns` of the first `limit` such rows of `prompts`
    are the prompts.
    """

    source: str
    train: str
    prompts: str
    limit: int = 20
    turns: int = 2


@dataclass(frozen=True)
class StudyArm:
    """Drafters that differ by their seeds only."""

    name: str
    distil: str  # config of distill.py
    options: dict[str, Any]  # further ones of distill.py
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class StudyRun:
    """Training of one drafter."""

    arm: StudyArm
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.arm.name}, seed {self.seed}"

    @property
    def drafter(self) -> Path:
        return self.folder / "drafter" / "latest"

    @property
    def is_trained(self) -> bool:
        """True when all its steps are done."""
        return (self.folder / DONE).exists()

    def reads(self, other: StudyRun) -> bool:
        """Return True when an option names the other run's drafter, as a reference or a start."""
        paths = [Path(each) for each in self.arm.options.values() if isinstance(each, str)]
        return any(other.folder in path.parents for path in paths)

    def arguments(self, more: Mapping[str, Any]) -> list[str]:
        """Return the arguments of distill.py; `more` goes before the study's own options."""
        given = {**more, **self.arm.options, "seed_everything": self.seed}
        options = [
            part for name, value in given.items()
            for part in (f"--{name}", "null" if value is None else str(value))
        ]
        return ["fit", "--config", self.arm.distil, *options, "--run_dir", str(self.folder)]


@dataclass(frozen=True)
class Study:
    """Arms of a study; the others are compared with the first."""

    out: Path
    arms: tuple[StudyArm, ...]
    trees: tuple[str, ...]
    compare: dict[str, Any]  # options of compare.py
    held_back: HeldBack | None = None
    runs: tuple[StudyRun, ...] = field(init=False)

    def __post_init__(self) -> None:
        runs = (
            StudyRun(arm, seed, self.out / folder_name(arm.name) / f"seed-{seed}")
            for arm in self.arms
            for seed in arm.seeds
        )
        object.__setattr__(self, "runs", tuple(runs))

    @property
    def train_file(self) -> Path:
        return self.out / "train.jsonl.gz"

    @property
    def prompts_file(self) -> Path:
        return self.out / "held_back.jsonl"

    @property
    def held_back_file(self) -> Path:
        """Record of the source that both files were made from."""
        return self.out / "held_back.json"

    @property
    def comparison_file(self) -> Path:
        return self.out / "comparison.yaml"

    def comparison(self, trained: Sequence[StudyRun]) -> dict[str, Any]:
        """Return the content of a config for compare.py: each drafter with each tree."""
        benchmarks = list(self.compare["benchmarks"])
        if self.held_back is not None:
            benchmarks.append(str(self.prompts_file))
        arms = [
            {"name": f"{run.name}, {tree}", "drafter": str(run.drafter), "tree": tree}
            for run in trained
            for tree in self.trees
        ]
        out = str(self.out / "comparison")
        return {**self.compare, "benchmarks": benchmarks, "out": out, "arms": arms}


def in_order(runs: Sequence[StudyRun]) -> list[list[StudyRun]]:
    """Group runs into stages that can be trained at once, each after the stages before.

    Raises UsageError for runs that wait for each other.
    """
    stages, left = [], list(runs)
    while left:
        ready = [run for run in left if not any(run.reads(other) for other in left)]
        if not ready:
            names = " and ".join(run.name for run in left)
            raise UsageError(f"{names} read each other's drafters: none can be trained first")
        stages.append(ready)
        left = [run for run in left if run not in ready]
    return stages


def folder_name(arm: str) -> str:
    return arm.replace(" ", "-")


def read_study(path: str) -> Study:
    """Read a study's file. Raises UsageError for a file that is none."""
    file = Path(input_path(path))
    content = _mapping(read_yaml(file), f"{file} holds", _KEYS)
    missing = [key for key in ("out", "distil", "arms", "trees", "compare") if not content.get(key)]
    if missing:
        raise UsageError(f"{file} does not say {', '.join(missing)}")
    compare = _mapping(content["compare"], f"{file}: compare is")
    if not compare.get("target") or not compare.get("benchmarks"):
        raise UsageError(f"{file}: compare must say target and benchmarks, as compare.py's configs")
    for key, lists in (("arms", content), ("trees", content), ("benchmarks", compare)):
        if not isinstance(lists[key], list):
            raise UsageError(f"{file}: {key} is {lists[key]!r:.80}, wanted a list")
    common = _mapping(content.get("set", {}), f"{file}: set is")
    arms = []
    for number, each in enumerate(content["arms"], start=1):
        given = _mapping(each, f"{file}: arm {number} is", _ARM_KEYS)
        name = given.get("name")
        if not isinstance(name, str) or not name or "/" in name or "," in name:
            raise UsageError(f"{file}: arm {number} has the name {name!r}, wanted one without / ,")
        seeds = given.get("seeds", content.get("seeds", [0]))
        if not isinstance(seeds, list) or not all(type(seed) is int for seed in seeds or [""]):
            raise UsageError(f"{file}: seeds are {seeds!r}, wanted a list of whole numbers")
        options = {**common, **_mapping(given.get("set", {}), f"{file}: set of {name} is")}
        if "seed_everything" in options:
            raise UsageError(f"{file}: set of {name} has seed_everything: give the arm `seeds`")
        distil = input_path(given.get("distil", content["distil"]))
        arms.append(StudyArm(name, distil, options, tuple(seeds)))
    if len({folder_name(arm.name) for arm in arms}) < len(arms):
        raise UsageError(f"{file} has two arms of one name, or whose folders are called alike")
    held_back = None
    if content.get("hold_back"):
        try:
            held_back = HeldBack(**_mapping(content["hold_back"], f"{file}: hold_back is"))
        except TypeError as error:
            raise UsageError(f"{file}: hold_back: {error}") from error
    out = Path(content["out"])
    return Study(out, tuple(arms), tuple(content["trees"]), dict(compare), held_back)


def _mapping(value: Any, what: str, keys: Sequence[str] = ()) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{what} {value!r:.80}, wanted keys with values")
    unknown = sorted(map(str, value.keys() - set(keys))) if keys else []
    if unknown:
        raise UsageError(f"{what} {unknown}, wanted some of {', '.join(keys)}")
    return {str(key): each for key, each in value.items()}
