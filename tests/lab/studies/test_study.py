"""Studies: which drafters are trained with what, and what the tables say of them."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest
import yaml
from tiny_evaluation import export, make_world

from stree.common.errors import CannotWrite, StreeError, UsageError
from stree.metrics import acceptance_length
from stree_lab import study
from stree_lab.studies import training
from stree_lab.studies.plan import DONE, read_study
from stree_pipelines.evaluation.arms import read_comparison
from stree_pipelines.evaluation.result_store import ResultStore

SHIPPED = sorted((Path(__file__).parents[3] / "configs/study").glob("*.yaml"))
STUB = """
import pathlib, sys
given = dict(zip(sys.argv[2::2], sys.argv[3::2]))
folder = pathlib.Path(given["--run_dir"])
if given["--trainer.max_steps"] == "9":
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
    }


def written(folder, what) -> str:
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(what))
    return str(path)


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """In place of distill.py."""
    path = tmp_path / "stub.py"
    path.write_text(STUB)
    monkeypatch.setattr(training, "DISTIL", (sys.executable, str(path)))


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


def test_a_drafter_that_reads_anothers_is_trained_after_it(tmp_path, stub, capsys):
    """Also where it comes before it in the file, and alone where the other is there already."""
    out = tmp_path / "runs"
    read = f"{out}/first/seed-0/drafter/latest"
    arms = [{"name": "second", "set": {"model.start_from": read}}, {"name": "first"}]
    path = written(tmp_path, content(out, arms=arms, seeds=[0]))
    study.main(["train", path, "--at_once", "2"])
    first, second = (out / name / "seed-0" / DONE for name in ("first", "second"))
    started = (out / "second/seed-0/given.txt").stat().st_mtime_ns
    assert first.stat().st_mtime_ns <= started <= second.stat().st_mtime_ns
    assert f"--model.start_from {read}" in (out / "second/seed-0/given.txt").read_text()
    assert "2/2" in capsys.readouterr().err


def test_a_drafter_is_not_trained_on_what_a_failed_training_left(tmp_path, stub):
    """Nor on what one left that was stopped, when it is named alone."""
    out = tmp_path / "runs"
    (out / "first/seed-0/drafter/latest").mkdir(parents=True)  # an export of its first steps
    read = f"{out}/first/seed-0/drafter/latest"
    arms = [
        {"name": "first", "set": {"trainer.max_steps": 9}},
        {"name": "second", "set": {"model.start_from": read}},
        {"name": "third"},
    ]
    path = written(tmp_path, content(out, arms=arms, seeds=[0]))
    words = "1 drafter failed: first, seed 0: runs: the disk is full .*; 1 drafter that read"
    with pytest.raises(CannotWrite, match=words):
        study.main(["train", path])
    assert [run.is_trained for run in read_study(path).runs] == [False, False, True]
    assert not (out / "second/seed-0").exists()
    with pytest.raises(UsageError, match="second, seed 0 reads the drafter of first, seed 0"):
        study.main(["train", path, "--only", "second"])


def test_drafters_that_read_each_other_are_refused(tmp_path, stub):
    out = tmp_path / "runs"
    arms = [
        {"name": one, "set": {"model.start_from": f"{out}/{other}/seed-0/drafter/latest"}}
        for one, other in ("ab", "ba")
    ]
    path = written(tmp_path, content(out, arms=arms, seeds=[0]))
    with pytest.raises(UsageError, match="a, seed 0 and b, seed 0 read each other"):
        study.main(["train", path])
    assert not out.exists()


def test_what_fails_is_told_after_the_others_have_ended(tmp_path, stub):
    arms = [{"name": "bad", "set": {"trainer.max_steps": 9}}, {"name": "good"}]
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
        ({"compare": {"target": "t", "benchmarks": ["starter"], "limt": 2}},
         r"study\.yaml: compare has \['limt'\]"),
        ({"compare": {"target": "t", "benchmarks": ["starter"], "limit": "two"}},
         r"study\.yaml: compare: limit is 'two', wanted a whole number"),
        ({"arms": [{"name": "a"}, {"name": "b", "set": {"model.los.kind": "lk"}}]},
         r"b, seed 0: .*model\.los"),
    ],
)
def test_what_could_not_be_trained_and_compared_is_not_begun(tmp_path, changes, words, stub):
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
    }
    path = written(folder, content(out, compare=options, trees=["chain-2"]))
    plan = read_study(path)
    for number, run in enumerate(plan.runs):
        run.drafter.parent.mkdir(parents=True)
        run.drafter.symlink_to(export(world, (10, 1, 100)[number]).resolve())
        config = yaml.safe_dump(training._resolved(run, {}))
        (run.folder / "config.yaml").write_text(config)
        (run.folder / DONE).touch()
    study.main(["compare", path])
    return plan


@pytest.mark.costly
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"set": {"trainer.max_steps": 5}}, "today, seed 0 .*trainer.max_steps was 4, now 5"),
        ({"arms": [{"name": "lk loss", "seeds": [5]}]}, "lk loss, seed 5 .*'lk', now 'forward_kl'"),
        ({"distil": "configs/distill/chat-75m.yaml"}, "today, seed 0 was trained otherwise"),
        (
            {"set": {"trainer.max_stepps": 5}},
            "today, seed 0: there is no option --trainer.max_stepps",
        ),
    ],
)
def test_an_arm_edited_after_its_training_is_not_compared(compared, tmp_path, changes, words):
    file = yaml.safe_load((compared.out.parent / "study.yaml").read_text())
    before = (compared.out / "study.md").read_bytes()
    with pytest.raises(UsageError, match=words):
        study.main(["compare", written(tmp_path, {**file, **changes})])
    assert (compared.out / "study.md").read_bytes() == before


@pytest.mark.costly
def test_a_dry_run_of_the_comparison_measures_nothing(compared, capsys):
    before = (compared.out / "comparison/results.jsonl").read_bytes()
    path = str(compared.out.parent / "study.yaml")
    study.main(["compare", path, "--dry_run"])
    said = capsys.readouterr().out
    assert "arm today, seed 0, chain-2: " in said and "answers: 0 to go" in said
    assert (compared.out / "comparison/results.jsonl").read_bytes() == before


@pytest.mark.costly
def test_a_tree_and_the_tuned_chain_stand_beside_each_other(compared, capsys):
    path = str(compared.out.parent / "study.yaml")
    study.main(["compare", path, "--only", "lk loss", "--trees", "paper", "chain-tuned"])
    text = capsys.readouterr().out
    assert "**paper, T = 0, on the benchmarks**" in text
    assert "**chain-tuned, T = 0, on the benchmarks**" in text
    *_, each = text.split("**Each benchmark, T = 0**")
    (line,) = (line for line in each.splitlines() if line.startswith("| lk loss"))
    name, benchmark, tree, chain = (cell.strip() for cell in line.strip("|").split("|"))
    assert (name, benchmark) == ("lk loss", "talk")
    store = ResultStore(compared.out / "comparison")
    rows = {row.method: row for row in store.results()}
    for cell, method in ((tree, "lk loss, seed 5, paper"), (chain, "lk loss, seed 5, chain-tuned")):
        assert f", τ {acceptance_length(list(store.samples(rows[method]))):.2f}" in cell
    assert chain.endswith(f"({rows['lk loss, seed 5, chain-tuned'].tree.name})")
    assert "(" not in tree
    tried = {method for method in rows if method.startswith("lk loss, seed 5, chain-tuned: ")}
    assert len(tried) == 6
    study.main(["compare", path])  # as the file says, for the other tests


@pytest.mark.costly
def test_a_studys_tables_are_those_of_its_samples(compared):
    store = ResultStore(compared.out / "comparison")
    taus = {}
    for row in store.results():
        samples = list(store.samples(row))
        taus[row.method] = sum(s.num_new_tokens for s in samples) / sum(
            s.num_calls for s in samples
        )
    text = (compared.out / "study.md").read_text().partition("**Each benchmark")[0]
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
