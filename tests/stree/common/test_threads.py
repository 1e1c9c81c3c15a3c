"""Threads are set before torch is loaded, whatever is imported first."""

import os
import subprocess
import sys
from pathlib import Path

from stree.common.threads import granted_cores

import pytest
import torch
from toys import Streamer, tiny_model

from stree import Decoder, GenerationConfig

ROOT = Path(__file__).parents[3]
COMMANDS = sorted(
    path for path in (ROOT / "pipelines").glob("*.py") if "__main__" in path.read_text()
)
QUICK = ("chat", "distill", "report")  # the others are `long`
# Ends where torch is first asked for, and says what it would find
WATCH = """
import os, runpy, sys
class Watch:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Watch())
"""


def policy_when_torch_is_loaded(code: str, **environment: str) -> str:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("OMP_")}
    result = subprocess.run(
        [sys.executable, "-c", WATCH + code],
        env={**inherited, **environment}, cwd=ROOT, capture_output=True, text=True, check=True,
    )
    return result.stdout.strip()


@pytest.mark.parametrize(
    "command",
    [pytest.param(each, id=each.stem, marks=[] if each.stem in QUICK else pytest.mark.long)
     for each in COMMANDS],
)
def test_threads_of_every_command_wait_passively(command):
    run = f"sys.argv = [{str(command)!r}]\nrunpy.run_path({str(command)!r}, run_name='imported')"
    assert policy_when_torch_is_loaded(run) in ("PASSIVE", "")  # "": it does not load torch


def test_threads_of_the_library_wait_passively_unless_told_otherwise():
    assert policy_when_torch_is_loaded("import stree; stree.load") == "PASSIVE"
    assert (
        policy_when_torch_is_loaded("import stree; stree.load", OMP_WAIT_POLICY="ACTIVE")
        == "ACTIVE"
    )


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/job", {"cpu.max": "150000 100000", "job/cpu.max": "max 100000"}, 1.5),
        ("0::/job/step", {"job/cpu.max": "400000 100000", "job/step/cpu.max": "50000 100000"}, 0.5),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("4:cpuacct,cpu:/job", {"cpu/job/cpu.cfs_quota_us": "200000",
                                "cpu/job/cpu.cfs_period_us": "100000"}, 2),
        ("4:cpu:/job", {"cpu/job/cpu.cfs_quota_us": "-1",
                        "cpu/job/cpu.cfs_period_us": "100000"}, None),
        ("4:memory:/job", {"memory/job/cpu.max": "100000 100000"}, None),
    ],
    ids=["parent", "nearest", "unlimited", "v1", "v1-unlimited", "memory"],
)
def test_cores_granted_by_the_control_group(tmp_path, membership, files, cores):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(membership + "\n")
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert granted_cores(tmp_path) == cores


def test_no_control_groups_are_no_limit(tmp_path):
    assert granted_cores(tmp_path) is None


@pytest.fixture
def two_threads():
    usual = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(usual)


@pytest.mark.parametrize(("shared_from", "expected"), [(0, 2), (2**40, 1)])
def test_small_targets_decode_in_one_thread(two_threads, monkeypatch, shared_from, expected):
    monkeypatch.setattr("stree.common.threads.SHARED_FROM_BYTES", shared_from)
    seen = []
    streamer = Streamer(lambda value: seen.append(torch.get_num_threads()))
    Decoder(tiny_model(1)).generate([1, 2], GenerationConfig(3), streamer=streamer)
    assert seen[1:] == [expected] * 3
    assert torch.get_num_threads() == 2


BUSY = "while True: pass"
DECODING = """
import stree, statistics
decoder = stree.load("checkpoints/python-docs-hybrid")
generation = stree.GenerationConfig(64, ignore_eos=True)
outputs = [decoder.generate([5, 6, 7], generation) for _ in range(6)]
print(statistics.median(each.stats.decode_s for each in outputs[1:]))
"""


@pytest.mark.long
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_one_busy_core_does_not_stop_decoding():
    """Threads that spin took 5 to 25 times as long."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OMP_")}

    def seconds() -> float:
        command = [sys.executable, "-c", DECODING]
        return float(subprocess.check_output(command, cwd=ROOT, env=environment, text=True))

    quiet = seconds()
    core = min(os.sched_getaffinity(0))
    busy = subprocess.Popen(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}})\n{BUSY}"]
    )
    try:
        assert seconds() < 2.5 * quiet
    finally:
        busy.kill()
        busy.wait()
