"""Arms of a comparison: ways to draft and to verify, on one target, in turns prompt by prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from stree.errors import UsageError
from stree.plain_data import parse_yaml, read_text
from stree.tokenizer import require_same_tokenizer
from stree_pipelines.command_line import input_path
from stree_pipelines.evaluation.context import device_name
from stree_pipelines.evaluation.evaluate import Evaluation
from stree_pipelines.evaluation.plan import (
    AUTOREGRESSIVE,
    TREE,
    Drafter,
    EvaluationSettings,
    Job,
    make_job,
)

_KEYS = ("name", "drafter", "tree", "verifier", "backtracking")


@dataclass(frozen=True)
class Arm:
    """A drafter (as `eval_spec.py --checkpoint` names it), a tree, a verifier and a way to
    backtrack, by a name."""

    name: str
    drafter: str
    tree: str = EvaluationSettings.tree
    verifier: str = EvaluationSettings.verifier
    backtracking: str = EvaluationSettings.backtracking

    @classmethod
    def of(cls, content: Any, number: int) -> Arm:
        """Raises UsageError for what is no arm."""
        if not isinstance(content, Mapping) or not all(
            isinstance(value, str) and value for value in content.values()
        ):
            raise UsageError(
                f"arm {number} is {content!r:.80}, wanted {', '.join(_KEYS)}, each a text"
            )
        unknown, missing = content.keys() - set(_KEYS), {"name", "drafter"} - content.keys()
        if unknown or missing:
            raise UsageError(
                f"arm {number} has {sorted(map(str, content))}, wanted name and drafter, and tree, "
                "verifier and backtracking where they are not the paper's, coupled and replay"
            )
        return cls(**{**content, "drafter": input_path(content["drafter"])})

    def settings(self, common: EvaluationSettings) -> EvaluationSettings:
        return replace(
            common, methods=(TREE,), tree=self.tree, verifier=self.verifier,
            backtracking=self.backtracking,
        )  # fmt: skip


def read_comparison(
    path: str | Path, more: Mapping[str, Any]
) -> tuple[EvaluationSettings, list[Arm]]:
    """Settings and arms of a YAML file: `arms`, and options of `eval_spec.py`; `more` goes first.

    Raises UsageError when it is none, names an option that no comparison has, or arms of one name.
    """
    path = Path(input_path(str(path)))
    try:
        content = parse_yaml(read_text(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("arms"), list):
        raise UsageError(f"{path} must hold `arms: [{{name: …, drafter: …}}, …]`")
    arms = [Arm.of(each, number) for number, each in enumerate(content.pop("arms"), start=1)]
    names = [arm.name for arm in arms]
    if not arms or len({AUTOREGRESSIVE, *names}) <= len(names):
        raise UsageError(
            f"{path} has the arms {names}, wanted at least one, each name once, and none that is "
            f"called {AUTOREGRESSIVE}: plain decoding takes part anyhow"
        )
    known = {each.name for each in fields(EvaluationSettings)}
    options = {**content, **{name: value for name, value in more.items() if value is not None}}
    unknown = sorted(map(str, options.keys() - known | options.keys() & {"methods", *_KEYS}))
    if unknown:
        raise UsageError(f"{path} has {unknown}, which are no options of a comparison")
    missing = [name for name in ("target", "benchmarks", "out") if not options.get(name)]
    if missing:
        raise UsageError(f"{path} does not say {', '.join(missing)}")
    try:
        settings = EvaluationSettings(**{**options, "methods": (AUTOREGRESSIVE,)})
    except TypeError as error:
        raise UsageError(f"{path} has a value of a wrong type: {error}") from error
    return settings, arms


class Comparison(Evaluation):
    """All arms on one target, and plain decoding, in turns: each answer is paired with plain
    decoding's of the same prompt. Rows and samples are an evaluation's, whose method is the arm."""

    def __init__(self, settings: EvaluationSettings, arms: list[Arm], **parts: Any) -> None:
        self.arms = arms
        for arm in arms:  # a bad tree is refused now
            arm.settings(settings).method_tree(TREE)
        super().__init__(settings, **parts)

    def announce(self, num_checkpoints: int = 1) -> None:
        settings = self.settings
        prompts = sum(len(benchmark.prompts) for benchmark in self.benchmarks)
        answers = prompts * len(settings.temperatures) * (len(self.arms) + 1)
        self.progress.say(
            f"{len(self.arms)} arms and plain decoding × {len(settings.temperatures)} temperatures "
            f"× {prompts} prompts: {answers:,} answers, on {self.workers.count} × "
            f"{device_name(self.answerer.device)}, {settings.dtype}"
        )

    def plan(self, checkpoint: str | Path | None = None) -> list[Job]:
        """The rows of all arms, plain decoding's first."""
        drafters = {arm.drafter: Drafter.at(arm.drafter) for arm in self.arms}
        for drafter in drafters.values():
            if drafter.name.folder is not None:
                require_same_tokenizer(self.settings.target, drafter.name.folder)
        jobs = []
        for benchmark in self.benchmarks:
            for temperature in self.settings.temperatures:
                jobs.append(self._job(AUTOREGRESSIVE, None, benchmark, temperature))
                for arm in self.arms:
                    job = make_job(
                        arm.settings(self.settings), TREE, drafters[arm.drafter], benchmark,
                        temperature, self.target_sha256, self.chat_template,
                        self.answerer.device.type,
                    )  # fmt: skip
                    jobs.append(replace(job, method=arm.name))
        return jobs
