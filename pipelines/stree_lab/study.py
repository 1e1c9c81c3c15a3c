"""Train drafters that differ in one thing each, with several seeds, and compare them.

    stree study train configs/study/drafters-75m.yaml
    accelerate launch -m stree study compare configs/study/drafters-75m.yaml

The file holds arms (each a config and options of distill.py), seeds, options of compare.py, and the
trees to decode with (chain-tuned: each drafter's fastest of six chains); one source of
conversations can be held back from training and used as prompts. Both commands go on where they
were stopped. Writes study.md and the files of compare.py.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import stree.common.threads  # noqa: F401  (before torch is loaded)

import yaml

from stree.common.errors import UsageError, exit_with_reason
from stree.common.files import write_atomically
from stree_lab.studies import tables
from stree_lab.studies.plan import (
    HeldBack,
    Study,
    StudyArm,
    StudyRun,
    in_order,
    read_study,
)
from stree_lab.studies.training import require_as_trained, require_understood, train
from stree_pipelines.console import input_checks as inputs
from stree_pipelines.console.command_line import PlainParser, input_path
from stree_pipelines.console.config_files import read_yaml, require_type
from stree_pipelines.console.input_checks import require_there
from stree_pipelines.console.progress import EvaluationProgress
from stree_pipelines.data.held_out_prompts import held_out_prompts, sourced_rows
from stree_pipelines.evaluation.arms import Comparison, comparison_of, read_comparison
from stree_pipelines.evaluation.context import Workers
from stree_pipelines.evaluation.estimates import describe_comparison
from stree_pipelines.reports.rendering import markdown_page


def main(arguments: Sequence[str] | None = None) -> None:
    parser = PlainParser("stree study", description=__doc__)
    add = parser.add_argument
    add("what", choices=["train", "compare"], help="the drafters, or what was trained")
    add("config", help="YAML file of the study")
    add("--at_once", type=int, default=1, help="trainings beside each other on a GPU (or the CPU)")
    add("--only", nargs="+", help="arms (default: all)")
    add("--trees", nargs="+", help="trees to compare, each quoted (default: the file's)")
    add("--device", help="auto, cpu, cuda or cuda:N, for compare (default: the file's, or auto)")
    add("--dry_run", action="store_true", help="say what would run, and exit")
    options = parser.parse_args(arguments)
    if options.at_once < 1:
        raise UsageError(f"--at_once is {options.at_once}, wanted at least 1")
    study = read_study(options.config)
    if options.trees:
        study = replace(study, trees=tuple(options.trees))
    names = [arm.name for arm in study.arms]
    if unknown := [name for name in options.only or () if name not in names]:
        raise UsageError(f"--only {unknown}: the study has {', '.join(names)}")
    runs = [run for run in study.runs if not options.only or run.arm.name in options.only]
    require_comparable(study, options.config)
    in_order(runs)  # raises now when there is no order
    more = {} if study.held_back is None else {"data.train": str(study.train_file)}
    if options.what == "train":
        require_read(study, runs)
        if options.dry_run:
            for run in runs:
                print(f"distill.py {' '.join(run.arguments(more))}")
        require_there(inputs_of(study, runs, deep=options.dry_run))
        require_understood(runs, more)
        if options.dry_run:
            return
        if study.held_back is not None:
            hold_back(study, study.held_back)
        progress = EvaluationProgress()
        progress.say(f"{len(runs)} drafters, {options.at_once} at once on a GPU, in {study.out}")
        train(runs, more, options.at_once, progress)
    else:
        missing = [run.name for run in runs if not run.is_trained]
        if missing:
            raise UsageError(
                f"{missing[0]} is not trained ({len(missing)} of {len(runs)}): run study.py train "
                f"{options.config}, or name the arms that are with --only"
            )
        require_as_trained(runs, more)
        if options.dry_run:
            device = {} if options.device is None else {"device": options.device}
            what = comparison_of(study.comparison(runs), study.comparison_file, device)
            for line in describe_comparison(Comparison(*what, workers=Workers.unconnected())):
                print(line)
            return
        write_atomically(study.comparison_file, yaml.safe_dump(study.comparison(runs)))
        compare(study, {} if options.device is None else {"device": options.device})


def require_comparable(study: Study, file: str) -> None:
    """Raise UsageError now for trees and options that would be refused after all trainings.

    file: The study's, for the error.
    """
    _, arms = comparison_of(study.comparison(study.runs), f"{file}: compare", {})
    for arm in arms:
        for tree in arm.trees:
            arm.method(tree)


def require_read(study: Study, runs: Sequence[StudyRun]) -> None:
    """Raise UsageError for a run that reads the drafter of an untrained run outside `runs`."""
    for run in runs:
        for other in study.runs:
            if run.reads(other) and not other.is_trained and other not in runs:
                raise UsageError(
                    f"{run.name} reads the drafter of {other.name}, which is not trained: name "
                    "both with --only"
                )


def inputs_of(study: Study, runs: Sequence[StudyRun], deep: bool) -> Iterator[inputs.Look]:
    """Yield the inputs of the trainings, except what the study writes or trains before.

    deep: also the inputs that the trainings' own configurations name.
    """
    if study.held_back is not None and not study.train_file.exists():
        yield inputs.file("hold_back.train", input_path(study.held_back.train))
        yield inputs.file("hold_back.prompts", input_path(study.held_back.prompts))
    for arm in (each for each in study.arms if each in [run.arm for run in runs]):
        yield inputs.file(f"distil of arm {arm.name}", arm.distil)
        if deep and Path(arm.distil).is_file():
            config = read_yaml(Path(arm.distil))
            made = [study.train_file, *(run.drafter for run in runs)]
            for option, look in inputs.of_training(partial(_value, study, arm, config, made)):
                yield f"{option} of arm {arm.name}", look


def _value(
    study: Study, arm: StudyArm, config: Any, made: Sequence[Path], section: str, name: str
) -> Any:
    """Look up an option of distill.py in an arm, or else in its configuration.

    Leaves out the folders in `made`, which exist by the time that they are read.
    """
    key = f"{section}.{name}"
    if key == "data.train" and study.held_back is not None and key not in arm.options:
        return None  # the study's
    for part in key.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None
    found = arm.options.get(key, config)
    require_type(found, str | list[str] | None, f"{key} of arm {arm.name}")
    if not isinstance(found, list):
        return None if found is not None and Path(found) in made else found
    return [each for each in found if Path(each) not in made]


def compare(study: Study, more: dict[str, Any]) -> None:
    comparison = Comparison(*read_comparison(study.comparison_file, more))
    comparison.announce()
    try:
        rows = comparison.evaluate()
        if comparison.workers.is_main:
            text = markdown_page(
                tables.markdown(study, rows, comparison.store, comparison.tunings())
            )
            write_atomically(study.out / "study.md", text)
            print(f"{text}\n{study.out / 'study.md'}")
    finally:
        comparison.workers.leave()


def hold_back(study: Study, source: HeldBack) -> None:
    """Write the conversations without a source, and prompts of that source, once.

    Raises UsageError when others are held back already: drafters may have been trained on these.
    """
    made_from = json.dumps(asdict(source), sort_keys=True)
    if study.train_file.exists() and study.prompts_file.exists():
        found = study.held_back_file.read_text(encoding="utf-8")
        if found != made_from:
            raise UsageError(f"{study.out} holds back {found}, now {made_from}: take another `out`")
        return
    study.out.mkdir(parents=True, exist_ok=True)
    train, held_out = Path(input_path(source.train)), Path(input_path(source.prompts))
    kept = [row.line for row in sourced_rows(train) if not row.source.startswith(source.source)]
    prompts = held_out_prompts(held_out, source.source, source.limit, source.turns)
    if not kept or not prompts:
        raise UsageError(
            f"hold_back: {len(kept)} conversations of {source.train} are not of {source.source!r}, "
            f"{len(prompts.splitlines())} of {source.prompts} are: wanted some of both"
        )
    write_atomically(study.held_back_file, made_from)
    write_atomically(study.train_file, gzip.compress("".join(kept).encode(), mtime=0))
    write_atomically(study.prompts_file, prompts)


if __name__ == "__main__":
    exit_with_reason(main)
