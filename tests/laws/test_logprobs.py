"""Log-probabilities of new tokens are those of whole forwards, with every verifier and tree.

So biases, penalties and barred words are those of transformers' own processors, after each token.
"""

from __future__ import annotations

import random
from dataclasses import replace

import oracle
import pytest
import torch
from toys import right_now_and_then, tiny_model
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from stree import BatchDecoder, Decoder, GenerationConfig, Request, TokenTree
from stree.batching import step
from stree.drafters.ngram import NGram
from stree.engine import worker
from stree.logits.log_probs import log_probs_of

KINDS = {  # verifier and tree
    "plain": ("coupled", None), "chain": ("coupled", "chain-3"), "paper": ("coupled", "paper"),
    "beam": ("coupled", "beam-3-3-9"), "dyspec": ("naive", "dyspec-3-3-9"),
    "naive": ("naive", "paper"), "multi_step": ("multi_step", "expand-3-2"),
    "block": ("block", "chain-3"), "traversal": ("traversal", "paper"),
}
QUICK = ("plain", "beam", "multi_step")


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


def ruled(served: list[Request], answers: list[list[int]]) -> list[Request]:
    """Give requests biases, penalties, barred words and ends by what they answer without any."""
    rng = random.Random(9)
    changed = []
    for number, (request, tokens) in enumerate(zip(served, answers, strict=True)):
        words = [tokens[at : at + size] for at, size in ((0, 3), (2, 2), (4, 1)) if tokens[at:]]
        words.append([request.prompt_ids[-1], tokens[0]])
        rules = dict(
            presence_penalty=rng.choice([0.0, 1.5]), frequency_penalty=rng.choice([-0.5, 0.0, 2.0]),
            logit_bias={tokens[0]: -torch.inf, tokens[-1]: 2.5} if number % 3 == 0 else {},
            min_new_tokens=rng.choice([0, 4, 7]), eos_token_id=tokens[len(tokens) // 2 :],
            bad_words_ids=words[number % 3 :] if number % 4 else (),
        )
        changed.append(replace(request, generation=replace(request.generation, **rules)))
    return changed


class OpenAIPenalties:
    """Penalties of tokens by how often the answer has them, as OpenAI's API defines them."""

    def __init__(self, setting: GenerationConfig, prompt_length: int) -> None:
        self.setting, self.prompt_length = setting, prompt_length

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        answer = ids[0, self.prompt_length :].tolist()
        for token in set(answer):
            scores[0, token] -= self.setting.presence_penalty
            scores[0, token] -= self.setting.frequency_penalty * answer.count(token)
        return scores


def processed(
    setting: GenerationConfig, tokens: list[int], prompt_length: int, logits: torch.Tensor
) -> torch.Tensor:
    """Return logits (V,) as transformers' own processors leave them."""
    steps = LogitsProcessorList()
    ends = list(setting.eos_ids(()))
    if biases := {(token,): bias for token, bias in setting.logit_bias}:
        steps.append(SequenceBiasLogitsProcessor(biases))
    steps.append(RepetitionPenaltyLogitsProcessor(setting.repetition_penalty))
    steps.append(OpenAIPenalties(setting, prompt_length))
    if setting.bad_words_ids:
        steps.append(NoBadWordsLogitsProcessor(list(map(list, setting.bad_words_ids)), ends))
    if setting.min_new_tokens:
        steps.append(
            MinNewTokensLengthLogitsProcessor(prompt_length, setting.min_new_tokens, ends)
        )
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
        by_kept = processed(setting, before, len(request.prompt_ids), logits[at].clone())
        by_kept = by_kept.log_softmax(-1)
        assert found.logprob == pytest.approx(float(by_logits[token]), abs=1e-9)
        assert found.processed_logprob == pytest.approx(float(by_kept[token]), abs=1e-9)
        for got, wanted in ((found.top, by_logits), (found.processed_top, by_kept)):
            values, ids = wanted.topk(min(setting.logprobs, 61))
            ids = ids[values.isfinite()]
            assert [each for each, _ in got] == ids.tolist()
            assert [each for _, each in got] == pytest.approx(wanted[ids].tolist(), abs=1e-9)


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.costly) for kind in KINDS
])
def test_log_probabilities_are_those_of_whole_forwards(kind, captured_on_cpu):
    verifier, tree = KINDS[kind]
    target, served = tiny_model(1), requests(5)
    drafter = None if tree is None else right_now_and_then(target)
    decoder = BatchDecoder(
        target, drafter, tree, num_rows=4, max_length=64, verifier=verifier
    )
    outputs = decoder.generate(served)
    served_with_rules = ruled(served, [output.tokens for output in outputs])
    changed = decoder.generate(served_with_rules)
    for request, output in zip(served + served_with_rules, outputs + changed, strict=True):
        assert_of_whole_forwards(target, request, output)
        words, tokens = request.generation.bad_words_ids, output.tokens
        ends = [at for at, each in enumerate(tokens) if each in request.generation.eos_ids(())]
        assert all(at >= request.generation.min_new_tokens for at in ends)
        text = [*request.prompt_ids, *tokens]
        for word in words:
            met = [list(word) == text[at - len(word) : at] for at in range(1, 1 + len(text))]
            is_end = word[0] in request.generation.eos_ids(()) and len(word) == 1
            assert is_end or not any(met[len(request.prompt_ids) :])
    assert [each.tokens for each in changed] != [each.tokens for each in outputs]
    for before in (outputs, changed):
        accepted = sum(sum(each.stats.accepted_per_call) for each in before)
        assert tree is None or accepted > 2
    if verifier == "coupled":
        alone = BatchDecoder(target, num_rows=1, max_length=64).generate(served_with_rules[::3])
        assert [each.tokens for each in alone] == [each.tokens for each in changed[::3]]


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
    for place in (step, worker):
        monkeypatch.setattr(
            place, "log_probs_of", lambda *given: called.append(1) or log_probs_of(*given)
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
    assert len(decoder.batch.worker.runner.step_graphs) == 1
