"""Tokenizers from folders, and telling two apart that look alike."""

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stree.checkpoints.tokenizer import (
    encode_text,
    fingerprint,
    load_tokenizer,
    require_same_tokenizer,
)
from stree.common.errors import CheckpointRefused, NotFound
from stree.prompts import chat_ids, text_ids

WORDS = ["<unk>", "<s>", "</s>", "the", "tree", "grows"]


def make_tokenizer(words=WORDS, normalizer=None, eos="</s>", template="{{ messages }}"):
    backend = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.normalizer = normalizer
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token=eos
    )
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


def test_same_tokenizer_passes_and_gives_the_fingerprint(tmp_path):
    target, drafter = saved(tmp_path / "target"), saved(tmp_path / "drafter")
    assert require_same_tokenizer(target, drafter) == fingerprint(make_tokenizer())


@pytest.mark.parametrize(
    ("difference", "named"),
    [
        ({"words": [*WORDS, "tall"]}, "vocabulary of 7 tokens, wanted 6"),
        ({"words": [*WORDS[:4], "grows", "tree"]}, "id 4 is 'grows', wanted 'tree'"),
        ({"normalizer": normalizers.Lowercase()}, "normalisers differ"),
        ({"eos": "grows"}, "special tokens"),
        ({"template": "{{ messages[0] }}"}, "chat templates differ"),
    ],
)
def test_each_difference_is_refused_and_named(tmp_path, difference, named):
    target = saved(tmp_path / "target")
    drafter = saved(tmp_path / "drafter", **difference)
    with pytest.raises(CheckpointRefused, match=named):
        require_same_tokenizer(target, drafter)


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
    for encode in (encode_text, text_ids, chat_ids):
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
    assert chat_ids(tokenizer, "x") == [0] and chat_ids(tokenizer, "x", tools=[tool]) == [1]
