"""Compare arms, ways to draft and to verify, on one target, interleaved prompt by prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_type_hints

from stree.common.errors import UsageError
from stree.drafters.names import DrafterName
from stree_pipelines.console import input_checks as inputs
from stree_pipelines.console.command_line import input_path
from stree_pipelines.console.config_files import (
    dotted,
    read_yaml,
    require_keys,
    require_own,
    require_type,
)
from stree_pipelines.console.input_checks import require_there
from stree_pipelines.evaluation.benchmarks import Benchmark
from stree_pipelines.evaluation.evaluate import Evaluation
from stree_pipelines.evaluation.plan import (
    AUTOREGRESSIVE,
    TREE,
    DrafterIdentity,
    EvaluationSettings,
    Job,
    Method,
    require_fillable,
    tree_named,
)
from stree_pipelines.evaluation.records import ResultRow

_TYPES = get_type_hints(EvaluationSettings)
_KEYS = ("name", "drafter", "tree", "verifier", "backtracking")
TUNED = "chain-tuned"  # the tree of an arm with the fastest length of chain
TRIED_CHAINS = tuple(f"chain-{length}" for length in range(1, 7))
TRIAL_PROMPTS = 16  # of each place; four were too few (docs/results/h200-papers)


@dataclass(frozen=True)
class Arm:
    """Named combination of a drafter, a tree, a verifier and a way to backtrack.

    The drafter has a name of `eval_spec.py --checkpoint`. The tree `chain-tuned` is the fastest of
    `TRIED_CHAINS`, found for each benchmark and temperature; `A or B` is chosen step by step by
    measured cost, `bandit A or B` by each tree's reward so far.
    """

    name: str
    drafter: str
    tree: str = EvaluationSettings.tree
    verifier: str = EvaluationSettings.verifier
    backtracking: str = EvaluationSettings.backtracking

    @classmethod
    def of(cls, content: Any, number: int, drafter: str | None) -> Arm:
        """Read an arm from a file's content; `drafter` is that of an arm that names none.

        Raises UsageError for content that is no arm.
        """
        if isinstance(content, Mapping):
            content = {"drafter": drafter, **content}
        is_arm = (
            isinstance(content, Mapping)
            and {"name", "drafter"} <= content.keys() <= set(_KEYS)
            and all(isinstance(value, str) and value for value in content.values())
            and "/" not in content["name"]
        )
        if not is_arm:
            raise UsageError(
                f"arm {number} is {content!r:.200}, wanted name and drafter (or a drafter beside "
                "the arms, for all that name none), and tree, verifier and backtracking where they "
                "are not the paper's, coupled and replay; each a text, the name without /: files "
                "are called by it"
            )
        return cls(**{**content, "drafter": input_path(content["drafter"])})

    @property
    def trees(self) -> tuple[str, ...]:
        """All trees that the arm may decode with."""
        return TRIED_CHAINS if self.tree == TUNED else (self.tree,)

    def method(self, name: str) -> Method:
        """Return the arm with its tree of this name. Raises UsageError if no decoder takes it."""
        try:
            tree = tree_named(name)
            drafter = DrafterName.parse(self.drafter)
            method = Method(
                self.name, TREE, tree, self.verifier, self.backtracking, drafter.siblings
            )
            require_fillable(tree, drafter)
        except UsageError as error:
            raise UsageError(f"arm {self.name}: {error}") from error
        return method


def read_comparison(
    path: str | Path, more: Mapping[str, Any]
) -> tuple[EvaluationSettings, list[Arm]]:
    """Read settings and arms from a YAML file, as `comparison_of`."""
    path = Path(input_path(str(path)))
    return comparison_of(read_yaml(path), path, more)


def comparison_of(
    content: Any, place: Path | str, more: Mapping[str, Any]
) -> tuple[EvaluationSettings, list[Arm]]:
    """Return settings and arms of a file's content; `place` names the file in errors.

    It holds `arms`, the `drafter` of those that name none, and options of `eval_spec.py`, which
    `more` overrides. Raises UsageError when it is no comparison, has an unknown option, or arms of
    one name.
    """
    content = require_keys(content, str(place))
    known = [each.name for each in fields(EvaluationSettings) if each.name != "methods"]
    if "arms" not in content or "distil" in content:
        require_own(place, dotted(content), known)
    if not isinstance(content.get("arms"), list):
        raise UsageError(f"{place} must hold `arms: [{{name: …, drafter: …}}, …]`")
    options = {**content, **{name: value for name, value in more.items() if value is not None}}
    given, drafter = options.pop("arms"), options.pop("drafter", None)
    arms = [Arm.of(each, number, drafter) for number, each in enumerate(given, start=1)]
    names = [arm.name for arm in arms]
    if not arms or len({AUTOREGRESSIVE, *names}) <= len(names):
        raise UsageError(
            f"{place} has the arms {names}, wanted at least one, each name once, and none that is "
            f"called {AUTOREGRESSIVE}: plain decoding takes part anyhow"
        )
    unknown = sorted(options.keys() - set(known) | options.keys() & set(_KEYS))
    if unknown:
        raise UsageError(f"{place} has {unknown}, which are no options of a comparison")
    missing = [name for name in ("target", "benchmarks", "out") if not options.get(name)]
    if missing:
        raise UsageError(f"{place} does not say {', '.join(missing)}")
    for name, value in options.items():
        require_type(value, _TYPES[name], f"{place}: {name}")
    return EvaluationSettings(**{**options, "methods": (AUTOREGRESSIVE,)}), arms


@dataclass(frozen=True)
class Tuning:
    """Choice of an arm's chain on a benchmark at a temperature, with a row for each length."""

    arm: str
    benchmark: str
    temperature: float
    rows: tuple[ResultRow, ...]

    @property
    def tree(self) -> str:
        """Name of the fastest chain."""
        fastest = max(self.rows, key=lambda row: row.tokens_per_second or 0.0)
        assert fastest.tree is not None
        return fastest.tree.name

    def __str__(self) -> str:
        speeds = ", ".join(
            f"{row.tree.name} {row.tokens_per_second or 0.0:.1f}" for row in self.rows if row.tree
        )
        return (
            f"{self.arm} has {self.tree}, the fastest of those that were tried on the first "
            f"{self.rows[0].num_prompts} prompts, in turns (tokens/s: {speeds})."
        )


def without_trials(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Return the rows without those that tuned a comparison's chains."""
    methods = {row.method for row in rows}
    trials = {_trial(arm, tree) for arm in methods for tree in TRIED_CHAINS}
    return [row for row in rows if row.method not in trials]


def _trial(arm: str, tree: str) -> str:
    """Return the method of the rows that time an arm with one of the tried chains."""
    return f"{arm}: {tree}"


def _inputs(settings: EvaluationSettings, arms: list[Arm]) -> Iterator[inputs.Look]:
    yield inputs.folder("target", settings.target)
    yield inputs.benchmarks("benchmarks", settings.benchmarks, settings.benchmark_dir)
    yield inputs.template("chat_template", settings.chat_template)
    for arm in arms:
        yield from inputs.drafter(f"drafter of arm {arm.name}", arm.drafter)
        for name in arm.trees:
            yield inputs.tree(f"tree of arm {arm.name}", name)


class Comparison(Evaluation):
    """Evaluation of all arms on one target, interleaved with plain decoding.

    Each answer is paired with plain decoding's of the same prompt. Rows and samples are an
    evaluation's, whose method is the arm.

    Tuned chains are tried first; the trials have rows, too, whose methods are ARM: chain-N, and a
    run that goes on does not repeat them. Their prompts are answered again in the comparison
    itself, so that no reported answer was also used for the choice.
    """

    def __init__(self, settings: EvaluationSettings, arms: list[Arm], **parts: Any) -> None:
        self.arms = arms
        require_there(_inputs(settings, arms))
        self._methods = {(arm, tree): arm.method(tree) for arm in arms for tree in arm.trees}
        super().__init__(settings, **parts)

    def announce(self, num_checkpoints: int = 1) -> None:
        num_temperatures = len(self.settings.temperatures)
        answers = self.num_prompts * num_temperatures * (len(self.arms) + 1)
        tuned = sum(arm.tree == TUNED for arm in self.arms)
        first = f"; before, {tuned} chains are tuned" if tuned else ""
        self.progress.say(
            f"{len(self.arms)} arms and plain decoding × {num_temperatures} temperatures "
            f"× {self.num_prompts} prompts: {answers:,} answers, {self.where}{first}"
        )

    def evaluate(self, checkpoint: str | Path | None = None) -> list[ResultRow]:
        """Return the rows of all arms, plain decoding's first, by benchmark and temperature."""
        if trials := self.trials():
            self.measure(trials)
        for tuning in self.tunings():
            self.progress.say(f"{tuning.benchmark}, T = {tuning.temperature:g}: {tuning}")
        return self.measure(self.plan())

    def plan(self, checkpoint: str | Path | None = None) -> list[Job]:
        """List the jobs of all arms, plain decoding's first.

        A chain whose trials are missing counts as the longest.
        """
        tuned = {(each.arm, each.benchmark, each.temperature): each.tree for each in self.tunings()}
        jobs = []
        for benchmark in self.benchmarks:
            for temperature in self.settings.temperatures:
                jobs.append(self._job(self.plain, None, benchmark, temperature))
                for arm in self.arms:
                    place = arm.name, benchmark.name, float(temperature)
                    tree = tuned.get(place, arm.trees[-1])
                    jobs.append(self._arm_job(arm, arm.name, tree, benchmark, temperature))
        return jobs

    def trials(self) -> list[Job]:
        """List the jobs that tune chains: each length, on the first prompts."""
        return [job for jobs in self._trials.values() for job in jobs]

    def tunings(self) -> list[Tuning]:
        """Return the tunings of the chains whose trials are all there."""
        rows = {row.key: row for row in self.store.results()}
        return [
            Tuning(*place, tuple(rows[job.result_key] for job in jobs))
            for place, jobs in self._trials.items()
            if all(job.result_key in rows for job in jobs)
        ]

    @cached_property
    def _trials(self) -> dict[tuple[str, str, float], list[Job]]:
        """Trial jobs by arm, benchmark and temperature, grouped by benchmark and temperature."""
        return {
            (arm.name, benchmark.name, float(temperature)): [
                self._arm_job(
                    arm, _trial(arm.name, tree), tree,
                    replace(
                        benchmark, prompts=self.settings.first_prompts(benchmark, TRIAL_PROMPTS)
                    ),
                    temperature,
                )
                for tree in arm.trees
            ]
            for benchmark in self.benchmarks
            for temperature in self.settings.temperatures
            for arm in self.arms
            if arm.tree == TUNED
        }

    @cached_property
    def _drafters(self) -> dict[str, DrafterIdentity]:
        """Drafters by name, looked up once: chains are tuned with the drafter that is then
        compared."""
        names = dict.fromkeys(arm.drafter for arm in self.arms)
        return {name: self.drafter(name) for name in names}

    def _arm_job(
        self, arm: Arm, name: str, tree: str, benchmark: Benchmark, temperature: float
    ) -> Job:
        method = replace(self._methods[arm, tree], name=name)
        return self._job(method, self._drafters[arm.drafter], benchmark, temperature)
