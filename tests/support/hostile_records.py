"""Register training states, YAML, data, results and baselines that do harm or are damaged."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hostile_files import DATA, case, state_folder, written

from stree.common.files import publish_directory
from stree_pipelines.data.generated import (
    SPEC_NAME,
    TABLE_NAME,
    Answer,
    GenerationSpec,
    shard_path,
    write_table,
)
from stree_pipelines.training.checkpoints.saving import STATE_KEYS

# Training state and profiles


case("state without an optimiser", "training state", r"it lacks optimizer_states",
     lambda at: state_folder(at, {"state_dict": {}, "global_step": 3}))


case("state of Python objects", "training state", r"no training state.*calls",
     lambda at: state_folder(at, dict.fromkeys(STATE_KEYS, Path("x"))))
case("state that is a list", "training state", r"it lacks state_dict",
     lambda at: state_folder(at, []))
case("state of noise", "training state", r"no training state",
     lambda at: state_folder(at, bytes(range(256)) * 40))


case("profile nested 100,000 deep", "profile", r"speculation_profile\.json cannot",
     lambda at: written(at, "drafter/speculation_profile.json", "[" * 100_000).parent)
case("costs nested 100,000 deep", "costs", r"costs\.json holds no costs",
     lambda at: written(at, "costs.json", "[" * 100_000))


@case("costs of a beam of 10^9 nodes", "costs", r"beam-9999-9999-9999 draws")
def _(folder: Path) -> Path:
    times = {"tree": {"name": "beam-9999-9999-9999", "parents": [-1]}, "seconds": {"1": 0.5}}
    head = {"device": "", "dtype": "", "temperature": 0.0, "catch_up_s": 0.0}
    return written(folder, "costs.json", json.dumps({**head, "trees": [times]}))


# YAML


def laughs(depth: int = 30) -> str:
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, depth)]
    return "\n".join(["a0: &a0 [ha]", *levels, f"parents: *a{depth - 1}"])


def merges(depth: int = 12) -> str:
    levels = [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, depth)]
    return "\n".join(["a0: &a0 {x: 1}", *levels])


YAML_TEXTS = {
    "object": ("!!python/object/apply:os.system ['true']", r"python/object/apply"),
    "of 9^29 laughs": (laughs(), r"more than 100,000 values"),
    "of 9^11 merges": (merges(), r"more than 100,000 values"),
    "nested 100,000 deep": ("[" * 100_000, r"nested too deep"),
    "that holds itself": ("parents: &a [*a]", r"nothing that is complete"),
    "with a month of 13": ("parents: 2026-13-13", r"month|parents"),
    "in base 60": ("limit: 1" + ":59" * 100_000, r"more than 20,000 characters"),
}


def yaml_case(entry: str, name: str) -> None:
    text, reason = YAML_TEXTS[name]
    case(f"{entry} {name}", entry, reason, lambda at: written(at, "config.yaml", text))


for _name in YAML_TEXTS:
    yaml_case("tree", _name)
yaml_case("evaluation config", "object")
yaml_case("evaluation config", "of 9^29 laughs")
yaml_case("training config", "of 9^11 merges")
yaml_case("training config", "nested 100,000 deep")
case("tree of a list of lists", "tree", r"whole numbers",
     lambda at: written(at, "tree.yaml", "parents: [-1, [0, [1]]]"))
case("tree of 10^9 nodes", "tree", r"at most 2047", lambda at: Path("chain-999999999"))
case("config with brackets in a text", "training config", r"more than 20,000 characters",
     lambda at: written(at, "config.yaml", "data: {train: '" + "- " * 50_000 + "'}"))


# Data, results, baselines


def gzip_bomb(letter: bytes, num_mib: int) -> bytes:
    return gzip.compress(letter * (1 << 20)) * num_mib


case("gzip bomb of empty lines", "conversations", r"100,000 empty lines in a row",
     lambda at: written(at, "data.jsonl.gz", gzip_bomb(b"\n", 4000)))
case("gzip bomb of one line", "conversations", r"unpacks to over 500 times",
     lambda at: written(at, "data.jsonl.gz", gzip_bomb(b" ", 4000)))
case("gzip cut off", "conversations", r"cannot be read beyond line 99: Compressed",
     lambda at: written(at, "data.jsonl.gz", gzip.compress(b"{}\n" * 99)[:-9]))
case("rows nested 100,000 deep", "conversations", r"no usable conversation.*not JSON",
     lambda at: written(at, "data.jsonl", ('{"conversations": ' + "[" * 100_000 + "\n") * 3))
case("list nested 100,000 deep", "conversations", r"a JSON list, whose row 1 is not JSON",
     lambda at: written(at, "data.jsonl", ("[" * 100_000 + "\n") * 3))
case("parquet of noise", "conversations", r"data\.parquet: cannot be read",
     lambda at: written(at, "data.parquet", b"PAR1" + bytes(range(256)) * 40 + b"PAR1"))


@case("dataset that is damaged", "conversations", r"`datasets` cannot load it")
def _(folder: Path) -> Path:
    written(folder, "saved/dataset_info.json", "[" * 1000)
    return written(folder, "saved/state.json", "3").parent


def generated(folder: Path, content: str | bytes = "", **columns: Any) -> Path:
    """Write a folder as generate_data.py does, of one shard with one answer and a true manifest.

    Args:
        content: bytes replace the table, text replaces generation.json.
        columns: values of the table that replace the good ones.
    """
    values = {
        "model_sha256": "0", "drafter_sha256": None, "tokens_sha256": "f",
        "tokenizer_fingerprint": "f",
        "vocab_size": 320, "prompts_sha256": "0", "num_prompts": 1, "samples": 1,
        "temperatures": (1.0,), "top_k": 0, "top_p": 1.0, "max_new_tokens": 4, "tree": "root",
        "seed": 0, "dtype": "float32", "shard_samples": 1,
        "verifier": "coupled",
    }
    spec, data = GenerationSpec(**values), folder / "data"
    with publish_directory(
        shard_path(data, spec, 0), {"generation": spec.sha256, "shard": 0}
    ) as shard:
        answer = Answer("0", 0, 0, 1.0, 0, [5], [7], "length", 1)
        write_table(shard / TABLE_NAME, [replace(answer, **columns)])
        if isinstance(content, bytes):
            (shard / TABLE_NAME).write_bytes(content)
    described = json.dumps(spec.to_dict())
    written(data, SPEC_NAME, content if content and isinstance(content, str) else described)
    return data


case("generated data nested 100,000 deep", "generated data", r"generation\.json cannot be",
     lambda at: generated(at, "[" * 100_000))
case("generated data of noise", "generated data", r"shard-00000-of-00001 cannot be read",
     lambda at: generated(at, b"PAR1" + bytes(range(256)) * 40 + b"PAR1"))
case("generated data of ids that are none", "generated data", r"outside of a vocabulary",
     lambda at: generated(at, answer_tokens=[7, -1]))
case("generated data without a token", "generated data", r"a token is missing",
     lambda at: generated(at, answer_tokens=[7, None]))
case("prompts nested 100,000 deep", "prompts", r"prompts\.jsonl:1: it is nested too deep",
     lambda at: written(at, "own/prompts.jsonl", "[" * 100_000))
case("prompts of half a letter", "prompts", "unicode",
     lambda at: written(at, "own/prompts.jsonl", '{"id": "1", "turns": ["\\ud800"]}'))


def result_case(name: str, reason: str, **changes: Any) -> None:
    case(f"result {name}", "report", reason,
         lambda at: written(at, "run/eval/results.jsonl", hostile_row(**changes)).parents[1])


def hostile_row(**changes: Any) -> str:
    from hand_made_run import make_row, make_sample

    answers = [make_sample("autoregressive", None, "sums", i, 0.0, 60) for i in range(2)]
    row = json.loads(make_row("autoregressive", None, "sums", answers, 0.0).model_dump_json())
    return json.dumps({**row, **changes}) + "\n"


result_case("of a negative length", r"acceptance_length", acceptance_length=-1e308)
result_case("of NaN", r"tokens_per_second", tokens_per_second=float("nan"))
result_case("of an endless speed", r"speedup", speedup=float("inf"))
result_case("at depth 10^18", r"acceptance_histogram", acceptance_histogram={str(10**18): 1})
result_case("with samples above", r"samples", samples="../../../../etc/passwd")
result_case("of a count with 400 digits", r"num_prompts", num_prompts=10**400)


def with_results(folder: Path, name: str, content: str | bytes) -> Path:
    """Write a run of one row, and a further file of it."""
    run = written(folder, "run/eval/results.jsonl", hostile_row()).parents[1]
    written(run, name, content)
    return run


case("samples that are a gzip bomb", "report", r"unpacks to over 100 times its size",
     lambda at: with_results(at, f"eval/{json.loads(hostile_row())['samples']}",
                             gzip_bomb(b"\n", 1000)))
case("metrics of 200,000 letters", "report", r"metrics\.csv is no table",
     lambda at: with_results(at, "metrics.csv", "step,loss\n1," + "9" * 200_000 + "\n"))
case("baseline of no name", "baseline", r"wanted a folder or a symlink",
     lambda at: written(at, "baseline", b"runs\0elsewhere"))


@case("baseline in a circle", "baseline", r"leads to no folder")
def _(folder: Path) -> Path:
    (folder / "baseline").symlink_to(folder / "other")
    (folder / "other").symlink_to(folder / "baseline")
    return folder / "baseline"


case("baseline with another's rows", "baseline", r"is no ResultRow",
     lambda at: written(at, "rows/results.jsonl", '{"accuracy": 1}\n').parent, code=DATA)
