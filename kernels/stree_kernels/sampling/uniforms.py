"""Random numbers that depend on their use, not on earlier draws (Triton).

Philox4x32-10 (Salmon et al. 2011) is a function of a request's seed, the position of a token in its
sequence, and the place of use: a request's tokens do not depend on the rest of the batch. The naive
twins are `naive.uniforms` and, for the noise that `top.py` adds to scores, `naive.token_noise`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def uniform(seed, position, place):
    """Draw in [0, 1), with 53 bits; seed and position are numbers, place is a block."""
    c0 = place.to(tl.uint32)
    c1 = c0 * 0 + (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = c0 * 0 + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    high, low, _, _ = tl.philox(seed, c0, c1, c2, c0 * 0)
    high, low = (high >> 5).to(tl.float64), (low >> 6).to(tl.float64)
    return (high * 67108864.0 + low) * 1.1102230246251565e-16  # 2²⁶ and 2⁻⁵³


@triton.jit
def token_noise(seed, position, token):
    """Draw Gumbel noise for a block of tokens; seed and position are numbers, or such blocks."""
    c0 = (token >> 1).to(tl.uint32)
    c1 = c0 * 0 + (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = c0 * 0 + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    first, second, third, fourth = tl.philox(seed, c0, c1, c2, c0 * 0 + 1)
    odd = (token & 1) != 0
    high, low = tl.where(odd, third, first), tl.where(odd, fourth, second)
    high, low = (high >> 6).to(tl.float64), (low >> 6).to(tl.float64)
    uniform = (high * 67108864.0 + low + 0.5) * 2.220446049250313e-16  # 2²⁶ and 2⁻⁵²
    return -tl.log(-tl.log(uniform))
