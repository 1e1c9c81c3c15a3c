"""Plan a study: the drafters to train, and their comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from stree.common.errors import UsageError
from stree_pipelines.console.command_line import input_path
from stree_pipelines.console.config_files import (
    dotted,
    read_yaml,
    require_keys,
    require_own,
    require_type,
)

# Keys of a study's file and of an arm in it, with their types
KEYS: dict[str, Any] = {
    "out": str, "distil": str, "arms": list, "seeds": list[int], "set": dict,
    "hold_back": dict | None, "trees": list[str], "compare": dict,
}
_ARM_KEYS: dict[str, Any] = {"name": str, "distil": str, "seeds": list[int], "set": dict}
DONE = "trained"  # file in a run's folder that says that all of its steps are done


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


_HELD = get_type_hints(HeldBack)


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
    content = require_keys(read_yaml(file), str(file))
    if not content.keys() >= {"arms", "distil"}:
        require_own(file, dotted(content), [key for key in KEYS if key != "arms"])
    require_keys(content, str(file), KEYS)
    missing = [key for key in ("out", "distil", "arms", "trees", "compare") if not content.get(key)]
    if missing:
        raise UsageError(f"{file} does not say {', '.join(missing)}")
    for key, value in content.items():
        require_type(value, KEYS[key], f"{file}: {key}")
    compare = content["compare"]
    if not compare.get("target") or not compare.get("benchmarks"):
        raise UsageError(f"{file}: compare must say target and benchmarks, as compare.py's configs")
    require_type(compare["benchmarks"], list[str], f"{file}: benchmarks of compare")
    common = require_keys(content.get("set", {}), f"{file}: set")
    arms = []
    for number, each in enumerate(content["arms"], start=1):
        given = require_keys(each, f"{file}: arm {number}", _ARM_KEYS)
        for key, value in given.items():
            require_type(value, _ARM_KEYS[key], f"{file}: {key} of arm {number}")
        name = given.get("name")
        if not name or "/" in name or "," in name:
            raise UsageError(f"{file}: arm {number} has the name {name!r}, wanted one without / ,")
        options = {**common, **require_keys(given.get("set", {}), f"{file}: set of {name}")}
        if "seed_everything" in options:
            raise UsageError(f"{file}: set of {name} has seed_everything: give the arm `seeds`")
        seeds = given.get("seeds", content.get("seeds", [0]))
        if not seeds:
            raise UsageError(f"{file}: arm {name} has no seeds, wanted at least one")
        distil = input_path(given.get("distil", content["distil"]))
        arms.append(StudyArm(name, distil, options, tuple(seeds)))
    if len({folder_name(arm.name) for arm in arms}) < len(arms):
        raise UsageError(f"{file} has two arms of one name, or whose folders are called alike")
    held_back = content.get("hold_back") or None
    if held_back is not None:
        needed = {each.name for each in fields(HeldBack) if each.default is MISSING}
        if missing := sorted(needed - require_keys(held_back, f"{file}: hold_back", _HELD).keys()):
            raise UsageError(f"{file}: hold_back does not say {', '.join(missing)}")
        for key, value in held_back.items():
            require_type(value, _HELD[key], f"{file}: {key} of hold_back")
        held_back = HeldBack(**held_back)
    out = Path(content["out"])
    return Study(out, tuple(arms), tuple(content["trees"]), dict(compare), held_back)
