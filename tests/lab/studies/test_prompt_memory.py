"""The memory of reading a prompt, by plain decoding and by each arm of a comparison."""

from __future__ import annotations

import json

import pytest
import yaml
from tiny_evaluation import export, make_world

from stree.common.errors import CannotWrite
from stree.decoder import Decoder
from stree_lab.studies import prompt_memory
from stree_lab.studies.prompt_memory import read_alone
from stree_pipelines.evaluation.arms import comparison_of
from stree_pipelines.evaluation.benchmarks import Benchmark, load_benchmark


@pytest.mark.costly
def test_each_arm_reads_the_longest_prompt_of_each_benchmark(tmp_path):
    """Each row is of a process of its own, which counts no bytes on a CPU."""
    root = make_world(tmp_path)
    turns = ["short", "A longer question than the other, which has more tokens."]
    lines = [json.dumps({"id": str(at), "turns": [turn]}) for at, turn in enumerate(turns)]
    (root / "long.jsonl").write_text("\n".join(lines))
    config, out = tmp_path / "compare.yaml", tmp_path / "memory.jsonl"
    arm = {"name": "model", "drafter": str(export(root, 10)), "tree": "chain-tuned"}
    config.write_text(yaml.safe_dump({
        "target": str(root / "target"), "out": str(tmp_path / "o"), "arms": [arm],
        "benchmarks": [str(root / "talk.jsonl"), str(root / "long.jsonl")],
    }))
    prompt_memory.main([str(config), str(out), "--device", "cpu"])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["benchmark"], row["method"]) for row in rows] == [
        (name, method) for name in ("talk", "long") for method in ("autoregressive", "model")
    ]
    assert rows[2]["num_tokens"] == rows[3]["num_tokens"] > len(turns[1].split())
    assert rows[0]["drafter"] is None and rows[1]["drafter"] == arm["drafter"]
    assert not any("peak_bytes" in row for row in rows)
    with pytest.raises(CannotWrite, match="is a folder"):
        prompt_memory.main([str(config), str(tmp_path), "--device", "cpu"])


def test_a_prompt_is_read_up_to_its_first_new_token(tmp_path, monkeypatch):
    root, asked = make_world(tmp_path), []
    arms = [
        {"name": "chain", "drafter": "ngram:3", "tree": "chain-3", "verifier": "block"},
        {"name": "chosen", "drafter": "ngram:3", "tree": "chain-2 or chain-4"},
    ]
    settings, arms = comparison_of({
        "target": str(root / "target"), "out": "o", "benchmarks": ["b"], "device": "cpu",
        "arms": arms,
    }, "here", {})
    (prompt,) = load_benchmark(str(root / "talk.jsonl"), limit=1).prompts

    def generate(decoder, tokens, generation):
        asked.append((decoder.batch.tree_policy.name, len(tokens), generation.max_new_tokens))

    monkeypatch.setattr(Decoder, "generate", generate)
    for each in (None, *arms):
        assert read_alone(settings, Benchmark("talk", (prompt,)), each) is None
    (_, *plain), *drafted = asked
    assert drafted == [("chain-3", *plain), ("chain-2 or chain-4", *plain)]
    assert plain[0] > 1 and plain[1] == 1
