"""Build hostile files, and keep the list of them that hostile_*.py fill.

Every builder gets an empty folder beside which `target` and `prompts.jsonl` lie (a good checkpoint
and good prompts), and returns the path that is then loaded. Bombs would leave a file named CANARY.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stree.common.files import MANIFEST_NAME, publish_directory, sha256_of_file

CANARY = "executed"
CHECKPOINT, DATA, USAGE = 66, 65, 2
CODES = {  # of entries whose refusals are not CHECKPOINT
    **dict.fromkeys(("conversations", "generated data", "prompts", "report", "costs"), DATA),
    **dict.fromkeys(("tree", "evaluation config", "training config", "baseline"), USAGE),
}
Builder = Callable[[Path], Path]


@dataclass(frozen=True)
class Case:
    """Names a hostile file, the entry of hostile_loads.py that loads it, and how that must end.

    Wanted are the exit code and the reason, as a regular expression for the error's text.
    """

    name: str
    entry: str
    code: int
    reason: str  # a regular expression
    build: Builder


CASES: list[Case] = []


def case(
    name: str, entry: str, reason: str, build: Builder | None = None, code: int | None = None
) -> Any:
    """Add a case; without a builder, decorate one. The code is usually that of the entry."""
    if build is None:
        return lambda build: case(name, entry, reason, build, code)
    CASES.append(Case(name, entry, code or CODES.get(entry, CHECKPOINT), reason, build))


class Bomb:
    """Calls `function` with the arguments when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def shell(folder: Path) -> Bomb:
    return Bomb(os.system, f"touch {folder / CANARY}")


def python(folder: Path) -> Bomb:
    return Bomb(exec, f"open({str(folder / CANARY)!r}, 'w')")


def checkpoint(folder: Path, sealed: bool = False) -> Path:
    """Copy the good checkpoint, without its manifest unless `sealed`."""
    copy = folder / "checkpoint"
    shutil.copytree(folder / "target", copy)
    if not sealed:
        (copy / MANIFEST_NAME).unlink()
    return copy


def with_weights(folder: Path, content: bytes, name: str = "pytorch_model.bin") -> Path:
    """Copy the good checkpoint, and write `content` as its weights, in a file called `name`."""
    copy = checkpoint(folder)
    (copy / "model.safetensors").unlink()
    (copy / name).write_bytes(content)
    return copy


def with_json(folder: Path, name: str, **changes: Any) -> Path:
    copy = checkpoint(folder)
    path = copy / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return copy


def with_text(folder: Path, name: str, text: str | bytes, sealed: bool = False) -> Path:
    copy = checkpoint(folder, sealed)
    (copy / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return copy


def stretched(folder: Path, name: str, num_bytes: int) -> Path:
    """Copy the good checkpoint, with a file that seems large and takes no room on the disk."""
    copy = checkpoint(folder)
    (copy / name).touch()
    os.truncate(copy / name, num_bytes)
    return copy


def linked(folder: Path, name: str, to: str | Path, sealed: bool = False) -> Path:
    """Copy the good checkpoint, with its file `name` replaced by a link to `to`."""
    copy = checkpoint(folder, sealed)
    (copy / name).unlink(missing_ok=True)
    (copy / name).symlink_to(to)
    return copy


def relist(folder: Path, name: str, file: Path | None = None, **changes: Any) -> None:
    """Let a folder's manifest say of `name` what is true of `file`, or `changes`."""
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    if file is not None:
        changes = {"sha256": sha256_of_file(file), "size_bytes": file.stat().st_size}
    manifest["files"].setdefault(name, {}).update(changes)
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))


def with_manifest(folder: Path, name: str, file: Path | None = None, **changes: Any) -> Path:
    copy = checkpoint(folder, sealed=True)
    relist(copy, name, file, **changes)
    return copy


def torch_file(content: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


def safetensors_file(header: Mapping[str, Any] | bytes, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def edited_safetensors(folder: Path, **changes: Any) -> Path:
    """Copy the good checkpoint, with `changes` to what its weights' header says of one tensor."""
    content = (folder / "target" / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    header["model.norm.weight"].update(changes)
    changed = safetensors_file(header, content[8 + size :])
    return with_weights(folder, changed, "model.safetensors")


def state_folder(folder: Path, state: Any, extra: Mapping[str, bytes] | None = None) -> Path:
    """Write a training checkpoint whose manifest is right, so that only the content is wrong.

    Args:
        state: content of state.pt, as bytes or as a value to save.
        extra: further files, by name.
    """
    path = folder / "run" / "checkpoints" / "step-00000003"
    with publish_directory(path, {"step": 3}) as new:
        content = state if isinstance(state, bytes) else torch_file(state)
        (new / "state.pt").write_bytes(content)
        for name, content in (extra or {}).items():
            (new / name).write_bytes(content)
    return path


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def config_case(name: str, reason: str, **changes: Any) -> None:
    case(f"config {name}", "model", reason, lambda at: with_json(at, "config.json", **changes))


def mixer_case(name: str, reason: str, **changes: Any) -> None:
    """Register a checkpoint with `changes` to mamba_config.json.

    config.json gets the same sizes, where it has them.
    """

    def build(folder: Path) -> Path:
        copy = with_json(folder, "mamba_config.json", **changes)
        path = copy / "config.json"
        config = json.loads(path.read_text())
        names = {"d_model": "hidden_size", "n_layer": "num_hidden_layers"}
        same = {names.get(name, name): value for name, value in changes.items()}
        config.update({name: value for name, value in same.items() if name in config})
        path.write_text(json.dumps(config))
        return copy

    case(f"config {name}", "model", reason, build)
