"""A drafter cut out of its target, or with parts of it: embedding, head, norms, a few layers.

Initialising from the target's own layers starts distillation from something that already shares
its embedding space (the paper's drafter has two Mamba-2 layers of its target's size).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from stree.common.errors import UsageError
from stree.models.backbone import initialise
from stree.models.config import HybridConfig
from stree.models.hidden_states import HiddenStateProjection
from stree.models.in_8_bits import plain_state, scale_name, weights_for_8_bits
from stree.models.layers.part import Part
from stree.models.model import HybridModel

Layers = Sequence[int] | Literal["first"] | None  # of a target, see `layers_to_copy`


def layers_to_copy(target_config: HybridConfig, layers: Layers) -> list[int]:
    """Return the numbers of the layers that a drafter is made of, in the order given.

    The first recurrent layer reads embeddings, the last one's output reaches the head. Layers with
    both a recurrent mixer and attention are taken only if there are too few others.

    Args:
        target_config: Of the target.
        layers: Numbers of the target's layers, of any kind; "first" is its first recurrent layer;
            None is its first and its last recurrent layer, whose memory does not grow.

    Raises:
        UsageError: No layers, a number that the target does not have, or one named twice; or the
            target has fewer recurrent layers than are asked for.
    """
    every = range(target_config.num_layers)
    if layers is not None and layers != "first":
        chosen = list(layers)
        if not chosen:
            raise UsageError("no layers to copy into the drafter: name at least one")
        if beyond := [layer for layer in chosen if layer not in every]:
            raise UsageError(
                f"layer {beyond[0]} is not in the target, which has layers 0 to {every[-1]}"
            )
        if len(set(chosen)) != len(chosen):
            raise UsageError(f"layers {chosen} name one twice: each can be copied once")
        return chosen
    recurrent = [layer for layer in every if set(target_config.mixers(layer)) - {"attention"}]
    alone = [layer for layer in recurrent if not target_config.is_attention(layer)]
    wanted = 1 if layers == "first" else 2
    chosen = alone if len(alone) >= wanted else recurrent
    if len(chosen) < wanted:
        asked = "its first is asked for" if wanted == 1 else "a sliced drafter takes 2 by default"
        raise UsageError(
            f"the target has {len(chosen)} recurrent layers, {asked}: name the layers to copy, or "
            "describe a drafter with random weights"
        )
    return [chosen[0], chosen[-1]][:wanted]


def drafter_config_from(target_config: HybridConfig, layers: Layers = None) -> HybridConfig:
    """Return the config of a drafter made of the target's `layers_to_copy`, with its errors."""
    return target_config.keep_layers(layers_to_copy(target_config, layers))


def slice_drafter(
    target: HybridModel, layers: Layers = None, feature_layers: tuple[int, ...] = (),
    own_features: bool = False,
) -> HybridModel:
    """Return a drafter whose weights are copies of the target's, in fp32 on the target's device.

    A drafter that reads features of the target begins as if it read none. Further arguments and
    errors are those of `layers_to_copy`.
    """
    chosen = layers_to_copy(target.config, layers)
    config = target.config.keep_layers(chosen)
    if feature_layers:
        config = config.reading(feature_layers, target.config, own_features)
    with torch.device("meta"):  # nothing is drawn that a copy would replace
        drafter = HybridModel(config)
    source = plain_state(target)
    places = {"layers": chosen, "shared": target.config.shared_blocks_of(chosen)}
    # Not as decoding packs them
    plain: dict[str, Any] = dict(copy=True, memory_format=torch.contiguous_format)
    copies = {
        name: source[_target_name(name, places)].to(weight.dtype, **plain)
        for name, weight in drafter.state_dict().items()
        if not name.startswith("model.features.")
    }
    drafter.load_state_dict(copies, strict=False, assign=True)
    if feature_layers:
        with target.device:
            reader = HiddenStateProjection(config)
        initialise(reader, config.num_layers)
        reader.begin(0.0)
        drafter.model.features = reader
    return drafter


def head_with_ends_of(target: HybridModel, layers: tuple[int, ...]) -> HybridModel:
    """Return an EAGLE-3 head (`HybridConfig.eagle_head`) in fp32 on the target's device.

    Embedding, final norm and head are copies of the target's, all else is random.
    """
    source = plain_state(target)
    with target.device:
        head = HybridModel(target.config.eagle_head(layers))
    ends = ("model.embed_tokens.", "model.norm.", "lm_head.")
    copies = {name: each.float() for name, each in source.items() if name.startswith(ends)}
    head.load_state_dict(copies, strict=False)
    return head


def without_8_bits(model: HybridModel) -> HybridModel:
    """Return the model, or if it holds weights in 8 bits, an fp32 copy that holds none."""
    if model.state_dict().keys().isdisjoint(map(scale_name, weights_for_8_bits(model))):
        return model
    copy = HybridModel(model.config).to(model.device)
    copy.load_state_dict(plain_state(model, torch.float32))
    copy.lacks_embedding, copy.tokens_sha256 = model.lacks_embedding, model.tokens_sha256
    return copy


def headed(config: HybridConfig, vocab_size: int | None, rank: int | None) -> HybridConfig:
    """Return the config with an untied head over `vocab_size` tokens and of rank `rank`.

    vocab_size None is all tokens, rank None a head of one product; both None changes nothing.
    Raises `UsageError` when the config has a head of its own already, or has fewer tokens.
    """
    if vocab_size is None and rank is None:
        return config
    if config.head_vocab_size or config.head_rank:
        raise UsageError(
            f"the drafter has a head of its own already ({config.head_size} tokens, rank "
            f"{config.head_rank or config.d_model}): leave the one out that is asked for"
        )
    return config.replace(
        tie_embeddings=False, head_vocab_size=vocab_size or 0, head_rank=rank or 0
    )


def with_random_head(model: HybridModel, vocab_size: int | None, rank: int | None) -> HybridModel:
    """Return a copy of a model with a random head as `headed` describes it, with its errors."""
    copy = HybridModel(headed(model.config, vocab_size, rank)).to(model.device, model.dtype)
    copy.tokens_sha256 = model.tokens_sha256
    state = plain_state(model)
    state.pop("lm_head.weight", None)
    # Assigned: some are wider than the others
    copy.load_state_dict({n: each.clone() for n, each in state.items()}, strict=False, assign=True)
    return copy.train(model.training)


@torch.no_grad()
def take_head(model: HybridModel, whole: Tensor | None, ids: Tensor | None) -> None:
    """Set the tokens and the weights of a head over a part of the vocabulary, or of low rank.

    Args:
        whole: Weight (V, D) of a head over all tokens: the rows of the head's tokens are taken,
            at low rank their best approximation (on the principal directions). None leaves the
            weights as they are.
        ids: Tokens (K,), ascending; None leaves the tokens as they are.
    """
    if ids is not None:
        assert model.head_ids is not None
        model.head_ids.copy_(ids)
    if whole is None:
        return
    rows = whole if model.head_ids is None else whole[model.head_ids.to(whole.device)]
    if rank := model.config.head_rank:
        wide = rows.double()
        directions = torch.linalg.eigh(wide.T @ wide).eigenvectors[:, -rank:]  # (D, R)
        model.head_down.weight.copy_(directions.T)
        rows = wide @ directions
    model.lm_head.weight.copy_(rows)


def share_ends(drafter: HybridModel, target: HybridModel) -> None:
    """Take what the drafter's checkpoint leaves to its target.

    Of an MTP head (`plan_mtp`) it is embedding, head and final norm, of an EAGLE head
    (`plan_eagle`) the embedding or nothing.
    """
    if drafter.lacks_embedding or drafter.config.fused_inputs:
        drafter.model.embed_tokens = target.model.embed_tokens
    if not drafter.config.fused_inputs:
        return
    if not drafter.config.tie_embeddings:
        drafter.lm_head = target.lm_head
    if target.head_in_8_bits is not None:
        drafter.head_in_8_bits = target.head_in_8_bits
    drafter.model.features.target_norm = target.model.norm
    shared = any(part.keeps_rows for part in target.modules() if isinstance(part, Part))
    for part in drafter.modules():
        if isinstance(part, Part):
            part.keeps_rows = shared  # both lay the head out alike


def _target_name(drafter_name: str, places: Mapping[str, Sequence[int]]) -> str:
    """Return the target's name of a drafter's parameter.

    places maps a list of modules to the target's index of each of the drafter's.
    """
    _, kind, *rest = drafter_name.split(".")
    if kind not in places:
        return drafter_name
    return ".".join(["model", kind, str(places[kind][int(rest[0])]), *rest[1:]])
