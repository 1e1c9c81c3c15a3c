"""Show conversations as text, with the tokens that count for the loss marked."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import Any

from stree.chat_encoding import ChatEncoder
from stree.common.errors import exit_with_reason, shown
from stree_pipelines.console.command_line import PlainParser
from stree_pipelines.data.conversations import read_conversations
from stree_pipelines.data.encoding import encoded


def show_mask(
    tokens: Iterable[int], mask: Iterable[bool], tokenizer: Any, color: bool | None = None
) -> str:
    """Format a sample as text, with the tokens that count for the loss marked.

    They are green on a terminal (default when stdout is one), otherwise between ⟦ and ⟧. A legend
    with the counts comes first.

    tokens: ids (T,); mask: bool (T,), True where predicting the token counts.
    """
    if color is None:
        color = sys.stdout.isatty()
    opening, closing = ("\x1b[1;32m", "\x1b[0m") if color else ("⟦", "⟧")
    parts = []
    marked = [(int(token), bool(flag)) for token, flag in zip(tokens, mask, strict=True)]
    for counts, run in groupby(marked, key=itemgetter(1)):
        text = shown(tokenizer.decode([token for token, _ in run], skip_special_tokens=False))
        parts.append(f"{opening}{text}{closing}" if counts else text)
    total = sum(counts for _, counts in marked)
    legend = f"{opening}counts for the loss{closing}: {total} of {len(marked)} tokens\n"
    return legend + "".join(parts)


def main(arguments: list[str] | None = None) -> None:
    from stree.checkpoints.tokenizer import load_tokenizer

    parser = PlainParser("stree mask", description="Print conversations with their loss mask.")
    parser.add_argument("data", help="JSONL(.gz), Parquet or a datasets name")
    parser.add_argument("--tokenizer", required=True, help="folder of the tokenizer")
    parser.add_argument("--template", help="name, .jinja file or text; default: the tokenizer's")
    parser.add_argument("--count", type=int, default=1, help="how many conversations")
    options = parser.parse_args(arguments)
    tokenizer = load_tokenizer(options.tokenizer)
    encoder = ChatEncoder(tokenizer, options.template)
    conversations, report = read_conversations(options.data, limit=options.count)
    for conversation, samples in encoded(conversations, report, encoder):
        for sample in samples:
            text = show_mask(sample.tokens, sample.assistant, tokenizer)
            print(f"{conversation.id}: {text}\n")
    print(report)


if __name__ == "__main__":
    exit_with_reason(main)
