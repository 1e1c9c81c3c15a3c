"""Compare several runs: columns, each a run, or runs that differ by their seed only."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from stree.common.errors import UsageError
from stree_pipelines.evaluation.records import ResultRow
from stree_pipelines.reports import settings
from stree_pipelines.reports.run_data import (
    CONFIG_NAME,
    Cell,
    RunData,
    joined,
    load_run,
    method_names,
    open_results,
    read_table,
    speculative_methods,
    without_replaced,
)

# Endings of the names of runs of one recipe: kl/seed-0, kl-s1, kl2
_SEED_IN_NAME = re.compile(r"(?:[\W_]+s|[\W_]*seed)?[\W_]*\d*$")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a drafter's weights, as text, and the seed apart."""

    content: str
    seed: str


@dataclass(frozen=True, eq=False)
class Column:
    """A run, or runs of one recipe with a seed each; `data` joins them."""

    name: str
    runs: tuple[RunData, ...]

    @cached_property
    def data(self) -> RunData:
        return joined(self.runs)

    @property
    def title(self) -> str:
        return f"{self.name} ({len(self.runs)} seeds)" if len(self.runs) > 1 else self.name

    def last(self, method: str, benchmark: str, temperature: float) -> Cell | None:
        """Return the cell of the last checkpoint."""
        return self.data.cell(self.data.last, method, benchmark, temperature)


@dataclass(frozen=True, eq=False)
class Runs:
    """Columns over their common benchmarks and temperatures; the first one is the reference.

    methods: speculative ones; a tree's name is appended when there are several among all runs.
    notes: for the reader.
    """

    columns: tuple[Column, ...]
    methods: list[str]
    notes: list[str]

    @property
    def every(self) -> list[RunData]:
        return [run for column in self.columns for run in column.runs]

    @property
    def rows(self) -> list[ResultRow]:
        return [row for run in self.every for row in run.rows]

    @property
    def scopes(self) -> list[str]:
        """Benchmarks to show, the pool of several first."""
        return self.columns[0].data.scopes

    @property
    def temperatures(self) -> list[float]:
        return self.columns[0].data.temperatures


def load_runs(
    folders: Sequence[str | Path], shown: Sequence[str] = (), titles: Sequence[str] = ()
) -> Runs:
    """Read runs as `load_run` does; those of one recipe, with a seed each, are one column.

    Args:
        shown: NAME=VALUE pairs that choose among several decoding settings.
        titles: names of the columns, in their order.

    Raises UsageError when a run is given twice, has no results, or was decoded with other settings
    than the others, and when they have no benchmark or temperature in common.
    """
    labels = _labels([Path(folder) for folder in folders])
    chosen = {}
    for label, path in labels.items():
        store = open_results(path)
        chosen[label] = settings.chosen(store.results(), shown, store.directory)
    rows = {label: without_replaced(each) for label, each in chosen.items()}
    settings.require_one(rows)
    notes: list[str] = []
    benchmarks = _shared("benchmark", rows, notes)
    temperatures = _shared("temperature", rows, notes)

    def is_shared(row: ResultRow) -> bool:
        return row.benchmark in benchmarks and row.temperature in temperatures

    found = [without_replaced(list(filter(is_shared, each))) for each in chosen.values()]
    names = method_names([row for each in found for row in each])  # of the rows that load_run keeps
    runs = {label: load_run(path, shown, is_shared, names) for label, path in labels.items()}
    groups = _groups(labels, notes)
    notes += [note for members in groups.values() if (note := _about_commits(members, runs))]
    if titles and len(titles) != len(groups):
        raise UsageError(f"--names are {len(titles)}, wanted one for each of {', '.join(groups)}")
    if len(set(titles)) < len(titles):
        raise UsageError(f"--names {' '.join(titles)}: two columns would have one name")
    named = zip(titles or groups, groups.values(), strict=True)
    columns = tuple(Column(name, tuple(runs[each] for each in group)) for name, group in named)
    notes += settings.remarks([row for run in runs.values() for row in run.rows])
    notes += [f"{label}: {note}" for label, run in runs.items() for note in run.notes
              if note not in settings.remarks(run.rows)]
    return Runs(columns, speculative_methods(names), notes)


def _labels(paths: Sequence[Path]) -> dict[str, Path]:
    """Name each run by the shortest end of its path that no other has and is more than a seed.

    Raises UsageError for a run given twice.
    """
    whole = [path.resolve().parts for path in paths]
    for path, parts in zip(paths, whole, strict=True):
        if whole.count(parts) > 1:
            raise UsageError(f"{path} is given twice")
    return {_label(parts, whole): path for parts, path in zip(whole, paths, strict=True)}


def _label(parts: tuple[str, ...], every: Sequence[tuple[str, ...]]) -> str:
    for length in range(1, len(parts)):
        end = parts[-length:]
        label = "/".join(end)
        if _SEED_IN_NAME.sub("", label) and [each[-length:] for each in every].count(end) == 1:
            return label
    return "/".join(parts)


def _groups(labels: Mapping[str, Path], notes: list[str]) -> dict[str, list[str]]:
    """Return the columns: runs of one recipe with a seed each together, under a name of their own.

    Runs that were trained alike with one seed stand apart.
    """
    recipes = {label: recipe_of(path) for label, path in labels.items()}
    alike: dict[str, list[str]] = {}
    for label, recipe in recipes.items():
        alike.setdefault(label if recipe is None else recipe.content, []).append(label)
    groups: dict[str, list[str]] = {}
    for members in alike.values():
        seeds = {recipe.seed for label in members if (recipe := recipes[label])}
        if len(members) > 1 and len(seeds) < len(members):
            notes.append(
                f"{', '.join(members)} were trained alike, several of them with the same seed, so "
                "each has a column of its own."
            )
            groups |= {label: [label] for label in members}
            continue
        common = {_SEED_IN_NAME.sub("", label) for label in members}
        name = common.pop() if len(members) > 1 and len(common) == 1 else ""
        groups[members[0] if name in ("", *groups, *labels) else name] = members
    order = list(labels)
    return dict(sorted(groups.items(), key=lambda group: order.index(group[1][0])))


def _about_commits(members: Sequence[str], runs: Mapping[str, RunData]) -> str:
    """Return a note on runs that are taken together, when different commits trained them."""
    commits = dict.fromkeys(str(runs[each].command.get("git_sha"))[:12] for each in members)
    if len(commits) < 2:
        return ""
    return f"{', '.join(members)} are taken together, trained by commits {', '.join(commits)}."


def recipe_of(folder: Path) -> Recipe | None:
    """Read the recipe of the training that made the run; None without a training's config."""
    from stree_pipelines.training.run.run_folder import fixed_config  # Lightning: not for one run

    if not (config := read_table(folder / CONFIG_NAME)):
        return None
    try:
        fixed = fixed_config(config)
        data, trainer = config["data"], config["trainer"]
        shares = [data["batch_size"], trainer["devices"], trainer["num_nodes"]]
        seeds = fixed.pop("seed_everything"), fixed["data"].pop("seed", None)
        content = {**fixed, "rows a step": data["global_batch_size"] or shares}
    except (AttributeError, KeyError, TypeError):
        return None
    return Recipe(json.dumps(content, sort_keys=True), str(seeds))


def _shared(what: str, rows: Mapping[str, list[ResultRow]], notes: list[str]) -> list:
    """Return the benchmarks or temperatures that all runs have; others are noted."""
    found = [dict.fromkeys(getattr(row, what) for row in of_run) for of_run in rows.values()]
    kept = [value for value in found[0] if all(value in each for each in found)]
    if not kept:
        listed = "; ".join(
            f"{run} has {', '.join(map(str, values))}"
            for run, values in zip(rows, found, strict=True)
        )
        raise UsageError(f"these runs share no {what}: {listed}. Evaluate them on the same")
    left = dict.fromkeys(str(value) for each in found for value in each if value not in kept)
    if left:
        notes.append(f"Not every run has {what} {', '.join(left)}: left out.")
    return kept
