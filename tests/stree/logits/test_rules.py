"""Barred words look at the tokens before them, in their order, whatever was accepted at once."""

from __future__ import annotations

import random

import pytest
import torch
from toys import right_now_and_then, tiny_model

from stree import BatchDecoder, GenerationConfig, Request, TokenTree

LENGTH = 12


def by_hand(target, prompt: list[int], words: list[list[int]]) -> list[int]:
    """Return greedy tokens by whole forwards; a word's last token is no choice after its others."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(LENGTH):
            logits = target(torch.tensor([tokens]))[0, -1].clone()
            for *before, last in words:
                if not before or tokens[-len(before) :] == before:
                    logits[last] = -torch.inf
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.costly
def test_a_word_that_begins_in_an_accepted_block_is_barred_behind_it():
    """Bar every three and four tokens in a row of an answer whose drafts are mostly accepted."""
    target, rng = tiny_model(1), random.Random(7)
    decoder = BatchDecoder(
        target, right_now_and_then(target), TokenTree.chain(3), num_rows=1, max_length=64
    )
    prompt, blocks = [rng.randrange(61) for _ in range(5)], 0
    answer = by_hand(target, prompt, [])
    for length in (3, 4):
        for start in range(LENGTH - length + 1):
            word = answer[start : start + length]
            generation = GenerationConfig(LENGTH, bad_words_ids=[word])
            (output,) = decoder.generate([Request(prompt, generation)])
            assert output.tokens == by_hand(target, prompt, [word])
            blocks += sum(count >= 2 for count in output.stats.accepted_per_call)
    assert blocks > 16


@pytest.mark.parametrize(
    "rules", [dict(min_new_tokens=3, ignore_eos=True), dict(bad_words_ids=[[7]], eos_token_id=7)]
)
def test_rules_that_bar_no_word_change_nothing(rules):
    target = tiny_model(1)
    decoder = BatchDecoder(target, right_now_and_then(target), "chain-2", num_rows=1, max_length=64)
    (output,) = decoder.generate([Request([5, 3], GenerationConfig(LENGTH, **rules))])
    wanted = by_hand(target, [5, 3], [])
    ends = 7 in wanted and "eos_token_id" in rules
    assert output.tokens == wanted[: wanted.index(7) + 1 if ends else None]


def test_a_step_reads_the_rules_of_today_after_a_longer_word_was_barred():
    """A longer word makes larger tensors; a step that was prepared before must not read the old."""
    target, rng = tiny_model(1), random.Random(8)
    decoder = BatchDecoder(
        target, right_now_and_then(target), TokenTree.chain(2), num_rows=1, max_length=64,
        max_nodes=5,
    )
    prompts = [[rng.randrange(61) for _ in range(5)] for _ in range(3)]
    answer = by_hand(target, prompts[2], [])
    short, long = [answer[:2]], [list(range(9))]  # the first step must see the first token
    one, other = (GenerationConfig(LENGTH, bad_words_ids=each) for each in (short, long))
    chain, tree = TokenTree.chain(2), TokenTree.load("expand-2-1")
    served = [(prompts[0], one, chain, short), (prompts[1], other, tree, long),
              (prompts[2], one, chain, short)]
    for prompt, generation, shape, words in served:
        (output,) = decoder.generate([Request(prompt, generation, shape)])
        assert output.tokens == by_hand(target, prompt, words)
    assert output.tokens != answer
