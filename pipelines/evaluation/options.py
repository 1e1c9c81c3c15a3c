"""Add the options that eval_spec.py, the gate and compare.py share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from stree.tree_policy.names import TREE_POLICIES
from stree.verifiers import VERIFIERS
from stree_pipelines.console.command_line import CommandParser, PlainParser
from stree_pipelines.evaluation.benchmarks import DEFAULT_BENCHMARKS, PROMPT_FORMAT
from stree_pipelines.evaluation.plan import METHODS, EvaluationSettings

# By name: the type, of each value where it takes several, and the help
OPTIONS: dict[str, tuple[Any, str]] = {
    "benchmarks": (
        str, f"names in --benchmark_dir, or JSONL files of one's own: {PROMPT_FORMAT}"
    ),
    "benchmark_dir": (str, "where names are looked up (default: data/benchmarks)"),
    "methods": (str, ", ".join(METHODS)),
    "temperatures": (float, "0 is greedy"),
    "top_k": (int, "sample from the k best tokens only, by every method; 0: all"),
    "top_p": (float, "sample from the best tokens that have this probability together; 1: all"),
    "min_p": (
        float, "sample from tokens with at least this share of the best one's probability; 0: all"
    ),
    "repetition_penalty": (
        float, "of tokens that prompt or answer has, greedy or not, by every method; 1: none"
    ),
    "tree": (str, f"of stree: {TREE_POLICIES}"),
    "verifier": (str, ", ".join(VERIFIERS)),
    "backtracking": (
        str, "replay what the last call has kept of the accepted path, or joint: feed it again"
    ),
    "num_chain_drafts": (
        int, "drafts a call of vanilla_sd (the paper's N = 5 counts the root)"
    ),
    "max_new_tokens": (int, "a turn"),
    "limit": (int, "only the first so many prompts of each benchmark"),
    "chat_template": (str, "name or .jinja file (default: the tokenizer's own)"),
    "dtype": (str, "of the weights: float32 or bfloat16"),
    "device": (str, "auto, cpu, cuda or cuda:N"),
    "seed": (int, "of sampling, together with prompt and turn, and of the gate's intervals"),
    "batch_size": (
        int, "prompts that a process decodes at once; rows of other sizes are another table's"
    ),
    "ignore_eos": (bool, "go on to max_new_tokens (for speed runs; recorded)"),
    "beyond_positions": (bool, "let prompts be longer than what the target was made for"),
    "overwrite": (bool, "measure again what exists"),
    "dry_run": (bool, "say what it would take, and exit"),
}
SEVERAL = ("benchmarks", "methods", "temperatures")
DRAFTING = ("methods", "tree", "verifier", "backtracking", "num_chain_drafts")
DEFAULTS: dict[str, Any] = {
    each.name: each.default for each in fields(EvaluationSettings) if each.default is not MISSING
} | {"benchmarks": DEFAULT_BENCHMARKS, "dry_run": False}


def add_options(
    parser: CommandParser | PlainParser, defaults: Mapping[str, Any], names: Iterable[str] = OPTIONS
) -> None:
    """Add the options of these names; one without a default is None unless it is given."""
    for name in names:
        kind, text = OPTIONS[name]
        spelt = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        default = defaults.get(name)
        if kind is bool:
            parser.add_argument(*spelt, action="store_true", default=default, help=text)
            continue
        if default is None and isinstance(parser, CommandParser):
            kind = kind | None  # a YAML file may say null
        if name not in SEVERAL:
            parser.add_argument(*spelt, type=kind, default=default, help=text)
            continue
        default = None if default is None else list(default)
        parser.add_argument(*spelt, type=kind, nargs="+", default=default, help=text)
