"""Studies: which drafters are trained with what, and what the tables say of them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import yaml
from tiny_evaluation import export, make_world

from stree.errors import CannotWrite, StreeError, UsageError
from stree.metrics import acceptance_length
from stree_pipelines import study
from stree_pipelines.evaluation.arms import read_comparison
from stree_pipelines.evaluation.records import ResultStore
from stree_pipelines.studies import training
from stree_pipelines.studies.plan import DONE, read_study

SHIPPED = sorted((Path(__file__).parents[2] / "configs/study").glob("*.yaml"))
STUB = """
import pathlib, sys
given = dict(zip(sys.argv[2::2], sys.argv[3::2]))
folder = pathlib.Path(given["--run_dir"])
if given.get("--fail"):
    print("runs: the disk is full", file=sys.stderr)
    sys.exit(73)
(folder / "drafter/latest").mkdir(parents=True)
(folder / "given.txt").write_text(" ".join(sys.argv[1:]))
"""


def content(out, **changes) -> dict:
    return {
        "out": str(out), "distil": "configs/distill/quickstart.yaml", "seeds": [0, 1],
        "set": {"trainer.max_steps": 4}, "trees": ["paper", "chain-2"],
        "arms": [
            {"name": "today"},
            {"name": "lk loss", "set": {"model.loss.kind": "lk"}, "seeds": [5]},
        ],
        "compare": {"target": "t", "benchmarks": ["starter"], "temperatures": [0.0]},
        **changes,
    }  # fmt: skip


def written(folder, what) -> str:
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(what))
    return str(path)


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """In place of distill.py."""
    path = tmp_path / "stub.py"
    path.write_text(STUB)
    monkeypatch.setattr(training, "DISTIL", path)


def test_each_run_is_trained_with_its_arms_options_and_its_seed(tmp_path, stub, capsys):
    out = tmp_path / "runs"
    study.main(["train", written(tmp_path, content(out)), "--at_once", "2"])
    given = {
        str(path.parent.relative_to(out)): path.read_text() for path in out.glob("*/*/given.txt")
    }
    assert given.keys() == {"today/seed-0", "today/seed-1", "lk-loss/seed-5"}
    config = distill_config(tmp_path)
    assert given["lk-loss/seed-5"] == (
        f"fit --config {config} --trainer.max_steps 4 --model.loss.kind lk --seed_everything 5 "
        f"--run_dir {out}/lk-loss/seed-5"
    )
    assert "--model.loss.kind" not in given["today/seed-0"]
    assert "3/3" in capsys.readouterr().err


def distill_config(folder) -> str:
    return read_study(written(folder, content(folder))).arms[0].distil


def test_what_fails_is_told_after_the_others_have_ended(tmp_path, stub):
    arms = [{"name": "bad", "set": {"fail": "yes"}}, {"name": "good"}]
    path = written(tmp_path, content(tmp_path / "runs", arms=arms, seeds=[0]))
    with pytest.raises(CannotWrite, match=r"1 drafter failed: bad, seed 0: runs: the disk is full"):
        study.main(["train", path])
    good, bad = read_study(path).runs[::-1]
    assert good.is_trained and not bad.is_trained


def test_a_source_is_held_back_and_asked(tmp_path, stub):
    def row(number, source):
        turns = [
            {"from": "human", "value": f"ask {number}"},
            {"from": "gpt", "value": "say"},
            {"from": "human", "value": "more"},
        ]
        return json.dumps({"id": f"{number}", "source": source, "conversations": turns}) + "\n"

    lines = [row(number, source) for number, source in enumerate(["a/x", "b", "a/y", "c"])]
    (tmp_path / "all.jsonl").write_text("".join(lines))
    back = {"source": "a", "train": str(tmp_path / "all.jsonl"), "limit": 1, "turns": 1}
    back["prompts"] = back["train"]
    out = tmp_path / "runs"
    study.main(["train", written(tmp_path, content(out, hold_back=back))])
    kept = gzip.decompress((out / "train.jsonl.gz").read_bytes()).decode()
    assert kept == lines[1] + lines[3]
    (prompt,) = map(json.loads, (out / "held_back.jsonl").read_text().splitlines())
    assert prompt == {"id": "0", "category": "a/x", "turns": ["ask 0"]}
    assert f"--data.train {out}/train.jsonl.gz" in (out / "today/seed-0/given.txt").read_text()
    back["source"] = "b"
    with pytest.raises(UsageError, match=r"holds back .*\"a\".*, now .*\"b\""):
        study.main(["train", written(tmp_path, content(out, hold_back=back))])
    back["source"] = "z"
    with pytest.raises(UsageError, match=r"4 conversations of .* are not of 'z', 0 of"):
        study.main(["train", written(tmp_path, content(tmp_path / "more", hold_back=back))])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arms": [{"name": "a/b"}]}, "name 'a/b'"),
        ({"arms": [{"name": "a"}, {"name": "a"}]}, "two arms of one name"),
        ({"arms": [{"name": "a b"}, {"name": "a-b"}]}, "folders are called alike"),
        ({"arms": [{"name": "a", "sets": {}}]}, "'sets'"),
        ({"seeds": ["one"]}, "whole numbers"),
        ({"trees": []}, "does not say trees"),
        ({"trees": "paper"}, "trees is 'paper', wanted a list"),
        ({"seeds": 1}, "wanted a list of whole numbers"),
        ({"set": {"seed_everything": 3}}, "give the arm `seeds`"),
        ({"compare": {"target": "t"}}, "target and benchmarks"),
        ({"hold_back": {"source": "a"}}, "hold_back"),
        ({"more": 1}, "'more'"),
    ],
)
def test_what_is_no_study_is_refused(tmp_path, changes, words):
    with pytest.raises(UsageError, match=words):
        read_study(written(tmp_path, content(tmp_path, **changes)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trees": ["papr"]}, "no tree 'papr'"),
        ({"compare": {"target": "t", "benchmarks": ["starter"], "limt": 2}}, "limt"),
    ],
)
def test_what_could_not_be_compared_is_not_trained(tmp_path, changes, words, stub):
    with pytest.raises(StreeError, match=words):
        study.main(["train", written(tmp_path, content(tmp_path / "runs", **changes))])
    assert not (tmp_path / "runs").exists()


def test_comparing_needs_a_drafter(tmp_path):
    path = written(tmp_path, content(tmp_path / "runs"))
    with pytest.raises(UsageError, match=r"today, seed 0 is not trained \(3 of 3\)"):
        study.main(["compare", path])
    with pytest.raises(UsageError, match=r"--only .*: the study has today, lk loss"):
        study.main(["train", path, "--only", "tomorrow"])


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Two arms, of two seeds and of one, whose drafters are there already."""
    folder = tmp_path_factory.mktemp("study")
    world = make_world(folder / "world")
    out = folder / "runs"
    options = {
        "target": str(world / "target"), "device": "cpu", "ignore_eos": True, "limit": 2,
        "benchmarks": [str(world / "talk.jsonl")], "temperatures": [0.0], "max_new_tokens": 6,
    }  # fmt: skip
    path = written(folder, content(out, compare=options, trees=["chain-2"]))
    plan = read_study(path)
    for number, run in enumerate(plan.runs):
        run.drafter.parent.mkdir(parents=True)
        run.drafter.symlink_to(export(world, (10, 1, 100)[number]).resolve())
        (run.folder / DONE).touch()
    study.main(["compare", path])
    return plan


def test_a_dry_run_of_the_comparison_measures_nothing(compared, capsys):
    before = (compared.out / "comparison/results.jsonl").read_bytes()
    path = str(compared.out.parent / "study.yaml")
    study.main(["compare", path, "--dry_run"])
    said = capsys.readouterr().out
    assert "arm today, seed 0, chain-2: " in said and "answers: 0 to go" in said
    assert (compared.out / "comparison/results.jsonl").read_bytes() == before


def test_a_studys_tables_are_those_of_its_samples(compared):
    store = ResultStore(compared.out / "comparison")
    taus = {}
    for row in store.results():
        samples = list(store.samples(row))
        taus[row.method] = sum(s.num_new_tokens for s in samples) / sum(
            s.num_calls for s in samples
        )
    text = (compared.out / "study.md").read_text()
    (line,) = (each for each in text.splitlines() if each.startswith("| lk loss"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    today = [row for row in store.results() if row.method.startswith("today")]
    samples = [sample for row in today for sample in store.samples(row)]
    gain = 100 * (taus["lk loss, seed 5, chain-2"] / acceptance_length(samples) - 1)
    assert cells[1] == "1" and cells[2] == f"{taus['lk loss, seed 5, chain-2']:.2f}"
    assert cells[4].startswith(f"{gain:+.1f}".replace("-", "−")) and cells[5].endswith("×")
    (first,) = (each for each in text.splitlines() if each.startswith("| today"))
    low, high = sorted(taus[f"today, seed {seed}, chain-2"] for seed in (0, 1))
    assert f"[{low:.2f}, {high:.2f}]" in first


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_studies_are_ones(path, tmp_path):
    plan = read_study(str(path))
    assert len(plan.runs) > len(plan.arms)
    (tmp_path / "comparison.yaml").write_text(yaml.safe_dump(plan.comparison(plan.runs)))
    _, arms = read_comparison(tmp_path / "comparison.yaml", {})
    assert len(arms) == len(plan.runs) * len(plan.trees)
