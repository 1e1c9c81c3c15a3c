"""Pages of the site that live elsewhere in the repository, and links as the site has them."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {  # where a document is, and its page
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "kernels/README.md": "kernels.md",
    "slurm/README.md": "slurm.md",
}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")


def on_files(files, config):
    """Adds the pages that are not in docs/."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


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
