"""Hold the weights of a model's products in fp8 e4m3."""

from __future__ import annotations

from itertools import chain
from typing import cast

import torch
from torch import Tensor, nn

from stree.models.layers.layer import SharedUse
from stree.models.layers.mlp import Experts
from stree.models.layers.packed_linear import FLOAT8, ScaledLinear
from stree.models.layers.part import Part, require_products_in_8_bits
from stree.models.model import HybridModel
from stree_kernels import naive
from stree_kernels.contracts import Scaled


def scale_name(name: str) -> str:
    """Return the name of the scales of a weight in 8 bits, by the weight's name."""
    place, _, own = name.rpartition(".")
    return f"{place}.scale" if own == "weight" else f"{name}_scale"


def projections(model: HybridModel) -> dict[str, nn.Linear]:
    """Return the projections that `put_in_8_bits` takes, by name, the head's included."""
    modules = list(model.modules())
    parts = [each.in_8_bits() for each in modules if isinstance(each, Part)]
    wanted = set(chain.from_iterable(parts))
    wanted.update(each.out for each in modules if isinstance(each, SharedUse))
    if not model.config.tie_embeddings:
        wanted.add(model.lm_head)
    return {
        name: each for name, each in model.named_modules()
        if isinstance(each, nn.Linear) and each in wanted
    }


def weights_for_8_bits(model: HybridModel) -> dict[str, Tensor]:
    """Return the weights that `put_in_8_bits` takes, by name: `projections`' and experts'."""
    return {
        **{f"{name}.weight": each.weight for name, each in projections(model).items()},
        **{
            f"{name}.{own}": getattr(each, own) for name, each in model.named_modules()
            if isinstance(each, Experts) for own in Experts.WEIGHTS
        },
    }


def hold_in_8_bits(model: HybridModel, name: str, weight: Scaled) -> None:
    """Hold one of `weights_for_8_bits`, by its name, as `weight` from now on."""
    place, _, own = name.rpartition(".")
    module = model.get_submodule(place)
    if isinstance(module, Experts):
        module.hold(own, weight)
    else:
        model.set_submodule(place, ScaledLinear(weight, cast(nn.Linear, module).bias))


@torch.inference_mode(False)
@torch.no_grad()
def put_in_8_bits(model: HybridModel, head: bool = True, rounds_inputs: bool = False) -> None:
    """Hold the weights of a step's products in fp8 e4m3 from now on, with one scale an output.

    These are the projections of attention, recurrent layers, convolutions and MLPs, experts, and
    with `head` the head, of which a tied one is a copy (`HybridModel.put_head_in_8_bits`).
    Embeddings, norms, convolutions, A, D, dt's bias, biases, low-rank adapters, routers, and what
    Mamba-1 selects by stay as they are. With `rounds_inputs` inputs of many rows are rounded, too,
    in passes over whole sequences, but for experts. So are inputs of weights that the checkpoint
    itself stores in 8 bits with one scale an output, whether or not it has scales for inputs.
    A model in 8 bits can neither be trained nor saved.

    Raises `UsageError` for a GPU without float8.
    """
    require_products_in_8_bits(model.device, "load the target without target_dtype")
    for name, weight in weights_for_8_bits(model).items():
        if name == "lm_head.weight" and not head:
            continue
        if weight.dtype != FLOAT8:
            hold_in_8_bits(model, name, naive.in_8_bits(weight))
        module = model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, ScaledLinear):
            module.rounds_inputs = rounds_inputs
    if head:
        model.put_head_in_8_bits()


def plain_state(model: HybridModel, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return the state dict, weights in 8 bits as numbers of a dtype; None is the model's."""
    state = model.state_dict()
    for name in weights_for_8_bits(model):
        if (scale := state.pop(scale_name(name), None)) is not None:
            state[name] = naive.dequantised(Scaled(state[name], scale), dtype or model.dtype)
    return state
