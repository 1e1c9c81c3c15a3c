"""Python's HTML documentation (`python3-doc` in Debian, or python.org's download) as text: what
each section, class and function of a page says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

# Generated lists, histories, and what is about other languages
SKIPPED_PAGES = re.compile(r"^(genindex|py-modindex|search|contents|copyright|license|bugs|about"
                           r"|whatsnew/changelog|c-api/|_|distutils/)")  # fmt: skip
SKIPPED_PARTS = {"headerlink", "sphinxsidebar", "related", "footer", "toctree-wrapper", "contents",
                 "versionadded", "versionchanged", "deprecated", "mobile-nav", "topic"}  # fmt: skip
VOID = {"br", "img", "hr", "input", "meta", "link", "col", "source", "wbr"}
KINDS = {"function": "function", "class": "class", "exception": "class", "method": "method",
         "attribute": "method", "data": "function"}  # fmt: skip


@dataclass
class Passage:
    """kind, of what `corpus.QUESTIONS` asks; name, an object's or a section's."""

    kind: str
    name: str
    paragraphs: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n\n".join(self.paragraphs)


def passages(folder: str | Path) -> Iterator[tuple[str, Passage]]:
    """Each with its unit, in a fixed order: the module that a page documents, or else the page."""
    folder = Path(folder)
    for path in sorted(folder.rglob("*.html")):
        page = path.relative_to(folder).as_posix()
        if SKIPPED_PAGES.match(page):
            continue
        reader = _Page()
        reader.feed(path.read_text(encoding="utf-8", errors="replace"))
        unit = reader.module or f"page:{page.removesuffix('.html')}"
        yield from ((unit, each) for each in reader.passages if each.paragraphs)


class _Page(HTMLParser):
    """What stands in an object's description is that object's, all else its section's."""

    def __init__(self) -> None:
        super().__init__()
        self.module = ""
        self.passages: list[Passage] = []
        self._open: list[tuple[str, bool]] = []  # tags, and whether what they hold is left out
        self._objects: list[tuple[int, str]] = []  # descriptions: how deep, and of what kind
        self._within: list[tuple[int, Passage]] = []
        self._text: list[str] | None = None
        self._name = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in VOID:
            return
        given = {name: value or "" for name, value in attributes}
        classes = set(given.get("class", "").split())
        left_out = bool(self._open and self._open[-1][1]) or bool(classes & SKIPPED_PARTS)
        left_out = left_out or tag in {"script", "style", "nav", "table", "title"}
        self._open.append((tag, left_out))
        if left_out:
            return
        if given.get("id", "").startswith("module-"):
            self.module = self.module or given["id"].removeprefix("module-")
        if tag == "dl":
            kind = next((KINDS[each] for each in classes if each in KINDS), "")
            self._objects.append((len(self._open), kind if "py" in classes else ""))
        if tag == "dt" and self._objects and self._objects[-1][1]:
            self._name = given.get("id", "")
        if tag == "dd" and self._objects and self._objects[-1][1] and self._name:
            self._begin(Passage(self._objects[-1][1], self._name), within=True)
            self._name = ""
        if tag in {"h1", "h2", "h3", "h4", "p", "pre"}:
            self._text = []

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID or not any(each == tag for each, _ in self._open):
            return
        while self._open:
            closed, left_out = self._open.pop()
            if not left_out:
                self._close(closed)
            if closed == tag:
                break

    def handle_data(self, data: str) -> None:
        if self._text is not None and not (self._open and self._open[-1][1]):
            self._text.append(data)

    def _close(self, tag: str) -> None:
        if tag in {"h1", "h2", "h3", "h4", "p", "pre"} and self._text is not None:
            text, self._text = "".join(self._text), None
            if tag == "pre":
                text = text.strip("\n")
            else:
                text = " ".join(text.split())
            if tag.startswith("h"):
                self._begin(Passage("topic", re.sub(r"^[\d.]+ ", "", text)), within=False)
            elif text and self.passages:
                self._current.paragraphs.append(text)
        if tag == "dl" and self._objects:
            self._objects.pop()
        while self._within and self._within[-1][0] > len(self._open):
            self._within.pop()

    def _begin(self, passage: Passage, within: bool) -> None:
        self.passages.append(passage)
        if within:
            self._within.append((len(self._open), passage))
        else:
            self._within = []
            self._section = passage

    @property
    def _current(self) -> Passage:
        return self._within[-1][1] if self._within else self._section
