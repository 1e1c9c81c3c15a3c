"""Find the commands that documents and the Makefile tell people to type, and parse them."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from stree_pipelines.console.command_line import OneLineErrors

STARTS = ("python", "accelerate", "torchrun", "sbatch", "make", "hf", "pip")
# What a job script runs, and what it puts before its own arguments.
JOB_SCRIPTS = {
    "slurm/distill.sh": ("pipelines/distill.py", ["fit"]),
    "slurm/eval_spec.sh": ("pipelines/eval_spec.py", []),
    "slurm/benchmark_checkpoint.sh": ("pipelines/benchmark_checkpoint.py", []),
}
SCRIPT = re.compile(r"(pipelines(/stree_lab)?|slurm)/\w+\.(py|sh)")


@dataclass(frozen=True)
class Command:
    """Holds a command as typed, and the script of this project with arguments that it runs, if
    any."""

    words: tuple[str, ...]
    script: str | None
    arguments: tuple[str, ...]

    @classmethod
    def of(cls, line: str) -> Command:
        words = shlex.split(line, comments=True)
        while "=" in words[0]:
            words.pop(0)  # a variable of the environment
        scripts = [word for word in words if SCRIPT.fullmatch(word)]
        if not scripts:
            return cls(tuple(words), None, ())
        before = []
        script, arguments = scripts[0], words[words.index(scripts[0]) + 1 :]
        if script in JOB_SCRIPTS:
            script, before = JOB_SCRIPTS[script]
        return cls(tuple(words), script, (*before, *arguments))

    def __str__(self) -> str:
        return shlex.join(self.words)

    @property
    def main(self) -> Callable[[Sequence[str]], None]:
        assert self.script is not None
        script = Path(self.script)
        package = "stree_lab" if script.parent.name == "stree_lab" else "stree_pipelines.commands"
        return importlib.import_module(f"{package}.{script.stem}").main


def commands_in(document: Path) -> list[Command]:
    """List the commands in a Markdown file's code blocks, in their order."""
    return [Command.of(line) for line in _typed_lines(document.read_text(encoding="utf-8"))]


def _typed_lines(text: str) -> Iterator[str]:
    """Yield the commands in code blocks (four spaces), continued lines joined."""
    for line in text.replace("\\\n", " ").splitlines():
        typed = re.sub(r"^    (?:\w+=\$\((.*)\)|(.*))$", r"\1\2", line)
        first = next((word for word in typed.split() if "=" not in word), "")
        if line.startswith("    ") and not typed.startswith(" ") and first in STARTS:
            yield typed


class Parsed(Exception):
    """Signals that a command's arguments were understood, before anything is done."""


def require_parse(command: Command) -> None:
    """Let the command's own parser read its arguments, config files included, and stop there."""
    depth = 0

    original = OneLineErrors.parse_args

    def parse_args(self, *arguments, **options):
        nonlocal depth
        depth += 1
        try:
            result = original(self, *arguments, **options)
        finally:
            depth -= 1
        if depth == 0:
            raise Parsed
        return result

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Parsed):
        patch.setattr(OneLineErrors, "parse_args", parse_args)
        command.main(list(command.arguments))
