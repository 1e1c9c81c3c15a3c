"""Decoding needs the base of pyproject.toml alone, and each command says which extra it needs."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import bare_environment
import pytest
from packaging.requirements import Requirement

from stree.common.errors import EXTRA_OF, UsageError

ROOT = bare_environment.ROOT
OURS = {"stree", "stree_kernels", "stree_pipelines", "stree_lab"}
# Each is looked for before it is imported, or imported by a package that needs it
OPTIONAL = {"triton", "mamba_ssm", "fla"}
DECODE = """
import stree
decoder = stree.load("checkpoints/python-docs-hybrid", "checkpoints/python-docs-hybrid")
print(len(decoder.chat("What is a list?", max_new_tokens=3).tokens))
"""


def named(requirements: list[str]) -> set[str]:
    return {Requirement(text).name.replace("-", "_") for text in requirements}


BASE = named(bare_environment.PROJECT["dependencies"]) - {"pyyaml"} | {"yaml", "pydantic_core"}


def imported(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each top-level module that files of a folder import, with the file."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            yield from ((name.partition(".")[0], str(path)) for name in names)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return bare_environment.make_environment(tmp_path_factory.mktemp("environment") / "base")


@pytest.mark.costly
def test_the_base_decodes(base):
    ran = bare_environment.python_in(base, "-c", DECODE)
    assert (ran.stdout, ran.returncode) == ("3\n", 0), ran.stderr


@pytest.mark.costly
@pytest.mark.parametrize(
    ("command", "extra"), [("distil", "train"), ("train", "train"), ("report", "report")]
)
def test_a_command_without_its_extra_says_which(base, command, extra):
    ran = bare_environment.python_in(base, "-m", "stree", command, "--help")
    assert ran.returncode == UsageError.exit_code
    assert ran.stderr.startswith(f"error: stree {command} needs stree[{extra}], ")
    assert len(ran.stderr.splitlines()) == 1


@pytest.mark.costly
def test_a_script_without_its_extra_says_which(base):
    ran = bare_environment.python_in(base, "pipelines/distill.py", "--help")
    assert ran.stderr.startswith("error: distill.py needs stree[train], lightning is not installed")


@pytest.mark.costly
def test_a_chat_needs_the_base_alone(base):
    assert bare_environment.python_in(base, "-m", "stree", "chat", "--help").returncode == 0


def test_what_decoding_imports_is_in_the_base():
    known = BASE | OURS | OPTIONAL | sys.stdlib_module_names
    for folder in ("stree", "kernels"):
        assert not [pair for pair in imported(ROOT / folder) if pair[0] not in known]


def test_what_commands_import_is_in_an_extra():
    known = BASE | OURS | OPTIONAL | sys.stdlib_module_names | set(EXTRA_OF)
    assert not [pair for pair in imported(ROOT / "pipelines") if pair[0] not in known]


@pytest.mark.parametrize("folder", ["stree", "kernels", "laws"])
def test_tests_of_the_core_do_without_the_lab(folder):
    assert not [pair for pair in imported(ROOT / "tests" / folder) if pair[0] == "stree_lab"]


def test_extras_have_the_libraries_that_messages_name():
    extras = bare_environment.PROJECT["optional-dependencies"]
    for library, extra in EXTRA_OF.items():
        brought = {"opentelemetry"} if "fastapi" in named(extras[extra]) else set()
        assert library in named(extras[extra]) | brought
