"""Tokenizers from folders, and telling two apart that look alike."""

import re

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stree.checkpoints.tokenizer import (
    encode_text,
    fingerprint,
    load_tokenizer,
    require_same_tokenizer,
    tokens_sha256,
)
from stree.common.errors import CheckpointRefused, NotFound
from stree.prompts import chat_prompt, text_ids

WORDS = ["<unk>", "<s>", "</s>", "the", "tree", "grows"]


def make_tokenizer(
    words=WORDS, normalizer=None, pre_tokenizer=None, template="{{ messages }}", **special
):
    backend = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    return wrapped(backend, normalizer, pre_tokenizer, template, **special)


def merging(*merges, template="{{ messages }}", **special):
    vocabulary = {word: index for index, word in enumerate([*WORDS[:3], "a", "b", "c", "ab", "bc"])}
    return wrapped(Tokenizer(models.BPE(vocabulary, list(merges))), template=template, **special)


def wrapped(backend, normalizer=None, pre_tokenizer=None, template="", **special):
    backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.Whitespace()
    backend.normalizer = normalizer
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", **special}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.chat_template = template
    return tokenizer


def saved(folder, **options):
    make_tokenizer(**options).save_pretrained(folder)
    return folder


def test_loading_gives_the_saved_tokenizer(tmp_path):
    tokenizer = load_tokenizer(saved(tmp_path))
    assert tokenizer("the tree grows")["input_ids"] == [3, 4, 5]
    assert tokenizer.eos_token_id == 2
    assert tokenizer.chat_template == "{{ messages }}"


def test_fingerprint_survives_saving_and_loading(tmp_path):
    original = make_tokenizer(normalizer=normalizers.Lowercase())
    loaded = load_tokenizer(saved(tmp_path, normalizer=normalizers.Lowercase()))
    assert fingerprint(loaded) == fingerprint(original)
    assert len(fingerprint(original)) == 64


@pytest.mark.parametrize(
    ("difference", "named"),
    [
        ({"words": [*WORDS, "tall"]}, "vocabulary of 7 tokens, wanted 6"),
        ({"words": [*WORDS[:4], "grows", "tree"]}, "id 4 is 'grows', wanted 'tree'"),
        ({"normalizer": normalizers.Lowercase()}, "the normalisers differ"),
        ({"pre_tokenizer": pre_tokenizers.WhitespaceSplit()}, "the pre-tokenizers differ"),
        ({"eos_token": "grows"}, "the EOS tokens differ"),
    ],
)
def test_what_changes_tokens_is_refused_and_named(tmp_path, difference, named):
    target = saved(tmp_path / "target")
    drafter = saved(tmp_path / "drafter", **difference)
    with pytest.raises(CheckpointRefused, match=named):
        require_same_tokenizer(target, drafter)
    hashes = {tokens_sha256(load_tokenizer(each)) for each in (target, drafter)}
    assert len(hashes) == 2


def test_other_merges_of_the_same_vocabulary_are_refused(tmp_path):
    ours, theirs = merging(("a", "b"), ("b", "c")), merging(("b", "c"), ("a", "b"))
    assert ours("abc").input_ids != theirs("abc").input_ids
    for name, tokenizer in (("target", ours), ("drafter", theirs)):
        tokenizer.save_pretrained(tmp_path / name)
    with pytest.raises(CheckpointRefused, match="the merges differ"):
        require_same_tokenizer(tmp_path / "target", tmp_path / "drafter")


@pytest.mark.parametrize(
    ("difference", "named"),
    [
        ({}, "^$"),
        ({"template": "{{ messages }}\n"}, "another chat template than"),
        ({"template": None}, "another chat template than"),
        ({"pad_token": "</s>"}, "another pad_token than"),
        ({"bos_token": "</s>", "template": ""}, "another chat template and bos_token than"),
    ],
)
def test_what_changes_no_token_is_a_remark(tmp_path, difference, named):
    target = saved(tmp_path / "target")
    drafter = saved(tmp_path / "drafter", **difference)
    assert re.search(named, require_same_tokenizer(target, drafter))
    hashes = {tokens_sha256(load_tokenizer(each)) for each in (target, drafter)}
    assert len(hashes) == 1


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda folder: None, "holds no tokenizer"),
        (lambda folder: (folder / "tokenizer.json").write_text('{"vers'), "cannot be read"),
    ],
)
def test_absent_or_damaged_tokenizer_is_refused(tmp_path, prepare, reason):
    folder = tmp_path / "model"
    folder.mkdir()
    prepare(folder)
    with pytest.raises(CheckpointRefused, match=reason):
        load_tokenizer(folder)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(NotFound, match="no folder"):
        load_tokenizer(tmp_path / "model")


def test_a_regular_expression_that_explodes_is_refused_in_one_line():
    """The tokenizer's Rust code panics, which is no `Exception`."""
    backend = Tokenizer(models.WordLevel({"a": 0, "!": 1}, unk_token="!"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$|(a|a)*b"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    text = "a" * 40 + "!"
    for encode in (encode_text, text_ids, chat_prompt):
        with pytest.raises(CheckpointRefused, match="the tokenizer cannot encode the text"):
            encode(tokenizer, text)


def test_of_templates_by_name_the_one_for_tools_is_taken_where_tools_are_given():
    backend = Tokenizer(models.WordLevel({"plain": 0, "tools": 1}, unk_token="plain"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = {
        "default": "{{ 'plain' if messages else tools }}",
        "tool_use": "{{ 'tools' if tools else messages }}",
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert chat_prompt(tokenizer, "x").ids == [0]
    assert chat_prompt(tokenizer, "x", tools=[tool]).ids == [1]
