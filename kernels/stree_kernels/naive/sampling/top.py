"""Choice of the tokens after a node in plain PyTorch: twins of `top.py` and `products/head.py`.

Shapes: B batch, N tree nodes, n of them, V vocabulary, k children of a node.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stree_kernels.contracts import Sampling, Scaled, Slots, Stream
from stree_kernels.index_plan import columns_of
from stree_kernels.naive.dtypes import accumulation_dtype
from stree_kernels.naive.products import linear
from stree_kernels.naive.sampling.uniforms import token_noise


def choice_scores(
    logits: Tensor, depths: Tensor, sampling: Sampling | None, ids: Tensor | None = None
) -> Tensor:
    """Return the scores that rank tokens: logits, with noise added for rows that sample.

    The best token of logits / temperature + Gumbel noise is a sample, the best k are k samples
    without replacement (Gumbel 1954; Kool et al. 2019). The noise belongs to the token's position
    in its sequence, so drafter and target get the same noise there.

    Args:
        logits: (B, n, V) of nodes at depths (B, n); or (B, n, K) of the tokens ids (K,) alone,
            whose noise is the same as among all tokens.

    Returns as many scores, fp64 with sampling.
    """
    if sampling is None:
        return logits.to(accumulation_dtype(logits.dtype))
    temperature = sampling.temperature[:, None, None]
    sampled = temperature > 0
    scores = logits.double() / torch.where(sampled, temperature, 1.0)
    levels = depths
    if depths.device.type == "cpu" and depths.numel() > 1:  # nodes of a level share their noise
        levels, at = depths.unique(return_inverse=True)
    noise = token_noise(
        sampling.seed, sampling.position[:, None] + 1 + levels.view(-1, levels.shape[-1]),
        logits.shape[-1], ids,
    )
    if levels is not depths:
        noise = noise.gather(1, at.expand(len(logits), -1)[..., None].expand_as(logits))
    return scores + torch.where(sampled, noise, 0.0)


def choose_best(logits: Tensor, depths: Tensor, sampling: Sampling | None) -> tuple[Tensor, Tensor]:
    """Return the token that is chosen after each node, (B, n), and its score, (B, n).

    The score is not finite when any logit of the row is NaN or +∞. Args as in `choice_scores`.
    """
    highest, best = choice_scores(logits, depths, sampling).max(-1)
    return best, highest


def choose_children(
    logits: Tensor, depths: Tensor, sampling: Sampling | None, places: Tensor, tokens: Tensor,
    finite: Tensor, nodes: Tensor | None = None, values: Tensor | None = None,
    ids: Tensor | None = None, slots: Slots | None = None,
) -> None:
    """Write the best tokens after some nodes to their children, without waiting for the device.

    The value of a child is its parent's plus the logarithm of its share in the softmax of
    logits + temperature · noise. The target chooses the best of these by its own logits, so that a
    share means the same at all temperatures.

    Args:
        logits: (B, n, V), as in `choice_scores`, like depths, sampling and ids.
        places: (B, n, k), the child that takes each of the best tokens, −1 for none.
        tokens: (B, N), written at `places`.
        finite: (B, n) bool, written: no logit is NaN or +∞.
        nodes: (B, n), nodes that the logits are of; None without values.
        values: (B, N) fp32, written at `places`: the log-probability of each child's path; None
            for no values.
        ids: (V,) ascending, the tokens that the logits are of; None for all.
        slots: Written at `places`; values are then those of `rate_slots`, without noise.
    """
    every = choice_scores(logits, depths, sampling, ids)
    scores, best = every.topk(places.shape[2], dim=-1)
    chosen = best if ids is None else ids[best]
    padded = F.pad(tokens, (0, 1))  # the last takes what no node does
    places = torch.where(places < 0, tokens.shape[1], places)
    padded.scatter_(1, places.flatten(1), chosen.flatten(1))
    tokens.copy_(padded[:, :-1])
    finite.copy_(scores[..., 0].isfinite())
    if slots is not None:
        assert nodes is not None and values is not None
        rate_slots(logits, tokens, nodes, places, values, slots, ids)
    elif values is not None:
        assert nodes is not None
        if sampling is not None:
            temperature = sampling.temperature[:, None, None]
            every = every * torch.where(temperature > 0, temperature, 1.0)
        shares = every.log_softmax(-1).gather(-1, best)
        paths = values.gather(1, nodes)[..., None] + shares.to(values.dtype).clamp(max=0.0)
        padded = F.pad(values, (0, 1))
        padded.scatter_(1, places.flatten(1), paths.flatten(1))
        values.copy_(padded[:, :-1])


def rate_slots(
    logits: Tensor, tokens: Tensor, nodes: Tensor, places: Tensor, paths: Tensor, slots: Slots,
    ids: Tensor | None = None,
) -> None:
    """Write the values of slots below some nodes, and of the paths to the tokens in them.

    A slot is worth the probability, by the drafter, that the path to its parent is accepted and its
    elder siblings are not (DySpec, Xiong et al. 2024, section 5.2), a path that of its drafts.
    Values are logarithms.

    Args:
        logits: (B, n, V), from which the children were drawn without replacement, in their order.
        tokens: (B, P) of the pool's nodes.
        nodes: (B, n), the nodes.
        places: (B, n, k), their children.
        paths: (B, P) fp32, read at `nodes`, written at `places`.
        slots: Their values are written at `places`.
        ids: (V,) ascending, the tokens that the logits are of; None for all.
    """
    temperature = slots.temperature[:, None, None]
    scores = logits.double() / torch.where(temperature > 0, temperature, 1.0)
    drawn = tokens.gather(1, places.flatten(1)).view_as(places)
    if ids is not None:
        drawn = columns_of(drawn, ids).clamp(max=len(ids) - 1)
    logs = scores.log_softmax(-1).gather(2, drawn)
    shares = logs.exp()
    left = (1.0 - (shares.cumsum(-1) - shares)).clamp(min=0.0, max=1.0).cummin(-1).values
    above = paths.gather(1, nodes)[..., None]
    worth = above + left.log().to(above.dtype)
    # In spite of rounding, the token in a slot must not be better than the slot
    reached = torch.minimum(above + logs.to(above.dtype), worth)
    slots.values.scatter_(1, places.flatten(1), worth.flatten(1))
    paths.scatter_(1, places.flatten(1), reached.flatten(1))


def draw_children(
    x: Tensor | Stream, weight: Tensor | Scaled, depths: Tensor, *others: Any
) -> Tensor:
    """Choose children by the logits (B, n, K) of a head (K, D), and return the logits.

    x is rows (B, n, D), or a stream before its norm. Other arguments as in `choose_children`.
    """
    logits = linear(x, weight)
    choose_children(logits, depths, *others)
    return logits
