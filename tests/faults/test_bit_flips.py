"""One flipped bit anywhere in a checkpoint is refused, and the file that has it is named.

Only the manifest can notice: PyTorch and safetensors read a flipped tensor without a word. In the
manifest itself a flip is noticed where it says something that is checked (a name, a size, a hash,
its own form); its further keys, such as the step, are what the readers compare by themselves.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from damage import flip_bit
from tiny_run import make_workspace

from stree.checkpoints.load_save import load_model, save_model
from stree.checkpoints.tokenizer import load_tokenizer
from stree.common.errors import CheckpointRefused
from stree.common.files import MANIFEST_NAME
from stree_pipelines.training.checkpoints.saving import STATE_KEYS, SafeCheckpointIO, latest_valid

FLIPS = 100


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """Save an export in shards, so that there is an index as well."""
    folder = tmp_path_factory.mktemp("exported")
    target = make_workspace(folder) / "target"
    save_model(
        load_model(target), folder / "drafter", load_tokenizer(target), shard_bytes=20_000,
        extra_files={"provenance.json": '{"step": 3}\n'}, manifest_extra={"step": 3},
    )
    return folder / "drafter"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    state = dict.fromkeys(STATE_KEYS) | {
        "global_step": 3,
        "state_dict": {f"layer.{index}": torch.randn(40, 40) for index in range(4)},
    }
    path = tmp_path_factory.mktemp("run") / "checkpoints" / "step-00000003"
    SafeCheckpointIO().save_checkpoint(state, path)
    return path


def flips_over(folder: Path, seed: int) -> list[tuple[str, int]]:
    """Return (file, bit) of FLIPS flips, evenly over the files but the manifest."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST_NAME)
    choose = random.Random(seed)
    return [
        (str(file.relative_to(folder)), choose.randrange(8 * file.stat().st_size))
        for file in (files[number % len(files)] for number in range(FLIPS))
    ]


@pytest.mark.parametrize(
    ("written", "load"),
    [("exported", load_model), ("saved", SafeCheckpointIO().load_checkpoint)],
    ids=["export", "training state"],
)
def test_flips_are_refused_by_the_file_s_name(written, load, tmp_path, request):
    """Each flip is undone before the next."""
    folder, copy = request.getfixturevalue(written), tmp_path / "copy"
    shutil.copytree(folder, copy)
    load(copy)  # nothing is wrong with it
    for name, bit in flips_over(folder, seed=0):
        flip_bit(copy / name, bit)
        with pytest.raises(CheckpointRefused, match=rf"{name} has sha256") as refusal:
            load(copy)
        assert refusal.value.exit_code == 66
        flip_bit(copy / name, bit)


def test_a_resume_passes_over_a_flipped_checkpoint(saved, tmp_path):
    folder = tmp_path / "checkpoints"
    for step in (3, 4):
        state = SafeCheckpointIO().load_checkpoint(saved)
        SafeCheckpointIO().save_checkpoint({**state, "global_step": step},
                                           folder / f"step-{step:08d}")
    flip_bit(folder / "step-00000004" / "state.pt", 70_000)
    lines: list[str] = []
    assert latest_valid(tmp_path, lines.append) == folder / "step-00000003"
    assert "step-00000004" in lines[0] and "state.pt has sha256" in lines[0]


def test_a_flip_in_what_the_manifest_says_of_files_is_refused(exported, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(exported, copy)
    path = copy / MANIFEST_NAME
    # Whitespace may turn into other whitespace, and what is not about files is not checked here.
    about_files = path.read_text().split('"step"')[0]
    bits = [8 * place + bit for place, char in enumerate(about_files) if char.isalnum()
            for bit in range(8)]
    for bit in random.Random(2).sample(bits, FLIPS):
        flip_bit(path, bit)
        with pytest.raises(CheckpointRefused):
            load_model(copy)
        flip_bit(path, bit)
