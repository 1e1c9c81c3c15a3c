"""Compare drafters, trees and verifiers on one target, interleaved prompt by prompt.

stree compare configs/compare/quickstart.yaml
stree compare configs/compare/quickstart.yaml --limit 2 --max_new_tokens 16 --out try

The file holds options of eval_spec.py and `arms`, each a name, a drafter (default: the file's), a
tree (chain-tuned: the fastest of chain-1 to chain-6 there; A or B: chosen step by step, by measured
cost; bandit A or B), a verifier and a way to backtrack. Writes comparison.md, .html and .svg, and
their rows and samples; goes on where it was stopped. Plain decoding takes part, and a verdict says
so when it, or a chain, is fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stree.common.files import write_atomically
from stree_pipelines.console.command_line import PlainParser
from stree_pipelines.evaluation.arms import Comparison, read_comparison
from stree_pipelines.evaluation.context import Workers
from stree_pipelines.evaluation.estimates import describe_comparison
from stree_pipelines.evaluation.options import OPTIONS, add_options
from stree_pipelines.evaluation.plan import DRAFTING
from stree_pipelines.reports import arms, plots
from stree_pipelines.reports.rendering import markdown_page


def main(arguments: Sequence[str] | None = None) -> None:
    parser = PlainParser("stree compare", description=__doc__)
    add = parser.add_argument
    add("config", help="YAML file of options and arms")
    add("--out", help="folder of the rows and the pages (default: the file's `out`)")
    add("--target", help="folder of the target (default of this and of what follows: the file's)")
    add("--drafter", help="of the arms that name none (default: the file's)")
    add_options(parser, {}, [name for name in OPTIONS if name not in DRAFTING])
    options = vars(parser.parse_args(arguments))
    dry_run = options.pop("dry_run")
    settings, chosen = read_comparison(options.pop("config"), options)
    if dry_run:
        workers = Workers.unconnected()
        for line in describe_comparison(Comparison(settings, chosen, workers=workers)):
            if workers.is_main:
                print(line, flush=True)
        return
    comparison = Comparison(settings, chosen)
    comparison.announce()
    try:
        rows = comparison.evaluate()
        if comparison.workers.is_main:
            places = arms.places_of(rows, comparison.store, comparison.tunings())
            text, folder = markdown_page(arms.markdown(places)), Path(settings.out)
            write_atomically(folder / "comparison.md", text)
            page = arms.page(places, folder.resolve().name)
            write_atomically(folder / "comparison.html", page)
            drawing = plots.to_svg(arms.overview(places), "Speed-ups of all arms")
            write_atomically(folder / "comparison.svg", drawing)
            print(f"{text}\n{folder / 'comparison.md'}\n{folder / 'comparison.html'}")
    finally:
        comparison.workers.leave()
