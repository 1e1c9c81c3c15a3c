"""Logits processors of a request's own see each node's path: a grammar holds in every tree."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from enumerated import assert_targets, block_distribution, plain_distribution, random_case
from lanes import costly
from toys import TableDrafter, TableTarget, right_now_and_then, tiny_model, with_head
from transformers import NoRepeatNGramLogitsProcessor

from stree import BatchDecoder, Decoder, GenerationConfig, Request, TokenTree, UsageError
from stree.verifiers.rejection import MultiStep, Naive, Traversal

OPEN, CLOSE, END = 3, 4, 5


class Brackets:
    """Grammar of balanced brackets, at most three deep, with other tokens inside of them only.

    The answer ends (END) where all brackets are closed.
    """

    def __init__(self, prompt_length: int) -> None:
        self.prompt_length = prompt_length

    def depth_after(self, answer: list[int]) -> int:
        depth = 0
        for token in answer:
            depth += {OPEN: 1, CLOSE: -1}.get(token, 0)
            assert 0 <= depth <= 3 and (depth or token in (CLOSE, END)), answer
        return depth

    def __call__(self, input_ids, scores):
        answer = input_ids[0, self.prompt_length :].tolist()
        assert END not in answer
        depth = self.depth_after(answer)
        barred = torch.ones_like(scores, dtype=torch.bool)
        if depth:
            barred = ~barred
            barred[:, END] = True
            barred[:, OPEN] = depth == 3
        elif answer:
            barred[:, END] = False
        else:
            barred[:, OPEN] = False
        return scores.masked_fill(barred, -torch.inf)


def requests() -> list[Request]:
    """Make requests with a grammar, and one without any."""
    rng, served = random.Random(2), []
    for number in range(5):
        prompt = [rng.randrange(61) for _ in range(rng.randint(1, 6))]
        setting = GenerationConfig(
            14, float(number % 2), seed=number, eos_token_id=END,
            logit_bias={CLOSE: 3.0, OPEN: 4.0}, logprobs=0,
            logits_processor=Brackets(len(prompt)) if number != 2 else (),
        )
        served.append(Request(prompt, setting))
    return served


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("tree", "graphs"),
    [("beam-3-3-9", False), ("paper", True), costly("chain-3", False), costly("paper", False),
     costly("beam-3-3-9", True)],
)
def test_answers_follow_a_grammar_and_are_plain_decodings(tree, graphs, request):
    if graphs:
        request.getfixturevalue("captured_on_cpu")
    target, served = tiny_model(1), requests()
    plain = BatchDecoder(target, num_rows=1, max_length=64).generate(served)
    decoder = BatchDecoder(
        target, right_now_and_then(target), tree, num_rows=3, max_length=64
    )
    outputs = decoder.generate(served)
    assert [each.tokens for each in outputs] == [each.tokens for each in plain]
    for each, output in zip(served, outputs, strict=True):
        if each.generation.logits_processor:
            (grammar,) = each.generation.logits_processor
            depth = grammar.depth_after(output.tokens)
            assert depth == 0 or output.finish_reason == "length"
            assert len({OPEN, CLOSE} & set(output.tokens)) > 0
        assert all(one.processed_logprob > -torch.inf for one in output.logprobs)
    assert sum(sum(each.stats.accepted_per_call) for each in outputs) > 10


def test_a_drafter_whose_head_has_some_tokens_follows_it():
    target = tiny_model(1)
    drafter = with_head(right_now_and_then(target), torch.tensor([OPEN, CLOSE, 9, 17, 30, 44]))
    served = requests()
    plain = BatchDecoder(target, num_rows=1, max_length=64).generate(served)
    outputs = BatchDecoder(target, drafter, "chain-3", num_rows=2, max_length=64).generate(served)
    assert [each.tokens for each in outputs] == [each.tokens for each in plain]
    assert sum(sum(each.stats.accepted_per_call) for each in outputs) > 3


@pytest.mark.parametrize("verifier", [Naive, MultiStep, Traversal])
def test_output_distribution_with_a_processor_is_the_targets(verifier):
    def alternate(input_ids, scores):
        """Bar the token before the last one, and make the last one less probable."""
        scores[0, input_ids[0, -2]] = -torch.inf
        scores[0, input_ids[0, -1]] -= 1.5
        return scores

    setting = GenerationConfig(temperature=1.0, logits_processor=alternate)
    for tree in (TokenTree.chain(2), TokenTree((-1, 0, 0))):
        target, drafter, _, _ = random_case(1, [tree])
        blocks = block_distribution(
            TableTarget(target), TableDrafter(drafter), tree, setting, verifier
        )
        assert_targets(blocks, target, setting, tree)
    assert (plain_distribution(target[1, 2], setting) == 0).sum() == 1


def test_transformers_own_processors_serve():
    target = tiny_model(1)
    setting = GenerationConfig(30, logits_processor=[NoRepeatNGramLogitsProcessor(2)])
    output = Decoder(target, target, "paper", max_length=64).generate([5, 3, 8], setting)
    text = [5, 3, 8, *output.tokens]
    pairs = list(itertools.pairwise(text))
    assert len(set(pairs)) == len(pairs)
    assert output.stats.acceptance_length > 2


def test_an_answer_ends_where_no_token_is_left():
    target = tiny_model(1)
    nothing = GenerationConfig(
        8, logits_processor=lambda ids, scores: scores - (torch.inf if len(ids[0]) > 5 else 0)
    )
    decoder = Decoder(target, target, "chain-4", max_length=64)
    output = decoder.generate([5, 3, 8], nothing, eos_token_id=END)
    assert (output.tokens[-1], len(output.tokens), output.finish_reason) == (END, 4, "eos")
    with pytest.raises(UsageError, match=r"logits_processor leaves no token after .*eos_token_id"):
        decoder.generate([5, 3, 8], nothing)
    assert len(decoder.generate([5, 3, 8], max_new_tokens=3).tokens) == 3


@pytest.mark.parametrize(
    ("processor", "told"),
    [(4, "logits_processor is 4, wanted a function"),
     (lambda ids, scores: None, "a logits_processor returned NoneType, wanted the scores"),
     (lambda ids, scores: scores[0], r"a logits_processor returned \(61,\), wanted the scores")],
)
def test_a_processor_that_is_none_is_refused(processor, told):
    decoder = Decoder(tiny_model(1), max_length=64)
    with pytest.raises(UsageError, match=told):
        decoder.generate([5, 3, 8], max_new_tokens=2, logits_processor=processor)
