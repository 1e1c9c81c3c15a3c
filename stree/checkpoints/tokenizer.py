"""Load a tokenizer from a checkpoint folder, and compare two tokenizers.

Equal vocabulary sizes prove nothing: a drafter whose ids mean other words drafts nonsense silently.
Target and drafter are therefore compared by all that decides how texts become tokens and end.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stree.common.errors import CheckpointRefused, NotFound, first_line
from stree.common.files import require_own_files
from stree.common.plain_data import read_json
from stree.models.config import HybridConfig

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


def load_tokenizer(directory: str | os.PathLike[str]) -> Any:
    """Return the `transformers` tokenizer stored in `directory`; no network, no remote code.

    Raises NotFound without the folder, CheckpointRefused when its tokenizer files are absent or
    unreadable, or when `require_own_files` refuses one of those that the library may open.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise NotFound(f"no folder {directory}: give the path of a checkpoint")
    require_own_files(directory)
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointRefused(
            f"{directory} holds no tokenizer (looked for {', '.join(TOKENIZER_FILES)}): "
            "copy the tokenizer files of the model that it was trained with"
        )
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            _refuse_what_lies_elsewhere(directory / name)
        # AutoTokenizer would ask config.json for a class; tokenizer.json says everything itself.
        if (directory / "tokenizer.json").is_file():
            tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        else:
            tokenizer = AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        _require_text_templates(tokenizer)
        return tokenizer
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # The libraries raise everything from KeyError to bare Exception on a damaged file, and a
        # panic of the one in Rust is no Exception.
        raise CheckpointRefused(
            f"the tokenizer in {directory} cannot be read ({type(error).__name__}: {error}): "
            "copy its files again"
        ) from error


def _refuse_what_lies_elsewhere(path: Path) -> None:
    """Refuse code in a tokenizer's folder, and files that its config names outside of it."""
    config = read_json(path) if path.exists() else {}
    if not isinstance(config, dict) or config.get("auto_map"):
        raise ValueError(f"{path.name} asks for code of its own, which is not run, or is no object")
    # Where the last owner's special_tokens_map_file was is written by transformers, and not read.
    for key in config.keys() - {"special_tokens_map_file"}:
        named = config[key] if isinstance(config[key], list) else [config[key]]
        for name in named:
            if "file" not in key or not isinstance(name, str) or Path(name).name == name:
                continue
            if any(os.path.exists(place) for place in (name, path.parent / name)):
                raise ValueError(f"{path.name} names the file {name:.99} elsewhere in {key}")


def _require_text_templates(tokenizer: Any) -> None:
    found = getattr(tokenizer, "chat_template", None)
    for template in found.values() if isinstance(found, dict) else [found]:
        if template is not None and not isinstance(template, str):
            raise ValueError(f"its chat template is a {type(template).__name__}, wanted text")


def eos_token_ids(config: HybridConfig, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end an answer: all that the model's config or its tokenizer names.

    Published folders name several, each in another file: an end of the text in config.json, an end
    of the turn in the tokenizer. Empty when neither names one.
    """
    end = getattr(tokenizer, "eos_token_id", None)
    of_tokenizer = () if end is None or end >= config.vocab_size else (end,)
    return tuple(dict.fromkeys((*config.eos_token_ids, *of_tokenizer)))


def fingerprint(tokenizer: Any) -> str:
    """Return the hex sha256 of the data that give token ids and conversations their meaning.

    Covers the sorted (id, token) pairs, the special tokens, the normaliser and the chat template.
    """
    content = {
        "vocabulary": sorted((index, token) for token, index in tokenizer.get_vocab().items()),
        "special": {name: _text(value) for name, value in tokenizer.special_tokens_map.items()},
        "normalizer": _normalizer(tokenizer),
        "chat_template": getattr(tokenizer, "chat_template", None),
    }
    text = json.dumps(content, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def tokens_sha256(tokenizer: Any) -> str:
    """Return the hex sha256 of what decides about tokens: equal ones split and end texts alike.

    Chat template, padding and other special tokens do not count: a drafter reads tokens alone.
    """
    text = json.dumps(_of_tokens(tokenizer), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def require_same_tokenizer(
    target_directory: str | os.PathLike[str], drafter_directory: str | os.PathLike[str]
) -> str:
    """Return a sentence on how two folders' tokenizers differ without another token, or "".

    They may differ in the chat template, and in special tokens other than the EOS.

    Raises CheckpointRefused, naming the first difference, when they split or end texts in two ways.
    """
    target, drafter = load_tokenizer(target_directory), load_tokenizer(drafter_directory)
    if difference := _first_difference(_of_tokens(target), _of_tokens(drafter)):
        raise CheckpointRefused(
            f"the drafter {drafter_directory} does not use the tokenizer of the target "
            f"{target_directory}: {difference}; use a drafter that was distilled from this target"
        )
    ours, theirs = target.special_tokens_map, drafter.special_tokens_map
    harmless = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    if getattr(target, "chat_template", None) != getattr(drafter, "chat_template", None):
        harmless.insert(0, "chat template")
    if not harmless:
        return ""
    return (
        f"the drafter {drafter_directory} has another {' and '.join(harmless)} than the target "
        f"{target_directory}, whose own is used: answers stay as they are, drafts may be accepted "
        "less often"
    )


def _of_tokens(tokenizer: Any) -> dict[str, Any]:
    """Return the parts of a tokenizer that decide about tokens, by their name in messages.

    A tokenizer in Python has its vocabulary and EOS alone.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    data = json.loads(backend.to_str()) if backend is not None else {}
    model = dict(data.get("model") or {})
    scores = model.pop("vocab", None)  # of Unigram; other models' are in the vocabulary
    return {
        "vocabulary": {index: token for token, index in tokenizer.get_vocab().items()},
        "merges": model.pop("merges", None),
        "scores": scores if isinstance(scores, list) else None,
        "models": model,
        "normalisers": data.get("normalizer"),
        "pre-tokenizers": data.get("pre_tokenizer"),
        "EOS tokens": _text(tokenizer.eos_token),
    }


def _first_difference(target: dict[str, Any], drafter: dict[str, Any]) -> str:
    ours, theirs = target["vocabulary"], drafter["vocabulary"]
    if len(ours) != len(theirs):
        return f"vocabulary of {len(theirs)} tokens, wanted {len(ours)}"
    for index in sorted(ours.keys() | theirs.keys()):
        if ours.get(index) != theirs.get(index):
            return f"id {index} is {theirs.get(index)!r}, wanted {ours.get(index)!r}"
    return next((f"the {name} differ" for name in target if target[name] != drafter[name]), "")


def _normalizer(tokenizer: Any) -> Any:
    """Return the normaliser's parameters as data; None for tokenizers without one, or in Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return json.loads(backend.to_str())["normalizer"] if backend is not None else None


def _text(value: Any) -> Any:
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else str(value)


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of plain text, without tokens that mark its begin or end."""
    with refusing_panics():
        return list(tokenizer(text, add_special_tokens=False).input_ids)


@contextmanager
def refusing_panics() -> Iterator[None]:
    """Raise `CheckpointRefused` for a panic of the tokenizer's Rust code inside the block.

    A panic is no `Exception` of Python. A regular expression that explodes on a text causes one,
    for example.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise CheckpointRefused(
            f"the tokenizer cannot encode the text ({first_line(error)}): its tokenizer.json asks "
            "for more than can be computed; take the published one"
        ) from error
