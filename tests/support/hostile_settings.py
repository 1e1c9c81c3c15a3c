"""Configs, tokenizers and chat templates that do harm or are damaged."""

from __future__ import annotations

import base64
import json
import os
import pickle
from pathlib import Path

from hostile_files import (
    CANARY,
    CHECKPOINT,
    case,
    checkpoint,
    config_case,
    mixer_case,
    shell,
    template_case,
    with_json,
    with_text,
    written,
)

# Configs

config_case("with code of its own", r"auto_map", auto_map={"AutoModel": "modeling.Own"})
config_case("that trusts code", r"trust_remote_code", trust_remote_code=True)
config_case(
    "with an integer of 4000 digits", r"wanted a whole number", num_attention_heads=10**4000
)
config_case("with a number of 400 digits", r"more than a number", rope_theta=10**400)
config_case("with an endless epsilon", r"rms_norm_eps", rms_norm_eps=float("inf"))
mixer_case("of 10^9 layers", r"num_layers is 1000000000, it must be at most 1000", n_layer=10**9)
mixer_case("of 2^31 numbers each", r"no possible model|does not hold", d_model=2**31 - 1,
           vocab_size=2**31 - 1, intermediate_size=2**31 - 1)  # fmt: skip
mixer_case("with negative sizes", r"wanted a whole number", d_model=-1)
mixer_case("without a state", r"wanted a multiple of the head dim 0", d_inner=0, ssm_cfg={
    "expand": 1, "ngroups": 4, "d_state": 0})  # fmt: skip
config_case("of another kind", r"only 'llama' is supported", model_type="gpt2")


@case("config with NaN", "model", CHECKPOINT, r"NaN is no number")
def _(folder: Path) -> Path:
    return with_json(folder, "config.json", rms_norm_eps=float("nan"))


@case("config nested 100,000 deep", "model", CHECKPOINT, r"nested too deep")
def _(folder: Path) -> Path:
    return with_text(folder, "config.json", '{"a":' * 100_000)


@case("config with a key twice", "model", CHECKPOINT, r"'vocab_size' is given twice")
def _(folder: Path) -> Path:
    text = (folder / "target" / "config.json").read_text()
    return with_text(folder, "config.json", text.replace("{", '{"vocab_size": 7,', 1))


@case("config that is a pipe", "model", CHECKPOINT, r"no regular file")
def _(folder: Path) -> Path:
    copy = checkpoint(folder)
    (copy / "config.json").unlink()
    os.mkfifo(copy / "config.json")
    return copy


@case("config of 10 GB", "model", CHECKPOINT, r"at most .* are read")
def _(folder: Path) -> Path:
    copy = checkpoint(folder)
    os.truncate(copy / "config.json", 10 << 30)  # takes no room on the disk
    return copy


# Tokenizers


@case("tokenizer of another kind", "tokenizer", CHECKPOINT, r"tokenizer .* cannot be read")
def _(folder: Path) -> Path:
    return with_text(folder, "tokenizer.json", '{"model_type": "llama"}')


@case("tokenizer that is a pickle", "tokenizer", CHECKPOINT, r"tokenizer .* cannot be read")
def _(folder: Path) -> Path:
    return with_text(folder, "tokenizer.json", pickle.dumps(shell(folder)))


@case("tokenizer at which its library panics", "tokenizer", CHECKPOINT, r"PanicException")
def _(folder: Path) -> Path:
    charsmap = base64.b64encode(bytes(3)).decode()
    normalizer = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    return with_json(folder, "tokenizer.json", normalizer=normalizer)


@case("tokenizer with code of its own", "tokenizer", CHECKPOINT, r"code of its own")
def _(folder: Path) -> Path:
    copy = checkpoint(folder)
    (copy / "tokenizer.json").unlink()
    written(copy, "vocab.json", "{}")
    written(copy, "own.py", f"open({str(folder / CANARY)!r}, 'w')")
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    written(copy, "tokenizer_config.json", json.dumps(config))
    return copy


@case("tokenizer's config nested deep", "tokenizer", CHECKPOINT, r"nested too deep")
def _(folder: Path) -> Path:
    return with_text(folder, "tokenizer_config.json", "[" * 100_000)


@case("drafter of another tokenizer", "evaluation", CHECKPOINT, r"does not use the tokenizer")
def _(folder: Path) -> Path:
    return with_text(folder, "chat_template.jinja", "{{ messages }}")


# Chat templates

TOO_LONG, TOO_LARGE = r"more than 1 s of processor time", r"more than 512 MiB"
template_case("of 10^12 rounds", r"Range too big", "{% for i in range(10**12) %}.{% endfor %}")
template_case(
    "of 10^10 rounds", TOO_LONG,
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
)  # fmt: skip
template_case(
    "of 2^60 calls", TOO_LONG,
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
)  # fmt: skip
template_case("of an endless number", TOO_LONG, "{{ 9 ** (9 ** 9) }}")
template_case("of 10^10 letters", TOO_LARGE, "{{ 'a' * 10**10 }}")
template_case(
    "that doubles its text", TOO_LARGE,
    "{% set n = namespace(a='a' * 999) %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}"
    "{% endfor %}{{ n.a }}",
)  # fmt: skip
template_case("of 40 MB", r"it makes 40,000,000 characters", "{{ 'a' * 40000000 }}")
template_case("nested 100,000 deep", r"RecursionError", "{{ " + "(" * 100_000 + " }}")
template_case(
    "reaching for classes", r"SecurityError.*__class__",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
)  # fmt: skip
template_case(
    "reaching for globals", r"SecurityError.*__globals__",
    "{{ raise_exception.__globals__['jinja2'].os.system('true') }}",
)  # fmt: skip
template_case(
    "reaching through format", r"SecurityError.*__class__",
    "{{ '{0.__class__.__mro__}'.format('') }}",
)  # fmt: skip
