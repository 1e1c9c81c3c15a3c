"""Table 6 as data: every figure and interval that it prints, and what they were computed from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from stree import metrics
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE
from stree_pipelines.reports.run_data import RunData
from stree_pipelines.reports.settings import common_setting
from stree_pipelines.reports.tables import acceptance_gain, chain_beside, speed_ratio

INTERVALS = {
    "quantiles": [quantile / 100 for quantile in metrics.QUANTILES],
    "resampled": "prompts; the same ones of both sides of a ratio or difference",
    "draws": f"numpy.random.default_rng(0).integers(Q, size=({metrics.NUM_RESAMPLES}, Q)) of Q "
    "prompts in the order of `samples`",
    "acceptance_length": "sum of num_new_tokens / sum of num_calls",
    "tokens_per_second": "sum of num_new_tokens / sum of decode_s",
    "speedup": "tokens_per_second / that of the samples' baseline",
}


def table6_json(data: RunData) -> str:
    """{setting, intervals, rows}: a row a method, checkpoint, temperature and benchmark, the pool
    of all benchmarks included, under the names of `stree.metrics`; a line each."""
    head = json.dumps(
        {"setting": common_setting(data.rows), "intervals": INTERVALS}, indent=1, ensure_ascii=False
    )
    rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in _rows(data))
    return head.removesuffix("\n}") + f',\n "rows": [\n{rows}\n ]\n}}\n'


def _rows(data: RunData) -> Iterator[dict[str, Any]]:
    for benchmark in data.scopes:
        for temperature in data.temperatures:
            for checkpoint in ("", *data.checkpoints):
                for method in (AUTOREGRESSIVE, *data.methods):
                    yield from _row(data, benchmark, temperature, checkpoint, method)


def _row(
    data: RunData, benchmark: str, temperature: float, checkpoint: str, method: str
) -> Iterator[dict[str, Any]]:
    cell = data.cell(checkpoint, method, benchmark, temperature)
    if cell is None:
        return
    row = {
        "benchmark": benchmark,
        "temperature": temperature,
        "checkpoint": checkpoint or None,
        "step": data.steps.get(checkpoint),
        "method": method,
        "num_prompts": cell.num_prompts,
        "acceptance_length": _of(cell["acceptance_length"], cell.interval("acceptance_length")),
        "tokens_per_second": _of(cell["tokens_per_second"], cell.interval("tokens_per_second")),
        "autoregressive_tokens_per_second": cell.baseline_speed,
        "speedup": _of(cell["speedup"], cell.interval("speedup")),
        "samples": cell.files,
    }
    chain = chain_beside(data, method)
    other = chain and data.cell(checkpoint, chain, benchmark, temperature)
    if other:
        row["over_chain"] = {
            "acceptance_length_gain": _of(*acceptance_gain(cell, other)),
            "speed_ratio": _of(*speed_ratio(cell, other)),
            "samples": other.files,
        }
    yield row


def _of(value: float | None, interval: metrics.Interval | None) -> dict[str, Any]:
    return {"value": value, "interval": interval}
