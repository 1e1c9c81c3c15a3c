"""Text of tokens as they come: the pieces, joined, are the text of all tokens at once.

The tokenizers are those that decode differently: bytes (a character may be several tokens), spaces
before words (the first is dropped), and bytes for characters that no token has (one that fits
nowhere spoils the run it is in).
"""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from stree import GenerationOutput, TextStream
from stree.generation import DecodingStats
from stree_pipelines.data.tokenizer_training import train_tokenizer

TEXT = "naïve τ → 🙂 größe, 日本語のテキスト 👨\u200d👩\u200d👧\n\n  indented  twice, etc.\r\n"
PIECES = ["▁", "▁▁", "▁a", "b", "ab", "▁ab", "ba", ",", "\n", "é", "▁b▁"]
STOPS = ["b", "ab", " ab", "ba b", "é", "\n", " ", "aba", "bb a", "🙂"]


def sentence_tokenizer(decoder) -> PreTrainedTokenizerFast:
    """Make a tokenizer with spaces in its pieces and a token for each byte."""
    specials = ["<unk>", "</s>", "<|call|>"]
    names = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    backend = Tokenizer(models.BPE(
        {name: index for index, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True
    ))
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(name, special=True) for name in specials])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory):
    made = train_tokenizer([TEXT * 3, "ab ba aba b"], 384, tmp_path_factory.mktemp("t") / "t")
    made.add_special_tokens({"additional_special_tokens": ["<|call|>"]})
    return made


@pytest.fixture(scope="module", params=["bytes", "metaspace", "llama"])
def tokenizer(request, bytes_tokenizer):
    if request.param == "bytes":
        return bytes_tokenizer
    metaspace = [decoders.ByteFallback(), decoders.Metaspace()]
    llama = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
             decoders.Strip(" ", 1, 0)]
    return sentence_tokenizer(decoders.Sequence(llama if request.param == "llama" else metaspace))


def random_tokens(tokenizer, rng: random.Random, skipped=()) -> list[int]:
    """Draw tokens of which many are few bytes long, so that characters break and come together."""
    named = [token for token in tokenizer.get_vocab().values() if token not in skipped]
    vocabulary = tokenizer.get_vocab()
    some = [
        *rng.choices(named, k=4),
        *(vocabulary[piece] for piece in PIECES[:3] if piece in vocabulary),
        *tokenizer("aé🙂b \n", add_special_tokens=False).input_ids,
    ]
    tokens: list[int] = []
    while len(tokens) < 30:
        start = rng.randrange(len(some))
        tokens += some[start : start + rng.randint(1, 6)]
    return [token for token in tokens if token not in skipped]


def streamed(tokenizer, tokens, stop_strings=()) -> tuple[list[str], TextStream]:
    stream = TextStream(tokenizer, stop_strings)
    pieces = [stream.add(token) for token in tokens]
    return [*pieces, stream.end()], stream


def test_pieces_are_the_text_of_all_tokens(tokenizer):
    rng = random.Random(0)
    for _ in range(400):
        tokens = random_tokens(tokenizer, rng)
        pieces, _ = streamed(tokenizer, tokens)
        assert "".join(pieces) == GenerationOutput(tokens, "eos", DecodingStats(), tokenizer).text


def test_several_tokens_at_once_give_the_same_text(tokenizer):
    rng = random.Random(7)
    for _ in range(400):
        tokens, stream, at, text = random_tokens(tokenizer, rng), TextStream(tokenizer), 0, ""
        if rng.random() < 0.5:
            tokens = [each for each in tokens if each not in tokenizer.added_tokens_decoder]
        while at < len(tokens):
            count = rng.randint(1, 8)
            text, at = text + stream.extend(tokens[at : at + count]), at + count
        wanted = GenerationOutput(tokens, "eos", DecodingStats(), tokenizer).text
        assert text + stream.end() == wanted


def test_text_is_cut_before_the_stop_string_that_is_complete_first(tokenizer):
    rng, counts = random.Random(1), {True: 0, False: 0}
    for _ in range(400):
        tokens = random_tokens(tokenizer, rng, tokenizer.added_tokens_decoder)
        stops = rng.sample(STOPS, 3)
        texts = [tokenizer.decode(tokens[:count]) for count in range(len(tokens) + 1)]
        text = next((text for text in texts if any(stop in text for stop in stops)), None)
        pieces, stream = streamed(tokenizer, tokens, stops)
        counts[text is None] += 1
        if text is None:
            assert "".join(pieces) == texts[-1] and stream.stop_string is None
            continue
        end = next(at for at in range(len(text) + 1) if any(s in text[:at] for s in stops))
        stop = max((stop for stop in stops if text[:end].endswith(stop)), key=len)
        assert "".join(pieces) == text[: end - len(stop)] and stream.stop_string == stop
        assert stream.add(tokens[0]) == stream.end() == ""
    assert min(counts.values()) > 10


def test_characters_of_several_tokens_come_whole(tokenizer):
    pieces, _ = streamed(tokenizer, tokenizer(TEXT, add_special_tokens=False).input_ids)
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(
    ("stop", "wanted", "with_others"),
    [
        ("<|call|>", "ab", "ab"),
        ("call", "ab", "ab"),
        ("b<|ca", "a", "a"),
        ("|>b", "ab", "ab"),
        ("bb", "abb\n", "abb\n"),  # what is not shown stands between them
    ],
)
def test_special_tokens_are_found_and_not_shown(tokenizer, stop, wanted, with_others):
    call = tokenizer.convert_tokens_to_ids("<|call|>")
    tokens = [
        *tokenizer("ab", add_special_tokens=False).input_ids, call,
        *tokenizer("b\n", add_special_tokens=False).input_ids,
    ]
    for stops, shown in (([stop], wanted), ([stop, "bbb", "\n\n"], with_others)):
        assert "".join(streamed(tokenizer, tokens, stops)[0]) == shown


def test_a_stop_string_may_follow_an_unfinished_character(tokenizer):
    tokens = tokenizer("🙂", add_special_tokens=False).input_ids[:1]
    tokens.append(tokenizer.convert_tokens_to_ids("<|call|>"))
    assert "".join(streamed(tokenizer, tokens, ["<|call|>"])[0]) == "\ufffd"


def test_what_may_begin_a_stop_string_waits(bytes_tokenizer):
    stream = TextStream(bytes_tokenizer, ["bac"])
    letters = [bytes_tokenizer.convert_tokens_to_ids(letter) for letter in "abba,"]
    assert [stream.add(token) for token in letters] == ["a", "", "b", "", "ba,"]
    assert stream.end() == ""


def test_a_step_decodes_few_tokens(tokenizer, monkeypatch):
    """The tokens that are decoded grow with the answer's length, not with its square."""
    counted, decode = [], tokenizer.decode

    def counting_decode(tokens, **options):
        counted.append(len(tokens))
        return decode(tokens, **options)

    monkeypatch.setattr(tokenizer, "decode", counting_decode)
    tokens = tokenizer("aé🙂b \n,", add_special_tokens=False).input_ids * 10
    tokens += tokenizer.convert_tokens_to_ids(["<|call|>"]) * len(tokens)  # none adds a text
    streamed(tokenizer, tokens, ["no"])
    first = sum(counted)
    streamed(tokenizer, tokens[:1] + tokens[-1:] * 10 * len(tokens), ["no"])
    streamed(tokenizer, tokens * 10, ["no"])
    assert sum(counted) - first < 21 * first < 21 * 12 * len(tokens)
