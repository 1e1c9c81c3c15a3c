"""Drafters of equal drafting time, from rows that follow a formula, and from bytes alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from stree.errors import BadData, NotFound, UsageError
from stree_pipelines import bench_drafters
from stree_pipelines.bench_drafters import Cost, Fit, kinds

GRID = (
    "--shape", "8b", "--layers", "[2,3,4]", "--widths", "[1024]", "--heads", "[0,32768]",
    "--ranks", "[0,256]",
)  # fmt: skip
MEASURED = ("own", "head=32768", "rank=256", "layers=4")


def us_of(cost: Cost) -> float:
    return 40.0 + 30.0 * cost.num_layers + 0.5 * cost.level_bytes / 1e6


def write_rows(path: Path, kinds, device: str = "a GPU") -> str:
    rows = [
        dict(
            what="draft", shape="8b", us_draft=dict(median=us_of(Cost.of("8b", kind))),
            environment=dict(git_sha="a", device=device),
            **({} if kind == "own" else {"drafter": kind}),
        )
        for kind in kinds
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def lines_of(capsys) -> dict[str, list[str]]:
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    return {line[0]: line for line in lines if len(line) == 5}


def test_equal_drafters_are_those_of_the_formula_that_rows_follow(tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", MEASURED)
    bench_drafters.main([*GRID, "--rows", rows, "--within", "0.2"])
    said = lines_of(capsys)
    own = us_of(Cost.of("8b", "own"))
    for kind in kinds("8b", [2, 3, 4], [1024], [0, 32768], [0, 256]):
        share = us_of(Cost.of("8b", kind)) / own
        assert (kind in said) == (abs(share - 1) <= 0.2), kind
        if kind in said:
            assert float(said[kind][3]) == pytest.approx(share, abs=0.005)
            assert said[kind][4] == ("measured" if kind in MEASURED else "fitted")
    assert "head=32768+layers=3" in said or "rank=256+layers=4" in said


def test_other_depths_than_the_measured_ones_are_not_fitted(tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", MEASURED[:3])
    bench_drafters.main([*GRID, "--rows", rows, "--within", "5"])
    assert not any("layers=" in kind for kind in lines_of(capsys))


def test_without_rows_it_goes_by_bytes_and_says_so(capsys):
    bench_drafters.main([*GRID, "--within", "0.6"])
    out = capsys.readouterr().out
    lines = [line.split(" | ") for line in out.splitlines() if line.endswith("bytes alone")]
    own = Cost.of("8b", "own").level_bytes
    assert len(lines) > 2
    for kind, parameters, _, share, _ in lines:
        cost = Cost.of("8b", kind)
        assert float(share) == pytest.approx(cost.level_bytes / own, abs=0.005)
        assert int(parameters.replace(",", "")) == cost.layer_parameters
    assert re.search(r'to measure: bench_decode.py .* --drafters "\[own,.*\]"', out)


def test_what_says_nothing_is_refused(tmp_path):
    costs = {kind: Cost.of("8b", kind) for kind in MEASURED}
    with pytest.raises(BadData, match="a fit needs some"):
        Fit({"own": 1.0}, costs)
    with pytest.raises(NotFound, match=r"write it with bench_decode\.py"):
        bench_drafters.main([*GRID, "--rows", str(tmp_path / "absent")])
    rows = write_rows(tmp_path / "rows.jsonl", MEASURED[1:])
    with pytest.raises(BadData, match="'s own drafter: measure it"):
        bench_drafters.main([*GRID, "--rows", rows])
    first, second = (
        Path(write_rows(tmp_path / f"{name}.jsonl", MEASURED, name)).read_text() for name in "ab"
    )
    (tmp_path / "both.jsonl").write_text(first + second)
    with pytest.raises(BadData, match="rows of 2 devices or commits"):
        bench_drafters.main([*GRID, "--rows", str(tmp_path / "both.jsonl")])
    with pytest.raises(UsageError, match="'9b' is not one of"):
        bench_drafters.main(["--shape", "9b"])
