"""Start the evaluation of an export during the training: as a process, or as a Slurm job."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence

# In the repository's folder, from which jobs are submitted (slurm/README.md).
JOB_SCRIPT = "slurm/eval_spec.sh"
# For submitting only; a controller that is down must not hold the training up for longer.
SUBMIT_TIMEOUT_S = 60
# A launcher's variables about the place of a training's process, which no other process has.
_PLACE = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK",
    "MASTER_ADDR", "MASTER_PORT",
)
_PLACE_PREFIXES = ("SLURM_", "TORCHELASTIC_", "PMI_", "PMIX_")
_SLURM_SETUP = "SLURM_CONF"  # where the cluster is, not where in it we are


_LIBC = ctypes.CDLL(None)  # loaded before a fork, after which nothing may be imported
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent ends (`preexec_fn` of a Popen).

    Does nothing where the system has no such signal (Linux has).
    """
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def start_process(
    command: Sequence[str], arguments: Sequence[str], visible_devices: str | None
) -> subprocess.Popen:
    """Run the evaluation in a process of its own, which ends when this one is killed.

    command: program and subcommand of the evaluation.
    visible_devices: its CUDA_VISIBLE_DEVICES; None: the GPUs of this process.
    """
    environment = _without_place(dict(os.environ))
    if visible_devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible_devices
    return subprocess.Popen(
        [*command, *arguments], env=environment, preexec_fn=end_with_parent
    )


def submit_job(arguments: Sequence[str], options: Sequence[str], name: str) -> tuple[str, bool]:
    """Submit the evaluation to Slurm; returns a message, and True when it was submitted.

    Jobs of one name run one after the other: evaluations of one folder would wait for each other
    anyway, each with its GPUs. Never raises: the evaluation can be submitted by hand as well.
    """
    command = [
        "sbatch", "--parsable", f"--job-name={name}", "--dependency=singleton", *options,
        JOB_SCRIPT, *arguments,
    ]
    environment = _without_place(dict(os.environ))
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # of the training's node
    try:
        answer = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace",
            timeout=SUBMIT_TIMEOUT_S, check=False,
        )
    except FileNotFoundError:
        reason = "there is no sbatch here"
    except subprocess.TimeoutExpired:
        reason = f"sbatch did not answer for {SUBMIT_TIMEOUT_S} s (squeue tells if it did submit)"
    except OSError as error:
        reason = f"sbatch cannot be run: {error.strerror}"
    else:
        if answer.returncode == 0:
            return f"job {answer.stdout.strip()}", True
        said = " ".join(answer.stderr.split()) or "it said nothing"
        reason = f"sbatch ended with code {answer.returncode}: {said}"
    return f"{reason}; by hand: {shlex.join(command)}", False


def _without_place(environment: dict[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name == _SLURM_SETUP or (name not in _PLACE and not name.startswith(_PLACE_PREFIXES))
    }
