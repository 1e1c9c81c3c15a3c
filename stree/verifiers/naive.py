"""The target's own samples, followed down the tree as long as they are among the drafts."""

from __future__ import annotations

from stree.verifiers.rejection import RejectionSampling


class Naive(RejectionSampling):
    """Samples the target and goes on where a draft is that token: the simplest exact rule, and the
    bound from below. What was drafted how does not matter to it."""

    rule = "naive"
    reads_logits = False
    any_dynamic_tree = True
