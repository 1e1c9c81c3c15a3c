from __future__ import annotations

import json

import pytest
from pydantic import ValidationError
from small_rows import result

from stree_pipelines.evaluation.records import Tree, config_hash

METRICS_NAMES = {
    # metrics.md's record, word for word
    "step", "checkpoint", "target", "method", "tree", "verifier", "benchmark", "temperature",
    "num_prompts", "max_new_tokens", "ignore_eos", "seed", "environment",
    "acceptance_length", "acceptance_histogram", "depth_accept_rates", "nodes_per_call",
    "tokens_per_second", "tokens_per_second_e2e", "speedup", "speedup_per_tau", "time_ms",
    "lossless",
}


def test_a_row_has_the_published_names():
    assert set(json.loads(result().model_dump_json())) >= METRICS_NAMES


def test_unknown_fields_are_refused():
    with pytest.raises(ValidationError):
        result(acceptance_len=2.0)


@pytest.mark.parametrize(
    "change",
    [
        {"checkpoint_sha256": "x"}, {"method": "vanilla_sd"}, {"benchmark": "x"}, {"seed": 1},
        {"decoding_hash": "x"}, {"tree": Tree(name="x", parents=(-1,))}, {"prompts_hash": "x"},
    ],
)
def test_what_makes_a_row_another_row(change):
    assert result(**change).key != result().key


def test_config_hash_ignores_key_order():
    assert config_hash({"a": 1, "b": 2}) == config_hash({"b": 2, "a": 1})
    assert config_hash({"a": 1}) != config_hash({"a": 2})


@pytest.mark.parametrize(
    "name", ["b.jsonl", "samples/../b.jsonl", "samples/a/b.jsonl", "/samples/b.jsonl", "samples/b"]
)
def test_samples_are_nowhere_else(name):
    with pytest.raises(ValidationError):
        result(samples=name)
