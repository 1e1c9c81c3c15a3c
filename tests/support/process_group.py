"""Several processes of a training, as a cluster's launcher would start them."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path

from ports import free_port

from stree.errors import exit_with_reason

TIMEOUT_S = 240.0


def run_together(
    count: int, main: Callable[[list[str]], object], arguments: list[str], log: Path
) -> list[int | None]:
    """Run `main(arguments)` in `count` processes that find each other; their exit codes.

    What rank r prints is in `log`.r. The processes are forked from a server that has imported the
    pipeline once; None is the code of one that had to be ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stree_pipelines.distill"])
    port = free_port()
    processes = [
        context.Process(target=_run, args=(rank, port, main, arguments, f"{log}.{rank}"))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


def _run(
    rank: int, port: int, main: Callable[[list[str]], object], arguments: list[str], log: str
) -> None:
    os.environ.update(
        LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1"
    )
    from lightning.pytorch.utilities import rank_zero_only

    rank_zero_only.rank = rank  # read from the environment at the import, which came before
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.argv = ["distill.py", *arguments]
    exit_with_reason(lambda: main(arguments))
