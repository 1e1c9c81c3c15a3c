"""The notebooks run, on smaller models where theirs take minutes, and hold what a run gave."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
NOTEBOOKS = REPOSITORY / "docs/notebooks"


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


runner = load(NOTEBOOKS / "execute.py")


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Run in the notebooks' own folder, as Jupyter does."""
    monkeypatch.chdir(NOTEBOOKS)


def notebook(name):
    return json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))


def outputs(content):
    """Return (kind, text) of each cell with code; a picture's text is left out."""
    found = []
    for cell in content["cells"]:
        texts = []
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text": output.get("text")})
            kind = sorted(data)[0]
            texts.append((kind, "" if kind == "image/png" else "".join(data[kind])))
        if cell["cell_type"] == "code":
            found.append(texts)
    return found


@pytest.mark.costly
def test_looking_at_trees_shows_what_the_records_hold(drawn):
    committed = notebook("trees")
    shown = outputs(runner.execute(committed))
    assert shown == outputs(committed)
    assert sum(kind == "image/png" for cell in shown for kind, _ in cell) == 5


@pytest.mark.costly
def test_from_a_chat_file_to_table6(workspace, drawn):
    committed = notebook("drafter")
    run = workspace / "run"
    given = {
        "TARGET": str(workspace / "target"), "CHATS": str(workspace), "RUN": str(run),
        "STEPS": 3, "SEQUENCE_LENGTH": 64, "NUM_PROMPTS": 2, "MAX_NEW_TOKENS": 6,
    }
    shown = outputs(runner.execute(committed, given))
    wanted = outputs(committed)
    assert [[kind for kind, _ in cell] for cell in shown] == [
        [kind for kind, _ in cell] for cell in wanted
    ]
    (((_, table),),) = (cell for cell in shown if cell and "| τ (tree) " in cell[0][1])
    assert "step 2" in table and "step 3" in table and "2 prompts" in table
    assert (run / "report.html").is_file() and (run / "table6.csv").is_file()


@pytest.mark.parametrize("name", sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")))
def test_a_notebook_is_small_was_executed_in_order_and_names_no_machine(name):
    text = (NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8")
    content = json.loads(text)
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert len(text) < 300_000 and text == runner.as_text(content)
    assert str(REPOSITORY) not in text and not re.search(r"0x[0-9a-f]{8}|/tmp/|/home/", text)
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])


def test_a_parameter_that_there_is_not_is_named():
    cells = [{"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": ["A = 1\n"]}]
    with pytest.raises(KeyError, match="no parameter B"):
        runner.execute({"cells": cells}, {"B": 2})
    cells.append({"cell_type": "code", "metadata": {}, "source": ["print(A)\n", "A + 1"]})
    assert outputs(runner.execute({"cells": cells}, {"A": 5}))[1] == [
        ("text", "5\n"),
        ("text/plain", "6"),
    ]
