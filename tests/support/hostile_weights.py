"""Register weights and manifests that do harm or are damaged."""

from __future__ import annotations

import collections
import io
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hostile_files import (
    CHECKPOINT,
    case,
    checkpoint,
    edited_safetensors,
    linked,
    python,
    safetensors_file,
    shell,
    state_folder,
    torch_file,
    with_manifest,
    with_text,
    with_weights,
    written,
)
from safetensors.torch import load_file, save_file

from stree.common.files import MANIFEST_NAME, sha256_of_file

# Pickles

UNREADABLE = r"cannot be read"


@case("pickle bomb in .bin", "model", CHECKPOINT, r"calls 'posix.system'")
def _(folder: Path) -> Path:
    return with_weights(folder, torch_file({"model.norm.weight": shell(folder)}))


@case("pickle bomb in an old .bin", "model", CHECKPOINT, r"calls 'exec'")
def _(folder: Path) -> Path:
    content = torch_file({"w": python(folder)}, _use_new_zipfile_serialization=False)
    return with_weights(folder, content)


@case("plain pickle as .bin", "model", CHECKPOINT, UNREADABLE)
def _(folder: Path) -> Path:
    return with_weights(folder, pickle.dumps({"w": shell(folder)}))


@case("pickle bomb as state of a dict", "model", CHECKPOINT, r"calls 'posix.system'")
def _(folder: Path) -> Path:
    weights = collections.OrderedDict(w=torch.zeros(2))
    weights._metadata = {"version": shell(folder)}  # type: ignore[attr-defined]
    return with_weights(folder, torch_file(weights))


@case("pickle bomb in .pt", "model", CHECKPOINT, r"holds no weights")
def _(folder: Path) -> Path:
    return with_weights(folder, torch_file(shell(folder)), "model.pt")


@case("pickle bomb as .safetensors", "model", CHECKPOINT, UNREADABLE)
def _(folder: Path) -> Path:
    return with_weights(folder, torch_file({"w": shell(folder)}), "model.safetensors")


@case("pickle bomb as .ckpt", "resume", CHECKPOINT, r"none of the checkpoints")
def _(folder: Path) -> Path:
    content = torch_file({"state_dict": {}, "hyper_parameters": shell(folder)})
    written(folder, "run/checkpoints/step-00000009", content)
    written(folder, "run/checkpoints/last.ckpt", content)
    return folder / "run"


@case("pickle bomb as state.json", "training state", CHECKPOINT, r"no training state")
def _(folder: Path) -> Path:
    path = state_folder(folder, "")
    (path / "state.json").write_bytes(pickle.dumps(shell(folder)))
    manifest = json.loads((path / MANIFEST_NAME).read_text())
    manifest["files"]["state.json"] = {
        "sha256": sha256_of_file(path / "state.json"),
        "size_bytes": (path / "state.json").stat().st_size,
    }
    (path / MANIFEST_NAME).write_text(json.dumps(manifest))
    return path


@case("pickle bomb in distributed .metadata", "training state", CHECKPOINT, r"it lacks state_dict")
def _(folder: Path) -> Path:
    bomb = pickle.dumps(shell(folder))
    return state_folder(folder, {}, {".metadata": bomb, "__0_0.distcp": bomb})


@case("array of objects as .npy", "model", CHECKPOINT, UNREADABLE)
def _(folder: Path) -> Path:
    file = io.BytesIO()
    np.save(file, np.array([shell(folder)], dtype=object), allow_pickle=True)
    return with_weights(folder, file.getvalue())


@case("array of objects as .npz", "model", CHECKPOINT, UNREADABLE)
def _(folder: Path) -> Path:
    file = io.BytesIO()
    np.savez(file, w=np.array([python(folder)], dtype=object))
    return with_weights(folder, file.getvalue())


@case("pickle bomb in a drafter", "evaluation", CHECKPOINT, r"calls 'posix.system'")
def _(folder: Path) -> Path:
    return with_weights(folder, torch_file({"w": shell(folder)}))


@case("tensor that repeats one number", "model", CHECKPOINT, r"repeats its numbers")
def _(folder: Path) -> Path:
    weights = load_file(folder / "target" / "model.safetensors")
    return with_weights(folder, torch_file({n: w[:1].expand(10**9) for n, w in weights.items()
                                            if w.ndim == 1}))


# safetensors


@case("weights of another model", "model", CHECKPOINT, r"missing, .* not expected")
def _(folder: Path) -> Path:
    copy = checkpoint(folder)
    save_file({"transformer.h.0.attn.weight": torch.zeros(3)}, copy / "model.safetensors")
    return copy


@case("weights cut off", "model", CHECKPOINT, UNREADABLE)
def _(folder: Path) -> Path:
    content = (folder / "target" / "model.safetensors").read_bytes()
    return with_weights(folder, content[: len(content) // 2], "model.safetensors")


@case("weights of no bytes", "model", CHECKPOINT, UNREADABLE)
def _(folder: Path) -> Path:
    return with_weights(folder, b"", "model.safetensors")


@case("header of 2^60 bytes", "model", CHECKPOINT, UNREADABLE)
def _(folder: Path) -> Path:
    return with_weights(folder, struct.pack("<Q", 2**60) + b"{}", "model.safetensors")


@case("header nested 100,000 deep", "model", CHECKPOINT, UNREADABLE)
def _(folder: Path) -> Path:
    header = b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    return with_weights(folder, safetensors_file(header), "model.safetensors")


@case("tensors that overlap", "model", CHECKPOINT, UNREADABLE)
def _(folder: Path) -> Path:
    def edit(header: dict[str, Any]) -> None:
        names = [name for name in header if name != "__metadata__"]
        header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]

    return edited_safetensors(folder, edit)


@case("tensor of another number format", "model", CHECKPOINT, UNREADABLE)
def _(folder: Path) -> Path:
    return edited_safetensors(
        folder, lambda header: header["model.norm.weight"].update(dtype="F64")
    )


@case("tensor of integers", "model", CHECKPOINT, r"stored as I32")
def _(folder: Path) -> Path:
    return edited_safetensors(
        folder, lambda header: header["model.norm.weight"].update(dtype="I32")
    )


@case("tensor of 2^62 rows", "model", CHECKPOINT, UNREADABLE)
def _(folder: Path) -> Path:
    return edited_safetensors(
        folder, lambda header: header["model.norm.weight"].update(shape=[2**62, 2**62])
    )


@case("index of a folder above", "model", CHECKPOINT, r"wanted files beside it")
def _(folder: Path) -> Path:
    copy = checkpoint(folder)
    (copy / "model.safetensors").unlink()
    names = {"model.norm.weight": "../target/model.safetensors"}
    written(copy, "model.safetensors.index.json", json.dumps({"weight_map": names}))
    return copy


def shard(folder: Path, name: str) -> Path:
    copy = checkpoint(folder)
    (copy / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": name}}
    return written(copy, "model.safetensors.index.json", json.dumps(index)).parent


@case("shard with a name of 9,999 letters", "model", CHECKPOINT, r"index\.json .*too long")
def _(folder: Path) -> Path:
    return shard(folder, "x" * 9999)


@case("shard that is hidden", "model", CHECKPOINT, r"it names '\.own', wanted files beside it")
def _(folder: Path) -> Path:
    return shard(folder, ".own")


# Manifests


@case("manifest elsewhere", "model", CHECKPOINT, r"MANIFEST\.json is a link to .*, out of")
def _(folder: Path) -> Path:
    return linked(folder, MANIFEST_NAME, folder / "target" / MANIFEST_NAME, sealed=True)


@case("tokenizer out of a sealed checkpoint", "tokenizer", CHECKPOINT, r"tokenizer\.json is a link")
def _(folder: Path) -> Path:
    return linked(folder, "tokenizer.json", folder / "target/tokenizer.json", sealed=True)


@case("folder out of a sealed checkpoint", "model", CHECKPOINT, r"more is a link to .*, out of")
def _(folder: Path) -> Path:
    return linked(folder, "more", folder / "target", sealed=True)


@case("wrong hash", "model", CHECKPOINT, r"model\.safetensors has sha256")
def _(folder: Path) -> Path:
    return with_manifest(
        folder, lambda manifest: manifest["files"]["model.safetensors"].update(sha256="0" * 64)
    )


@case("manifest of a path above", "model", CHECKPOINT, r"etc/passwd is missing")
def _(folder: Path) -> Path:
    return with_manifest(folder, lambda manifest: _list(manifest, "../" * 20 + "etc/passwd"))


@case("manifest of an absolute path", "model", CHECKPOINT, r"/etc/passwd is missing")
def _(folder: Path) -> Path:
    return with_manifest(folder, lambda manifest: _list(manifest, "/etc/passwd"))


def _list(manifest: dict[str, Any], name: str) -> None:
    path = Path("/etc/passwd")
    manifest["files"][name] = {"sha256": sha256_of_file(path), "size_bytes": path.stat().st_size}


@case("link out of the checkpoint", "model", CHECKPOINT, r"config\.json is a link to")
def _(folder: Path) -> Path:
    return linked(folder, "config.json", folder / "target/config.json", sealed=True)


@case("manifest nested 100,000 deep", "model", CHECKPOINT, r"MANIFEST\.json .*nested too deep")
def _(folder: Path) -> Path:
    return with_text(folder, MANIFEST_NAME, "[" * 100_000, sealed=True)


@case("manifest with a file twice", "model", CHECKPOINT, r"'config\.json' is given twice")
def _(folder: Path) -> Path:
    entry = '"config.json": {"sha256": "", "size_bytes": 0}'
    text = '{"version": 1, "files": {' + f"{entry}, {entry}" + "}}"
    return with_text(folder, MANIFEST_NAME, text, sealed=True)


@case("manifest of a drafter that is a list", "evaluation", CHECKPOINT, r"MANIFEST\.json cannot")
def _(folder: Path) -> Path:
    return with_text(folder, MANIFEST_NAME, '{"version": 1, "files": ["config.json"]}')


@case("file beside the manifest", "model", CHECKPOINT, r"not listed")
def _(folder: Path) -> Path:
    return with_text(folder, "modeling_own.py", "import os", sealed=True)
