"""Identity of a checkpoint: a hash of all files on which its results depend."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from stree.checkpoints.tokenizer import TOKENIZER_FILES
from stree.common.errors import CheckpointRefused, NotFound
from stree.common.files import MANIFEST_NAME, read_manifest, require_own_files, sha256_of_file
from stree.speculation_profile import PROFILE_NAME

CURVE_NAME = "tau_vs_step.svg"  # beside a model card
_WEIGHT_SUFFIXES = (".safetensors", ".bin")
# Files of an export that describe it, and change none of its results.
_UNCOUNTED = (MANIFEST_NAME, "provenance.json", PROFILE_NAME, CURVE_NAME)
_OF_TOKENIZER = (
    *TOKENIZER_FILES, "merges.txt", "added_tokens.json", "special_tokens_map.json",
    "chat_template.jinja", "chat_template.json",
)


def checkpoint_sha256(directory: str | os.PathLike[str], tokenizer: bool = True) -> str:
    """Return the sha256 that identifies a checkpoint.

    It is a hash of the sha256 of all files (weights, configs, tokenizer, chat template) except
    provenance.json, measurements and *.md. The files' hashes are taken from the manifest if there
    is one (loading verifies it), else computed. tokenizer=False leaves out the files of the
    tokenizer and its chat template. Raises `NotFound` without the folder, and `CheckpointRefused`
    without weights.
    """
    directory = Path(directory)
    manifest = directory / MANIFEST_NAME
    if not directory.is_dir():
        raise NotFound(f"no folder {directory}: give the path of a checkpoint")
    require_own_files(directory)
    names = sorted(path.name for path in directory.iterdir() if path.is_file())
    if not any(name.endswith(_WEIGHT_SUFFIXES) for name in names):
        raise CheckpointRefused(f"{directory} holds no weights (*.safetensors or *.bin)")
    listed = read_manifest(directory)["files"] if manifest.exists() else {}
    uncounted = _UNCOUNTED if tokenizer else (*_UNCOUNTED, *_OF_TOKENIZER)
    parts = [
        f"{name} {listed[name]['sha256'] if name in listed else sha256_of_file(directory / name)}"
        for name in names
        if not name.startswith(".") and not name.endswith(".md") and name not in uncounted
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
