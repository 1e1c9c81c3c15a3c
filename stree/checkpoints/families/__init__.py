"""Families of hybrid models that transformers runs, a file each: their config and names to ours."""

from stree.checkpoints.families import (
    bamba,
    falcon_h1,
    granite_moe_hybrid,
    lfm2,
    lfm2_moe,
    nemotron_h,
    olmo_hybrid,
    qwen3_5,
    qwen3_next,
    zamba2,
)

FAMILIES = (
    bamba.LAYOUT,
    granite_moe_hybrid.LAYOUT,
    nemotron_h.LAYOUT,
    falcon_h1.LAYOUT,
    lfm2.LAYOUT,
    lfm2_moe.LAYOUT,
    zamba2.LAYOUT,
    qwen3_next.LAYOUT,
    qwen3_5.LAYOUT,
    olmo_hybrid.LAYOUT,
)
