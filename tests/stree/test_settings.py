"""Refuse settings that mean nothing or do not fit, each before anything is decoded."""

import numpy as np
import pytest
import torch
from toys import tiny_model

from stree import Decoder, GenerationConfig, TokenTree
from stree.common.errors import OutOfMemory, UsageError
from stree.models.config import HybridConfig
from stree.trees.token_tree import balanced


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
