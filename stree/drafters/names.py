"""Names of drafters: a checkpoint's folder with or without prefixes, `mtp`, n-grams, or both.

A name is parsed, and the loading of its model planned, without PyTorch.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stree.checkpoints.configs import CheckpointConfig, load_config, read_checkpoint_config
from stree.checkpoints.heads.eagle import plan_eagle, read_eagle_config
from stree.checkpoints.heads.mtp import plan_mtp, read_mtp_config
from stree.checkpoints.plan.load_plan import LoadPlan, plan_model
from stree.checkpoints.tokenizer import encode_text, load_tokenizer
from stree.common.errors import NotFound, UsageError
from stree.common.plain_data import read_text
from stree.drafters import NGRAM_CONTEXT, SiblingSampling
from stree.models.config import HybridConfig

if TYPE_CHECKING:
    import torch

    from stree.drafters.cross_tokenizer import CrossTokenizerSpec
    from stree.drafters.model import ModelDrafterSpec
    from stree.drafters.ngram import NGram
    from stree.models.model import HybridModel

_NGRAM = re.compile(r"(?:(?P<folder>.+)\+)?ngram(?::(?P<context>[^,]*)(?:,(?P<corpus>.+))?)?", re.S)
# Forms of names that `DrafterName.parse` takes
DRAFTERS = (
    "FOLDER; float8:FOLDER (its head in 8 bits); independent:FOLDER (siblings each from all of its "
    "distribution) or top:FOLDER (its best tokens, not drawn); temperature=0.6:FOLDER (drafts "
    "drawn at 0.6, whatever the request's); mtp in the place of FOLDER (the target's own head for "
    "multi-token prediction); eagle:FOLDER (a published EAGLE-3 head of the target); text:FOLDER "
    "(of another tokenizer); "
    "ngram:6 or ngram:6,FILE (from the text, and a corpus); FOLDER+ngram:6 (both in one tree)"
)
MTP, _TEXT, _FLOAT8, _EAGLE = "mtp", "text:", "float8:", "eagle:"
_TEMPERATURE = re.compile(r"temperature=([^:]*):(.*)", re.S)
_SIBLINGS = {"independent:": SiblingSampling.INDEPENDENT, "top:": SiblingSampling.DETERMINISTIC}


@dataclass(frozen=True)
class DrafterName:
    """A parsed name of a drafter: a checkpoint's folder or the target's MTP head, n-grams, or both.

    Attributes:
        folder: The checkpoint's folder; None for n-grams alone, and for an MTP head.
        context: Tokens by which n-grams compare places; 0 for no n-grams.
        corpus: File of a text for n-grams, if any.
        retokenised: Whether drafts are handed over as text, for another tokenizer.
        float8: Whether the model drafts with its head in 8 bits.
        siblings: How the model draws siblings (`stree.drafters.model.ModelDrafterSpec`).
        temperature: Temperature at which the model draws; None for the request's.
        mtp: Whether the model is the MTP head in the target's checkpoint.
        eagle: Whether the folder has an EAGLE-3 head in a published layout.
    """

    folder: str | os.PathLike[str] | None
    context: int = 0
    corpus: str | None = None
    retokenised: bool = False
    float8: bool = False
    siblings: SiblingSampling = SiblingSampling.WITHOUT_REPLACEMENT
    temperature: float | None = None
    mtp: bool = False
    eagle: bool = False

    @classmethod
    def parse(cls, name: str | os.PathLike[str]) -> DrafterName:
        """Parse FOLDER, text:FOLDER, ngram[:CONTEXT[,FILE]] or FOLDER+ngram[…].

        With a folder, independent: or top:, temperature=T:, and float8: may stand before it; except
        after text:, mtp may stand for the folder, and eagle: directly before it. A path, and an
        existing folder of such a name, is a FOLDER.

        Raises `UsageError` for a context that is no whole number of at least 1, for float8: without
        a folder, and for independent:, top: and temperature= without a folder whose model draws.
        """
        if not isinstance(name, str) or os.path.isdir(name):
            return cls(name)
        if name.startswith(_FLOAT8):
            of = cls.parse(name.removeprefix(_FLOAT8))
            if not of.has_model or of.float8:
                raise UsageError(
                    f"drafter {name!r} has no head to put in 8 bits, wanted float8:FOLDER, once"
                )
            return replace(of, float8=True)
        if warm := _TEMPERATURE.fullmatch(name):
            of = cls.parse(warm[2])
            number = warm[1] if re.fullmatch(r"[0-9]{0,3}\.?[0-9]{1,6}", warm[1]) else "0"
            if not of.draws or of.temperature is not None or float(number) <= 0:
                raise UsageError(
                    f"drafter {name!r} draws nothing at a temperature of its own: wanted "
                    "temperature=0.6:FOLDER or another number above 0, once, and a model that draws"
                )
            return replace(of, temperature=float(number))
        for prefix, siblings in _SIBLINGS.items():
            if not name.startswith(prefix):
                continue
            of = cls.parse(name.removeprefix(prefix))
            if not of.draws or not of.draws_in_turn or of.temperature is not None:
                raise UsageError(
                    f"drafter {name!r} has no model that may draw siblings so (n-grams and text: "
                    f"draw none): wanted {prefix}FOLDER, once"
                )
            return replace(of, siblings=siblings)
        if name.startswith(_TEXT):
            return cls(name.removeprefix(_TEXT), retokenised=True)
        if name == MTP:
            return cls(None, mtp=True)
        if name.startswith(_EAGLE):
            of = cls.parse(name.removeprefix(_EAGLE))
            if of.folder is None or replace(of, context=0, corpus=None) != cls(of.folder):
                raise UsageError(
                    f"drafter {name!r} names no folder of an EAGLE-3 head: wanted eagle:FOLDER, "
                    "with other prefixes before eagle:"
                )
            return replace(of, eagle=True)
        found = _NGRAM.fullmatch(name)
        if found is None:
            return cls(name)
        context = found["context"] or str(NGRAM_CONTEXT)
        if not re.fullmatch("[0-9]{1,4}", context) or int(context) < 1:
            raise UsageError(
                f"drafter {name!r} has the context {context!r}, wanted a whole number from 1 to "
                "9999: ngram:6 or ngram:6,FILE"
            )
        model = cls(None) if found["folder"] is None else cls.parse(found["folder"])
        return replace(model, context=int(context), corpus=found["corpus"])

    def __str__(self) -> str:
        """Return the name as `parse` takes it."""
        ngram = f"ngram:{self.context}" + (f",{self.corpus}" if self.corpus else "")
        parts = [MTP if self.mtp else str(self.folder or ""), ngram if self.context else ""]
        head, text = _FLOAT8 if self.float8 else "", _TEXT if self.retokenised else ""
        text = _EAGLE if self.eagle else text
        drawn = next((each for each in _SIBLINGS if _SIBLINGS[each] is self.siblings), "")
        warm = "" if self.temperature is None else f"temperature={self.temperature:g}:"
        return head + warm + drawn + text + "+".join(filter(None, parts))

    def shown(self, folder: str) -> str:
        """Return the name for people: with `folder` as the folder, and a corpus without path."""
        corpus = self.corpus and Path(self.corpus).name
        return str(replace(self, folder=self.folder and folder, corpus=corpus))

    @property
    def is_plain(self) -> bool:
        """True for a folder without any prefix."""
        return self == DrafterName(self.folder) and self.folder is not None

    @property
    def has_model(self) -> bool:
        """True if a model drafts, of whatever vocabulary."""
        return bool(self.folder) or self.mtp

    @property
    def is_head(self) -> bool:
        """True for a head of the target, to which the target may lend its ends."""
        return self.mtp or self.eagle

    @property
    def draws(self) -> bool:
        """True if a model of the target's vocabulary drafts, and its drafts are drawn."""
        in_some_way = self.siblings is not SiblingSampling.DETERMINISTIC
        return self.has_model and not self.retokenised and in_some_way

    @property
    def is_folder(self) -> bool:
        """True for a model of the target's tokenizer, without n-grams.

        Its head may be in 8 bits, and it may draw siblings in any way.
        """
        return not self.context and not self.retokenised

    @property
    def draws_in_turn(self) -> bool:
        """True if siblings are drawn without replacement, which is the default."""
        return self.siblings is SiblingSampling.WITHOUT_REPLACEMENT

    @property
    def grows(self) -> bool:
        """True if it fills dynamic trees, as `Drafter.grows`."""
        return self.is_folder and self.siblings is not SiblingSampling.INDEPENDENT

    def corpus_text(self) -> str:
        """Return the text of the corpus, "" for none. Raises `NotFound` without its file."""
        if self.corpus is None:
            return ""
        if not os.path.isfile(self.corpus):
            raise NotFound(f"there is no corpus {self.corpus:.200} for n-grams: give a text file")
        try:
            return read_text(Path(self.corpus))
        except (OSError, ValueError) as error:
            raise UsageError(f"the corpus {self.corpus} cannot be read: {error}") from error

    def plan(self, target: str | os.PathLike[str]) -> LoadPlan | None:
        """Return the plan of loading the model that drafts, or None without one.

        The folder of an MTP head's tensors is that of the target. Raises as `plan_model`,
        `plan_mtp` and `plan_eagle` do.
        """
        if self.mtp:
            return plan_mtp(target)
        if self.folder is None:
            return None
        if self.eagle:
            return plan_eagle(self.folder, load_config(target))
        return plan_model(self.folder)

    def load(
        self, target: str | os.PathLike[str], device: torch.device | str, dtype: torch.dtype
    ) -> HybridModel | None:
        """Load the model of `plan`; None without one. Raises as `plan` and `build` do."""
        from stree.checkpoints.plan.build import build

        plan = self.plan(target)
        return None if plan is None else build(plan, device, dtype)

    def config(self, target: str | os.PathLike[str]) -> HybridConfig | None:
        """Return the config of the model of `plan`, that of an MTP head with a single token."""
        checkpoint = self.checkpoint(target)
        if checkpoint is None:
            return None
        # Embedding and head are the target's
        return checkpoint.model.replace(vocab_size=1) if self.mtp else checkpoint.model

    def checkpoint(self, target: str | os.PathLike[str]) -> CheckpointConfig | None:
        """Return the checkpoint's config of the model of `plan`; None without one."""
        if self.mtp:
            return read_mtp_config(target)
        if self.folder is None:
            return None
        if self.eagle:
            return read_eagle_config(self.folder, load_config(target))
        return read_checkpoint_config(Path(self.folder))

    def make(
        self, model: HybridModel | None, tokenizer: Any, target: HybridModel | None = None
    ) -> ModelDrafterSpec | NGram | CrossTokenizerSpec:
        """Return the settings of the drafter for a decoder.

        Args:
            model: The model of `load`.
            tokenizer: The target's. None raises `UsageError` where one is needed.
            target: The target, whose embedding and head a head of it may share. None leaves that
                to the caller (`share_ends`).
        """
        from stree.drafters.cross_tokenizer import CrossTokenizerSpec
        from stree.drafters.model import ModelDrafterSpec
        from stree.drafters.ngram import NGram
        from stree.models.slicing import share_ends

        if self.is_head and target is not None:
            assert model is not None
            share_ends(model, target)
        if self.float8:
            assert model is not None
            model.put_head_in_8_bits()
        if self.is_folder:
            assert model is not None
            return ModelDrafterSpec(model, self.siblings, self.temperature)
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
        return NGram(self.context, corpus, model, self.siblings, self.temperature)
