"""List every way in which a foreign file gets into the product, by name.

As a script: `hostile_loads.py ENTRY PATH` loads the file, as a command does.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stree.chat_encoding import encode_prompt
from stree.checkpoints.load_save import load_model
from stree.checkpoints.tokenizer import load_tokenizer
from stree.common.errors import exit_with_reason
from stree.speculation_profile import load_profile
from stree.tree_policy.step_times import StepTimes
from stree.trees.token_tree import TokenTree
from stree_pipelines.commands import distill, eval_spec, report
from stree_pipelines.comparison.gate.baseline import Baseline
from stree_pipelines.data.conversations import read_conversations
from stree_pipelines.data.generated import read_answers
from stree_pipelines.evaluation.benchmarks import load_benchmark
from stree_pipelines.evaluation.result_store import ResultStore
from stree_pipelines.training.checkpoints.saving import SafeCheckpointIO, latest_valid


def render(path: Path) -> None:
    encode_prompt(load_tokenizer(path), [("user", "Which tree?")])


def evaluate(path: Path) -> None:
    """Evaluate the checkpoint at `path` as a drafter of the good target in the same folder."""
    eval_spec.main([
        "--target", str(path.parent / "target"), "--checkpoint", str(path),
        "--benchmarks", str(path.parent / "prompts.jsonl"), "--out", str(path.parent / "out"),
        "--methods", "stree", "--temperatures", "0", "--max-new-tokens", "2", "--device", "cpu",
    ])


def train(path: Path) -> None:
    distill.main(["fit", "--config", str(path), "--run_dir", str(path.parent / "run")])


def baseline(path: Path) -> None:
    found = Baseline.at(path)
    if found.results is not None:
        ResultStore(found.results).results()


ENTRIES: dict[str, Callable[[Path], object]] = {
    "model": load_model,
    "tokenizer": load_tokenizer,
    "template": render,
    "encoding": render,  # with a template that came with the package
    "evaluation": evaluate,
    "training state": SafeCheckpointIO().load_checkpoint,
    "resume": latest_valid,
    "profile": load_profile,
    "costs": StepTimes.load,
    "tree": TokenTree.load,
    "evaluation config": lambda path: eval_spec.main(["--config", str(path)]),
    "training config": train,
    "report": lambda path: report.main([str(path)]),
    "baseline": baseline,
    "conversations": lambda path: list(read_conversations(path)[0]),
    "generated data": lambda path: list(read_answers(path, "f", "f")),
    "prompts": lambda path: load_benchmark(str(path)),
}


def main() -> None:
    entry, path = sys.argv[1:]
    code: Any = 70
    try:
        exit_with_reason(lambda: ENTRIES[entry](Path(path)))
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # the interpreter's shutdown takes longer than most loads


if __name__ == "__main__":
    main()
