"""Executes notebooks and writes their outputs into them.

    python docs/notebooks/execute.py docs/notebooks/trees.ipynb
    python docs/notebooks/execute.py docs/notebooks/drafter.ipynb STEPS=6

Cells run in their order in one namespace, in this process: what Jupyter does, as far as these
notebooks need it. NAME=VALUE takes the place of what the cell tagged `parameters` gives. Kept of a
cell are its printed text, its last expression, and the figures of matplotlib as PNG; stderr, where
progress goes, is not.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from stree.common.files import write_atomically

DPI = 80
RICH = {"_repr_html_": "text/html", "_repr_markdown_": "text/markdown"}


def execute(notebook: Mapping[str, Any], given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The notebook with the outputs of its cells; `given` takes the place of its parameters.

    Raises whatever a cell raises; the traceback names the cell by its number among those with code.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells, number = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            outputs = _run("".join(cell["source"]), f"cell {number}", namespace)
            cell = {**cell, "execution_count": number, "outputs": outputs}
            if "parameters" in cell["metadata"].get("tags", ()):
                unknown = (given or {}).keys() - namespace.keys()
                if unknown:
                    raise KeyError(f"the notebook has no parameter {', '.join(sorted(unknown))}")
                namespace |= given or {}
        cells.append(cell)
    return {**notebook, "cells": cells}


def _run(source: str, name: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    tree, printed, value = ast.parse(source), io.StringIO(), None
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(text)})
    for figure in map(plt.figure, plt.get_fignums()):
        outputs.append({"data": _picture(figure), "metadata": {}, "output_type": "display_data"})
    plt.close("all")
    if isinstance(value, Figure):  # one that pyplot does not know
        outputs.append({"data": _picture(value), "metadata": {}, "output_type": "display_data"})
    elif value is not None:
        data = {kind: _lines(getattr(value, method)()) for method, kind in RICH.items()
                if hasattr(value, method)}
        data["text/plain"] = _lines(repr(value))
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    return outputs


def _picture(figure: Figure) -> dict[str, Any]:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return {
        "image/png": base64.b64encode(buffer.getvalue()).decode() + "\n",
        "text/plain": ["<a figure>"],
    }


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def as_text(notebook: Mapping[str, Any]) -> str:
    """As Jupyter writes it."""
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def main(arguments: list[str]) -> None:
    given = dict(each.split("=", 1) for each in arguments if "=" in each)
    values = {name: ast.literal_eval(text) for name, text in given.items()}
    for path in (Path(each).resolve() for each in arguments if "=" not in each):
        os.chdir(path.parent)
        notebook = execute(json.loads(path.read_text(encoding="utf-8")), values)
        write_atomically(path, as_text(notebook))


if __name__ == "__main__":
    main(sys.argv[1:])
