"""The parts of a layer without a memory: MLPs, and experts behind a router.

Shapes: R rows (tokens of all sequences), E experts, K of them chosen, I an MLP's width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stree.models.config import HybridConfig
from stree.models.parts import Part, Pass, joined_of, project, project_parts, project_together
from stree_kernels import naive, ops

ALL_ROWS = 64  # whose outputs of all experts exist at once


class MLP(Part):
    """down(silu(gate)·up), or what else `HybridConfig.mlp_kind` says.

    gated, multiplied by a sigmoid of the input, one a token.
    """

    def __init__(self, config: HybridConfig, width: int, *, gated: bool = False) -> None:
        super().__init__()
        self.kind = config.mlp_kind
        bias = config.mlp_bias
        if self.kind != "relu2":
            self.gate_proj = nn.Linear(config.d_model, width, bias=bias)
        self.up_proj = nn.Linear(config.d_model, width, bias=bias)
        self.down_proj = nn.Linear(width, config.d_model, bias=bias)
        self.gated = gated
        if gated:
            self.gate = nn.Linear(config.d_model, 1, bias=False)

    def _read(self) -> tuple[nn.Linear, ...]:
        return (self.up_proj,) if self.kind == "relu2" else (self.gate_proj, self.up_proj)

    def products(self) -> list[tuple[nn.Linear, ...]]:
        return [self._read(), (self.down_proj,)]

    def forward(self, x: Tensor, context: Pass, adapter: nn.Module | None = None) -> Tensor:
        if self.kind == "swiglu" and adapter is None:
            return self._finish(self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)), x)
        y = torch.cat([projection(x) for projection in self._read()], dim=-1)
        y = self.down_proj(activated(y if adapter is None else y + adapter(x), self.kind))
        return self._finish(y, x)

    def tree(self, x: Tensor, cache: None, call: Pass, adapter: nn.Module | None = None) -> Tensor:
        if not ops.fused(x.device, x.dtype):
            return self(x, call, adapter)[None]
        if self.kind == "swiglu" and adapter is None and self.up_proj.bias is None:
            y = ops.linear_swiglu(x, joined_of(self._read()).weight)
            return self._finish(project_parts(y, self.down_proj), x)
        read = self._read()
        y = project(x, read[0]) if len(read) == 1 else project_together(x, read)
        if adapter is not None:
            y = y + adapter(x)
        y = ops.swiglu(y) if self.kind == "swiglu" else activated(y, self.kind)
        return self._finish(project_parts(y, self.down_proj), x)

    def _finish(self, y: Tensor, x: Tensor) -> Tensor:
        """y (…, D), or parts of it (S, …, D), as the gate of x (…, D) lets it through."""
        return y * self.gate(x).sigmoid().to(y.dtype) if self.gated else y


def activated(y: Tensor, kind: str) -> Tensor:
    """An MLP's inner values (…, I): of gate and up side by side, (…, 2·I), or of up alone."""
    if kind == "relu2":
        return F.relu(y).square()
    if kind == "swiglu":
        return naive.swiglu(y)
    gate, up = y.chunk(2, dim=-1)
    return F.gelu(gate) * up


class Experts(Part):
    """MLPs of which a router chooses a few a token, and weighs what they give.

    Router softmax: the best logits, softmax over those, or over all if not normalised. Sigmoid
    (DeepSeek-V3): the best scores, corrected for the choice alone, within the best groups of
    experts; normalised if asked, scaled.
    No step waits for the device, so that calls can be captured.
    """

    correction_bias: Tensor  # (E,), of a sigmoid router

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        d_model, experts = config.d_model, config.num_experts
        inner, outer = config.expert_intermediate_size, config.expert_latent_size or d_model
        self.router = nn.Linear(d_model, experts, bias=False)
        if config.router == "sigmoid":
            self.register_buffer("correction_bias", torch.zeros(experts))
        self.up = nn.Parameter(
            torch.empty(experts, inner * (1 if config.mlp_kind == "relu2" else 2), outer)
        )
        self.down = nn.Parameter(torch.empty(experts, outer, inner))
        if config.expert_latent_size:
            self.latent_in = nn.Linear(d_model, outer, bias=config.mlp_bias)
            self.latent_out = nn.Linear(outer, d_model, bias=config.mlp_bias)

    def products(self) -> list[tuple[nn.Linear, ...]]:
        latent = [(self.latent_in,), (self.latent_out,)] if self.config.expert_latent_size else []
        return [(self.router,), *latent]

    def forward(self, x: Tensor, context: Pass) -> Tensor:
        rows = x.flatten(0, -2)
        weights, chosen = self._route(rows)
        weights = weights.to(x.dtype)
        if self.config.expert_latent_size:
            rows = self.latent_in(rows)
        if chosen.numel() <= self.config.num_experts:
            y = self._by_the_chosen(rows, weights, chosen)
        else:
            pieces = (each.split(ALL_ROWS) for each in (rows, weights, chosen))
            y = torch.cat([self._by_all(*piece) for piece in zip(*pieces, strict=True)])
        if self.config.expert_latent_size:
            y = self.latent_out(y)
        return y.unflatten(0, x.shape[:-1])

    def tree(self, x: Tensor, cache: None, call: Pass) -> Tensor:
        return self(x, call)[None]

    def _route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and indices of the chosen experts, (R, K) each, in fp32 or wider."""
        config = self.config
        dtype = naive.accumulation_dtype(rows.dtype)
        logits = F.linear(rows.to(dtype), self.router.weight.to(dtype))
        if config.router == "softmax":
            best, chosen = logits.topk(config.experts_per_token, dim=-1)
            others = best if config.router_normalised else logits
            shares = (best - others.logsumexp(-1, keepdim=True)).exp()
            return shares * config.router_scale, chosen
        scores = logits.sigmoid()
        corrected = scores + self.correction_bias
        if config.router_top_groups < config.router_groups:
            grouped = corrected.unflatten(-1, (config.router_groups, -1))
            best_two = grouped.topk(2, dim=-1).values.sum(-1)
            best_groups = best_two.topk(config.router_top_groups, dim=-1).indices
            allowed = torch.zeros_like(best_two, dtype=torch.bool).scatter(1, best_groups, True)
            corrected = grouped.masked_fill(~allowed[..., None], -torch.inf).flatten(-2)
        chosen = corrected.topk(config.experts_per_token, dim=-1).indices
        weights = scores.gather(1, chosen)
        if config.router_normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * config.router_scale, chosen

    def _by_the_chosen(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """For few rows: only the chosen experts' weights are read, each for itself."""
        inner = torch.einsum("rd,rkid->rki", rows, self.up[chosen])
        inner = activated(inner, self.config.mlp_kind) * weights[..., None]
        return torch.einsum("rki,rkdi->rd", inner, self.down[chosen])

    def _by_all(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Every expert's products for every row: its weights are read once."""
        shape = len(rows), self.config.num_experts
        scale = weights.new_zeros(shape).scatter(1, chosen, weights).t()[..., None]
        unchosen = torch.ones(shape, dtype=torch.bool, device=rows.device).scatter(1, chosen, False)
        inner = activated(torch.matmul(rows, self.up.transpose(1, 2)), self.config.mlp_kind)
        # Filled, not multiplied: what nobody asked for may be anything
        inner = (inner * scale).masked_fill(unchosen.t()[..., None], 0)
        return torch.bmm(inner, self.down.transpose(1, 2)).sum(0)
