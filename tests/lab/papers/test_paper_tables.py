"""The papers' tables: in their layout, ours beside theirs, and plain words where there is none."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from tiny_evaluation import export, make_world

from stree.common.errors import NotFound, UsageError
from stree.trees.token_tree import TokenTree, balanced
from stree_lab import paper_tables
from stree_lab.bench_report import read_rows
from stree_lab.papers import order_bench as orders
from stree_lab.papers.registry import ENTRIES
from stree_lab.papers.tables import BATCHES_NOTE, WAITED_NOTE, without_waiting
from stree_pipelines.commands import compare
from stree_pipelines.evaluation.result_store import ResultStore

REPOSITORY = Path(__file__).parents[3]
STEP = REPOSITORY / "docs/results/h200-step"
PAIR = REPOSITORY / "docs/results/h200-papers"


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A tiny comparison whose benchmark is called mt_bench."""
    root = make_world(tmp_path_factory.mktemp("world"))
    shutil.copy(root / "talk.jsonl", root / "mt_bench.jsonl")
    drafter, out = str(export(root, 10)), root / "compared"
    model = {"drafter": drafter, "verifier": "multi_step"}
    content = {
        "target": str(root / "target"), "out": str(out), "device": "cpu", "ignore_eos": True,
        "benchmarks": [str(root / "mt_bench.jsonl")], "temperatures": [0.0, 0.6, 1.0],
        "max_new_tokens": 4, "limit": 1,
        "arms": [
            {"name": "tuned chain", "drafter": drafter, "tree": "chain-tuned"},
            {"name": "vanilla_sd", "tree": "chain-4", **model}, {"name": "stree", **model},
            {"name": "naive", "drafter": drafter, "verifier": "naive"},
            {"name": "top k", "drafter": f"top:{drafter}", "verifier": "naive"},
            {"name": "beam", "drafter": drafter, "tree": "beam-3-4-31"},
            {"name": "beam search", "drafter": drafter, "tree": "beam-3-4"},
            {"name": "n-grams", "drafter": "ngram:6", "tree": "png-6-2"},
            {"name": "E", "tree": "configs/trees/stree-e.yaml", **model},
            {"name": "five", "drafter": drafter, "tree": "chain-5"},
            {"name": "fixed", "drafter": drafter, "tree": "configs/trees/drafters-3-3-2-1.yaml"},
            {"name": "Transformer", "drafter": drafter,
             "tree": "configs/trees/drafters-3-2-2-1-1.yaml"},
            {"name": "chosen", "drafter": drafter, "tree": "bandit chain-2 or paper"},
        ],
    }
    (root / "arms.yaml").write_text(yaml.safe_dump(content))
    compare.main([str(root / "arms.yaml")])
    return out


def printed(capsys, *arguments) -> str:
    paper_tables.main(list(map(str, arguments)))
    return capsys.readouterr().out


def test_blocks_by_node_order_are_about_the_papers(capsys):
    """The paper's reordered trees have about the blocks of our depth-first orders; the times of
    attention are the rows'."""
    rows = [row for row in read_rows(STEP) if row.get("what") == "orders"]
    text = printed(capsys, "dyspec-table-5")
    for size in ("256", "512", "1024", "2048"):
        grown, reordered, drawn, first, heavy, *times = map(float, line_of(text, size))
        assert drawn == pytest.approx(grown, rel=0.02)
        assert heavy <= first == pytest.approx(reordered, rel=0.1)
        of_order = {row["order"]: row for row in rows if row["num_nodes"] == int(size)}
        medians = [of_order[name]["us_sparse"]["median"] for name in orders.ORDERS]
        medians += [
            of_order["as grown"][f"us_{way}"]["median"] for way in ("dense", "manual", "xformers")
        ]
        assert times == pytest.approx(medians, abs=0.06)


def line_of(text: str, label: str) -> list[str]:
    """Return the other cells of the table's line that begins with this one."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    (found,) = [cells for cells in lines if cells and cells[0] == label]
    return found[1:]


def test_ours_are_the_rows_figures_in_the_paper_s_layout(capsys):
    rows = {
        (row.method, row.benchmark, row.temperature): row
        for row in without_waiting(ResultStore(PAIR / "speeds").results())
    }
    text = printed(capsys, "stree-table-3")
    said = "by `runs/chat-75m-features`; 80 or 164 or 1319 prompts of each, up to 1024 new tokens."
    assert f"commit 6751bcc. Drafted {said}" in text and "Theirs: RTX 3090. What differs" in text
    assert WAITED_NOTE in text and BATCHES_NOTE in printed(capsys, "snakes-figure-4-text")
    assert line_of(text, "T = 1, STree, paper")[:2] == ["54.08 (1.36×)", "2.03"]
    tree, chain = (rows[method, "gsm8k", 1.0] for method in ("stree", "vanilla_sd"))
    speed = f"{tree.tokens_per_second:.1f} ({tree.speedup:.2f}×)"
    assert line_of(text, "T = 1, STree, ours")[-2:] == [speed, f"{tree.acceptance_length:.2f}"]
    over = f"{tree.tokens_per_second / chain.tokens_per_second:.2f}"
    assert line_of(text, "T = 1, STree over Vanilla SD, ours")[-2] == over
    assert line_of(text, "T = 1, STree over Vanilla SD, paper")[:2] == ["1.10", "1.31"]
    text = printed(capsys, "stree-table-7")
    assert "Theirs: H100." in text
    assert line_of(text, "T = 1, STree, ours")[-2:] == [speed, f"{tree.acceptance_length:.2f}"]
    rows = {(row.step, row.method): row for row in ResultStore(PAIR / "steps").results()}
    text = printed(capsys, "stree-table-6")
    taus = [f"{rows[step, 'stree'].acceptance_length:.2f}" for step in (32, 3200)]
    assert line_of(text, "τ (STree)")[:4] == ["1.51", "2.02", "2.23", taus[0]]
    assert line_of(text, "τ (STree)")[-1] == taus[1]
    text = printed(capsys, "stree-table-1")
    rows = (REPOSITORY / "docs/results/h200-step/calls.jsonl").read_text().splitlines()
    (call,) = [
        row for row in map(json.loads, rows)
        if (row["shape"], row["num_nodes"]) == ("8b", 13)
    ]
    ours = f"{call['us_tree']['median'] / 1000:.2f} ({call['over_step']:.2f}x)"
    assert line_of(text, "STree")[-1] == ours


def test_waiting_is_taken_out_of_all_speed_ups():
    rows = ResultStore(PAIR / "speeds").results()
    for old, new in zip(rows, without_waiting(rows), strict=True):
        plain = old.baseline_time_ms
        share = (plain["draft"] + plain["host"]) / sum(plain.values())
        assert new.speedup == pytest.approx(old.speedup * (1 - share)) and share > 0.05
    batched = ResultStore(PAIR / "apportioned").results()  # no parts of steps are known
    assert without_waiting(batched) == batched


def test_shares_of_a_step_add_up(capsys):
    """DySpec's Figure 4: the parts of each arm's step, and a corpus's lines in Snakes' Table 5."""
    text = printed(capsys, "dyspec-figure-4")
    lines = [line.split("|")[3:-1] for line in text.splitlines() if line.startswith("| MT-Bench")]
    assert len(lines) == 12 and any("SpecInfer" in line[0] for line in lines)
    for _, step, *parts in lines:
        assert sum(float(part.split()[0]) for part in parts) == pytest.approx(float(step), abs=0.03)
    rows = {
        (row.method, row.benchmark): row for row in ResultStore(PAIR / "ngrams").results()
    }
    text = printed(capsys, "snakes-table-5")
    for label, method in (("", "n-grams"), (" of a corpus, too", "n-grams with a corpus")):
        speed = f"{rows[method, 'gsm8k'].tokens_per_second:.1f}"
        assert line_of(text, f"ARP + PNG(6,2){label}, ours")[1].startswith(speed)


@pytest.mark.costly
def test_a_comparison_s_table_has_its_rows_figures(compared, capsys):
    rows = without_waiting(ResultStore(compared).results())
    rows = {(row.method, row.temperature): row for row in rows}
    text = printed(capsys, "stree-table-8", "--rows", compared)
    methods = ("autoregressive", "vanilla_sd", "stree", "beam search")
    # Greedily, τ does not depend on the verifier
    assert line_of(text, "τ, paper") == ["1", "2.04", "2.47", "2.60"]
    taus = [f"{rows[method, 0.0].acceptance_length:.2f}" for method in methods]
    assert line_of(text, "τ, ours") == taus
    text = printed(capsys, "stree-table-3", "--rows", compared)
    labels = {"Vanilla SD": "vanilla_sd", "STree": "stree", "Tuned chain": "tuned chain"}
    for label, method in labels.items():
        tau = f"{rows[method, 1.0].acceptance_length:.2f}"
        assert line_of(text, f"T = 1, {label}, ours")[1] == tau
    text = printed(capsys, "stree-figure-4", "--rows", compared)
    for at, method in enumerate(("vanilla_sd", "stree", "naive", "top k")):
        tau = f"{rows[method, 0.6].acceptance_length:.2f}"
        assert line_of(text, "0.6")[2 * at + 1] == tau
    text = printed(capsys, "stree-table-4", "--rows", compared)
    taus = line_of(text, "τ, ours")
    assert taus[0] == f"{rows['stree', 1.0].acceptance_length:.2f}" and taus[1:4] == ["–"] * 3
    assert taus[4] == f"{rows['E', 1.0].acceptance_length:.2f}"
    text = printed(capsys, "drafters-table-5", "--rows", compared)
    row = rows["five", 0.0]
    ours = [f"{row.acceptance_length:.2f}", f"{row.time_ms['draft']:.2f}"]
    assert line_of(text, "×, ours")[:2] == ours
    text = printed(capsys, "drafters-table-7", "--rows", compared)
    for mark, method in (("×", "fixed"), ("✓", "chosen")):
        speed = f"{rows[method, 0.0].tokens_per_second:.1f} ("
        assert line_of(text, f"{mark}, ours")[0].startswith(speed)
    text = printed(capsys, "drafters-table-6", "--rows", compared)
    speed = f"{rows['fixed', 0.0].tokens_per_second:.1f} ("
    assert line_of(text, "Mamba, ours")[0].startswith(speed)
    speed = f"{rows['Transformer', 0.0].tokens_per_second:.1f} ("
    assert line_of(text, "Transformer, ours")[1].startswith(speed)
    assert line_of(text, "Transformer, ours")[::2] == ["–", "–"]
    text = printed(capsys, "snakes-table-5", "--rows", compared)
    row = rows["n-grams", 0.0]
    assert line_of(text, "ARP + PNG(6,2), ours")[0].startswith(f"{row.tokens_per_second:.1f} (")
    assert line_of(text, "Joint + PNG(6,2), ours") == ["–"] * 3
    text = printed(capsys, "snakes-figure-4-text", "--rows", compared)
    plain = f"{rows['autoregressive', 0.0].tokens_per_second:.1f}"
    drafted = f"{row.tokens_per_second:.1f} ({row.speedup:.2f}×)"
    assert line_of(text, "MT-Bench") == ["1", plain, drafted] and "| png-6-2 " in text
    text = printed(capsys, "drafters-figure-2", "--rows", compared)
    row = rows["five", 1.0]
    ours = [f"{row.acceptance_length:.2f}", f"{row.time_ms['draft']:.2f}"]
    (line,) = re.findall(r"\| five +\| 1 .*", text)
    assert [cell.strip() for cell in line.split("|")[3:5]] == ours
    row = rows["beam", 0.6]
    ours = f"{row.speedup:.2f}× ({row.acceptance_length:.2f})"
    for name, theirs in (("dyspec-table-1", "2.15× (3.62)"), ("dyspec-table-2", "2.25× (3.62)")):
        text = printed(capsys, name, "--rows", compared)
        assert "beam-3-4-31, coupled, ours" in text and "Ours: CPU" in text
        (line,) = re.findall(r"\| MT-Bench +\| 0.6 .*", text)
        assert theirs in line and ours in line


@pytest.mark.costly
def test_a_drafter_with_its_head_in_8_bits_is_none_of_the_papers(compared, tmp_path, capsys):
    """Drafters of another form, sampling or text count in no table, however fast they are."""
    lines = (compared / "results.jsonl").read_text().splitlines()
    trees = [
        row for row in map(json.loads, lines)
        if row["temperature"] == 0 and row["tree"] and row["tree"]["name"] == "paper"
        and not row["checkpoint"].startswith("top:")
    ]
    fastest = max(row["tokens_per_second"] for row in trees)
    for kind in ("float8", "text", "top", "independent"):
        changes = {"checkpoint": f"{kind}:{trees[0]['checkpoint']}", "method": kind}
        faster = {**trees[0], **changes, "tokens_per_second": 10 * fastest}
        lines.append(json.dumps(faster))
    (tmp_path / "results.jsonl").write_text("\n".join(lines) + "\n")
    text = printed(capsys, "stree-table-8", "--rows", tmp_path)
    assert line_of(text, "Speed, ours")[2].startswith(f"{fastest:.1f} (")


def rows_of(tmp_path, *rows):
    environment = {"git_sha": "abc", "device": "a GPU"}
    lines = [json.dumps({**row, "environment": environment}) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def times(**medians):
    return {f"us_{name}": {"median": value} for name, value in medians.items()}


def test_backtracking_by_drafts_and_sizes(tmp_path, capsys):
    common = {"what": "joint", "num_rows": 1, "weight_bytes": 10**9}
    sizes = {"replay": 10**8, "joint": 3 * 10**8, "plain": 0}
    common |= {f"cache_bytes_{name}": size for name, size in sizes.items()}
    chain = {**common, "shape": "8b", "tree": "chain-2", **times(replay=2e3, joint=1.5e3)}
    of = {**common, "shape": "mamba2-2.7b"}
    one = {**of, "tree": "png-6-1", **times(replay=3e3, joint=2.5e3, plain=2e3)}
    three = {**of, "tree": "png-6-3", **times(replay=4e3, joint=5e3, plain=2e3)}
    other = {**one, "tree": "paper"}
    larger = {**one, "shape": "mamba2-13b", **times(replay=6e3, joint=9e3, plain=4e3)}
    folder = rows_of(tmp_path, chain, one, three, other, larger)
    text = printed(capsys, "snakes-table-3", "--rows", folder)
    assert line_of(text, "2 (8b), ours") == ["2.00", "1.50", *["–"] * 6]
    assert line_of(text, "6, paper")[:4] == ["22.36", "18.82", "23.57", "20.74"]
    ours = line_of(text, "6 (mamba2-2.7b), ours")
    assert ours == ["3.00", "2.50", "–", "–", "4.00", "5.00", "–", "–"]
    assert line_of(text, "0 (mamba2-2.7b), ours") == ["2.00"] * 8 and "0 (8b)" not in text
    text = printed(capsys, "snakes-table-4", "--rows", folder)
    lines = [line for line in text.splitlines() if "ours" in line and line.startswith("|")]
    speed, plain, memory, least = ([c.strip() for c in line.split("|")[2:-1]] for line in lines)
    nothing = ["–"] * 2
    assert speed == ["6", *nothing, "3.00 (1.50×)", "2.50 (1.25×)", *nothing, "6.00 (1.50×)",
                     "9.00 (2.25×)"]
    assert plain == ["0", *nothing, "2.00", "2.00", *nothing, "4.00", "4.00"]
    assert memory[3:5] == ["1.10 (1.10×)", "1.30 (1.30×)"] and least[3:5] == ["1.00"] * 2
    peaks = {"replay": 12 * 10**8, "joint": 15 * 10**8, "plain": 10**9}
    peaks |= {"replay_rows": 11 * 10**8, "joint_rows": 16 * 10**8}
    measured = {**one, **{f"peak_bytes_{name}": size for name, size in peaks.items()}}
    text = printed(capsys, "snakes-table-4", "--rows", rows_of(tmp_path, measured))
    assert "| 1.20 (1.20×)  | 1.50 (1.50×)" in text  # the peak, not the formula
    assert "| 1.10 (1.10×)  | 1.60 (1.60×)" in text


def test_parts_of_joint_steps(tmp_path, capsys):
    of = {"what": "parts", "shape": "mamba2-2.7b", "scan": "chunk scan", "state_copy": "eager"}
    phases = {"ms_step": 6, "ms_forward": 4, "ms_verification": 0.5, "ms_state_copy": 1.5}
    captured, launched = {**of, **phases, "graphs": True}, {**of, "ms_step": 9, "graphs": False}
    other = {**captured, "shape": "tiny", "ms_step": 1}
    folder = rows_of(tmp_path, captured, launched, other)
    text = printed(capsys, "snakes-table-2", "--rows", folder)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert ["chunk scan", "eager", "34.26", "6.00", "4.00", "0.50", "1.50", "9.00"] in lines
    assert ["multi-step", "just in time", "20.74", *["–"] * 5] in lines


def test_updates_by_batch_and_length(tmp_path, capsys):
    """Rows without mamba-ssm have our own updates token by token; older ones have no batch."""
    of = {"op": "mamba_tree", "shape": "8b"}
    old = {**of, "num_nodes": 5, **times(mamba_ssm_updates=20, multi_step=16, fused=17)}
    new = {**of, "num_nodes": 10, "batch": 16,
           **times(updates=900, chunk_scan=700, multi_step=300, fused=320)}
    text = printed(capsys, "snakes-table-1", "--rows", rows_of(tmp_path, old, new))
    found = {
        tuple(cells[:2]): cells[2:] for line in text.splitlines() if line.startswith("|")
        for cells in [[cell.strip() for cell in line.split("|")[1:-1]]]
    }
    assert found["1", "5"] == ["0.027", "0.066", "0.016", "0.0200", "–", "0.0160", "0.0170"]
    assert found["16", "10"] == ["1.78", "0.79", "0.31", "0.9000", "0.7000", "0.3000", "0.3200"]
    assert found["4", "1"] == ["0.044", "0.22", "0.044", *["–"] * 4]


def test_calls_over_nodes_beside_chains_by_updates(tmp_path, capsys):
    """STree's Table 1 and Figures 2 and 3: chains are those of the multi-step update."""
    of = {"what": "target call", "shape": "mamba2-2.7b", "context": 1024}
    calls = [
        {**of, "num_nodes": nodes, "over_step": 9.0,
         **times(step=2e3, tree=2e3 + 20 * nodes, chain=2e3 + 100 * nodes)}
        for nodes in (1, 5, 13, 15)
    ]
    other = {"what": "unrolled", "num_nodes": 15, "shape": "8b", **times(tree=9e3)}
    unrolled = {**other, "shape": "mamba2-2.7b", **times(
        tree=3e3, unrolled=4e3, unrolled_multi_step=3.5e3, unrolled_chunk_scan=8e3
    )}
    folder = rows_of(tmp_path, *calls, unrolled, other)
    text = printed(capsys, "stree-figure-2", "--rows", folder)
    assert line_of(text, "15") == ["2.30", "3.50", "0.92×"]  # over 2.5 ms of a chain of 5
    assert line_of(text, "µs, fitted") == ["20·N + 2e+03", "100·N + 2e+03", "–"]
    text = printed(capsys, "stree-table-1", "--rows", folder)
    (vanilla,) = [cell for cell in line_of(text, "Vanilla SD") if "2.50" in cell]
    assert vanilla == "2.50 (1.25x)"
    text = printed(capsys, "stree-figure-3", "--rows", folder)
    packed, in_paths = [
        [cell.strip() for cell in line.split("|")[-3:-1]]
        for line in text.splitlines() if line.startswith("| 4 ")
    ]
    assert packed == ["3.00", "–"] and in_paths == ["3.50", "8.00"]


def test_shares_of_attention_are_told_by_the_targets_folders(tmp_path, capsys):
    folder = PAIR / "attention-shares"
    rows = without_waiting(ResultStore(folder).results())
    rows = {(row.target.split("/")[1], row.method): row for row in rows}
    text = printed(capsys, "stree-table-5")
    assert line_of(text, "STree, paper")[:3] == ["49.04 (1.23×)", "1.84", "0.66"]
    for label, method in (("Vanilla SD", "chain of 4"), ("STree", "tree")):
        cells = line_of(text, f"{label}, ours")
        for at, share in enumerate((50, 25, 0)):
            row = rows[f"attention-{share}", method]
            speed = f"{row.tokens_per_second:.1f} ({row.speedup:.2f}×)"
            per_tau = f"{row.speedup / row.acceptance_length:.2f}"
            told = [speed, f"{row.acceptance_length:.2f}", per_tau]
            assert cells[3 * at : 3 * at + 3] == told
    assert line_of(text, "Autoregressive, ours")[2::3] == ["–"] * 3
    lines = (folder / "results.jsonl").read_text().splitlines()
    others = [
        json.dumps({**json.loads(lines[-1]), **each})
        for each in ({"temperature": 0.0}, {"verifier": "coupled"}, {"checkpoint": "ngram:6"})
    ]
    (tmp_path / "results.jsonl").write_text("\n".join([*lines[:3], *others]))  # of one target
    with pytest.raises(NotFound, match="several shares of attention"):
        printed(capsys, "stree-table-5", "--rows", tmp_path)


def test_beams_packed_and_unrolled(tmp_path, capsys):
    beams = {
        "what": "beams", "shape": "mamba2-2.7b", "num_beams": 3, "num_steps": 8,
        "weight_bytes": 5 * 10**9, "cache_bytes_tree": 10**9, "cache_bytes_unrolled": 3 * 10**9,
        **times(tree=2e3, unrolled=4e3),
    }
    folder = rows_of(tmp_path, beams)
    text = printed(capsys, "stree-table-2", "--rows", folder)
    lines = [line for line in text.splitlines() if "ours" in line and "| 8 " in line]
    ms, gb = ([cell.strip() for cell in line.split("|")[3:-1]] for line in lines)
    rest = ["–"] * 4
    assert ms == [*rest[:2], "2.00", "4.00", *rest] and gb == [*rest[:2], "6.00", "8.00", *rest]
    steps = {**beams, **times(tree=2e3, unrolled=4e3, draft=1e3, copy=500)}
    text = printed(capsys, "stree-table-2", "--rows", rows_of(tmp_path, steps))
    (line,) = (line for line in text.splitlines() if "ms a step, ours" in line and "| 8 " in line)
    assert [cell.strip() for cell in line.split("|")[5:7]] == ["3.00 (1.83×)", "5.50"]


def test_serving_in_the_paper_s_layout(tmp_path, capsys):
    speeds = {"plain": 100.0, "tree": 150.0, "modes": 160.0}
    serve = {
        "shape": "8b", "num_rows": 1, "what": "serve", "tau": 2.0, "speedup_tree": 1.5,
        "speedup_modes": 1.6,
        **{f"tokens_per_second_{way}": speed for way, speed in speeds.items()},
    }
    text = printed(capsys, "snakes-figure-4", "--rows", rows_of(tmp_path, serve))
    assert line_of(text, "1") == ["2", "100", "150", "160", "1.50×", "1.60×"]


def test_the_shipped_trees_have_the_papers_numbers():
    _, widths, depths, counts, *_ = ENTRIES["stree-table-4"].paper
    trees = [TokenTree.paper()]
    trees += [TokenTree.load(REPOSITORY / f"configs/trees/stree-{name}.yaml") for name in "bcde"]
    shapes = [(max(map(len, tree.levels)), tree.max_depth, tree.num_nodes) for tree in trees]
    assert shapes == [
        tuple(map(int, row)) for row in zip(widths[1:], depths[1:], counts[1:], strict=True)
    ]
    for title in ENTRIES["drafters-table-6"].paper[0][1:]:
        branching = [int(count) for count in title.strip("()").split(",")]
        name = f"drafters-{'-'.join(map(str, branching))}"
        tree = TokenTree.load(REPOSITORY / f"configs/trees/{name}.yaml")
        assert tree == balanced(branching, name)


def test_what_cannot_be_made_says_why(tmp_path, capsys):
    for name, entry in ENTRIES.items():
        if not entry.is_made:
            with pytest.raises(NotFound, match="cannot be made: ") as refused:
                paper_tables.main([name])
            assert entry.note in str(refused.value) and "\n" not in str(refused.value)
            continue
        if entry.rows:
            with pytest.raises(NotFound, match="run the command that --list names"):
                paper_tables.main([name, "--rows", str(tmp_path / "nowhere")])
    listed = printed(capsys, "--list")
    assert all(name in listed for name in ENTRIES)
    with pytest.raises(UsageError, match="there is no stree-table-9"):
        paper_tables.main(["stree-table-9"])
    with pytest.raises(UsageError, match="no table is named"):
        paper_tables.main([])


@pytest.mark.costly
def test_the_pages_are_what_the_command_writes(tmp_path):
    paper_tables.main(["--pages", str(tmp_path / "made")])
    made, committed = (
        {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
        for folder in (tmp_path / "made", REPOSITORY / "docs/paper-tables")
    )
    assert committed == made, "python pipelines/stree_lab/paper_tables.py --pages docs/paper-tables"
    assert "Marked:" not in "".join(made.values()), "no cell of these tables has a mark"


def test_a_drafter_of_another_tokenizer_is_beside_the_papers(capsys):
    """The committed rows have three arms, whose τ the table repeats."""
    folder = REPOSITORY / ENTRIES["drafters-table-4"].rows
    rows = {row.method: row for row in ResultStore(folder).results() if row.temperature == 0}
    text = printed(capsys, "drafters-table-4")
    lines = [
        line.split("|")[2:4] for line in text.splitlines() if line.startswith("| Mamba-2, ours")
    ]
    ours = {method.strip(): tau.strip() for method, tau in lines}
    assert list(ours) == ["tokens", "text", "another tokenizer"]
    assert all(tau == f"{rows[name].acceptance_length:.2f}" for name, tau in ours.items())
    assert "| Mamba, paper   | Mistral → Pythia  | 2.45 " in text
