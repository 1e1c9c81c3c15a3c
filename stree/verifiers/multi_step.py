"""Multi-step speculative sampling (SpecInfer, Algorithm 2, whose siblings are independent; without
replacement: Jeon et al. 2024).

On a chain it is token-level speculative sampling, which accepts as often as any rule can that
judges a draft before it looks at the next; on trees with siblings `coupled` accepts more.
"""

from __future__ import annotations

from stree.verifiers.rejection import RejectionSampling


class MultiStep(RejectionSampling):
    """Accepts siblings in turn, each against what the rejected ones have left of the target's
    distribution."""

    rule = "multi_step"
