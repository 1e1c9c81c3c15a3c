"""Check that a report's page is one file that a browser opens without a network."""

from __future__ import annotations

import re
from html.parser import HTMLParser


class Resources(HTMLParser):
    """Collects whatever a browser would fetch, and checks that elements nest."""

    VOID = ("meta", "br", "link", "img", "input", "hr", "path", "use", "rect", "line", "circle")

    def __init__(self):
        super().__init__()
        self.fetched, self.open, self.texts = [], [], []

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                self.fetched.append(value)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_data(self, data):
        self.texts.append(data)


def require_self_contained(html: str) -> None:
    """Assert that a page's elements nest, and that a browser fetches nothing for it."""
    page = Resources()
    page.feed(html)
    assert page.open == []
    assert all(target.startswith("#") for target in page.fetched)
    for outside in ("http:", "https:", "//cdn", "@import", "<script", "<link"):
        assert outside not in html
    assert not [url for url in re.findall(r"url\((.*?)\)", html) if not url.startswith("#")]
