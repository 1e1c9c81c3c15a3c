"""Hostile and damaged files, each made by code, with how it is met and how it must be refused.

Every builder gets an empty folder beside which `target` and `prompts.jsonl` lie (a good checkpoint
and good prompts), and returns the path that is then loaded. Bombs would leave a file named CANARY.
"""

from __future__ import annotations

import base64
import collections
import gzip
import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from stree.files import MANIFEST_NAME, publish_directory, sha256_of_file
from stree_pipelines.checkpointing import STATE_KEYS

CANARY = "executed"
CHECKPOINT, DATA, USAGE = 66, 65, 2
Builder = Callable[[Path], Path]


@dataclass(frozen=True)
class Case:
    """A file, the entry of hostile_loads.py that meets it, and the exit code and reason wanted."""

    name: str
    entry: str
    code: int
    reason: str  # a regular expression
    build: Builder


CASES: list[Case] = []


def case(name: str, entry: str, code: int, reason: str) -> Callable[[Builder], Builder]:
    def add(build: Builder) -> Builder:
        CASES.append(Case(name, entry, code, reason, build))
        return build

    return add


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
    """A copy of the good checkpoint, without its manifest unless `sealed`."""
    copy = folder / "checkpoint"
    shutil.copytree(folder / "target", copy)
    if not sealed:
        (copy / MANIFEST_NAME).unlink()
    return copy


def with_weights(folder: Path, content: bytes, name: str = "pytorch_model.bin") -> Path:
    """The good checkpoint with other weights."""
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


def with_manifest(folder: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    copy = checkpoint(folder, sealed=True)
    manifest = json.loads((copy / MANIFEST_NAME).read_text())
    edit(manifest)
    (copy / MANIFEST_NAME).write_text(json.dumps(manifest))
    return copy


def torch_file(content: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


def zipped_pickle(instructions: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    """A file as torch.save makes them, around a pickle of one's own."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("archive/data.pkl", instructions)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
    return file.getvalue()


def safetensors_file(header: Mapping[str, Any] | bytes, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def edited_safetensors(folder: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """The good weights with other claims about them in the header."""
    content = (folder / "target" / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    edit(header)
    changed = safetensors_file(header, content[8 + size :])
    return with_weights(folder, changed, "model.safetensors")


def state_folder(folder: Path, tree: Any, extra: Mapping[str, bytes] | None = None) -> Path:
    """A training checkpoint with a manifest that is right, so that only the content is wrong."""
    path = folder / "run" / "checkpoints" / "step-00000003"
    with publish_directory(path, {"step": 3}) as new:
        save_file({"weight": torch.zeros(2)}, new / "state.safetensors")
        (new / "state.json").write_text(tree if isinstance(tree, str) else json.dumps(tree))
        for name, content in (extra or {}).items():
            (new / name).write_bytes(content)
    return path


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def config_case(name: str, reason: str, **changes: Any) -> None:
    case(f"config {name}", "model", CHECKPOINT, reason)(
        lambda folder: with_json(folder, "config.json", **changes)
    )


def mixer_case(name: str, reason: str, **changes: Any) -> None:
    case(f"config {name}", "model", CHECKPOINT, reason)(
        lambda folder: with_json(folder, "mamba_config.json", **changes)
    )


def template_case(name: str, reason: str, template: str) -> None:
    case(f"template {name}", "template", CHECKPOINT, reason)(
        lambda folder: with_text(folder, "chat_template.jinja", template)
    )


# Pickles

UNREADABLE = r"cannot be read"


@case("pickle bomb in .bin", "model", CHECKPOINT, r"calls 'posix system'")
def _(folder: Path) -> Path:
    return with_weights(folder, torch_file({"model.norm.weight": shell(folder)}))


@case("pickle bomb in an old .bin", "model", CHECKPOINT, r"calls '(__builtin__|builtins) exec'")
def _(folder: Path) -> Path:
    content = torch_file({"w": python(folder)}, _use_new_zipfile_serialization=False)
    return with_weights(folder, content)


@case("plain pickle as .bin", "model", CHECKPOINT, UNREADABLE)
def _(folder: Path) -> Path:
    return with_weights(folder, pickle.dumps({"w": shell(folder)}))


@case("pickle bomb as state of a dict", "model", CHECKPOINT, r"calls 'posix system'")
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


@case("pickle bomb in a drafter", "evaluation", CHECKPOINT, r"calls 'posix system'")
def _(folder: Path) -> Path:
    return with_weights(folder, torch_file({"w": shell(folder)}))


@case("pickle of 2^60 tuples", "model", CHECKPOINT, r"tuple of more than 1000 values")
def _(folder: Path) -> Path:
    """{t: 1}, where t is (u, t) and u is the tuple that t was before, 60 times over."""
    doubled = b"".join(b"h%c\x86q%c" % (i, i + 1) for i in range(1, 60))
    return with_weights(folder, zipped_pickle(b"\x80\x02}K\x01\x85q\x01" + doubled + b"K\x01s."))


@case("pickle of 10^12 zeros", "model", CHECKPOINT, r"calls '(__builtin__|builtins) bytearray'")
def _(folder: Path) -> Path:
    return with_weights(folder, torch_file({"w": Bomb(bytearray, 10**12)}))


@case("pickle compressed", "model", CHECKPOINT, r"it is compressed")
def _(folder: Path) -> Path:
    return with_weights(folder, zipped_pickle(b"N" * (1 << 26), zipfile.ZIP_DEFLATED))


@case("tensor that repeats one number", "model", CHECKPOINT, r"repeats its numbers")
def _(folder: Path) -> Path:
    weights = load_file(folder / "target" / "model.safetensors")
    return with_weights(folder, torch_file({n: w[:1].expand(10**9) for n, w in weights.items()
                                            if w.ndim == 1}))  # fmt: skip


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


# Manifests


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
    copy = checkpoint(folder, sealed=True)
    (copy / "config.json").unlink()
    (copy / "config.json").symlink_to(folder / "target" / "config.json")
    return copy


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


# Configs

config_case("with code of its own", r"auto_map", auto_map={"AutoModel": "modeling.Own"})
config_case("that trusts code", r"trust_remote_code", trust_remote_code=True)
config_case(
    "with an integer of 4000 digits", r"wanted a whole number", num_attention_heads=10**4000
)
config_case("with a number of 400 digits", r"more than a number", rope_theta=10**400)
config_case("with an endless epsilon", r"rms_norm_eps", rms_norm_eps=float("inf"))
mixer_case("of 10^9 layers", r"num_layers is 1000000000, it must be at most 1000", n_layer=10**9)
mixer_case("of 2^31 numbers each", r"no possible model|does not hold", d_model=2**31 - 1,
           vocab_size=2**31 - 1, intermediate_size=2**31 - 1)  # fmt: skip
mixer_case("with negative sizes", r"wanted a whole number", d_model=-1)
mixer_case("without a state", r"wanted a multiple of the head dim 0", d_inner=0, ssm_cfg={
    "expand": 1, "ngroups": 4, "d_state": 0})  # fmt: skip
config_case("of another kind", r"only 'llama' is supported", model_type="gpt2")


@case("config with NaN", "model", CHECKPOINT, r"NaN is no number")
def _(folder: Path) -> Path:
    return with_json(folder, "config.json", rms_norm_eps=float("nan"))


@case("config nested 100,000 deep", "model", CHECKPOINT, r"nested too deep")
def _(folder: Path) -> Path:
    return with_text(folder, "config.json", '{"a":' * 100_000)


@case("config with a key twice", "model", CHECKPOINT, r"'vocab_size' is given twice")
def _(folder: Path) -> Path:
    text = (folder / "target" / "config.json").read_text()
    return with_text(folder, "config.json", text.replace("{", '{"vocab_size": 7,', 1))


@case("config that is a pipe", "model", CHECKPOINT, r"no regular file")
def _(folder: Path) -> Path:
    copy = checkpoint(folder)
    (copy / "config.json").unlink()
    os.mkfifo(copy / "config.json")
    return copy


@case("config of 10 GB", "model", CHECKPOINT, r"at most .* are read")
def _(folder: Path) -> Path:
    copy = checkpoint(folder)
    os.truncate(copy / "config.json", 10 << 30)  # takes no room on the disk
    return copy


# Tokenizers


@case("tokenizer of another kind", "tokenizer", CHECKPOINT, r"tokenizer .* cannot be read")
def _(folder: Path) -> Path:
    return with_text(folder, "tokenizer.json", '{"model_type": "llama"}')


@case("tokenizer that is a pickle", "tokenizer", CHECKPOINT, r"tokenizer .* cannot be read")
def _(folder: Path) -> Path:
    return with_text(folder, "tokenizer.json", pickle.dumps(shell(folder)))


@case("tokenizer at which its library panics", "tokenizer", CHECKPOINT, r"PanicException")
def _(folder: Path) -> Path:
    charsmap = base64.b64encode(bytes(3)).decode()
    normalizer = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    return with_json(folder, "tokenizer.json", normalizer=normalizer)


@case("tokenizer with code of its own", "tokenizer", CHECKPOINT, r"code of its own")
def _(folder: Path) -> Path:
    copy = checkpoint(folder)
    (copy / "tokenizer.json").unlink()
    written(copy, "vocab.json", "{}")
    written(copy, "own.py", f"open({str(folder / CANARY)!r}, 'w')")
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    written(copy, "tokenizer_config.json", json.dumps(config))
    return copy


@case("tokenizer's config nested deep", "tokenizer", CHECKPOINT, r"nested too deep")
def _(folder: Path) -> Path:
    return with_text(folder, "tokenizer_config.json", "[" * 100_000)


@case("drafter of another tokenizer", "evaluation", CHECKPOINT, r"does not use the tokenizer")
def _(folder: Path) -> Path:
    return with_text(folder, "chat_template.jinja", "{{ messages }}")


# Chat templates

TOO_LONG, TOO_LARGE = r"more than 1 s of processor time", r"more than 512 MiB"
template_case("of 10^12 rounds", r"Range too big", "{% for i in range(10**12) %}.{% endfor %}")
template_case(
    "of 10^10 rounds", TOO_LONG,
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
)  # fmt: skip
template_case(
    "of 2^60 calls", TOO_LONG,
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
)  # fmt: skip
template_case("of an endless number", TOO_LONG, "{{ 9 ** (9 ** 9) }}")
template_case("of 10^10 letters", TOO_LARGE, "{{ 'a' * 10**10 }}")
template_case(
    "that doubles its text", TOO_LARGE,
    "{% set n = namespace(a='a' * 999) %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}"
    "{% endfor %}{{ n.a }}",
)  # fmt: skip
template_case("of 40 MB", r"it makes 40,000,000 characters", "{{ 'a' * 40000000 }}")
template_case("nested 100,000 deep", r"RecursionError", "{{ " + "(" * 100_000 + " }}")
template_case(
    "reaching for classes", r"SecurityError.*__class__",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
)  # fmt: skip
template_case(
    "reaching for globals", r"SecurityError.*__globals__",
    "{{ raise_exception.__globals__['jinja2'].os.system('true') }}",
)  # fmt: skip
template_case(
    "reaching through format", r"SecurityError.*__class__",
    "{{ '{0.__class__.__mro__}'.format('') }}",
)  # fmt: skip


# Training state and profiles


@case("state without an optimiser", "training state", CHECKPOINT, r"it lacks optimizer_states")
def _(folder: Path) -> Path:
    return state_folder(folder, {"state_dict": {}, "global_step": 3})


@case("state of Python objects", "training state", CHECKPOINT, r"no training state")
def _(folder: Path) -> Path:
    array = {"$array": {"$tensor": "weight"}, "dtype": "|O", "shape": [1]}
    return state_folder(folder, dict.fromkeys(STATE_KEYS, array))


@case("state of tensors that are not there", "training state", CHECKPOINT, r"no training state")
def _(folder: Path) -> Path:
    return state_folder(folder, {name: {"$tensor": "/elsewhere"} for name in STATE_KEYS})


@case("state nested 100,000 deep", "training state", CHECKPOINT, r"nested too deep")
def _(folder: Path) -> Path:
    return state_folder(folder, '{"$tuple":' * 100_000)


@case("profile nested 100,000 deep", "profile", CHECKPOINT, r"speculation_profile\.json cannot")
def _(folder: Path) -> Path:
    written(folder, "drafter/speculation_profile.json", "[" * 100_000)
    return folder / "drafter"


# YAML


def laughs(depth: int = 30) -> str:
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, depth)]
    return "\n".join(["a0: &a0 [ha]", *levels, f"parents: *a{depth - 1}"])


def merges(depth: int = 12) -> str:
    levels = [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, depth)]
    return "\n".join(["a0: &a0 {x: 1}", *levels])


YAML_TEXTS = {
    "object": ("!!python/object/apply:os.system ['true']", r"python/object/apply"),
    "of 9^29 laughs": (laughs(), r"more than 100,000 values"),
    "of 9^11 merges": (merges(), r"more than 100,000 values"),
    "nested 100,000 deep": ("[" * 100_000, r"nested too deep"),
    "that holds itself": ("parents: &a [*a]", r"nothing that is complete"),
    "with a month of 13": ("parents: 2026-13-13", r"month|parents"),
    "in base 60": ("limit: 1" + ":59" * 100_000, r"more than 20,000 characters"),
}
for _name, (_text, _reason) in YAML_TEXTS.items():
    case(f"tree {_name}", "tree", USAGE, _reason)(
        lambda folder, text=_text: written(folder, "tree.yaml", text)  # type: ignore[misc]
    )
for _name, _entry in {
    "object": "evaluation config",
    "of 9^29 laughs": "evaluation config",
    "of 9^11 merges": "training config",
    "nested 100,000 deep": "training config",
}.items():
    _text, _reason = YAML_TEXTS[_name]
    case(f"{_entry} {_name}", _entry, USAGE, _reason)(
        lambda folder, text=_text: written(folder, "config.yaml", text)  # type: ignore[misc]
    )


@case("tree of a list of lists", "tree", USAGE, r"whole numbers")
def _(folder: Path) -> Path:
    return written(folder, "tree.yaml", "parents: [-1, [0, [1]]]")


@case("tree of 10^9 nodes", "tree", USAGE, r"at most 255")
def _(folder: Path) -> Path:
    return Path("chain-999999999")


@case("config with brackets in a text", "training config", USAGE, r"more than 20,000 characters")
def _(folder: Path) -> Path:
    return written(folder, "config.yaml", "data: {train: '" + "- " * 50_000 + "'}")


# Data, results, baselines


@case("gzip bomb of empty lines", "conversations", DATA, r"100,000 empty lines in a row")
def _(folder: Path) -> Path:
    packed = gzip.compress(b"\n" * (1 << 20))
    return written(folder, "data.jsonl.gz", packed * 4000)  # 4 GB


@case("gzip bomb of one line", "conversations", DATA, r"unpacks to over 500 times")
def _(folder: Path) -> Path:
    packed = gzip.compress(b" " * (1 << 20))
    return written(folder, "data.jsonl.gz", packed * 4000)


@case("gzip cut off", "conversations", DATA, r"cannot be read beyond line 99: Compressed")
def _(folder: Path) -> Path:
    return written(folder, "data.jsonl.gz", gzip.compress(b"{}\n" * 99)[:-9])


@case("rows nested 100,000 deep", "conversations", DATA, r"no usable conversation.*not JSON")
def _(folder: Path) -> Path:
    return written(folder, "data.jsonl", ("[" * 100_000 + "\n") * 3)


@case("parquet of noise", "conversations", DATA, r"data\.parquet: cannot be read")
def _(folder: Path) -> Path:
    return written(folder, "data.parquet", b"PAR1" + bytes(range(256)) * 40 + b"PAR1")


@case("dataset that is damaged", "conversations", DATA, r"`datasets` cannot load it")
def _(folder: Path) -> Path:
    written(folder, "saved/dataset_info.json", "[" * 1000)
    return written(folder, "saved/state.json", "3").parent


@case("prompts nested 100,000 deep", "prompts", DATA, r"prompts\.jsonl:1: it is nested too deep")
def _(folder: Path) -> Path:
    return written(folder, "own/prompts.jsonl", "[" * 100_000)


@case("prompts of half a letter", "prompts", DATA, r"surrogates")
def _(folder: Path) -> Path:
    return written(folder, "own/prompts.jsonl", '{"id": "1", "turns": ["\\ud800"]}')


def result_case(name: str, reason: str, **changes: Any) -> None:
    @case(f"result {name}", "report", DATA, reason)
    def _(folder: Path) -> Path:
        return written(folder, "run/eval/results.jsonl", hostile_row(**changes)).parents[1]


def hostile_row(**changes: Any) -> str:
    from hand_made_run import make_row, make_sample

    answers = [make_sample("autoregressive", None, "sums", i, 0.0, 60) for i in range(2)]
    row = json.loads(make_row("autoregressive", None, "sums", answers, 0.0).model_dump_json())
    return json.dumps({**row, **changes}) + "\n"


result_case("of a negative length", r"acceptance_length", acceptance_length=-1e308)
result_case("of NaN", r"tokens_per_second", tokens_per_second=float("nan"))
result_case("of an endless speed", r"speedup", speedup=float("inf"))
result_case("at depth 10^18", r"acceptance_histogram", acceptance_histogram={str(10**18): 1})
result_case("with samples above", r"samples", samples="../../../../etc/passwd")
result_case("of a count with 400 digits", r"num_prompts", num_prompts=10**400)


@case("metrics of 200,000 letters", "report", DATA, r"metrics\.csv is no table")
def _(folder: Path) -> Path:
    run = written(folder, "run/eval/results.jsonl", hostile_row()).parents[1]
    written(run, "metrics.csv", "step,loss\n1," + "9" * 200_000 + "\n")
    return run


@case("baseline of no name", "baseline", USAGE, r"no pointer to a folder")
def _(folder: Path) -> Path:
    return written(folder, "baseline", b"runs\0elsewhere")


@case("baseline that is long", "baseline", USAGE, r"no pointer to a folder")
def _(folder: Path) -> Path:
    return written(folder, "baseline", "x/" * 1_000_000)


@case("baseline in a circle", "baseline", USAGE, r"no pointer to a folder")
def _(folder: Path) -> Path:
    (folder / "baseline").symlink_to(folder / "other")
    (folder / "other").symlink_to(folder / "baseline")
    return folder / "baseline"


@case("baseline with another's rows", "baseline", DATA, r"is no ResultRow")
def _(folder: Path) -> Path:
    return written(folder, "rows/results.jsonl", '{"accuracy": 1}\n').parent
