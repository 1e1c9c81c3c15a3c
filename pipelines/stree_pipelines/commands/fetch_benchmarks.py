"""Fetch MT-Bench, HumanEval, GSM8K and Spec-Bench from their public homes, for --benchmarks.

stree fetch                 # all of them
stree fetch mt_bench gsm8k  # these

Alpaca, XSum, CNN/DailyMail, C4, OpenWebText and LongBench are data sets, of which the first rows
become prompts:

stree fetch xsum cnn_dailymail alpaca
stree fetch longbench_single --rows LongBench/data \\
    --lengths 1024 2048 4096 8192 --tokenizer checkpoints/python-docs-hybrid

With --lengths documents are cut, and the files are called longbench_single-1024 and so on.

Files that are there are not fetched again. SOURCES.json, in the same folder, has the source,
licence and hash of each file.
"""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stree.checkpoints.tokenizer import load_tokenizer
from stree.common.errors import BadData, StreeError, UsageError, require_fitting
from stree.common.files import reporting_refusals, sweep_leftovers, write_atomically
from stree_pipelines.console.command_line import PlainParser, input_path
from stree_pipelines.data.text_sources import TEXT_SOURCES, prompts_of
from stree_pipelines.evaluation.benchmarks import DEFAULT_DIRECTORY, parse_prompts
from stree_pipelines.evaluation.sources import HOST, MAX_BYTES, SOURCES, add, is_there

ATTEMPTS = 3
PAUSE_S = 1.0  # before the second attempt, then twice as long
TIMEOUT_S = 30.0
WORTH_ANOTHER_TRY = (408, 425, 429)  # and all from 500 on


class Unreachable(StreeError):
    """Error of a file that cannot be fetched from its source."""

    exit_code = 69


def download(url: str) -> bytes:
    """Download a file. Raises Unreachable, and BadData for a file of absurd size."""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE_S * 2 ** (attempt - 1))
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
                content = answer.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                raise BadData(f"{url} has over {MAX_BYTES:,} bytes: that is no such file")
            wanted = int(answer.headers.get("Content-Length", 0))
            if len(content) == wanted or not wanted:
                return content
            reason = f"it broke off after {len(content):,} of {wanted:,} bytes"
        except urllib.error.HTTPError as error:
            reason = f"{error.code} {error.reason}"
            if error.code < 500 and error.code not in WORTH_ANOTHER_TRY:
                break
        except (OSError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error))
    raise Unreachable(
        f"{url} cannot be fetched ({reason}): connect this machine, or name a --mirror, or fetch "
        "elsewhere and copy the folder here"
    )


def fetch(name: str, directory: Path, host: str = HOST) -> str:
    """Fetch one benchmark into a folder unless it is there, and return a line about it.

    Raises the errors of `download` and `sources.add`; the folder then stays as it was.
    """
    source, path = SOURCES[name], directory / f"{name}.jsonl"
    if is_there(source, directory):
        return f"{path} is there"
    with reporting_refusals(directory, codes=None):
        directory.mkdir(parents=True, exist_ok=True)
    url = f"{host.rstrip('/')}/{source.path}"
    pin = add(source, download(url), url, directory)
    if source.prompts_hash == pin.prompts_hash:
        known = "the prompts of docs/results/h200-sharegpt"
    else:
        known = f"sha256 {pin.sha256}, recorded for later downloads, nothing to compare with"
    return f"{path}: {pin.num_prompts:,} prompts ({source.licence}); {known}"


def make(
    name: str, directory: Path, limit: int, rows: str | None, lengths: tuple[int, ...],
    tokenizer: Any,
) -> Iterator[str]:
    """Write a data set's prompts into a folder, and yield a line about each file.

    Raises the errors of `prompts_of`; the folder then stays as it was.
    """
    source = TEXT_SOURCES[name]
    texts = prompts_of(source, limit, rows, lengths, tokenizer)
    with reporting_refusals(directory, codes=None):
        directory.mkdir(parents=True, exist_ok=True)
    for length, text in texts.items():
        path = directory / (f"{name}.jsonl" if length is None else f"{name}-{length}.jsonl")
        prompts = parse_prompts(text.encode(), f"{name}'s rows")
        write_atomically(path, text)
        cut = "" if length is None else f" of at most {length:,} tokens"
        yield f"{path}: {len(prompts):,} prompts{cut} ({source.licence})"


def main(arguments: list[str] | None = None) -> None:
    parser = PlainParser("stree fetch", description=__doc__)
    add_option = parser.add_argument
    add_option("names", nargs="*", default=list(SOURCES),
        help=f"of {', '.join((*SOURCES, *TEXT_SOURCES))}; default: the first {len(SOURCES)}")
    add_option("--out", default=str(DEFAULT_DIRECTORY), help="folder")
    add_option("--mirror", default=HOST, help="what answers instead of %(default)s")
    add_option("--limit", type=int, default=80, help="prompts of a data set")
    add_option("--rows", help="a data set's rows: file, or folder of files, instead of the hub")
    add_option("--lengths", type=int, nargs="+", default=[],
        help="in tokens, of prompts whose documents are cut")
    add_option("--tokenizer", help="target folder or other whose tokens --lengths are in")
    add_option("--dry_run", action="store_true", help="say what is where, and exit")
    options = parser.parse_args(arguments)
    known = {**SOURCES, **TEXT_SOURCES}
    unknown = [name for name in options.names if name not in known]
    if unknown:
        raise UsageError(f"no benchmark {unknown[0]!r}: there are {', '.join(known)}")
    files = [name for name in options.names if name in SOURCES]
    data_sets = [name for name in options.names if name in TEXT_SOURCES]
    require_fitting(options, {"limit": (options.limit >= 1, "at least 1")}, "--")
    if bool(options.lengths) != bool(options.tokenizer):
        raise UsageError("--lengths are in tokens of --tokenizer: give both, or neither")
    if options.lengths and (files or min(options.lengths) < 1):
        raise UsageError("--lengths are of data sets' prompts, each at least 1 token")
    if options.rows and len(options.names) != 1:
        raise UsageError("--rows are of one data set: name one")
    if options.rows and files:
        raise UsageError(f"--rows are of a data set, wanted one of {', '.join(TEXT_SOURCES)}")
    if not options.mirror.startswith(("http://", "https://")):
        raise UsageError(f"--mirror is {options.mirror!r}, wanted http:// or https://")
    out = Path(options.out)
    if options.dry_run:
        for source in map(SOURCES.__getitem__, files):
            print(f"{source.name} ({source.licence}): {options.mirror}/{source.path}")
        for texts in map(TEXT_SOURCES.__getitem__, data_sets):
            rows = options.rows or ", ".join(texts.sets.values())
            print(f"{texts.name} ({texts.licence}): {rows}")
        return
    sweep_leftovers(out)
    for name in files:
        print(fetch(name, out, options.mirror), flush=True)
    tokenizer = load_tokenizer(input_path(options.tokenizer)) if options.tokenizer else None
    for name in data_sets:
        lengths = tuple(sorted(set(options.lengths)))
        for line in make(name, out, options.limit, options.rows, lengths, tokenizer):
            print(line, flush=True)
