"""Evaluations beside a training: on another GPU, or submitted to Slurm; `sbatch` is a stand-in
here, and the real one in tests/slurm/."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forked import wait_until
from tiny_run import distill_arguments, make_workspace

from stree.common.errors import Interrupted, UsageError
from stree_pipelines.commands import distill
from stree_pipelines.evaluation import launch
from stree_pipelines.evaluation.launch import start_process, submit_job
from stree_pipelines.training.checkpoints.export import Exports
from stree_pipelines.training.run import callbacks
from stree_pipelines.training.run.callbacks import EvaluateExports

PLACE = {"RANK": "3", "WORLD_SIZE": "4", "SLURM_PROCID": "3", "MASTER_ADDR": "node7"}
TELL_ENVIRONMENT = """
import json, os, sys
json.dump([sys.argv[1:], dict(os.environ)], open({path!r}, "w"))
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    folder = make_workspace(tmp_path_factory.mktemp("workspace"))
    (folder / "sums.jsonl").write_text('{"id": "1", "turns": ["What is 1 plus 3?"]}\n')
    (folder / "eval.yaml").write_text(
        json.dumps({"benchmarks": [str(folder / "sums.jsonl")], "device": "cpu"})
    )
    return folder


def train(workspace: Path, run_dir: Path, *more: str) -> None:
    options = ("--evaluation.config", str(workspace / "eval.yaml"), "--export.steps", "[1]", *more)
    distill.main(distill_arguments(workspace, run_dir, *options, steps=2))


def put_sbatch(folder: Path, monkeypatch, script: str) -> None:
    """Let `sbatch` be a Python script, alone on the PATH."""
    folder.mkdir()
    (folder / "sbatch").write_text(f"#!{sys.executable}\n{script}")
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_a_cluster_without_sbatch_costs_a_warning_with_the_command_and_no_training(
    workspace, tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("PATH", str(tmp_path))
    run_dir = tmp_path / "run"
    train(workspace, run_dir, "--evaluation.mode", "slurm",
          "--evaluation.sbatch_options", '["--gpus-per-node=1", "--time=30"]')
    assert (run_dir / "drafter/latest").resolve().name == "step-00000002"
    warnings = [line for line in capfd.readouterr().err.splitlines() if "warning:" in line]
    assert len(warnings) == 2 and "there is no sbatch here" in warnings[0]
    export = f"{run_dir}/drafter/step-00000001"
    assert f"no evaluation of {export}" in warnings[0]
    command = shlex.split(warnings[0].split("by hand: ")[1])
    script = command.index("slurm/eval_spec.sh")
    assert {"--gpus-per-node=1", "--time=30", "--job-name=eval-run"} <= set(command[:script])
    assert command[script + 1 :] == [
        "--batch_size", "8", "--config", str(workspace / "eval.yaml"),
        "--target", str(workspace / "target"), "--out", f"{run_dir}/eval", "--checkpoint", export,
    ]


def test_a_job_inherits_nothing_of_its_submitters_place(tmp_path, monkeypatch):
    for name, value in {**PLACE, "CUDA_VISIBLE_DEVICES": "5", "SLURM_CONF": "/c"}.items():
        monkeypatch.setenv(name, value)
    told = tmp_path / "told"
    script = TELL_ENVIRONMENT.format(path=str(told)) + "print('1234;cluster')"
    put_sbatch(tmp_path / "bin", monkeypatch, script)
    assert submit_job(["--target", "T"], ["--time=30"], "eval-x") == ("job 1234;cluster", True)
    arguments, environment = json.loads(told.read_text())
    assert arguments[-4:] == ["--time=30", "slurm/eval_spec.sh", "--target", "T"]
    assert "--dependency=singleton" in arguments
    assert not environment.keys() & {*PLACE, "CUDA_VISIBLE_DEVICES"}
    assert environment["SLURM_CONF"] == "/c"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            "import sys; sys.exit('sbatch: error: invalid\\n partition')",
            "code 1: sbatch: error: inv",
        ),
        ("import sys; sys.exit(2)", "code 2: it said nothing"),
        ("import time; time.sleep(60)", "did not answer for 2 s"),
    ],
)
def test_a_submission_that_fails_says_why_in_one_line(tmp_path, monkeypatch, script, reason):
    put_sbatch(tmp_path / "bin", monkeypatch, script)
    if "sleep" in script:
        monkeypatch.setattr(launch, "SUBMIT_TIMEOUT_S", 2)
    told, submitted = submit_job(["--out", "a b"], [], "eval-x")
    assert not submitted and reason in told and "\n" not in told
    assert told.endswith("slurm/eval_spec.sh --out 'a b'")


def test_an_evaluation_process_gets_the_gpus_that_it_is_given(workspace, tmp_path, monkeypatch):
    told = tmp_path / "told"
    (tmp_path / "tells.py").write_text(TELL_ENVIRONMENT.format(path=str(told)))
    monkeypatch.setattr(callbacks, "EVALUATION", (sys.executable, str(tmp_path / "tells.py")))
    train(workspace, tmp_path / "run", "--evaluation.mode", "process",
          "--evaluation.visible_devices", "1")
    arguments, environment = json.loads(told.read_text())
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert arguments[-1] == f"{tmp_path}/run/drafter/step-00000002"


def test_waiting_for_evaluations_can_be_interrupted():
    """The training is over by then, and there is nothing to save."""

    class Endless:
        def wait(self) -> int:
            raise KeyboardInterrupt

    evaluation = EvaluateExports(mode="process")
    evaluation.out = Path("run/eval")
    evaluation._processes.append(("drafter/step-1", Endless()))
    rest = r"training is done: eval_spec\.py --run run --batch_size 8 completes the rows"
    with pytest.raises(Interrupted, match=rest) as stopped:
        evaluation.finish()
    assert stopped.value.exit_code == 130


def test_an_evaluation_process_is_alone_whatever_its_training_was_launched_by(
    tmp_path, monkeypatch
):
    for name, value in {**PLACE, "CUDA_VISIBLE_DEVICES": "5"}.items():
        monkeypatch.setenv(name, value)
    told = tmp_path / "told"
    (tmp_path / "tells.py").write_text(TELL_ENVIRONMENT.format(path=str(told)))
    assert start_process([sys.executable, str(tmp_path / "tells.py")], [], None).wait() == 0
    _, environment = json.loads(told.read_text())
    assert not environment.keys() & PLACE.keys() and environment["CUDA_VISIBLE_DEVICES"] == "5"


def test_an_evaluation_process_ends_when_its_training_is_killed(tmp_path):
    script, told = tmp_path / "waits.py", tmp_path / "told"
    script.write_text(
        f"import os, time; open({str(told)!r}, 'w').write(str(os.getpid())); time.sleep(120)"
    )
    starting = (
        "import sys, time; from stree_pipelines.evaluation.launch import start_process; "
        f"start_process([sys.executable, {str(script)!r}], [], None); time.sleep(120)"
    )
    parent = subprocess.Popen([sys.executable, "-c", starting])
    wait_until(lambda: told.is_file() and told.read_text(), lambda: "the child's number")
    child = Path("/proc", told.read_text())
    assert is_running(child)
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_running(child), lambda: f"the end of {child}")


def is_running(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("trains_on", "asked", "evaluates_on"),
    [
        ("cuda:1", "auto", "cuda:1"), ("cuda:1", "cuda", "cuda:1"), ("cuda:1", "cuda:0", "cuda:0"),
        ("cuda:1", "cpu", "cpu"), ("cpu", "auto", "auto"),
    ],
)
def test_an_inline_evaluation_is_on_the_gpu_that_trains(
    tmp_path, monkeypatch, trains_on, asked, evaluates_on
):
    """The process's number does not matter: the first one may train on the second GPU."""
    config, found = tmp_path / "eval.yaml", []
    config.write_text(f"benchmarks: [x]\ndevice: {asked}\n")
    callback = EvaluateExports(mode="inline", config=str(config))
    callback.target, callback.out, callback.exports = "target", tmp_path, Exports()
    monkeypatch.setattr(
        "stree_pipelines.evaluation.evaluate.Evaluation",
        lambda settings: found.append(settings.device),
    )
    strategy = SimpleNamespace(root_device=torch.device(trains_on))
    callback.setup(SimpleNamespace(strategy=strategy), None, "fit")
    assert found == [evaluates_on]


def test_options_of_one_mode_are_refused_in_another():
    with pytest.raises(UsageError, match=r"evaluation\.visible_devices is an option of process"):
        EvaluateExports(mode="inline", visible_devices="1")
    with pytest.raises(UsageError, match=r"evaluation\.sbatch_options is an option of slurm"):
        EvaluateExports(mode="process", sbatch_options=["--time=1"])
