"""Make the tables of two pages: the τ from which trees pay, and what is known of each family.

    python pipelines/stree_lab/benches/trees_pay.py   # from the committed rows

The pages are docs/do-trees-pay.md and docs/results/own-heads/README.md; the second has the shapes
that were measured with fewer than three of 1, 4, 16 and 64 sequences. A step's time is measured
(rows of bench_decode.py --what "[rows]"). Its ratio to a plain step's is the τ that it needs. Where
a comparison has recorded the τ of a tree, the quotient of both is what it would gain at these step
times: computed, not measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from stree.common.errors import UsageError, exit_with_reason
from stree.common.files import write_atomically
from stree.loading import FLOAT8
from stree.tree_policy.adaptive import PLAIN
from stree_lab.bench_report import rows_of_file
from stree_lab.benches.models import FLOAT8_HEAD, MTP, OWN, PUBLISHED, published
from stree_lab.papers.projection import Place, read_places
from stree_pipelines.console.command_line import PlainParser, input_path
from stree_pipelines.evaluation.result_store import ResultStore
from stree_pipelines.reports.tables.tables import MISSING, Table

PAGE, FAMILIES_PAGE = "do-trees-pay.md", "results/own-heads/README.md"
TIMES = (
    "docs/results/own-heads", "docs/results/h200-families",
    "docs/results/h200-step/calls.jsonl",
)
ACCEPTED = "docs/results/h200-policies/first-prompts"
MARK = "<!-- made by trees_pay.py from here on -->\n"
COUNTS = (1, 4, 16, 64)  # sequences that are decoded together
FEWEST_COUNTS = 3  # of COUNTS, of a shape whose table stands on the page of trees
DRAFTERS = {OWN: "Mamba-2", MTP: "MTP", f"{MTP}+{FLOAT8_HEAD}": "MTP, head in 8 bits"}
Arm = tuple[str, str, float]  # the drafter's kind, the tree's name, the temperature


@dataclass
class Steps:
    """Measured steps of a target on a device, by number of sequences.

    Attributes:
        target: Words for both.
        commits: That the rows are of.
        plain: µs of a plain step, for each drafter and temperature.
        needed: The τ from which an arm is faster than plain decoding.
        num_nodes: By tree.
    """

    target: str
    commits: dict[str, None] = field(default_factory=dict)
    plain: dict[tuple[str, float], dict[int, float]] = field(default_factory=dict)
    needed: dict[Arm, dict[int, float]] = field(default_factory=dict)
    num_nodes: dict[str, int] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Return the words of the target, the device and the commits."""
        several = "s" if len(self.commits) > 1 else ""
        return f"{self.target}, commit{several} {', '.join(self.commits)}"

    def label(self, arm: Arm) -> str:
        """Return the words of an arm: the number in brackets is that of its nodes."""
        kind, tree, temperature = arm
        drafter, nodes = DRAFTERS.get(kind, kind), self.num_nodes[tree]
        return f"{drafter}, `{tree}` ({nodes}), T = {temperature:g}"


def read_steps(rows: Iterable[Mapping[str, Any]]) -> list[Steps]:
    """Group rows by the target's shape and data type, and device; of equal ones the last counts.

    An arm is compared with plain decoding by the same drafter's rows of the same commit.
    """
    found: dict[str, Steps] = {}
    plain_us: dict[tuple[str, str, str, float, int], float] = {}
    arms: list[tuple[Steps, Arm, int, float, tuple[str, str, str, float, int]]] = []
    for row in rows:
        if row["what"] != "rows" or row["num_rows"] not in COUNTS:
            continue
        made_by, count, tree = row["environment"], row["num_rows"], row["tree"]
        target = f"{row['shape']} in {row.get('target_dtype', 'bfloat16')}, {made_by['device']}"
        commit = (made_by["git_sha"] or "unknown")[:7]
        steps = found.setdefault(target, Steps(target))
        steps.commits[commit] = None
        kind, temperature = row.get("drafter", OWN), row.get("temperature", 0.0)
        us = row["us_target"]["median"] + row.get("us_draft", {"median": 0.0})["median"]
        beside = target, commit, kind, temperature, count
        if tree == PLAIN.name:
            plain_us[beside] = us
            steps.plain.setdefault((kind, temperature), {})[count] = us
        else:
            steps.num_nodes[tree] = row["num_nodes"]
            arms.append((steps, (kind, tree, temperature), count, us, beside))
    for steps, arm, count, us, beside in arms:
        if beside in plain_us:
            steps.needed.setdefault(arm, {})[count] = us / plain_us[beside]
    return list(found.values())


def recorded_taus(places: Iterable[Place]) -> dict[tuple[str, float], float]:
    """Return τ by tree and temperature, as the geometric mean over the benchmarks of `places`."""
    taus: dict[tuple[str, float], list[float]] = {}
    for place in places:
        for tree, tau in place.taus.items():
            taus.setdefault((tree.name, place.temperature), []).append(tau)
    return {tree: geometric_mean(each) for tree, each in taus.items()}


def tables_of(steps: Steps, taus: Mapping[tuple[str, float], float]) -> list[Table]:
    """Make the table of the τ that arms need, and of their gains at recorded τ if there are any."""
    head = ("sequences", *(f"{count}" for count in COUNTS))
    arms = sorted(steps.needed, key=lambda arm: _order((arm[0], arm[2])))
    plain: dict[int, float] = {}
    for kind, temperature in sorted(steps.plain, key=_order, reverse=True):
        plain |= {count: us / 1000 for count, us in steps.plain[kind, temperature].items()}
    needed = [(steps.label(arm), *_cells(steps.needed[arm])) for arm in arms]
    made = [Table(f"The τ from which it pays: {steps.title}",
                  (head, ("plain step, ms", *_cells(plain)), *needed))]
    gains = {
        arm: {count: taus[arm[1:]] / tau for count, tau in steps.needed[arm].items()}
        for arm in arms if arm[0] == OWN and arm[1:] in taus
    }
    if gains:
        best = {
            (arm[2], count): max(
                each.get(count, 0.0) for other, each in gains.items() if other[2] == arm[2]
            )
            for arm in gains for count in COUNTS
        }
        lines = (
            (f"{steps.label(arm)}, τ {taus[arm[1:]]:.2f}",
             *_cells(gain, [best[arm[2], count] for count in COUNTS]))
            for arm, gain in gains.items()
        )
        title = f"Speed with the chat pair's τ, computed: {steps.title}"
        made.append(Table(title, (head, *lines)))
    return made


def families_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Make a line for each published shape: its MTP head, and a plain step over its floor."""
    dtypes = ("bfloat16", FLOAT8)
    over_floor: dict[tuple[str, str], str] = {}
    devices: dict[str, set[str]] = {dtype: set() for dtype in dtypes}
    for row in rows:
        if (row["what"], row.get("num_nodes"), row.get("context")) == ("target call", 1, 1024):
            dtype = row.get("target_dtype", dtypes[0])
            over_floor[row["shape"], dtype] = f"{row['step_over_floor']:.3f}"
            devices[dtype].add(row["environment"]["device"])
    lines = [
        (_family(shape), shape, "yes" if shape in PUBLISHED and published(shape).mtp else "no",
         *(over_floor.get((shape, dtype), MISSING) for dtype in dtypes))
        for shape in ("8b", *PUBLISHED)
    ]
    heads = [f"{dtype}, {' and '.join(sorted(devices[dtype])) or 'not measured'}"
             for dtype in dtypes]
    return Table(
        "A plain step over the floor of its matrix products",
        (("family", "shape", "MTP head known", *heads), *lines), num_left=2,
    )


def quality_table(pair: Path) -> Table:
    """Make a column for each evaluation of a pair: its perplexity and τ by the target's dtype.

    Perplexity is of the data's own answers, over all of their tokens; τ is the geometric mean over
    benchmarks, with each prompt's calls counted alike.
    """
    stores = [ResultStore(each) for each in sorted(pair.iterdir()) if each.is_dir()]
    lines: dict[str, list[str]] = {}
    for number, store in enumerate(stores):
        found: dict[str, list[float]] = {}
        if readings := store.readings():
            tokens = sum(each.num_tokens for each in readings)
            loss = sum(each.target_loss for each in readings) / tokens
            found[f"perplexity, {tokens:,} tokens"] = [math.exp(loss)]
        for row in store.results():
            if row.tree is not None and row.acceptance_length:
                name = f"τ, `{row.tree.name}`, T = {row.temperature:g}"
                found.setdefault(name, []).append(row.acceptance_length)
        for name, values in found.items():
            cells = lines.setdefault(name, [MISSING] * len(stores))
            cells[number] = f"{geometric_mean(values):.2f}"
    heads = ("", *(store.directory.name for store in stores))
    rows = ((name, *cells) for name, cells in lines.items())
    return Table(f"What 8 bits change: {pair.name}", (heads, *rows))


def _family(shape: str) -> str:
    return published(shape).layout.name if shape in PUBLISHED else "MambaInLlama"


def _order(key: tuple[str, float]) -> tuple[float, int]:
    kind, temperature = key
    return temperature, [*DRAFTERS, kind].index(kind)


def _cells(values: Mapping[int, float], bold: Sequence[float] = ()) -> list[str]:
    best = dict(zip(COUNTS, bold, strict=True)) if bold else {}
    return [
        MISSING if (value := values.get(count)) is None
        else f"**{value:.2f}**" if value == best.get(count) else f"{value:.2f}"
        for count in COUNTS
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = PlainParser("trees_pay.py", description=__doc__)
    add = parser.add_argument
    add("--docs", default="docs", help="folder with the two pages (default: docs)")
    add("--times", nargs="+", default=TIMES, help="files and folders of timed steps")
    add("--accepted", default=ACCEPTED, help=f"folder of a comparison (default: {ACCEPTED})")
    add("--pairs", default=TIMES[0], help=f"folder of evaluated pairs (default: {TIMES[0]})")
    options = parser.parse_args(arguments)
    files = [
        file for each in map(Path, map(input_path, options.times))
        for file in (sorted(each.glob("*.jsonl")) if each.is_dir() else [each])
    ]
    rows = [row for file in files for row in rows_of_file(file) if "what" in row]
    taus = recorded_taus(read_places(Path(input_path(options.accepted))))
    whole: list[Table] = []
    partial: list[Table] = []  # of shapes that were measured with fewer of COUNTS
    for each in read_steps(rows):
        most = any(len(times) >= FEWEST_COUNTS for times in each.plain.values())
        (whole if most else partial).extend(tables_of(each, taus))
    pairs = [each for each in sorted(Path(input_path(options.pairs)).iterdir()) if each.is_dir()]
    known = [families_table(rows), *map(quality_table, pairs), *partial]
    for name, tables in ((PAGE, whole), (FAMILIES_PAGE, known)):
        page = Path(input_path(options.docs), name)
        before, mark, _ = page.read_text(encoding="utf-8").partition(MARK)
        if not mark:
            raise UsageError(f"{page} has no line {MARK.strip()}: add it where the tables begin")
        made = "\n".join(table.to_markdown() for table in tables)
        write_atomically(page, f"{before}{mark}\n{made}")


if __name__ == "__main__":
    exit_with_reason(main)
