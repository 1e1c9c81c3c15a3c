"""The doctor says what it found; what is needed and fails decides the exit code."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from tiny_run import ARCHITECTURE, make_workspace

from stree.common.errors import CheckpointRefused, UsageError
from stree.models.config import HybridConfig
from stree.models.model import HybridModel
from stree_pipelines.commands import doctor
from stree_pipelines.resources import machine_checks
from stree_pipelines.resources.estimates import ModelPlan, training_memory


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return str(make_workspace(tmp_path_factory.mktemp("workspace")) / "target")


def test_a_machine_on_which_the_tests_run_is_well(target, tmp_path, capsys):
    doctor.main(["--target", target, "--run_dir", str(tmp_path / "not/yet/there")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "Everything that is needed works."
    working = {line.split()[1] for line in lines[:-1] if line.startswith("ok ")}
    assert {"target", "torch", "triton", "disk", "memory"} <= working
    assert not any(line.startswith("FAILS") for line in lines)


def test_a_file_is_no_place_for_a_run(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for place in ("file", "file/run"):
        with pytest.raises(UsageError, match="disk"):
            doctor.main(["--run_dir", str(tmp_path / place)])
        assert "is no folder" in capsys.readouterr().out


def test_what_is_absent_counts_only_when_it_is_needed(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    doctor.main([])
    assert "-     slurm      no sbatch here" in capsys.readouterr().out
    with pytest.raises(UsageError, match="not working: slurm"):
        doctor.main(["--need", "slurm"])
    assert "FAILS slurm      no sbatch here" in capsys.readouterr().out


def test_sbatch_without_a_cluster_is_told_from_no_sbatch(monkeypatch, tmp_path, capsys):
    for name in ("sbatch", "sinfo"):
        (tmp_path / name).write_text("#!/bin/sh\necho cannot reach the controller >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert doctor.examine(None, str(tmp_path), ("slurm",)) == ["slurm"]
    assert "sinfo fails: cannot reach the controller" in capsys.readouterr().out


def test_too_little_memory_or_disk_is_said_with_both_figures(monkeypatch, target, capsys):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda path: usage(10, 10, 0))
    monkeypatch.setattr(machine_checks, "free_memory_bytes", lambda on_cuda: 1000)
    monkeypatch.setattr(machine_checks, "HAS_CUDA", False)
    assert doctor.examine(target, "runs") == ["disk", "memory"]
    output = capsys.readouterr().out
    assert "0.0 GiB free for runs, a run takes about" in output
    assert "smaller target" in output


def test_memory_counts_target_drafter_and_activations(monkeypatch):
    """Just enough memory passes, and a byte less does not."""
    config = HybridConfig(**{**ARCHITECTURE, "num_layers": 6})
    drafter = config.replace(num_layers=2, attn_layers=())
    wanted = sum(training_memory(ModelPlan(drafter, config), (1, 1024), "32-true", False).values())
    weights = 4 * HybridModel(config).num_parameters() + 16 * HybridModel(drafter).num_parameters()
    assert wanted > weights
    monkeypatch.setattr(machine_checks, "HAS_CUDA", False)
    monkeypatch.setattr(machine_checks, "free_memory_bytes", lambda on_cuda: wanted)
    assert "take about" in machine_checks.check_memory(config)
    monkeypatch.setattr(machine_checks, "free_memory_bytes", lambda on_cuda: wanted - 1)
    with pytest.raises(machine_checks.Absent) as absent:
        machine_checks.check_memory(config)
    assert "fewer drafter layers" in absent.value.advice


def test_a_target_of_attention_alone_is_sized_up(tmp_path, monkeypatch):
    unused = ("num_ssm_heads", "ssm_head_dim", "d_state")
    config = HybridConfig(
        **{**ARCHITECTURE, "attn_layers": (0, 1, 2, 3), **dict.fromkeys(unused, 0)}
    )
    monkeypatch.setattr(machine_checks, "HAS_CUDA", False)
    assert "two-layer drafter" in machine_checks.check_memory(config)
    assert "a run takes about" in machine_checks.check_disk(tmp_path, config)


def test_a_broken_mamba_ssm_is_told_from_none(monkeypatch, tmp_path):
    monkeypatch.setattr(machine_checks, "mamba_ssm_kernel", lambda: None)
    monkeypatch.setattr(machine_checks, "HAS_CUDA", False)
    with pytest.raises(machine_checks.Absent, match="not installed") as absent:
        machine_checks.check_mamba_ssm()
    assert absent.value.advice == "nothing is missing, only GPUs use it"
    package = tmp_path / "mamba_ssm/ops/triton"
    package.mkdir(parents=True)
    (package / "ssd_combined.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(machine_checks.Absent, match="not importable: undefined symbol"):
        machine_checks.check_mamba_ssm()


def test_a_kernel_that_does_not_compile_is_reported(monkeypatch):
    """Without a GPU the launch fails as it does with a broken compiler: by some exception."""
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    monkeypatch.setattr(machine_checks, "HAS_CUDA", True)
    with pytest.raises(machine_checks.Absent, match="does not compile or is wrong"):
        machine_checks.check_triton()


def test_a_target_that_is_none_is_refused(target, tmp_path):
    with pytest.raises(CheckpointRefused):
        doctor.main(["--target", str(tmp_path)])
    shutil.copy(Path(target) / "config.json", tmp_path)
    shutil.copy(Path(target) / "mamba_config.json", tmp_path)
    with pytest.raises(CheckpointRefused, match="holds no weights"):
        doctor.main(["--target", str(tmp_path)])


@pytest.mark.long  # test_stree_command.py and the tests above have the same in one process
def test_as_a_script_with_its_exit_codes(tmp_path):
    command = [sys.executable, "-m", "stree", "doctor", "--run_dir", str(tmp_path)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    failing = subprocess.run(
        [*command, "--ned", "slurm"], capture_output=True, text=True, check=False
    )
    assert failing.returncode == 2 and failing.stderr.startswith("error: ")
