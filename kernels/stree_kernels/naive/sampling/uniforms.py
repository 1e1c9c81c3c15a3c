"""Random numbers that depend on seed, position and use alone, in plain PyTorch.

The functions are the twins of `sampling/uniforms.py`, and of the noise that `sampling/top.py` adds.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 2**32 - 1
_PHILOX = (0xD2511F53, 0xCD9E8D57)  # factors of words 0 and 2 of a counter
_PHILOX_KEYS = (0x9E3779B9, 0xBB67AE85)  # increments of a key's words


def uniforms(seeds: Tensor, positions: Tensor, places: Tensor) -> Tensor:
    """Return random numbers in [0, 1), (B, P) fp64, by seed, position and place alone.

    Philox4x32-10 (Salmon et al. 2011) has the seed as key and (place, position, 0) as counter; the
    first two of its four words give 53 bits.

    Args:
        seeds: (B,) int64, not negative.
        positions: (B,) int64, not negative.
        places: (B, P) int64 below 2³².
    """
    words = _philox(seeds[:, None], places, positions[:, None] + torch.zeros_like(places), 0)
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)).double() * 2.0**-53


def token_noise(
    seeds: Tensor, positions: Tensor, num_tokens: int, ids: Tensor | None = None
) -> Tensor:
    """Return Gumbel noise (B, n, V) fp64 of each token, by seed, position and token alone.

    It is −log(−log u) of uniform numbers u of 52 bits, never 0 or 1; a Philox counter (half the
    token, position, 1) gives two of them.

    Args:
        seeds: (B,) int64, not negative.
        positions: (B, n) int64, not negative.
        num_tokens: V, for the first tokens.
        ids: (V,), the tokens; None is the first `num_tokens`.
    """
    if ids is None:
        pairs = torch.arange(-(-num_tokens // 2), device=seeds.device)
    else:
        pairs = ids >> 1
    positions = positions[..., None]
    words = _philox(seeds[:, None, None], pairs.expand(*positions.shape[:2], -1), positions, 1)
    bits = [(words[at] >> 6) * 2**26 + (words[at + 1] >> 6) for at in (0, 2)]
    if ids is None:
        chosen = torch.stack(bits, dim=-1).flatten(-2)[..., :num_tokens]
    else:
        chosen = torch.where(ids % 2 == 1, bits[1], bits[0])
    uniform = (chosen.double() + 0.5) * 2.0**-52
    return -(-uniform.log()).log()


def _philox(seeds: Tensor, places: Tensor, positions: Tensor, stream: int) -> list[Tensor]:
    """Return the four words at counter (place, position, stream), with the seed as key."""
    places, low, high = torch.broadcast_tensors(places, positions & _WORD, positions >> 32)
    # Constants are made where they are needed: nothing waits for the device.
    numbers = torch.arange(10, device=places.device).view(-1, *[1] * places.dim())
    first, second = _PHILOX_KEYS
    keys = torch.stack([(seeds & _WORD) + numbers * first, (seeds >> 32) + numbers * second], 1)
    factors = _PHILOX[0] + numbers[:2] * (_PHILOX[1] - _PHILOX[0])
    # Words 0 and 2 go through a round together, and so do 1 and 3: half the launches
    even, odd = torch.stack([places, high]), torch.stack([low, torch.full_like(low, stream)])
    for key in (keys & _WORD).unbind():
        # An int64 product wraps around, but keeps all 64 bits of the two words it consists of
        product = (even * factors).flip(0)
        even = (product >> 32).bitwise_and_(_WORD).bitwise_xor_(odd).bitwise_xor_(key)
        odd = product.bitwise_and_(_WORD)
    return [even[0], odd[0], even[1], odd[1]]
