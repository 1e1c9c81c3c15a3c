"""Several processes of an evaluation under torchrun: one dies, torchrun ends the others, and the
same command with any number of processes ends with each prompt once and the rows of one process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import forked
import pytest
from lanes import quick_first
from ports import free_port
from run_checks import ranks_of, table_without_timings

from stree_pipelines.evaluation.result_store import ResultStore

NUM_PROMPTS = 6
LEAVE_WITHIN_S = 60.0

pytestmark = pytest.mark.timeout(900)  # a busy machine only


@pytest.fixture(scope="module")
def arguments(training, tmp_path_factory) -> list[str]:
    """Return arguments for one export at T = 0."""
    path = tmp_path_factory.mktemp("prompts") / "sums.jsonl"
    rows = [
        {"id": str(i), "category": "sums", "turns": [f"What is {i} plus 1?"]}
        for i in range(NUM_PROMPTS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "--target", str(training.workspace / "target"),
        "--checkpoint", str(training.whole / "drafter/step-00000005"),
        "--benchmarks", str(path), "--temperatures", "0", "--max-new-tokens", "6",
        "--device", "cpu", "--ignore-eos",
    ]


def start(forks, arguments: list[str], out: Path, count: int) -> list[forked.Command]:
    port = free_port()
    together = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    places = [{**together, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    return [
        forks.start(
            forked.EVAL_SPEC, [*arguments, "--out", str(out)],
            out.with_name(f"{out.name}-{count}.{rank}"),
            environment=place if count > 1 else None,
        )
        for rank, place in enumerate(places)
    ]


def journalled(out: Path, rank: int) -> int:
    paths = out.glob(f"journals/*.worker-{rank:05d}.jsonl")
    return sum(path.read_bytes().count(b"\n") for path in paths)


@pytest.mark.costly
@pytest.mark.parametrize("victim, counts", quick_first([(2, (2,))], [(0, (1, 2, 3))]))
def test_whoever_dies_each_prompt_is_there_once(
    victim, counts, forks, arguments, tmp_path
):
    (alone,) = start(forks, arguments, tmp_path / "alone", 1)
    assert alone.wait() == 0, alone
    wanted = table_without_timings(tmp_path / "alone")

    out = tmp_path / "killed"
    said = tmp_path / "torchrun.log"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3",
        f"--master-port={free_port()}", str(forked.EVAL_SPEC), *arguments, "--out", str(out),
    ]
    with open(said, "w") as log:
        agent = subprocess.Popen(command, stdout=log, stderr=log)
    forked.wait_until(
        lambda: journalled(out, victim) > 0 or agent.poll() is not None, said.read_text
    )
    workers = ranks_of(agent.pid)
    assert workers.keys() == {0, 1, 2}, said.read_text()
    os.kill(workers[victim], signal.SIGKILL)
    assert agent.wait(LEAVE_WITHIN_S) == 1, said.read_text()
    assert not any(Path("/proc", str(pid)).exists() for pid in workers.values())
    assert f"local_rank: {victim}" in said.read_text() and "SIGKILL" in said.read_text()
    assert 0 < sum(journalled(out, rank) for rank in range(3)) < 3 * NUM_PROMPTS

    for count in counts:
        again = tmp_path / f"again-{count}"
        shutil.copytree(out, again)
        for worker in start(forks, arguments, again, count):
            assert worker.wait() == 0, worker
        assert table_without_timings(again) == wanted
        store = ResultStore(again)
        for row in store.results():
            ids = Counter(sample.prompt_id for sample in store.samples(row))
            assert ids == Counter({str(i): 1 for i in range(NUM_PROMPTS)})


@pytest.mark.costly
def test_an_error_that_all_have_is_told_as_it_is(forks, arguments, tmp_path):
    """No worker is blamed for leaving first."""
    workers = start(forks, [*arguments, "--dtype", "float8"], tmp_path / "out", 2)
    assert [worker.wait() for worker in workers] == [2, 2], workers
    assert all("dtype is 'float8', wanted auto or one of" in each.text() for each in workers)
    assert not any("is gone" in worker.text() for worker in workers)
