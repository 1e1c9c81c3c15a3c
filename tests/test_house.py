"""Rules of the house that ruff does not know; `make check` runs them.

A docstring begins with a verb, or for a record with its noun; imports of our modules have no
circle, also counting lazy ones and those for types; a folder has at most a dozen modules; nothing
outside the lab imports it.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "stree", "kernels/stree_kernels", "pipelines/stree_pipelines", "pipelines/stree_lab"
)
COMMANDS = ROOT / "pipelines/stree_pipelines/commands"  # one module for each command
LAB = "stree_lab"
MAX_MODULES = 12
FORBIDDEN = re.compile(
    r"(What|Whether|Which|Of|Those|As|By|Who|Whose|How|Where|That|The same|Such|So|Nobody|Whoever"
    r"|None where|Beside|Behind)\b"
)


@cache
def modules() -> dict[str, tuple[Path, ast.Module]]:
    """Return the path and the tree of each of our modules, by the name it is imported by."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to((ROOT / folder).parent).with_suffix("").parts
            name = ".".join(parts).removesuffix(".__init__")
            found[name] = path, ast.parse(path.read_text(encoding="utf-8"))
    return found


def forbidden_beginnings(tree: ast.Module) -> list[str]:
    """Return the docstrings of a module that begin with a forbidden word."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    return [text.splitlines()[0] for text in texts if FORBIDDEN.match(text)]


def names_in(tree: ast.Module) -> Iterator[str]:
    """Yield the full names that a module imports anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_of(tree: ast.Module, known: set[str]) -> Iterator[str]:
    """Yield the known modules that a module imports."""
    for name in names_in(tree):
        while name and name not in known:
            name = name.rpartition(".")[0]
        if name:
            yield name


def is_of_lab(name: str) -> bool:
    """Return whether a name is the lab's, or in it."""
    return f"{name}.".startswith(f"{LAB}.")


def circle_in(edges: dict[str, set[str]]) -> list[str]:
    """Return the modules that lie on circles, or lead only to such; [] for none."""
    left = {name: set(others) & edges.keys() for name, others in edges.items()}
    while done := {name for name, others in left.items() if not others}:
        left = {name: others - done for name, others in left.items() if name not in done}
    return sorted(left)


@cache
def edges() -> dict[str, set[str]]:
    """Return the modules that each of our modules imports; a package may import its own."""
    known = set(modules())
    found = {}
    for name, (path, tree) in modules().items():
        own = f"{name}." if path.name == "__init__.py" else "\0"
        others = set(imports_of(tree, known)) - {name}
        found[name] = {each for each in others if not each.startswith(own)}
    return found


def crowded(paths: list[Path]) -> list[Path]:
    """Return the folders with more than a dozen modules, packages' own not counted."""
    counts = Counter(path.parent for path in paths if path.name != "__init__.py")
    return [path for path, count in counts.items() if count > MAX_MODULES and path != COMMANDS]


@pytest.mark.parametrize("folder", FOLDERS)
def test_first_sentences_have_a_verb_or_a_noun(folder):
    found = {
        f"{path.relative_to(ROOT)}: {text}"
        for path, tree in modules().values() if path.is_relative_to(ROOT / folder)
        for text in forbidden_beginnings(tree)
    }
    assert not found


def test_imports_have_no_circle():
    assert circle_in(edges()) == []


def test_folders_have_at_most_a_dozen_modules():
    assert crowded([path for path, _ in modules().values()]) == []


def test_nothing_outside_the_lab_imports_it():
    found = {
        name: others for name, (_, tree) in modules().items()
        if not is_of_lab(name) and (others := [*filter(is_of_lab, names_in(tree))])
    }
    assert found == {}


def test_each_rule_finds_its_breach():
    words = ("What is read.", "Which rows.", "None where there is none.", "Whether it fits.")
    source = "".join(f'def f{at}():\n    """{text}"""\n' for at, text in enumerate(words))
    assert forbidden_beginnings(ast.parse(source)) == list(words)
    assert forbidden_beginnings(ast.parse('"""Off-policy rows."""')) == []
    inner = ast.parse("def f():\n    from stree_lab.benches import b\n    import a.b\n")
    assert list(imports_of(inner, {"stree_lab", "a"})) == ["stree_lab", "a"]
    assert [*map(is_of_lab, names_in(inner))] == [True, False]
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()}) == ["a", "b", "c"]
    assert crowded([ROOT / "stree" / f"{at}.py" for at in range(13)]) == [ROOT / "stree"]
