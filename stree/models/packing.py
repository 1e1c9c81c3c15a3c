"""Weights laid out as calls over token trees read them, and laid out again when they have moved."""

from __future__ import annotations

from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from stree.models.config import HybridConfig
from stree.models.head import HeadedModel
from stree.models.layers.layer import Layer, SharedTransformer, SharedUse
from stree.models.layers.mlp import Experts
from stree.models.layers.packed_linear import FLOAT8, ScaledLinear, lay_for_products
from stree.models.layers.part import Part, require_products_in_8_bits
from stree_kernels import naive
from stree_kernels.contracts import Scaled

# Modules, compared as objects, and the addresses of weights
Places = tuple[list[nn.Module], list[int]]


def version_of(weight: Tensor) -> int:
    """Return how often a tensor was written in place; 0 if `torch.inference_mode` made it."""
    try:
        return weight._version
    except RuntimeError:  # `is_inference` denies it of a parameter whose data is such a tensor
        return 0


def scale_name(name: str) -> str:
    """Return the name of the scales of a weight in 8 bits, by the weight's name."""
    place, _, own = name.rpartition(".")
    return f"{place}.scale" if own == "weight" else f"{name}_scale"


class PackedModel(HeadedModel):
    """A model that packs its weights, and sees when they have moved."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        self.offload: Any = None  # the `Offload` of a model with streamed layers
        self._packed_at: Places | None = None  # those of the projections at the last `pack`
        self._module_dicts: list[dict[str, Any]] = []  # children and weights of all modules
        self._weight_dicts: list[dict[str, Any]] = []
        self._projection_dicts: list[dict[str, Any]] = []  # of these, the weights of projections

    @property
    def is_in_8_bits(self) -> bool:
        """True if weights of products are held in fp8 e4m3."""
        return any(each.dtype == FLOAT8 for each in self.parameters())

    def projections(self) -> dict[str, nn.Linear]:
        """Return the projections that `put_in_8_bits` takes, by name, the head's included."""
        modules = list(self.modules())
        parts = [each.in_8_bits() for each in modules if isinstance(each, Part)]
        wanted = set(chain.from_iterable(parts))
        wanted.update(each.out for each in modules if isinstance(each, SharedUse))
        if not self.config.tie_embeddings:
            wanted.add(self.lm_head)
        return {
            name: each for name, each in self.named_modules()
            if isinstance(each, nn.Linear) and each in wanted
        }

    def weights_for_8_bits(self) -> dict[str, Tensor]:
        """Return the weights that `put_in_8_bits` takes, by name: `projections`' and experts'."""
        return {
            **{f"{name}.weight": each.weight for name, each in self.projections().items()},
            **{
                f"{name}.{own}": getattr(each, own) for name, each in self.named_modules()
                if isinstance(each, Experts) for own in Experts.WEIGHTS
            },
        }

    def hold_in_8_bits(self, name: str, weight: Scaled) -> None:
        """Hold one of `weights_for_8_bits`, by its name, as `weight` from now on."""
        place, _, own = name.rpartition(".")
        module = self.get_submodule(place)
        if isinstance(module, Experts):
            module.hold(own, weight)
        else:
            self.set_submodule(place, ScaledLinear(weight, cast(nn.Linear, module).bias))

    @torch.inference_mode(False)
    @torch.no_grad()
    def put_in_8_bits(self, head: bool = True, rounds_inputs: bool = False) -> None:
        """Hold the weights of a step's products in fp8 e4m3 from now on, with one scale an output.

        These are the projections of attention, recurrent layers, convolutions and MLPs, experts,
        and with `head` the head, of which a tied one is a copy (`put_head_in_8_bits`). Embeddings,
        norms, convolutions, A, D, dt's bias, biases, low-rank adapters, routers, and what Mamba-1
        selects by stay as they are. With `rounds_inputs` inputs of many rows are rounded, too, in
        passes over whole sequences, but for experts. So are inputs of weights that the checkpoint
        itself stores in 8 bits with one scale an output, whether or not it has scales for inputs.
        A model in 8 bits can neither be trained nor saved.

        Raises `UsageError` for a GPU without float8.
        """
        require_products_in_8_bits(self.device, "load the target without target_dtype")
        for name, weight in self.weights_for_8_bits().items():
            if name == "lm_head.weight" and not head:
                continue
            if weight.dtype != FLOAT8:
                self.hold_in_8_bits(name, naive.in_8_bits(weight))
            module = self.get_submodule(name.rpartition(".")[0])
            if isinstance(module, ScaledLinear):
                module.rounds_inputs = rounds_inputs
        if head:
            self.put_head_in_8_bits()

    def plain_state(self) -> dict[str, Tensor]:
        """Return the state dict, weights in 8 bits as numbers of the model's dtype."""
        state = self.state_dict()
        for name in self.weights_for_8_bits():
            if (scale := state.pop(scale_name(name), None)) is not None:
                state[name] = naive.dequantised(Scaled(state[name], scale), self.dtype)
        return state

    @torch.inference_mode(False)  # weights laid out inside it could not be trained any more
    @torch.no_grad()
    def pack(self) -> None:
        """Lay the weights out as calls over trees read them, in place; done by `new_cache`.

        Values, shapes and memory stay. Weights that are moved afterwards (another device, a
        `load_state_dict(assign=True)`) and modules that are replaced are laid out again by the next
        call.
        """
        for each in [*self.model.layers, *self.model.shared_blocks]:
            cast(Layer | SharedTransformer, each).pack()
        parts = [module for module in self.modules() if isinstance(module, Part)]
        if isinstance(self.head, Tensor) or self.head_in_8_bits is not None:
            lay_for_products(self.head_weight, any(part.keeps_rows for part in parts))
        if self.head_in_8_bits is not None:
            self.put_head_in_8_bits()
        modules = list(self.modules())
        self._module_dicts = [each._modules for each in modules if each._modules]
        self._weight_dicts = [each._parameters for each in modules if each._parameters]
        self._projection_dicts = [
            each._parameters for each in modules if isinstance(each, nn.Linear)
        ]
        self._packed_at = self._places(self._projection_dicts)

    def pack_what_moved(self) -> None:
        """Call `pack` if weights were moved, or modules replaced, since the last call."""
        if self._places(self._projection_dicts) != self._packed_at:
            self.pack()

    def state(self) -> tuple[Places, list[int]]:
        """Return the state (`weights_state`) of the weights that stood there at the last `pack`."""
        weights = chain.from_iterable(map(dict.values, self._weight_dicts))
        versions = [version_of(each) for each in weights if each is not None]
        return self._places(self._weight_dicts), versions

    def _places(self, weight_dicts: list[dict[str, Any]]) -> Places:
        modules = list(chain.from_iterable(map(dict.values, self._module_dicts)))
        weights = chain.from_iterable(map(dict.values, weight_dicts))
        return modules, [each.data_ptr() for each in weights if each is not None]


def weights_state(model: nn.Module) -> tuple[Places, list[int]]:
    """Return where a model's weights are, and how often each was written in place.

    Writes to tensors of `torch.inference_mode`, and writes through `.data`, are not counted.
    """
    if isinstance(model, PackedModel):
        return model.state()
    weights = list(model.parameters())
    return ([], list(map(Tensor.data_ptr, weights))), list(map(version_of, weights))
