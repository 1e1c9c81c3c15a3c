"""Published config.json files: read with the ends that they name, or refused with the reason.

The files are facts of folders on the hub, some cut to what they describe (published_configs/).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from stree.checkpoints.configs import load_config
from stree.common.errors import CheckpointRefused

CONFIGS = Path(__file__).with_name("published_configs")
READ = {  # and the ends of an answer
    "Bamba-9B": (128001,),
    "Falcon-H1-Tiny-R-90M-cut": (11,),
    "LFM2-8B-A1B-finetune": (7,),
    "Zamba2-2.7B-Instruct-v2-cut": (2,),
    "Qwen3.6-27B-NVFP4-without-quantization_config": (248044,),
    "derived-Qwen3.5-27B-with-ComActor-top-keys": (248044, 248046),
    "mamba2-1.3b-distill-model_type-mamba": (),
    "Mamba-Codestral-7B": (0,),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": (2,),
}
REFUSED = {
    "Zamba2-7B-early": "has no n_mamba_heads, as in early revisions",
    "Falcon-H1-0.5B-partial": r"24 · 64, wanted 1024 \(mamba_d_ssm",
}


@pytest.fixture
def folder(tmp_path):
    def make(name: str, **changes: object) -> Path:
        config = json.loads((CONFIGS / f"{name}.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        return tmp_path

    return make


@pytest.mark.parametrize("name", READ)
def test_published_configs_are_read(folder, name):
    """Keys that the family's class does not know are passed over."""
    assert load_config(folder(name)).eos_token_ids == READ[name]


@pytest.mark.parametrize("name", REFUSED)
def test_configs_that_lack_a_key_are_refused_by_its_name(folder, name):
    with pytest.raises(CheckpointRefused, match=REFUSED[name]):
        load_config(folder(name))


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("Falcon-H1-Tiny-R-90M-cut", {"sliding_window": 512}, "sliding_window = 512; only None"),
        ("Zamba2-2.7B-Instruct-v2-cut", {"ffn_hidden_size": 8}, "ffn_hidden_size = 8; only 10240"),
        ("Bamba-9B", {"time_step_limit": [0.5]}, "time_step_limit = .*, wanted 2 numbers"),
        ("Bamba-9B", {"layer_types": ["mamba"] * 32}, "layer_types = .*, which is not supported"),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4", {"mamba_n_groups": 1}, "mamba_n_groups = 1, whi"),
        ("Bamba-9B", {"quantization": {"bits": 4}}, "quantised to MLX, which is not read"),
        ("Bamba-9B", {"eos_token_id": 128256}, "eos_token_id 128256, the vocabulary has 128256"),
    ],
)
def test_keys_that_the_class_knows_are_read_or_refused(folder, name, changes, reason):
    load_config(folder(name))
    with pytest.raises(CheckpointRefused, match=reason):
        load_config(folder(name, **changes))


def test_a_mixer_of_mamba_1_is_named(tmp_path):
    shutil.copy(
        CONFIGS / "Llama3.1-Mamba-8B-distill.mamba_config.json", tmp_path / "mamba_config.json"
    )
    llama = dict(
        model_type="llama", vocab_size=128256, hidden_size=4096, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336, rms_norm_eps=1e-5,
    )
    (tmp_path / "config.json").write_text(json.dumps(llama))
    with pytest.raises(CheckpointRefused, match="describes Mamba-1 layers"):
        load_config(tmp_path)
