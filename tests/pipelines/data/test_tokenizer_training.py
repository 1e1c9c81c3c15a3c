"""The tokenizer that we train: exact size, lossless on any text, the same every time."""

import pytest

from stree.chat_templates import STREE_CHAT
from stree.checkpoints.tokenizer import fingerprint, load_tokenizer
from stree.common.errors import CannotWrite, UsageError
from stree.common.files import verify_manifest
from stree_pipelines.data.tokenizer_training import CONTROL_TOKENS, texts_of, train_tokenizer

TEXTS = ["The quick brown fox jumps over the lazy dog.", "def f(x):\n    return x + 1\n"] * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "made"
    train_tokenizer(TEXTS, 448, path)
    return path


def test_loads_with_its_control_tokens_and_template(folder):
    verify_manifest(folder)
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer) == 448  # exactly, though so few texts do not fill it
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|end|>", "<|pad|>")
    assert tokenizer.convert_tokens_to_ids(list(CONTROL_TOKENS)) == [0, 1, 2, 3, 4]
    assert tokenizer.chat_template == STREE_CHAT


@pytest.mark.parametrize(
    "text", ["", " a  b\n\n\tc ", "naïve 🦊 — Ελληνικά", "\x00\r\n", "x" * 300, " <|end|> 007 "]
)
def test_any_text_survives(folder, text):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_same_texts_give_the_same_tokenizer(folder, tmp_path):
    train_tokenizer(iter(TEXTS), 448, tmp_path / "again")
    assert (tmp_path / "again/tokenizer.json").read_bytes() == (
        folder / "tokenizer.json"
    ).read_bytes()
    assert fingerprint(load_tokenizer(tmp_path / "again")) == fingerprint(load_tokenizer(folder))


@pytest.mark.parametrize("size", [0, 256, 1000])
def test_sizes_that_do_not_fit_are_refused(tmp_path, size):
    with pytest.raises(UsageError, match=f"multiple of 64 from 320 on, got {size}"):
        train_tokenizer(TEXTS, size, tmp_path / "t")


def test_an_existing_folder_is_kept_unless_told(folder):
    with pytest.raises(CannotWrite, match="exists"):
        train_tokenizer(TEXTS, 448, folder)
    train_tokenizer(TEXTS, 448, folder, overwrite=True)


def test_texts_are_every_turn(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}\n'
    )
    assert list(texts_of(str(path))) == ["q", "a"]
