"""Time decoding calls of random weights against the floor of their matrix products.

python pipelines/bench_decode.py runs/bench/decode.jsonl --shape 8b
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stree.draft import ModelDrafter, SamplingRule, StaticDraft
from stree.errors import UsageError, exit_with_reason
from stree.models.config import HybridConfig
from stree.models.hybrid import HybridModel
from stree.sampling import RandomChooser
from stree.tree import TokenTree, balanced
from stree_pipelines.command_line import CommandParser
from stree_pipelines.dry_run import memory_line, model_line
from stree_pipelines.estimates import decoding_memory
from stree_pipelines.timing import require_green, side_by_side, write_rows

_MAMBA_IN_LLAMA = HybridConfig(
    vocab_size=128256, d_model=4096, num_layers=32, attn_layers=tuple(range(1, 32, 2)),
    intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128, rope_theta=500000.0,
    num_ssm_heads=32, ssm_head_dim=128, d_state=128, num_x_groups=8, num_b_groups=8,
    num_c_groups=32, gated_norm_groups=32,
)  # fmt: skip
_CHAT = HybridConfig(
    vocab_size=16384, d_model=768, num_layers=12, attn_layers=(1, 3, 5, 7, 9, 11),
    intermediate_size=2048, tie_embeddings=True, num_heads=12, num_kv_heads=4, head_dim=64,
    num_ssm_heads=12, ssm_head_dim=64, d_state=64, num_x_groups=4, num_b_groups=4,
    num_c_groups=12, gated_norm_groups=12,
)  # fmt: skip
_TINY = _CHAT.replace(
    vocab_size=64, d_model=32, num_layers=2, attn_layers=(1,), intermediate_size=48,
    num_heads=2, num_kv_heads=1, head_dim=16, num_ssm_heads=2, ssm_head_dim=16, d_state=16,
    num_x_groups=1, num_b_groups=1, num_c_groups=2, gated_norm_groups=2,
)  # fmt: skip
SHAPES = {"8b": _MAMBA_IN_LLAMA, "chat": _CHAT, "tiny": _TINY}
DRAFTERS = {  # two Mamba-2 layers over the whole vocabulary
    "8b": dict(d_model=1024, intermediate_size=3584, num_ssm_heads=8, num_x_groups=2,
               num_b_groups=2, num_c_groups=8, gated_norm_groups=8),
    "chat": dict(d_model=384, intermediate_size=1024, num_ssm_heads=6, num_x_groups=2,
                 num_b_groups=2, num_c_groups=6, gated_norm_groups=6),
    "tiny": dict(d_model=16, intermediate_size=24),
}  # fmt: skip
TESTS = [
    "kernels/test_tree_scan.py", "kernels/test_tree_attention.py", "kernels/test_pointwise.py",
    "stree/test_graphs.py",
]  # fmt: skip


def measure(
    shape: str, nodes: list[int], context: int, repeats: int, device: torch.device
) -> list[dict[str, Any]]:
    """Rows of µs: a target call over N nodes beside one step and the floor, and one draft."""
    target = random_model(SHAPES[shape], device)
    rows: list[dict[str, Any]] = []
    for num_nodes in nodes:
        times = side_by_side(
            {
                "floor": _products(target, num_nodes),
                "step": _tree_call(target, 1, context),
                "tree": _tree_call(target, num_nodes, context),
            },
            device, repeats,
        )  # fmt: skip
        medians = {name: each["median"] for name, each in times.items()}
        row: dict[str, Any] = dict(
            what="target call", shape=shape, num_nodes=num_nodes, context=context
        )
        row["over_step"] = medians["tree"] / medians["step"]
        row["over_floor"] = medians["tree"] / medians["floor"]
        rows.append({**row, **{f"us_{name}": each for name, each in times.items()}})
    drafter = ModelDrafter(random_model(_drafter_config(shape), device), context + 64, 13)
    drafter.catch_up([1] * context)
    choose = RandomChooser(0, device)
    draft = StaticDraft(drafter, TokenTree.paper(), SamplingRule(), choose)
    times = side_by_side(
        {"draft": lambda: draft._run(drafter.cache, choose, drafter.cache.num_slots)},
        device, repeats,
    )  # fmt: skip
    rows.append(dict(what="draft", shape=shape, num_nodes=13, context=context, **times))
    return rows


def describe(shape: str, nodes: list[int], context: int, on_cuda: bool) -> str:
    """What there is to measure, and the memory that it takes; one target call's cache at a time."""
    target, drafter = SHAPES[shape], _drafter_config(shape)
    memory = decoding_memory(
        target, drafter, torch.bfloat16, context + max(nodes), {"tree": max(nodes)}
    )
    calls = f"target calls over {', '.join(map(str, nodes))} nodes and one draft, {context} tokens"
    models = [model_line("target", target), model_line("drafter", drafter)]
    return "\n".join([*models, f"{calls} committed", memory_line(memory, on_cuda)])


def _drafter_config(shape: str) -> HybridConfig:
    return SHAPES[shape].replace(num_layers=2, attn_layers=(), **DRAFTERS[shape])


def random_model(config: HybridConfig, device: torch.device) -> HybridModel:
    """A model of random bf16 weights, made where it runs."""
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return HybridModel(config).eval()
    finally:
        torch.set_default_dtype(default)


def _products(model: HybridModel, num_nodes: int) -> Callable[[], object]:
    """Every weight matrix product of one call, and nothing else."""
    weights = [each.weight for each in model.modules() if isinstance(each, nn.Linear)]
    weights += [model.head_weight] if model.config.tie_embeddings else []
    rows = {
        width: torch.randn(num_nodes, width, device=model.device, dtype=model.dtype)
        for width in {weight.shape[1] for weight in weights}
    }
    return lambda: [F.linear(rows[weight.shape[1]], weight) for weight in weights]


def _tree_call(model: HybridModel, num_nodes: int, context: int) -> Callable[[], Tensor]:
    tree = balanced([num_nodes - 1] if num_nodes > 1 else [], f"star-{num_nodes}")
    cache = model.new_cache(context + num_nodes, num_nodes)
    model.prefill(torch.ones(1, context, dtype=torch.long, device=model.device), cache)
    cache.path.copy_(torch.arange(num_nodes)[None])
    tokens = torch.ones(1, num_nodes, dtype=torch.long, device=model.device)

    def call() -> Tensor:
        cache.length.fill_(context)  # stays, however often this runs
        cache.path_length.fill_(min(3, num_nodes))  # a path of usual length is replayed
        return model.tree_forward(tokens, tree, cache, cache.num_slots)

    return call


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser("bench_decode.py", description=__doc__)
    parser.add_argument("out", type=str, help="file to write, JSON lines")
    parser.add_argument("--shape", type=str, default="8b", help=f"one of {sorted(SHAPES)}")
    parser.add_argument("--nodes", type=list[int], default=[1, 13, 16, 64])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--device", type=str, default="cuda")
    parser.add_argument("--dry_run", "--dry-run", action="store_true", help="say what it takes")
    options = parser.parse_args(arguments)
    if options.shape not in SHAPES:
        raise UsageError(f"shape {options.shape!r} is not one of {sorted(SHAPES)}")
    device = torch.device(options.device)
    if options.dry_run:
        print(describe(options.shape, options.nodes, options.context, device.type == "cuda"))
        return
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("there is no CUDA device; --device cpu --shape tiny tries the script")
    require_green(TESTS)
    rows = measure(options.shape, options.nodes, options.context, options.repeats, device)
    write_rows(options.out, rows, device)


if __name__ == "__main__":
    exit_with_reason(main)
