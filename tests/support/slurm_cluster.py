"""Start a Slurm cluster on this host alone: munged, slurmctld and one slurmd per node.

The daemons run as the current user. Everything is under one temporary folder and on free ports, so
that it disturbs no real cluster.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ports import free_ports

REPOSITORY = Path(__file__).parents[2]
PROGRAMS = ("sbatch", "scontrol", "slurmctld", "slurmd", "munged")
# Debian keeps daemons where only root's PATH looks.
SEARCH_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
IS_INSTALLED = all(shutil.which(name, path=SEARCH_PATH) for name in PROGRAMS)

CONFIG = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
FirstJobId={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=2,bf_interval=2
KillWait=20
NodeName=node1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=node2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=main Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class SlurmCluster:
    """A running cluster with two nodes of one CPU each."""

    folder: Path
    environment: dict[str, str]

    def run(self, *command: str) -> str:
        """Run a Slurm command in the repository and return its output."""
        done = subprocess.run(
            command, cwd=REPOSITORY, env=self.environment, capture_output=True, text=True,
            check=False, timeout=30,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def sbatch(self, *arguments: str) -> str:
        """Submit a job, return its id; its output goes to `output_of`."""
        output = f"--output={self.folder}/job-%j.out"
        return self.run("sbatch", "--parsable", output, *arguments)

    def output_of(self, job: str) -> str:
        path = self.folder / f"job-{job}.out"
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    def state_of(self, job: str) -> dict[str, str]:
        """Return what `scontrol show job` says of a job: JobState, ExitCode, Restarts and more."""
        words = self.run("scontrol", "show", "job", "--oneliner", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_success(self, job: str, timeout_s: float = 120) -> None:
        """Return when the job is completed; fail as soon as it ends in any other way."""
        state = self.wait_for_end(job, timeout_s)
        assert state["JobState"] == "COMPLETED", f"{state}\n{self.output_of(job)}"

    def wait_for_end(self, job: str, timeout_s: float = 120) -> dict[str, str]:
        """Wait until a job has ended, in whatever way, and return its `state_of`."""
        unfinished = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")
        wait_until(
            lambda: self.state_of(job)["JobState"] not in unfinished,
            lambda: f"{job} at its end\n{self.output_of(job)}",
            timeout_s,
        )
        return self.state_of(job)


@contextmanager
def running_cluster() -> Iterator[SlurmCluster]:
    """Start the daemons, and stop them with all that they started."""
    with ExitStack() as stack:
        # A Unix socket's path has at most 107 characters; pytest's folders are too deep.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
        folder.chmod(0o755)
        (folder / "state").mkdir()
        for name in ("node1", "node2"):
            (folder / name).mkdir()
        config = folder / "slurm.conf"
        config.write_text(CONFIG.format(folder=folder, ports=free_ports(3), user=getpass.getuser()))
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        outer = {name: value for name, value in os.environ.items() if "SLURM" not in name}
        environment = {
            **outer,
            "PATH": SEARCH_PATH,
            "SLURM_CONF": str(config),
            # Names of the nodes are known to Slurm only.
            "STREE_MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "STREE_VENV": sys.prefix,
        }
        munge = [f"--{n}-file={folder}/munge.{n}" for n in ("key", "pid", "log", "seed")]
        socket_path = folder / "munge.sock"
        _start(
            stack, environment, "munged", "--foreground", "--force", f"--socket={socket_path}",
            *munge,
        )
        wait_until(socket_path.exists, lambda: "munged's socket", 10)
        _start(stack, environment, "slurmctld", "-D", "-i", "-f", str(config))
        for name in ("node1", "node2"):
            _start(stack, environment, "slurmd", "-D", "-N", name, "-f", str(config))
        cluster = SlurmCluster(folder, environment)
        query = ["sinfo", "--noheader", "--format=%D %t"]

        def is_idle() -> bool:
            answer = subprocess.run(query, env=environment, capture_output=True, text=True)
            return answer.stdout.strip() == "2 idle"

        wait_until(is_idle, lambda: f"two idle nodes\n{_logs(folder)}", 30)
        stack.callback(_cancel_all, cluster)
        yield cluster


def wait_until(holds: Callable[[], bool], wanted: Callable[[], str], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"after {timeout_s:g} s still not: {wanted()}"
        time.sleep(0.2)


def _start(stack: ExitStack, environment: dict[str, str], *command: str) -> None:
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    stack.callback(process.wait)
    stack.callback(process.terminate)


def _cancel_all(cluster: SlurmCluster) -> None:
    """Cancel all jobs, since the daemons leave running jobs alone when they stop."""
    cluster.run("scancel", f"--user={getpass.getuser()}")
    cluster.run("scancel", "--signal=KILL", "--full", f"--user={getpass.getuser()}")
    wait_until(lambda: not cluster.run("squeue", "--noheader"), lambda: "no jobs", 30)


def _logs(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.log"))
