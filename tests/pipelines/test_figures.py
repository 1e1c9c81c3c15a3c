"""Figures of README and docs, recomputed from the committed rows that they name.

A line names the rows of its figures in a comment, which no reader of the page sees:

    <!-- rows: h200-sharegpt/ba8f615 method=stree T=0 step=3200: speedup acceptance_length -->
    <!-- bench: h200-step/8b.jsonl what=step num_nodes=13: 1/speedup_per_tau -->

The folder or file is one of docs/results. Values with commas (and no blank) are several rows, `;`
begins another choice of rows in the same folder, and without `benchmark=` all benchmarks are
pooled; `benchmark=!NAME` are the others. All numbers with a decimal point or a unit before the
comment must be these figures, in this order and as rounded there, each with its interval or
without. `speedup/METHOD` is a ratio of speed-ups, paired by prompt, `speedup%METHOD` its gain in
percent; a METHOD with `*` is several seeds. `NAME@each` is the geometric mean over benchmarks of
each one's figure; `prefill_ms` is the median. `tokens_per_second/METHOD` needs no plain decoding,
nor does `tokens_per_second_e2e/METHOD`, which counts prompts and, like all figures of TIMES, has no
interval; `speedup_without_waiting` takes plain decoding's waiting away. A field of a benchmark may
be divided or multiplied (`us_tree/1000`); measured several times, it is the median; a `.json` file
is one row. A speed of answers that the machine held up, or of plain decoding that waited, has a †
(`1.46†`, `1.46×†`), which the page explains below.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections import defaultdict
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from statistics import geometric_mean, median

import numpy as np
import pytest
import torch

from stree import metrics
from stree_kernels import ops
from stree_lab.benches import calls, models
from stree_pipelines.commands import suggest_tree
from stree_pipelines.comparison import answers as figures
from stree_pipelines.comparison.answers import Answers
from stree_pipelines.evaluation.answering.stalls import waiting_share
from stree_pipelines.evaluation.result_store import ResultStore
from stree_pipelines.reports.tables.answer_notes import marks

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "docs/results"
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
NAMED = re.compile(r"<!-- (?P<kind>rows|bench): (?P<where>\S+) (?P<what>.+?) -->")
NUMBER = re.compile(  # with a point (no version 0.1.0), or with a unit
    r"(?<![\w.-])[+−-]?(?:\d+\.\d+(?!\.?\d)|\d+(?= (?:to \d+ )?(?:%|µs|ms|MiB)))"
)
MARK = re.compile(r"(?:×| %)?\**†")  # behind a number
NO_FIGURE = re.compile(r"T = [\d.]+(, [\d.]+)*( and [\d.]+)?|\]\([^)]*\)")  # nor are links
TIMES = {
    "step_ms": lambda samples, plain: 1000 * (
        sum(each.decode_s for each in samples) / sum(each.num_calls for each in samples)
    ),
    "prefill_ms": lambda samples, plain: 1000 * median(each.prefill_s for each in samples),
    "tokens_per_second_e2e": lambda samples, plain: metrics.tokens_per_second_e2e(samples),
    "speedup_e2e": lambda samples, plain: (
        metrics.tokens_per_second_e2e(samples) / metrics.tokens_per_second_e2e(plain)
    ),
    "draft_ms": lambda samples, plain: metrics.time_ms(samples)["draft"],
    "speedup_without_waiting": lambda samples, plain: (
        metrics.summarise(samples, plain)["speedup"]
        * (1 - (waiting_share(metrics.time_ms(plain)) or 0.0))
    ),
}
WITHOUT_PLAIN = (
    "tokens_per_second", "tokens_per_second_e2e", "speedup_without_waiting", "step_ms", "draft_ms",
)


def lines_of(page):
    """Return a line's number, the text before its comment and after the one before, and the
    comment, of each comment of a page."""
    claims = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        end = 0
        for found in NAMED.finditer(line):
            claims.append((number, line[end : found.start()], found))
            end = found.end()
    return claims


CLAIMS = [
    pytest.param(before, found, id=f"{page.relative_to(REPOSITORY)}:{number}")
    for page in PAGES for number, before, found in lines_of(page)
]


@cache
def store_of(folder):
    return ResultStore(RESULTS / folder)


@cache
def rows_of(folder):
    return store_of(folder).results()


@cache
def samples_of(folder, at):
    return store_of(folder).samples(rows_of(folder)[at])


def choices(text):
    """Yield {key: value} of each row, or pool of rows, that a comment names."""
    pairs = [word.partition("=")[::2] for word in shlex.split(text)]
    names = [name for name, _ in pairs]
    for values in itertools.product(*(re.split(r",(?! )", value) for _, value in pairs)):
        yield dict(zip(names, values, strict=True))


def seeds_of(folder, method, T, step=None, benchmark="*", batch_size=None, **unknown):
    """Return the samples of each method that the name fits."""
    assert not unknown, f"{unknown} is no part of a row's name"
    others, benchmark = benchmark.startswith("!"), benchmark.removeprefix("!")
    rows = [
        (at, row) for at, row in enumerate(rows_of(folder))
        if fnmatchcase(row.method, method) and row.temperature == float(T)
        and step in (None, str(row.step)) and batch_size in (None, str(row.batch_size))
        and fnmatchcase(row.benchmark, benchmark) != others
    ]
    assert rows, f"{folder} has no row of {method} at T = {T}, step {step}"
    samples = {}
    for at, row in rows:
        samples.setdefault(row.method, []).extend(samples_of(folder, at))
    assert sum(map(len, samples.values())) == sum(row.num_prompts for _, row in rows)
    return list(samples.values())


def from_rows(folder, chosen, name):
    """Return a figure and its interval."""
    if "%" in name:
        value, interval = from_rows(folder, chosen, name.replace("%", "/"))
        return 100 * (value - 1), interval and [100 * (end - 1) for end in interval]
    if name.endswith("@each"):
        benchmarks = {row.benchmark for row in rows_of(folder)}
        each = (
            from_rows(folder, {**chosen, "benchmark": benchmark}, name.removesuffix("@each"))[0]
            for benchmark in benchmarks
        )
        return geometric_mean(each), None
    seeds = seeds_of(folder, **chosen)
    name, _, other = name.partition("/")
    if other and name in TIMES:
        mine, theirs = (
            from_rows(folder, {**chosen, "method": method}, name)[0]
            for method in (chosen["method"], other)
        )
        return mine / theirs, None
    if other:
        theirs = Answers.of(seeds_of(folder, **{**chosen, "method": other}))
        gain = Answers.of(seeds).over(theirs, getattr(figures, name), np.divide)
        return gain.value, gain.interval
    if len(seeds) > 1:
        return Answers.of(seeds).value(getattr(figures, name)), None
    (samples,) = seeds
    plain = [sample.baseline for sample in samples]
    if name in TIMES:
        return TIMES[name](samples, plain), None
    summary = metrics.summarise(samples, plain)
    return summary[name], summary["confidence_intervals"].get(name)


def is_marked(folder, chosen, name):
    """Return whether a figure is a speed of a row that is not to be relied on."""
    name, *others = re.split("[/%]", name.removesuffix("@each"))
    if "acceptance" in name:
        return False
    rows = defaultdict(list)
    for method in (chosen["method"], *others):
        for samples in seeds_of(folder, **{**chosen, "method": method}):
            for sample in samples:
                rows[sample.method, sample.benchmark].append(sample)
    reasons = [reason for samples in rows.values() for reason in marks({"": samples})]
    return any(name not in WITHOUT_PLAIN or "waited between" not in reason for reason in reasons)


def from_bench(file, chosen, name):
    """Return the figure of the one row that fits, or of all if they share it."""
    text = (RESULTS / file).read_text("utf-8")
    rows = [json.loads(row) for row in ([text] if file.endswith(".json") else text.splitlines())]
    fitting = [
        row for row in rows if all(str(row.get(key)) == value for key, value in chosen.items())
    ]
    inverse, field, times, by = re.fullmatch(r"(1/)?(\w+)(?:([/*])(\d+))?", name).groups()
    values = [row[field] for row in fitting]
    assert values, f"{file} has no row with {chosen}"
    values = [value["median"] if isinstance(value, dict) else value for value in values]
    factor = int(by or 1) if times == "*" else 1 / int(by or 1)
    values = [1 / value if inverse else value * factor for value in values]
    shown = {f"{value:.2f}" for value in values}
    assert len(shown) == 1, f"rows of {file} with {chosen} differ: {shown}"
    return values[0], None


def recomputed(found):
    """Yield the numbers of a line, (value, interval or None, whether marked) in their order."""
    for group in found["what"].split(";"):
        rows, _, names = group.partition(":")
        for chosen in choices(rows):
            for name in shlex.split(names):
                told = found["where"], chosen, name
                if found["kind"] == "rows":
                    yield *from_rows(*told), is_marked(*told)
                else:
                    yield *from_bench(*told), False


def test_readme_and_results_name_the_rows_of_their_figures():
    assert len(lines_of(PAGES[0])) >= 6, "README's figures name their rows"
    named = (found["where"] for page in PAGES for *_, found in lines_of(page))
    assert all((RESULTS / where).exists() for where in named)


@pytest.mark.parametrize(
    "page", ["README.md", "docs/long-context.md", "docs/models.md", "docs/policies.md"]
)
def test_no_figure_of_a_page_s_tables_is_without_its_row(page):
    lines = (REPOSITORY / page).read_text(encoding="utf-8").splitlines()
    figured = [
        line for line in lines if line.startswith("|") and NUMBER.search(NO_FIGURE.sub("", line))
    ]
    assert figured and all(NAMED.search(line) for line in figured)


@pytest.mark.parametrize(("before", "found"), CLAIMS)
def test_a_figure_is_what_its_rows_say(before, found):
    before = NO_FIGURE.sub("", before)
    told = [
        each.group().replace("−", "-") + "†" * bool(MARK.match(before, each.end()))
        for each in NUMBER.finditer(before)
    ]
    rest, wanted = told, []
    for value, interval, marked in recomputed(found):
        places = len(rest[0].rstrip("†").partition(".")[2]) if rest else 2
        signed = "+" if rest and rest[0].startswith("+") else ""
        figure, *ends = (f"{each:{signed}.{places}f}" for each in (value, *(interval or ())))
        figure += "†" * marked
        wanted += [figure, *ends]
        assert rest[:1] == [figure], f"recomputed: {wanted}"
        rest = rest[1:]
        if ends and rest[:2] == ends:  # not every figure's interval is told
            rest = rest[2:]
    assert rest == [], f"recomputed: {wanted}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_a_page_with_marked_figures_says_what_the_mark_means(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    told = any(line.startswith("† ") for line in lines)
    assert told == any("†" in before for _, before, _ in lines_of(page))


def test_predictions_of_the_profile_s_page_are_what_the_command_prints(capsys):
    suggest_tree.main([str(RESULTS / "cpu-quickstart"), "--nodes", "16"])
    printed = re.findall(r"\d\.\d{3}", capsys.readouterr().out)
    page = (REPOSITORY / "docs/drafter-profile.md").read_text(encoding="utf-8")
    table = page.partition("| tree | predicted τ |")[2]
    assert re.findall(r"\d\.\d{3}", table) == printed[3:] + printed[:3]  # the suggestion last


def test_what_the_chat_target_s_trees_keep_is_told_as_counted(monkeypatch):
    monkeypatch.setattr(ops, "fused", lambda *given, **named: True)  # as on a GPU
    target, mib = models.random_target("chat", torch.device("cpu")), 2**20
    page = (REPOSITORY / "docs/dynamic-trees-and-prompts.md").read_text(encoding="utf-8")
    for num_nodes in (13, 64):
        (row,) = calls.memory(target, num_nodes)
        kept = (f"{row[name] / mib:.2f} MiB" for name in ("kept_bytes", "kept_bytes_joint"))
        state = f"{row['state_bytes'] / mib:.2f} MiB"
        assert " | ".join(("| chat", state, str(num_nodes), *kept)) in page


SHAREGPT = "rows: h200-sharegpt/ba8f615 method=stree T=0 step=3200"


@pytest.mark.parametrize(
    ("figure", "rows", "recomputed"),
    [
        ("1.63× [1.55, 1.73]", f"{SHAREGPT}: speedup", "'1.63', '1.55', '1.74'"),
        ("+8 %", f"{SHAREGPT}: speedup%vanilla_sd", "'+7', "),
        ("4.28 ms", "bench: h200-step/5237370/8b.jsonl num_nodes=16: us_tree/1000", "'4.29'"),
    ],
)
def test_a_stale_figure_does_not_pass(figure, rows, recomputed):
    with pytest.raises(AssertionError, match=re.escape(f"recomputed: [{recomputed}")):
        test_a_figure_is_what_its_rows_say(f"| {figure} ", NAMED.search(f"<!-- {rows} -->"))
