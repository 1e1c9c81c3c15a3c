"""Find the commands that texts tell people to type, and parse them as the shell would."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import stree.__main__
from stree_pipelines.console.command_line import OneLineErrors

STARTS = ("python", "accelerate", "torchrun", "sbatch", "make", "hf", "pip", "stree", "cd")
# What a job script runs, and what it puts before its own arguments.
JOB_SCRIPTS = {
    "slurm/distill.sh": ("pipelines/distill.py", ["fit"]),
    "slurm/eval_spec.sh": ("pipelines/eval_spec.py", []),
    "slurm/benchmark_checkpoint.sh": ("pipelines/benchmark_checkpoint.py", []),
}
SCRIPT = re.compile(
    r"(pipelines(/stree_lab(/benches|/studies)?|/stree_pipelines/data)?|slurm)/\w+\.(py|sh)"
)
CHANGE = re.compile(r"cd (\S+)(?:;| &&) (.*)", re.DOTALL)  # a command in another folder
ENTRY = "stree"  # the console script, in the place of a script's path
# A command in prose, between backticks or alone on a line or after a colon
WRITTEN = re.compile(
    r"(?:^|`|: +)((?:[A-Z_0-9]+=\S+ )*(?:python (?:-m stree|\.{0,2}[\w./]*pipelines/)"
    r"|accelerate launch |torchrun |sbatch |stree [a-z]+ |cd \S+; python )[^`\n]*)",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Command:
    """Holds a command as typed, and the script of this project with arguments that it runs, if
    any."""

    words: tuple[str, ...]
    script: str | None
    arguments: tuple[str, ...]

    @classmethod
    def of(cls, line: str) -> Command:
        if (change := CHANGE.match(line)) is not None:
            typed = cls.of(change[2].replace("../" * (change[1].count("/") + 1), ""))
            return cls(("cd", change[1], *typed.words), typed.script, typed.arguments)
        words = shlex.split(line, comments=True)
        while "=" in words[0]:
            words.pop(0)  # a variable of the environment
        script, arguments = run_by(words)
        before = []
        if script in JOB_SCRIPTS:
            script, before = JOB_SCRIPTS[script]
        return cls(tuple(words), script, (*before, *arguments))

    def __str__(self) -> str:
        return shlex.join(self.words)

    @property
    def main(self) -> Callable[[Sequence[str]], None]:
        assert self.script is not None
        if self.script == ENTRY:
            return stree.__main__.main
        script = Path(self.script)
        package = {
            "stree_lab": "stree_lab", "benches": "stree_lab.benches",
            "studies": "stree_lab.studies", "data": "stree_pipelines.data",
        }.get(script.parent.name, "stree_pipelines.commands")
        return importlib.import_module(f"{package}.{script.stem}").main


def script_of(entry: stree.__main__.Entry) -> str:
    """Return the path of the file that runs a command of `stree` in a clone."""
    path = f"{entry.package}.{entry.module}".replace(".", "/")
    return f"pipelines/{path.removeprefix('stree_pipelines/commands/')}.py"


def run_by(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the script of this project that a command runs, and its arguments.

    A launcher's own parser tells its options from the script's.
    """
    first, *rest = words
    if first == "accelerate":
        from accelerate.commands.launch import launch_command_parser

        options = launch_command_parser().parse_args(rest[1:])
        return launched(options, options.module)
    if first == "torchrun":
        from torch.distributed.run import get_args_parser

        options = get_args_parser().parse_args(rest)
        return launched(options, options.module)
    if first == ENTRY or words[:3] == ["python", "-m", ENTRY]:
        return ENTRY, list(rest if first == ENTRY else words[3:])
    script = next((word for word in words if SCRIPT.fullmatch(word)), None)
    return script, [] if script is None else list(words[words.index(script) + 1 :])


def launched(options, module: bool) -> tuple[str, list[str]]:
    """Return the script or module that a launcher starts; it starts no console script."""
    script = options.training_script
    assert bool(module) == (script == ENTRY), f"a launcher runs {script} as a file, or `-m stree`"
    return script, list(options.training_script_args)


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


def lines_written_in(file: Path) -> list[str]:
    """List the command lines in a file's prose, code blocks, comments and strings."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        nodes = [*ast.walk(ast.parse(text))]
        formatted = [node for node in nodes if isinstance(node, ast.JoinedStr)]
        parts = {id(part) for node in formatted for part in node.values}
        texts = [
            node.value for node in nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            and id(node) not in parts
        ]
    elif file.suffix == ".md":
        texts = [re.sub(r"`[^`]*`", lambda code: re.sub(r"\n *", " ", code[0]), text)]
    else:
        comments = [line[1:] for line in text.splitlines() if line.startswith("#")]
        texts = ["\n".join(comments)]
    found = []
    for each in texts:
        lines = [line.strip() for line in re.sub(r" *\\\n *", " ", each).splitlines()]
        found += [match[1] for match in WRITTEN.finditer("\n".join(lines))]
    return found


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
