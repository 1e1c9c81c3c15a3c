"""The benchmarks measure something, say what made it, and refuse to when a test is red."""

import itertools
import json
import re
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bench_reports import CPU, TAIL, TINY
from families import FAMILIES, random_reference
from torch import nn

from stree import Decoder
from stree.common.errors import CannotWrite, InvariantBroken, OutOfMemory, UsageError
from stree.models.layers.mlp import Experts
from stree.trees.token_tree import as_tree
from stree_lab import (
    bench_cpu,
    bench_decode,
    bench_kernels,
    bench_report,
    bench_training,
    paper_tables,
)
from stree_lab.benches import batches, calls, command, floor, models, steps, timing
from stree_lab.benches.buffers import OpCall
from stree_lab.papers import order_bench as orders
from stree_pipelines.resources import estimates
from stree_pipelines.resources.estimates import num_parameters


@pytest.mark.costly
@torch.no_grad()
def test_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_decode, "ORDER_NODES", [5])
    options = SimpleNamespace(
        what=["orders", "calls", "draft", "copied", "unrolled", "beams", "memory", "offloaded"],
        nodes=[1, 3, 5, 16], context=8, repeats=2, drafters=["own", "head=16+rank=4"],
        trees=["paper", "beam-3-6-7", "dyspec-2-3-6"],
    )
    rows = [
        *bench_kernels.measure("tiny", [1, 5], 8, 2, 2, CPU),
        *bench_decode.measure("tiny", options, CPU),
    ]
    timing.write_rows(tmp_path / "rows.jsonl", rows, CPU)
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [line.get("op", line.get("what")) for line in lines] == [
        *bench_kernels.OPS, *bench_kernels.OPS, *("orders",) * 4, *("target call",) * 4,
        *("unrolled",) * 5, "memory", *("offloaded call",) * 4,
        *(("draft",) * 3 + ("copied",) * 3 + ("beams",) * 12) * 2,
    ]
    drafts = [line for line in lines if line.get("what") == "draft"]
    of_each = [(each.get("drafter"), each.get("tree"), each["num_nodes"]) for each in drafts]
    assert of_each == [(kind, tree, size) for kind in (None, "head=16+rank=4")
                       for tree, size in ((None, 13), ("beam-3-6-7", 7), ("dyspec-2-3-6", 6))]
    assert all(("us_growth" in each) == ("tree" in each) for each in drafts)
    for line in lines:
        assert line["environment"]["device"].startswith("CPU")
        times = [value for value in line.values() if isinstance(value, dict) and "median" in value]
        assert times or line.get("what") == "memory"
        assert all(0 < each["p20"] <= each["median"] <= each["p80"] for each in times)
    (memory,) = (line for line in lines if line.get("what") == "memory")
    kept = memory["kept_bytes"] / memory["state_bytes"]
    assert memory["over_a_state_a_node"] == pytest.approx(kept / 64)
    assert memory["kept_bytes_joint"] - memory["kept_bytes"] == TAIL
    beams = [line for line in lines if line.get("what") == "beams"]
    largest = beams[-1]
    assert (largest["num_beams"], largest["num_steps"], largest["num_nodes"]) == (5, 16, 81)
    # All but the first of a level are leaves, and all of the last
    assert largest["leaves"] == 15 * 4 + 5
    assert largest["cache_bytes_unrolled"] > 10 * largest["cache_bytes_tree"]
    assert largest["weight_bytes"] > 2 * num_parameters(
        models.OWN_SHAPES["tiny"]
    )  # some stay in fp32


@pytest.mark.costly
@torch.no_grad()
def test_kernels_are_timed_beside_their_twins(monkeypatch):
    """The ways that a GPU has are timed, without the optional package of single updates."""
    monkeypatch.setattr(OpCall, "fused", True)
    monkeypatch.setattr(bench_kernels, "side_by_side", lambda functions, *_: {
        name: {"median": 8.0} for name, call in functions.items() if call() is not NotImplemented
    })
    rows = bench_kernels.measure("tiny", [3], 8, 2, 1, CPU)
    ways = {row["op"]: {name for name in row if name.startswith("us_")} for row in rows}
    both, steps = {"us_naive", "us_fused"}, {"us_multi_step"}
    more = {"mamba_tree": steps | {"us_updates", "us_chunk_scan"}, "gated_delta_tree": steps}
    assert ways == {
        op: both | more.get(op, set()) for op in bench_kernels.OPS
    }
    rows = bench_kernels.measure("tiny", [3], 8, 2, 1, CPU, [1, 4])
    of_batches = [(row["op"], row["batch"]) for row in rows if row["batch"] > 1]
    assert of_batches == [("mamba_tree", 4)]


def test_a_peak_counts_what_a_call_adds(monkeypatch):
    """A field has the held bytes and the most that the second call has beyond those before it."""
    assert timing.peak_field("peak_bytes", lambda: pytest.fail("not counted"), CPU, 10) == {}
    counted, ran = {"memory_allocated": 30, "max_memory_allocated": 75}, []
    for name in ("empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: ran.append("reset"))
    for name, value in counted.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    found = timing.peak_field("peak", lambda: ran.append("call"), torch.device("cuda"), 10)
    assert found == {"peak": 10 + 75 - 30} and ran == ["call", "reset", "call"]


def test_bytes_of_a_cache_without_keys():
    """The estimated bytes are those of the tensors."""
    config = models.OWN_SHAPES["tiny"].replace(attn_layers=())
    cache = models.random_model(config, CPU).new_cache(20, 13)
    held = sum(layer.history.nbytes + layer.state.nbytes for layer in cache.layers)
    assert calls.cache_bytes(cache) == estimates.cache_bytes(config, 20, 13, torch.bfloat16) == held


@pytest.mark.costly
@torch.no_grad()
def test_drafts_by_the_length_of_the_context(tmp_path, monkeypatch, capsys):
    """A Transformer's cache grows with the context, a Mamba-2's does not; no target is made."""
    monkeypatch.setattr(bench_decode, "random_target", lambda *_: pytest.fail("it takes time"))
    options = SimpleNamespace(
        what=["draft_lengths"], lengths=[8, 40], context=8, repeats=2,
        drafters=["own", "attention"], trees=["beam-1-3-4", "beam-2-3-6"],
    )
    rows = list(bench_decode.measure("tiny", options, CPU))
    assert [(row["context"], row["drafter"], row["tree"], row["level_nodes"]) for row in rows] == [
        (length, kind, tree, width) for length in (8, 40) for kind in ("own", "attention")
        for tree, width in (("beam-1-3-4", 1), ("beam-2-3-6", 2))
    ]
    assert all(3 * row["us_level"] == pytest.approx(row["us_draft"]["median"]) for row in rows)
    bytes_of = {
        (row["drafter"], row["level_nodes"], row["context"]): row["cache_bytes"] for row in rows
    }
    of_a_token = 2 * 2 * 1 * 16 * 2  # keys and values, layers, heads, channels, bf16
    for width in (1, 2):
        assert bytes_of["own", width, 8] == bytes_of["own", width, 40]
        more = bytes_of["attention", width, 40] - bytes_of["attention", width, 8]
        assert more == 32 * of_a_token
    state, rows_of_one = 2 * 2 * 16 * 16 * 4, 2 * (3 + 4) * TINY.num_kept * 2
    assert bytes_of["own", 1, 8] == state + 2 * rows_of_one  # two layers
    for row in rows:
        row["cache_bytes"] *= 1024  # to be seen in MiB
    timing.write_rows(tmp_path / "rows.jsonl", ({"shape": "tiny", **row} for row in rows), CPU)
    capsys.readouterr()
    bench_report.main([str(tmp_path)])
    said = capsys.readouterr().out
    (line,) = re.findall(r"\| tiny +\| attention +\| beam-2-3-6 +\| 2 +\| 40 .*", said)
    assert f"{bytes_of['attention', 2, 40] / 1024:.2f}" in line
    figures = {path.stem for path in tmp_path.glob("*.svg")}
    assert figures == {"drafts_vs_length", "cache_vs_length"}
    paper_tables.main(["drafters-figure-1", "--rows", str(tmp_path)])
    (line,) = re.findall(r"\| Mamba-2, 1 a level, ours +\| cache, MiB .*", capsys.readouterr().out)
    assert line.count(f"{bytes_of['own', 1, 8] / 1024:.2f}") == 2


@pytest.mark.costly
def test_attention_by_the_order_of_nodes(monkeypatch):
    """Attention is timed by the twin, or by the kernel with and without skipping."""
    monkeypatch.setattr(orders, "LAYERS", 1)
    plain = list(orders.orders([40, 3], 1, CPU, (2, 1, 16)))
    assert [(row["num_nodes"], row["order"]) for row in plain] == [
        (size, name) for size in (40, 3) for name in (*orders.ORDERS, "by level")
    ]
    ways = ("naive", "manual", "xformers")
    assert all(row[f"us_{way}"]["median"] > 0 for row in plain for way in ways)
    assert all(1 <= row["blocks"] <= row["all_blocks"] for row in plain)
    monkeypatch.setattr(OpCall, "fused", True)
    monkeypatch.setattr(orders, "side_by_side", lambda *a: {
        name: {"median": 8.0 * orders.LAYERS} for name, run in a[0].items() if run()
    })
    monkeypatch.setattr(orders, "ORDERS", {"heavy path": orders.heavy_path})
    heavy, level = orders.orders([40], 1, CPU, (2, 1, 16))
    assert heavy["us_dense"]["median"] == heavy["us_sparse"]["median"] == 8.0
    assert heavy["blocks_read"] <= level["blocks_read"] <= level["blocks_below"]


@pytest.mark.costly
def test_decoding_on_a_cpu_beside_transformers(tmp_path):
    """Equal weights give equal tokens in both layouts, and rows have ratios by turn."""
    shape = SimpleNamespace(
        layouts=bench_cpu.LAYOUTS, width=64, layers=2, vocabulary=97, context=5, new_tokens=7,
        repeats=2,
    )
    for layout in shape.layouts:
        theirs, ours = bench_cpu.same_weights(layout, shape)
        prompt = bench_cpu._tokens(shape)
        tokens = Decoder(ours).generate(prompt, max_new_tokens=7, ignore_eos=True).tokens
        with torch.no_grad():  # its own steps with a cache go astray from this for Mamba-2
            logits = theirs(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert tokens == logits.argmax(-1).tolist()
    timing.write_rows(tmp_path / "rows.jsonl", bench_cpu.measure(shape), CPU)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["layout"], row["what"]) for row in rows] == [
        (layout, what) for layout in shape.layouts for what in ("plain", "tree")
    ]
    for row in rows:
        times = [each for each in row.values() if isinstance(each, dict) and "median" in each]
        assert len(times) == 3
        assert all(0 < each["p20"] <= each["median"] <= each["p80"] for each in times)
    for row in rows:
        ratio = row["over_transformers" if row["what"] == "plain" else "tree_over_step"]
        assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
    assert all(row["nodes"] == 13 for row in rows[1::2])


def test_a_ratio_is_paired_by_turn():
    """The ratio does not waver where the machine is busy in some turns for both."""
    busy = [1.0, 9.0, 1.0, 4.0, 2.0, 7.0]
    ratio = timing.ratio_by_turn([3 * each for each in busy], busy)
    assert ratio == dict.fromkeys(("median", "p20", "p80", "low", "high"), 3.0)
    wavering = timing.ratio_by_turn([1.0, 2.0, 3.0, 4.0], [1.0] * 4)
    assert 1 <= wavering["low"] < wavering["median"] == 2.5 < wavering["high"] <= 4
    assert "low" not in timing.ratio_by_turn([2.0], [1.0])


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [("--layouts", "[gpt]", "wanted some of llama, mamba2"), ("--width", "65", "a multiple of 64")],
)
def test_the_cpu_benchmark_refuses(option, value, wanted, tmp_path):
    with pytest.raises(UsageError, match=wanted):
        bench_cpu.main([str(tmp_path / "rows.jsonl"), option, value])


@pytest.fixture
def tiny_published(monkeypatch):
    """A tiny model of each family in the place of the published ones."""
    tiny = {
        name: json.loads(random_reference(name, seed=0).config.to_json_string())
        for name in FAMILIES
    }
    monkeypatch.setattr(models, "PUBLISHED", tiny)
    monkeypatch.setitem(models.DRAFTERS, "8b", models.DRAFTERS["tiny"])
    monkeypatch.setitem(models.OWN_SHAPES, "8b", models.OWN_SHAPES["tiny"])
    return tiny


@pytest.mark.costly
@pytest.mark.parametrize(
    ("names", "what"),
    [
        (list(FAMILIES), ["calls"]), (["granite"], ["calls", "draft", "steps"]),
        pytest.param(list(FAMILIES), ["calls", "draft", "steps"], marks=pytest.mark.long),
    ],
)
def test_families_are_measured_one_after_the_other(
    names, what, tiny_published, captured_on_cpu, tmp_path, monkeypatch
):
    monkeypatch.setattr(bench_decode, "SHAPES", tuple(tiny_published))
    monkeypatch.setattr(command, "require_green", lambda tests: None)
    monkeypatch.setattr(bench_decode, "CAPTURED", ())
    bench_decode.main([
        str(tmp_path / "rows.jsonl"), "--shape", ",".join(names), "--device", "cpu",
        "--what", f"[{','.join(what)}]", "--nodes", "[1,4]", "--taus", "[2]", "--context", "4",
        "--repeats", "1", "--num_steps", "2",
        *(("--target_dtypes", "[bfloat16,float8]") if names == ["granite"] else ()),
    ])
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert not any("drafter" in line for line in lines)
    if names == ["granite"]:
        half = len(lines) // 2
        dtypes = [line.pop("target_dtype", None) for line in lines]
        assert dtypes == [None] * half + ["float8"] * half
        del lines[half:]
    rows_of = {"calls": ["target call"] * 2, "draft": ["draft"], "steps": ["step"]}
    assert [(line["shape"], line["what"]) for line in lines] == [
        (name, row) for name in names for each in what for row in rows_of[each]
    ]
    assert all(line["tau"] == 2 for line in lines if line["what"] == "step")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_floor_reads_every_weight_that_a_call_reads(tiny_published, name):
    model = models.random_target(name, CPU)
    head = model.head_weight.numel()
    read = 0 if model.config.num_shared_blocks else head * model.config.tie_embeddings
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.out_features > 1:  # but for gates of one number
            read += module.weight.numel()
        elif isinstance(module, Experts):
            read += module.up.numel() + module.down.numel()
    if model.config.num_shared_blocks:  # of which each use reads them again
        uses = [block.shared for layer in model.model.layers for block in layer.blocks]
        own = (each for each in model.model.layers.modules() if isinstance(each, nn.Linear))
        read = head + sum(each.weight.numel() for each in own) + sum(
            each.weight.numel() for used in uses if used is not None
            for each in model.model.shared[used].modules() if isinstance(each, nn.Linear)
        )
    sizes = floor.product_sizes(model, 1000)
    assert sum(rows * columns for rows, columns in sizes) == read
    one_token = sum(rows * columns for rows, columns in floor.product_sizes(model, 1))
    assert (one_token < read) == (model.config.num_experts > 0)


def test_experts_that_tokens_choose_at_random():
    config = models.target_config("granite-4.0-h-tiny")
    torch.manual_seed(0)
    drawn = torch.rand(2000, 16, config.num_experts).topk(config.experts_per_token).indices
    distinct = [len(set(tokens.flatten().tolist())) for tokens in drawn]
    assert floor.chosen_experts(config, 16) == pytest.approx(np.mean(distinct), rel=0.01)
    assert floor.chosen_experts(config, 1) == pytest.approx(6)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("granite-4.0-h-tiny", 7), ("granite-4.0-h-small", 32), ("nemotron-h-8b", 8.1),
        ("falcon-h1-7b", 7.6), ("bamba-9b", 9.8), ("zamba2-7b", 7.4), ("qwen3.5-9b", 9),
        ("lfm2-1.2b", 1.17), ("lfm2-8b-a1b", 8.34), ("olmo-hybrid-7b", 7.43), ("mamba2-1.3b", 1.34),
        ("mamba-2.8b", 2.77), ("falcon-mamba-7b", 7.27), ("mamba2-2.7b", 2.7),
        ("mamba2-7b", 6.75), ("mamba2-13b", 13), ("mamba2-23b", 23.3),
    ],
)
def test_published_models_have_their_size(name, billions):
    parameters = num_parameters(models.target_config(name))
    assert parameters == pytest.approx(1e9 * billions, rel=0.01)
    assert models.drafter_config(name).vocab_size == models.target_config(name).vocab_size


def test_drafters_of_other_heads_depths_and_widths():
    own = models.drafter_config("8b")
    other = models.drafter_config("8b", "head=32768+rank=256+layers=3+width=1536")
    assert (other.head_size, other.head_rank, other.num_layers) == (32768, 256, 3)
    assert (other.d_inner, other.intermediate_size) == (1536, 5376)
    assert other.num_ssm_heads / other.num_x_groups == own.num_ssm_heads / own.num_x_groups
    tiny, headed = (models.random_drafter("tiny", CPU, kind) for kind in ("own", "head=16+rank=4"))
    width = tiny.config.d_model
    less = calls.level_bytes(tiny) - calls.level_bytes(headed)
    assert less == 2 * (64 * width - 4 * width - 16 * 4)  # bf16
    for same in ("own+head_dtype=float8", "head_dtype=float8"):
        eighth = models.random_drafter("tiny", CPU, same)
        assert eighth.config == tiny.config
        assert calls.level_bytes(tiny) - calls.level_bytes(eighth) == 64 * (width - 4)  # and scales
    assert models.random_drafter("tiny", CPU, "head=16+head_dtype=float8").head_in_8_bits
    attends = models.drafter_config("8b", "attention+layers=3+width=512")
    assert attends.attn_layers == (0, 1, 2) and attends.intermediate_size == 1792
    assert (attends.num_heads, attends.num_kv_heads, attends.head_dim) == (4, 1, 128)
    assert tiny.head_in_8_bits is None
    for kind, said in (
        ("head_dtype=float8+head_dtype=float8", "head_dtype=float8 joined by"),
        ("attention+attention", "attention and head_dtype=float8 joined by"),
        ("heads=3", "is not own, or some of"), ("head=3+head=4", "is not own"),
        ("width=100", "num_ssm_heads = 0.78125: choose a multiple of 128"),
        ("head=200000", "head_vocab_size is 200000, it must be"),
        ("mtp+layers=3", "or mtp or eagle with head, rank or head_dtype=float8"),
        ("eagle+mtp", "or mtp or eagle with head"),
    ):
        with pytest.raises(UsageError, match=said):
            models.drafter_config("8b", kind)


def test_random_weights_have_a_loaded_models_types(tiny_published):
    dtypes: dict[str, set] = {}
    for name, tensor in models.random_target("qwen3_5", CPU).named_parameters():
        dtypes.setdefault(name.split(".")[-2], set()).add(tensor.dtype)
    assert dtypes["post_attention_layernorm"] == {torch.float32}  # 1 + w
    assert dtypes["gated_delta"] == {torch.float32} and dtypes["o_proj"] == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["mtp", "eagle"])
def test_a_head_of_the_target_drafts(tiny_published, captured_on_cpu, kind):
    head = models.random_drafter("qwen3_5", CPU, f"{kind}+head=16+head_dtype=float8")
    assert head.config.fused_inputs != head.config.eagle_inputs and head.config.head_size == 16
    (row,) = calls.draft(head, ["chain-2"], 8, 2)
    assert row["num_levels"] == 2 and row["us_draft"]["median"] > 0
    width = head.config.d_model
    read = width if kind == "mtp" else 2 * width  # of the first product
    assert floor.product_sizes(head, 1)[0][1] == read
    target, trees = models.random_target("qwen3_5", CPU), map(as_tree, ("chain-2", "beam-3-3-8"))
    rows = list(batches.steps_of_rows(target, head, list(trees), [1, 2], 8, 2, [0.0, 1.0]))
    assert [(row["num_nodes"], row["temperature"]) for row in rows] == [
        (nodes, temperature) for nodes in (1, 3, 8) for temperature in (0.0, 1.0)
    ] * 2


def test_steps_accept_what_they_are_told(captured_on_cpu, monkeypatch):
    target = models.random_target("tiny", CPU)
    drafter = models.random_drafter("tiny", CPU)
    rows = list(steps.decode_at(target, drafter, [1.0, 1.7, 5.0], 8, 20, 1))
    told = [np.mean(steps.accepted_for(tau, 4)) + 1 for tau in (1.0, 1.7, 5.0)]
    assert [row["tau"] for row in rows] == pytest.approx(told, abs=0.1)
    for row in rows:
        speedup = row["tau"] * row["us_plain"]["median"] / row["us_tree"]["median"]
        assert row["speedup"] == pytest.approx(speedup)


def test_accepted_numbers_have_the_mean_asked_for():
    for tau in (1.0, 1.3, 2.5, 4.99, 5.0):
        accepted = steps.accepted_for(tau, 4)
        assert len(accepted) == 20 and np.mean(accepted) == pytest.approx(tau - 1, abs=0.051)
        assert max(accepted) - min(accepted) <= 1


BENCHMARKS = {  # with options that a CPU can measure
    bench_decode: ("--what", "[calls]"), bench_kernels: (), bench_training: ()
}


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Return a call of a benchmark on the CPU, which must not come as far as its tests."""
    monkeypatch.setattr(command, "require_green", lambda tests: pytest.fail("it has begun"))

    def run(benchmark, *options, out=tmp_path / "out.jsonl"):
        tiny = ("--shape", "tiny", "--device", "cpu", *BENCHMARKS[benchmark])
        benchmark.main([str(out), *tiny, *options])

    return run


@pytest.mark.parametrize("benchmark", BENCHMARKS)
@pytest.mark.parametrize(
    "options",
    [
        ("--device", "nope"), ("--device", "meta"), ("--shape", "nope"), ("--what", "[]"),
        ("--what", "[nope]"), ("--what", "[steps]"), ("--nodes", "[]"), ("--nodes", "[0]"),
        ("--nodes", "[3000]"), ("--context", "-5"), ("--lengths", "[0]"), ("--repeats", "0"),
        ("--what", "[orders]", "--shape", "mamba2-2.7b"), ("--trees", "[]"), ("--drafters", "[]"),
        ("--processes", "[]"), ("--processes", "[0]"), ("--batch_size", "0"),
        ("--sequence_length", "-5"),
        ("--steps", "2"), ("--strategies", "[nope]"), ("--more", "[--trainer.max_steps=2]"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(benchmark, options, measured, tmp_path):
    with pytest.raises((UsageError, SystemExit)) as refused:
        measured(benchmark, *options)
    assert getattr(refused.value, "code", 2) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (("--what", "[profiles]", "--nodes", "[5]"), "profiles are of 1, 16, 64 nodes"),
        (("--what", "[steps]", "--taus", "[0.5]"), "--taus: wanted numbers of at least 1"),
        (("--what", "[parts]", "--shape", "tiny"), "leave out tiny"),
        (("--what", "[calls]", "--taus", "[0.5]"), None),
    ],
)
def test_what_a_gpu_would_measure_is_checked_where_it_is_wanted(options, refused, tmp_path):
    given = bench_decode.build_parser().parse_args([str(tmp_path / "out.jsonl"), *options])
    with pytest.raises(UsageError, match=refused) if refused else nullcontext():
        bench_decode.require_possible(["tiny"], given, torch.device("cuda"))


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_results_that_could_not_be_written_are_refused_first(benchmark, measured, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match="cannot write in"):
        measured(benchmark, out=tmp_path / "file" / "out.jsonl")
    with pytest.raises(CannotWrite, match="is a folder: name a file in it"):
        measured(benchmark, out=tmp_path)


def test_memory_that_does_not_suffice_says_what_to_do(measured, monkeypatch):
    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")
        yield

    monkeypatch.setattr(command, "require_green", lambda tests: None)
    monkeypatch.setattr(bench_decode, "measure", no_memory)
    with pytest.raises(OutOfMemory, match=r"CUDA out of memory.; fewer .* need less"):
        measured(bench_decode)


def test_a_run_is_measured_once():
    runs = bench_training._runs(["ddp", "ddp"], [1, 2, 2])
    assert runs == [("auto", 1), ("ddp", 2)]


def test_no_number_when_red(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_red.py").write_text("def test_red():\n    assert 1 == 2\n")
    (tmp_path / "tests" / "test_green.py").write_text("def test_green(): ...\n")
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "NUM_WORKERS", 1)
    command.require_green(["test_green.py"])
    with pytest.raises(InvariantBroken, match="red"):
        command.require_green(["test_green.py", "test_red.py"])


def test_each_benchmark_names_tests_that_are_there():
    of_training = itertools.chain(*bench_training.TESTS.values())
    named = {*bench_decode.TESTS, *bench_kernels.TESTS, *of_training}
    assert len(named) > 8
    assert [each for each in named if not (command.ROOT / "tests" / each).exists()] == []


@pytest.mark.costly
def test_prompts_by_graphs_and_by_operations(captured_on_cpu, tmp_path, capsys):
    rows = list(calls.prompts(models.random_target("tiny", CPU), [3, 20], 2))
    assert [row["num_tokens"] for row in rows] == [3, 20]
    timing.write_rows(tmp_path / "rows.jsonl", [{"shape": "tiny", **row} for row in rows], CPU)
    bench_report.main([str(tmp_path)])
    assert "us operations | speedup" in capsys.readouterr().out
