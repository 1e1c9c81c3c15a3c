"""Report profiles, graphs and bars of rows that benchmarks have measured."""

import json

import pytest
from bench_reports import CPU, TAIL, report

from stree.common.errors import BadData
from stree.trees.token_tree import as_tree
from stree_lab import bench_report
from stree_lab.benches import batches, calls, models, profiles, steps, timing

ROW = b'{"what": "draft", "environment": {"git_sha": "a", "device": "G"}}\n'


def call_rows(shape: str, tree, chain) -> list[dict]:
    return [
        dict(what="target call", shape=shape, num_nodes=nodes, context=1024,
             us_tree=dict(median=tree(nodes)), us_chain=dict(median=chain(nodes)))
        for nodes in (1, 2, 5, 8, 13, 16, 32)
    ]


@pytest.mark.parametrize(
    ("shape", "tree", "chain", "fitted"),
    [
        ("mamba2-2.7b", lambda n: 2000 + 10 * n, lambda n: 1900 + 60 * n,
         ("10·N + 2e+03", "60·N + 1.9e+03")),
        ("8b", lambda n: 4000 + 5 * n + 0.5 * n * n, lambda n: 3900 + 80 * n + 2 * n * n,
         ("0.5·N² + 5·N + 4e+03", "2·N² + 80·N + 3.9e+03")),
    ],
)
def test_a_tree_pays_by_the_papers_equations(shape, tree, chain, fitted):
    """STree's Eq. 7 and 8: a tree's time over that of a chain of 5 nodes by updates."""
    rows = call_rows(shape, tree, chain)
    kinds = bench_report.kinds_of(rows)
    (found,) = kinds["fit"]
    assert (found["us_call"], found["us_chain"]) == fitted
    needed = {row["num_nodes"]: row["tau_over_chain"] for row in kinds["required τ"]}
    assert min(needed) == 5 and needed[15] == pytest.approx(tree(15) / chain(5))
    assert needed[32] == pytest.approx(tree(32) / chain(5))


def test_a_profile_is_saved_and_printed(tmp_path, capsys):
    row = dict(what="profile", us=2.5, kernels={"norm_kernel": dict(us=2.5, count=1.0)})
    timing.write_rows(tmp_path / "rows.jsonl", [row], CPU)
    assert capsys.readouterr().out == "what=profile us=2.500 kernels=norm_kernel 2.500/1.000\n"
    assert json.loads((tmp_path / "rows.jsonl").read_text())["kernels"] == row["kernels"]


def test_a_profile_counts_what_kernels_take_beyond_others():
    product = "nvjet_sm90_tst_128x8_64x12_2x1_v_bz_TNT"
    events = [
        (0.0, 10.0, product),
        (9.0, 12.0, "norm_kernel"),  # began early
        (9.5, 11.0, "norm_kernel"),  # all of it behind the other
        (13.0, 14.0, "void at::native::fill<1, float>(int)"),
        (14.0, 20.0, "void cublasLt::splitKreduce_kernel<32>(float)"),
    ]
    assert profiles.exposed(reversed(events)) == {
        "matrix products": dict(us=16.0, count=2), "norm_kernel": dict(us=2.0, count=2),
        profiles.WAITING: dict(us=1.0, count=1), "fill": dict(us=1.0, count=1),
    }


def test_profiles_are_a_table_with_the_largest_first(tmp_path, capsys):
    kernels = dict(fill=dict(us=1.5, count=2), norm_kernel=dict(us=2.0, count=80))
    row = dict(what="profile", shape="8b", context=1024, num_nodes=1, us=3.5, kernels=kernels)
    cells, _ = report(tmp_path, [row], capsys)
    assert [line[-3:] for line in cells[2:]] == [
        ["all", "3.5", "–"], ["norm_kernel", "2", "80"], ["fill", "1.5", "2"]
    ]


@pytest.mark.costly
def test_graphs_of_every_method_temperature_verifier_and_rows(captured_on_cpu, tmp_path, capsys):
    """At T = 0 all verifiers are alike; block judges no tree that branches."""
    target = models.random_target("tiny", CPU)
    drafter = models.random_drafter("tiny", CPU)
    rows = list(steps.graphs(target, drafter, 8, 3))
    assert [(row["temperature"], row["num_nodes"], "us_draft" in row) for row in rows] == [
        (temperature, num_nodes, num_nodes > 1)
        for temperature in (0.0, 1.0) for num_nodes in (1, 5, 13)
    ]
    cells, _ = report(tmp_path, ({"shape": "tiny", **row} for row in rows), capsys)
    tree = rows[-1]["us_draft"]["median"] + rows[-1]["us_target"]["median"]
    assert cells[2][1] == "autoregressive" and cells[2][-3] == "–"
    assert float(cells[-1][-1].replace(",", "")) == pytest.approx(tree, rel=1e-3)
    rows = list(steps.graphs(target, drafter, 8, 1, ["coupled", "multi_step", "block"], [2]))
    assert {row["num_rows"] for row in rows} == {2} and len(rows) == 3 + 6
    chain, tree = (
        [row["verifier"] for row in rows if row["num_nodes"] == nodes and row["temperature"]]
        for nodes in (5, 13)
    )
    assert chain == ["coupled", "multi_step", "block"] and tree == chain[:2]


def test_report_of_bars_and_fits(tmp_path, capsys):
    step = dict(what="step", shape="8b", us_plain=dict(median=100.0, p20=99.0))
    rows = [
        dict(op="mamba_tree", shape="8b", num_nodes=16, context=1024, us_fused=dict(median=6.5)),
        dict(step, tau=2.0, speedup=1.7, speedup_per_tau=0.85, host_share=0.01),
        dict(step, tau=3.0, speedup=2.1, speedup_per_tau=0.70, host_share=0.03),
        *(dict(what="unrolled", shape="8b", num_nodes=nodes, us_tree=dict(median=1.0))
          for nodes in (3, 7)),
        *(dict(what="serve", shape="8b", num_rows=count, tau=2, speedup_tree=1.2, speedup_modes=1.3)
          for count in (2, 4)),
    ]
    for nodes in (1, 5, 16, 64):
        for shape, quadratic in (("8b", 0.5), ("mamba2-2.7b", 0.0)):
            time = dict(median=quadratic * nodes**2 + 3 * nodes + 100)
            rows.append(dict(
                what="target call", shape=shape, num_nodes=nodes, context=1024, us_tree=time,
                over_step=1.07, over_floor=1.2, step_over_floor=1.1,
            ))
    cells, figures = report(tmp_path, rows, capsys)
    assert ["8b", "0.5·N² + 3·N + 100"] in cells and ["mamba2-2.7b", "3·N + 100"] in cells
    bars = {line[0]: line for line in cells}
    assert bars["replay + conv + scan, µs a layer, N = 16"][2:] == ["6.5", "met"]
    assert bars["replay + conv + scan, µs a layer, N = 64"][3] == "not measured"
    assert bars["tree call over a step, N = 16"][2:] == ["1.07", "missed"]
    assert bars["speedup per τ, 13-node tree"][2:] == ["0.7", "missed"]  # the worst row counts
    assert bars["host time not hidden, share of a step"][2:] == ["0.03", "missed"]
    assert ["shape", "tau", "us plain", "host share", "speedup", "speedup per tau"] in cells
    assert ["8b", "3", "100", "3.0%", "2.1", "0.7"] in cells
    assert figures == {
        "runtime_vs_nodes", "required_tau", "tree_vs_unrolled", "speedup_vs_tau", "speedup_vs_rows"
    }


@pytest.mark.parametrize(
    "line",
    [b'{"what": "draft"', b"", b"[1, 2]", b'{"what": "draft"}', b'{"environment": 1}', b"\xff"],
)
def test_a_line_that_is_no_row_is_named(line, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(ROW + line + b"\n")
    with pytest.raises(BadData, match=r"rows.jsonl, line 2 is no row of a benchmark"):
        bench_report.main([str(tmp_path)])


@pytest.mark.long
def test_steps_of_rows_and_serving(captured_on_cpu, tmp_path, capsys):
    target, drafter = models.random_target("tiny", CPU), models.random_drafter("tiny", CPU)
    trees = [as_tree(name) for name in ("chain-2", "paper", "beam-2-2-5")]
    rows = list(batches.steps_of_rows(target, drafter, trees, [1, 3], 8, 2))
    assert [(row["num_rows"], row["num_nodes"]) for row in rows] == [
        (count, nodes) for count in (1, 3) for nodes in (1, 3, 13, 5)
    ]
    one, three = (row["us_memory"] for row in (rows[0], rows[4]))
    assert one > 0 and three > one  # the bandwidth is measured anew
    assert all(row["over_bound"] > 0 and ("us_draft" in row) == (row["num_nodes"] > 1)
               for row in rows)
    trees = [as_tree(name) for name in ("png-3-2", "paper")]
    joint = list(batches.joint_of_rows(target, drafter, trees, [2], 8, 2))
    assert [(row["num_nodes"], row["path_nodes"]) for row in joint] == [(7, 4), (13, 5)]
    assert all(row["kept_bytes_joint"] - row["kept_bytes_replay"] == 2 * TAIL for row in joint)
    for row in joint:
        kept = row["cache_bytes_joint"] - row["cache_bytes_replay"]
        assert kept >= 2 * TAIL and row["us_plain"]["median"] > 0
        assert row["cache_bytes_plain"] < row["cache_bytes_replay"]
    capsys.readouterr()
    served = list(batches.serve_at(target, drafter, [2], [1.5], 8, 10))
    told = [line.split(" tokens/s")[0] for line in capsys.readouterr().out.splitlines()]
    ways = [line.rpartition(": ")[2].split()[0] for line in told]
    assert len(served) == 1 and ways == ["costs", "plain", "tree", "modes"]  # as each is there
    assert served[0]["speedup_tree"] > 0 and served[0]["speedup_modes"] > 0
    made = ({"shape": "tiny", **row} for row in (*rows, *joint, *served))
    cells, _ = report(tmp_path, made, capsys)
    heads = [line for line in cells if line[0] == "shape"]
    assert [heads[0][-1], heads[1][-3]] == ["over bound", "joint over replay"]
    assert "host share tree" in heads[2] and len(cells) == 2 * 3 + 8 + 2 + 1


def test_rows_are_timed_on_tokens_of_their_own(monkeypatch):
    """In a model with experts equal rows would choose the same ones."""
    target, drafter = models.random_target("tiny", CPU), models.random_drafter("tiny", CPU)
    decoder = batches._decoder(target, drafter, as_tree("chain-2"), 3, 64)
    asked, admit = [], decoder.admit
    monkeypatch.setattr(
        decoder, "admit", lambda request: (asked.append(request.prompt_ids), admit(request))[1]
    )
    batches._decoded(decoder, 8, 4)
    assert [len(set(tokens)) for tokens in zip(*asked, strict=True)] == [3] * 8
    steps.launcher(decoder, 8)
    for tensor in (decoder.worker.state.root, decoder.worker.state.seed):
        assert len(tensor.unique()) == 3
    read = calls._tokens(target, 5, 7)
    assert all(len(set(tokens)) == 5 for tokens in read.T.tolist())
    assert all(len(set(tokens)) == 7 for tokens in read.tolist())
