r"""Project a comparison's accepted drafts to another target's step times.

    stree project docs/results/h200-policies/features \
        --times docs/results/h200-policies/features/8b-calls.jsonl \
        docs/results/h200-step/5237370/8b-large.jsonl

Prints the best chain, each fixed tree and a choice by cost for every benchmark, as speed-ups over
plain decoding: computed, not measured. --times are rows of bench_decode.py --what "[calls,draft]".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stree.common.errors import exit_with_reason
from stree.common.files import write_atomically
from stree_lab.bench_report import rows_of_file
from stree_lab.papers.projection import PairTimes, read_places, tables
from stree_pipelines.console.command_line import PlainParser, input_path

CHOICES = "chain-4 or paper or beam-4-3-32 or beam-4-5-32"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = PlainParser("stree project", description=__doc__)
    add = parser.add_argument
    add("comparison", help="folder of a comparison's rows and samples")
    add("--times", nargs="+", required=True, help="files of timed calls and drafts")
    add("--tree", default=CHOICES, help=f"what is chosen among (default: {CHOICES})")
    add("--out", help="file to write the tables to, too")
    options = parser.parse_args(arguments)
    rows = [row for file in options.times for row in rows_of_file(Path(input_path(file)))]
    places = read_places(Path(input_path(options.comparison)))
    made = tables(places, PairTimes(rows), options.tree)
    text = "\n".join(each.to_markdown() for each in made)
    print(text)
    if options.out:
        write_atomically(Path(options.out), text)


if __name__ == "__main__":
    exit_with_reason(main)
