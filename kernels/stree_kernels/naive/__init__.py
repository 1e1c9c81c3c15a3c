"""Every op in plain PyTorch: the CPU path, and the oracle that kernels are tested against.

Callers import all ops from here (`naive.tree_scan`). kernels/ops.md lists the twin of each file.
"""

from stree_kernels.naive.attention import attend_tree, move_accepted, rotate, tree_attention
from stree_kernels.naive.conv import segment_conv, short_conv_replay, short_conv_tree, tree_conv
from stree_kernels.naive.dtypes import accumulation_dtype
from stree_kernels.naive.gated_delta import (
    gated_delta_replay,
    gated_delta_scan,
    gated_delta_tree,
    log_decays,
    split_heads,
    strengths,
)
from stree_kernels.naive.gather import embed_norm, norm, norm_at, take_roots
from stree_kernels.naive.mamba import (
    chunk_scan,
    conv_channels,
    mamba_replay,
    mamba_tree,
    positive_dt,
    replay,
    split_channels,
    tree_scan,
)
from stree_kernels.naive.mamba1 import (
    mamba1_advance,
    mamba1_dt,
    mamba1_replay,
    mamba1_scan,
    root_mean_square,
    selective_scan,
)
from stree_kernels.naive.mixture import choose_experts, experts
from stree_kernels.naive.pointwise import (
    activated,
    add_rms_norm,
    advance,
    gate_normed,
    gated,
    gated_rms_norm,
    norm_heads,
    rms_norm,
    sigmoid_gated,
)
from stree_kernels.naive.products import (
    dequantised,
    fits_rounded,
    in_8_bits,
    laid,
    linear,
    linear_adapted,
    linear_parts,
    linear_rounded,
    linear_swiglu,
    linear_wide,
)
from stree_kernels.naive.sampling.accept import accept_choices
from stree_kernels.naive.sampling.dynamic_trees import (
    build_topology,
    pick_level,
    pick_tree,
)
from stree_kernels.naive.sampling.ngrams import TreesToFill, draft_ngrams
from stree_kernels.naive.sampling.top import (
    choice_scores,
    choose_best,
    choose_children,
    draw_children,
    rate_slots,
)
from stree_kernels.naive.sampling.uniforms import token_noise, uniforms
from stree_kernels.naive.sampling.verification import Choose, accept_drafts, distribution
