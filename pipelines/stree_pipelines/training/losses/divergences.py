"""Measure how far a student's next-token distribution q is from its teacher's p.

Legend: C rows of a chunk, V vocabulary. p and q are the softmaxes of the logits divided by the
temperature τ.

A student whose head has only some tokens S has q = 0 outside. The divergences are still those of
the two distributions over V: sums over S, plus a term for the teacher's mass outside (½ Σ p for
total variation, β Σ p log(1/β) for JSD, nothing for reverse KL). Only forward KL would be
infinite: its sum over S is taken, Σ_S p (log p − log q) = m KL(p/m ‖ q) + m log m with m = Σ_S p.
It weighs a row by its teacher's mass on the head, and may be below 0.

Each divergence gives a value a row, and its gradient with respect to the student's divided logits
z. For a value Σ_v φ(p_v, q_v) that gradient is q_v (g_v − Σ_u q_u g_u) with g = ∂φ/∂q. Values that
are quadratic in small differences of logits carry a factor τ², linear ones τ, so the size of a
gradient does not depend on the temperature (Hinton et al. 2015, section 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from stree.common.errors import require_fitting, require_owned


@dataclass(frozen=True)
class Chunk:
    """log p, log q, p and q, each (C, V) fp32, and the acceptance `accepted` (C,).

    `accepted` is Σ_v min(p_v, q_v). All but log_q may be overwritten: a large vocabulary leaves no
    memory for copies. For a head over some tokens S the columns are S, and `inside` (C,) is Σ_S p;
    else it is None.
    """

    log_p: Tensor
    log_q: Tensor
    p: Tensor
    q: Tensor
    accepted: Tensor
    temperature: float
    inside: Tensor | None = None

    @property
    def outside(self) -> Tensor | float:
        """Σ p (C,) over the tokens outside the student's head."""
        return 0.0 if self.inside is None else 1 - self.inside


@dataclass(frozen=True)
class RowTerms:
    """A value per row (C,), and its gradient (C, V); None without a gradient."""

    value: Tensor
    gradient: Tensor | None


class Divergence(Protocol):
    """Protocol of divergences: how far each row's q is from its p."""

    def __call__(self, chunk: Chunk, with_grad: bool) -> RowTerms:
        """Return the value of each row, and its gradient if `with_grad`.

        The gradient is with respect to the student's divided logits. Both carry the divergence's
        power of the temperature. All of `chunk` but log_q may be overwritten.
        """
        ...


@dataclass(frozen=True)
class ForwardKL:
    """τ² Σ p (log p − log q)."""

    def __call__(self, chunk: Chunk, with_grad: bool) -> RowTerms:
        value = _forward_kl(chunk).mul_(chunk.temperature**2)
        grad = None
        if with_grad:
            difference = torch.sub(chunk.q, chunk.p, out=chunk.p)
            grad = _slopes_of_kl(difference, chunk).mul_(chunk.temperature**2)
        return RowTerms(value, grad)


@dataclass(frozen=True)
class ReverseKL:
    """τ² Σ q (log q − log p): infinite where the student goes and the teacher rules it out."""

    def __call__(self, chunk: Chunk, with_grad: bool) -> RowTerms:
        log_ratio = _minus(chunk.log_q, chunk.log_p, chunk.q, out=chunk.log_p)
        value = torch.mul(chunk.q, log_ratio, out=chunk.p).sum(1)
        square = chunk.temperature**2
        grad = None
        if with_grad:
            grad = log_ratio.sub_(value[:, None]).mul_(chunk.q).mul_(square)
        return RowTerms(value * square, grad)


@dataclass(frozen=True)
class JensenShannon:
    """τ² [β KL(p ‖ m) + (1 − β) KL(q ‖ m)] with m = β p + (1 − β) q.

    The generalised divergence of Agarwal et al. 2024 (GKD). Divided by β it goes to the forward KL
    for β → 0, divided by 1 − β to the reverse one for β → 1.
    """

    beta: float

    def __call__(self, chunk: Chunk, with_grad: bool) -> RowTerms:
        beta, square = self.beta, chunk.temperature**2
        log_m = torch.lerp(chunk.q, chunk.p, beta).log_()
        value = beta * _minus(chunk.log_p, log_m, chunk.p, out=chunk.log_p).mul_(chunk.p).sum(1)
        log_ratio = _minus(chunk.log_q, log_m, chunk.q, out=chunk.p)
        of_student = torch.mul(chunk.q, log_ratio, out=log_m).sum(1)
        value += (1 - beta) * of_student - beta * math.log(beta) * chunk.outside
        grad = None
        if with_grad:
            grad = log_ratio.sub_(of_student[:, None]).mul_(chunk.q).mul_((1 - beta) * square)
        return RowTerms(value * square, grad)


@dataclass(frozen=True)
class TotalVariation:
    """τ ½ Σ |p − q|: τ times one minus the chance that a draft is accepted.

    (Leviathan et al. 2023, corollary 3.6.) The gradient vanishes where the two distributions do not
    overlap, so it suits drafters that are trained already.
    """

    def __call__(self, chunk: Chunk, with_grad: bool) -> RowTerms:
        difference = torch.sub(chunk.q, chunk.p, out=chunk.p)
        value = torch.abs(difference, out=chunk.log_p).sum(1) + chunk.outside
        value = value.mul_(0.5 * chunk.temperature)
        grad = None
        if with_grad:
            signs = difference.sign_().mul_(0.5 * chunk.temperature)
            grad = _through_softmax(signs, chunk.q, spare=chunk.log_p)
        return RowTerms(value, grad)


@dataclass(frozen=True)
class LK:
    """λ · forward KL + (1 − λ) · TV with λ = exp(−η α): the hybrid of Samarin et al. 2026.

    α is each row's own chance of acceptance, a constant to the gradient.
    """

    eta: float

    def __call__(self, chunk: Chunk, with_grad: bool) -> RowTerms:
        square, linear = chunk.temperature**2, chunk.temperature
        share = torch.exp(-self.eta * chunk.accepted)
        kl = _forward_kl(chunk)
        difference = torch.sub(chunk.q, chunk.p, out=chunk.p)
        distance = (torch.abs(difference, out=chunk.log_p).sum(1) + chunk.outside).mul_(0.5)
        value = share * square * kl + (1 - share) * linear * distance
        grad = None
        if with_grad:
            signs = torch.sign(difference, out=chunk.log_p).mul_(0.5)
            rest = _through_softmax(signs, chunk.q).mul_(((1 - share) * linear)[:, None])
            grad = _slopes_of_kl(difference, chunk).mul_((share * square)[:, None]).add_(rest)
        return RowTerms(value, grad)


# Options that only some kinds have
OWNERS = {"beta": ("kind", "jsd"), "eta": ("kind", "lk")}


@dataclass(frozen=True)
class LossConfig:
    """Divergence from the target.

    Args:
        kind: forward_kl, reverse_kl, jsd (generalised Jensen-Shannon), tv (total variation: one
            minus the chance of acceptance; start it from a trained drafter), or lk (from forward KL
            to tv as a token's acceptance grows).
        beta: of jsd, the target's share in the mixture, between 0 and 1 (default: 0.5).
        eta: of lk, forward KL's share is exp(-eta * acceptance) (default: 3).
    """

    kind: Literal["forward_kl", "reverse_kl", "jsd", "tv", "lk"] = "forward_kl"
    beta: float | None = None
    eta: float | None = None

    def __post_init__(self) -> None:
        require_owned(self, OWNERS, "model.loss.")
        require_fitting(self, {
            "beta": (self.beta is None or 0 < self.beta < 1, "between 0 and 1"),
            "eta": (self.eta is None or self.eta >= 0, "at least 0"),
        }, "model.loss.")

    @property
    def divergence(self) -> Divergence:
        kinds: dict[str, Divergence] = {
            "forward_kl": ForwardKL(),
            "reverse_kl": ReverseKL(),
            "jsd": JensenShannon(0.5 if self.beta is None else self.beta),
            "tv": TotalVariation(),
            "lk": LK(3.0 if self.eta is None else self.eta),
        }
        return kinds[self.kind]


def _forward_kl(chunk: Chunk) -> Tensor:
    """Compute Σ p (log p − log q), (C,); overwrites log_p."""
    return _minus(chunk.log_p, chunk.log_q, chunk.p, out=chunk.log_p).mul_(chunk.p).sum(1)


def _slopes_of_kl(difference: Tensor, chunk: Chunk) -> Tensor:
    """Compute ∂ forward KL / ∂z = q Σ_S p − p, in place of the difference q − p."""
    if chunk.inside is not None:
        difference.addcmul_(chunk.q, chunk.inside[:, None] - 1)
    return difference


def _minus(minuend: Tensor, subtrahend: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """Subtract two logarithms, with 0 where `weight` is 0 (−inf − −inf would be NaN)."""
    return torch.sub(minuend, subtrahend, out=out).masked_fill_(weight == 0, 0.0)


def _through_softmax(slopes: Tensor, q: Tensor, spare: Tensor | None = None) -> Tensor:
    """Turn ∂φ/∂q into ∂φ/∂z, in place; `spare` is a buffer of this shape to overwrite."""
    mean = torch.mul(q, slopes, out=spare).sum(1, keepdim=True)
    return slopes.sub_(mean).mul_(q)
