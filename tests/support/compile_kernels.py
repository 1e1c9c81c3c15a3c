"""Compile every kernel of a tree call for a GPU that need not be there.

A model in the 8B's head shapes, on the CPU but taken for CUDA, makes one target call and one level
of a draft, as the engine does, and SwiGLU of more rows; then a gated-delta layer and what is around
attention in the shapes of Qwen3.5-27B, experts in Granite-4.0-H-Tiny's and a short convolution in
LFM2-1.2B's, Mamba-1 layers and a Transformer with a sliding window take a tree and a single token,
the gated-delta layer also 48 nodes. Last come the convolution, the norm and Mamba-1's scan of
training, both ways. Each launch is compiled with the very arguments it has there, and not run.
Prints a line a launch: kernel, warps, instructions of its PTX, bytes of shared memory, and where
--spills asks for it, of the machine code, stores of spilled registers.

python tests/support/compile_kernels.py --capability 90 --nodes 16
"""

from __future__ import annotations

import argparse
import itertools
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from stree.models.config import HybridConfig
from stree.models.model import HybridModel
from stree.trees.build import make_tree_batch
from stree.trees.dynamic import DynamicTreeBatch, SlotTreeBatch
from stree.trees.token_tree import BeamTree, SlotTree, TokenTree, balanced
from stree.trees.tree_batch import topology_of
from stree_kernels import naive, ops
from stree_kernels.attention import tree_attention
from stree_kernels.contracts import (
    CacheState,
    Derived,
    GatedDeltaWeights,
    Router,
    Sampling,
    Scaled,
    Stream,
)
from stree_kernels.conv import tree_conv
from stree_kernels.mamba import streamed_scan
from stree_kernels.naive import TreesToFill
from stree_kernels.products import scaled as scaled_products
from stree_kernels.products import tiled as tiled_products
from stree_kernels.sampling.drafts import Drafts
from stree_kernels.shapes import GatedDeltaShape

SHARED_KB = {80: 164, 90: 228, 100: 228}  # of a multiprocessor, by compute capability; others 100


class AbsentGPU:
    """Answers what Triton's launcher asks of a GPU's driver before it launches a kernel."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


def pretend(capability: int) -> list[tuple[str, Any]]:
    """Make each launch of a kernel compile it and not run it; return the list of what was compiled.

    Each launch adds (kernel's name, compiled kernel) to the list.
    """
    compiled: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, warmup: bool = False, **options: Any) -> None:
        kernel = run(self, *arguments, warmup=True, **options)
        compiled.append((self.__name__, kernel))

    JITFunction.run = compile_only
    triton.runtime.driver.set_active(AbsentGPU(capability))
    torch.Tensor.is_cuda = property(lambda self: True)
    torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)
    shared_bytes = SHARED_KB.get(capability, 100) * 1024
    properties = SimpleNamespace(
        multi_processor_count=132, shared_memory_per_multiprocessor=shared_bytes
    )
    torch.cuda.get_device_properties = lambda device=None: properties
    ops.fused = lambda *_: True
    return compiled


def grow(model: HybridModel, sampling: Sampling) -> None:
    """Launch the kernels that only growing trees use: a level's, and those that choose nodes."""
    tree_batch = DynamicTreeBatch(BeamTree.of(3, 3, 13), 1, model.device)
    level, finite = tree_batch.levels[2], torch.ones(1, 3, dtype=torch.bool)
    tree_batch.grow(2)
    tree_batch.inner_topology(model.config.d_conv)
    scale = torch.ones(model.config.d_model, dtype=model.dtype)
    for added in (None, scale.expand(1, 1, 3, -1)):
        ops.norm(Stream(model.head_weight, scale, 1e-5, added, tree_batch.pool, level.nodes, True))
    ops.norm_at(torch.zeros(1, 9, 3 * len(scale), dtype=model.dtype), level.nodes, scale, 1e-5, 3)
    logits = torch.zeros(1, 3, 1024, dtype=model.dtype)
    for by in (None, sampling):
        ops.choose_children(
            logits, level.depths, by, level.places, tree_batch.pool, finite, level.nodes,
            tree_batch.values,
        )
    tree_batch.finish(tree_batch.pool)
    slots = SlotTreeBatch(SlotTree.of(3, 3, 13), 1, model.device)
    for by, ids in itertools.product((None, sampling), (None, torch.arange(1024))):
        ops.choose_children(
            logits, level.depths, by, level.places, slots.pool, finite, level.nodes, slots.values,
            ids, slots.slots_at(torch.ones(1, dtype=torch.float64)),
        )
    slots.finish(slots.pool)
    drafts_of_a_text()


def many_sequences(model: HybridModel, num_nodes: int) -> None:
    """Launch the variants of the kernels that large batches use, over a tree and over one token.

    The thresholds from which a batch counts as large are lowered to 1 meanwhile; batches of 5 and
    13 sequences take both variants of the scan.
    """
    settings = (
        (streamed_scan, "STATE_BYTES_PAST_L2"), (tree_conv, "MIN_ROWS_WIDE_BLOCKS"),
        (tree_attention, "STAGED_FROM"),
    )
    before = [getattr(*each) for each in settings]
    for each in settings:
        setattr(*each, 1)
    for tree in (TokenTree.chain(num_nodes - 1), TokenTree.chain(0)):
        for batch in (5, 13):
            cache = model.new_cache(64, tree.num_nodes, batch)
            tokens = torch.zeros(batch, tree.num_nodes, dtype=torch.long)
            model.tree_forward(tokens, tree, cache, cache.num_slots)
    for each, value in zip(settings, before, strict=True):
        setattr(*each, value)


def gated_delta(num_nodes: int, dtype: torch.dtype) -> None:
    """Call a gated-delta layer over a star of nodes, and an attention layer's norms and gate."""
    shape = GatedDeltaShape(48, 16, 128, 128, 4)
    tree = balanced([num_nodes - 1], "star") if num_nodes > 1 else TokenTree.chain(0)

    def zeros(*dims: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(dims, dtype=dtype)

    wide, whole = torch.float32, torch.long
    projected = zeros(1, num_nodes, shape.num_projected)
    y = ops.gated_delta_tree(
        projected,
        zeros(2, 1, shape.tail + num_nodes, shape.num_kept),
        Derived(
            zeros(2, 1, num_nodes, 2 * shape.conv_dims[0]),
            zeros(2, 1, 2, num_nodes, shape.num_heads, dtype=wide),
        ),
        zeros(1, num_nodes, shape.num_heads, shape.value_dim, dtype=wide),
        zeros(1, shape.num_heads, shape.key_dim, shape.value_dim, dtype=wide),
        GatedDeltaWeights(
            zeros(shape.width, shape.num_channels).T, None,
            zeros(shape.num_heads), zeros(shape.num_heads),
        ),
        shape, topology_of(tree, shape.width, torch.device("cpu")),
        CacheState(
            zeros(1, dtype=whole), zeros(1, num_nodes, dtype=whole),
            *(zeros(1, dtype=whole) for _ in range(3)),
        ),
        0,
    )
    ops.gate_normed(y, projected[..., : shape.d_inner], zeros(shape.value_dim), 1e-6)
    qkv, scale = zeros(1, num_nodes, (24 + 2 * 4) * 256), zeros(256, dtype=wide)
    ops.gated(qkv, qkv)
    ops.sigmoid_gated(ops.norm_heads(qkv, scale, scale, 1e-6, 4), qkv)


def verification(tree: TokenTree, logits: torch.Tensor, *committed: torch.Tensor) -> None:
    """Verify one tree by every acceptance rule, its drafts drawn from logits (1, N, V)."""
    tree_batch = make_tree_batch([tree], torch.device("cpu"))
    one, active = torch.ones(1, dtype=torch.long), torch.ones(1, dtype=torch.bool)
    drafts = Drafts(
        torch.zeros(1, tree.num_nodes, dtype=torch.long), tree_batch.parents, tree_batch.children,
        tuple((level.nodes, level.places) for level in tree_batch.levels),
        logits[:, : tree_batch.num_drawn_from] if tree_batch.levels else None, tree_batch.drawn_by,
        None, None,
    )
    sampling = Sampling(torch.ones(1, dtype=torch.float64), one, one)
    for rule in ("naive", "multi_step", "traversal"):
        ops.accept_drafts(rule, logits, drafts, sampling, active, *committed)
        if rule != "naive":
            independent = replace(drafts, independent=True)
            ops.accept_drafts(rule, logits, independent, sampling, active, *committed)


def drafts_of_a_text() -> None:
    """Fill a tree from a text, its root's last child alone, too, and with a very long context."""
    tree_batch = make_tree_batch([TokenTree.paper()], torch.device("cpu"))
    trees = TreesToFill(tree_batch.parents, tree_batch.children, ())
    tokens, one = torch.zeros(1, 13, dtype=torch.long), torch.ones(1, dtype=torch.long)
    some = one.view(1, 1, 1)
    for context, *grafted in ((6, None, None), (6, some, some), (2**18, None, None)):
        slots = torch.zeros(1, 8192, dtype=torch.long)
        ops.draft_ngrams(slots, one, tokens, trees, context, 0, 1, *grafted)


def short_conv(num_nodes: int, dtype: torch.dtype) -> None:
    """Call a short convolution in the shape of LFM2-1.2B over a chain of `num_nodes`."""
    tree, channels, width = TokenTree.chain(num_nodes - 1), 2048, 3
    one = torch.zeros(1, dtype=torch.long)
    cache_state = CacheState(one, torch.zeros(1, 8, dtype=torch.long), one, one, one)
    rows = torch.zeros(2, 1, width - 1 + num_nodes, channels, dtype=dtype)
    projected = torch.zeros(1, num_nodes, 3 * channels, dtype=dtype)
    weight = torch.zeros(width, channels, dtype=dtype).t()
    topology = topology_of(tree, width, torch.device("cpu"))
    ops.short_conv_tree(projected, rows, weight, None, topology, cache_state, 0)


def mamba1(num_nodes: int, dtype: torch.dtype) -> None:
    """Call a layer in the shape of Mamba-2.8B, and with Jamba's norms, over a tree, and levels."""
    for eps in (None, 1e-6):
        model = HybridModel(HybridConfig(
            vocab_size=64, d_model=256, num_layers=1, layer_types=("mamba1",), d_state=16,
            mamba1_channels=5120, dt_rank=160, selection_norm_eps=eps,
            selection_scaled=eps is not None,
        )).to(dtype)
        tree = TokenTree.chain(num_nodes - 1)
        cache, tokens = model.new_cache(64, num_nodes), torch.zeros(1, num_nodes, dtype=torch.long)
        model.tree_forward(tokens, tree, cache)
        if num_nodes > 1:
            topology, leaves = topology_of(tree, 4, tokens.device), torch.arange(1, num_nodes)[None]
            model.tree_hidden(model.tree_call(tokens, topology, cache, 1, 64, leaves))


def trained(dtype: torch.dtype) -> None:
    """Call what a training step of the chat shape has kernels for, and its backward pass."""
    segments, weight = torch.zeros(2, 256, dtype=torch.long), torch.zeros(1536, 4)
    inputs = torch.zeros(2, 256, 1536, dtype=dtype, requires_grad=True)
    for ids, bias, silu in ((segments, weight[:, 0], True), (None, None, False)):
        ops.segment_conv(inputs, weight, bias, ids, silu).backward(inputs)
    x, gate = inputs[..., :1024].contiguous(), inputs[..., 512:]
    ops.rms_norm(x, torch.zeros(1024), 1e-5).backward(x)
    ops.rms_norm(x, torch.zeros(1024), 1e-5, 16, gate).backward(x)
    dt, B = torch.zeros(2, 256, 1536), inputs[..., :16]
    for ids in (segments, None):
        y, _ = ops.selective_scan(inputs, dt, -torch.ones(1536, 16), B, B, segment_ids=ids)
        y.backward(inputs)
    with torch.no_grad():
        ops.selective_scan(inputs, dt, -torch.ones(1536, 16), B, B)


def experts(num_rows: int, dtype: torch.dtype) -> None:
    """Call a layer of experts in the shapes of Granite-4.0-H-Tiny on `num_rows` rows."""
    count, top, width, inner = 64, 6, 1536, 512
    up, down = (
        torch.zeros(count, *shape, dtype=dtype) for shape in ((2 * inner, width), (width, inner))
    )
    rows = torch.zeros(num_rows, width, dtype=dtype)
    for softmax in (False, True):
        chosen = ops.choose_experts(
            torch.zeros(num_rows, count), torch.zeros(count), Router(top, softmax)
        )
    ops.experts(rows, *chosen, up, down, "swiglu")
    up, down = map(naive.in_8_bits, (up, down))
    in_blocks = Scaled(down.values, down.scale.repeat(1, 1, inner // 128))
    ops.experts(rows, *chosen, up, in_blocks, "swiglu")


def windowed(num_nodes: int, dtype: torch.dtype) -> None:
    """Launch the kernels of a Transformer with a sliding window, biases and MLPs without a gate."""
    config = HybridConfig(
        vocab_size=1024, d_model=256, num_layers=1, layer_types=("attention+mlp",),
        num_heads=8, num_kv_heads=2, head_dim=128, sliding_window=300, attention_bias=True,
        intermediate_size=512, mlp_kind="gelu", mlp_bias=True, final_norm_bias=True,
    )
    model = HybridModel(config).to(dtype)
    cache = model.new_cache(512, num_nodes)
    tokens = torch.zeros(1, num_nodes, dtype=torch.long)
    call = model.tree_call(tokens, topology_of(TokenTree.chain(num_nodes - 1), 4, tokens.device),
                           cache, bound=cache.num_slots)
    stream = model.tree_stream(call, ends=False)
    block, active = torch.ones(1, 1 + num_nodes, dtype=torch.long), torch.ones(1, dtype=torch.bool)
    ops.take_roots(stream, block, active, tokens, cache.cache_state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--nodes", type=int, nargs="+", default=[16])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--spills", default="$^", help="regular expression of kernels' names")
    options = parser.parse_args()
    compiled = pretend(options.capability)
    config = HybridConfig(
        vocab_size=1024, d_model=256, num_layers=2, attn_layers=(1,), intermediate_size=512,
        num_heads=32, num_kv_heads=8, head_dim=128, num_ssm_heads=32, ssm_head_dim=128,
        d_state=128, num_x_groups=8, num_b_groups=8, num_c_groups=32, gated_norm_groups=32,
    )
    with torch.no_grad():
        model = HybridModel(config).to(getattr(torch, options.dtype))
        for num_nodes in options.nodes:
            tree = balanced([num_nodes - 1], "star") if num_nodes > 1 else TokenTree.chain(0)
            cache = model.new_cache(512, num_nodes)
            tokens = torch.zeros(1, num_nodes, dtype=torch.long)
            logits = model.tree_forward(tokens, tree, cache, cache.num_slots)
            depths = torch.zeros(1, num_nodes, dtype=torch.int32)
            one, setting = torch.ones(1, dtype=torch.long), torch.ones(1, dtype=torch.float64)
            sampling = Sampling(setting, one, one)
            ops.choose_best(logits, depths, sampling)
            best, highest = ops.choose_best(logits, depths, None)
            block = torch.ones(1, 1 + num_nodes, dtype=torch.long)
            report = torch.zeros(1, 2 + 2 * num_nodes, dtype=torch.long)
            active = torch.ones(1, dtype=torch.bool)
            for finite in (active[None], None):
                ops.accept_choices(
                    best, highest, tokens, torch.tensor([tree.parents]), finite, active,
                    cache.path, cache.path_length, block, one, tokens[:, :1], report,
                )
            verification(tree, logits, cache.path, one, block, tokens[:, :1], report)
            if num_nodes == 1:
                continue
            topology = topology_of(tree, config.d_conv, tokens.device)
            inner = torch.arange(1, num_nodes)[None]
            call = model.tree_call(tokens, topology, cache, 1, cache.num_slots, inner)
            hidden = model.tree_hidden(call)
            logits, finite = model.logits(hidden), torch.ones_like(inner, dtype=torch.bool)
            for count, by in ((3, None), (3, sampling), (255, None), (255, sampling)):
                places = torch.full((*inner.shape, count), -1)
                levels, ids = depths[:, 1:].contiguous(), torch.arange(logits.shape[-1])
                for own in (None, ids) if count == 3 else (None,):
                    ops.choose_children(logits, levels, by, places, tokens, finite, None, None, own)
            grow(model, sampling)
            many_sequences(model, num_nodes)
            cache = model.new_cache(512, 1)  # an ordinary step of one sequence
            model.tree_forward(tokens[:, :1], TokenTree.chain(0), cache, cache.num_slots)
            one, scale = hidden[None], model.model.norm.weight
            ops.norm(Stream(hidden, scale.repeat(2), 1e-5, (one, one), beside=hidden))
            for added in ((one, one), one):
                stream = Stream(hidden, scale, 1e-5, added)
                ops.take_roots(stream, block, active, tokens, cache.cache_state)
            for count, by in ((3, None), (3, sampling)):
                places = torch.full((*inner.shape, count), -1)
                model.draw_children(stream, levels, by, places, tokens, finite, inner, None)
        for num_nodes in {1, *options.nodes}:
            gated_delta(num_nodes, getattr(torch, options.dtype))
            experts(num_nodes, getattr(torch, options.dtype))
            short_conv(num_nodes, getattr(torch, options.dtype))
            mamba1(num_nodes, getattr(torch, options.dtype))
            windowed(num_nodes, getattr(torch, options.dtype))
        with torch.enable_grad():
            trained(getattr(torch, options.dtype))
        gated_delta(48, getattr(torch, options.dtype))
        many = torch.zeros(1, 65, config.d_model, dtype=model.head_weight.dtype)
        ops.linear_swiglu(many, many[0])
        whole = torch.zeros(2 * 132 * tiled_products.OUTPUTS, config.d_model, dtype=many.dtype)
        ops.linear_swiglu(many, whole)
        head = naive.in_8_bits(model.head_weight)
        scaled_products.written_out(head, many.dtype)
        for rows in (1, 64, 65):
            ops.linear(many[:, :rows], head)
        for rows in (1, 13):
            scale = torch.ones(config.d_model, dtype=many.dtype)
            ops.linear(Stream(many[:, :rows].contiguous(), scale, 1e-5), head)
        in_blocks = Scaled(head.values, head.scale.repeat(1, config.d_model // 128))
        for rows, weight in itertools.product((1, 33), (head, in_blocks)):
            ops.linear_parts(many[:, :rows], weight)
            ops.linear_swiglu(many[:, :rows], weight)
        narrow = naive.in_8_bits(model.head_weight[:, :48].contiguous())  # rows end within a block
        ops.linear(many[:, :1, :48].contiguous(), narrow)
        ops.linear_swiglu(many, head)
        prompt = torch.zeros(1, 257, config.d_model, dtype=many.dtype)
        ops.linear(prompt, in_blocks)
        ops.linear_swiglu(prompt, in_blocks)
    for name, kernel in dict.fromkeys(compiled):
        code = re.findall(r"^\t[^.\s/].*;", kernel.asm["ptx"], re.MULTILINE)
        line = [name, kernel.metadata.num_warps, len(code), kernel.metadata.shared]
        if re.match(options.spills, name):  # the disassembler takes as long as some compilations
            line.append(len(re.findall(r"\t(?:@!?U?P\d+ )?STL", kernel.asm["sass"])))
        print(*line)


if __name__ == "__main__":
    main()
