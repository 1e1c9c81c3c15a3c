"""Evaluation on a tiny target through the real engine."""

from __future__ import annotations

import re
import shutil
from contextlib import nullcontext

import pytest
import torch
from damage import flip_last_byte
from tiny_evaluation import Lies, export, quiet, row_of, settings_for, without_timings

from stree.checkpoints.identity import checkpoint_sha256
from stree.common.errors import CheckpointRefused, InvariantBroken
from stree.decoder import Decoder
from stree_kernels import naive
from stree_pipelines.commands.eval_spec import main as eval_spec
from stree_pipelines.console.command_line import typed_command
from stree_pipelines.evaluation.answering import decoders
from stree_pipelines.evaluation.evaluate import require_lossless
from stree_pipelines.evaluation.plan import prompt_seed
from stree_pipelines.evaluation.records import Divergence
from stree_pipelines.evaluation.result_store import ResultStore
from stree_pipelines.reports.run_data import load_run

pytestmark = pytest.mark.usefixtures("one_thread")


def test_answers_with_and_without_ignore_eos_are_rows_apart_in_one_folder(world, tmp_path):
    for ignored in (True, False):
        settings = settings_for(world, tmp_path, methods=["autoregressive"], ignore_eos=ignored)
        quiet(settings).evaluate(None)
    store = ResultStore(tmp_path)
    rows = store.results()
    assert [row.ignore_eos for row in rows] == [True, False]
    assert (rows[0].num_ended, rows[0].num_cut) == (0, 5)  # prompt b has two turns
    assert rows[1].num_ended + rows[1].num_cut == 5
    assert all(len(store.samples(row)) == row.num_prompts for row in rows)


def test_autoregressive_is_the_unit(complete):
    row = row_of(complete, None, "autoregressive")
    assert row.acceptance_length == row.nodes_per_call == row.speedup == 1
    assert row.tree is None and row.verifier is None and row.checkpoint is None
    # 12 new tokens a turn, the prefill's first not counted, five turns
    samples = complete.samples(row)
    assert sum(s.num_new_tokens for s in samples) == 5 * 11
    assert row.num_prompts == 4


def test_acceptance_orders_the_drafters(complete):
    """The target as its own drafter fills every call: 11 tokens take ⌈11 / 5⌉ = 3 calls."""
    for method in ("vanilla_sd", "stree"):
        stranger, noisy, same = (
            row_of(complete, step, method).acceptance_length for step in (1, 10, 100)
        )
        assert stranger < noisy < same
        assert same == pytest.approx(11 / 3)
    assert row_of(complete, 10, "stree").nodes_per_call == 13
    assert row_of(complete, 10, "vanilla_sd").nodes_per_call == 5


def test_tokens_equal_autoregressive_ones(complete):
    """The verifier coupled samples plain decoding's tokens at every temperature."""
    for row in complete.results():
        if row.method == "autoregressive":
            assert row.lossless is None
        else:
            assert row.lossless.num_prompts == 4
            assert row.lossless.share == 1


def test_rows_are_consistent_with_their_samples(complete):
    for row in complete.results():
        samples = complete.samples(row)
        assert [s.prompt_id for s in samples] == ["a", "b", "c", "d"]
        calls = sum(s.num_calls for s in samples)
        assert row.acceptance_length == sum(s.num_new_tokens for s in samples) / calls
        assert sum(row.acceptance_histogram.values()) == calls
        step_ms = 1e3 * sum(s.decode_s for s in samples) / calls
        assert sum(row.time_ms.values()) == pytest.approx(step_ms)
        if row.step is not None:
            new = sum(s.baseline.num_new_tokens for s in samples)
            baseline = new / sum(s.baseline.decode_s for s in samples)
            assert row.speedup == pytest.approx(row.tokens_per_second / baseline)


def test_the_second_turn_sees_the_models_own_first_answer(complete, world):
    sample = complete.samples(row_of(complete, None, "autoregressive"))[1]
    first, second = sample.turns
    assert second.num_prompt_tokens > first.num_prompt_tokens + len(first.text)


def test_a_second_run_measures_nothing(complete, world):
    def refuse(*_, **__):
        raise AssertionError("a decoder was made although all rows exist")

    before = (complete.directory / "results.jsonl").read_bytes()
    settings = settings_for(world, complete.directory, temperatures=(0.0, 1.0))
    rows = quiet(settings, make_decoder=refuse).evaluate(export(world, 10))
    assert len(rows) == 6
    assert (complete.directory / "results.jsonl").read_bytes() == before


@pytest.mark.costly
def test_overwrite_measures_again_but_the_baseline_s_row_once_a_process(world, tmp_path):
    quiet(settings_for(world, tmp_path)).evaluate(export(world, 1))
    before = {row.key: row for row in ResultStore(tmp_path).results()}
    made = []

    def counting(*args, **kwargs):
        made.append(kwargs["tree"])
        return Decoder(*args, **kwargs)

    again = quiet(settings_for(world, tmp_path, overwrite=True), make_decoder=counting)
    first = again.evaluate(export(world, 1))
    second = again.evaluate(export(world, 10))
    assert made.count(None) == 1 and len(made) == 5
    after = {row.key: row for row in first}
    assert set(after) == set(before)
    assert all(after[key].tokens_per_second != before[key].tokens_per_second for key in before)
    assert second[0] == first[0]  # the autoregressive row


def test_a_damaged_drafter_has_no_rows_and_loses_none(world, tmp_path):
    """It is refused also where its rows are there and nothing would be loaded."""
    drafter = tmp_path / "step-00000001"
    shutil.copytree(export(world, 1), drafter)
    quiet(settings_for(world, tmp_path / "out")).evaluate(drafter)
    before = (tmp_path / "out/results.jsonl").read_bytes()
    flip_last_byte(drafter / "model.safetensors")
    for overwrite in (False, True):
        evaluation = quiet(settings_for(world, tmp_path / "out", overwrite=overwrite))
        with pytest.raises(CheckpointRefused, match="its bytes changed"):
            evaluation.evaluate(drafter)
        assert (tmp_path / "out/results.jsonl").read_bytes() == before


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_lossy_decoder_is_found_out_with_position_and_gap(world, tmp_path, temperature):
    settings = settings_for(world, tmp_path, limit=1, temperatures=[temperature])
    evaluation = quiet(settings, make_decoder=Lies)
    with pytest.raises(InvariantBroken, match=r"prompt a, turn 0, position 3 has token") as fault:
        evaluation.evaluate(export(world, 100))
    assert fault.value.exit_code == 70
    baseline, chain, tree = ResultStore(tmp_path).results()  # saved all the same
    for row in (chain, tree):
        assert row.lossless.share == 0
        (divergence,) = row.lossless.divergences
        assert (divergence.prompt_id, divergence.turn, divergence.position) == ("a", 0, 3)
        assert divergence.token == divergence.autoregressive_token + 1
        # The gap by hand: logits of the plain model after the prompt and three tokens, and noise.
        prompt = evaluation.decoders.prompt_ids(evaluation.benchmarks[0].prompts[0])
        tokens = ResultStore(tmp_path).samples(baseline)[0].turns[0].tokens[:3]
        with torch.no_grad():
            logits = evaluation.decoders.target(torch.tensor([[*prompt, *tokens]]))[0, -1].double()
        if temperature:
            seed = torch.tensor([prompt_seed(0, row.benchmark, "a", 0)])
            position = torch.tensor([[len(prompt) + 3]])
            logits += naive.token_noise(seed, position, len(logits))[0, 0]
        first, second = logits.topk(2).values.tolist()
        assert divergence.logit_gap == pytest.approx(first - second, abs=1e-6)
    # Rows that exist are still no good.
    with pytest.raises(InvariantBroken, match="not lossless"):
        quiet(settings).evaluate(export(world, 100))


@pytest.mark.parametrize(
    ("dtype", "gap", "token", "is_fault"),
    [
        ("float32", 9e-4, 5, False),
        ("float32", 2e-3, 5, True),
        ("float32", 0.0, None, True),  # it ended: nothing to tie with
        ("float64", 9e-4, 5, True),
        ("float64", 1e-10, 5, False),
        ("bfloat16", 1.0, 5, False),
    ],
)
def test_a_tie_of_rounding_s_size_is_no_fault(complete, dtype, gap, token, is_fault):
    row = row_of(complete, 10, "stree")
    divergence = Divergence(
        prompt_id="a", turn=0, position=2, token=token, autoregressive_token=6, logit_gap=gap
    )
    lossless = row.lossless.model_copy(update={"divergences": (divergence,)})
    environment = row.environment.model_copy(update={"dtypes": {"weights": dtype}})
    row = row.model_copy(update={"lossless": lossless, "environment": environment})
    with pytest.raises(InvariantBroken) if is_fault else nullcontext():
        require_lossless([row])


@pytest.mark.parametrize(("dtype", "state"), [("float64", "float64"), ("bfloat16", "float32")])
def test_rows_say_the_dtype_of_the_state(world, tmp_path, dtype, state):
    evaluation = quiet(settings_for(world, tmp_path, limit=1, dtype=dtype))
    row, *_ = evaluation.evaluate(None)
    assert row.environment.dtypes == {"weights": dtype, "state": state}
    assert row.environment.command_line == typed_command()
    cache = evaluation.decoders.target.new_cache(8, 1)
    held = {layer.state.dtype for layer in cache.layers if hasattr(layer, "state")}
    assert held == {getattr(torch, state)}


@pytest.mark.costly
def test_a_conversation_that_outgrows_its_room_gets_more(world, tmp_path, complete, monkeypatch):
    """An answer may come back through the tokenizer as many more tokens than it had."""
    monkeypatch.setattr(decoders.Decoders, "max_length", 1)
    rows = quiet(settings_for(world, tmp_path)).evaluate(export(world, 10))
    by_key = {row.key: row for row in complete.results()}
    assert without_timings(rows) == without_timings([by_key[row.key] for row in rows])


def test_a_checkpoint_is_all_its_files(world, tmp_path):
    shutil.copytree(export(world, 10), tmp_path / "copy")
    before = checkpoint_sha256(tmp_path / "copy")
    assert before == checkpoint_sha256(export(world, 10))
    (tmp_path / "copy/MANIFEST.json").unlink()
    assert checkpoint_sha256(tmp_path / "copy") == before
    (tmp_path / "copy/provenance.json").write_text("{}")
    (tmp_path / "copy/README.md").write_text("about")
    assert checkpoint_sha256(tmp_path / "copy") == before
    changed = {before}
    for name in ("mamba_config.json", "tokenizer.json", "chat_template.jinja", "config.json"):
        with open(tmp_path / "copy" / name, "a") as file:
            file.write(" ")
        changed.add(checkpoint_sha256(tmp_path / "copy"))
    assert len(changed) == 5


def test_another_template_under_the_same_name_is_another_decoding(world, tmp_path):
    template = tmp_path / "mine.jinja"
    hashes = set()
    for word in ("user", "human"):
        template.write_text("{% for m in messages %}" + word + ": {{ m.content }}{% endfor %}")
        settings = settings_for(world, tmp_path, chat_template=str(template))
        evaluation = quiet(settings)
        hashes.add(evaluation.plan(None)[0].decoding_hash)
    assert len(hashes) == 2


@pytest.mark.costly
@pytest.mark.parametrize("name", ["chain-2 or paper", "bandit chain-2 or paper"])
def test_a_tree_may_be_chosen_step_by_step(world, tmp_path, name, capsys):
    eval_spec([
        "--target", str(world / "target"), "--checkpoint", str(export(world, 10)), "--tree", name,
        "--benchmarks", str(world / "talk.jsonl"), "--limit", "1", "--max_new_tokens", "8",
        "--temperatures", "0", "--device", "cpu", "--ignore_eos", "--out", str(tmp_path),
    ])
    rows = {row.method: row for row in ResultStore(tmp_path).results()}
    assert rows["stree"].tree.name == name and rows["stree"].lossless.share == 1.0
    assert rows["stree"].tree_shares.keys() <= {"plain", "chain-2", "paper"}
    assert sum(rows["stree"].tree_shares.values()) == pytest.approx(1.0)
    assert rows["vanilla_sd"].tree_shares == {} and rows["vanilla_sd"].measuring_costs_s is None
    said = capsys.readouterr().err
    assert f"measuring what steps cost, plain and with {name}, at T = 0, to choose by" in said
    costs, took_s = rows["stree"].costs, rows["stree"].measuring_costs_s
    assert [each.tree.name for each in costs.trees] == ["plain", "chain-2", "paper"]
    assert all(each.seconds.keys() == {1} for each in costs.trees) and costs.temperature == 0
    assert costs.device == rows["stree"].environment.device and costs.dtype == "float32"
    assert rows["vanilla_sd"].costs is None
    assert re.search(rf"a step of 1 row: plain .* ms; measured in {took_s:.1f} s\n", said)
    (told,) = [note for note in load_run(tmp_path).notes if name in note]
    assert all(tree in told for tree in rows["stree"].tree_shares)
