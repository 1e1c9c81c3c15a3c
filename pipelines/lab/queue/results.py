"""What requests in a queue waited for, as a table and as a figure."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.figure import Figure

from stree_pipelines.evaluation.plan import AUTOREGRESSIVE, CHAIN, TREE
from stree_pipelines.lab.queue.queueing import CLEARING, QueueRow
from stree_pipelines.reports.plots import (
    COLOURS,
    MAX_TICKS,
    PLAIN_COLOUR,
    SIZE_INCHES,
    STYLE,
    add_legend,
)
from stree_pipelines.reports.run_data import method_label
from stree_pipelines.reports.tables.tables import Table

SHORT = {AUTOREGRESSIVE: "plain", CHAIN: "chain", TREE: "tree"}
LEGEND = (
    "Seconds from a request's arrival to its last token (mean, p50, p95) and to its\n"
    "first one (p50). rows: how many held a request, on average."
)


def queue_table(rows: Sequence[QueueRow]) -> Table:
    """A line a setting; seconds from a request's arrival. Fits a terminal of 80 columns."""
    heads = ("policy", "method", "rate", "mean", "p50", "p95", "first", "tok/s", "rows")
    lines = [
        (
            row.policy, SHORT[row.method], f"{row.rate:g}",
            *(f"{value:.2f}" for value in (row.latency_s.mean, row.latency_s.p50,
                                           row.latency_s.p95, row.time_to_first_token_s.p50)),
            f"{row.throughput:.0f}", f"{row.occupancy * row.batch_size:.1f}",
        )
        for row in rows
    ]  # fmt: skip
    first = rows[0]
    title = (
        f"{first.benchmark}, T = {first.temperature:g}: {first.num_requests} requests, "
        f"{first.batch_size} rows"
    )
    return Table(title, (heads, *lines), num_left=2)


def latency_vs_rate(rows: Sequence[QueueRow]) -> Figure:
    """Mean latency (line) and its p95 (thin), and throughput below, over the rate; a method has
    the report's colour, and clearing is dashed."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(SIZE_INCHES[0], 1.7 * SIZE_INCHES[1]))
        latency, throughput = figure.subplots(2, sharex=True)
    for policy, method in dict.fromkeys((row.policy, row.method) for row in rows):
        mine = sorted(
            (row for row in rows if (row.policy, row.method) == (policy, method)),
            key=lambda row: row.rate,
        )
        rates = [row.rate for row in mine]
        look = {
            "color": COLOURS.get(method, PLAIN_COLOUR), "marker": "o",
            "linestyle": "--" if policy == CLEARING else "-",
        }  # fmt: skip
        label = f"{method_label(method)}, {policy}"
        latency.plot(rates, [row.latency_s.mean for row in mine], label=label, **look)
        latency.plot(rates, [row.latency_s.p95 for row in mine], **{**look, "lw": 0.8, "ms": 2.5})
        throughput.plot(rates, [row.throughput for row in mine], **look)
    latency.set_ylabel("latency in s: mean, and p95 (thin)")
    latency.set_ylim(bottom=0)
    throughput.set_ylabel("new tokens per second")
    throughput.set_ylim(bottom=0)
    throughput.set_xlabel("requests per second")
    all_rates = sorted({row.rate for row in rows})
    if len(all_rates) <= MAX_TICKS:
        throughput.set_xticks(all_rates, [f"{rate:g}" for rate in all_rates])
    add_legend(figure, latency, ncols=2, handlelength=3.2)
    return figure
