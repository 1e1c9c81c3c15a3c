"""Load a checkpoint folder as a HybridModel, and save a model as a checkpoint folder.

Loading reads every layout of configs.py, from safetensors in one file or shards, or pickled `.bin`
files with plain tensors only (`stree.checkpoints.plan`). Saving writes MambaInLlama's layout
(Llama's own for attention layers alone, ours for layers that it cannot describe), whole or not at
all.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from stree.checkpoints.configs import config_files
from stree.checkpoints.plan.build import build, kept_dtype, open_files
from stree.checkpoints.plan.load_plan import READABLE_FORMATS, plan_model
from stree.checkpoints.plan.stored import stored_tensors
from stree.checkpoints.tokenizer import fingerprint, tokens_sha256
from stree.common.errors import UsageError
from stree.common.files import publish_directory
from stree.models.config.weights import EMBEDDING
from stree.models.model import HybridModel

SHARD_BYTES = 5_000_000_000
SAMPLED_NUMBERS = 256  # read from each stored tensor, to tell two sets of weights apart


def load_model(
    path: str | os.PathLike[str], device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32, in_8_bits: bool = False,
) -> HybridModel:
    """Load a checkpoint folder of any known layout, in evaluation mode: `plan_model`, then `build`.

    With `in_8_bits` the weights of products are held in fp8 e4m3 (`stree.models.in_8_bits`),
    rounded from what is stored. Raises as `plan_model` and `build` do.
    """
    return build(plan_model(path), device, dtype, in_8_bits)


def stored_dtype(path: str | os.PathLike[str]) -> torch.dtype:
    """Return the dtype of most numbers in a checkpoint folder's weights.

    It is fp32 where none have a dtype that `load_model` reads. Raises as `load_model`.
    """
    counts: Counter[str] = Counter()
    for tensor in stored_tensors(Path(path)).values():
        if tensor.number_format in READABLE_FORMATS:
            counts[tensor.number_format] += math.prod(tensor.shape)
    most = max(counts, key=counts.__getitem__, default="F32")
    return getattr(torch, READABLE_FORMATS[most])


def weights_fingerprint(path: str | os.PathLike[str]) -> str:
    """Return a sha256 of the weights in a checkpoint folder, from evenly spaced samples.

    Takes SAMPLED_NUMBERS of each stored tensor, rounded to bf16: the same weights in other shards
    or in bf16 give the same fingerprint, and an 8B checkpoint is read at a few places only.
    Configs, tokenizer and names of files do not count. Raises as `load_model` for what it reads.
    """
    digest = hashlib.sha256()
    stored = stored_tensors(Path(path))
    with open_files() as read:
        for name in sorted(stored):
            numbers = read(stored[name]).reshape(-1)
            digest.update(f"{name} {stored[name].shape}\n".encode())
            if numbers.numel():
                places = torch.linspace(0, numbers.numel() - 1, SAMPLED_NUMBERS, dtype=torch.double)
                sampled = numbers[places.long()].to(torch.bfloat16)
                digest.update(sampled.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def save_model(
    model: HybridModel, directory: str | os.PathLike[str], tokenizer: Any = None,
    extra_files: Mapping[str, str] | None = None, dtype: torch.dtype | None = None,
    manifest_extra: Mapping[str, object] | None = None, overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Publish `model` as the checkpoint folder `directory`, whole or not at all.

    Writes config.json, mamba_config.json (unless all layers are attention: transformers loads
    such a folder as Llama), model.safetensors or shards of at most `shard_bytes` with their
    index, the tokenizer's files, `extra_files` (name to text) and MANIFEST.json with
    `manifest_extra` and the tokenizer's hashes. `dtype` None keeps each tensor's own.

    Raises CannotWrite when the disk refuses or `directory` exists without `overwrite`, and
    UsageError when the tokenizer has more ids than the model.
    """
    if tokenizer is not None and len(tokenizer) > model.config.vocab_size:
        raise UsageError(
            f"the tokenizer has {len(tokenizer)} ids, the model {model.config.vocab_size}: "
            "save the tokenizer that the model was made for"
        )
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if scaled := [name for name, tensor in state.items() if tensor.dtype == torch.float8_e4m3fn]:
        raise UsageError(
            f"{scaled[0]} of the model is in 8 bits, which no layout here writes: copy the folder "
            "that it was loaded from"
        )
    formats = {
        name: tensor.dtype if dtype is None else kept_dtype(name, dtype)
        for name, tensor in state.items()
    }
    sizes = {name: state[name].numel() * formats[name].itemsize for name in state}
    extra = dict(manifest_extra or {})
    if tokenizer is not None:
        extra.setdefault("tokenizer_fingerprint", fingerprint(tokenizer))
        extra["tokens_sha256"] = tokens_sha256(tokenizer)
    with publish_directory(directory, extra, overwrite, needed_bytes=sum(sizes.values())) as folder:
        text_files = config_files(model.config, str(formats[EMBEDDING]).removeprefix("torch."))
        shards = _plan_shards(sizes, shard_bytes)
        for file_name, names in shards.items():
            tensors = {name: state[name].to("cpu", formats[name]).contiguous() for name in names}
            save_file(tensors, folder / file_name, metadata={"format": "pt"})
        if len(shards) > 1:
            text_files["model.safetensors.index.json"] = _index_of(shards, sizes)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        for name, text in {**text_files, **(extra_files or {})}.items():
            (folder / name).write_text(text, encoding="utf-8")


# Writing files


def _plan_shards(sizes: Mapping[str, int], shard_bytes: int) -> dict[str, list[str]]:
    """Return the tensors' names by file, in the model's order, each file at most `shard_bytes`."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": group
        for number, group in enumerate(groups, start=1)
    }


def _index_of(shards: Mapping[str, list[str]], sizes: Mapping[str, int]) -> str:
    weight_map = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    return json.dumps(index, indent=2) + "\n"
