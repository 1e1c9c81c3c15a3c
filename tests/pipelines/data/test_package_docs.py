"""Text of packages: prose of every style of docstring, each paragraph once, nothing held out."""

import csv
import json

import pytest

from stree.common.errors import BadData
from stree_pipelines import corpus
from stree_pipelines.data.conversations import read_conversations
from stree_pipelines.data.package_docs import HeldOut, Paragraphs, plain, prose, readable

STYLES = {
    "numpydoc": """Mix the two inputs of
the mixer well.

It stirs for :math:`t` seconds, see :func:`~kitchen.stir` and ``bowl``.

.. versionadded:: 1.2

   For cold bowls, too.

Parameters
----------
bowl : str
    Where the dough is.

    Of steel or of glass.

Returns
-------
float
    How much of it is mixed.

Notes
-----
Stirring is not the same thing as shaking.

Examples
--------
>>> mix("a")
1.0
""",
    "google": """Mix the two inputs of
the mixer well.

It stirs for `t` seconds, see `stir` and `bowl`.

Stirring is not the same thing as shaking.

Args:
    bowl (str): Where the dough is.

Returns:
    float: How much of it is mixed.
""",
    "sphinx": """Mix the two inputs of
the mixer well.

It stirs for `t` seconds, see :func:`stir` and ``bowl``.

.. note:: Stirring is not
   the same thing as shaking.

:param bowl: Where the dough is.
:type bowl: str
:returns: How much of it is mixed.
""",
}
PROSE = [
    "Mix the two inputs of\nthe mixer well.",
    "It stirs for `t` seconds, see `stir` and `bowl`.",
    "Stirring is not the same thing as shaking.",
    "`bowl`: Where the dough is.",
    "Returns: How much of it is mixed.",
]


@pytest.mark.parametrize("style", STYLES)
def test_every_style_gives_the_same_prose(style):
    assert prose(STYLES[style]).split("\n\n") == PROSE


def test_long_lists_and_what_nobody_reads_aloud_are_left_out():
    many = "".join(f"name{i} : int\n    The number of name {i}.\n" for i in range(20))
    assert prose(f"Do it.\n\nParameters\n----------\n{many}").count("The number") == 5
    doctest = ">>> print(matrix)\n[[1 0]\n [0 1]\n [0 0]\n [1 1]]"
    table = "=====  =====\nA      not A\n=====  =====\nFalse  True\n=====  ====="
    tex = r"The sum $\sum_{i} x_i$ over $\Omega$ is \alpha."
    text = "First.\n\nAn example:\n\n" + doctest
    assert readable(text) == ["First."]
    for dropped in (doctest, table, tex, "1.0 2.0 3.0\n4.0 5.0 6.0", "これは英語ではない。"):
        assert readable(dropped) == []
    assert readable(">>> mix(1)\n1") == [">>> mix(1)\n1"]  # short code stays
    assert plain("a `text <http://x.org>`_, a footnote [1]_, `ref`_") == (
        "a text, a footnote [1], `ref`"
    )


def test_a_paragraph_comes_once_and_a_held_out_run_of_words_never():
    fresh = Paragraphs(["One thing is said here."])
    assert fresh.new("One  thing is\nsaid here\n\nAnd another, too:") == ""
    assert fresh.new("A second thing.\n\nA third thing.") == "A second thing.\n\nA third thing."
    assert fresh.new("A fourth thing.\n\nA second thing") == "A fourth thing."
    held_out = HeldOut(["Read all of the words in this file, and return them.", "Go there."])
    assert held_out.is_in("It is said to read ALL of the words\nin this file.")
    assert held_out.is_in("go there")
    assert not held_out.is_in("Go there at once. Read all of the words in that file.")


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A standard library of a module that is held out and one that is not."""
    assert corpus.split_of("json") == "prompts" and corpus.split_of("csv") == "train"
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / "json.py").write_text('"""JSON is a subset of what the syntax of JavaScript has."""')
    (folder / "csv.py").write_text('"""Reading and writing of values between commas."""')
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(folder))
    monkeypatch.setattr(corpus, "topic_entries", lambda: iter(()))


def package(folder, **modules):
    for name, text in modules.items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.py").write_text(text)
    return folder


def test_packages_become_conversations_of_training_text(library, tmp_path, capsys):
    site = tmp_path / "site-packages"
    kitchen = package(
        site / "kitchen",
        __init__='"""A kitchen is where things are mixed."""\n',
        mixer=f'def mix(bowl):\n    r"""{STYLES["numpydoc"]}"""\n'
        'def values():\n    """Reading and writing of values between commas."""\n',
        fork='"""JSON is a subset of what the\nsyntax of Javascript has, and so on."""\n',
    )
    package(kitchen / "_vendor", other='"""A module under another licence, of others."""\n')
    (site / "Kitchen-1.2.dist-info").mkdir()
    (site / "Kitchen-1.2.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: Kitchen\nVersion: 1.2\n"
        "Classifier: License :: OSI Approved :: BSD License\n"
    )
    manual = tmp_path / "manuals/kitchen"
    (manual / "_sources").mkdir(parents=True)
    page = (
        "<h1>Mixing</h1><p>A kitchen is where things are mixed.</p>"
        "<p>Mixing needs a spoon of wood.</p>"
    )
    (manual / "guide.html").write_text(page)
    (manual / "changelog.html").write_text("<h1>1.2</h1><p>Knives are much sharper now.</p>")
    out = tmp_path / "out"
    corpus.main([str(out), "--packages", str(kitchen), str(manual)])
    assert "2 packages" in capsys.readouterr().out
    found, _ = read_conversations(out / "packages.jsonl", strict=True)
    said = "\n".join(text for row in found for _, text in row.turns[1::2])
    assert "`mix(bowl)`\n\n" + "\n\n".join(PROSE) in said
    assert "JavaScript" not in said and "Javascript" not in said  # held out, and its copy
    assert "commas" not in said and "another licence" not in said and "sharper" not in said
    assert said.count("where things are mixed") == 1 and "Mixing needs a spoon of wood." in said
    rows = [json.loads(line) for line in (out / "packages.jsonl").read_text().splitlines()]
    assert {row["source"] for row in rows} == {
        "kitchen-docs/kitchen", "kitchen-docs/kitchen.mixer", "kitchen-docs/page:guide"
    }  # fmt: skip
    asked = " ".join(turn["value"] for row in rows for turn in row["conversations"][::2])
    assert "Python" not in asked and "standard library" not in asked and "kitchen" in asked
    table = list(csv.DictReader((out / "packages.csv").open()))
    assert [(row["package"], row["version"], row["licence"]) for row in table] == [
        ("kitchen", "1.2", "BSD License"), ("kitchen", "", "")
    ]  # fmt: skip
    assert sum(int(row["conversations"]) for row in table) == len(rows)


def test_a_folder_without_prose_is_told(library, tmp_path):
    empty = package(tmp_path / "bare", m="x = 1\n")
    with pytest.raises(BadData, match="bare: no docstrings or HTML pages with prose"):
        corpus.build_packages([empty], tmp_path / "out")
