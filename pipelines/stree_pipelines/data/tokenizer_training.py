"""Train a byte-level BPE tokenizer with the chat template's control tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import stree.common.threads  # noqa: F401  (before torch is loaded)

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from stree.chat_templates import STREE_CHAT
from stree.common.errors import UsageError, exit_with_reason
from stree.common.files import publish_directory
from stree_pipelines.console.command_line import PlainParser
from stree_pipelines.data.conversations import read_conversations

PAD, END = "<|pad|>", "<|end|>"
CONTROL_TOKENS = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>")
MULTIPLE = 64  # of the vocabulary: matrix units like it, and it divides over ranks
# Llama 3's split, but single digits: a small vocabulary has no room for 1,110 numbers.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, out_dir: str | Path, overwrite: bool = False
) -> Any:
    """Train on `texts`, write a `transformers` tokenizer folder, and return the tokenizer.

    Its chat template is `stree-chat`.

    The same texts in the same order give the same files. The vocabulary has exactly `vocab_size`
    entries, a multiple of 64: the control tokens, the 256 bytes, the merges, and, when the texts
    are too few for that many merges, reserved tokens at the end.

    Raises `UsageError` on a size that does not fit, `CannotWrite` when `out_dir` exists.
    """
    smallest = -(-(256 + len(CONTROL_TOKENS)) // MULTIPLE) * MULTIPLE
    if vocab_size % MULTIPLE or vocab_size < smallest:
        raise UsageError(
            f"vocab_size must be a multiple of {MULTIPLE} from {smallest} on, got {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in CONTROL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(
        [AddedToken(f"<|reserved_{n}|>", special=True, normalized=False) for n in range(missing)]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=STREE_CHAT,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    with publish_directory(Path(out_dir), overwrite=overwrite) as folder:
        wrapped.save_pretrained(folder)
    return wrapped


def texts_of(source: str, limit: int | None = None) -> Iterator[str]:
    """Yield every turn's text of the conversations of `source`."""
    conversations, _ = read_conversations(source, limit=limit)
    for conversation in conversations:
        for _, text in conversation.turns:
            yield text


def main(arguments: list[str] | None = None) -> None:
    parser = PlainParser(
        "stree tokenizer", description="Train a byte-level BPE tokenizer on conversations."
    )
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--data", required=True, nargs="+",
                        help="JSONL(.gz), Parquet, datasets name")
    parser.add_argument("--vocab-size", type=int, default=4096, help=f"a multiple of {MULTIPLE}")
    parser.add_argument("--limit", type=int, help="conversations of each source, default all")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing folder")
    options = parser.parse_args(arguments)
    texts = (text for source in options.data for text in texts_of(source, options.limit))
    tokenizer = train_tokenizer(texts, options.vocab_size, options.out, options.overwrite)
    print(f"{len(tokenizer):,} tokens -> {options.out}")


if __name__ == "__main__":
    exit_with_reason(main)
