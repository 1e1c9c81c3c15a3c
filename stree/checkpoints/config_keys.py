"""Keys of a config.json by transformers' own classes: which of them can change a logit.

A key that the config class of a family does not know has no effect in transformers, so it has none
here: it is passed over. A key that the class knows is read, is among the keys without effect that
the layout lists beside its reader, or is refused.
"""

from __future__ import annotations

import functools
import inspect
import re
from types import CodeType


def words(text: str) -> frozenset[str]:
    """Return the words of a text as a set of keys."""
    return frozenset(text.split())


# No class has these as a field, and transformers' masks, caches and loading ask every config.
ASKED_OF_EVERY_CONFIG = words("""
    attention_chunk_size is_causal layer_types original_max_position_embeddings
    per_layer_config rope_parameters rope_scaling sliding_window transformers_weights
""")

# Fields of many classes that only initialisation, training and `generate` read. With them, what our
# own exports write needs no class of transformers.
TRAINING_AND_GENERATION = words("""
    architectures dtype torch_dtype transformers_version model_type attention_dropout
    hidden_dropout initializer_range use_cache num_logits_to_keep output_router_logits
    router_aux_loss_coef residual_in_fp32 time_step_rank time_step_max time_step_floor
    use_mamba_kernels use_mem_eff_path
""")


@functools.cache
def of_family(model_type: str) -> frozenset[str]:
    """Return the keys of a `model_type`'s config class beyond those of every config.

    They are its fields, their other names, and further arguments of its constructor. Keys that
    PreTrainedConfig handles itself change no logit.
    """
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    names = _names_in(kind) | set(kind.attribute_map)
    names -= _names_in(PreTrainedConfig) | TRAINING_AND_GENERATION
    return names | ASKED_OF_EVERY_CONFIG


def _names_in(kind: type) -> frozenset[str]:
    names = set(inspect.signature(kind).parameters)
    for method in ("__init__", "__post_init__"):
        if isinstance(code := getattr(vars(kind).get(method), "__code__", None), CodeType):
            names |= {*code.co_names, *(each for each in code.co_consts if isinstance(each, str))}
    return frozenset(name for name in names if re.fullmatch(r"\w+", name)) - {"self", "kwargs"}
