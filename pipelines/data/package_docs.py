"""What packages say of themselves, as prose: docstrings without parameter lists of pages, doctests,
tables and markup, each paragraph once, and nothing of what is held out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

from docstring_parser import ParseError, parse

MAX_PARAMETERS = 5
MAX_PARAMETER_CHARS = 300
MAX_CODE_LINES = 4
MIN_LETTERS = 0.75  # of a paragraph's characters, with what stands in any sentence
RUN_WORDS = 8  # equal runs of so many words are a copy
KEPT_SECTIONS = {"notes", "note", "warnings", "raises", "yields"}
# Others' code under another licence, and copies of the standard library's
VENDORED = re.compile(r"(^|[._/])(vendor(ed)?|extern(al|als)?|backports?|third_party)([._/]|$)")
# Pages of fragments, sources and names
LISTS = re.compile(
    r"^page:(.*/)?_?(modules|sources|whats_?new|changes|changelog|release|history|news|authors"
    r"|contributors|credits|licen[cs]e|genindex|search|404)",
    re.IGNORECASE,
)

ROLE = re.compile(r":[a-zA-Z][\w:+.-]*:`([^`]+)`")
ROLE_TITLE = re.compile(r"^(.*?)\s*<[^>]*>$", re.DOTALL)
LINK = re.compile(r"`([^`<]+?)\s*<[^`>]*>`_{1,2}")
DIRECTIVE = re.compile(
    r"^([ \t]*)\.\. [^\n]*(?:\n\1[ \t]+\S[^\n]*|\n[ \t]*(?=\n\1[ \t]+\S))*", re.MULTILINE
)
SHOWN = re.compile(
    r"^[ \t]*\.\. (?:note|warning|tip|important|hint|caution|attention)::[ \t]*(.*)", re.DOTALL
)
RULE = re.compile(r"^[ \t]*([-=~^*+#\"`])\1{2,}[ \t]*$", re.MULTILINE)
TEX = re.compile(r"\\[a-zA-Z]+|[_^]\{|\$[^$\n]+\$")


def prose(docstring: str) -> str:
    """A docstring in numpydoc's, Google's or Sphinx's style as paragraphs: what it describes, its
    notes, a few of its parameters, and what is returned."""
    text = plain(docstring)
    try:
        parsed = parse(text)
    except ParseError:
        return "\n\n".join(readable(text))
    parts = [parsed.short_description or "", parsed.long_description or ""]
    if not parsed.blank_after_short_description:
        parts = ["\n".join(parts).rstrip()]
    parts += [
        each.description or ""
        for each in parsed.meta
        if each.args and each.args[0] in KEPT_SECTIONS and len(each.args) == 1
    ]
    parameters = [
        f"`{each.arg_name}`: {told}"
        for each in parsed.params
        if (told := _one_line(each.description))
    ]
    parts.append("\n".join(parameters[:MAX_PARAMETERS]))
    if parsed.returns and (told := _one_line(parsed.returns.description)):
        parts.append(f"Returns: {told}")
    return "\n\n".join(readable("\n\n".join(parts)))


def plain(text: str) -> str:
    """Without reStructuredText's roles and directives; what a note says stays."""
    text = DIRECTIVE.sub(_directive, text)
    text = ROLE.sub(lambda found: f"`{_role_title(found[1])}`", text)
    text = LINK.sub(r"\1", text)
    text = re.sub(r"(\[[\w#*]+\]|`\w[^`\n]*`)_{1,2}(?!\w)", r"\1", text)  # footnotes, references
    text = re.sub(r"``(.+?)``", r"`\1`", text, flags=re.DOTALL)
    return re.sub(r"`~\.?(?:\w+\.)*(\w+(?:\(\))?)`", r"`\1`", text)


def _directive(found: re.Match[str]) -> str:
    shown = SHOWN.match(found[0])
    if shown is None:
        return ""
    return found[1] + " ".join(line.strip() for line in shown[1].splitlines()).strip()


def _role_title(text: str) -> str:
    titled = ROLE_TITLE.match(text)
    if titled and titled[1]:
        return titled[1]
    return text.rpartition(".")[2] if text[0] in "~!." else text


def _one_line(description: str | None) -> str:
    """The first paragraph, if it is not too long."""
    first = " ".join((description or "").strip().split("\n\n")[0].split())
    return first if len(first) <= MAX_PARAMETER_CHARS else ""


def readable(text: str) -> list[str]:
    """The paragraphs that a person would read aloud, and short pieces of code."""
    kept = []
    for paragraph in re.split(r"\n[ \t]*\n", RULE.sub("", text)):
        paragraph = re.sub(r"(\S)::[ \t]*$", r"\1:", paragraph.strip("\n").rstrip())
        if paragraph.strip() and _is_readable(paragraph):
            kept.append(paragraph)
    while kept and kept[-1].endswith(":"):  # what it announced is gone
        kept.pop()
    return kept


def _is_readable(paragraph: str) -> bool:
    lines = paragraph.splitlines()
    is_code = all(line.startswith((">>>", "...", "    ")) for line in lines) or ">>>" in paragraph
    if is_code:
        return len(lines) <= MAX_CODE_LINES
    if not paragraph.isascii() and sum(map(str.isascii, paragraph)) < 0.97 * len(paragraph):
        return False
    columns = sum(bool(re.search(r"\S {3,}\S|\|.*\|", line)) for line in lines)
    letters = sum(each.isalpha() or each in " \n`'.,:" for each in paragraph)
    long_word = max(map(len, paragraph.split())) > 80
    return (
        columns * 2 <= len(lines)
        and len(TEX.findall(paragraph)) < 3
        and letters >= MIN_LETTERS * len(paragraph)
        and not long_word
    )


class HeldOut:
    """What must not be in the training text: every run of `RUN_WORDS` words, and shorter texts
    whole."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._runs = {run for text in texts for run in _runs(text)}

    def is_in(self, text: str) -> bool:
        return not self._runs.isdisjoint(_runs(text))


def _runs(text: str) -> Iterable[tuple[str, ...]]:
    words = re.findall(r"[a-z0-9]+", text.lower())
    if len(words) < RUN_WORDS:
        return [tuple(words)]
    return zip(*(words[begin:] for begin in range(RUN_WORDS)), strict=False)


class Paragraphs:
    """Lets each paragraph through once: inherited methods, and packages that copy others, repeat
    theirs. Spaces, punctuation and upper case make no difference."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._seen: set[int] = set()
        for text in texts:
            self.new(text)

    def new(self, text: str) -> str:
        fresh = []
        for paragraph in text.split("\n\n"):
            key = hash(re.sub(r"[\W_]+", "", paragraph.lower()))
            if key not in self._seen:
                self._seen.add(key)
                fresh.append(paragraph)
        while fresh and fresh[-1].endswith(":"):
            fresh.pop()
        return "\n\n".join(fresh)


def version_and_licence(folder: Path) -> tuple[str, str]:
    """What the metadata of the package in `folder` says, of a wheel that was unpacked there or
    beside it; empty where there are none."""
    for found in distributions(path=[str(folder), str(folder.parent)]):
        tops = (found.read_text("top_level.txt") or "").split()
        names = {_canonical(each) for each in [found.metadata["Name"], *tops]}
        if _canonical(folder.name) in names:
            return found.version, _licence(found)
    return "", ""


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def _licence(found: Distribution) -> str:
    told = found.metadata
    if told["License-Expression"]:
        return told["License-Expression"]
    classified = [
        each.rpartition("::")[2].strip()
        for each in told.get_all("Classifier") or []
        if each.startswith("License ::")
    ]
    return "; ".join(classified) or (told["License"] or "").strip().split("\n")[0]
