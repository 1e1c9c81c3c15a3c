"""Names of stored tensors: a table for each layout gives the published name and ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import reduce

Table = Mapping[str, str | tuple[str, ...]]

MAMBA_AS_MIXER: Table = {  # names within a layer, of mamba-ssm's models and those modelled on them
    "norm": "input_layernorm",
    "mixer.in_proj": "mamba.in_proj",
    "mixer.conv1d": "mamba.conv1d",
    "mixer.dt_bias": "mamba.dt_bias",
    "mixer.A_log": "mamba.A_log",
    "mixer.D": "mamba.D",
    "mixer.norm": "mamba.norm",
    "mixer.out_proj": "mamba.out_proj",
}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class Names:
    """A layout's table from published names of tensors to ours.

    A name in it is that of a tensor, or of a module for its `weight` and `bias`. `*` stands for the
    number of a layer, or of an expert. A published tensor that several of ours are cut from has
    all of them. One of ours with several published names has any of them, or, where the last `*`
    is an expert's number or its layout says so, is made of all. A tensor that the table does not
    name has our name, which is Llama's where Llama has such a tensor. Where all published names
    begin otherwise than with `model.`, `prefix` says how; the table has `model.` all the same.

    Example:
        >>> names = Names({"model.layers.*.ffn_norm": "model.layers.*.post_attention_layernorm"})
        >>> names.published("model.layers.3.post_attention_layernorm.weight")
        ['model.layers.3.ffn_norm.weight']
        >>> names.published("lm_head.weight")
        ['lm_head.weight']
    """

    def __init__(self, table: Table, prefix: str = "model.") -> None:
        self._prefix = prefix
        self._published: dict[str, list[str]] = {}
        for published, ours in table.items():
            for each in (ours,) if isinstance(ours, str) else ours:
                self._published.setdefault(each, []).append(published)

    def published(self, name: str) -> list[str]:
        """Return the published names of our tensor; `*` is left for the number of an expert."""
        ours = _NUMBER.sub("*", name)
        module, _, leaf = ours.rpartition(".")
        found = self._published.get(ours)
        if found is None:
            found = [f"{each}.{leaf}" for each in self._published.get(module, [module])]
        numbers = _NUMBER.findall(name)
        return [
            reduce(
                lambda text, number: text.replace("*", number, 1), numbers,
                re.sub(r"^model\.", self._prefix, each),
            )
            for each in found
        ]


def in_layers(table: Table) -> dict[str, str | tuple[str, ...]]:
    """Return a table of names within a layer as one of whole names."""
    prefix = "model.layers.*."
    return {
        prefix + name: prefix + each if isinstance(each, str) else tuple(prefix + n for n in each)
        for name, each in table.items()
    }
