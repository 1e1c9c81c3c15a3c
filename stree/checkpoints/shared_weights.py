"""Share the weights of a model that transformers has loaded, instead of copying them.

A parameter that equals one of theirs is the same object: when our products join its weights with
others, theirs are joined, too. Halves of a fused projection are views of it. Only weights that must
be reordered or scaled (q and k of partial rotary, Qwen's gated q, embeddings with a multiplier,
everything in Falcon-H1) are tensors of their own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.configs import checkpoint_config_of
from stree.checkpoints.plan.build import kept_dtype
from stree.checkpoints.plan.load_plan import planned_weights
from stree.checkpoints.plan.pickles import format_of
from stree.checkpoints.plan.stored import StoredTensor
from stree.common.errors import CheckpointRefused, UsageError
from stree.models.config.weights import weight_shapes
from stree.models.layers.part import Part
from stree.models.model import HybridModel


@torch.inference_mode(False)
@torch.no_grad()
def shared_model(theirs: Any) -> HybridModel:
    """Return a `HybridModel` with the weights of a model of transformers, on its device.

    After its weights are trained or replaced, call it again. Raises `UsageError` for an object that
    is no such model or not on one device, and `CheckpointRefused` for a model of no known family,
    or with other tensors than its config describes (adapters, quantised layers).
    """
    from transformers import PreTrainedModel

    if not isinstance(theirs, PreTrainedModel):
        raise UsageError(
            f"the model is a {type(theirs).__name__}, wanted one that transformers has loaded "
            "(AutoModelForCausalLM.from_pretrained)"
        )
    kind = type(theirs).__name__
    values = json.loads(theirs.config.to_json_string())
    checkpoint = checkpoint_config_of(CheckedJson(values, Path(f"the config of this {kind}")))
    state: dict[str, Tensor] = theirs.state_dict(keep_vars=True)
    for each, tensor in state.items():
        if type(tensor) not in (Tensor, nn.Parameter):
            raise CheckpointRefused(
                f"{each} of the model is a {type(tensor).__name__}, wanted a plain tensor: load it "
                "unquantised, and whole"
            )
    devices = {tensor.device for tensor in state.values()}
    if len(devices) != 1 or devices == {torch.device("meta")}:
        places = ", ".join(sorted(map(str, devices)))
        raise UsageError(f"the model lies on {places}: load it on one device")
    tied: dict[int, set[str]] = {}
    for each, tensor in state.items():
        tied.setdefault(id(tensor), set()).add(each)
    stored = {
        each: StoredTensor(each, tuple(tensor.shape), format_of(tensor.dtype))
        for each, tensor in state.items()
    }
    weights = planned_weights(
        checkpoint, weight_shapes(checkpoint.model), stored, f"this {kind}",
        "merge adapters, and load it unquantised", tied.values(),
    )
    for weight in weights.values():
        for copy in weight.copies:
            if state[copy.name] is not state[weight.stored[0].name]:
                raise CheckpointRefused(
                    f"the config of this {kind} ties {copy.name} to {weight.stored[0].name}, but "
                    "these are two tensors: call its tie_weights(), or set tie_word_embeddings to "
                    "False in its config"
                )
    with torch.device("meta"):
        ours = HybridModel(checkpoint.model)
    dtype: torch.dtype = theirs.get_input_embeddings().weight.dtype  # type: ignore[assignment,union-attr]
    for each, weight in weights.items():
        made = weight.source.make(*(state[place.name] for place in weight.stored))
        _put(ours, each, made.to(kept_dtype(each, dtype, weight.source)))
    for part in ours.modules():
        if isinstance(part, Part):
            part.keeps_rows = True  # or transformers could not save joined weights
    return ours.eval()


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Set the model's tensor of a name; a parameter is set as the same object."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = tensor
    elif isinstance(tensor, nn.Parameter):
        module._parameters[leaf] = tensor
    else:
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
