"""Fetch MT-Bench, HumanEval, GSM8K and Spec-Bench from their public homes, for --benchmarks.

python pipelines/fetch_benchmarks.py                   # all, into data/benchmarks
python pipelines/fetch_benchmarks.py mt_bench gsm8k    # these

Files that are there are not fetched again. SOURCES.json, in the same folder, has the source,
licence and hash of each file.
"""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from pathlib import Path

from stree.common.errors import BadData, StreeError, UsageError
from stree.common.files import reporting_refusals, sweep_leftovers
from stree_pipelines.console.command_line import PlainParser
from stree_pipelines.evaluation.benchmarks import DEFAULT_DIRECTORY
from stree_pipelines.evaluation.sources import HOST, MOST_BYTES, SOURCES, add, is_there

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
                content = answer.read(MOST_BYTES + 1)
            if len(content) > MOST_BYTES:
                raise BadData(f"{url} has over {MOST_BYTES:,} bytes: that is no such file")
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


def main(arguments: list[str] | None = None) -> None:
    parser = PlainParser("fetch_benchmarks.py", description=__doc__)
    add_option = parser.add_argument
    add_option("names", nargs="*", default=list(SOURCES), help=f"of {', '.join(SOURCES)}")
    add_option("--out", default=str(DEFAULT_DIRECTORY), help="folder")
    add_option("--mirror", default=HOST, help="what answers instead of %(default)s")
    add_option("--dry_run", "--dry-run", action="store_true", help="say what is where, and exit")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in SOURCES]
    if unknown:
        raise UsageError(f"no benchmark {unknown[0]!r}: there are {', '.join(SOURCES)}")
    if not options.mirror.startswith(("http://", "https://")):
        raise UsageError(f"--mirror is {options.mirror!r}, wanted http:// or https://")
    out = Path(options.out)
    if options.dry_run:
        for source in map(SOURCES.__getitem__, options.names):
            print(f"{source.name} ({source.licence}): {options.mirror}/{source.path}")
        return
    sweep_leftovers(out)
    for name in options.names:
        print(fetch(name, out, options.mirror), flush=True)
