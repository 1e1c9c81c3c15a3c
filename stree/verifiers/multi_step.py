"""Multi-step speculative sampling of trees: siblings are accepted or rejected one after the other.

For independent siblings it is SpecInfer's Algorithm 2, for siblings without replacement that of
Jeon et al. 2024. On a chain it is token-level speculative sampling, which accepts as often as any
rule that judges a draft before it looks at the next; on trees `coupled` accepts more.
"""

from __future__ import annotations

from stree.verifiers.rejection import RejectionSampling


class MultiStep(RejectionSampling):
    """Verifier that judges siblings in turn, by the distribution that rejected ones have left."""

    rule = "multi_step"
