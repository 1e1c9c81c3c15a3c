"""Drafters by name: a checkpoint's folder, of any tokenizer, its head in 8 bits or not, n-grams, or
both."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stree.checkpoints.tokenizer import encode_text, load_tokenizer
from stree.common.errors import NotFound, UsageError
from stree.common.plain_data import read_text
from stree.drafters import SiblingSampling
from stree.drafters.cross_tokenizer import CrossTokenizerSpec
from stree.drafters.model import ModelDrafterSpec
from stree.drafters.ngram import NGram
from stree.models.model import HybridModel

_NGRAM = re.compile(r"(?:(?P<folder>.+)\+)?ngram(?::(?P<context>[^,]*)(?:,(?P<corpus>.+))?)?", re.S)
# Of what `DrafterName.parse` takes
DRAFTERS = (
    "FOLDER; float8:FOLDER (its head in 8 bits); independent:FOLDER (siblings each from all of its "
    "distribution) or top:FOLDER (its best tokens, not drawn); text:FOLDER (of another tokenizer); "
    "ngram:6 or ngram:6,FILE (from the text, and a corpus); FOLDER+ngram:6 (both in one tree)"
)
_TEXT, _FLOAT8 = "text:", "float8:"
_SIBLINGS = {"independent:": SiblingSampling.INDEPENDENT, "top:": SiblingSampling.DETERMINISTIC}


@dataclass(frozen=True)
class DrafterName:
    """What a name asks for: a folder, n-grams (context of 0: none) with a corpus' file, or both;
    retokenised, a folder whose drafts are handed over as text; float8, one whose model drafts with
    its head in 8 bits; siblings, how its model draws them
    (`stree.drafters.model.ModelDrafterSpec`)."""

    folder: str | os.PathLike[str] | None
    context: int = 0
    corpus: str | None = None
    retokenised: bool = False
    float8: bool = False
    siblings: SiblingSampling = SiblingSampling.WITHOUT_REPLACEMENT

    @classmethod
    def parse(cls, name: str) -> DrafterName:
        """FOLDER, text:FOLDER, ngram[:CONTEXT[,FILE]] or FOLDER+ngram[…], and with a folder
        independent: or top:, and float8:, before all that; a folder of such a name is one.

        Raises `UsageError` for a context that is no whole number of at least 1, for float8: without
        a folder, and for independent: and top: without one whose model draws.
        """
        if name.startswith(_FLOAT8) and not os.path.isdir(name):
            of = cls.parse(name.removeprefix(_FLOAT8))
            if not of.folder or of.float8:
                raise UsageError(
                    f"drafter {name!r} has no head to put in 8 bits, wanted float8:FOLDER, once"
                )
            return replace(of, float8=True)
        for prefix, siblings in _SIBLINGS.items():
            if not name.startswith(prefix) or os.path.isdir(name):
                continue
            of = cls.parse(name.removeprefix(prefix))
            if not of.folder or of.retokenised or not of.draws_in_turn:
                raise UsageError(
                    f"drafter {name!r} has no model that may draw siblings so (n-grams and text: "
                    f"draw none): wanted {prefix}FOLDER, once"
                )
            return replace(of, siblings=siblings)
        if name.startswith(_TEXT) and not os.path.isdir(name):
            return cls(name.removeprefix(_TEXT), retokenised=True)
        found = None if os.path.isdir(name) else _NGRAM.fullmatch(name)
        if found is None:
            return cls(name)
        context = found["context"] or str(NGram.context)
        if not re.fullmatch("[0-9]{1,4}", context) or int(context) < 1:
            raise UsageError(
                f"drafter {name!r} has the context {context!r}, wanted a whole number from 1 to "
                "9999: ngram:6 or ngram:6,FILE"
            )
        return cls(found["folder"], int(context), found["corpus"])

    def __str__(self) -> str:
        """As `parse` takes it."""
        ngram = f"ngram:{self.context}" + (f",{self.corpus}" if self.corpus else "")
        parts = [str(self.folder or ""), ngram if self.context else ""]
        head, text = _FLOAT8 if self.float8 else "", _TEXT if self.retokenised else ""
        drawn = next((each for each in _SIBLINGS if _SIBLINGS[each] is self.siblings), "")
        return head + drawn + text + "+".join(filter(None, parts))

    def shown(self, folder: str) -> str:
        """For people: with the folder called so, and a corpus by its file's name alone."""
        corpus = self.corpus and Path(self.corpus).name
        return str(replace(self, folder=self.folder and folder, corpus=corpus))

    @property
    def is_plain(self) -> bool:
        """A folder as it is."""
        return self.is_folder and not self.float8 and self.draws_in_turn

    @property
    def is_folder(self) -> bool:
        """Of the target's tokenizer, and nothing beside; its head may be in 8 bits, and it may draw
        siblings in any way."""
        return not self.context and not self.retokenised

    @property
    def draws_in_turn(self) -> bool:
        """Siblings without replacement, as models do where a name asks for nothing else."""
        return self.siblings is SiblingSampling.WITHOUT_REPLACEMENT

    @property
    def grows(self) -> bool:
        """Whether it fills trees that grow, as `Drafter.grows`."""
        return self.is_folder and self.siblings is not SiblingSampling.INDEPENDENT

    def corpus_text(self) -> str:
        """Raises `NotFound` without such a file."""
        if self.corpus is None:
            return ""
        if not os.path.isfile(self.corpus):
            raise NotFound(f"there is no corpus {self.corpus:.200} for n-grams: give a text file")
        try:
            return read_text(Path(self.corpus))
        except (OSError, ValueError) as error:
            raise UsageError(f"the corpus {self.corpus} cannot be read: {error}") from error

    def make(
        self, model: HybridModel | None, tokenizer: Any
    ) -> ModelDrafterSpec | NGram | CrossTokenizerSpec:
        """For a decoder; model, of the folder, and tokenizer, the target's, or None. Raises
        `UsageError` where it is needed and not there."""
        if self.float8:
            assert model is not None
            model.put_head_in_8_bits()
        if self.is_folder:
            assert model is not None
            return ModelDrafterSpec(model, self.siblings)
        text = self.corpus_text()
        if tokenizer is None and (text or self.retokenised):
            raise UsageError(
                "n-grams of a file need a tokenizer, and so do drafters of another one: make "
                "stree.drafters.ngram.NGram or "
                "stree.drafters.cross_tokenizer.CrossTokenizerSpec yourself"
            )
        if self.retokenised:
            assert model is not None and self.folder is not None
            return CrossTokenizerSpec(model, load_tokenizer(self.folder), tokenizer)
        corpus = tuple(encode_text(tokenizer, text) if text else ())
        return NGram(self.context, corpus, model, self.siblings)
