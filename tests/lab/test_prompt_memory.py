"""The memory of reading a prompt, of plain decoding and of each arm of a comparison."""

from __future__ import annotations

import json

import pytest
import yaml
from tiny_evaluation import export, make_world

from stree.common.errors import CannotWrite
from stree_lab import prompt_memory


def test_each_arm_reads_the_longest_prompt_of_each_benchmark(tmp_path, monkeypatch):
    """A stand-in for CUDA's counter says how often each pair was loaded and read."""
    root, read = make_world(tmp_path), []
    turns = ["short", "A longer question than the other, which has more tokens."]
    lines = [json.dumps({"id": str(at), "turns": [turn]}) for at, turn in enumerate(turns)]
    (root / "long.jsonl").write_text("\n".join(lines))
    arms = [
        {"name": "model", "drafter": str(export(root, 10)), "tree": "chain-tuned"},
        {"name": "text", "drafter": "ngram:3", "tree": "chain-3", "verifier": "block"},
    ]
    config, out = tmp_path / "compare.yaml", tmp_path / "memory.jsonl"
    config.write_text(yaml.safe_dump({
        "target": str(root / "target"), "out": str(tmp_path / "o"), "arms": arms,
        "benchmarks": [str(root / "talk.jsonl"), str(root / "long.jsonl")],
    }))

    def counted(name, run, device, held):
        run()
        read.append((name, device.type, held))
        return {name: len(read)}

    monkeypatch.setattr(prompt_memory, "peak_field", counted)
    prompt_memory.main([str(config), str(out), "--device", "cpu"])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    methods = ["autoregressive", "model", "text"]
    assert [(row["benchmark"], row["method"]) for row in rows] == [
        (name, method) for name in ("talk", "long") for method in methods
    ]
    assert read == [("peak_bytes", "cpu", 0)] * 6
    assert [row["peak_bytes"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[3]["num_tokens"] > len(turns[1].split()) > len(turns[0].split())
    assert rows[0]["drafter"] is None and rows[2]["drafter"] == "ngram:3"
    with pytest.raises(CannotWrite, match="is a folder"):
        prompt_memory.main([str(config), str(tmp_path), "--device", "cpu"])
