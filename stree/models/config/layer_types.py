"""Descriptions of layers: the blocks of a layer, and the parts of a block."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from stree.common.errors import UsageError

# Parts with a memory of earlier tokens; "mamba" is Mamba-2. All but attention have a convolution
MIXERS = ("attention", "mamba", "short_conv", "gated_delta", "mamba1")
PARTS = (*MIXERS, "mlp", "experts", "shared_mlp")
MAX_BLOCKS = 2  # of a layer
_BLOCK = re.compile(r"(?:shared(\d{1,3})>)?([a-z_]+1?(?:\+[a-z_]+1?)*)(>norm)?")


@dataclass(frozen=True)
class Block:
    """Parts side by side after one norm; the sum of their outputs is added to the residual stream.

    With `shared`, the shared transformer block of that number runs first: its output is added to
    the norm's input, not to the stream. With `normed_after`, the parts read the stream itself, and
    the norm is of their summed outputs.
    """

    parts: tuple[str, ...]
    shared: int | None = None
    normed_after: bool = False


@functools.lru_cache(maxsize=256)
def blocks_of(layer_type: str) -> tuple[Block, ...]:
    """Return the blocks that one of `layer_types` describes."""
    blocks = []
    words = layer_type.split() if isinstance(layer_type, str) else []
    for word in words:
        match = _BLOCK.fullmatch(word)
        parts = tuple(match[2].split("+")) if match else ()
        if match is None or not set(parts) <= set(PARTS):
            raise UsageError(
                f"layer_types has {layer_type!r:.99}: a block is one or several of "
                f"{', '.join(PARTS)}, joined by '+'"
            )
        shared = None if match[1] is None else int(match[1])
        blocks.append(Block(parts, shared, match[3] is not None))
    if not 1 <= len(blocks) <= MAX_BLOCKS:
        raise UsageError(
            f"layer_types has {layer_type!r:.99}: a layer has 1 to {MAX_BLOCKS} blocks"
        )
    return tuple(blocks)
