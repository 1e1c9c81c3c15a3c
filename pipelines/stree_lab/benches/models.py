"""Make models of random weights in the shapes of the benchmarks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import torch

from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.configs import CheckpointConfig, checkpoint_config_of
from stree.checkpoints.plan.build import kept_dtype
from stree.common.errors import UsageError
from stree.loading import FLOAT8
from stree.models.config import HybridConfig
from stree.models.in_8_bits import put_in_8_bits
from stree.models.model import HybridModel
from stree.models.slicing import headed
from stree_pipelines.console.config_files import read_yaml

_HERE = Path(__file__).parent
PUBLISHED = read_yaml(_HERE / "published.yaml")
_SHAPES = read_yaml(_HERE / "shapes.yaml")
OWN_SHAPES = {name: HybridConfig.from_dict(each) for name, each in _SHAPES["targets"].items()}
DRAFTERS: dict[str, dict[str, int]] = _SHAPES["drafters"]
SHAPES = (*OWN_SHAPES, *PUBLISHED)
OWN = "own"  # the unchanged drafter of a shape
CHANGE = re.compile(r"(head|rank|layers|width)=([1-9][0-9]{0,6})(?=\+|$)")
ATTENTION = "attention"  # a Transformer in its place
MTP = "mtp"  # the target's head for multi-token prediction in its place
EAGLE = "eagle"  # an EAGLE-3 head of the target in its place
FLOAT8_HEAD = "head_dtype=float8"  # how a drafter runs, no part of its config


def published(name: str) -> CheckpointConfig:
    """Read one of `PUBLISHED` like a checkpoint's config."""
    return checkpoint_config_of(CheckedJson(PUBLISHED[name], Path(name)))


def target_config(shape: str) -> HybridConfig:
    return OWN_SHAPES[shape] if shape in OWN_SHAPES else published(shape).model


def drafter_config(shape: str, kind: str = OWN) -> HybridConfig:
    """Return the config of a shape's drafter; a published model has the 8B's over its vocabulary.

    kind: changes to it, joined by "+": head=K tokens in the head, rank=R of the head, layers=N,
    width=D with everything in proportion, head_dtype=float8, and attention, for a Transformer of
    the same numbers; or mtp or eagle for such a head of the target, with head=K, rank=R or in
    float8. Raises UsageError for others, and numbers that do not fit together.
    """
    own = shape if shape in OWN_SHAPES else "8b"
    config = OWN_SHAPES[own].replace(num_layers=2, attn_layers=(), **DRAFTERS[own])
    config = config.replace(vocab_size=target_config(shape).vocab_size)
    parts = kind.split("+")
    attends, head_of = ATTENTION in parts, next((w for w in (MTP, EAGLE) if w in parts), None)
    for word in (FLOAT8_HEAD, head_of or ATTENTION):
        if word in parts:
            parts.remove(word)
    if parts == [OWN]:
        parts = []
    changes = dict(CHANGE.findall(kind))
    changed = [f"{name}={number}" for name, number in changes.items()]
    if changed != parts or (head_of and changes.keys() - {"head", "rank"}):
        raise UsageError(
            f"the drafter {kind!r} is not {OWN}, or some of head=K, rank=R, layers=N, width=D, "
            f"{ATTENTION} and {FLOAT8_HEAD} joined by +, each once; or {MTP} or {EAGLE} with "
            f"head, rank or {FLOAT8_HEAD}"
        )
    target = target_config(shape)
    if head_of == MTP:
        *_, mlp = target.layer_type(target.num_layers - 1).split()
        config = target.mtp_head([f"attention {mlp}"])
    elif head_of == EAGLE:
        count = target.num_layers
        config = target.eagle_head(tuple(sorted({1, count // 2 - 1, max(count - 4, 0)})))
    if "width" in changes:
        config = of_width(config, int(changes["width"]))
    if "layers" in changes:
        config = config.replace(num_layers=int(changes["layers"]))
    if attends:
        config = transformer(config)
    head, rank = (int(changes[name]) if name in changes else None for name in ("head", "rank"))
    return headed(config, head, rank)


def of_width(config: HybridConfig, width: int) -> HybridConfig:
    """Scale a pure Mamba-2 to another width: heads, groups (unless single) and MLP in proportion.

    Head and state sizes stay. Raises UsageError when a number is not whole.
    """
    changes = {"d_model": width}
    for name in ("intermediate_size", "num_ssm_heads", "num_x_groups", "num_b_groups",
                 "num_c_groups", "gated_norm_groups"):
        size = getattr(config, name)
        if size > 1:
            changes[name], rest = divmod(size * width, config.d_model)
            if rest or not changes[name]:
                raise UsageError(
                    f"a drafter of width {width} would have {name} = "
                    f"{size * width / config.d_model:g}: choose a multiple of "
                    f"{config.d_model // math.gcd(size, config.d_model)}"
                )
    return config.replace(**changes)


def transformer(config: HybridConfig) -> HybridConfig:
    """Return a Transformer in Llama's layout, of the same width, depth, MLP and vocabulary.

    Heads are MambaInLlama's: C's heads are queries, the groups of x and B are values and keys.
    """
    return config.replace(
        attn_layers=tuple(range(config.num_layers)), num_heads=config.num_ssm_heads,
        num_kv_heads=config.num_x_groups, head_dim=config.ssm_head_dim,
    )


def random_model(config: HybridConfig, device: torch.device) -> HybridModel:
    """Make a model of random weights on its device, in bf16.

    Weights that a checkpoint loaded in bf16 keeps in fp32 are in fp32 here, too.
    """
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = HybridModel(config).eval()
    finally:
        torch.set_default_dtype(default)
    _keep_wide(model, lambda name: kept_dtype(name, torch.bfloat16))
    return model


def random_target(shape: str, device: torch.device, dtype: str = "bfloat16") -> HybridModel:
    """Make a target of random weights, in bf16; dtype is that of its products' weights."""
    model = random_model(target_config(shape), device)
    if shape in PUBLISHED:
        source = published(shape).rename(())
        _keep_wide(model, lambda name: kept_dtype(name, torch.bfloat16, source(name)))
    if dtype == FLOAT8:
        put_in_8_bits(model)
    return model


def random_drafter(shape: str, device: torch.device, kind: str = OWN) -> HybridModel:
    model = random_model(drafter_config(shape, kind), device)
    if FLOAT8_HEAD in kind:
        model.put_head_in_8_bits()
    return model


def _keep_wide(model: HybridModel, dtype_of: Callable[[str], torch.dtype]) -> None:
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensor.data = tensor.data.to(dtype_of(name))
