"""Register weights and manifests that do harm or are damaged."""

from __future__ import annotations

import collections
import io
import json
import pickle
import struct
from pathlib import Path

import numpy as np
import torch
from hostile_files import (
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

from stree.common.files import MANIFEST_NAME

# Pickles

UNREADABLE = r"cannot be read"


case("pickle bomb in .bin", "model", r"calls 'posix.system'",
     lambda at: with_weights(at, torch_file({"model.norm.weight": shell(at)})))


@case("pickle bomb in an old .bin", "model", r"calls 'exec'")
def _(folder: Path) -> Path:
    content = torch_file({"w": python(folder)}, _use_new_zipfile_serialization=False)
    return with_weights(folder, content)


case("plain pickle as .bin", "model", UNREADABLE,
     lambda at: with_weights(at, pickle.dumps({"w": shell(at)})))


@case("pickle bomb as state of a dict", "model", r"calls 'posix.system'")
def _(folder: Path) -> Path:
    weights = collections.OrderedDict(w=torch.zeros(2))
    weights._metadata = {"version": shell(folder)}  # type: ignore[attr-defined]
    return with_weights(folder, torch_file(weights))


case("pickle bomb in .pt", "model", r"holds no weights",
     lambda at: with_weights(at, torch_file(shell(at)), "model.pt"))
case("pickle bomb as .safetensors", "model", UNREADABLE,
     lambda at: with_weights(at, torch_file({"w": shell(at)}), "model.safetensors"))


@case("pickle bomb as .ckpt", "resume", r"none of the checkpoints")
def _(folder: Path) -> Path:
    content = torch_file({"state_dict": {}, "hyper_parameters": shell(folder)})
    for name in ("step-00000009", "last.ckpt"):
        written(folder, f"run/checkpoints/{name}", content)
    return folder / "run"


case("pickle bomb as training state", "training state", r"no training state.*calls",
     lambda at: state_folder(at, shell(at)))
case("bare pickle bomb as training state", "training state", r"no training state",
     lambda at: state_folder(at, pickle.dumps(shell(at))))


@case("pickle bomb in distributed .metadata", "training state", r"it lacks state_dict")
def _(folder: Path) -> Path:
    bomb = pickle.dumps(shell(folder))
    return state_folder(folder, {}, {".metadata": bomb, "__0_0.distcp": bomb})


@case("array of objects as .npy", "model", UNREADABLE)
def _(folder: Path) -> Path:
    file = io.BytesIO()
    np.save(file, np.array([shell(folder)], dtype=object), allow_pickle=True)
    return with_weights(folder, file.getvalue())


@case("array of objects as .npz", "model", UNREADABLE)
def _(folder: Path) -> Path:
    file = io.BytesIO()
    np.savez(file, w=np.array([python(folder)], dtype=object))
    return with_weights(folder, file.getvalue())


case("pickle bomb in a drafter", "evaluation", r"calls 'posix.system'",
     lambda at: with_weights(at, torch_file({"w": shell(at)})))


@case("tensor that repeats one number", "model", r"repeats its numbers")
def _(folder: Path) -> Path:
    weights = load_file(folder / "target" / "model.safetensors")
    return with_weights(folder, torch_file({n: w[:1].expand(10**9) for n, w in weights.items()
                                            if w.ndim == 1}))


# safetensors


@case("weights of another model", "model", r"missing, .* not expected")
def _(folder: Path) -> Path:
    copy = checkpoint(folder)
    save_file({"transformer.h.0.attn.weight": torch.zeros(3)}, copy / "model.safetensors")
    return copy


@case("weights cut off", "model", UNREADABLE)
def _(folder: Path) -> Path:
    content = (folder / "target" / "model.safetensors").read_bytes()
    return with_weights(folder, content[: len(content) // 2], "model.safetensors")


case("weights of no bytes", "model", UNREADABLE,
     lambda at: with_weights(at, b"", "model.safetensors"))
case("header of 2^60 bytes", "model", r"header has 1,152,921,504,606,846,976 bytes, at most",
     lambda at: with_weights(at, struct.pack("<Q", 2**60) + b"{}", "model.safetensors"))


@case("header of a million tensors", "model", r"header has \d\d,\d+,\d+ bytes, at most")
def _(folder: Path) -> Path:
    empty = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = ",".join(f'"{number}":{empty}' for number in range(1_000_000))
    return with_weights(folder, safetensors_file(f"{{{header}}}".encode()), "model.safetensors")


@case("header nested 100,000 deep", "model", UNREADABLE)
def _(folder: Path) -> Path:
    header = b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    return with_weights(folder, safetensors_file(header), "model.safetensors")


case("tensors that overlap", "model", UNREADABLE,
     lambda at: edited_safetensors(at, data_offsets=[0, 128]))  # the first's beginning
case("tensor of another number format", "model", UNREADABLE,
     lambda at: edited_safetensors(at, dtype="F64"))
case("tensor of integers", "model", r"stored as I32",
     lambda at: edited_safetensors(at, dtype="I32"))
case("tensor of 2^62 rows", "model", UNREADABLE,
     lambda at: edited_safetensors(at, shape=[2**62, 2**62]))


@case("index of a folder above", "model", r"wanted files beside it")
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


case("shard with a name of 9,999 letters", "model", r"index\.json .*too long",
     lambda at: shard(at, "x" * 9999))
case("shard that is hidden", "model", r"it names '\.own', wanted files beside it",
     lambda at: shard(at, ".own"))


# Manifests


case("manifest elsewhere", "model", r"MANIFEST\.json is a link to .*, out of",
     lambda at: linked(at, MANIFEST_NAME, at / "target" / MANIFEST_NAME, sealed=True))
case("tokenizer out of a sealed checkpoint", "tokenizer", r"tokenizer\.json is a link",
     lambda at: linked(at, "tokenizer.json", at / "target/tokenizer.json", sealed=True))
case("folder out of a sealed checkpoint", "model", r"more is a link to .*, out of",
     lambda at: linked(at, "more", at / "target", sealed=True))
case("wrong hash", "model", r"model\.safetensors has sha256",
     lambda at: with_manifest(at, "model.safetensors", sha256="0" * 64))
case("manifest of a path above", "model", r"etc/passwd is missing",
     lambda at: with_manifest(at, "../" * 20 + "etc/passwd", Path("/etc/passwd")))
case("manifest of an absolute path", "model", r"/etc/passwd is missing",
     lambda at: with_manifest(at, "/etc/passwd", Path("/etc/passwd")))
case("link out of the checkpoint", "model", r"config\.json is a link to",
     lambda at: linked(at, "config.json", at / "target/config.json", sealed=True))
case("manifest nested 100,000 deep", "model", r"MANIFEST\.json .*nested too deep",
     lambda at: with_text(at, MANIFEST_NAME, "[" * 100_000, sealed=True))


@case("manifest with a file twice", "model", r"'config\.json' is given twice")
def _(folder: Path) -> Path:
    entry = '"config.json": {"sha256": "", "size_bytes": 0}'
    text = '{"version": 1, "files": {' + f"{entry}, {entry}" + "}}"
    return with_text(folder, MANIFEST_NAME, text, sealed=True)


case("manifest of a drafter that is a list", "evaluation", r"MANIFEST\.json cannot",
     lambda at: with_text(at, MANIFEST_NAME, '{"version": 1, "files": ["config.json"]}'))
case("file beside the manifest", "model", r"not listed",
     lambda at: with_text(at, "modeling_own.py", "import os", sealed=True))
