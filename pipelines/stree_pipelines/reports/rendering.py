"""Render HTML pages from templates, and Markdown pages, safe against markup in records."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jinja2

from stree.common.errors import shown

# An HTML tag of CommonMark, except the ones that our pages use
_TAG = re.compile(r"<(?=[A-Za-z/!?])(?!/?(?:details|summary)>)")
TEMPLATES = Path(__file__).parent / "templates"


def render_page(template: str, context: dict[str, Any]) -> str:
    """Render a self-contained page; text that is not our SVG is escaped, control characters
    replaced."""
    return shown(render_text(template, context, autoescape=True))


def render_text(template: str, context: dict[str, Any], **options: Any) -> str:
    """Render a template as it is; options are those of `jinja2.Environment`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, **options,
    )
    return environment.get_template(template).render(context)


def markdown_page(text: str) -> str:
    """Escape HTML tags in a Markdown page: names in records may spell them."""
    return _TAG.sub("&lt;", shown(text))
