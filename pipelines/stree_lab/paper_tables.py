"""Make the papers' tables and figures in their layout, with our numbers next to theirs.

    stree papers --list
    stree papers stree-table-7  # from the committed rows
    stree papers stree-table-7 --rows RUN/eval # from yours

Each is made from rows that another command has written; --list names it, and the tables that cannot
be made, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stree.common.errors import UsageError, exit_with_reason
from stree.common.files import make_directory, write_atomically
from stree_lab.papers.registry import ENTRIES, listing, pages
from stree_pipelines.console.command_line import PlainParser, suggestion


def main(arguments: Sequence[str] | None = None) -> None:
    parser = PlainParser("stree papers", description=__doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="tables and figures, as --list has them")
    add("--rows", help="folder of the rows to take (default: those that are committed)")
    add("--list", action="store_true", help="all tables and figures, and what makes their rows")
    add("--pages", help="write a page for each paper, and an index, to this folder")
    options = parser.parse_args(arguments)
    if not (options.names or options.list or options.pages):
        raise UsageError("no table is named: give names, --list or --pages FOLDER")
    for name in options.names:
        if name not in ENTRIES:
            raise UsageError(f"there is no {name}{suggestion(name, ENTRIES)}: --list has them all")
    if options.list:
        print(listing())
    for name in options.names:
        entry = ENTRIES[name]
        print(entry.made(options.rows).to_markdown())
        print(f"Theirs: {entry.hardware}. What differs: {entry.note}.\n")
    if options.pages:
        make_directory(options.pages)
        for name, text in pages().items():
            write_atomically(Path(options.pages, name), text)


if __name__ == "__main__":
    exit_with_reason(main)
