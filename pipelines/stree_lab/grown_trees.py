"""Record the trees that grow while a pair answers: their sizes, and the blocks of their masks.

    python pipelines/stree_lab/grown_trees.py TARGET DRAFTER runs/grown --tree dyspec-8-30-768-0.001

Written are trees.json, sizes.svg (DySpec's Fig. 5: the size of each step's tree, and the drafts
that it accepted) and blocks.svg (its Fig. 9: blocks of 32 × 32 of attention's mask that are not
empty, by the length of the prefix and the order of nodes; the recorded trees of 256 nodes and more
are already in a depth-first order). Steps run without graphs, so nothing is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import stree.common.threads  # noqa: F401  (before torch is loaded)

from matplotlib.figure import Figure

import stree
from stree.batching.runners import EagerRunner
from stree.common.errors import UsageError, exit_with_reason
from stree.trees.token_tree import as_tree
from stree_lab.papers import answered_prompts
from stree_lab.papers.node_order import by_level, depth_first, heavy_path, num_blocks
from stree_lab.papers.order_bench import BLOCK
from stree_pipelines.console.command_line import PlainParser, input_path
from stree_pipelines.reports.plots import add_legend, new_figure

ORDERS = {"by level": by_level, "depth first": depth_first, "heavy path": heavy_path}
PREFIXES = (0, 512, 1024, 2048, 4096)  # tokens before the tree


@dataclass(frozen=True)
class GrownTree:
    """The tree of one step: its nodes' parents, and how many of its drafts were accepted."""

    parents: tuple[int, ...]
    accepted: int


def watch(decoder: stree.Decoder) -> list[GrownTree]:
    """Let a decoder run without graphs, and return the list of its trees, which grows."""
    found: list[GrownTree] = []
    step = decoder.batch.worker.step
    verify = step.verify

    def watched(rows: Any, tree_batch: Any, *given: Any, **options: Any) -> Any:
        report = verify(rows, tree_batch, *given, **options)
        if tree_batch.num_nodes > 1:
            (tree,) = tree_batch.trees
            found.append(GrownTree(tree.parents, int(report[0, 1]) - 1))
        return report

    step.verify = watched  # type: ignore[method-assign]
    decoder.batch.worker.runner = EagerRunner(step)
    return found


def blocks_of(trees: Sequence[GrownTree], prefix: int) -> dict[str, float]:
    """Return the mean blocks of masks of trees after `prefix` tokens, by the order of nodes."""
    before = -(-prefix // BLOCK)
    return {
        name: fmean(
            num_blocks(order(tree.parents), BLOCK) + -(-len(tree.parents) // BLOCK) * before
            for tree in trees
        )
        for name, order in ORDERS.items()
    }


def sizes(trees: Sequence[GrownTree]) -> Figure:
    """Draw the nodes of each step's tree, and the drafts that it accepted."""
    figure, axes = new_figure()
    axes.plot([len(tree.parents) for tree in trees], "-", color="#2f81d6", label="nodes")
    right = axes.twinx()
    right.plot([tree.accepted for tree in trees], ".", color="#e0702b")
    right.set_ylabel("accepted drafts (dots)")
    axes.set(xlabel="step", ylabel="nodes of the tree", ylim=(0, None))
    return figure


def blocks(means: dict[int, dict[str, float]]) -> Figure:
    """Draw the mean blocks over the length of the prefix, a line for each order."""
    figure, axes = new_figure()
    for name in ORDERS:
        axes.plot(list(means), [each[name] for each in means.values()], "o-", label=name)
    axes.set(xlabel="tokens before the tree", ylabel="blocks that are not empty", ylim=(0, None))
    add_legend(figure, axes, ncols=3, handlelength=2)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    parser = PlainParser("grown_trees.py", description=__doc__)
    answered_prompts.add_options(
        parser, "folder or other name of the drafter", limit=10, temperature=0.6
    )
    parser.add_argument("--tree", default="dyspec-8-10-64-0.01", help="a tree that grows")
    parser.add_argument("--verifier", default="multi_step")
    options = parser.parse_args(arguments)
    if not (tree := as_tree(options.tree)).grows:
        raise UsageError(f"--tree {options.tree} has one shape, wanted one that grows: dyspec-…")
    decoder = stree.load(
        input_path(options.target), input_path(options.drafter), tree=tree,
        verifier=options.verifier, device=options.device,
    )
    trees = watch(decoder)
    for _ in answered_prompts.answers(options, decoder):
        pass
    means = {prefix: blocks_of(trees, prefix) for prefix in PREFIXES}
    content = {
        "tree": tree.name, "temperature": options.temperature,
        "mean_nodes": fmean(len(each.parents) for each in trees), "blocks": means,
        "trees": [asdict(each) for each in trees],
    }
    figures = {"sizes": sizes(trees), "blocks": blocks(means)}
    answered_prompts.write(options.out, "trees", decoder.target, content, figures)
    print(f"{len(trees):,} trees of {content['mean_nodes']:.1f} nodes on average: {options.out}")


if __name__ == "__main__":
    exit_with_reason(main)
