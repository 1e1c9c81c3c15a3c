"""Pages of the site that live elsewhere in the repository, or are notebooks, and links as the site
has them."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(Path(__file__).parent.glob("notebooks/*.ipynb"))
PAGES = {  # where a document is, and its page
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "kernels/README.md": "kernels.md",
    "slurm/README.md": "slurm.md",
    **{f"docs/notebooks/{path.name}": f"notebooks/{path.stem}.md" for path in NOTEBOOKS},
}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")


def on_files(files, config):
    """Adds the pages that are not in docs/, or are no Markdown there."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        if source.endswith(".ipynb"):
            text = "\n\n".join(notebook_parts(json.loads(text)))
        files.append(File.generated(config, page, content=text))
    return files


def notebook_parts(notebook) -> Iterator[str]:
    """A notebook's text, code and outputs as Markdown."""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield source
            continue
        yield f"```python\n{source}\n```"
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", [])})
            if "image/png" in data:
                yield f'<p><img alt="" src="data:image/png;base64,{data["image/png"].strip()}"></p>'
            elif rich := data.get("text/html") or data.get("text/markdown"):
                yield "".join(rich)
            else:
                yield f"```text\n{''.join(data['text/plain']).rstrip()}\n```"


def on_page_markdown(markdown, page, config, files):
    """Links lead to the pages that documents are on."""
    sources = {page: source for source, page in PAGES.items()}
    here = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def rewritten(link: re.Match[str]) -> str:
        wanted, anchor = link[1], link[2] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), wanted))
        uri = PAGES.get(target, target.removeprefix("docs/"))
        start = posixpath.dirname(page.file.src_uri)
        return posixpath.relpath(uri, start or ".") + anchor

    return LINK.sub(rewritten, markdown)
