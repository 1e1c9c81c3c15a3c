"""Drafters by name: a checkpoint's folder, n-grams, or both."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stree.drafters.ngram import NGram
from stree.errors import NotFound, UsageError
from stree.models.hybrid import HybridModel
from stree.plain_data import read_text

_NGRAM = re.compile(r"(?:(?P<folder>.+)\+)?ngram(?::(?P<context>[^,]*)(?:,(?P<corpus>.+))?)?", re.S)


@dataclass(frozen=True)
class DrafterName:
    """What a name asks for: a folder, n-grams (context of 0: none) with a corpus' file, or both."""

    folder: str | os.PathLike[str] | None
    context: int = 0
    corpus: str | None = None

    @classmethod
    def parse(cls, name: str) -> DrafterName:
        """FOLDER, ngram[:CONTEXT[,FILE]] or FOLDER+ngram[…]; a folder of such a name is one.

        Raises `UsageError` for a context that is no whole number of at least 1.
        """
        found = None if Path(name).is_dir() else _NGRAM.fullmatch(name)
        if found is None:
            return cls(name)
        context = found["context"] or str(NGram.context)
        if not re.fullmatch("[0-9]{1,4}", context) or int(context) < 1:
            raise UsageError(
                f"drafter {name!r} has the context {context!r}, wanted a whole number from 1 to "
                "9999: ngram:6 or ngram:6,FILE"
            )
        return cls(found["folder"], int(context), found["corpus"])

    @property
    def is_folder(self) -> bool:
        return not self.context

    def corpus_text(self) -> str:
        """Raises `NotFound` without such a file."""
        if self.corpus is None:
            return ""
        if not Path(self.corpus).is_file():
            raise NotFound(f"there is no corpus {self.corpus} for n-grams: give a text file")
        try:
            return read_text(Path(self.corpus))
        except (OSError, ValueError) as error:
            raise UsageError(f"the corpus {self.corpus} cannot be read: {error}") from error

    def make(
        self, model: HybridModel | None, encode: Callable[[str], Sequence[int]]
    ) -> HybridModel | NGram:
        """For a decoder; model, of the folder, and encode, the target's tokenizer."""
        if self.is_folder:
            assert model is not None
            return model
        return NGram(self.context, tuple(encode(self.corpus_text())), model)
