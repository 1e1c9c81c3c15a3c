"""Find the tensors of a folder's weight files: names, shapes and formats, no numbers.

Headers of safetensors are read without PyTorch. A pickled `.bin` file has no header, so PyTorch
opens it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from stree.common.errors import CheckpointRefused
from stree.common.plain_data import read_json, require_small_header


class StoredTensor(NamedTuple):
    """A tensor of a weight file.

    Attributes:
        name: Its name in the file.
        shape: Shape of the tensor.
        number_format: As safetensors calls it.
        file: The file; None for a tensor in memory.
        scale: The tensor of its scales, for one in 8 bits.
    """

    name: str
    shape: tuple[int, ...]
    number_format: str
    file: Path | None = None
    scale: StoredTensor | None = None  # type: ignore[misc]


def stored_tensors(directory: Path, extra: str = "") -> dict[str, StoredTensor]:
    """Return all tensors of a folder's weight files, by name.

    One file is preferred to an index of shards, and safetensors to pickles. extra is the name of a
    file that is read as well if it is there and no index names it. Raises `CheckpointRefused` for a
    folder without weights, and for a damaged or missing file.
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
    paths = [single] if single.is_file() else _files_there(index)
    is_safe = name.endswith(".safetensors")
    also = directory / extra
    if extra and also.is_file() and also not in paths:
        paths = [*paths, also]
    stored: dict[str, StoredTensor] = {}
    for path in paths:
        for tensor in _of_safetensors(path) if is_safe or path == also else _of_pickle(path):
            if tensor.name in stored:
                raise damaged(path, f"{tensor.name} is in another file as well")
            stored[tensor.name] = tensor
    return stored


def _of_safetensors(path: Path) -> Iterator[StoredTensor]:
    try:
        require_small_header(path)
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                header = file.get_slice(name)
                yield StoredTensor(name, tuple(header.get_shape()), header.get_dtype(), path)
    except (SafetensorError, OSError, ValueError) as error:
        raise damaged(path, error) from error


def _of_pickle(path: Path) -> Iterator[StoredTensor]:
    from stree.checkpoints.plan.pickles import format_of, load_pickle

    try:
        tensors = load_pickle(path)
    except Exception as error:
        # The unpickler raises whatever a damaged or hostile byte stream makes of it.
        raise damaged(path, error) from error
    for name, tensor in tensors.items():
        yield StoredTensor(name, tuple(tensor.shape), format_of(tensor.dtype), path)


def indexed_files(index: Path) -> list[Path]:
    """Return the files that an index of shards names, whether they are there or not."""
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
        # Hidden files are in no manifest, and were not checked.
        if outside := [name for name in names if Path(name).name != name or name.startswith(".")]:
            raise ValueError(f"it names {outside[0]!r:.99}, wanted files beside it")
        return [index.parent / name for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(index, error) from error


def _files_there(index: Path) -> list[Path]:
    paths = indexed_files(index)
    try:
        missing = [path for path in paths if not path.is_file()]
    except OSError as error:  # a name that is too long
        raise damaged(index, error) from error
    if missing:
        raise CheckpointRefused(f"{missing[0]} is missing, {index.name} lists it: copy it again")
    return paths


def damaged(path: Path, reason: object) -> CheckpointRefused:
    """Return the refusal of a file that cannot be read, with the reason."""
    return CheckpointRefused(f"{path} cannot be read ({reason}): copy or export it again")
