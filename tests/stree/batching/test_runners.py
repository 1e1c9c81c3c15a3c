"""Steps as graphs give what steps one operation after the other give, with the fused kernels, too.

Graphs and events need CUDA, so here a captured function simply runs whenever it is replayed, and
the kernels run in Triton's interpreter.
"""

import gc
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
from captures import Event, living_captures, nothing_waits
from eager import assert_same, by_fused_kernels, by_graphs, without_graphs
from lanes import quick_first
from toys import mixed_requests, reading, recurrent, right_now_and_then, tiny_model

from stree import BatchDecoder, Decoder, GenerationConfig, Request, TokenTree
from stree.batching.prefillers import ChunkedPrefill, PrefillGraph, PromptCall
from stree.batching.runners import GraphRunner
from stree.common.errors import InvariantBroken
from stree.drafters.ngram import NGram
from stree.engine.worker import Worker
from stree.models.hidden_states import HiddenStateTap
from stree.trees.token_tree import balanced
from stree_kernels import ops

TREES = [TokenTree.chain(0), TokenTree.chain(3), TokenTree.paper(), balanced([3, 2])]

MAX_KEPT = 4  # fewer than there are, so that it takes no time


@pytest.mark.parametrize(
    "num_rows, verifier",
    quick_first(
        [(5, "coupled")],
        [(num_rows, verifier) for verifier in ("coupled", "multi_step", "naive", "traversal")
         for num_rows in (1, 5)],
        [(1, "traversal")],
    ),
)
def test_graphs_give_what_eager_steps_give(num_rows, verifier, captured_on_cpu, monkeypatch):
    target, served = tiny_model(1), mixed_requests(8, TREES, seed=1)
    options = dict(num_rows=num_rows, max_nodes=13, verifier=verifier)
    outputs = by_graphs(monkeypatch, served, target, right_now_and_then(target), **options)
    assert len({each for out in outputs for each in out.stats.accepted_per_call}) > 2


def test_a_warm_up_captures_steps_of_few_sizes_which_serve_any_number_of_rows(captured_on_cpu):
    target, settings = tiny_model(1), GenerationConfig(4, temperature=1.0, ignore_eos=True)
    decoder = BatchDecoder(
        target, right_now_and_then(target), TokenTree.chain(3), num_rows=5, max_length=64
    )
    runner = decoder.worker.runner
    decoder.warm_up(Request([1, 2, 3], settings))
    captured = set(runner.captured)
    assert {num_rows for num_rows, *_ in captured} == {1, 2, 4, 5}
    for count in range(1, 6):
        decoder.generate([Request([7, each], settings) for each in range(count)])
    assert runner.captured == captured


@pytest.mark.costly
def test_rows_go_on_before_the_host_knows_what_others_begin_with(captured_on_cpu, monkeypatch):
    """A row decodes in the step after its prompt without a value from the device."""
    target, served = tiny_model(1), mixed_requests(8, TREES, seed=1)
    served.append(Request([3, 4], GenerationConfig(1)))  # ends with its first token
    drafter = right_now_and_then(target)

    def decoder():
        return BatchDecoder(target, drafter, num_rows=3, max_length=64, max_nodes=13)

    alone = without_graphs(monkeypatch, lambda: decoder().generate(served))
    monkeypatch.setattr(Event, "is_there", False)
    batch, execute = decoder(), Worker.execute
    alone_in_plan = []

    def execute_without_waiting(self, plan):
        alone_in_plan.extend([not plan.trees] * len(plan.reads))
        with nothing_waits() if plan.trees else nullcontext():
            execute(self, plan)

    monkeypatch.setattr(Worker, "execute", execute_without_waiting)
    assert_same(batch.generate(served), alone)
    assert sorted(alone_in_plan) == [False] * 6 + [True] * 3


def test_a_prompt_after_which_logits_are_bad_ends_with_its_error(captured_on_cpu, monkeypatch):
    monkeypatch.setattr(Event, "is_there", False)
    target = tiny_model(1)
    with torch.no_grad():
        target.model.embed_tokens.weight[60] = torch.nan
        target.lm_head.weight[60] = 0
    decoder = BatchDecoder(target, num_rows=2, max_length=64)
    good = decoder.admit(Request([5, 6], GenerationConfig(12, ignore_eos=True)))
    reports = decoder.step()
    bad = decoder.admit(Request([60], GenerationConfig(12)))
    while not any(each.finish_reason for each in reports if each.row == good):
        reports += decoder.step()
    (failed,) = [each for each in reports if each.row == bad]
    assert failed.finish_reason == "error" and isinstance(failed.error, InvariantBroken)
    assert sum(len(each.tokens) for each in reports if each.row == good) == 12
    assert decoder.release(bad).tokens == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("tree", "temperature", "verifier"),
    [(None, 0.0, "coupled"),
     *((None, 1.0, each) for each in ("coupled", "naive", "multi_step", "traversal")),
     *(("beam-3-3-9", temperature, "coupled") for temperature in (0.0, 1.0))],
)
def test_steps_of_fused_kernels_give_the_same_tokens(
    tree, temperature, verifier, monkeypatch, captured_on_cpu
):
    target = tiny_model(1, torch.float32, num_layers=2)
    drafter = right_now_and_then(target)
    served = [
        Request([5, 6, 7], GenerationConfig(5, temperature=temperature, seed=3), tree or TREES[3]),
        Request([9] * 4, GenerationConfig(4, temperature=temperature, seed=4), tree or TREES[1]),
    ]
    accepted = by_fused_kernels(monkeypatch, served, target, drafter, tree, verifier=verifier)
    assert len(set(accepted)) > 1


@pytest.mark.parametrize("longest", [8, 32])
@pytest.mark.parametrize("captured", [True, False])
def test_prompts_read_by_graphs_are_as_read_without(
    captured, longest, captured_on_cpu, monkeypatch
):
    """A chunk may be padded, end behind the last slot, and follow a path that is pending."""
    monkeypatch.setattr("stree.batching.prefillers.LONGEST_CHUNK", longest)
    model = tiny_model(1, num_layers=4, attn_layers=(1, 3))
    decoder = BatchDecoder(model, model, num_rows=3, max_length=64, max_nodes=4)
    prefiller = decoder.worker.runner.prefiller if captured else ChunkedPrefill(PromptCall)
    cache, wanted = decoder.cache, model.new_cache(64, 4)
    cache.variant.zero_()  # one tree for all
    draw = torch.Generator().manual_seed(2)
    for turn, count in enumerate((5, 21, 3, 12, 2, 17)):
        tokens = torch.randint(61, (1, count), generator=draw)
        inputs = torch.randn(1, count, model.config.d_model, generator=draw, dtype=model.dtype)
        inputs = inputs if turn % 2 else None
        mine, theirs = HiddenStateTap([0, 2]), HiddenStateTap([0, 2])
        logits = model.prefill(tokens, wanted, features=theirs, inputs=inputs)
        given = (tokens[0], mine, None if inputs is None else inputs[0])
        with torch.inference_mode(turn % 3 == 0):
            got = prefiller.read_row(model, cache, 1, *given)
        torch.testing.assert_close(got, logits, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(mine.values, theirs.values, rtol=1e-9, atol=1e-12)
        if turn == 1:  # a tree's path is accepted in between
            for each in (cache.at(1), wanted):
                model.tree_forward(tokens[:, :3], TokenTree((-1, 0, 0)), each)
                each.commit([0, 2])
    sizes = {8: {2, 4, 8}, 32: {2, 4, 8, 16, 32}}[longest]
    assert {(graph.size, bound) for (_, _, _, bound, *_), graph in prefiller.graphs.items()} == {
        (size, cache.num_slots) for size in sizes
    }
    assert cache.narrow(1, 1).save().length == 62
    assert cache.length.tolist() == [0, 62, 0]
    for got, each in zip(cache.narrow(1, 1).save().parts, wanted.save().parts, strict=True):
        torch.testing.assert_close(got, each, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("drafter", ["model", "grafted", "features"])
def test_prompts_have_all_of_their_graphs_beforehand(drafter, captured_on_cpu):
    """Graphs of drafters are captured, too; nothing in any is recorded for a gradient."""
    target = tiny_model(1)
    model = right_now_and_then(target)
    made = {"model": model, "grafted": NGram(2, model=model), "features": reading(target)}
    decoder = BatchDecoder(target, made[drafter], TREES[1], num_rows=1, max_length=80)
    decoder.admit(Request([5, 3, 9] * 6, GenerationConfig(6, ignore_eos=True)))
    decoder.prepare()
    graphs = decoder.worker.runner.prefiller.graphs
    ready = set(graphs)
    assert not any(given.requires_grad for graph in graphs.values() for given in graph.given)
    decoder.step()
    assert set(graphs) == ready


def test_a_piece_that_does_not_fit_is_made_anew(captured_on_cpu, monkeypatch):
    """Its drafter's part fails: nothing half made is kept."""
    target = tiny_model(1)
    decoder = BatchDecoder(target, target, TREES[1], num_rows=1, max_length=80)
    add = PrefillGraph.add_drafter
    monkeypatch.setattr(PrefillGraph, "add_drafter", lambda *told: 1 / 0)
    request = Request([5, 3, 9] * 6, GenerationConfig(6, ignore_eos=True))
    with pytest.raises(ZeroDivisionError):
        decoder.generate([request])
    monkeypatch.setattr(PrefillGraph, "add_drafter", add)
    plain = Decoder(target, max_length=80).generate(request.prompt_ids, request.generation)
    assert decoder.generate([request])[0].tokens == plain.tokens


def test_what_was_read_before_is_no_matter_though_it_was_not_finite(captured_on_cpu):
    """A chunk's buffers hold an earlier prompt's end, in place of what is no token."""
    target, drafter = recurrent(own=False)
    target.model.embed_tokens.weight.data[60] = torch.nan
    decoder = BatchDecoder(target, drafter, TREES[1], num_rows=1, max_length=40)
    generation = GenerationConfig(8, ignore_eos=True)
    with pytest.raises(InvariantBroken, match="finite"):
        decoder.generate([Request([*range(1, 10), 60, 60, 7], generation)])
    for prompt in (range(1, 10), range(1, 5)):
        got = decoder.generate([Request(list(prompt), generation)])[0]
        wanted = BatchDecoder(target, num_rows=1, max_length=40).generate(
            [Request(list(prompt), generation)]
        )
        assert got.tokens == wanted[0].tokens


def test_a_decoder_that_is_dropped_frees_its_caches_at_once(captured_on_cpu):
    """Nothing that a decoder has points back at it."""
    target = tiny_model(1)
    decoder = BatchDecoder(target, right_now_and_then(target), TREES[1], num_rows=1, max_length=40)
    caches = [weakref.ref(each) for each in (decoder.cache, decoder.drafter.cache)]
    gc.disable()
    try:
        del decoder
        assert [cache() for cache in caches] == [None, None]
    finally:
        gc.enable()


def test_what_is_not_finite_is_reported(captured_on_cpu):
    target = tiny_model(1)
    decoder = BatchDecoder(target, num_rows=1, max_length=16)
    row = decoder.admit(Request([1, 2], GenerationConfig(8)))
    decoder.step()
    target.model.norm.weight.data[0] = torch.nan
    (report,) = decoder.step()
    assert report.finish_reason == "error" and "weights" in str(report.error)
    decoder.release(row)


def test_rehearsals_change_nothing_of_rows_that_decode(captured_on_cpu):
    """Other step graphs are captured while a sequence is under way, with a path to replay."""
    target = tiny_model(1)
    drafter, generation = right_now_and_then(target), GenerationConfig(20)
    alone = Decoder(target, drafter, TREES[2], max_length=64).generate([3, 1], generation)
    decoder = BatchDecoder(target, drafter, TREES[2], num_rows=4, max_length=64)
    first = decoder.admit(Request([3, 1], generation))
    outputs = {}
    for turn in range(60):
        if turn in (4, 6, 7):
            decoder.admit(Request([turn], GenerationConfig(9, temperature=turn % 2, seed=0)))
        for report in decoder.step():
            if report.finish_reason:
                outputs[report.row] = decoder.release(report.row)
    assert outputs[first].tokens == alone.tokens
    assert len(decoder.worker.runner.step_graphs) > 3


@pytest.mark.costly
@pytest.mark.filterwarnings("ignore:steps of this decoder")
def test_graphs_of_many_envelopes_do_not_pile_up(captured_on_cpu, monkeypatch):
    before = living_captures()
    target = tiny_model(1, num_layers=1, attn_layers=())
    monkeypatch.setattr("stree.batching.runners.MAX_KEPT", MAX_KEPT)
    decoder = BatchDecoder(target, target, num_rows=1, max_length=64, max_nodes=20)
    for depth in (*range(1, MAX_KEPT + 4), 1):
        request = Request([1, 2, 3], GenerationConfig(6), TokenTree.chain(depth))
        decoder.generate([request])
    assert len(decoder.worker.runner.step_graphs) == MAX_KEPT
    # A draft and a target call each; the prompt's, which is read by both, and what is done before
    # and after it
    assert len(living_captures() - before) == 2 * MAX_KEPT + 4
    for other in range(MAX_KEPT):
        kept = living_captures()
        decoder.generate([request])
        assert living_captures() == kept  # what is used all the time stays
        request_of_another = Request([1], GenerationConfig(3), TokenTree.chain(8 + other))
        decoder.generate([request_of_another])


def test_graphs_that_are_captured_again_are_warned_of_once(captured_on_cpu, monkeypatch):
    """Shapes that come once are no reason to warn, nor are weights that moved."""
    target = tiny_model(1, num_layers=1, attn_layers=())
    monkeypatch.setattr("stree.batching.runners.MAX_KEPT", MAX_KEPT)
    decoder = BatchDecoder(target, target, num_rows=1, max_length=64, max_nodes=20)

    def decode(depth: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            decoder.generate([Request([1, 2, 3], GenerationConfig(4), TokenTree.chain(depth))])
        return [str(each.message) for each in caught]

    assert [decode(depth) for depth in range(1, 2 * MAX_KEPT)] == [[]] * (2 * MAX_KEPT - 1)
    for weight in target.parameters():
        weight.data = weight.data.clone()
    assert decode(1) == []
    for depth in range(2, MAX_KEPT + 2):
        assert decode(depth) == []
    (warning,) = decode(1)
    assert f"more shapes than the {MAX_KEPT} whose CUDA graphs are kept" in warning
    assert decode(2) == [] and len(decoder.worker.runner.step_graphs) == MAX_KEPT


@pytest.mark.costly
def test_one_envelope_serves_all_settings_and_all_trees_of_a_shape(captured_on_cpu):
    target = tiny_model(1)
    decoder = BatchDecoder(target, target, num_rows=2, max_length=64, max_nodes=5)
    trees = [TokenTree((-1, 0, 0, 1)), TokenTree((-1, 0, 0, 2))]
    served = [
        Request([1, 2], GenerationConfig(9, temperature=temperature, seed=seed), tree)
        for temperature in (0.5, 1.0) for seed in (1, 2) for tree in trees
    ]
    outputs = [decoder.generate([each])[0].tokens for each in served]
    assert len(decoder.worker.runner.step_graphs) == 1
    for each, tokens in zip(served, outputs, strict=True):
        assert Decoder(target, max_length=64).generate([1, 2], each.generation).tokens == tokens


@pytest.mark.costly
def test_graphs_of_weights_that_moved_are_captured_again(captured_on_cpu):
    before, generation = living_captures(), GenerationConfig(6)
    target, drafter = tiny_model(1), tiny_model(2, attn_layers=())
    decoder = Decoder(target, drafter, TokenTree.chain(2))
    decoder.generate([1, 2, 3], generation)
    old = living_captures() - before
    decoder.generate([1, 2, 3], generation)
    assert living_captures() - before == old
    for model, seed in ((target, 3), (drafter, 4)):
        held = [
            weight.data for weight in model.parameters()
        ]  # or the new ones may take their place
        other = tiny_model(seed, attn_layers=model.config.attn_layers)
        for weight, new in zip(model.parameters(), other.parameters(), strict=True):
            weight.data = new.data
        got = decoder.generate([1, 2, 3], generation)
        now = living_captures() - before
        # Of the step, of a prompt by each model, and of what is done before and after it
        assert not now & old and len(now) == 6
        old = now
        assert got.tokens == Decoder(target).generate([1, 2, 3], generation).tokens
        decoder.generate([1, 2, 3], generation)
        assert living_captures() - before == now  # once
        del held


@pytest.mark.costly
def test_slots_are_looked_at_in_buckets_without_the_fused_kernels(captured_on_cpu):
    target = tiny_model(1, num_layers=2)
    decoder = Decoder(target, max_length=600)
    runner = decoder.batch.worker.runner
    assert isinstance(runner, GraphRunner) and runner.bucket == ops.BUCKET
    for length in (10, 250, 300, 10):
        prompt, generation = [7] * length, GenerationConfig(12)
        want = naive_tokens(target, prompt, 12)
        assert decoder.generate(prompt, generation).tokens == want
    assert sorted(key[-1] for key in runner.step_graphs) == [256, 512]


def naive_tokens(model, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_weights_that_moved_can_be_trained_after_they_decoded():
    """Steps on a CPU run in inference mode: what is laid out in there has no gradient any more."""
    target, other = tiny_model(1), tiny_model(2)
    decoder = Decoder(target, right_now_and_then(target), TokenTree.chain(3), max_length=64)
    target.load_state_dict(other.state_dict(), assign=True)
    out = decoder.generate([5, 6, 7], max_new_tokens=8)
    assert len(out.tokens) == 8
    batch = BatchDecoder(target, right_now_and_then(target), TokenTree.chain(3), max_length=64)
    batch.admit(Request([5, 6, 7], GenerationConfig(30)))
    batch.step()
    target.load_state_dict(tiny_model(3).state_dict(), assign=True)  # while a row decodes
    batch.step()
    assert not any(weight.is_inference() for weight in target.parameters())
    target.hidden_states(torch.tensor([[5, 6, 7]])).sum().backward()
    assert target.model.embed_tokens.weight.grad is not None
