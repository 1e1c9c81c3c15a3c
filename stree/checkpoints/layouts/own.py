"""Our own layout: `HybridConfig` as it is, for models that MambaInLlama's files cannot describe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from stree.checkpoints import config_keys, config_parts
from stree.checkpoints.checked_json import CheckedJson, json_number
from stree.checkpoints.sources import Layout, as_it_is
from stree.models.config import HybridConfig

# Model type of our own exports with Mamba layers. Published MambaInLlama checkpoints have
# "llama", and AutoModelForCausalLM then loads them with attention weights drawn at random.
MODEL_TYPE = "stree_hybrid"
TABLE = "hybrid_config"  # in config.json, HybridConfig's fields that are not as usual


def spec(values: CheckedJson) -> HybridConfig:
    table = values.section(TABLE)
    readers: dict[str, Callable[[str], Any]] = {
        "int": table.integer, "int | None": table.integer,
        "float": table.number, "float | None": table.number,
        "bool": lambda name: table.boolean(name, False),
        "str": table.text,
        "tuple[int, ...]": table.token_ids, "tuple[str, ...]": table.texts,
        "tuple[float, float]": lambda name: table.numbers(name, config_parts.NO_LIMIT),
    }
    given: dict[str, Any] = {}
    for field in fields(HybridConfig):
        if field.name == "rope_scaling":
            given["rope_scaling"] = config_parts.rope(table)["rope_scaling"]
        elif table.get(field.name) is not None:
            given[field.name] = readers[str(field.type)](field.name)
    table.refuse_unread()
    values.refuse_unread(config_keys.TRAINING_AND_GENERATION)
    missing = [name for name in ("vocab_size", "d_model", "num_layers") if name not in given]
    if missing:
        values.refuse(f"says no {', '.join(missing)} in {TABLE}")
    return HybridConfig(**given)


def config_json(config: HybridConfig, dtype: str) -> dict[str, Any]:
    """Return config.json of any model."""
    table = {}
    for field in fields(HybridConfig):
        value = getattr(config, field.name)
        if value != field.default:
            table[field.name] = list(value) if isinstance(value, tuple) else value
    for name, value in table.items():
        if name == "dt_limit":
            table[name] = [json_number(each) for each in value]
    return {"model_type": MODEL_TYPE, "torch_dtype": dtype, TABLE: table}


LAYOUT = Layout("stree's own", (MODEL_TYPE,), spec, as_it_is)
