"""List every table and figure of the papers, and make ours: `papers.yaml` says what each is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stree.common.errors import NotFound
from stree_lab.papers import benches, comparisons, tables
from stree_lab.papers.tables import Builder, Cells, Made
from stree_pipelines.console.command_line import input_path
from stree_pipelines.console.config_files import read_yaml
from stree_pipelines.evaluation.result_store import RESULTS_NAME

BUILDERS: dict[str, Builder] = {
    "stree-table-1": benches.stree_1,
    "stree-figure-2": benches.stree_figure_2,
    "stree-table-2": benches.stree_2,
    "stree-figure-3": benches.stree_figure_3,
    "stree-table-3": tables.speeds,
    "stree-figure-4": tables.stree_figure_4,
    "stree-table-4": tables.stree_4,
    "stree-table-5": comparisons.stree_5,
    "stree-table-6": tables.stree_6,
    "stree-table-7": tables.speeds,
    "stree-table-8": tables.stree_8,
    "snakes-table-1": benches.snakes_1,
    "snakes-table-2": benches.snakes_2,
    "snakes-table-3": benches.snakes_3,
    "snakes-table-4": benches.snakes_4,
    "snakes-table-5": tables.snakes_5,
    "snakes-figure-4": benches.snakes_figure_4,
    "snakes-figure-4-text": comparisons.snakes_figure_4_text,
    "drafters-figure-1": benches.drafters_figure_1,
    "drafters-figure-2": comparisons.drafters_figure_2,
    "drafters-table-3": comparisons.drafters_3,
    "drafters-table-4": tables.drafters_4,
    "drafters-table-5": tables.drafters_5,
    "drafters-table-6": tables.drafters_6,
    "drafters-table-7": tables.drafters_7,
    "dyspec-figure-4": tables.dyspec_figure_4,
    "dyspec-table-1": tables.dyspec,
    "dyspec-table-2": tables.dyspec,
    "dyspec-table-4": tables.dyspec,
    "dyspec-table-5": benches.dyspec_5,
}


@dataclass(frozen=True)
class Entry:
    """A table or figure of a paper.

    Attributes:
        what: its subject. hardware: the paper's.
        note: the differences of ours; without a title, the reason why there is none.
        commands: write the rows of ours. rows: their default folder. needs: their kind.
        labels: columns that hold words. paper: the paper's numbers, heads first.
    """

    name: str
    what: str
    note: str
    hardware: str = ""
    commands: Sequence[str] = ()
    rows: str = ""
    title: str = ""
    needs: str = ""
    labels: int = 1
    paper: Sequence[Cells] = ()

    @property
    def is_made(self) -> bool:
        return bool(self.title)

    @property
    def state(self) -> str:
        """Return the word of the index for ours: it stands on its page, or it does not."""
        if not self.is_made:
            return "not made"
        try:
            self.made()
        except NotFound:
            return "no rows yet"
        return "made"

    def made(self, folder: str | None = None) -> Made:
        """Make the table. Raises NotFound when it cannot be made, or its rows are not there."""
        if not self.is_made:
            raise NotFound(f"{self.name} cannot be made: {self.note}")
        path = Path(input_path(folder or self.rows))
        lines, used = BUILDERS[self.name](path, self.paper)
        rows = [row for row in used if row is not None]
        if not rows:
            raise NotFound(
                f"{path} has no rows of {self.needs}: run the command that --list names, or give "
                f"its folder as --rows (*.jsonl of a benchmark, {RESULTS_NAME} of an evaluation)"
            )
        return tables.with_notes(tables.made(self.title, lines, rows, self.labels), path)


def _read_papers() -> dict[str, list[Entry]]:
    content = read_yaml(Path(__file__).with_name("papers.yaml"))
    phrases = content["phrases"]
    return {
        paper: [
            Entry(name, **{**about, "note": about["note"].format(**phrases)})
            for name, about in entries.items()
        ]
        for paper, entries in content["papers"].items()
    }


PAPERS = _read_papers()
ENTRIES = {entry.name: entry for entries in PAPERS.values() for entry in entries}
INDEX = """# The papers' tables

For readers of the papers that this project follows: each of their tables and figures with our
numbers beside theirs, the command that makes ours and what differs, or why there is none. One page
a paper:

{papers}

`python pipelines/stree_lab/paper_tables.py NAME` prints a table from the committed rows,
`--rows FOLDER` from yours. These pages are written by
`python pipelines/stree_lab/paper_tables.py --pages docs/paper-tables`.

The papers' numbers are copied from their tables. Theirs and ours are of other models on other GPUs:
ratios can be compared, tokens/s cannot.

| name | shows | ours |
|:--|:--|:--|
{entries}
"""


def page_of(paper: str) -> str:
    """Return the file name of a paper's page."""
    return paper.split(" (")[0].lower().replace(" ", "-") + ".md"


def pages() -> dict[str, str]:
    """Return the pages by file name: an index and one for each paper."""
    papers = "\n".join(f"- [{paper}]({page_of(paper)})" for paper in PAPERS)
    entries = "\n".join(
        f"| [`{entry.name}`]({page_of(paper)}) | {entry.what} "
        f"| {entry.state} |"
        for paper, entries in PAPERS.items()
        for entry in entries
    )
    index = INDEX.format(papers=papers, entries=entries)
    return {"README.md": index, **{page_of(paper): page(paper) for paper in PAPERS}}


def page(paper: str) -> str:
    """Return a paper's page: its entries, and the tables whose rows are there."""
    parts = [f"# {paper}\n", "The [index](README.md) says how these tables are made.\n"]
    for entry in PAPERS[paper]:
        hardware = f" Theirs: {entry.hardware}." if entry.hardware else ""
        parts.append(f"## `{entry.name}`: {entry.what}\n")
        if not entry.is_made:
            parts.append(f"Not made: {entry.note}.{hardware}\n")
            continue
        parts += [f"    {command}" for command in entry.commands]
        parts.append(f"\nWhat differs: {entry.note}.{hardware} Our rows: `{entry.rows}`.\n")
        try:
            parts.append(entry.made().to_markdown())
        except NotFound:
            parts.append("No rows of it are committed yet.\n")
    return "\n".join(parts)


def listing() -> str:
    """Format a line per entry."""
    width = max(map(len, ENTRIES))
    return "\n".join(
        f"{name:<{width}}  {entry.what}: "
        + ("; ".join(entry.commands) if entry.is_made else f"not made ({entry.note})")
        for name, entry in ENTRIES.items()
    )
