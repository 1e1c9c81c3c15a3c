"""Refuse settings that mean nothing or do not fit, each before anything is decoded."""

import numpy as np
import pytest
import torch
import transformers
from toys import tiny_model

from stree import Decoder, GenerationConfig, TokenTree
from stree.common.errors import OutOfMemory, UsageError
from stree.models.config import HybridConfig
from stree.settings import settings_of
from stree.trees.token_tree import balanced


def hf(**values) -> transformers.GenerationConfig:
    return transformers.GenerationConfig(**values)


def test_an_eos_that_is_no_token_is_refused():
    with pytest.raises(UsageError, match="eos_token_id is 99999, wanted 0 to"):
        Decoder(tiny_model(1), max_length=99).generate([1], GenerationConfig(8, eos_token_id=99999))


@pytest.mark.parametrize("max_length", [0, -1, 2.5, None, "99"])
def test_a_length_of_nothing_is_refused(max_length):
    with pytest.raises(UsageError, match=f"max_length is {max_length!r}, wanted a whole number"):
        Decoder(tiny_model(1), max_length=max_length)


def test_nothing_goes_beyond_the_target_s_positions():
    """Everything works up to the last position; a model without positions has no limit."""
    target = tiny_model(1, max_position_embeddings=16)
    decoder = Decoder(target, max_length=40)
    refusal = "3 tokens and max_new_tokens = 14 need 17 positions, the target was made for 16"
    with pytest.raises(UsageError, match=refusal):
        decoder.generate([1, 2, 3], GenerationConfig(14))
    with pytest.raises(UsageError, match=refusal):
        decoder.generate([1, 2, 3], max_length=17)
    drafting = Decoder(target, tiny_model(2, attn_layers=()), max_length=40)
    last = GenerationConfig(13)
    wanted = decoder.generate([1, 2, 3], last).tokens
    assert len(wanted) == 13
    assert drafting.generate([1, 2, 3], last).tokens == wanted
    for changes in (dict(attn_layers=()), dict(rotary_dim=0)):
        unbounded = tiny_model(1, max_position_embeddings=16, **changes)
        Decoder(unbounded, max_length=40).generate([1, 2, 3], GenerationConfig(30))


def test_what_does_not_fit_is_named(monkeypatch):
    def refuse(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore words")

    target, drafter = tiny_model(1), tiny_model(2, attn_layers=())
    decoder = Decoder(target, drafter, max_length=99)
    monkeypatch.setattr(target, "tree_batch_forward", refuse)
    with pytest.raises(OutOfMemory, match=r"after 2 tokens with paper.* 20.00 GiB.; lower max_new"):
        decoder.generate([1, 2], GenerationConfig(8))
    monkeypatch.setattr(drafter, "new_cache", refuse)
    with pytest.raises(OutOfMemory, match=r"for 99 tokens and 13 nodes.*; lower max_length"):
        Decoder(target, drafter, max_length=99)


@pytest.mark.parametrize("moved", ["target", "drafter"])
def test_a_model_in_another_dtype_than_its_caches_is_refused(moved):
    models = dict(target=tiny_model(1), drafter=tiny_model(2, attn_layers=()))
    decoder = Decoder(**models, max_length=99)
    decoder.generate([1, 2], GenerationConfig(8))
    models[moved].half()
    with pytest.raises(UsageError, match=f"the {moved} is torch.float16 on cpu .* a new decoder"):
        decoder.generate([1, 2], GenerationConfig(8))
    models[moved].double()
    decoder.generate([1, 2], GenerationConfig(8))


@pytest.mark.parametrize(
    "values, complaint",
    [
        *((dict(eos_token_id=eos), "eos_token_id is .*, wanted a token's id")
          for eos in ("3", 3.0, torch.tensor([3.0]), [5, "3"], [[5]], {5: 1})),
        *((dict(stop_strings=strings), "stop_strings is .*, wanted a text")
          for strings in ([1, 2], 7, ("a", None), [b"a"])),
        (dict(top_p=None), "top_p is .*, wanted a number"),
        (dict(temperature="1"), "temperature is .*, wanted a number"),
        (dict(top_k=2.5), "top_k is .*, wanted a number"),
        (dict(max_new_tokens=None), "max_new_tokens is .*, wanted a number"),
        (dict(max_new_tokens=True), "max_new_tokens is .*, wanted a number"),
        (dict(stop_strings=("a", "")), "stop string"),
        (dict(temperature=1e-320), "temperature"),
        (dict(seed=2**64), "seed"),
        (dict(seed=-1), "seed"),
        (dict(seed=True), "seed"),
        (dict(top_k=2**63), "top_k"),
        (dict(repetition_penalty=1e-308), "repetition_penalty is 1e-308, wanted 0.00001 to"),
        (dict(repetition_penalty=1e308), "repetition_penalty"),
        (dict(max_new_tokens=0), "max_new_tokens"),
        (dict(temperature=-1.0), "temperature"),
        (dict(temperature=float("nan")), "temperature"),
        (dict(top_p=0.0), "top_p"),
        (dict(top_k=-1), "top_k"),
    ],
)
def test_bad_generation_settings(values, complaint):
    with pytest.raises(UsageError, match=complaint):
        GenerationConfig(**values)


def test_what_cannot_work_is_refused_at_start():
    target = tiny_model(1)
    with pytest.raises(UsageError, match="vocabulary has 50 tokens, the target's 61"):
        Decoder(target, tiny_model(2, vocab_size=50))
    drafter = tiny_model(2, attn_layers=())
    target.tokens_sha256, drafter.tokens_sha256 = "a", "b"
    with pytest.raises(UsageError, match="different tokenizers"):
        Decoder(target, drafter)
    with pytest.raises(UsageError, match="drafter is on meta, the target on cpu: move one"):
        Decoder(tiny_model(1), tiny_model(2).to("meta"))
    with pytest.raises(UsageError, match="needs a drafter"):
        Decoder(target, tree=TokenTree.paper())
    decoder = Decoder(target, max_length=32)
    with pytest.raises(UsageError, match="empty"):
        decoder.generate([])
    with pytest.raises(UsageError, match="max_length of 260"):
        decoder.generate([1, 2, 3])
    with pytest.raises(UsageError, match="the prompt has the token 61, wanted 0 to 60"):
        decoder.generate([61], GenerationConfig(4))
    with pytest.raises(UsageError, match="siblings"):
        Decoder(target, tiny_model(2, attn_layers=()), balanced([62]), max_length=99).generate(
            [1], GenerationConfig(4)
        )
    with pytest.raises(UsageError, match="no multiple"):
        HybridConfig(vocab_size=9, d_model=8, num_layers=1, num_ssm_heads=3, ssm_head_dim=4,
                     d_state=4, num_x_groups=2, num_b_groups=3, num_c_groups=3)


def test_numbers_of_numpy_and_generators_of_texts_are_taken():
    generation = GenerationConfig(seed=np.int64(3), stop_strings=(each for each in ["ab"]))
    assert type(generation.seed) is int and generation.stop_strings == ("ab",)
    Decoder(tiny_model(1), max_length=99).generate([1], GenerationConfig(2, seed=np.int64(3)))


def test_greedy_decoding_warns_once_of_what_it_does_not_read():
    decoder = Decoder(tiny_model(1), max_length=64)
    greedy = GenerationConfig(2, seed=3, top_p=0.9, repetition_penalty=1.2)
    with pytest.warns(UserWarning) as warned:
        for settings in (greedy, greedy, GenerationConfig(2, top_k=7)):
            decoder.generate([1, 2], settings)
    assert [str(each.message).partition(":")[0] for each in warned] == [
        "temperature is 0, and greedy decoding does not read top_p, seed",
        "temperature is 0, and greedy decoding does not read top_k",
    ]


@pytest.mark.filterwarnings("error:temperature is 0")
def test_settings_that_are_read_are_not_warned_of():
    decoder = Decoder(tiny_model(1), max_length=64)
    filters = dict(top_k=7, top_p=0.9, min_p=0.1, seed=3)
    decoder.generate([1, 2], GenerationConfig(2, temperature=1.0, **filters))
    decoder.generate([1, 2], GenerationConfig(2, **filters), temperature=1.0)
    decoder.generate([1, 2], GenerationConfig(2, repetition_penalty=1.2))
    read = GenerationConfig(2, repetition_penalty=1.2, **filters).without_unread()
    assert read == GenerationConfig(2, repetition_penalty=1.2)


@pytest.mark.parametrize(
    ("given", "options", "wanted"),
    [
        (None, {}, GenerationConfig()),
        (None, dict(max_new_tokens=3, temperature=0.7, top_k=5, top_p=0.9, seed=2),
         GenerationConfig(3, 0.7, 5, 0.9, seed=2)),
        (None, dict(do_sample=True), GenerationConfig(temperature=1.0)),
        (None, dict(do_sample=True, temperature=0.5), GenerationConfig(temperature=0.5)),
        (None, dict(do_sample=False, temperature=0.5), GenerationConfig()),
        (GenerationConfig(9, 0.3), dict(do_sample=True), GenerationConfig(9, 0.3)),
        (GenerationConfig(9, 0.3), dict(do_sample=False), GenerationConfig(9)),
        (GenerationConfig(9, seed=4), dict(max_new_tokens=5), GenerationConfig(5, seed=4)),
        (None, dict(num_beams=1, repetition_penalty=1.0, use_cache=True, pad_token_id=0,
                    temperature=None, logits_processor=None), GenerationConfig()),
        (None, dict(max_length=20), GenerationConfig(16)),
        (None, dict(max_length=20, max_new_tokens=3), GenerationConfig(3)),
        (None, dict(eos_token_id=[3, 4], stop_strings="a", ignore_eos=True),
         GenerationConfig(eos_token_id=(3, 4), stop_strings=("a",), ignore_eos=True)),
        (hf(), {}, GenerationConfig()),
        (hf(max_new_tokens=3, eos_token_id=2, pad_token_id=0, bos_token_id=1), {},
         GenerationConfig(3, eos_token_id=2)),
        (hf(do_sample=True), {}, GenerationConfig(temperature=1.0, top_k=50)),
        (hf(do_sample=True, temperature=0.6, top_p=0.9, top_k=0), {},
         GenerationConfig(temperature=0.6, top_p=0.9)),
        (hf(max_new_tokens=3), dict(do_sample=True, top_k=4, max_new_tokens=6),
         GenerationConfig(6, 1.0, 4)),
        (hf(max_length=12), {}, GenerationConfig(8)),
        (hf(repetition_penalty=1.2), dict(max_new_tokens=3),
         GenerationConfig(3, repetition_penalty=1.2)),
        (hf(do_sample=True, min_p=0.05, top_k=0), dict(repetition_penalty=1.1),
         GenerationConfig(temperature=1.0, min_p=0.05, repetition_penalty=1.1)),
    ],
)
def test_settings_by_keyword_and_by_either_config(given, options, wanted):
    assert settings_of(given, options).after(torch.arange(4)) == wanted


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (None, dict(num_beams=4), "cannot honour num_beams = 4: transformers' own model"),
        (None, dict(min_length=4), "min_length = 4: min_new_tokens"),
        (None, dict(suppress_tokens=[4]), "suppress_tokens = .*: logit_bias="),
        (None, dict(min_new_tokens=-1), "min_new_tokens is -1, wanted at least 0"),
        (None, dict(logit_bias={"4": 1.0}), "logit_bias is .*wanted a dict of token ids"),
        (None, dict(logit_bias={4: float("inf")}), "logit_bias is .*wanted a dict of token ids"),
        (None, dict(presence_penalty=float("nan")), "presence_penalty is nan, wanted a finite"),
        (None, dict(bad_words_ids=[4]), "bad_words_ids is .*wanted a list of lists"),
        (None, dict(bad_words_ids=[[]]), "bad_words_ids is .*wanted a list of lists"),
        (None, dict(no_repeat_ngram_size=2, min_length=3),
         r"min_length = 3: transformers' own model.generate does it, .*; min_new_tokens counts"),
        (None, dict(stopping_criteria=[print]), "stop_strings and eos_token_id end an answer"),
        (None, dict(output_scores=True), "cannot honour output_scores = True: logprobs="),
        (None, dict(typical_p=0.9, length_penalty=2.0), "typical_p = 0.9, length_penalty = 2.0: "),
        (None, dict(repetition_penalty=0.0), "repetition_penalty is 0.0, wanted 0.00001"),
        (None, dict(min_p=1.5), r"min_p is 1.5, wanted 0 \(off\) to 1"),
        (None, dict(max_new_token=4), "did you mean max_new_tokens"),
        (None, dict(rep_penalty=1.2), "did you mean repetition_penalty"),
        (None, dict(use_cache=False), "cannot honour use_cache = False"),
        (None, dict(do_sample="yes"), "do_sample is 'yes', wanted True or False"),
        (None, dict(do_sample=True, temperature=0.0), "do_sample is True and temperature 0"),
        (None, dict(temperature=-1), "temperature is -1"),
        (None, dict(max_length=4), "max_length is 4 and the prompt has 4 tokens already"),
        (None, dict(max_length=0), "max_length is 0, wanted"),
        (None, dict(logprobs=-1), "logprobs is -1, wanted at least 0"),
        (None, dict(logprobs=True), "logprobs is True, wanted a number"),
        (None, dict(eos_token_id=True), "eos_token_id is True, wanted"),
        (None, dict(eos_token_id=[]), "eos_token_id is empty, wanted a token's id"),
        (None, dict(eos_token_id=[1, False]), "eos_token_id is .*False.*, wanted"),
        (dict(max_new_tokens=4), {}, "generation_config is a dict"),
        (4, {}, "generation_config is a int"),
        (hf(num_beams=4), {}, "cannot honour num_beams = 4"),
        (hf(temperature=0.6), {}, "temperature = 0.6 and no do_sample"),
    ],
)
def test_what_cannot_be_honoured_is_named(given, options, message):
    with pytest.raises(UsageError, match=message):
        settings_of(given, options).after(torch.arange(4))


@pytest.mark.parametrize(
    ("name", "instead"),
    [("stop", "stop_strings"), ("n", "num_return_sequences"), ("max_tokens", "max_new_tokens"),
     ("stream", "streamer="), ("top_logprobs", "logprobs=")],
)
def test_names_of_other_libraries_are_answered_with_ours(name, instead):
    with pytest.raises(UsageError, match=f"cannot honour {name} = 1: .*{instead}"):
        settings_of(None, {name: 1})
