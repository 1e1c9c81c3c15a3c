"""Compare decoding settings: rows must agree in them to stand in one table, curve or profile.

A setting has the names of the command's options, and a word for each. Other differences (commit,
threads, processes, versions) move speeds and not tokens: `remarks` names them.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence

from stree.common.errors import UsageError
from stree.common.words import counted
from stree_pipelines.evaluation.plan import CHAIN, TREE
from stree_pipelines.evaluation.records import ResultRow
from stree_pipelines.evaluation.sampling import OFF, sampling_of, sampling_text

NAMES = (
    "target", "dtype", "device", "max_new_tokens", "batch_size", "ignore_eos", "seed", *OFF,
    "chat_template", "verifier", "backtracking", "BENCHMARK.prompts",
)
SHOW_HELP = (
    "where rows of several decoding settings are there, which to take: NAME=VALUE, as the error "
    f"lists them; NAME: {', '.join(NAMES)}"
)
HASH_CHARS = 8
OF_ARMS = ("verifier", "backtracking")


def setting_of(row: ResultRow) -> dict[str, str]:
    """Return {name: value} of a row's decoding setting.

    Prompts are a benchmark's own; plain decoding has no verifier.
    """
    values = {
        "target": row.target_sha256[:HASH_CHARS],
        "dtype": dtype_of(row),
        "device": row.environment.device,
        "batch_size": str(row.batch_size),
        "max_new_tokens": str(row.max_new_tokens),
        "ignore_eos": str(row.ignore_eos).lower(),
        "seed": str(row.seed),
        **{name: str(value) for name, value in sampling_of(row).items()},
        f"{row.benchmark}.prompts": f"{row.num_prompts}@{row.prompts_hash[:HASH_CHARS]}",
    }
    for name in OF_ARMS:
        if (value := getattr(row, name)) is not None:
            values[name] = value
    if row.chat_template_sha256 is not None:
        values["chat_template"] = row.chat_template_sha256[:HASH_CHARS]
    return values


def dtype_of(row: ResultRow) -> str:
    """Return the dtype of the weights of the target's products."""
    dtypes = row.environment.dtypes
    return dtypes.get("target", dtypes.get("weights", "unknown"))


def common_setting(rows: Sequence[ResultRow]) -> dict[str, str]:
    """Return the setting that all rows of a table share."""
    return {name: value for row in rows for name, value in setting_of(row).items()}


def sampling_note(rows: Sequence[ResultRow]) -> str:
    """Return the note under a table on its sampling settings; "" when all are off."""
    settings = sampling_text(rows[0]) if rows else ""
    return f"All methods were decoded with {settings}." if settings else ""


def differing(rows: Sequence[ResultRow]) -> dict[str, Counter[str]]:
    """Return {name: {value: rows}} of the settings in which rows differ."""
    found: dict[str, Counter[str]] = {}
    for row in rows:
        for name, value in setting_of(row).items():
            found.setdefault(name, Counter())[value] += 1
    return {name: values for name, values in found.items() if len(values) > 1}


def chosen(rows: Sequence[ResultRow], wanted: Sequence[str], where: object) -> list[ResultRow]:
    """Keep the rows that fit each `NAME=VALUE` of `wanted`; prompts concern their benchmark only.

    Raises UsageError for a text that is no such pair, and for one that no row fits.
    """
    kept = list(rows)
    for text in wanted:
        name, _, value = text.partition("=")
        there = {setting.get(name) for setting in map(setting_of, kept)} - {None}
        if value not in there:
            known = ", ".join(sorted(f"{name}={shlex.quote(str(each))}" for each in there))
            raise UsageError(
                f"--show {text}: no row of {where} has it"
                + (f" (beside the rest of --show), only {known}" if known
                   else f"; wanted NAME=VALUE with NAME one of {', '.join(NAMES)}")
            )
        own = name.removesuffix(".prompts") if name.endswith(".prompts") else None
        kept = [
            row for row in kept
            if setting_of(row).get(name) == value or own not in (None, row.benchmark)
        ]
    return kept


def require_one(runs: Mapping[str, Sequence[ResultRow]], arms: bool = False) -> None:
    """Raise UsageError, naming the settings found, when these runs' rows have several.

    arms: the arms of a comparison may differ in the options that each sets itself.
    """
    rows = [row for each in runs.values() for row in each]
    mixed = differing(rows)
    if arms and not any(row.method in (CHAIN, TREE) for row in rows):
        mixed = {name: values for name, values in mixed.items() if name not in OF_ARMS}

    def where(name: str, value: str) -> str:
        if len(runs) == 1:
            return f"{mixed[name][value]} rows"
        having = {run: sum(setting_of(row).get(name) == value for row in runs[run]) for run in runs}
        return ", ".join(f"{count} rows in {run}" for run, count in having.items() if count)

    if mixed:
        found = "; ".join(
            f"{name} is "
            + " or ".join(f"{value} ({where(name, value)})" for value, _ in values.most_common())
            for name, values in mixed.items()
        )
        raise UsageError(
            f"{', '.join(map(str, runs))}: rows of several decoding settings, which no table can "
            f"join: {found}. Evaluate them alike, or say which to take, such as --show "
            f"{shlex.join(_largest(rows))}"
        )
    hashes: dict[tuple[object, ...], str] = {}
    for row in rows:
        place = row.method, row.tree, row.benchmark, row.temperature
        if hashes.setdefault(place, row.decoding_hash) != row.decoding_hash:
            raise UsageError(
                f"{', '.join(map(str, runs))} holds rows of {row.method} at T = "
                f"{row.temperature:g} that were decoded differently (by decoding_hash), though no "
                "other column differs: move one results.jsonl away and evaluate again"
            )


def require_one_ending(rows: Sequence[ResultRow], where: object) -> None:
    """Raise UsageError for rows with and without ignore_eos: other answers, that go on for ever."""
    if len({row.ignore_eos for row in rows}) > 1:
        count = sum(row.ignore_eos for row in rows)
        raise UsageError(
            f"{where} would join {counted(count, 'row')} with ignore_eos and {len(rows) - count} "
            "without, wanted rows of one kind: evaluate them alike, or take those of one kind"
        )


def remarks(rows: Sequence[ResultRow]) -> list[str]:
    """Return a sentence for each difference between rows of one setting that may move speeds."""
    facts = {
        "commits": [row.environment.git_sha or "unknown" for row in rows],
        "numbers of processes": [str(row.environment.num_processes) for row in rows],
        "numbers of threads": [str(row.environment.num_threads) for row in rows],
        "versions of torch": [row.environment.versions.get("torch", "unknown") for row in rows],
    }
    return [
        f"The rows were measured with several {name}: {', '.join(dict.fromkeys(values))}. Compare "
        "speeds between columns with care; each speed-up is of one run."
        for name, values in facts.items()
        if len(set(values)) > 1
    ]


def _largest(rows: Sequence[ResultRow]) -> list[str]:
    """Return the --show arguments of a setting that many rows have."""
    pairs: list[str] = []
    while mixed := differing(rows):
        name, values = next(iter(mixed.items()))
        pairs.append(f"{name}={values.most_common(1)[0][0]}")
        rows = chosen(rows, pairs[-1:], "")
    return pairs
