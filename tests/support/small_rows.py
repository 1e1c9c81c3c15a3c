"""Make one valid row of an evaluation's results and of its samples, with any field changed."""

from __future__ import annotations

from typing import Any

from stree_pipelines.evaluation.records import (
    Environment,
    Lossless,
    ResultRow,
    SampleRow,
    Tree,
    Turn,
)

# Settings of rows that sample from the whole distribution
UNFILTERED = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
# What a row of fixed trees says beside its figures, of prompts that were decoded alone
ALONE = {
    "batch_size": 1, "backtracking": None, "chat_template_sha256": None, "template_date": None,
    "measuring_costs_s": None, "costs": None, "num_stalled": None, "num_ended": None,
    "num_cut": None,
}


def sample(prompt_id: str = "a", **changes: Any) -> SampleRow:
    """Make a sample of `result`'s row, with `changes` to its fields."""
    values: dict[str, Any] = {
        "checkpoint_sha256": "c0ffee", "step": 10, "method": "stree", "tree": "paper",
        "benchmark": "b", "prompt_id": prompt_id, "category": "", "temperature": 0.0, "seed": 0,
        "decoding_hash": "d", "num_new_tokens": 3, "num_calls": 2, "num_nodes": 26,
        "accepted_per_call": (1, 0), "depth_per_call": (1, 1), "prefill_s": 0.1, "decode_s": 0.2,
        "time_ms": {"draft": 1.0},
        "turns": (Turn(
            user="?", num_prompt_tokens=3, tokens=(1, 2, 3), text="ünï", finish_reason="eos",
        ),),
    }
    return SampleRow(**{**UNFILTERED, **values, **changes})


def result(**changes: Any) -> ResultRow:
    """Make a row of results.jsonl, with `changes` to its fields."""
    values: dict[str, Any] = {
        "step": 10, "checkpoint": "drafter", "checkpoint_sha256": "c0ffee", "target": "target",
        "target_sha256": "7a", "method": "stree", "tree": Tree(name="paper", parents=(-1, 0, 0)),
        "verifier": "greedy", "benchmark": "b", "prompts_hash": "p", "temperature": 0.0,
        "num_prompts": 1, "max_new_tokens": 3, "ignore_eos": False, "seed": 0,
        "decoding_hash": "d", "acceptance_length": 1.5, "acceptance_length_prompt_mean": 1.5,
        "acceptance_histogram": {0: 1, 1: 1}, "depth_accept_rates": {1: 0.5},
        "nodes_per_call": 13.0, "tokens_per_second": 15.0, "tokens_per_second_e2e": 10.0,
        "end_nodes": {}, "open_ends": {}, "tree_shares": {}, "rows_per_call": None,
        "speedup": None, "speedup_prompt_median": None, "speedup_per_tau": None,
        "time_ms": {"draft": 1.0}, "baseline_time_ms": {},
        "lossless": Lossless(share=1.0, num_prompts=1, num_identical=1),
        "confidence_intervals": {"acceptance_length": (1.0, 2.0), "tokens_per_second": None},
        "environment": Environment(
            git_sha=None, device="CPU", dtypes={}, versions={}, command_line="x",
            num_processes=1, num_threads=1,
        ),
        "samples": "samples/b.jsonl",
    }
    return ResultRow(**{**UNFILTERED, **ALONE, **values, **changes})
