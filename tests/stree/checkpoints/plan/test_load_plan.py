"""Plans of loading: worked out without PyTorch, complete, and refused before a number is read.

The oracle of a plan is the model that is built by it: names and shapes of its `state_dict`.
"""

import json
import subprocess
import sys

import eagle_heads
import pytest
import torch
from families import LAYOUTS, random_reference
from mtp_heads import save_with_head
from safetensors.torch import load_file, save_file

from stree.checkpoints.load_save import load_model, save_model
from stree.checkpoints.plan.build import build
from stree.checkpoints.plan.load_plan import plan_model
from stree.common.errors import CheckpointRefused
from stree.models.config import HybridConfig
from stree.models.model import HybridModel

PLAN = """
import json, sys
sys.modules["torch"] = sys.modules["triton"] = None
from stree.checkpoints.plan.load_plan import plan_model
from stree.drafters.names import DrafterName

def shown(plan):
    return {
        "shapes": {name: weight.shape for name, weight in plan.weights.items()},
        "names": [each.name for weight in plan.weights.values() for each in weight.stored],
        "in_8_bits": [name for name, weight in plan.weights.items() if weight.is_in_8_bits],
        "lent": plan.lent, "zeros": plan.zeros, "files": [path.name for path in plan.files],
    }

plans = {}
for key, (target, drafter) in json.loads(sys.argv[1]).items():
    plan = DrafterName.parse(drafter).plan(target) if drafter else plan_model(target)
    plans[key] = shown(plan)
print(json.dumps(plans))
"""
SMALL = HybridConfig(
    64, d_model=16, num_layers=1, attn_layers=(0,), num_heads=2, num_kv_heads=1, head_dim=8,
    intermediate_size=24,
)


def plans_without_torch(cases):
    command = [sys.executable, "-c", PLAN, json.dumps(cases)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def test_plans_of_all_layouts_are_worked_out_without_torch(tmp_path):
    cases, wanted = {}, {}
    for family in LAYOUTS:
        random_reference(family, 0).save_pretrained(tmp_path / family)
        cases[family] = (str(tmp_path / family), "")
    save_model(HybridModel(SMALL), tmp_path / "own", shard_bytes=2000)
    cases["own"] = (str(tmp_path / "own"), "")
    for key, plan in plans_without_torch(cases).items():
        wanted = load_model(cases[key][0]).state_dict()
        assert plan["shapes"] == {name: list(each.shape) for name, each in wanted.items()}, key
        assert not plan["lent"] and not plan["zeros"] and not plan["in_8_bits"]
        stored = {}
        for file in plan["files"]:
            stored |= load_file(f"{cases[key][0]}/{file}")
        assert set(plan["names"]) <= stored.keys(), key
        assert (len(plan["files"]) > 1) == (key == "own")


def test_plans_of_heads_are_worked_out_without_torch(tmp_path):
    theirs = eagle_heads.random_target("llama-8")
    theirs.save_pretrained(tmp_path / "llama")
    eagle_heads.save_head(tmp_path / "eagle", theirs)
    save_with_head(tmp_path / "qwen", "qwen3_5", 0)
    plans = plans_without_torch({
        "eagle": (str(tmp_path / "llama"), f"eagle:{tmp_path / 'eagle'}"),
        "mtp": (str(tmp_path / "qwen"), "float8:mtp+ngram:4"),
    })
    assert plans["eagle"]["lent"] == ["model.embed_tokens.weight"]
    assert {"model.embed_tokens.weight", "model.features.target_norm.weight"} <= {
        *plans["mtp"]["lent"]
    }
    for plan in plans.values():
        assert plan["zeros"] == ["model.features.unknown"]
        assert "model.layers.0.self_attn.q_proj.weight" in plan["shapes"]
        assert not plan["shapes"].keys() & {*plan["lent"], *plan["zeros"]}


def test_a_file_that_changes_after_the_plan_is_refused(tmp_path):
    save_model(HybridModel(SMALL), tmp_path / "own")
    path = tmp_path / "own" / "model.safetensors"
    plan, tensors = plan_model(tmp_path / "own"), load_file(path)
    name = "model.norm.weight"
    for changed in ({**tensors, name: torch.ones(3)}, {"other": torch.ones(3)}):
        path.unlink()
        save_file(changed, path)
        reason = r"model\.safetensors cannot be read \(.*(norm|contain)"
        with pytest.raises(CheckpointRefused, match=reason):
            build(plan)
