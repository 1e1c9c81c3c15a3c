"""Hostile and damaged files through the real entries: refused in time, with nothing run.

Each file is met in a forked process of its own, which the kernel stops after 5 s of processor time
or 1 GiB of further memory, and whose audit hook stops it at the first program, foreign code,
connection or write elsewhere (`audited.py` says what that is exactly).
"""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import audited
import hostile_files
import hostile_records  # noqa: F401 (this and the next two add their cases)
import hostile_settings  # noqa: F401
import hostile_weights  # noqa: F401
import pytest
from tiny_run import make_workspace

CPU_S, MEMORY_BYTES = 5, 1 << 30
SCRIPT = Path(hostile_files.__file__).with_name("hostile_loads.py")


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """Make target and prompts.jsonl, to which nothing is wrong."""
    folder = make_workspace(tmp_path_factory.mktemp("good"))
    (folder / "prompts.jsonl").write_text('{"id": "1", "turns": ["What is 3 plus 4?"]}\n')
    return folder


@pytest.fixture
def place(good, tmp_path) -> Path:
    """Make a folder for a case, with the good files in it."""
    shutil.copytree(good / "target", tmp_path / "target")
    shutil.copy(good / "prompts.jsonl", tmp_path)
    return tmp_path


def watched(forks, script: Path, arguments: list[str], folder: Path, **options):
    limits = {"folder": str(folder), "memory_bytes": MEMORY_BYTES, "cpu_s": CPU_S, **options}
    return forks.run(
        script, arguments, folder / "output.txt", before=("audited:install", limits),
        environment={"RUST_BACKTRACE": "0"},
    )


def load(forks, entry: str, path: Path, folder: Path, **options):
    """Return the exit code and the output of meeting a file under watch."""
    command = watched(forks, SCRIPT, [entry, str(path)], folder, **options)
    return command.poll(), command.text()


@pytest.mark.parametrize("case", hostile_files.CASES, ids=lambda case: case.name)
def test_a_hostile_file_is_refused_in_time_with_nothing_run(forks, place, case):
    # Jinja compiles a template to code of its own, which its sandbox restricts.
    allowed = ["<template>", "<unknown>"]
    allowed = allowed if case.entry in ("evaluation", "encoding", "template") else []
    code, output = load(forks, case.entry, case.build(place), place, allowed_code=allowed)
    assert code == case.code, output
    (reason,) = (line for line in output.splitlines() if line.startswith("error: "))
    assert re.search(case.reason, reason), reason
    assert "Traceback" not in output and "forbidden:" not in output, output
    assert not (place / hostile_files.CANARY).exists()


@pytest.mark.parametrize("entry", ["model", "tokenizer", "template"])
def test_the_good_checkpoint_is_not_refused(forks, place, entry):
    """Otherwise the refusals would mean nothing."""
    path = shutil.copytree(place / "target", place / "it")
    code, output = load(forks, entry, path, place, allowed_code=["<template>"])
    assert code == 0, output


def test_there_are_enough_of_them():
    assert len({case.name for case in hostile_files.CASES}) == len(hostile_files.CASES) >= 25


# What is watched for is noticed

MISDEEDS = {
    "unpickling": "import pickle; pickle.loads(pickle.dumps(print))",
    "a program": "import os; os.system('true')",
    "a child": "import subprocess; subprocess.run(['true'])",
    "foreign code": "eval('1 + 1')",
    "a connection": "import socket; socket.create_connection(('127.0.0.1', 9), 1)",
    "a write elsewhere": "open('../elsewhere', 'w')",
    "a removal elsewhere": "import os; os.unlink('../elsewhere')",
}


@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_a_misdeed_ends_the_watched_process(forks, tmp_path, misdeed):
    script = tmp_path / "misdeed.py"
    script.write_text("import os\nos.chdir(os.path.dirname(__file__))\n" + MISDEEDS[misdeed])
    command = watched(forks, script, [], tmp_path, allowed_code=[str(tmp_path)])
    assert command.poll() == audited.FORBIDDEN_CODE, command
    assert "forbidden:" in command.text()


def test_what_takes_too_long_or_too_much_is_stopped(forks, tmp_path):
    cases = (("while True: pass", 1, -signal.SIGKILL), ("bytearray(2 << 30)", 30, 1))
    for text, cpu_s, code in cases:
        script = tmp_path / "endless.py"
        script.write_text(text)
        command = watched(forks, script, [], tmp_path, cpu_s=cpu_s, allowed_code=[str(tmp_path)])
        assert command.poll() == code, command
