"""Files, headings, commands and options that texts name exist.

Texts are the Markdown files, and the docstrings of our code and of its tests. Names of files that a
command writes are not looked up; a file that is gone may be named with the commit that had it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from stree.__main__ import COMMANDS

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = r"py|sh|ya?ml|md|ipynb|toml|svg|cff|css"
PATH = re.compile(
    rf"(?<![\w/.*<{{}}$-])(?:\.\./)*([\w.-]+(?:/[\w.-]+)*\.(?:{SOURCES})|[\w.-]+(?:/[\w.-]+)*/)"
    r"(?![\w/*{<-])"
)
CODE = re.compile(r"`([^`\n%]+)`|(?<![\w/.-])((?:stree|kernels|pipelines|tests|docs)/[\w./-]+)")
DOCSTRING = re.compile(r'^ *"""([^"].*?)"""', re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
# An option of ours; those of the trainer are Lightning's
OPTION = re.compile(r"`[^`\n]*?(?<![\w-])--(?!trainer\.)([a-z]\w*(?:\.\w+)*)")
# Names of a reader's files and of a run's
OWN = ("mine", "RUN/", "tree.yaml", "trees/", "samples/", "build/", "gate/")


@cache
def tracked() -> tuple[str, ...]:
    """List the files of the repository."""
    told = subprocess.run(
        ["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return tuple(told.stdout.splitlines())


@cache
def ends_of_paths() -> set[str]:
    """Return each file's and folder's path, and every end of it, which is a name of it."""
    ends = set()
    for path in tracked():
        parts = path.split("/")
        for start in range(len(parts)):
            for end in range(start + 1, len(parts) + 1):
                ends.add("/".join(parts[start:end]))
    return ends


def texts_of(path: Path) -> Iterator[str]:
    """Yield a Markdown file's paragraphs and items, or a module's docstrings."""
    text = path.read_text(encoding="utf-8")
    parts = re.split(r"\n\n|\n- ", text) if path.suffix == ".md" else DOCSTRING.findall(text)
    for part in parts:
        if not re.search(r"\b[Cc]ommit\b", part):  # what is gone may be named with a commit
            yield part


def missing_files(text: str) -> list[str]:
    """List the files of ours that a text names and that do not exist."""
    named = {name for found in CODE.findall(text) for name in PATH.findall(found[0] or found[1])}
    named = {name for name in named if not name.startswith(OWN)}
    return sorted(name for name in named if name.rstrip("/") not in ends_of_paths())


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a Markdown file's headings, as GitHub and the site make them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings]
    return {re.sub(r"[\s]", "-", heading) for heading in words}


def broken_links(page: Path) -> list[str]:
    """List a Markdown file's links to files and headings that do not exist."""
    broken = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        linked = (page.parent / name).resolve() if name else page
        if not linked.exists() or (anchor and anchor not in anchors_of(linked)):
            broken.append(link)
    return broken


@cache
def pages() -> tuple[str, ...]:
    return tuple(name for name in tracked() if name.endswith(".md"))


@cache
def words_of_code() -> set[str]:
    """Return the words of our modules, of which the options' names are made."""
    modules = (name for name in tracked() if name.endswith((".py", ".yaml", ".sh", "Makefile")))
    texts = ((REPOSITORY / name).read_text("utf-8") for name in modules if "tests/" not in name)
    return {word for text in texts for word in re.findall(r"\w+", text)}


def test_files_that_texts_name_exist():
    missing = {
        name: found for name in tracked() if name.endswith((".md", ".py"))
        if (found := [each for text in texts_of(REPOSITORY / name) for each in missing_files(text)])
    }
    assert missing == {}


def test_links_lead_to_files_and_headings():
    broken = {name: found for name in pages() if (found := broken_links(REPOSITORY / name))}
    assert broken == {}


def test_commands_and_options_that_pages_name_exist():
    targets = re.findall(r"^([a-z-]+):.*##", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    for name in pages():
        text = "\n\n".join(texts_of(REPOSITORY / name))
        for command in re.findall(r"`stree ([a-z]+)", text):
            assert command in COMMANDS, (name, command)
        for target in re.findall(r"(?:`|^    )make ([a-z-]+)", text, re.MULTILINE):
            assert target in targets, (name, target)
        for option in OPTION.findall(text):
            assert option.split(".")[-1] in words_of_code(), (name, option)


def test_a_file_that_is_gone_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "See `stree/gone.py`, `ops.py`\nand `naive/gone/`.\n\nkernels/gone.py has it.\n\n"
        "- `stree/past.py` is gone;\n  commit 3cb09f5 has it.\n- `away.sh` is one."
    )
    found = [name for text in texts_of(page) for name in missing_files(text)]
    assert found == ["naive/gone/", "stree/gone.py", "kernels/gone.py", "away.sh"]


def test_a_heading_that_is_gone_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page's `name`\n\n[a](#a-pages-name) [b](#gone) [c](gone.md)\n")
    assert broken_links(page) == ["#gone", "gone.md"]
