"""Plan of loading a model: each weight's stored tensors, checked against the config.

It is worked out from configs and from headers of weight files, without PyTorch and before a number
is read. `stree.checkpoints.plan.build` reads the numbers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from stree.checkpoints.configs import CheckpointConfig, read_checkpoint_config
from stree.checkpoints.layouts.quantisation import FLOAT8_FORMAT, scale_grid, with_scales
from stree.checkpoints.plan.stored import StoredTensor, stored_tensors
from stree.checkpoints.sources import Source
from stree.common.errors import CheckpointRefused
from stree.common.files import MANIFEST_NAME, verify_manifest
from stree.models.config import HybridConfig
from stree.models.config.weights import EMBEDDING, HEAD, HEAD_IDS, UNKNOWN, weight_shapes

READABLE_FORMATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_READABLE_IDS = ("I64", "I32")
_READABLE_SCALES = (*READABLE_FORMATS, "F8_E8M0")
_BUFFERS_OF_OLD_LLAMAS = re.compile(r".*\.rotary_emb\.inv_freq")
_SAME = "use weights and config of the same checkpoint"


@dataclass(frozen=True)
class PlannedWeight:
    """One of the model's weights, and the stored tensors that it is made of.

    Attributes:
        shape: Shape of the weight in the model.
        source: Names of the stored tensors, and what is done to their numbers.
        stored: The stored tensors, in the order of `source.names`.
        copies: Further stored tensors that must have the same numbers as the first.
    """

    shape: tuple[int, ...]
    source: Source
    stored: tuple[StoredTensor, ...]
    copies: tuple[StoredTensor, ...] = ()

    @property
    def is_in_8_bits(self) -> bool:
        """True if all of its stored tensors are in 8 bits."""
        return all(each.scale is not None for each in self.stored)


@dataclass(frozen=True)
class LoadPlan:
    """Plan of loading a checkpoint's model: its files, its config, and the source of each weight.

    Attributes:
        directory: The checkpoint's folder.
        checkpoint: Its layout, the config of the model, and how weights are quantised.
        weights: The weights to read, by our names.
        lent: Names of weights that a head takes from its target; no file has them.
        zeros: Names of weights that no file has, and that are zero.
        tokens_sha256: The manifest's hash of the tokenizer; None without one.
    """

    directory: Path
    checkpoint: CheckpointConfig
    weights: Mapping[str, PlannedWeight]
    lent: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()
    tokens_sha256: str | None = None

    @property
    def config(self) -> HybridConfig:
        """Config of the model."""
        return self.checkpoint.model

    @property
    def files(self) -> tuple[Path, ...]:
        """Weight files that are read, sorted by path."""
        read = [each for one in self.weights.values() for each in (*one.stored, *one.copies)]
        read += [each.scale for each in read if each.scale is not None]
        return tuple(sorted({each.file for each in read if each.file is not None}))


def plan_model(path: str | os.PathLike[str]) -> LoadPlan:
    """Return the plan of loading a checkpoint folder of any known layout.

    With MANIFEST.json every file is verified first. Raises NotFound without the folder, and
    CheckpointRefused, with what was found and what was wanted, for a foreign or unsupported config,
    a damaged file, and missing, unexpected or misshapen tensors.
    """
    directory = Path(path)
    if directory.is_symlink():
        directory = directory.resolve()  # one checkpoint, though a training moves `latest`
    manifest = verify_manifest(directory) if (directory / MANIFEST_NAME).exists() else {}
    checkpoint = read_checkpoint_config(directory)
    weights = planned_weights(
        checkpoint, weight_shapes(checkpoint.model), stored_tensors(directory), directory
    )
    return LoadPlan(
        directory, checkpoint, weights, tokens_sha256=manifest.get("tokens_sha256")
    )


def plan_head(
    directory: Path, checkpoint: CheckpointConfig, stored: Mapping[str, StoredTensor],
    lent: tuple[str, ...],
) -> LoadPlan:
    """Return the plan of loading a head that drafts for its target, of stored tensors.

    Names of weights that the target lends begin with one of `lent`. The input of a token without a
    known hidden state is zero: no published checkpoint has it. Raises as `planned_weights`.
    """
    shapes = weight_shapes(checkpoint.model)
    from_target = tuple(name for name in shapes if name.startswith(lent))
    expected = {
        name: shape for name, shape in shapes.items() if name not in (*from_target, UNKNOWN)
    }
    weights = planned_weights(checkpoint, expected, stored, directory)
    return LoadPlan(directory, checkpoint, weights, from_target, (UNKNOWN,))


def planned_weights(
    checkpoint: CheckpointConfig, expected: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, StoredTensor], where: object, remedy: str = _SAME,
    tied: Iterable[set[str]] = (),
) -> dict[str, PlannedWeight]:
    """Return the plan of the weights of names and shapes `expected`, after checking all of them.

    Args:
        checkpoint: Config, layout and quantisation.
        expected: Names and shapes of our weights.
        stored: All stored tensors.
        where: Where they are stored, for errors.
        remedy: What to do about tensors that do not fit, for errors.
        tied: Sets of names of one tensor each, of which any may be used.

    Raises CheckpointRefused for missing, unexpected or misshapen tensors, and for numbers in a
    format that is not read.
    """
    if checkpoint.quantisation is not None:
        stored = with_scales(stored, where)
    rename = checkpoint.rename(stored)
    sources = {name: rename(name) for name in expected}
    if checkpoint.model.tie_embeddings and EMBEDDING in sources:
        sources[EMBEDDING] = replace(sources[EMBEDDING], copies=(HEAD,))
    sources = {name: source.among(stored) for name, source in sources.items()}
    _require_all(checkpoint, sources.values(), stored, f"{where} does not hold", remedy, tied)
    weights = {}
    for name, source in sources.items():
        wanted = source.shape or expected[name]
        if name in (EMBEDDING, HEAD) and not checkpoint.model.head_vocab_size:
            wanted = (checkpoint.padded_vocab_size, *wanted[1:])
        formats = _READABLE_IDS if name == HEAD_IDS else tuple(READABLE_FORMATS)
        if checkpoint.quantisation is not None:
            formats = (*formats, FLOAT8_FORMAT)
        found = tuple(stored[each] for each in source.names)
        splits = source.splits or ((wanted,) * len(found),)
        fits = tuple(each.shape for each in found) in splits
        for tensor, shape in zip(found, splits[0], strict=True):
            if not fits and tensor.shape != shape:
                raise CheckpointRefused(
                    f"{tensor.name} in {where} has shape {tensor.shape}, its config wants {shape}: "
                    f"{remedy}"
                )
            _require_format(tensor, formats, checkpoint, where)
        copies = tuple(stored[each] for each in source.copies)
        for tensor in copies:
            _require_format(tensor, formats, checkpoint, where)
        weights[name] = PlannedWeight(expected[name], source, found, copies)
    return weights


def _require_all(
    checkpoint: CheckpointConfig, sources: Iterable[Source], stored: Mapping[str, StoredTensor],
    complaint: str, remedy: str, tied: Iterable[set[str]],
) -> None:
    """Refuse missing and unexpected tensors."""
    wanted = [each for source in sources for each in source.names]
    missing = [each for each in dict.fromkeys(wanted) if each not in stored]
    used = {*wanted, *(each for source in sources for each in source.copies)}
    for names in tied:
        used |= names if names & used else set()
    unexpected = [
        name for name in sorted(stored.keys() - used)
        if not _BUFFERS_OF_OLD_LLAMAS.fullmatch(name)
        and not (checkpoint.layout.dropped and checkpoint.layout.dropped.fullmatch(name))
    ]
    if missing or unexpected:
        raise CheckpointRefused(
            f"{complaint} the {checkpoint.layout.name} model that its config describes: "
            f"{_some(missing)} missing, {_some(unexpected)} not expected; {remedy}"
        )


def _require_format(
    tensor: StoredTensor, formats: tuple[str, ...], checkpoint: CheckpointConfig, where: object
) -> None:
    if tensor.number_format not in formats:
        raise CheckpointRefused(
            f"{tensor.name} in {where} is stored as {tensor.number_format}, wanted one of "
            f"{', '.join(formats)}: use a checkpoint that is not quantised"
        )
    if (scale := tensor.scale) is None:
        return
    assert checkpoint.quantisation is not None
    if scale.number_format not in _READABLE_SCALES:
        raise CheckpointRefused(
            f"{scale.name} in {where} is stored as {scale.number_format}, wanted one of "
            f"{', '.join(_READABLE_SCALES)}: use a checkpoint in one of the formats of FP8"
        )
    block = checkpoint.quantisation.block
    if scale_grid(tensor.shape, scale.shape, block) is None:
        raise CheckpointRefused(
            f"{scale.name} in {where} has shape {scale.shape}, which is neither a scale an output "
            f"nor one a block of {block} for a weight of shape {tensor.shape}: {_SAME}"
        )


def _some(names: list[str]) -> str:
    if not names:
        return "nothing"
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
