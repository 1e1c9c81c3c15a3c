"""The page "Do trees pay on hybrids?" has the tables that its command makes from rows."""

import json
from pathlib import Path

import pytest
from bench_reports import MADE_BY

from stree.common.errors import UsageError
from stree_lab.benches import trees_pay

REPOSITORY = Path(__file__).parents[2]


def row(tree, count, us, draft=0, **more):
    made = dict(what="rows", shape="8b", tree=tree, num_nodes=9, num_rows=count)
    drafts = {"us_draft": {"median": draft}} if draft else {}
    return {**made, "environment": MADE_BY, "us_target": {"median": us}, **drafts, **more}


@pytest.mark.parametrize(
    ("arm", "needed", "gained"),
    [
        ("Mamba-2, `chain-2` (9), T = 0", "1.50 2.00 – –", "1.60 **1.20** – –"),
        ("Mamba-2, `paper` (9), T = 0", "1.75 4.00 – –", "**2.00** 0.88 – –"),
        ("MTP, `paper` (9), T = 0", "3.00 – – –", ""),  # its τ is not recorded
        ("Mamba-2, `paper` (9), T = 1", "2.00 – – –", "**1.05** – – –"),
    ],
)
def test_a_step_over_a_plain_one_is_the_tau_that_it_needs(arm, needed, gained):
    rows = [
        row("plain", 1, 4000), row("plain", 4, 5000), row("plain", 32, 1),
        row("chain-2", 1, 5500, 500), row("chain-2", 4, 9000, 1000),
        row("paper", 1, 6000, 1000), row("paper", 4, 18000, 2000), row("paper", 16, 1, 1),
        row("plain", 1, 4500, temperature=1.0), row("paper", 1, 8000, 1000, temperature=1.0),
        row("plain", 1, 2000, drafter="mtp"), row("paper", 1, 5000, 1000, drafter="mtp"),
        row("plain", 1, 1000, target_dtype="float8"), {**row("paper", 1, 1), "what": "joint"},
    ]
    bf16, eight = trees_pay.read_steps(rows)
    assert "in bfloat16, a GPU" in bf16.title and "in float8" in eight.title and not eight.needed
    taus = {("chain-2", 0.0): 2.4, ("paper", 0.0): 3.5, ("paper", 1.0): 2.1}
    tables = trees_pay.tables_of(bf16, taus)
    assert tables[0].rows[1][1:3] == ("4.00", "5.00")  # ms, of the first drafter at T = 0
    found = [[line for line in table.rows if line[0].startswith(arm)] for table in tables]
    assert [" ".join(line[1:]) for lines in found for line in lines] == [
        each for each in (needed, gained) if each
    ]


def test_a_step_is_compared_with_the_plain_one_of_its_own_commit():
    """Later rows take the place of earlier ones, for an arm and a number of sequences each."""
    later = {"environment": {**MADE_BY, "git_sha": "fedcba9876"}}
    (steps,) = trees_pay.read_steps([
        row("plain", 1, 1000), row("plain", 4, 2000),
        *(row(tree, count, 3000) for tree in ("chain-2", "paper") for count in (1, 4)),
        row("paper", 4, 2200, **later), row("plain", 4, 1100, **later),
        row("paper", 16, 1, **later),
    ])
    assert steps.plain == {("own", 0.0): {1: 1000, 4: 1100}}
    assert steps.needed == {
        ("own", "chain-2", 0.0): {1: 3.0, 4: 1.5}, ("own", "paper", 0.0): {1: 3.0, 4: 2.0}
    }
    assert steps.title.endswith(f"a GPU, commits {MADE_BY['git_sha'][:7]}, fedcba9")


def pages(folder):
    """Write both pages with tables of another day into a folder."""
    for name in (trees_pay.PAGE, trees_pay.FAMILIES_PAGE):
        page = folder / name
        page.parent.mkdir(parents=True, exist_ok=True)
        committed = (REPOSITORY / "docs" / name).read_text(encoding="utf-8")
        page.write_text(committed.partition(trees_pay.MARK)[0] + trees_pay.MARK + "older tables")


def test_the_pages_are_what_the_command_writes(tmp_path):
    pages(tmp_path)
    trees_pay.main(["--docs", str(tmp_path)])
    for name in (trees_pay.PAGE, trees_pay.FAMILIES_PAGE):
        made, committed = (each / name for each in (tmp_path, REPOSITORY / "docs"))
        assert made.read_text() == committed.read_text(), "run benches/trees_pay.py"


def test_a_cut_run_has_the_plain_step_and_no_arm(tmp_path):
    call = dict(what="target call", num_nodes=1, context=1024, shape="qwen3.5-9b")
    rows = [
        row("plain", 16, 4900),
        {**call, "step_over_floor": 1.0769, "environment": MADE_BY},
        {**call, "step_over_floor": 1.25, "environment": MADE_BY, "target_dtype": "float8"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    pages(tmp_path)
    own = tmp_path / "results/own-heads"
    timed = ["--times", str(tmp_path / "rows.jsonl"), "--pairs", str(own)]
    trees_pay.main(["--docs", str(tmp_path), *timed])
    said = [" ".join((tmp_path / name).read_text().split())
            for name in (trees_pay.PAGE, trees_pay.FAMILIES_PAGE)]
    assert "| plain step, ms | – | – | 4.90 | – |" in said[1] and "plain step, ms" not in said[0]
    assert "| family | shape | MTP head known | bfloat16, a GPU | float8, a GPU |" in said[1]
    assert "| Qwen3.5 | qwen3.5-9b | yes | 1.077 | 1.250 |" in said[1]
    assert "| MambaInLlama | 8b | no | – | – |" in said[1]
    (tmp_path / trees_pay.PAGE).write_text("no mark")
    with pytest.raises(UsageError, match="has no line <!-- made by"):
        trees_pay.main(["--docs", str(tmp_path), *timed])
