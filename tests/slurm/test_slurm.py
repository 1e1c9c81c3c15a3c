"""The scripts of slurm/ on a real cluster: a preempted run is requeued and finishes."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from run_checks import assert_same_state
from slurm_cluster import IS_INSTALLED, REPOSITORY, SlurmCluster, running_cluster, wait_until
from tiny_run import distill_arguments, make_workspace, metric_rows

from stree_pipelines.evaluation.result_store import ResultStore
from stree_pipelines.training.run.run_folder import take_run_folder

STEPS = 300
SCRIPTS = sorted((REPOSITORY / "slurm").glob("*.sh"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    if not IS_INSTALLED:
        pytest.skip("needs Slurm: apt-get install slurm-wlm munge")
    with running_cluster() as started:
        yield started


def last_step(run_dir: Path) -> int:
    """The last step that metrics.csv has, 0 before there is any."""
    if not (run_dir / "metrics.csv").is_file():
        return 0
    with open(run_dir / "metrics.csv", newline="", encoding="utf-8") as file:
        steps = [row["step"] for row in csv.DictReader(file)]
    return int(steps[-1]) if steps and steps[-1] else 0


def write_prompts(path: Path, count: int) -> None:
    prompts = [{"id": str(i), "turns": [f"What is {i} plus 2?"]} for i in range(count)]
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))


def checkpoints(run_dir: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*"))


def kill_rank(rank: int, run_dir: Path) -> None:
    """SIGKILL to a job's task, which a batch script's own processes are not."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text().split("\0")
            environment = (process / "environ").read_text().split("\0")
        except OSError:
            continue  # it has just ended, or is not ours
        is_python = "python" in Path(command[0]).name
        if is_python and str(run_dir) in command and f"SLURM_PROCID={rank}" in environment:
            found.append(int(process.name))
    assert found, f"no process has rank {rank} of {run_dir}"
    for pid in found:
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def submit(cluster, tmp_path) -> Callable[[Path, int], str]:
    """Starts a training of two nodes in a run folder."""
    workspace = make_workspace(tmp_path)

    def start(run_dir: Path, steps: int, *sbatch_options: str) -> str:
        fit, *arguments = distill_arguments(
            workspace, run_dir, "--trainer.limit_val_batches", "0",
            # Saves nothing of its own accord: what is there to go on from, the signal has saved.
            "--checkpoint.every_n_steps", "1000", steps=steps,
        )
        assert fit == "fit"
        return cluster.sbatch("--nodes=2", *sbatch_options, "slurm/distill.sh", *arguments)

    return start


def wait_for_step(step: int, cluster: SlurmCluster, job: str, run_dir: Path) -> None:
    wait_until(
        lambda: last_step(run_dir) >= step,
        lambda: f"step {step}\n{cluster.output_of(job)}",
        timeout_s=120,
    )


def send_usr1(cluster: SlurmCluster, job: str, run_dir: Path, *options: str) -> int:
    """Send what --signal=USR1@300 sends; return the step that the job saves for it."""
    cluster.run("scancel", "--signal=USR1", *options, job)
    wait_until(lambda: len(checkpoints(run_dir)) == 1, lambda: cluster.output_of(job), 60)
    (saved,) = checkpoints(run_dir)
    assert saved >= 10
    return saved


def test_two_nodes_save_at_the_signal_are_requeued_and_finish(cluster, submit, tmp_path):
    run_dir = tmp_path / "run"
    job = submit(run_dir, 100)
    wait_for_step(10, cluster, job, run_dir)
    saved = send_usr1(cluster, job, run_dir)
    cluster.wait_for_success(job)
    assert cluster.state_of(job)["Restarts"] == "1"
    output = cluster.output_of(job)
    assert f"SIGUSR1 after step {saved};" in output
    assert output.count("resuming from") == 1 and output.count("rows on 2 processes\n") == 2
    assert [int(row["step"]) for row in metric_rows(run_dir)] == list(range(1, 101))


def test_usr1_to_all_processes_of_a_job_stops_no_shell(cluster, submit, tmp_path):
    """`scancel --full` reaches the script itself, which has to requeue what was saved."""
    run_dir = tmp_path / "run"
    job = submit(run_dir, 100)
    wait_for_step(10, cluster, job, run_dir)
    send_usr1(cluster, job, run_dir, "--full")
    cluster.wait_for_success(job)
    assert cluster.state_of(job)["Restarts"] == "1", cluster.output_of(job)
    assert [int(row["step"]) for row in metric_rows(run_dir)] == list(range(1, 101))


def test_of_an_array_in_one_run_folder_one_trains_and_the_others_end(cluster, submit, tmp_path):
    """They say so in one line, and are not requeued."""
    run_dir = tmp_path / "run"
    output = f"--output={cluster.folder}/job-%A_%a.out"
    job = submit(run_dir, 1000, "--nodes=1", "--array=1-2", output)
    tasks = [f"{job}_1", f"{job}_2"]
    states = [cluster.wait_for_end(task)["JobState"] for task in tasks]
    said = "".join(map(cluster.output_of, tasks))
    assert sorted(states) == ["COMPLETED", "FAILED"], said
    (error,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert f"another training is running in {run_dir}" in error and "Traceback" not in said
    failed = cluster.state_of(tasks[states.index("FAILED")])
    assert (failed["ExitCode"], failed["Restarts"]) == ("2:0", "0")
    assert [int(row["step"]) for row in metric_rows(run_dir)] == list(range(1, 1001))


def test_all_processes_of_a_job_whose_run_folder_is_taken_end_by_themselves(
    cluster, submit, tmp_path
):
    """Only the first one looks at the lock."""
    run_dir = tmp_path / "run"
    with take_run_folder(run_dir):
        job = submit(run_dir, 100)
        state = cluster.wait_for_end(job, timeout_s=60)
    said = cluster.output_of(job)
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "143:0"), said
    assert state["Restarts"] == "0" and said.count("error: another training is running") == 1


@pytest.mark.long  # twelve starts of Python
def test_two_nodes_are_preempted_requeued_and_finish_the_same_run(cluster, submit, tmp_path):
    """Stopped by the signal that comes before the time is up, by Slurm, and by a task's death."""
    preempted, whole = tmp_path / "run-1", tmp_path / "run-2"
    write_prompts(tmp_path / "prompts.jsonl", count=4)
    job, reference = submit(preempted, STEPS), submit(whole, STEPS)
    evaluation = cluster.sbatch(
        "--nodes=2", "--array=1", f"--dependency=afterok:{job}", "slurm/eval_spec.sh",
        "--run", f"{tmp_path}/run-%a", "--benchmarks", str(tmp_path / "prompts.jsonl"),
        "--limit", "4", "--temperatures", "0", "--max-new-tokens", "8", "--device", "cpu",
    )

    wait_for_step(10, cluster, job, preempted)
    first = send_usr1(cluster, job, preempted)
    wait_for_step(first + 10, cluster, job, preempted)
    cluster.run("scontrol", "requeue", job)
    wait_until(lambda: len(checkpoints(preempted)) == 2, lambda: cluster.output_of(job), 60)
    wait_for_step(checkpoints(preempted)[-1] + 10, cluster, job, preempted)
    kill_rank(1, preempted)
    cluster.wait_for_success(reference)
    cluster.wait_for_success(job)

    assert cluster.state_of(job)["Restarts"] == "3"
    output = cluster.output_of(job)
    assert "SIGUSR1 after step" in output and "SIGTERM after step" in output
    assert output.count("resuming from") == 3 and output.count("rows on 2 processes\n") == 4
    assert metric_rows(preempted) == metric_rows(whole)
    assert_same_state(*(run / f"checkpoints/step-{STEPS:08d}" for run in (preempted, whole)))

    cluster.wait_for_success(evaluation)
    store = ResultStore(preempted / "eval")
    rows = store.results()
    exports = {int(path.name[5:]) for path in (preempted / "drafter").glob("step-*")}
    assert {(row.step, row.method) for row in rows} == {(None, "autoregressive")} | {
        (step, method) for step in exports for method in ("vanilla_sd", "stree")
    }
    assert all(len(store.samples(row)) == 4 for row in rows)
    assert all(row.environment.num_processes == 2 for row in rows)


def test_a_training_submits_its_evaluations_and_the_gate_fails_a_worse_checkpoint(
    cluster, tmp_path
):
    """Each export's evaluation is a job of its own, for which the training does not wait. The
    gate's job ends with the gate's code: a drafter of one step is worse than the target itself."""
    workspace, run_dir = make_workspace(tmp_path), tmp_path / "run"
    write_prompts(tmp_path / "prompts.jsonl", count=8)
    options = {
        "benchmarks": [str(tmp_path / "prompts.jsonl")], "temperatures": [0.0],
        "methods": ["autoregressive", "stree"], "max_new_tokens": 8, "device": "cpu",
    }
    (tmp_path / "eval.yaml").write_text(yaml.safe_dump(options))
    output = f"--output={cluster.folder}/job-%j.out"
    fit, *arguments = distill_arguments(
        workspace, run_dir, "--export.steps", "[1]", "--evaluation.mode", "slurm",
        "--evaluation.config", str(tmp_path / "eval.yaml"),
        "--evaluation.sbatch_options", json.dumps([output]), steps=2,
    )
    assert fit == "fit"
    training = cluster.sbatch("slurm/distill.sh", *arguments)
    cluster.wait_for_success(training)
    said = cluster.output_of(training)
    evaluations = re.findall(r"evaluation of \S+/step-0000000[12]: job (\d+)", said)
    assert len(evaluations) == 2, said
    gate = cluster.sbatch(
        "slurm/benchmark_checkpoint.sh", str(run_dir / "drafter/step-00000001"),
        "--baseline", str(workspace / "target"), "--target", str(workspace / "target"),
        "--config", str(tmp_path / "eval.yaml"), "--fail_below", "acceptance_length=-3%",
        "--out", str(tmp_path / "gate"),
    )
    for job in evaluations:
        cluster.wait_for_success(job)
    rows = ResultStore(run_dir / "eval").results()
    assert {(row.step, row.method) for row in rows} == {
        (None, "autoregressive"), (1, "stree"), (2, "stree"),
    }
    state = cluster.wait_for_end(gate)
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "70:0"), cluster.output_of(gate)
    assert (tmp_path / "gate/summary.md").read_text().startswith("## Checkpoint benchmark: regr")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_hold_no_logic(script):
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    lines = script.read_text(encoding="utf-8").splitlines()
    first_words = {line.split()[0] for line in lines if line.strip()}
    assert not first_words & {"if", "for", "while", "case", "function"}
