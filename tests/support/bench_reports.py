"""Report rows of benchmarks and return the tables and figures."""

import json

import torch

from stree_lab import bench_report
from stree_lab.benches import models

CPU = torch.device("cpu")
TINY = models.OWN_SHAPES["tiny"].mixer_shape
# All that joint keeps beside what replay does where one layer has a conv: its tail, in bytes
TAIL = TINY.tail * TINY.num_channels * 2
MADE_BY = {"git_sha": "abc", "device": "a GPU"}


def report(folder, rows, capsys) -> tuple[list[list[str]], set[str]]:
    """Return cells of all lines of tables that the rows give, and the names of the figures."""
    text = "".join(json.dumps({"environment": MADE_BY, **row}) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(text)
    capsys.readouterr()
    bench_report.main([str(folder)])
    said = capsys.readouterr().out
    assert (folder / "bars.md").read_text() in said
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines()]
    return [line for line in lines if line], {path.stem for path in folder.glob("*.svg")}
