"""The table of what trees cost on this machine, and from which τ on each pays."""

from __future__ import annotations

from typing import Any

from stree.batching.batch_decoder import BatchDecoder
from stree.tree_policy.step_times import StepTimes
from stree.trees.token_tree import PLAIN


def speculation_table(decoder: BatchDecoder) -> dict[str, Any]:
    """Return the policy, and for each number of rows and tree the step's time and break-even.

    A tree is as fast as plain decoding at an acceptance length of its step's time by the plain
    step's. Without measured step times there are no rows.
    """
    costs = getattr(decoder.tree_policy, "costs", None)
    rows = []
    if isinstance(costs, StepTimes):
        for (count, tree), seconds in sorted(
            costs.seconds.items(), key=lambda each: (each[0][0], each[0][1].num_nodes)
        ):
            plain = costs.seconds.get((count, PLAIN))
            rows.append({
                "rows": count, "tree": tree.name, "step_ms": 1e3 * seconds,
                "break_even_acceptance_length": seconds / plain if plain else None,
            })
    return {
        "policy": decoder.tree_policy.name, "drafts": decoder.drafter is not None,
        "num_rows": decoder.num_rows, "max_length": decoder.max_length, "steps": rows,
    }


def speculation_lines(decoder: BatchDecoder) -> list[str]:
    """Return the same as lines of a table; none without measured step times."""
    steps = speculation_table(decoder)["steps"]
    if not steps:
        return []
    width = max(len(each["tree"]) for each in steps)
    lines = [f"rows  {'tree':<{width}}  step ms  pays from τ"]
    for each in steps:
        pays = each["break_even_acceptance_length"]
        told = "" if each["tree"] == PLAIN.name or pays is None else f"{pays:.2f}"
        tree, step_ms = each["tree"], each["step_ms"]
        lines.append(f"{each['rows']:>4}  {tree:<{width}}  {step_ms:7.2f}  {told:>11}")
    return lines
