"""HTML pages from their templates, and Markdown pages; records cannot put markup into either."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jinja2

from stree.common.text import shown

# A tag of HTML as CommonMark has it, but for the ones that our pages use
_TAG = re.compile(r"<(?=[A-Za-z/!?])(?!/?(?:details|summary)>)")
TEMPLATES = Path(__file__).parent / "templates"


def render_page(template: str, context: dict[str, Any]) -> str:
    """A self-contained page; what is no SVG of ours is escaped, control characters replaced."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return shown(environment.get_template(template).render(context))


def markdown_page(text: str) -> str:
    """A Markdown page whose tags of HTML are text: names in records may spell them."""
    return _TAG.sub("&lt;", shown(text))
