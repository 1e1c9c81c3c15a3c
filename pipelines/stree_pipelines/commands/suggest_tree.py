"""Suggest the static tree with the longest expected acceptance, or the fastest one.

    stree tree runs/quickstart --nodes 16 --out tree.yaml
    stree tree runs/quickstart --fastest --out tree.yaml
    stree eval --run runs/quickstart --tree tree.yaml   # measures it

Acceptance rates and step times come from the rows of the drafter that was distilled longest. With
--fastest the fastest tree of each number of levels is printed, too; --out_levels writes them into a
folder, to choose among them step by step: --tree "FOLDER/2-levels.yaml or …".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import stree.common.threads  # noqa: F401  (before other libraries are loaded)

import yaml

from stree.common.errors import UsageError
from stree.common.files import write_atomically
from stree.speculation_profile import SuggestedTree
from stree_pipelines.console.command_line import CommandParser
from stree_pipelines.evaluation.records import ResultRow
from stree_pipelines.evaluation.result_store import ResultStore
from stree_pipelines.reports.profiles.tree_suggestion import fastest, suggest
from stree_pipelines.reports.run_data import open_results, without_replaced
from stree_pipelines.reports.settings import SHOW_HELP, chosen, require_one


def rows_of_last_step(store: ResultStore, shown: Sequence[str] = ()) -> list[ResultRow]:
    """Return the rows of the drafter that was distilled longest.

    Raises UsageError when there is none, or they are of several decoding settings.
    """
    rows = without_replaced(chosen(store.results(), shown, store.directory))
    drafted = [row for row in rows if row.checkpoint is not None]
    if not drafted:
        raise UsageError(f"{store.directory} has no rows of a drafter: evaluate one first")
    last = max((row.step for row in drafted if row.step is not None), default=None)
    found = [row for row in drafted if row.step == last]
    require_one({str(store.directory): found})
    return found


def to_yaml(suggestion: SuggestedTree, name: str | None = None) -> str:
    """Format a tree file for `--tree`; name: the tree's, by default its own."""
    tree, interval = suggestion.tree, suggestion.predicted_acceptance_length_interval
    bracket = f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else ""
    content = {
        "name": name or tree.name,
        "description": f"predicted acceptance length {suggestion.predicted_acceptance_length:.3f}"
        f"{bracket} at T = {suggestion.temperature:g}, by rates over {suggestion.num_calls} calls",
        "parents": list(tree.parents),
    }
    return yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=100)


def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser("stree tree", description=__doc__)
    add = parser.add_argument
    add("run", type=str, help="run folder, or an evaluation's folder")
    add("--nodes", type=int | None,
        help="root included (default: as many as were measured, at most 768)")
    add("--depth", type=int | None, help="at most, as each is a call of the drafter (default: any)")
    add("--temperature", type=float, default=0.0, help="whose rows count")
    add("--fastest", action="store_true",
        help="the tree with the most predicted tokens a second, by what steps of the rows took; "
        "--nodes and --depth are the most then")
    add("--out_levels", type=str | None,
        help="with --fastest: folder to write the fastest tree of each number of levels to")
    add("--show", type=str, nargs="+", default=[], help=SHOW_HELP)
    add("--out", type=str | None, help="YAML file to write, for --tree of eval_spec.py")
    options = parser.parse_args(arguments)
    store = open_results(Path(options.run))
    rows = rows_of_last_step(store, options.show)
    nodes, depth, by_levels = options.nodes, options.depth, []
    if options.fastest:
        by_levels = fastest(rows, options.temperature, nodes, depth)
        best = max(by_levels, key=lambda each: each.tokens_per_second)
        nodes, depth = best.tree.num_nodes, best.tree.max_depth
    elif options.out_levels is not None:
        raise UsageError("--out_levels is for the trees of --fastest: give that, too")
    suggestion = suggest(rows, options.temperature, nodes, store.samples, depth)
    print(to_yaml(suggestion), end="")
    for check in suggestion.checks:
        print(
            f"# {check.tree.name}: predicted {check.predicted_acceptance_length:.3f}, "
            f"measured {check.measured_acceptance_length:.3f}"
        )
    if suggestion.num_extrapolated:
        print(f"# {suggestion.num_extrapolated} nodes lie deeper than any that was measured")
    if options.out is not None:
        write_atomically(options.out, to_yaml(suggestion))
    if by_levels:
        print(f"# {'levels':>8}{'nodes':>8}{'predicted τ':>14}{'ms a step':>12}{'tokens/s':>10}")
    for each in by_levels:
        print(
            f"# {each.tree.max_depth:>8}{each.tree.num_nodes:>8}{each.acceptance_length:>14.3f}"
            f"{each.step_ms:>12.3f}{each.tokens_per_second:>10.0f}"
        )
        if options.out_levels is not None:
            levels, nodes = each.tree.max_depth, each.tree.num_nodes
            one = suggest(rows, options.temperature, nodes, store.samples, levels)
            path = Path(options.out_levels) / f"{levels}-levels.yaml"
            write_atomically(path, to_yaml(one, f"levels-{levels}-{nodes}"))
