"""Plan a published EAGLE-3 head as a drafter: SafeAILab's layout, and that of vLLM's speculators.

SafeAILab's config.json is Llama's with `draft_vocab_size`, the layer's tensors are `midlayer.*`;
SpecForge and others write the same. `speculators` keeps Llama's or Qwen3's config in
`transformer_layer_config`, and calls the layer `layers.0`. Both have `fc` over hidden states of
three of the target's layers, and `d2t`, which added to an index of the head gives the token. A head
without `embed_tokens` has its target's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.config_keys import TRAINING_AND_GENERATION, of_family
from stree.checkpoints.configs import CheckpointConfig
from stree.checkpoints.layouts import llama
from stree.checkpoints.layouts.quantisation import read_quantisation
from stree.checkpoints.names import Names, Table
from stree.checkpoints.plan.load_plan import LoadPlan, plan_head
from stree.checkpoints.plan.stored import stored_tensors
from stree.checkpoints.sources import EAGLE_KEYS, Layout, Rename, Source, as_stored, joined
from stree.common.errors import CheckpointRefused, NotFound, UsageError
from stree.common.files import require_own_files
from stree.models.config import HybridConfig
from stree.models.config.weights import EMBEDDING, HEAD_IDS

if TYPE_CHECKING:
    from torch import Tensor

_LAYOUTS = {"llama": llama.LAYOUT, "qwen3": llama.QWEN3}
# Keys of `speculators` by the norms that they add (`HybridConfig.eagle_norms`)
_NORM_KEYS = {
    "norm_before_fc": "features", "fc_norm": "each", "norm_before_residual": "residual",
    "norm_output": "own",
}
_INPUTS: Table = {
    "model.fc": "model.features.proj",
    "model.input_norm.weight": "model.features.norm.weight",
    "model.fc_norm.*.weight": "model.features.norm.weight",  # or a norm for each layer's
    "d2t": HEAD_IDS,
}
_SPECULATORS = Names({
    **_INPUTS,
    "model.layers.0.input_layernorm": "model.features.embedding_norm",
    "model.layers.0.hidden_norm": "model.layers.*.input_layernorm",
}, prefix="")
_MIDLAYER = Names({
    **_INPUTS,
    "model.midlayer.input_layernorm": "model.features.embedding_norm",
    "model.midlayer.hidden_norm": "model.layers.*.input_layernorm",
    "model.midlayer.self_attn.q_proj": "model.layers.*.self_attn.q_proj",
    "model.midlayer.self_attn.k_proj": "model.layers.*.self_attn.k_proj",
    "model.midlayer.self_attn.v_proj": "model.layers.*.self_attn.v_proj",
    "model.midlayer.self_attn.o_proj": "model.layers.*.self_attn.o_proj",
    "model.midlayer.self_attn.q_norm": "model.layers.*.self_attn.q_norm",
    "model.midlayer.self_attn.k_norm": "model.layers.*.self_attn.k_norm",
    "model.midlayer.post_attention_layernorm": "model.layers.*.post_attention_layernorm",
    "model.midlayer.mlp.gate_proj": "model.layers.*.mlp.gate_proj",
    "model.midlayer.mlp.up_proj": "model.layers.*.mlp.up_proj",
    "model.midlayer.mlp.down_proj": "model.layers.*.mlp.down_proj",
}, prefix="")
_LATER_LAYERS = re.compile(r"model\.layers\.(?!0\.)")


def plan_eagle(path: str | os.PathLike[str], target: HybridConfig) -> LoadPlan:
    """Return the plan of loading the EAGLE-3 head in a folder, as a drafter of such a target.

    An embedding that it lacks is lent by the target (`share_ends`).

    Raises NotFound without the folder, and CheckpointRefused for a head of another form or another
    target, and for missing, unexpected or misshapen tensors.
    """
    directory = Path(path)
    checkpoint = read_eagle_config(directory, target)
    stored = stored_tensors(directory)
    lacks_embedding = "embed_tokens.weight" not in stored
    if lacks_embedding and checkpoint.model.d_model != target.d_model:
        raise CheckpointRefused(
            f"{directory} has no embed_tokens.weight, and its width {checkpoint.model.d_model} "
            f"is not the target's, {target.d_model}, to share its embedding: copy it again"
        )
    return plan_head(directory, checkpoint, stored, (EMBEDDING,) * lacks_embedding)


def read_eagle_config(path: str | os.PathLike[str], target: HybridConfig) -> CheckpointConfig:
    """Return the config of the EAGLE-3 head of a target. Raises as `plan_eagle` does."""
    directory = Path(path)
    if not directory.is_dir():
        raise NotFound(f"no folder {directory}: give the path of an EAGLE-3 head")
    require_own_files(directory)
    values = CheckedJson.load(directory / "config.json")
    quantisation = read_quantisation(directory, values)
    if not any(key in values for key in EAGLE_KEYS):
        values.refuse(
            "describes no EAGLE-3 head (draft_vocab_size or speculators_model_type)",
            "name another drafter's folder without eagle:",
        )
    values.require(speculators_model_type="eagle3", parallel_drafting=False)
    is_speculators = "transformer_layer_config" in values
    layer = values.section("transformer_layer_config") if is_speculators else values
    kind = layer.get("model_type", "llama")
    if kind not in _LAYOUTS:
        values.refuse(f"has a layer of model_type {kind!r:.99}, wanted {' or '.join(_LAYOUTS)}")
    try:
        model = _of_target(values, _LAYOUTS[kind].spec(layer), target)
    except UsageError as error:
        raise CheckpointRefused(f"{values.path}: {error}; use an undamaged checkpoint") from error
    layer.refuse_unread(
        _LAYOUTS[kind].without_effect | TRAINING_AND_GENERATION, partial(of_family, kind)
    )
    layout = Layout(
        "EAGLE-3", (kind,), _LAYOUTS[kind].spec, _rename,
        dropped=re.compile("[dt]2[td]|verifier_.*"),
    )
    rename = partial(_rename, values, model)
    return CheckpointConfig(layout, model, model.vocab_size, rename, quantisation=quantisation)


def _of_target(values: CheckedJson, head: HybridConfig, target: HybridConfig) -> HybridConfig:
    """Return the config of a head by that of its layer, its own keys, and its target's."""
    for name, wanted, found in (
        ("width", values.integer("target_hidden_size", head.d_model), target.d_model),
        ("vocabulary", head.vocab_size, target.vocab_size),
    ):
        if wanted != found:
            values.refuse(
                f"is of a head for a target of {name} {wanted}, this one has {found}",
                "take the head that was trained for this target",
            )
    tokens = values.integer("draft_vocab_size", head.vocab_size)
    return head.replace(
        tie_embeddings=False, head_vocab_size=tokens if tokens != head.vocab_size else 0,
    ).reading(_layers(values, target.num_layers), target, own=True).replace(
        eagle_inputs=True,
        eagle_norms=tuple(
            norm for key, norm in _NORM_KEYS.items() if values.boolean(key, False)
        ),
    )


def _layers(values: CheckedJson, num_layers: int) -> tuple[int, ...]:
    """Return the target's layers whose outputs are read.

    Published numbers are those of the layers that read these outputs: without the key they are 2,
    the middle and the third before the end (SafeAILab's eagle/model/modeling_llama_kv.py).
    """
    key, table = "eagle_aux_hidden_state_layer_ids", values
    if "eagle_config" in values:
        table = values.section("eagle_config")
        table.require(use_aux_hidden_state=True)
        table = values if key in values else table
    usual = [2, num_layers // 2, num_layers - 3]
    layers = table.indices(key, usual)
    if not layers or not all(1 <= layer <= num_layers for layer in layers):
        values.refuse(
            f"reads the inputs of layers {layers}, the target has the layers 0 to {num_layers - 1}",
            "take the head that was trained for this target",
        )
    return tuple(layer - 1 for layer in layers)


def _rename(values: CheckedJson, config: HybridConfig, stored: Collection[str]) -> Rename:
    names = _MIDLAYER if any(name.startswith("midlayer.") for name in stored) else _SPECULATORS
    count, width = len(config.feature_layers), config.target_width

    def source(name: str) -> Source:
        if _LATER_LAYERS.match(name):
            return Source((name.removeprefix("model."),))
        place, *of_each = names.published(name)
        if of_each and "each" in config.eagle_norms:
            norms = tuple(of_each[0].replace("*", str(number)) for number in range(count))
            return Source(norms, joined, (width,))
        return Source((place,), _token_ids if name == HEAD_IDS else as_stored)

    return source


def _token_ids(offsets: Tensor) -> Tensor:
    """Return the tokens of a head, of which d2t has the distances to their indices."""
    return offsets.new_ones(offsets.shape).cumsum(0) - 1 + offsets
