"""A layer: blocks of parts after norms, which read the residual stream and add to it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from stree.models.config import MIXERS, UNGATED, Block, HybridConfig
from stree.models.config.weights import NORM_NAMES, PART_NAMES
from stree.models.layers.attention import Attention
from stree.models.layers.gated_delta import GatedDeltaNet
from stree.models.layers.mamba import Mamba2
from stree.models.layers.mamba1 import Mamba1
from stree.models.layers.mlp import MLP, Experts
from stree.models.layers.norm import RMSNorm
from stree.models.layers.parallel import SideBySide
from stree.models.layers.part import Mixer, TrainingPass
from stree.models.layers.short_conv import ShortConv
from stree_kernels.contracts import Stream

MIXER_CLASSES: dict[str, type[Mixer]] = {
    "attention": Attention, "mamba": Mamba2, "mamba1": Mamba1, "short_conv": ShortConv,
    "gated_delta": GatedDeltaNet,
}


def make_part(kind: str, config: HybridConfig, d_input: int | None = None) -> nn.Module:
    """Return a part of a layer, with random weights; d_input is the width of attention's input."""
    if kind == "attention":
        return Attention(config, d_input)
    if kind == "mlp":
        return MLP(config, config.intermediate_size)
    if kind == "shared_mlp":
        return MLP(config, config.shared_intermediate_size, gated=config.shared_gate)
    return Experts(config) if kind == "experts" else MIXER_CLASSES[kind](config)


class Adapter(nn.Module):
    """A low-rank term that is added to a projection."""

    def __init__(self, width: int, rank: int, outputs: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


class SharedTransformer(nn.Module):
    """Attention and MLP, one after the other and without residuals, that several layers use."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        width = 2 * config.d_model
        self.input_layernorm = RMSNorm(width, config.rms_norm_eps)
        self.self_attn = Attention(config, width)
        self.post_attention_layernorm = RMSNorm(config.d_model, config.rms_norm_eps)
        self.mlp = MLP(config, config.intermediate_size)

    def pack(self) -> None:
        """Pack the weights of both parts (`Part.pack`)."""
        self.self_attn.pack()
        self.mlp.pack()


class SharedUse(nn.Module):
    """One layer's use of a shared transformer: its own adapters, and a last projection."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        width, rank = config.d_model, config.adapter_rank
        self.adapts_attention = config.attention_adapters
        if self.adapts_attention:
            kv_width = config.num_kv_heads * config.head_dim
            self.q_adapter = Adapter(2 * width, rank, config.num_heads * config.head_dim)
            self.k_adapter = Adapter(2 * width, rank, kv_width)
            self.v_adapter = Adapter(2 * width, rank, kv_width)
        inner = config.intermediate_size * (1 if config.mlp_kind in UNGATED else 2)
        self.mlp_adapter = Adapter(width, rank, inner)
        self.out = nn.Linear(width, width, bias=False)

    def run(self, block: Any, normed: Any, cache_index: int, call: Any) -> Tensor:
        """Return the shared block's output, to be added to the mixer's input.

        normed is the norm of [stream, embeddings].
        """
        adapters = None
        if self.adapts_attention:
            adapters = (self.q_adapter, self.k_adapter, self.v_adapter)
        y = call.total(call.run(block.self_attn, normed, cache_index, adapters))
        _, normed = call.add_norm(y, None, block.post_attention_layernorm)
        y = call.total(call.run(block.mlp, normed, None, self.mlp_adapter))
        return call.project(self.out, y)


class Layer(nn.Module):
    """One or two blocks as `HybridConfig.blocks` says.

    A block is a norm and then parts side by side, or the parts and then a norm. first_cache is the
    index of its first mixer's cache.
    """

    def __init__(self, config: HybridConfig, index: int, first_cache: int) -> None:
        super().__init__()
        self.index = index
        self.blocks = config.blocks(index)
        self.reads_embeddings = config.eagle_inputs and index == 0
        self.begins_normed = "residual" in config.eagle_norms
        d_input = 2 * config.d_model if self.reads_embeddings else None
        self.cache_indices: dict[str, int] = {}
        for block, norm_name in zip(self.blocks, NORM_NAMES, strict=False):
            self.add_module(norm_name, RMSNorm(config.d_model, config.rms_norm_eps))
            if block.shared is not None:
                self.shared_use = SharedUse(config)
                self.cache_indices["shared"] = first_cache + len(self.cache_indices)
            for kind in block.parts:
                self.add_module(PART_NAMES.get(kind, kind), make_part(kind, config, d_input))
                if kind in MIXERS:
                    self.cache_indices[kind] = first_cache + len(self.cache_indices)
        self._parts = {block: self._parts_of(block) for block in self.blocks}

    def _module_of(self, kind: str) -> Any:
        return getattr(self, PART_NAMES.get(kind, kind))

    def parts(self, block: Block) -> list[tuple[Any, int | None]]:
        """Return the parts of a block with the indices of their caches."""
        return self._parts[block]

    def _parts_of(self, block: Block) -> list[tuple[Any, int | None]]:
        """Return parts with the indices of their caches; mixers alone are one part (`SideBySide`).

        That one knows its mixers' indices.
        """
        parts = [(self._module_of(kind), self.cache_indices.get(kind)) for kind in block.parts]
        mixers = [(part, cache_index) for part, cache_index in parts if cache_index is not None]
        if len(mixers) < 2 or len(mixers) < len(parts):
            return parts
        return [(SideBySide(mixers), None)]

    def pack(self) -> None:
        """Pack the weights of all parts (`Part.pack`)."""
        for block in self.blocks:
            for part, _ in self.parts(block):
                part.pack()

    def mixers(self) -> list[tuple[int, Any]]:
        """Return the layer's own mixers, each with the index of its cache."""
        return [
            (cache_index, self._module_of(kind))
            for kind, cache_index in self.cache_indices.items() if kind != "shared"
        ]

    def run(self, x: Tensor | Stream | None, y: Any, call: Any) -> tuple[Any, Any]:
        """Run the layer on the residual stream x, to which y is still to be added.

        Returns such a pair after the layer.
        """
        for block, norm_name in zip(self.blocks, NORM_NAMES, strict=False):
            norm = getattr(self, norm_name)
            before = None if block.normed_after else norm
            if block.shared is None:
                x, normed = call.add_norm(x, y, before)
            else:
                shared: Any = call.shared[block.shared]
                assert call.embedded is not None
                x, both = call.add_norm(x, y, shared.input_layernorm, call.embedded)
                y = self.shared_use.run(shared, both, self.cache_indices["shared"], call)
                _, normed = call.add_norm(x, y, before)
            if self.reads_embeddings and norm_name == NORM_NAMES[0]:
                x, normed = call.beside_embeddings(x, normed, self.begins_normed)
            y = call.together([call.run(part, normed, index) for part, index in self.parts(block)])
            if block.normed_after:
                y = call.norm_after(y, norm)
            if norm_name == NORM_NAMES[0]:
                call.enter(self.index, x)
        assert x is not None and y is not None
        return x, y

    def forward(self, x: Tensor, context: TrainingPass) -> Tensor:
        return context.add(*self.run(x, None, context))
