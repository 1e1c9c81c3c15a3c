"""A drafter with another tokenizer: drafts are text, and what comes out is the target's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lanes import quick_first
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import Split
from toys import tiny_model
from transformers import BatchEncoding, PreTrainedTokenizerFast

import stree
from stree import AdaptiveTrees, BatchDecoder, GenerationConfig, Request, TokenTree
from stree.checkpoints.tokenizer import load_tokenizer
from stree.common.errors import UsageError
from stree.drafters.cross_tokenizer import (
    CrossTokenizerDrafter,
    CrossTokenizerSpec,
    _fill,
    _last_word,
)
from stree.models.model import HybridModel
from stree.trees.token_tree import balanced

SHIPPED = Path(__file__).parents[3] / "checkpoints/python-docs-hybrid"
PROMPT = "The json module can be used to encode Python objects. Use the"


def of_characters(text: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each character of a text."""
    vocabulary = {each: number for number, each in enumerate(sorted(set(text) | set("?")))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")


@pytest.fixture(scope="module")
def target():
    from stree.checkpoints.load_save import load_model

    return load_model(SHIPPED, torch.device("cpu"), torch.float32)


class Knowing:
    """Stand-in for a model that is sure of a text's next character."""

    device = torch.device("cpu")

    def __init__(self, text: str, tokenizer) -> None:
        self.text, self.tokenizer = text, tokenizer

    def new_cache(self, max_length, max_nodes, batch):
        return _Read([[] for _ in range(batch)])

    def prefill(self, tokens, cache):
        (row,) = cache.rows
        row += tokens[0].tolist()
        so_far = self.tokenizer.decode(row)
        assert self.text.startswith(so_far)  # what was drafted before is forgotten
        logits = torch.zeros(1, len(self.tokenizer))
        after = self.text[len(so_far) : len(so_far) + 1] or "?"
        logits[0, self.tokenizer.convert_tokens_to_ids(after)] = 9.0
        return logits


class _Read:
    def __init__(self, rows) -> None:
        self.rows, self.variant = rows, torch.zeros(len(rows), dtype=torch.long)

    def at(self, row):
        return _Read(self.rows[row : row + 1])

    def clear(self, row):
        self.rows[row].clear()

    def save(self, row):
        return list(self.rows[row])

    def load(self, saved, row):
        self.rows[row][:] = saved


def test_words_that_are_spelt_are_accepted_in_the_targets_tokens(target):
    """A drafter of characters that knows the answer saves most calls."""
    ours = load_tokenizer(SHIPPED)
    prompt = ours(PROMPT).input_ids
    generation = GenerationConfig(24, ignore_eos=True)
    plain = BatchDecoder(target, num_rows=1, max_length=128).generate([Request(prompt, generation)])
    answer = ours.decode(prompt + plain[0].tokens)
    own = of_characters(answer)
    drafter = CrossTokenizerSpec(Knowing(answer + "?" * 99, own), own, ours)
    decoder = BatchDecoder(target, drafter, "chain-4", num_rows=1, max_length=128)
    (output,) = decoder.generate([Request(prompt, generation)])
    assert output.tokens == plain[0].tokens
    assert output.stats.acceptance_length > 3.5


@pytest.mark.costly
def test_a_drafter_of_the_same_tokenizer_loses_little_by_the_text(target):
    """Handed over as tokens, all drafts of the target itself would be accepted."""
    ours = load_tokenizer(SHIPPED)
    decoder = BatchDecoder(
        target, CrossTokenizerSpec(target, ours, ours), "chain-3", num_rows=2, max_length=128
    )
    generation = GenerationConfig(24, ignore_eos=True)
    served = [
        Request(ours(text).input_ids, generation)
        for text in (PROMPT, "If the file does not exist, it")
    ]
    plain = BatchDecoder(target, num_rows=2, max_length=128).generate(served)
    outputs = decoder.generate(served)
    assert [each.tokens for each in outputs] == [each.tokens for each in plain]
    calls = sum(each.stats.num_calls for each in outputs)
    assert sum(each.stats.num_new_tokens for each in outputs) / calls > 3.2  # of 4


def test_a_word_that_a_later_token_changes_is_read_again():
    """A token of this target raises all letters before it, those of read words too."""
    own = of_characters("one two ONE TWO THREE")
    targets = of_characters("one two^ THREE")
    decode = targets.decode

    def raised(tokens, **options):
        text = decode(tokens, **options)
        return text.replace("^", "").upper() if "^" in text else text

    targets.decode = raised
    model, tree = Knowing("one two one", own), TokenTree.chain(2)
    drafter = CrossTokenizerDrafter(model, own, targets, len(targets), 1, 99)
    drafter.read(0, torch.tensor(targets("one two").input_ids))
    assert decode(drafter._drafts(0, tree)[0]).startswith(" o")
    drafter.read(0, torch.tensor(targets("^").input_ids))
    model.text = "ONE TWO THREE"
    assert decode(drafter._drafts(0, tree)[0]).startswith(" T")


class Bytes:
    """Tokenizer with a token for each byte of UTF-8."""

    def __call__(self, text, add_special_tokens=False):
        return BatchEncoding({"input_ids": list(text.encode())})

    def __len__(self):
        return 256

    def decode(self, tokens, **options):
        return bytes(tokens).decode(errors="replace")


class KnowingBytes(Knowing):
    """Stand-in for a model of bytes that is sure of a text's next one."""

    def prefill(self, tokens, cache):
        (row,) = cache.rows
        row += tokens[0].tolist()
        logits = torch.zeros(1, 256)
        logits[0, self.text.encode()[len(row)]] = 9.0
        return logits


def test_half_a_character_is_no_part_of_a_draft():
    """A word of two characters is drafted as its one token, though its bytes come one by one."""
    vocabulary = {"?": 0, " ": 1, "日": 2, "本": 3, "日本": 4}
    words = Tokenizer(BPE(vocabulary, [("日", "本")], unk_token="?"))
    words.decoder = Fuse()
    targets = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    model = KnowingBytes("日本 日本 日本 日本", Bytes())
    drafter = CrossTokenizerDrafter(model, Bytes(), targets, len(targets), 1, 99)
    drafter.read(0, torch.tensor(targets("日本 ").input_ids))
    (draft,) = drafter._drafts(0, TokenTree.chain(1))
    assert draft[:1] == [4]


@pytest.mark.parametrize(
    ("layers", "verifier"),
    quick_first([((1,), "coupled")], [((), "coupled"), ((1,), "coupled"), ((), "traversal")]),
)
def test_what_is_sampled_is_plain_decodings(layers, verifier, target, monkeypatch):
    ours, own = load_tokenizer(SHIPPED), of_characters(PROMPT)
    model = tiny_model(2, torch.float32, vocab_size=len(own), attn_layers=layers)
    served = [
        Request(ours(PROMPT).input_ids, GenerationConfig(8, temperature, seed=seed))
        for seed, temperature in enumerate((0.0, 1.0))
    ]
    plain = BatchDecoder(target, num_rows=2, max_length=64).generate(served)
    for tree in (balanced([2, 1, 1]), AdaptiveTrees(["chain-2"])):
        decoder = BatchDecoder(
            target, CrossTokenizerSpec(model, own, ours), tree, num_rows=2, max_length=64,
            verifier=verifier,
        )
        if isinstance(tree, AdaptiveTrees):
            decoder.measure_step_times(num_steps=1)
        outputs = decoder.generate(served)
        exact = 2 if verifier == "coupled" else 1
        assert [e.tokens for e in outputs][:exact] == [e.tokens for e in plain][:exact]


def test_a_drafter_that_reads_features_is_refused(target):
    ours, own = load_tokenizer(SHIPPED), of_characters(PROMPT)
    model = tiny_model(2, torch.float32, vocab_size=len(own), attn_layers=())
    config = model.config.reading((0,), target.config, False)
    with pytest.raises(UsageError, match="reads features of its target"):
        BatchDecoder(
            target, CrossTokenizerSpec(HybridModel(config), own, ours), "chain-2", num_rows=1
        )


def test_it_has_a_name(target):
    decoder = stree.load(SHIPPED, f"text:{SHIPPED}", tree="chain-2", max_length=64, device="cpu")
    out = decoder.complete("import", max_new_tokens=8)
    assert (
        out.tokens == stree.load(SHIPPED, device="cpu").complete("import", max_new_tokens=8).tokens
    )
    assert type(decoder.drafter).__name__ == "CrossTokenizerDrafter"
    with pytest.raises(UsageError, match="needs a model"):
        stree.load(SHIPPED, f"text:{SHIPPED}", tree="beam-2-2-4", max_length=64, device="cpu")


def test_words_end_at_spaces():
    assert [_last_word(text) for text in ("", "one", "one two", "one  two", " one", "a b\n c")] == [
        0, 0, 3, 3, 0, 1
    ]


def test_continuations_share_the_nodes_that_they_begin_with():
    tree, tokens = TokenTree((-1, 0, 0, 1, 1, 2)), [9] * 6
    _fill(tokens, tree, [[1, 2], [1, 3, 4], [5, 6, 7], [8]])
    assert tokens == [9, 1, 5, 2, 3, 6]
