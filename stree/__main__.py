"""`stree COMMAND …` and `python -m stree COMMAND …`: the commands of pipelines/ under one name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NamedTuple

from stree import __version__
from stree.common.errors import UsageError, exit_with_reason


class Entry(NamedTuple):
    """A command: its module and package, its line of the help, and its first argument."""

    module: str
    summary: str
    subcommand: str = ""
    package: str = "stree_pipelines.commands"


LAB = "stree_lab"  # in a clone only

COMMANDS = {
    "chat": Entry("chat", "chat with a target, and see what its drafter saves"),
    "serve": Entry("serve", "serve a target and its drafter behind OpenAI's API"),
    "doctor": Entry("doctor", "say what works on this machine, and what to do about the rest"),
    "corpus": Entry("corpus", "unpack the embedded corpus, Python's documentation"),
    "tokenizer": Entry("tokenizer_training", "train a tokenizer", package="stree_pipelines.data"),
    "train": Entry("train_target", "train a target", "fit"),
    "distil": Entry("distill", "distil a drafter from a target", "fit"),
    "mask": Entry(
        "loss_mask", "print conversations with their loss mask", package="stree_pipelines.data"
    ),
    "answers": Entry("generate_data", "let a target answer prompts, for data of its own"),
    "fetch": Entry("fetch_benchmarks", "fetch public benchmarks"),
    "ask": Entry("ask_conversations", "write prompts from conversations held out of training"),
    "eval": Entry("eval_spec", "measure τ, speed and losslessness of drafter checkpoints"),
    "profile": Entry("profile_drafter", "write a drafter's measured profile and model card"),
    "tree": Entry("suggest_tree", "suggest a tree from what a run measured"),
    "report": Entry("report", "write the tables, figures and page of a run, or of several"),
    "compare": Entry("compare", "compare drafters, trees and verifiers on one target"),
    "project": Entry(
        "project_speed", "work out what drafts are worth at another target's times", package=LAB
    ),
    "study": Entry(
        "study", "train drafters that differ in one thing each, and compare them", package=LAB
    ),
    "papers": Entry(
        "paper_tables", "print the papers' tables with our numbers beside theirs", package=LAB
    ),
    "gate": Entry("benchmark_checkpoint", "fail where a checkpoint is worse than its baseline"),
}
_WIDTH = max(map(len, COMMANDS))
HELP = "\n".join(
    [
        "usage: stree COMMAND …",
        "",
        "Speculative tree decoding for state-space and hybrid language models.",
        "",
        *(f"  {name:<{_WIDTH}}  {entry.summary}" for name, entry in COMMANDS.items()),
        "",
        "stree COMMAND --help has a command's options; stree --version its version.",
    ]
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. Raises its errors, and `UsageError` for an unknown name."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(HELP)
        return
    if name in ("-V", "--version"):
        print(f"stree {__version__}")
        return
    if name not in COMMANDS:
        close = get_close_matches(name, COMMANDS, 1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise UsageError(f"there is no command {name!r}{meant}; see stree --help")
    entry = COMMANDS[name]
    if entry.subcommand and rest[:1] != [entry.subcommand]:
        rest = [entry.subcommand, *rest]
    try:
        module = importlib.import_module(f"{entry.package}.{entry.module}")
    except ModuleNotFoundError as error:
        if error.name != LAB:
            raise
        raise UsageError(
            f"stree {name} needs a clone of the repository, got an installed package: in the "
            "clone type make install, then .venv/bin/stree"
        ) from error
    module.main(rest)


def run() -> None:
    """Run the console script."""
    exit_with_reason(main)


if __name__ == "__main__":
    run()
