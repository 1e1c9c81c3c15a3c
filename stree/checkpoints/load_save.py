"""Load a checkpoint folder as a HybridModel, and save a model as a checkpoint folder.

Loading reads every layout of configs.py, from safetensors in one file or shards, or pickled `.bin`
files with plain tensors only. Names, shapes and number formats are checked against the config
before any weight is read. Saving writes MambaInLlama's layout (Llama's own for attention layers
alone, ours for layers that it cannot describe), whole or not at all.

dt_bias, A_log and D stay in fp32 in a model of any dtype: they are a few numbers per layer that act
through exponentials, and the recurrence compounds their rounding over the whole sequence. The
correction of experts' scores stays in fp32, too, because it decides between near equals.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stree.checkpoints.configs import CheckpointConfig, config_files, read_checkpoint_config
from stree.checkpoints.layouts.quantised import FLOAT8_FORMAT, make_parameter, with_scales
from stree.checkpoints.sources import Source, StoredTensor
from stree.checkpoints.tokenizer import fingerprint, tokens_sha256
from stree.common.errors import CheckpointRefused, UsageError, warn
from stree.common.files import MANIFEST_NAME, publish_directory, verify_manifest
from stree.common.plain_data import read_json, require_small_header
from stree.common.words import counted, dtype_name
from stree.models.config import HybridConfig
from stree.models.layers.part import has_products_in_8_bits, require_products_in_8_bits
from stree.models.model import HybridModel
from stree.models.packing import scale_name
from stree_kernels import naive
from stree_kernels.contracts import Scaled

SHARD_BYTES = 5_000_000_000
SAMPLED_NUMBERS = 256  # read from each stored tensor, to tell two sets of weights apart

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_HEAD_IDS = "head_ids"
_ALWAYS_FP32 = (".dt_bias", ".A_log", ".D", ".correction_bias")
_READABLE_FORMATS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}
_READABLE_IDS = ("I64", "I32")
_LETTERS = {"float": "F", "bfloat": "BF"}  # of formats in safetensors' words
_BUFFERS_OF_OLD_LLAMAS = re.compile(r".*\.rotary_emb\.inv_freq")


def load_config(path: str | os.PathLike[str]) -> HybridConfig:
    """Return the config of the checkpoint folder `path`. Raises as `load_model` does."""
    return read_checkpoint_config(Path(path)).model


@torch.inference_mode(False)  # its tensors could be neither trained nor packed outside
def load_model(
    path: str | os.PathLike[str], device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32, in_8_bits: bool = False,
) -> HybridModel:
    """Load a checkpoint folder of any known layout, in evaluation mode.

    Each tensor goes straight to `device` and `dtype` (dt_bias, A_log and D at least fp32), so the
    peak is one model and one tensor. With MANIFEST.json every file is verified first. Rows that
    state-spaces adds to round its vocabulary up are dropped. The manifest's hash of the tokenizer
    stays with the model, so that a `Decoder` can compare. With `in_8_bits` the weights of products
    are held in fp8 e4m3 (`HybridModel.put_in_8_bits`), rounded from what is stored.

    Raises UsageError for 8 bits on a GPU without them, NotFound without the folder, and
    CheckpointRefused, with what was found and what was wanted, for a foreign or unsupported config,
    a damaged file, and missing, unexpected or misshapen tensors.
    """
    device, directory = torch.device(device), Path(path)
    if in_8_bits:
        require_products_in_8_bits(device, "load the target without target_dtype")
    if directory.is_symlink():
        directory = directory.resolve()  # one checkpoint, though a training moves `latest`
    manifest = verify_manifest(directory) if (directory / MANIFEST_NAME).exists() else {}
    checkpoint = read_checkpoint_config(directory)
    try:
        with torch.device("meta"):
            model = HybridModel(checkpoint.model)
    except (RuntimeError, OverflowError) as error:  # a size beyond what a tensor can have
        raise CheckpointRefused(
            f"{directory}: its config describes no possible model ({error})"
        ) from error
    model.tokens_sha256 = manifest.get("tokens_sha256")
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    with open_weights(directory) as stored:
        weights = read_weights(
            checkpoint, model, expected, stored, directory, device, dtype, in_8_bits
        )
    model.load_state_dict(weights, strict=True, assign=True)
    require_head_ids(model, directory)
    if in_8_bits:
        model.put_head_in_8_bits()
    return model.eval()


def read_weights(
    checkpoint: CheckpointConfig, model: HybridModel, expected: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, StoredTensor], directory: Path, device: torch.device | str,
    dtype: torch.dtype, in_8_bits: bool = False,
) -> dict[str, Tensor]:
    """Return a model's parameters of the names and shapes `expected`, after checking all of them.

    With in_8_bits, all `PackedModel.weights_for_8_bits` are held in 8 bits. Without it, only those
    of them are that the checkpoint stores in 8 bits. Its other weights in 8 bits are written out,
    with a warning.
    """
    if checkpoint.quantisation is not None:
        stored = with_scales(stored, checkpoint.quantisation, directory)
    sources = _match(checkpoint, expected, stored, directory)
    _require_equal_copies(sources.values(), stored, directory)
    weights: dict[str, Tensor] = {}
    written_out: list[str] = []
    has_products = has_products_in_8_bits(torch.device(device))
    taken = model.weights_for_8_bits() if has_products else {}
    for name, source in sources.items():
        tensors = [stored[each].read() for each in source.names]
        made = make_parameter(source, tensors, name in taken)
        rows = slice(expected[name][0])  # without the padding of the vocabulary
        if isinstance(made, Scaled):
            made = made[rows].to(device)
        elif not all(isinstance(each, Tensor) for each in tensors):
            written_out.append(name)
        if isinstance(made, Tensor) and in_8_bits and name in taken:
            made = naive.in_8_bits(made[rows].to(device))
        if isinstance(made, Scaled):
            model.hold_in_8_bits(name, made)
            weights[name], weights[scale_name(name)] = made.values, made.scale
        else:
            weights[name] = made[rows].to(device, kept_dtype(name, dtype, source), copy=True)
    if written_out:
        warn(
            f"{directory}: {counted(len(written_out), 'weight')} in 8 bits, {written_out[0]} for "
            f"one, cannot be multiplied so here and will take the memory of {dtype_name(dtype)}"
        )
    return weights


def stored_dtype(path: str | os.PathLike[str]) -> torch.dtype:
    """Return the dtype of most numbers in a checkpoint folder's weights.

    It is fp32 where none have a dtype that `load_model` reads. Raises as `load_model`.
    """
    counts: Counter[str] = Counter()
    with open_weights(Path(path)) as stored:
        for tensor in stored.values():
            if tensor.number_format in _READABLE_FORMATS:
                counts[tensor.number_format] += math.prod(tensor.shape)
    return _READABLE_FORMATS[max(counts, key=counts.__getitem__, default="F32")]


def weights_fingerprint(path: str | os.PathLike[str]) -> str:
    """Return a sha256 of the weights in a checkpoint folder, from evenly spaced samples.

    Takes SAMPLED_NUMBERS of each stored tensor, rounded to bf16: the same weights in other shards
    or in bf16 give the same fingerprint, and an 8B checkpoint is read at a few places only.
    Configs, tokenizer and names of files do not count. Raises as `load_model` for what it reads.
    """
    digest = hashlib.sha256()
    with open_weights(Path(path)) as stored:
        for name in sorted(stored):
            numbers = stored[name].read().reshape(-1)
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
        text_files = config_files(model.config, str(formats[_EMBEDDING]).removeprefix("torch."))
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


# Names


def _match(
    checkpoint: CheckpointConfig, expected: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, StoredTensor], directory: Path,
) -> dict[str, Source]:
    """Return each parameter's source, after checking that names, shapes and formats all fit."""
    rename = checkpoint.rename(stored)
    sources = {name: rename(name) for name in expected}
    if checkpoint.model.tie_embeddings and _EMBEDDING in sources:
        sources[_EMBEDDING] = replace(sources[_EMBEDDING], copies=(_HEAD,))
    sources = {name: source.among(stored) for name, source in sources.items()}
    wanted_names = [each for source in sources.values() for each in source.names]
    missing = [each for each in dict.fromkeys(wanted_names) if each not in stored]
    unexpected = stored.keys() - set(wanted_names)
    unexpected.difference_update(*(source.copies for source in sources.values()))
    for pattern in (_BUFFERS_OF_OLD_LLAMAS, checkpoint.layout.dropped):
        if pattern is not None:
            unexpected = {name for name in unexpected if not pattern.fullmatch(name)}
    if missing or unexpected:
        raise CheckpointRefused(
            f"{directory} does not hold the {checkpoint.layout.name} model that its config "
            f"describes: {_some(missing)} missing, {_some(sorted(unexpected))} not expected; "
            "use weights and config of the same checkpoint"
        )
    for name, source in sources.items():
        wanted = source.shape or expected[name]
        if name in (_EMBEDDING, _HEAD) and not checkpoint.model.head_vocab_size:
            wanted = (checkpoint.padded_vocab_size, *wanted[1:])
        formats = _READABLE_IDS if name == _HEAD_IDS else tuple(_READABLE_FORMATS)
        if checkpoint.quantisation is not None:
            formats = (*formats, FLOAT8_FORMAT)
        splits = source.splits or ((wanted,) * len(source.names),)
        fits = tuple(stored[place].shape for place in source.names) in splits
        for place, shape in zip(source.names, splits[0], strict=True):
            found = stored[place]
            if not fits and found.shape != shape:
                raise CheckpointRefused(
                    f"{place} in {directory} has shape {found.shape}, its config wants {shape}: "
                    "use weights and config of the same checkpoint"
                )
            if found.number_format not in formats:
                raise CheckpointRefused(
                    f"{place} in {directory} is stored as {found.number_format}, wanted one of "
                    f"{', '.join(formats)}: use a checkpoint that is not quantised"
                )
    return sources


def require_head_ids(model: HybridModel, directory: Path) -> None:
    """Refuse a head over a part of the vocabulary whose tokens are not ascending ids."""
    ids, size = model.head_ids, model.config.vocab_size
    if ids is None or ids.is_meta:
        return
    ascending = bool((ids[1:] > ids[:-1]).all())
    if not ascending or int(ids[0]) < 0 or int(ids[-1]) >= size:
        raise CheckpointRefused(
            f"{_HEAD_IDS} in {directory} are not ascending token ids below {size}: copy or export "
            "the checkpoint again"
        )


def _require_equal_copies(
    sources: Iterable[Source], stored: Mapping[str, StoredTensor], directory: Path
) -> None:
    """Refuse a tied tensor that is stored under several names with different numbers."""
    pairs = {(source.names[0], copy) for source in sources for copy in source.copies}
    for name, copy in sorted(pairs):
        is_alike = stored[name][:2] == stored[copy][:2]
        pair = [
            each if isinstance(each, Tensor) else each.numbers()
            for each in (stored[name].read(), stored[copy].read())
        ]
        if not is_alike or not torch.equal(*pair):
            raise CheckpointRefused(
                f"{directory} says that these weights are tied, but {copy} differs from {name}: "
                "export it again, or, for a head, correct tie_word_embeddings (or tie_embeddings) "
                "in config.json"
            )


def kept_dtype(name: str, dtype: torch.dtype, source: Source | None = None) -> torch.dtype:
    """Return the dtype of a parameter in a model that is loaded in `dtype`."""
    if name == _HEAD_IDS:
        return torch.long
    wide = name.endswith(_ALWAYS_FP32) or (source is not None and source.wide)
    return torch.promote_types(dtype, torch.float32) if wide else dtype


def _some(names: Iterable[str]) -> str:
    names = list(names)
    if not names:
        return "nothing"
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


# Reading files


@contextmanager
def open_weights(directory: Path, extra: str = "") -> Iterator[dict[str, StoredTensor]]:
    """Open a folder's weight files: one file before an index, safetensors before pickles.

    extra is the name of a file that is read as well if it is there and no index names it.
    """
    for name in ("model.safetensors", "pytorch_model.bin"):
        single, index = directory / name, directory / f"{name}.index.json"
        if single.is_file() or index.is_file():
            break
    else:
        raise CheckpointRefused(
            f"{directory} holds no weights: wanted model.safetensors or pytorch_model.bin, "
            "or the index of their shards"
        )
    read_file = _safetensors if name.endswith(".safetensors") else _pickle
    stored: dict[str, StoredTensor] = {}
    with ExitStack() as stack:
        paths = [single] if single.is_file() else _files_there(index)
        also = directory / extra
        if extra and also.is_file() and also not in paths:
            paths = [*paths, also]
        for path in paths:
            for each, tensor in (_safetensors if path == also else read_file)(path, stack):
                if each in stored:
                    raise _damaged(path, f"{each} is in another file as well")
                stored[each] = tensor
        yield stored


def _safetensors(path: Path, stack: ExitStack) -> Iterator[tuple[str, StoredTensor]]:
    try:
        require_small_header(path)
        file = stack.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, error) from error
    for name in file.keys():  # noqa: SIM118 (not a mapping)
        header = file.get_slice(name)
        shape, read = tuple(header.get_shape()), partial(file.get_tensor, name)
        yield name, StoredTensor(shape, header.get_dtype(), read)


def _pickle(path: Path, stack: ExitStack) -> Iterator[tuple[str, StoredTensor]]:
    try:
        tensors = _load_pickle(path)
    except Exception as error:
        # The unpickler raises whatever a damaged or hostile byte stream makes of it.
        raise _damaged(path, error) from error
    for name, tensor in tensors.items():
        kind = re.sub(r"\d.*", "", str(tensor.dtype).removeprefix("torch."))
        number_format = f"{_LETTERS.get(kind, 'I')}{tensor.dtype.itemsize * 8}"
        read = partial(tensors.__getitem__, name)
        yield name, StoredTensor(tuple(tensor.shape), number_format, read)


def _load_pickle(path: Path) -> dict[str, Tensor]:
    """Return the named tensors of a `.bin` file, on the CPU.

    A file in torch's zip format is mapped: a tensor takes memory when it is read. One in the format
    of before PyTorch 1.6 is read whole. Raises ValueError for a pickle of anything but tensors;
    PyTorch raises what it likes for a damaged one.
    """
    tensors = load_without_code(path, mmap=zipfile.is_zipfile(path))
    if not isinstance(tensors, dict):
        raise ValueError(f"it holds a {type(tensors).__name__}, not named tensors")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            raise ValueError(f"{name} repeats its numbers, wanted them all")
    return tensors


def load_without_code(path: Path, mmap: bool) -> Any:
    """Return the tensors and plain values of a file of `torch.save`, on the CPU.

    mmap: map the file, so that a tensor takes memory when it is read. Raises ValueError for Python
    objects that are neither; PyTorch raises what it likes for a damaged file.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:
        if type(error).__name__ != "UnpicklingError":  # which advises to read it with code
            raise
        called = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"calls {called[1]!r}" if called else "holds more than tensors"
        raise ValueError(f"it {reason}: only plain tensors are read") from error


def indexed_files(index: Path) -> list[Path]:
    """Return the files that an index of shards names, whether they are there or not."""
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
        # Hidden files are in no manifest, and were not checked.
        if outside := [name for name in names if Path(name).name != name or name.startswith(".")]:
            raise ValueError(f"it names {outside[0]!r:.99}, wanted files beside it")
        return [index.parent / name for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(index, error) from error


def _files_there(index: Path) -> list[Path]:
    paths = indexed_files(index)
    try:
        missing = [path for path in paths if not path.is_file()]
    except OSError as error:  # a name that is too long
        raise _damaged(index, error) from error
    if missing:
        raise CheckpointRefused(f"{missing[0]} is missing, {index.name} lists it: copy it again")
    return paths


def _damaged(path: Path, reason: object) -> CheckpointRefused:
    return CheckpointRefused(f"{path} cannot be read ({reason}): copy or export it again")


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
