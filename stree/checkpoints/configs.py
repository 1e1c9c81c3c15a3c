"""Read a checkpoint folder's config.json (and mamba_config.json) as a HybridConfig, and write it.

Layouts read: MambaInLlama (Llama's config.json beside mamba_config.json), transformers' Llama,
Mistral, Qwen2, Qwen3, Mamba (FalconMamba) and Mamba2, state-spaces/mamba and mamba2, our own for
what MambaInLlama's cannot say (layouts/), and further families (families/). A key that the family's
own config class knows is read, known to be without effect, or refused with its name
(config_keys.py); other keys are passed over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.config_keys import TRAINING_AND_GENERATION, of_family
from stree.checkpoints.families import FAMILIES
from stree.checkpoints.layouts import llama, mamba1, mamba2, mamba_in_llama, own
from stree.checkpoints.layouts.mamba_in_llama import MIXER_CONFIG_NAME
from stree.checkpoints.layouts.own import MODEL_TYPE
from stree.checkpoints.layouts.quantisation import KEYS, Quantisation, read_quantisation
from stree.checkpoints.sources import EAGLE_KEYS, Layout, Rename
from stree.common.errors import CheckpointRefused, NotFound, UsageError
from stree.common.files import require_own_files
from stree.models.config import HybridConfig

_REFUSED_IF_SET = {
    **dict.fromkeys(
        ("auto_map", "trust_remote_code"), "code that comes with a checkpoint is not run"
    ),
}


@dataclass(frozen=True)
class CheckpointConfig:
    """The config of a checkpoint folder.

    Attributes:
        layout: Kind of checkpoint.
        model: Config of the model.
        padded_vocab_size: Rows of the stored embedding, padding included.
        rename: Given the stored names, returns the map from our parameters to stored tensors.
        mtp: Returns the config of the checkpoint's MTP head; None for layouts without one.
        quantisation: How the weights are quantised; None for weights that are not.
    """

    layout: Layout
    model: HybridConfig
    padded_vocab_size: int
    rename: Callable[[Collection[str]], Rename]
    mtp: Callable[[], CheckpointConfig] | None = None
    quantisation: Quantisation | None = None


def read_checkpoint_config(directory: Path) -> CheckpointConfig:
    """Read the config files of `directory`.

    Raises NotFound without the folder, and CheckpointRefused when they are absent, unreadable,
    foreign, incomplete, or ask for something that the model does not do.
    """
    if not directory.is_dir():
        raise NotFound(f"no folder {directory}: give the path of a checkpoint")
    require_own_files(directory)
    values = CheckedJson.load(directory / "config.json")
    quantisation = read_quantisation(directory, values)
    return _with_generation_eos(directory, _read(values, _layout_of(values), quantisation))


def load_config(path: str | os.PathLike[str]) -> HybridConfig:
    """Return the config of the model in a folder. Raises as `read_checkpoint_config` does."""
    return read_checkpoint_config(Path(path)).model


def checkpoint_config_of(values: CheckedJson) -> CheckpointConfig:
    """Read a config.json of transformers' own layouts, without a folder.

    Raises `CheckpointRefused` as `read_checkpoint_config`.
    """
    values.refuse_if_set(dict.fromkeys(KEYS, "load a model that is not quantised"))
    return _read(values, _layout_by_type(values))


def _read(
    values: CheckedJson, layout: Layout, quantisation: Quantisation | None = None
) -> CheckpointConfig:
    values.refuse_if_set({
        name: remedy for name, remedy in _REFUSED_IF_SET.items()
        if name not in layout.without_effect
    })
    values.require(is_encoder_decoder=False)
    try:
        model = layout.spec(values)
        rename = partial(layout.rename, values, model)
        rename(())  # reads the multipliers that it folds
    except UsageError as error:
        raise CheckpointRefused(f"{values.path}: {error}; use an undamaged checkpoint") from error
    padded = model.vocab_size
    if layout is mamba2.STATE_SPACES:
        multiple = max(values.integer("pad_vocab_size_multiple", 8), 1)
        padded = -(-padded // multiple) * multiple
    values.refuse_unread(
        layout.without_effect | TRAINING_AND_GENERATION, partial(_known_keys, layout, values)
    )
    _require_reachable(model.eos_token_ids, padded, values)
    checkpoint = CheckpointConfig(layout, model, padded, rename, quantisation=quantisation)
    mtp = layout.mtp and partial(_mtp_of, values, checkpoint)
    return replace(checkpoint, mtp=mtp)


def _mtp_of(values: CheckedJson, checkpoint: CheckpointConfig) -> CheckpointConfig:
    assert checkpoint.layout.mtp is not None
    model, rename = checkpoint.layout.mtp(values, checkpoint.model)
    return replace(checkpoint, model=model, rename=rename)


def _known_keys(layout: Layout, values: CheckedJson) -> Container[str]:
    """Return the keys that have an effect in the library that wrote such a config."""
    if layout is mamba2.STATE_SPACES:
        return mamba2.STATE_SPACES_KEYS
    kind = values.get("model_type")
    return of_family(kind if kind in layout.model_types else layout.model_types[0])


def _layout_of(values: CheckedJson) -> Layout:
    if any(key in values for key in EAGLE_KEYS):
        values.refuse("describes an EAGLE head of a target", "name it as the drafter eagle:FOLDER")
    kind = values.get("model_type")
    has_mixer_config = values.path.with_name(MIXER_CONFIG_NAME).exists()
    if kind == MODEL_TYPE and own.TABLE in values:
        return own.LAYOUT
    if kind == MODEL_TYPE and not has_mixer_config:
        values.refuse(f"has no {MIXER_CONFIG_NAME} beside it, which describes its Mamba layers")
    if has_mixer_config:
        return mamba_in_llama.LAYOUT
    if kind in (None, "mamba", "mamba2") and "ssm_cfg" in values and "d_model" in values:
        return mamba2.STATE_SPACES
    return _layout_by_type(values)


def _layout_by_type(values: CheckedJson) -> Layout:
    kind = values.get("model_type")
    by_type = (
        llama.LAYOUT, llama.MISTRAL, llama.QWEN2, llama.QWEN3,
        mamba1.TRANSFORMERS, mamba2.TRANSFORMERS, *FAMILIES,
    )
    for layout in by_type:
        if kind in layout.model_types:
            return layout
    names = [each.name for each in (mamba_in_llama.LAYOUT, mamba2.STATE_SPACES, *by_type)]
    raise CheckpointRefused(
        f"{values.path} describes a {'nameless' if kind is None else kind!r:.99} model, wanted one "
        f"of: {', '.join(names)}"
    )


def _with_generation_eos(directory: Path, checkpoint: CheckpointConfig) -> CheckpointConfig:
    """Add the EOS tokens of generation_config.json: some chat models name theirs only there."""
    path = directory / "generation_config.json"
    if not path.exists():
        return checkpoint
    values = CheckedJson.load(path)
    eos = values.token_ids("eos_token_id")
    _require_reachable(eos, checkpoint.padded_vocab_size, values)
    ends = tuple(dict.fromkeys((*checkpoint.model.eos_token_ids, *eos)))
    return replace(checkpoint, model=checkpoint.model.replace(eos_token_ids=ends))


def _require_reachable(eos: Sequence[int], padded_vocab_size: int, values: CheckedJson) -> None:
    """Refuse an EOS token beyond the logits: it is never chosen, so that no answer would end."""
    if beyond := [index for index in eos if index >= padded_vocab_size]:
        values.refuse(
            f"has eos_token_id {beyond[0]}, the vocabulary has {padded_vocab_size} tokens",
            "correct it to the tokenizer's",
        )


def config_files(config: HybridConfig, dtype: str) -> dict[str, str]:
    """Return the JSON files, by name, from which `read_checkpoint_config` reads `config`.

    A model of attention layers has Llama's config.json alone; a model of Mamba-2 and attention
    layers one with a model type of our own, and mamba_config.json. Other models are written as they
    are, in a table of config.json.
    """
    unbiased = config.replace(attention_bias=False, mlp_bias=False)
    is_attention = len(config.attn_layers) == config.num_layers
    if is_attention and mamba_in_llama.has_words_for(unbiased):
        files = {"config.json": llama.config_json(config, dtype)}
    elif not mamba_in_llama.has_words_for(config):
        files = {"config.json": own.config_json(config, dtype)}
    else:
        files = {
            "config.json": llama.json_fields(config, dtype, MODEL_TYPE),
            MIXER_CONFIG_NAME: mamba_in_llama.mixer_json(config),
        }
    return {
        name: json.dumps(content, indent=2, allow_nan=False) + "\n"
        for name, content in files.items()
    }
