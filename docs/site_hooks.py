"""Pages of the site that live elsewhere in the repository, or are notebooks; links as the site has
them; languages of code blocks."""

from __future__ import annotations

import ast
import json
import posixpath
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(Path(__file__).parent.glob("notebooks/*.ipynb"))
PAGES = {  # where a document is, and its page
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "kernels/README.md": "kernels.md",
    "kernels/gated_delta.md": "kernels-gated-delta.md",
    "kernels/ops.md": "kernels-ops.md",
    "slurm/README.md": "slurm.md",
    "tests/README.md": "tests.md",
    **{f"docs/notebooks/{path.name}": f"notebooks/{path.stem}.md" for path in NOTEBOOKS},
}
# After an empty line or at the beginning, not within a list
CODE = re.compile(r"(?:\A|(?<=\n\n))(?: {4}.*\n(?:\n+(?= {4}))?)+", re.MULTILINE)
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
SHELL = re.compile(
    r"(?:\w+=\S+ )*(?:\.|\w+=\$\(\w+|cd|\S*python3?|\S*stree|make|git|pip|sbatch|srun|squeue|"
    r"torchrun|accelerate|hf|z?cat)\s"
)
YAML = re.compile(r"[\w.-]+:(?: |$)")
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")


def on_files(files, config):
    """Adds the pages that are not in docs/, or are no Markdown there."""
    from mkdocs.structure.files import File

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
    """Links lead to the pages that documents are on; code blocks say their language."""
    sources = {page: source for source, page in PAGES.items()}
    here = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def rewritten(link: re.Match[str]) -> str:
        wanted, anchor = link[1], link[2] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), wanted))
        uri = PAGES.get(target, target.removeprefix("docs/"))
        start = posixpath.dirname(page.file.src_uri)
        return posixpath.relpath(uri, start or ".") + anchor

    return fenced(LINK.sub(rewritten, markdown))


def fenced(markdown: str) -> str:
    """Indented code blocks as fenced ones, with the language that their text is in."""
    parts = FENCED.split(markdown)
    parts[::2] = map(_fenced, parts[::2])
    return "".join(parts)


def _fenced(text: str) -> str:
    """Text without fenced blocks."""

    def block(found: re.Match[str]) -> str:
        before = [line for line in text[: found.start()].splitlines() if line.strip()]
        outer = next((line for line in reversed(before) if not line.startswith("    ")), "")
        if re.match(r" |[-*+] |\d+\. ", outer):  # text of a list
            return found[0]
        code = textwrap.dedent(found[0]).rstrip()
        return f"```{language(code)}\n{code}\n```\n"

    return CODE.sub(block, text)


def language(code: str) -> str:
    """bash, python, yaml or text."""
    first = next(line for line in code.splitlines() if not line.startswith("#"))
    if SHELL.match(f"{first} "):
        return "bash"
    if YAML.match(first):
        return "yaml"
    try:
        return "python" if ast.parse(code).body else "text"
    except SyntaxError:
        return "text"
