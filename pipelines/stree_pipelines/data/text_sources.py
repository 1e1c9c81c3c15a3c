"""Make benchmarks of public data sets: instructions, documents to summarise, answer of or go on.

The papers take about 80 rows of each (Mamba Drafters, A.1). Rows come from the hub, or from files
that were downloaded by hand. A document may be cut, so that its prompt has a number of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from stree.chat_encoding import chat_encoder
from stree.checkpoints.tokenizer import encode_text
from stree.common.errors import BadData, NotFound
from stree_pipelines.data.raw_rows import LINE_SUFFIXES, LIST_SUFFIXES, BadRow, raw_rows

FILE_SUFFIXES = (*LINE_SUFFIXES, *LIST_SUFFIXES, ".parquet")


@dataclass(frozen=True)
class TextPrompt:
    """A prompt about a document, which may be cut without harm to what is asked.

    Attributes:
        id: Of the row; None takes its number.
        before: Text before the document.
        document: The text that may be cut at its end.
        after: Text after it.
    """

    id: str | None
    before: str
    document: str
    after: str = ""

    @property
    def text(self) -> str:
        return self.before + self.document + self.after


@dataclass(frozen=True)
class TextSource:
    """Public data set of which prompts are made.

    Attributes:
        name: Of the benchmark.
        sets: Each category's name on the hub, OWNER/NAME/CONFIG:SPLIT.
        licence: As the data set's page says.
        prompt_of: Makes a prompt of a row.
        skips_longer: Whether a document that is longer than the longest prompt is left out, instead
            of cut (Mamba Drafters, A.1: LongBench's over 8k tokens are).
        plain: Whether prompts are texts to go on with, without a chat template.
    """

    name: str
    sets: Mapping[str, str]
    licence: str
    prompt_of: Callable[[Mapping[str, Any]], TextPrompt]
    skips_longer: bool = False
    plain: bool = False


def _instruction(row: Mapping[str, Any]) -> TextPrompt:
    given = row.get("input") or ""
    return TextPrompt(None, row["instruction"] + ("\n\n" if given else ""), given)


def _summary(column: str) -> Callable[[Mapping[str, Any]], TextPrompt]:
    return lambda row: TextPrompt(str(row["id"]), "Summarise this article.\n\n", row[column])


def _beginning(row: Mapping[str, Any]) -> TextPrompt:
    return TextPrompt(None, "", row["text"])


def _question(row: Mapping[str, Any]) -> TextPrompt:
    return TextPrompt(
        str(row["_id"]), "Answer the question by the text below.\n\n", row["context"],
        f"\n\nQuestion: {row['input']}\nAnswer:",
    )


def _long_bench(name: str, *tasks: str) -> TextSource:
    sets = {task: f"THUDM/LongBench/{task}:test" for task in tasks}
    return TextSource(name, sets, "MIT; its tasks keep their own", _question, skips_longer=True)


TEXT_SOURCES = {
    source.name: source
    for source in (
        TextSource(
            "alpaca", {"instruction": "tatsu-lab/alpaca:train"}, "CC BY-NC 4.0", _instruction
        ),
        TextSource(
            "xsum", {"summary": "EdinburghNLP/xsum:test"}, "not stated: articles of the BBC",
            _summary("document"),
        ),
        TextSource(
            "cnn_dailymail", {"summary": "abisee/cnn_dailymail/3.0.0:test"}, "Apache-2.0",
            _summary("article"),
        ),
        # Of DySpec, whose prompts are the first 128 tokens
        TextSource("c4", {"text": "allenai/c4/en:validation"}, "ODC-BY", _beginning, plain=True),
        TextSource(
            "openwebtext", {"text": "Skylion007/openwebtext:train"}, "CC0-1.0", _beginning,
            plain=True,
        ),
        _long_bench("longbench_single", "narrativeqa", "qasper", "multifieldqa_en"),
        _long_bench("longbench_multi", "hotpotqa", "2wikimqa", "musique"),
    )
}


def prompts_of(
    source: TextSource, limit: int, rows: str | None = None, lengths: tuple[int, ...] = (),
    tokenizer: Any = None,
) -> dict[int | None, str]:
    """Return JSONL prompts of the first rows of each category, by length in tokens.

    Args:
        source: The data set.
        limit: Prompts of all categories together, alike of each.
        rows: A file of the rows, or a folder with a file named as each category; None takes them
            from the hub.
        lengths: Tokens of a prompt, chat template included unless it is plain: longer documents are
            cut to it. () is one entry of whole documents, under None.
        tokenizer: Whose tokens are counted; needed for `lengths`.

    Raises:
        NotFound: For files or data sets that are not there.
        BadData: For rows of another kind, and a length that has no room for a question.
    """
    each = -(-limit // len(source.sets))
    found = {
        category: list(islice(_fitting(source, place, lengths, tokenizer), each))
        for category, place in _places(source, rows).items()
    }
    texts: dict[int | None, str] = {}
    for length in lengths or (None,):
        lines = [
            {
                "id": f"{source.name}-{category}-{prompt.id or number}", "category": category,
                "turns": [
                    prompt.text if length is None else _cut(prompt, length, tokenizer, source.plain)
                ],
                **({"plain": True} if source.plain else {}),
            }
            for category, prompts in found.items()
            for number, prompt in prompts
        ]
        texts[length] = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    return texts


def _places(source: TextSource, rows: str | None) -> dict[str, str]:
    """Return where the rows of each category are."""
    if rows is None:
        return dict(source.sets)
    folder = Path(rows)
    if not folder.is_dir():
        if len(source.sets) > 1:
            raise NotFound(f"no folder {rows}: {source.name} needs one with {_files(source)}")
        return dict.fromkeys(source.sets, rows)
    places = {}
    for category in source.sets:
        files = [folder / f"{category}{suffix}" for suffix in FILE_SUFFIXES]
        there = [file for file in files if file.is_file()]
        if not there:
            raise NotFound(f"no file of {category} in {rows}, wanted {_files(source)}")
        places[category] = str(there[0])
    return places


def _files(source: TextSource) -> str:
    return ", ".join(f"{category}.jsonl" for category in source.sets) + " (.json or .parquet)"


def _fitting(
    source: TextSource, place: str, lengths: tuple[int, ...], tokenizer: Any
) -> Iterator[tuple[int, TextPrompt]]:
    """Yield prompts with their rows' numbers, of documents that the longest length has room for."""
    for number, (where, row) in enumerate(raw_rows(place), start=1):
        if isinstance(row, BadRow):
            raise BadData(f"{where}: {row}")
        try:
            prompt = source.prompt_of(row)
            if not prompt.text.strip():
                raise TypeError("its texts are empty")
        except (KeyError, TypeError, AttributeError) as error:
            raise BadData(f"{where} is no row of {source.name}: {error!r}") from error
        skips = source.skips_longer and lengths
        if not skips or _num_tokens(prompt.text, tokenizer, source.plain) <= max(lengths):
            yield number, prompt


def _num_tokens(text: str, tokenizer: Any, plain: bool = False) -> int:
    if plain:
        return len(tokenizer(text).input_ids)
    return len(chat_encoder(tokenizer).encode_prompt([("user", text)]))


def _cut(prompt: TextPrompt, length: int, tokenizer: Any, plain: bool) -> str:
    """Return the prompt with as much of its document's beginning as `length` tokens have room for.

    Raises BadData when the prompt without a document is longer.
    """
    if _num_tokens(prompt.text, tokenizer, plain) <= length:
        return prompt.text
    document = encode_text(tokenizer, prompt.document)
    kept = min(len(document), length)
    while kept >= 0:
        text = prompt.before + tokenizer.decode(document[:kept]) + prompt.after
        excess = _num_tokens(text, tokenizer, plain) - length
        if excess <= 0:
            return text
        kept -= excess
    raise BadData(f"{length} tokens are too few for the question of a prompt: {prompt.before:.99}")
