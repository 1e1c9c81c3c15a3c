"""Block verification of chains (Sun et al. 2024): drafts are judged together, from the last one up.

It accepts more than token-level sampling, whose first rejection ends the block. Traversal
verification generalises it to trees, and equals it on a chain.
"""

from __future__ import annotations

from stree.verifiers.traversal import Traversal


class Block(Traversal):
    """Traversal verification of chains."""

    chains_only = True
