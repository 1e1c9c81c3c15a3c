"""The embedded corpus: the running Python's own documentation as conversations, without a network.

Docstrings of the standard library's modules, classes and functions (parsed, never imported) and the
language reference's prose that pydoc carries become questions and answers, some of several turns.
Every module and every topic is in one of three files only: `train.jsonl`, `valid.jsonl` (ShareGPT
rows) and `prompts.jsonl` (benchmark rows: id, category, turns, reference). With --html the HTML
documentation (python3-doc in Debian) becomes `manual.jsonl`, of training modules only: four times
as much text, to train a target on. With --packages the docstrings, and HTML pages, of other
packages become `packages.jsonl`, of which nothing is in `valid.jsonl` or `prompts.jsonl`.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import inspect
import io
import json
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from stree.common.errors import BadData, exit_with_reason
from stree.common.files import make_directory, write_atomically
from stree_pipelines.console.command_line import PlainParser, input_path
from stree_pipelines.data.html_docs import passages
from stree_pipelines.data.package_docs import (
    LISTS,
    VENDORED,
    HeldOut,
    Paragraphs,
    plain,
    prose,
    readable,
    version_and_licence,
)

# Tests, bundled tools and generated tables; `this` and `antigravity` are jokes, not documentation.
SKIPPED_FOLDERS = {
    "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "ensurepip", "encodings",
    "pydoc_data", "site-packages", "dist-packages", "lib-dynload", "__pycache__", "_bundled",
}  # fmt: skip
SKIPPED_MODULES = {"this", "antigravity", "__hello__", "__phello__"}
MIN_ANSWER_CHARS = 24
MAX_ANSWER_CHARS = 1600  # longer texts go on in further turns
MAX_TURNS = 4  # question-answer pairs in a conversation
PROMPTS_PER_UNIT = 4
PROMPTS_SHARE, VALID_UNTIL = 0.09, 0.14  # of the units

QUESTIONS = {
    "module": [
        "What is the Python module `{name}` for?",
        "Describe the `{name}` module of the standard library.",
        "I came across `import {name}`. What does this module do?",
        "Give me an overview of the module `{name}`.",
        "When would I use Python's `{name}` module?",
        "Explain what `{name}` offers.",
    ],
    "class": [
        "What is the class `{leaf}` in `{module}`?",
        "Explain the class `{name}`.",
        "What does `{name}` represent, and how is it used?",
        "I want to use `{leaf}` from `{module}`. What should I know?",
        "Describe `{module}`'s class `{leaf}`.",
        "Tell me about the `{leaf}` class.",
    ],
    "function": [
        "What does `{name}` do?",
        "How do I use the function `{leaf}` from `{module}`?",
        "Explain `{name}` and its arguments.",
        "What is `{leaf}` in the module `{module}` good for?",
        "Describe the function `{name}`.",
        "What happens when I call `{name}`?",
    ],
    "method": [
        "What does the method `{leaf}` of `{owner}` do?",
        "How do I use `{name}`?",
        "Explain `{leaf}` on `{owner}` objects.",
        "What happens when `{owner}.{leaf}` is called?",
        "Describe the method `{name}`.",
    ],
    "topic": [
        "Explain {name} in Python.",
        "What does the Python language reference say about {name}?",
        "What are the rules for {name} in Python?",
        "Teach me about {name}.",
        "Give me the details of {name} in Python.",
    ],
}
PACKAGE_QUESTIONS = {
    "module": [
        "What is the module `{name}` for?",
        "Describe the module `{name}` of {package}.",
        "I came across `import {name}`. What does this module do?",
        "When would I use `{name}` of {package}?",
        "Explain what `{name}` offers.",
    ],
    "topic": [
        "Explain {name} in {package}.",
        "What does the documentation of {package} say about {name}?",
        "I read about {name} in {package}. What should I know?",
        "Teach me about {name} in {package}.",
        "Tell me about {name}. I use {package}.",
    ],
}
FOLLOW_UPS = {
    "class": ["And the class `{leaf}`?", "What about `{leaf}`?", "Tell me about `{leaf}` as well."],
    "function": ["And `{leaf}`?", "What about the function `{leaf}`?", "What does `{leaf}` do?"],
    "method": ["And `{name}`?", "What does `{leaf}` of `{owner}` do?", "How about `{name}`?"],
    "topic": ["What about {name}?", "And {name}?", "Now explain {name}."],
}
LEGAL = re.compile(r"\b[Cc]opyright\b.*\d{4}|\(c\) \d{4}|WARRANT|IN NO EVENT|\"AS IS\"")
CONTINUE = ["Please go on.", "Go on.", "What else is there to know?", "Continue.", "And then?"]


@dataclass(frozen=True)
class Entry:
    """One documented thing. `unit` is the module or topic that decides which file it is in."""

    unit: str
    kind: str  # a key of QUESTIONS
    name: str
    text: str
    signature: str = ""
    package: str = ""  # whose it is; empty: the standard library's

    @property
    def source(self) -> str:
        return f"{self.package}-docs" if self.package else "python-docs"

    @property
    def label(self) -> str:
        """Unlike the name unique: topics share section titles."""
        prefix = self.unit.removeprefix("topic:") + "/" if self.kind == "topic" else ""
        return prefix + self.name

    def ask(self, follow_up: bool) -> str:
        first = QUESTIONS | (PACKAGE_QUESTIONS if self.package else {})
        phrasings = FOLLOW_UPS[self.kind] if follow_up else first[self.kind]
        owner, _, leaf = self.name.rpartition(".")
        module = owner if self.unit.startswith("page:") else self.unit
        return phrasings[_hash("ask", self.unit, self.name) % len(phrasings)].format(
            name=self.name, leaf=leaf, owner=owner, module=module, package=self.package
        )

    def turns(self, follow_up: bool = False) -> list[tuple[str, str]]:
        """(question, answer) pairs; a long text goes on after a "go on" of the user."""
        head = f"`{self.signature}`\n\n" if self.signature else ""
        first, *rest = split_text(head + self.text, MAX_ANSWER_CHARS)
        pairs = [(self.ask(follow_up), first)]
        for number, part in enumerate(rest, start=1):
            question = CONTINUE[_hash("go on", self.name, str(number)) % len(CONTINUE)]
            if number % MAX_TURNS == 0:  # a conversation begins here, so name what is meant
                question = f"Tell me more about `{self.name}`, from part {number + 1} on."
            pairs.append((question, part))
        return pairs


def build_corpus(out_dir: str | Path) -> dict[str, int]:
    """Write the three files into `out_dir` and return how many rows each has, with the number of
    `docstrings`, `topics` and `chars` (of answers). The same Python always writes the same bytes.

    Raises `BadData` when this Python's library has no sources to read, `CannotWrite` when the
    folder refuses.
    """
    out = Path(out_dir)
    make_directory(out)
    docstrings = list(docstring_entries(Path(sysconfig.get_path("stdlib"))))
    topics = list(topic_entries())
    entries = _without_repeats([*docstrings, *topics])
    if not docstrings:
        raise BadData(
            f"{sysconfig.get_path('stdlib')}: no Python sources of the standard library here; "
            "use a Python that installs them, or pass your own ShareGPT file"
        )
    rows: dict[str, list[dict]] = {"train": [], "valid": [], "prompts": []}
    by_unit: dict[str, list[Entry]] = {}
    for entry in entries:
        by_unit.setdefault(entry.unit, []).append(entry)
    for unit, members in by_unit.items():
        split = split_of(unit)
        rows[split] += prompts_of(members) if split == "prompts" else conversations_of(members)
    for split, found in rows.items():
        found.sort(key=lambda row: _hash("order", row["id"]))
        _write_rows(out / f"{split}.jsonl", found)
    return {split: len(found) for split, found in rows.items()} | {
        "docstrings": len(docstrings),
        "topics": len(topics),
        "chars": sum(len(entry.text) for entry in entries),
    }


def _write_rows(file: Path, rows: list[dict]) -> None:
    write_atomically(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def build_manual(html: str | Path, out_dir: str | Path) -> int:
    """Write `manual.jsonl` from a folder of Python's HTML documentation; returns how many rows.

    Raises `BadData` when the folder holds none, `CannotWrite`.
    """
    by_unit: dict[str, list[Entry]] = {}
    for unit, passage in passages(html):
        text = _clean(passage.text)
        if split_of(unit) == "train" and len(text) >= MIN_ANSWER_CHARS:
            by_unit.setdefault(unit, []).append(Entry(unit, passage.kind, passage.name, text))
    rows = [row for entries in by_unit.values() for row in conversations_of(entries)]
    if not rows:
        raise BadData(
            f"{html}: no pages of Python's HTML documentation, wanted a folder such as "
            "/usr/share/doc/python3.11/html"
        )
    make_directory(Path(out_dir))
    _write_rows(Path(out_dir) / "manual.jsonl", rows)
    return len(rows)


def build_packages(
    folders: list[str | Path], out_dir: str | Path, html: str | Path | None = None
) -> list[dict[str, str | int]]:
    """Write `packages.jsonl` from the Python sources and HTML pages in folders named as their
    packages are, and `packages.csv`, which says of each what it gave and under which licence.

    What the other files hold is left out, also where a package has a copy of it; of `html`,
    Python's HTML documentation, what `manual.jsonl` holds and what it leaves out.

    Returns the rows of `packages.csv`: package, version, licence, conversations, characters.
    Raises `BadData` when a folder has nothing to read, `CannotWrite`.
    """
    own = [*docstring_entries(Path(sysconfig.get_path("stdlib"))), *topic_entries()]
    texts = [(entry.unit, entry.text) for entry in own]
    texts += [(unit, _clean(found.text)) for unit, found in passages(html)] if html else []
    held_out = HeldOut(text for unit, text in texts if split_of(unit) != "train")
    fresh = Paragraphs(text for unit, text in texts if split_of(unit) == "train")
    rows: list[dict] = []
    table: list[dict[str, str | int]] = []
    labels: set[tuple[str, str]] = set()  # an object's page in the manual repeats its docstring
    for folder in map(Path, folders):
        by_unit: dict[str, list[Entry]] = {}
        for entry in package_entries(folder):
            label = (entry.source, entry.label)
            text = "" if label in labels or held_out.is_in(entry.text) else fresh.new(entry.text)
            if len(text) >= MIN_ANSWER_CHARS:
                labels.add(label)
                by_unit.setdefault(entry.unit, []).append(replace(entry, text=text))
        found = [row for entries in by_unit.values() for row in conversations_of(entries)]
        if not found:
            raise BadData(
                f"{folder}: no docstrings or HTML pages with prose, wanted the folder of a package "
                "such as .venv/lib/python3.11/site-packages/numpy"
            )
        rows += found
        version, licence = version_and_licence(folder)
        table.append({
            "package": folder.name,
            "version": version,
            "licence": licence,
            "conversations": len(found),
            "characters": sum(len(entry.text) for each in by_unit.values() for entry in each),
        })  # fmt: skip
    rows.sort(key=lambda row: _hash("order", row["id"]))
    out = Path(out_dir)
    make_directory(out)
    _write_rows(out / "packages.jsonl", rows)
    written = io.StringIO()
    writer = csv.DictWriter(written, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    write_atomically(out / "packages.csv", written.getvalue())
    return table


def package_entries(folder: Path) -> Iterator[Entry]:
    """Docstrings and sections of HTML pages as prose, less what a package vendors."""
    is_package = (folder / "__init__.py").exists()
    for entry in docstring_entries(folder, folder.parent if is_package else folder):
        text = prose(entry.text)
        if len(text) >= MIN_ANSWER_CHARS and not VENDORED.search(entry.unit):
            yield replace(entry, text=text, package=folder.name)
    for unit, found in passages(folder):
        if VENDORED.search(unit) or LISTS.match(unit):
            continue
        text = "\n\n".join(readable(plain(_clean(found.text))))
        if len(text) >= MIN_ANSWER_CHARS and found.name:
            yield Entry(unit, found.kind, found.name, text, package=folder.name)


def docstring_entries(root: Path, base: Path | None = None) -> Iterator[Entry]:
    """Docstrings under a folder of Python sources, in a fixed order. Nothing is imported; modules
    are named from `base` on, by default from `root`."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(base or root).with_suffix("").parts
        if any(part in SKIPPED_FOLDERS or part.startswith("config-") for part in parts):
            continue
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if not module or module.split(".")[0] in SKIPPED_MODULES:
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # a template or a fixture, not a module
            continue
        yield from _documented(tree, module, module, "module")


def _documented(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
    module: str,
    name: str,
    kind: str,
) -> Iterator[Entry]:
    text = _clean(ast.get_docstring(node) or "")
    if len(text) >= MIN_ANSWER_CHARS:
        yield Entry(module, kind, name, text, _signature(node))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            yield from _documented(child, module, f"{name}.{child.name}", "class")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            child_kind = "method" if isinstance(node, ast.ClassDef) else "function"
            yield from _documented(child, module, f"{name}.{child.name}", child_kind)


def _signature(node: ast.AST) -> str:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return ""
    start = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    signature = f"{start}{node.name}({ast.unparse(node.args)})"
    return signature if len(signature) <= 120 and "`" not in signature else ""


def topic_entries() -> Iterator[Entry]:
    """Sections of the language reference in pydoc; each topic is a unit."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions split it off; the docstrings are the larger part
        return
    for topic, text in sorted(topics.items()):
        for title, body in topic_sections(text):
            body = _clean(body)
            if len(body) >= MIN_ANSWER_CHARS:
                name = title or topic.lower()
                yield Entry(f"topic:{topic}", "topic", name, body)


def topic_sections(text: str) -> list[tuple[str, str]]:
    """(title, body) of each section of a topic; titles are lines underlined with punctuation."""
    heading = re.compile(r"^(\S[^\n]*)\n(\*{3,}|={3,}|-{3,}|~{3,}|\"{3,})\n", re.MULTILINE)
    marks = list(heading.finditer(text))
    sections = [("", text[: marks[0].start()] if marks else text)]
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        stop = following.start() if following else len(text)
        sections.append((mark[1].strip().replace('"', "`"), text[mark.end() : stop]))
    return [(title, body) for title, body in sections if body.strip()]


def split_of(unit: str) -> str:
    """Which file a unit is in: a function of its name alone, so that a module which a shipped model
    was trained on is a training module in every other version of Python too."""
    place = _hash("split", unit) / 2**64
    return "prompts" if place < PROMPTS_SHARE else "valid" if place < VALID_UNTIL else "train"


def conversations_of(entries: list[Entry]) -> list[dict]:
    """ShareGPT rows of one unit. Neighbours (a module and its functions, a class and its methods)
    often share a conversation; which do is decided by hash."""
    rows: list[dict] = []
    pairs: list[tuple[str, str]] = []
    names: list[str] = []

    def close() -> None:
        for begin in range(0, len(pairs), MAX_TURNS):
            part = pairs[begin : begin + MAX_TURNS]
            row_id = names[0] if begin == 0 else f"{names[0]}/{begin // MAX_TURNS + 1}"
            turns = [t for q, a in part for t in (("human", q), ("gpt", a))]
            rows.append({
                "id": f"{entries[0].source}-{row_id}",
                "source": f"{entries[0].source}/{entries[0].unit}",
                "conversations": [{"from": role, "value": text} for role, text in turns],
            })  # fmt: skip
        pairs.clear()
        names.clear()

    for entry in entries:
        follow_up = entry.turns(follow_up=True) if entry.kind in FOLLOW_UPS else []
        joins = (
            bool(pairs and follow_up)
            and len(pairs) + len(follow_up) <= MAX_TURNS
            and _hash("join", entry.unit, entry.name) % 2 == 0
        )
        if not joins and pairs:
            close()
        names.append(entry.label)
        pairs.extend(follow_up if joins else entry.turns())
    close()
    return rows


def prompts_of(entries: list[Entry]) -> list[dict]:
    """Benchmark rows of one unit: a few entries chosen by hash, half of them followed by a question
    about a second one."""
    rows = []
    chosen = sorted(entries, key=lambda entry: _hash("prompt", entry.unit, entry.name))
    for entry, other in zip(chosen[:PROMPTS_PER_UNIT], [*chosen[1:], chosen[0]], strict=False):
        pairs = entry.turns()[:1]
        if (
            other is not entry
            and other.kind in FOLLOW_UPS
            and _hash("second", entry.unit, entry.name) % 2 == 0
        ):
            pairs += other.turns(follow_up=True)[:1]
        rows.append({
            "id": f"python-docs-{entry.label}",
            "category": entry.kind,
            "turns": [question for question, _ in pairs],
            "reference": [answer for _, answer in pairs],
        })  # fmt: skip
    return rows


def split_text(text: str, max_chars: int) -> list[str]:
    """`text` in parts of at most `max_chars`, cut at a blank line, a line, or anywhere."""
    parts = []
    while len(text) > max_chars:
        at = text.rfind("\n\n", 1, max_chars)
        if at <= max_chars // 4:
            at = text.rfind("\n", 1, max_chars)
        if at <= max_chars // 4:
            at = max_chars
        parts.append(text[:at].rstrip())
        text = text[at:].strip("\n")
    return [part for part in [*parts, text] if part.strip()]


def _clean(text: str) -> str:
    """Without the indentation, trailing spaces, and paragraphs of licence text."""
    text = "\n".join(line.rstrip() for line in inspect.cleandoc(text).splitlines())
    paragraphs = re.split(r"\n{2,}", text.strip("\n"))
    return "\n\n".join(part for part in paragraphs if not LEGAL.search(part)).strip()


def _without_repeats(entries: list[Entry]) -> list[Entry]:
    """Each text once (`_pydecimal` repeats `decimal`), so that no split meets another's, and each
    name once in its unit (overloads, properties with setters)."""
    texts: set[str] = set()
    names: set[tuple[str, str]] = set()
    kept = []
    for entry in entries:
        name = (entry.unit, entry.name)
        if entry.text not in texts and name not in names:
            kept.append(entry)
        texts.add(entry.text)
        names.add(name)
    return kept


def _hash(*parts: str) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:8], "big")


def main(arguments: list[str] | None = None) -> None:
    parser = PlainParser(
        "corpus.py", description="Build the embedded corpus from Python's own docs."
    )
    parser.add_argument("out", help="folder for train.jsonl, valid.jsonl and prompts.jsonl")
    parser.add_argument("--html", help="folder of Python's HTML documentation, for manual.jsonl")
    parser.add_argument(
        "--packages",
        nargs="+",
        default=[],
        metavar="FOLDER",
        help="folders of other packages' sources or HTML pages, for packages.jsonl and a table of "
        "their licences, packages.csv: look at it before you pass the text on",
    )
    options = parser.parse_args(arguments)
    if options.html is not None:
        count = build_manual(input_path(options.html), options.out)
        print(f"{options.html} -> {options.out}/manual.jsonl: {count:,} conversations")
    if options.packages:
        folders: list[str | Path] = [input_path(each) for each in options.packages]
        html = None if options.html is None else input_path(options.html)
        table = build_packages(folders, options.out, html)
        print(
            f"{len(table)} packages -> {options.out}/packages.jsonl: "
            f"{sum(int(row['conversations']) for row in table):,} conversations"
        )
    made = build_corpus(options.out)
    print(
        f"{made['docstrings']:,} docstrings and {made['topics']:,} topic sections "
        f"({made['chars']:,} characters without repeats) -> {options.out}: "
        f"train {made['train']:,}, valid {made['valid']:,} conversations, "
        f"{made['prompts']:,} prompts"
    )


if __name__ == "__main__":
    exit_with_reason(main)
