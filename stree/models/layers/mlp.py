"""The parts of a layer without a memory: MLPs, and experts behind a router.

Shapes: R rows (tokens of all sequences), E experts, K of them chosen, I an MLP's width.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stree.models.config import UNGATED, HybridConfig
from stree.models.layers.packed_linear import KeepsScaled, Weight
from stree.models.layers.part import Part, Pass, product_dtype
from stree_kernels import naive, ops
from stree_kernels.contracts import Router, Scaled, Stream


class MLP(Part):
    """MLP down(silu(gate)·up), or of another `HybridConfig.mlp_kind`.

    With `gated`, the output is multiplied by a sigmoid of the input, one number a token.
    """

    def __init__(self, config: HybridConfig, width: int, *, gated: bool = False) -> None:
        super().__init__()
        self.kind = config.mlp_kind
        bias = config.mlp_bias
        if self.kind not in UNGATED:
            self.gate_proj = nn.Linear(config.d_model, width, bias=bias)
        self.up_proj = nn.Linear(config.d_model, width, bias=bias)
        self.down_proj = nn.Linear(width, config.d_model, bias=bias)
        self.gated = gated
        if gated:
            self.gate = nn.Linear(config.d_model, 1, bias=False)

    def _read(self) -> tuple[nn.Linear, ...]:
        return (self.up_proj,) if self.kind in UNGATED else (self.gate_proj, self.up_proj)

    def products(self) -> list[tuple[nn.Linear, ...]]:
        return [self._read(), (self.down_proj,)]

    def forward(self, x: Tensor, context: Pass, adapter: nn.Module | None = None) -> Tensor:
        if self.kind == "swiglu" and adapter is None:
            return self._finish(self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)), x)
        y = torch.cat([projection(x) for projection in self._read()], dim=-1)
        y = self.down_proj(naive.activated(y if adapter is None else y + adapter(x), self.kind))
        return self._finish(y, x)

    def tree(self, x: Stream, cache: None, call: Pass, adapter: Any = None) -> Tensor:
        read, down = self.packed
        weight = read.weights[0] if len(read.weights) == 1 and not read.biases else None
        if self.kind not in UNGATED and adapter is not None and isinstance(weight, Tensor):
            normed, up = ops.norm(x), adapter.up.weight
            low = ops.linear(normed, adapter.down.weight)
            y = ops.linear_adapted(normed, weight, low, up, self.kind)
        elif self.kind == "swiglu" and adapter is None:
            y = read.swiglu(x)
        else:
            y = read.linear(x)
            y = ops.activated(y if adapter is None else y + adapter(ops.norm(x)), self.kind)
        y = down.parts(y)
        return self._finish(y, ops.norm(x)) if self.gated else y

    def _finish(self, y: Tensor, x: Tensor) -> Tensor:
        """Multiply y (…, D), or parts of it (S, …, D), by the gate of x (…, D), if there is one."""
        return y * self.gate(x).sigmoid().to(y.dtype) if self.gated else y


class Experts(KeepsScaled, Part):
    """Mixture of MLPs: a router (`Router`) chooses a few for each token, and weighs their outputs.

    No step waits for the device, so that calls can be captured.

    Attributes:
        up: (E, I, D), or (E, 2·I, D) with a gate above it.
        down: (E, D, I).
        up_scale: (E, I or 2·I, G) fp32, the scales of `up` in fp8 e4m3 (`Scaled`), else None.
        down_scale: (E, D, G) fp32, those of `down`, else None.
    """

    WEIGHTS: ClassVar = ("up", "down")

    correction_bias: Tensor  # (E,), of a sigmoid router

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        d_model, experts = config.d_model, config.num_experts
        inner, outer = config.expert_intermediate_size, config.expert_latent_size or d_model
        self.router = nn.Linear(d_model, experts, bias=False)
        self.routing = Router(
            config.experts_per_token, config.router == "softmax", config.router_normalised,
            config.router_scale, config.router_groups, config.router_top_groups,
            config.router_floor,
        )
        if config.router == "sigmoid":
            self.register_buffer("correction_bias", torch.zeros(experts))
        self.up = nn.Parameter(
            torch.empty(experts, inner * (1 if config.mlp_kind in UNGATED else 2), outer)
        )
        self.down = nn.Parameter(torch.empty(experts, outer, inner))
        self.register_parameter("up_scale", None)
        self.register_parameter("down_scale", None)
        if config.expert_latent_size:
            self.latent_in = nn.Linear(d_model, outer, bias=config.mlp_bias)
            self.latent_out = nn.Linear(outer, d_model, bias=config.mlp_bias)

    def products(self) -> list[tuple[nn.Linear, ...]]:
        latent = [(self.latent_in,), (self.latent_out,)] if self.config.expert_latent_size else []
        return [(self.router,), *latent]

    def in_8_bits(self) -> list[nn.Linear]:
        return [each for (each,) in self.products()[1:]]  # without the router

    def stack(self, name: str) -> Weight:
        """Return "up" or "down" as products take it."""
        values, scale = getattr(self, name), getattr(self, f"{name}_scale")
        return values if scale is None else Scaled(values, scale)

    def hold(self, name: str, weight: Scaled) -> None:
        """Hold "up" or "down" in 8 bits from now on."""
        setattr(self, name, nn.Parameter(weight.values, requires_grad=False))
        setattr(self, f"{name}_scale", nn.Parameter(weight.scale, requires_grad=False))

    def forward(self, x: Tensor, context: Pass) -> Tensor:
        in_8_bits = self.up_scale is not None or self.down_scale is not None
        module = ops if in_8_bits and not torch.is_grad_enabled() else naive
        return self._parts(x, module).sum(0).to(product_dtype(x))

    def tree(self, x: Stream, cache: None, call: Pass) -> Tensor:
        return self._parts(ops.norm(x), ops)

    def _parts(self, x: Tensor, module: Any) -> Tensor:
        """Return the output as parts of a sum (S, …, D), computed by the ops of a module."""
        rows = x.flatten(0, -2)
        logits = module.linear_wide(rows, self.router.weight)
        correction = None if self.routing.softmax else self.correction_bias
        weights, chosen = module.choose_experts(logits, correction, self.routing)
        latent = self.config.expert_latent_size
        if latent:
            rows = self.latent_in(rows)
        up, down = map(self.stack, self.WEIGHTS)
        y = module.experts(rows, weights, chosen, up, down, self.config.mlp_kind)
        if latent:
            y = self.latent_out(y.sum(0).to(rows.dtype))[None]
        return y.unflatten(1, x.shape[:-1])
