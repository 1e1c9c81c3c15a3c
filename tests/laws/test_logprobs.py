"""Log-probabilities of new tokens are those of whole forwards, with every verifier and tree."""

from __future__ import annotations

import random

import oracle
import pytest
import torch
from toys import right_now_and_then, tiny_model
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from stree import BatchDecoder, Decoder, GenerationConfig, Request, TokenTree
from stree.batching.state import BatchState
from stree.drafters.ngram import NGram

KINDS = {  # verifier and tree
    "plain": ("coupled", None), "chain": ("coupled", "chain-3"), "paper": ("coupled", "paper"),
    "beam": ("coupled", "beam-3-3-9"), "dyspec": ("naive", "dyspec-3-3-9"),
    "naive": ("naive", "paper"), "multi_step": ("multi_step", "expand-3-2"),
    "block": ("block", "chain-3"), "traversal": ("traversal", "paper"),
}


def requests(count: int) -> list[Request]:
    """Make requests of all settings; every third one wants no log-probabilities."""
    rng = random.Random(4)
    return [
        Request(
            [rng.randrange(61) for _ in range(rng.randint(1, 9))],
            GenerationConfig(
                rng.randint(1, 12), float(number % 2), rng.choice([0, 9]), rng.choice([1.0, 0.8]),
                seed=number, min_p=rng.choice([0.0, 0.05]),
                repetition_penalty=rng.choice([1.0, 1.4]),
                logprobs=(None, 0, 3, 70, 5)[number % 5],
            ),
        )
        for number in range(count)
    ]


def processed(setting: GenerationConfig, tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Return logits (V,) as transformers' own processors leave them."""
    steps = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(setting.repetition_penalty)])
    if setting.temperature:
        steps.append(TemperatureLogitsWarper(setting.temperature))
        steps += [TopKLogitsWarper(setting.top_k)] if setting.top_k else []
        steps += [TopPLogitsWarper(setting.top_p)] if setting.top_p < 1 else []
        steps += [MinPLogitsWarper(setting.min_p)] if setting.min_p else []
    return steps(torch.tensor([tokens]), logits[None])[0]


def assert_of_whole_forwards(target, request: Request, output) -> None:
    setting, text = request.generation, [*request.prompt_ids, *output.tokens]
    if setting.logprobs is None:
        assert output.logprobs is None
        return
    with torch.no_grad():
        logits = target(torch.tensor([text]))[0, len(request.prompt_ids) - 1 : -1]
    assert [each.token for each in output.logprobs] == output.tokens
    for at, (token, found) in enumerate(zip(output.tokens, output.logprobs, strict=True)):
        before = text[: len(request.prompt_ids) + at]
        by_logits = logits[at].log_softmax(-1)
        by_kept = processed(setting, before, logits[at]).log_softmax(-1)
        assert found.logprob == pytest.approx(float(by_logits[token]), abs=1e-9)
        assert found.processed_logprob == pytest.approx(float(by_kept[token]), abs=1e-9)
        for got, wanted in ((found.top, by_logits), (found.processed_top, by_kept)):
            values, ids = wanted.topk(min(setting.logprobs, 61))
            ids = ids[values.isfinite()]
            assert [each for each, _ in got] == ids.tolist()
            assert [each for _, each in got] == pytest.approx(wanted[ids].tolist(), abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_are_those_of_whole_forwards(kind, captured_on_cpu):
    verifier, tree = KINDS[kind]
    target, served = tiny_model(1), requests(10)
    drafter = None if tree is None else right_now_and_then(target)
    decoder = BatchDecoder(
        target, drafter, tree, num_rows=4, max_length=64, verifier=verifier
    )
    outputs = decoder.generate(served)
    for request, output in zip(served, outputs, strict=True):
        assert_of_whole_forwards(target, request, output)
    if tree is not None:
        assert sum(sum(each.stats.accepted_per_call) for each in outputs) > 5


@pytest.mark.parametrize("backtracking", ["replay", "joint"])
def test_a_decoder_and_the_maths(backtracking):
    target = tiny_model(1)
    decoder = Decoder(
        target, NGram(2, (), right_now_and_then(target)), TokenTree.paper(), max_length=64,
        backtracking=backtracking,
    )
    output = decoder.generate([5, 3, 8], max_new_tokens=9, logprobs=2)
    weights = {name: each.numpy() for name, each in target.state_dict().items()}
    text = [5, 3, 8, *output.tokens]
    logits = torch.from_numpy(oracle.logits_of_sequence(target.config, weights, text))
    wanted = logits[2:-1].log_softmax(-1)
    assert [each.logprob for each in output.logprobs] == pytest.approx(
        wanted.gather(1, torch.tensor(output.tokens)[:, None])[:, 0].tolist(), abs=1e-9
    )
    assert all(each.top[0] == (each.token, each.logprob) for each in output.logprobs)


def test_an_answer_s_end_cuts_them_and_a_stream_has_them():
    target = tiny_model(1)
    alone = Decoder(target, target, "chain-4", max_length=64).generate([5, 3, 8], max_new_tokens=9)
    request = Request([5, 3, 8], GenerationConfig(9, eos_token_id=alone.tokens[5], logprobs=1))
    batch = BatchDecoder(target, target, "chain-4", num_rows=1, max_length=64)
    streamed = []
    for served in batch.serve([request]):
        assert len(served.report.logprobs) == len(served.report.tokens)
        streamed += served.report.logprobs
    assert streamed == served.release().logprobs
    assert_of_whole_forwards(target, request, served.release())


def test_a_step_without_them_reports_as_before(monkeypatch, captured_on_cpu):
    called = []
    log_probs = BatchState.log_probs
    monkeypatch.setattr(
        BatchState, "log_probs", lambda *given: called.append(1) or log_probs(*given)
    )
    target = tiny_model(1)
    decoder = Decoder(target, target, "chain-2", max_length=64)
    decoder.generate([1, 2], max_new_tokens=6)
    assert not called
    decoder.generate([1, 2], max_new_tokens=6, logprobs=0)
    assert called


def test_one_graph_serves_several_numbers_of_best_tokens(captured_on_cpu):
    decoder = Decoder(tiny_model(1), max_length=64)
    for count in (5, 6, 7, 8):
        decoder.generate([1, 2], max_new_tokens=3, logprobs=count)
    assert len(decoder.batch.runner.step_graphs) == 1
