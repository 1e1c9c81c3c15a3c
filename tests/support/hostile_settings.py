"""Register configs, tokenizers and chat templates that do harm or are damaged."""

from __future__ import annotations

import base64
import json
import os
import pickle
from pathlib import Path
from typing import Any

from hostile_files import (
    CANARY,
    CHECKPOINT,
    case,
    checkpoint,
    config_case,
    linked,
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
config_case("with a number of 400 digits", r"wanted a number", rope_theta=10**400)
config_case("with an endless epsilon", r"rms_norm_eps", rms_norm_eps=float("inf"))
mixer_case("of 10^9 layers", r"num_hidden_layers 1000000000, wanted at most 1000", n_layer=10**9)
mixer_case("of 2^31 numbers each", r"no possible model|does not hold", d_model=2**31 - 1,
           vocab_size=2**31 - 1, intermediate_size=2**31 - 1)
mixer_case("with negative sizes", r"wanted a whole number", d_model=-1)
mixer_case("without a state", r"wanted a multiple of the head dim 0", d_inner=0, ssm_cfg={
    "expand": 1, "ngroups": 4, "d_state": 0})
mixer_case("of chunks of 10^8", r"chunk_size is 100000000, it must be at most", ssm_cfg={
    "expand": 1, "ngroups": 4, "d_state": 8, "chunk_size": 10**8})
config_case("of another kind", r"only 'llama' is supported", model_type="gpt2")
config_case("of a list of kinds", r"model_type = \['llama'\]", model_type=["llama"])


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


for _name, _entry in {
    "config.json": "model",
    "mamba_config.json": "model",
    "generation_config.json": "model",
    "model.safetensors": "model",
    "tokenizer.json": "tokenizer",
    "tokenizer_config.json": "tokenizer",
    "special_tokens_map.json": "tokenizer",
    "chat_template.jinja": "template",
}.items():
    case(f"{_name} that is a device", _entry, CHECKPOINT, r"is a link to /dev/zero, out of")(
        lambda folder, name=_name: linked(folder, name, "/dev/zero")  # type: ignore[misc]
    )


@case("config that is a device, of a tokenizer", "tokenizer", CHECKPOINT, r"a link to /dev/zero")
def _(folder: Path) -> Path:
    return linked(folder, "config.json", "/dev/zero")


@case("config elsewhere", "model", CHECKPOINT, r"a link to .*/target/config\.json, out of")
def _(folder: Path) -> Path:
    return linked(folder, "config.json", folder / "target" / "config.json")


@case("config in a circle", "model", CHECKPOINT, r"config\.json (cannot be read|is a link)")
def _(folder: Path) -> Path:
    return linked(folder, "config.json", "config.json")


@case("templates in a folder elsewhere", "tokenizer", CHECKPOINT, r"chat_templates is a link to")
def _(folder: Path) -> Path:
    return linked(folder, "additional_chat_templates", folder / "target")


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


for _name in ("tokenizer.json", "tokenizer.model", "special_tokens_map.json"):

    @case(f"{_name} of 3 GB", "tokenizer", CHECKPOINT, r"3,221,225,472 bytes, at most .* are read")
    def _(folder: Path, name: str = _name) -> Path:
        copy = checkpoint(folder)
        (copy / name).touch()
        os.truncate(copy / name, 3 << 30)
        return copy


for _key in ("merges_file", "fast_tokenizer_files"):

    @case(f"tokenizer with {_key} elsewhere", "tokenizer", CHECKPOINT, rf"elsewhere in {_key}")
    def _(folder: Path, key: str = _key) -> Path:
        named = "../target/tokenizer.json"
        named = [named] if key.endswith("s") else named  # type: ignore[assignment]
        return with_json(folder, "tokenizer_config.json", **{key: named})


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@case("tokenizer whose pattern explodes", "encoding", CHECKPOINT, r"tokenizer .*retry-limit")
def _(folder: Path) -> Path:
    return with_json(folder, "tokenizer.json", pre_tokenizer=split(r"((((((.+)+)+)+)+)+)+(?<=~)"))


# Chat templates


def own_template(name: str, template: Any) -> None:
    @case(f"template {name}", "template", CHECKPOINT, r"its chat template is a \w+, wanted text")
    def _(folder: Path) -> Path:
        copy = with_json(folder, "tokenizer_config.json", chat_template=template)
        (copy / "chat_template.jinja").unlink()
        return copy


own_template("that is a number", 3)
own_template("that is true", True)
own_template("that is a number by name", [{"name": "default", "template": 3}])

template_case("of 10^12 rounds", r"Range too big", "{% for i in range(10**12) %}.{% endfor %}")
template_case("nested 100,000 deep", r"RecursionError", "{{ " + "(" * 100_000 + " }}")
template_case(
    "reaching for classes", r"SecurityError.*__class__",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
)
template_case(
    "reaching for globals", r"SecurityError.*__globals__",
    "{{ raise_exception.__globals__['jinja2'].os.system('true') }}",
)
template_case(
    "reaching through format", r"SecurityError.*__class__",
    "{{ '{0.__class__.__mro__}'.format('') }}",
)
