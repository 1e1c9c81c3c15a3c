"""Format Table 6 as data: every printed figure and interval, and its inputs.

JSON has everything that is known, CSV a column per figure.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from stree import metrics
from stree_pipelines.comparison.answers import Answers, acceptance_length, speedup
from stree_pipelines.evaluation.answering.stalls import stalled
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE
from stree_pipelines.evaluation.records import ResultRow
from stree_pipelines.reports.run_data import Cell, RunData
from stree_pipelines.reports.settings import common_setting
from stree_pipelines.reports.tables.answer_notes import without_repeats
from stree_pipelines.reports.tables.tables import acceptance_gain, chain_of_run, speed_ratio

QUANTILES = (
    "a and 1 - a, where a = Phi(-t * sqrt(Q / (Q - 1))) and t is the 97.5 % quantile of Student's "
    "distribution with Q - 1 degrees of freedom"
)
INTERVALS = {
    "quantiles": QUANTILES,
    "resampled": "prompts; the same ones of both sides of a ratio or difference",
    "draws": f"numpy.random.default_rng(0).integers(Q, size=({metrics.NUM_RESAMPLES}, Q)) of Q "
    "prompts in the order of `samples`",
    "acceptance_length": "sum of num_new_tokens / sum of num_calls",
    "tokens_per_second": "sum of num_new_tokens / sum of decode_s",
    "speedup": "tokens_per_second / that of the samples' baseline",
}


def as_json(
    results: Sequence[ResultRow], intervals: Mapping[str, str], rows: Iterable[Mapping[str, Any]]
) -> str:
    """Format {setting, intervals, rows}, with a line per row of a table that results are in."""
    head = {"setting": common_setting(results), "intervals": intervals}
    text = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}")
    lines = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in rows)
    return f'{text},\n "rows": [\n{lines}\n ]\n}}\n'


def as_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Format a line per row and a column per figure.

    A figure with an interval has NAME, NAME_low and NAME_high; one over something OVER_NAME. Lists
    (files, folders) are left out.
    """
    frame = pd.DataFrame([dict(_flat(row)) for row in rows], dtype=object)
    return frame.to_csv(index=False, lineterminator="\n")


def _flat(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping) and "interval" in value:
            low, high = value["interval"] or (None, None)
            yield from ((name, value["value"]), (f"{name}_low", low), (f"{name}_high", high))
        elif isinstance(value, Mapping):
            yield from ((f"{name}_{inner}", each) for inner, each in _flat(value))
        elif not isinstance(value, (list, tuple)):
            yield name, value


def table_rows(data: RunData) -> Iterator[dict[str, Any]]:
    """Yield a row per method, checkpoint, temperature and benchmark, under the names of
    `stree.metrics`.

    The pool of all benchmarks is included.
    """
    for benchmark, temperature, checkpoint, method in itertools.product(
        data.scopes, data.temperatures, ("", *data.checkpoints), (AUTOREGRESSIVE, *data.methods)
    ):
        cell = data.cell(checkpoint, method, benchmark, temperature)
        if cell is None:
            continue
        row = {
            "benchmark": benchmark, "temperature": temperature, "checkpoint": checkpoint or None,
            "step": data.steps.get(checkpoint), "method": method, **figures_of(cell),
            "samples": cell.files,
        }
        chain = chain_of_run(data, method)
        other = chain and data.cell(checkpoint, chain, benchmark, temperature)
        if other:
            row["over_chain"] = {**gains_of(cell, other), "samples": other.files}
        yield row


def figures_of(cell: Cell) -> dict[str, Any]:
    """Return a cell's figures, how its answers ended, and figures without repeating answers."""
    figures = {
        "num_prompts": cell.num_prompts,
        "acceptance_length": _interval_of(cell, "acceptance_length"),
        "tokens_per_second": _interval_of(cell, "tokens_per_second"),
        "autoregressive_tokens_per_second": cell.baseline_speed,
        "speedup": _interval_of(cell, "speedup"),
        "speedup_prompt_median": cell["speedup_prompt_median"],
    }
    if not cell.samples:
        return figures
    num_cut = sum(each.num_cut for each in cell.samples)
    answers = Answers.of([without_repeats(each) for each in cell.seeds])
    return figures | {
        "num_ended": sum(len(each.turns) for each in cell.samples) - num_cut,
        "num_cut": num_cut,
        "num_stalled": len(stalled(cell.samples)),
        "without_repeats": {
            "num_prompts": len(answers.prompts),
            "acceptance_length": answers.value(acceptance_length),
            "speedup": answers.value(speedup),
        },
    }


def gains_of(cell: Cell, other: Cell) -> dict[str, Any]:
    """Return the gains over another cell."""
    return {
        "acceptance_length_gain": acceptance_gain(cell, other)._asdict(),
        "speed_ratio": speed_ratio(cell, other)._asdict(),
    }


def _interval_of(cell: Cell, name: str) -> dict[str, Any]:
    return {"value": cell[name], "interval": cell.interval(name)}
