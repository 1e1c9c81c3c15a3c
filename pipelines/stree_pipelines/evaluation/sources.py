"""List public benchmarks: their addresses and licences, and how their files become prompts.

Files are named at a commit. Damage is still found, by hashes: of the prompts, where this project
has measured on them before, and of the bytes, which the first download records (`Pin`) for all
later ones.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from stree.common.errors import BadData
from stree.common.files import write_atomically
from stree.common.plain_data import parse_json, read_json
from stree.speculation_profile import Record
from stree_pipelines.evaluation.benchmarks import Benchmark, load_benchmark, parse_prompts

HOST = "https://raw.githubusercontent.com"
PINS_NAME = "SOURCES.json"  # in the benchmarks' folder
MAX_BYTES = 1 << 26  # packed or unpacked; the largest has about one megabyte


@dataclass(frozen=True)
class Source:
    """Public file of a benchmark.

    Attributes:
        path: repository, commit and file, after `HOST`.
        prompts_hash: `Benchmark.prompts_hash` of all its prompts in docs/results/h200-sharegpt;
            None when this project never measured on it.
        prompt_of: makes a prompt from a row and its number.
    """

    name: str
    path: str
    licence: str
    prompts_hash: str | None
    prompt_of: Callable[[Any, int], dict[str, Any]]

    def prompts(self, content: bytes) -> str:
        """Convert the file to this project's JSONL. Raises BadData when it holds something else."""
        try:
            lines = enumerate(_unpacked(content).splitlines())
            prompts = [self.prompt_of(parse_json(line), n) for n, line in lines if line.strip()]
        except (ValueError, TypeError, KeyError, OSError, EOFError, zlib.error) as error:
            raise BadData(f"{self.path} has another format than expected: {error!r}") from error
        return "".join(json.dumps(each) + "\n" for each in prompts)


class Pin(Record):
    """Record of a downloaded file; `url` is its source."""

    url: str
    licence: str
    sha256: str
    num_bytes: int
    num_prompts: int
    prompts_hash: str


def _question(name: str) -> Callable[[Any, int], dict[str, Any]]:
    """Return the reader of a row in FastChat's layout."""
    return lambda row, _: {
        "id": f"{name}-{row['question_id']}", "category": row["category"], "turns": row["turns"],
    }


SOURCES = {
    source.name: source
    for source in (
        Source(
            "mt_bench",
            "lm-sys/FastChat/587d5cfa1609a43d192cedb8441cac3c17db105d/fastchat/llm_judge/data/"
            "mt_bench/question.jsonl",
            "Apache-2.0",
            "a46cd5bdd10a04c735775eca6a37e39fd14f9c101e7dcf5a05b0c02d88a8ca2b",
            _question("mt_bench"),
        ),
        Source(
            "humaneval",
            "openai/human-eval/6d43fb980f9fee3c892a914eda09951f772ad10d/data/HumanEval.jsonl.gz",
            "MIT",
            "a212d3f8d81f827ae54ae82610d37a11ae392c94bafc4ab78a26662970276df2",
            lambda row, _: {"id": row["task_id"], "category": "code", "turns": [row["prompt"]]},
        ),
        Source(
            "gsm8k",
            "openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/"
            "data/test.jsonl",
            "MIT",
            "5953a18fea354973693be75dc34f9c345926d46120397bf8170ae79d2f606ed7",
            lambda row, number: {
                "id": f"gsm8k-test-{number}", "category": "math", "turns": [row["question"]],
            },
        ),
        Source(
            "spec_bench",
            "hemingkx/Spec-Bench/fd2c1cd7d2201ef71db4c5f4e455008f017967bf/data/spec_bench/"
            "question.jsonl",
            "Apache-2.0 for the collection; its parts (MT-Bench, WMT14, CNN/Daily Mail, Natural "
            "Questions, GSM8K, DPR) keep their own",
            None,
            _question("spec_bench"),
        ),
    )
}


def read_pins(directory: Path) -> dict[str, Pin]:
    """Read the record of a folder's downloads. Raises BadData when it is damaged."""
    path = directory / PINS_NAME
    if not path.exists():
        return {}
    try:
        return TypeAdapter(dict[str, Pin]).validate_python(read_json(path))
    except (OSError, ValueError, ValidationError) as error:
        raise BadData(f"{path} cannot be read: {error}; move it away and fetch again") from error


def is_there(source: Source, directory: Path) -> bool:
    """Return True when a folder has the benchmark as it was downloaded."""
    pin, path = read_pins(directory).get(source.name), directory / f"{source.name}.jsonl"
    try:
        return pin is not None and load_benchmark(str(path)).prompts_hash == pin.prompts_hash
    except ValueError:  # no such file, or damaged
        return False


def add(source: Source, content: bytes, url: str, directory: Path) -> Pin:
    """Check a downloaded file, write NAME.jsonl into the folder, and record it.

    Raises BadData when the file differs from the recorded one, or its prompts from those that this
    project knows.
    """
    pins = read_pins(directory)
    pin, sha256 = pins.get(source.name), hashlib.sha256(content).hexdigest()
    if pin is not None and pin.sha256 != sha256:
        raise BadData(
            f"{url} has sha256 {sha256}, the first download had {pin.sha256}; nothing was changed "
            f"here: look at it, and delete the entry {source.name} of {directory / PINS_NAME} to "
            "take it"
        )
    prompts = source.prompts(content)
    benchmark = Benchmark(source.name, tuple(parse_prompts(prompts.encode(), url)))
    if source.prompts_hash not in (None, benchmark.prompts_hash):
        raise BadData(
            f"{url} has prompts of hash {benchmark.prompts_hash}, the published results were "
            f"measured on {source.prompts_hash}; nothing was changed here: to evaluate on others, "
            f"put them into {directory} by hand, as {source.name}.jsonl, or give the path of their "
            "file to --benchmarks"
        )
    pins[source.name] = Pin(
        url=url, licence=source.licence, sha256=sha256, num_bytes=len(content),
        num_prompts=len(benchmark.prompts), prompts_hash=benchmark.prompts_hash,
    )
    write_atomically(directory / f"{source.name}.jsonl", prompts)
    text = json.dumps({name: each.model_dump() for name, each in pins.items()}, indent=2)
    write_atomically(directory / PINS_NAME, text + "\n")
    return pins[source.name]


def _unpacked(content: bytes) -> bytes:
    if not content.startswith(b"\x1f\x8b"):
        return content
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        unpacked = file.read(MAX_BYTES + 1)
    if len(unpacked) > MAX_BYTES:
        raise ValueError(f"it unpacks to over {MAX_BYTES:,} bytes")
    return unpacked
