"""Check that all of a command's inputs exist before any is read.

Everything missing becomes one error, which names the option of each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from stree.chat_templates import named_template
from stree.common.errors import NotFound
from stree.drafters.names import MTP, DrafterName
from stree.tree_policy.names import as_tree_policy
from stree_pipelines.console.command_line import input_path
from stree_pipelines.data.raw_rows import require_source
from stree_pipelines.evaluation.benchmarks import find_benchmark
from stree_pipelines.evaluation.plan import require_exports

# An option or a key of a configuration, and a check that raises NotFound when its input is missing
Look = tuple[str, Callable[[], object]]


def require_there(looks: Iterable[Look]) -> None:
    """Raise NotFound with every missing input, each once."""
    missing: dict[str, str] = {}  # by message, so that each names one option
    for option, look in looks:
        try:
            look()
        except NotFound as error:
            missing.setdefault(str(error), option)
    if missing:
        raise NotFound("; ".join(f"{option}: {what}" for what, option in missing.items()))


def folder(option: str, path: str | os.PathLike[str]) -> Look:
    """Look for the folder of a checkpoint or a cache."""
    return option, partial(_require, Path(path).is_dir, f"no folder {path}")


def drafter_folder(option: str, path: str) -> Look:
    """Look for the folder of a drafter to train on; the target's MTP head has none."""
    return (option, lambda: None) if path == MTP else folder(option, path)


def file(option: str, path: str | Path) -> Look:
    """Look for a file."""
    return option, partial(_require, Path(path).is_file, f"no file {path}")


def source(option: str, name: str) -> Look:
    """Look for conversations or prompts; a source that `datasets` would fetch is not looked for."""
    return option, partial(require_source, name)


def drafter(option: str, name: str) -> Iterator[Look]:
    """Look for a drafter by its name, as `eval_spec.py --checkpoint` takes it."""
    parsed = DrafterName.parse(name)
    if parsed.folder is not None:
        yield folder(option, parsed.folder)
    yield option, parsed.corpus_text


def tree(option: str, name: str) -> Look:
    """Look for a tree by its name or file."""
    return option, partial(as_tree_policy, name, input_path)


def template(option: str, name: str | None) -> Look:
    """Look for a chat template; None is the tokenizer's own."""
    return option, lambda: None if name is None else named_template(input_path(name))


def benchmarks(option: str, names: Iterable[str], directory: str | None) -> Look:
    """Look for benchmarks by name or file."""

    def look() -> None:
        missing = []
        for name in names:
            try:
                find_benchmark(input_path(name), directory)
            except NotFound as error:
                missing.append(str(error))
        if missing:  # the list of known names comes once
            *others, longest = sorted(missing, key=len)
            raise NotFound("; ".join([*(each.partition(" (")[0] for each in others), longest]))

    return option, look


def of_evaluation(
    options: Mapping[str, Any], checkpoints: Sequence[str], argument: str = "--checkpoint"
) -> Iterator[Look]:
    """Yield the inputs in options that eval_spec.py and the gate share, and of drafters.

    argument: the option that names the drafters, for the error.
    """
    if options.get("run") is not None and not checkpoints:
        run = options["run"]
        is_there = Path(run).is_dir()
        yield ("--run", partial(require_exports, run)) if is_there else folder("--run", run)
    if options["target"] is not None:
        yield folder("--target", input_path(options["target"]))
    for each in checkpoints:
        yield from drafter(argument, each)
    found = options["benchmark_dir"]
    yield benchmarks("--benchmarks", options["benchmarks"], found and input_path(found))
    yield tree("--tree", options["tree"])
    yield template("--chat_template", options["chat_template"])


# Inputs in the configuration of a training, by section and name
TRAINING_INPUTS: dict[tuple[str, str], Callable[[str, str], Look]] = {
    ("model", "target"): folder, ("model", "start_from"): drafter_folder, ("data", "train"): source,
    ("data", "valid"): source,
    ("data", "tokenizer"): folder, ("data", "template"): template, ("evaluation", "config"): file,
}


def of_training(value: Callable[[str, str], Any]) -> Iterator[Look]:
    """Yield the inputs of a training's configuration; `value` looks them up by section and name."""
    for (section, name), look in TRAINING_INPUTS.items():
        found = value(section, name)
        for each in found if isinstance(found, list) else [] if found is None else [found]:
            yield look(f"{section}.{name}", input_path(each))


def _require(is_there: Callable[[], bool], otherwise: str) -> None:
    if not is_there():
        raise NotFound(otherwise)
