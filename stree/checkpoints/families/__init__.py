"""Families of hybrid models that transformers runs, a file each: their config and names to ours."""

from stree.checkpoints.families import (
    bamba,
    falcon_h1,
    gpt_neox,
    granite_moe_hybrid,
    jamba,
    lfm2,
    lfm2_moe,
    nemotron_h,
    olmo_hybrid,
    qwen3_5,
    qwen3_next,
    zamba2,
)

FAMILIES = tuple(
    family.LAYOUT
    for family in (
        bamba, granite_moe_hybrid, nemotron_h, falcon_h1, lfm2, lfm2_moe, zamba2, qwen3_next,
        qwen3_5, olmo_hybrid, gpt_neox, jamba,
    )
)
