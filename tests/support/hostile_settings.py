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
    case,
    checkpoint,
    config_case,
    linked,
    mixer_case,
    shell,
    stretched,
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
mixer_case("of 2^31 numbers each", r"its config wants \(2147483647, 2147483647\)",
           d_model=2**31 - 1, vocab_size=2**31 - 1, intermediate_size=2**31 - 1)
mixer_case("with negative sizes", r"wanted a whole number", d_model=-1)
mixer_case("without a state", r"wanted a multiple of the head dim 0", d_inner=0, ssm_cfg={
    "expand": 1, "ngroups": 4, "d_state": 0})
mixer_case("of chunks of 10^8", r"chunk_size is 100000000, it must be at most", ssm_cfg={
    "expand": 1, "ngroups": 4, "d_state": 8, "chunk_size": 10**8})
config_case("of another kind", r"only 'llama' is supported", model_type="gpt2")
config_case("of a list of kinds", r"model_type = \['llama'\]", model_type=["llama"])


case("config with NaN", "model", r"NaN is no number",
     lambda at: with_json(at, "config.json", rms_norm_eps=float("nan")))
case("config nested 100,000 deep", "model", r"nested too deep",
     lambda at: with_text(at, "config.json", '{"a":' * 100_000))


@case("config with a key twice", "model", r"'vocab_size' is given twice")
def _(folder: Path) -> Path:
    text = (folder / "target" / "config.json").read_text()
    return with_text(folder, "config.json", text.replace("{", '{"vocab_size": 7,', 1))


@case("config that is a pipe", "model", r"no regular file")
def _(folder: Path) -> Path:
    copy = checkpoint(folder)
    (copy / "config.json").unlink()
    os.mkfifo(copy / "config.json")
    return copy


def device_case(entry: str, *names: str) -> None:
    for name in names:
        case(f"{name} that is a device", entry, r"is a link to /dev/zero, out of",
             lambda at, name=name: linked(at, name, "/dev/zero"))


device_case("model", "config.json", "mamba_config.json", "generation_config.json",
            "model.safetensors")
device_case("tokenizer", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
device_case("template", "chat_template.jinja")
case("config that is a device, of a tokenizer", "tokenizer", r"a link to /dev/zero",
     lambda at: linked(at, "config.json", "/dev/zero"))
case("config elsewhere", "model", r"a link to .*/target/config\.json, out of",
     lambda at: linked(at, "config.json", at / "target" / "config.json"))
case("config in a circle", "model", r"config\.json (cannot be read|is a link)",
     lambda at: linked(at, "config.json", "config.json"))
case("templates in a folder elsewhere", "tokenizer", r"chat_templates is a link to",
     lambda at: linked(at, "additional_chat_templates", at / "target"))


case("config of 10 GB", "model", r"at most .* are read",
     lambda at: stretched(at, "config.json", 10 << 30))


# Tokenizers


case("tokenizer of another kind", "tokenizer", r"tokenizer .* cannot be read",
     lambda at: with_text(at, "tokenizer.json", '{"model_type": "llama"}'))
case("tokenizer that is a pickle", "tokenizer", r"tokenizer .* cannot be read",
     lambda at: with_text(at, "tokenizer.json", pickle.dumps(shell(at))))


@case("tokenizer at which its library panics", "tokenizer", r"PanicException")
def _(folder: Path) -> Path:
    charsmap = base64.b64encode(bytes(3)).decode()
    normalizer = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    return with_json(folder, "tokenizer.json", normalizer=normalizer)


@case("tokenizer with code of its own", "tokenizer", r"code of its own")
def _(folder: Path) -> Path:
    copy = checkpoint(folder)
    (copy / "tokenizer.json").unlink()
    written(copy, "vocab.json", "{}")
    written(copy, "own.py", f"open({str(folder / CANARY)!r}, 'w')")
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    written(copy, "tokenizer_config.json", json.dumps(config))
    return copy


case("tokenizer's config nested deep", "tokenizer", r"nested too deep",
     lambda at: with_text(at, "tokenizer_config.json", "[" * 100_000))
case("drafter of another tokenizer", "evaluation", r"does not use the tokenizer",
     lambda at: with_json(at, "tokenizer.json", normalizer={"type": "Lowercase"}))


for _name in ("tokenizer.json", "tokenizer.model", "special_tokens_map.json"):
    case(f"{_name} of 3 GB", "tokenizer", r"3,221,225,472 bytes, at most .* are read",
         lambda at, name=_name: stretched(at, name, 3 << 30))
case("tokenizer with merges_file elsewhere", "tokenizer", r"elsewhere in merges_file",
     lambda at: with_json(at, "tokenizer_config.json", merges_file="../target/tokenizer.json"))
case("tokenizer with fast_tokenizer_files elsewhere", "tokenizer",
     r"elsewhere in fast_tokenizer_files",
     lambda at: with_json(at, "tokenizer_config.json",
                          fast_tokenizer_files=["../target/tokenizer.json"]))


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


case("tokenizer whose pattern explodes", "encoding", r"tokenizer .*retry-limit",
     lambda at: with_json(at, "tokenizer.json", pre_tokenizer=split(r"((((((.+)+)+)+)+)+)+(?<=~)")))


# Chat templates


def own_template(name: str, template: Any) -> None:
    @case(f"template {name}", "template", r"its chat template is a \w+, wanted text")
    def _(folder: Path) -> Path:
        copy = with_json(folder, "tokenizer_config.json", chat_template=template)
        (copy / "chat_template.jinja").unlink()
        return copy


own_template("that is a number", 3)
own_template("that is true", True)
own_template("that is a number by name", [{"name": "default", "template": 3}])

for _name, (_reason, _template) in {
    "of 10^12 rounds": (r"Range too big", "{% for i in range(10**12) %}.{% endfor %}"),
    "nested 100,000 deep": (r"RecursionError", "{{ " + "(" * 100_000 + " }}"),
    "reaching for classes": (
        r"SecurityError.*__class__", "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    ),
    "reaching for globals": (
        r"SecurityError.*__globals__",
        "{{ raise_exception.__globals__['jinja2'].os.system('true') }}",
    ),
    "reaching through format": (
        r"SecurityError.*__class__", "{{ '{0.__class__.__mro__}'.format('') }}"
    ),
}.items():
    case(f"template {_name}", "template", _reason,
         lambda at, text=_template: with_text(at, "chat_template.jinja", text))
