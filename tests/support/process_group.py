"""Start several processes of one distillation, as a cluster's launcher would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import forked
from ports import free_port

Before = tuple[str, Mapping[str, Any]]


def start_together(
    forks: forked.Forks, count: int, arguments: list[str], log: Path,
    before: Sequence[Before | None] | None = None,
) -> list[forked.Command]:
    """Start `distill.py arguments` in `count` processes that find each other.

    Rank r's output goes to the file `log`.r; `before` has what `Forks.start` takes, for each rank.
    """
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    ranks = []
    for rank, first in enumerate(before or [None] * count):
        output = Path(f"{log}.{rank}")
        output.unlink(missing_ok=True)
        environment = {**group, "LOCAL_RANK": str(rank)}
        ranks.append(
            forks.start(forked.DISTILL, arguments, output, before=first, environment=environment)
        )
    return ranks


def run_together(*arguments: Any, **options: Any) -> list[int]:
    """Start processes as `start_together` does, wait for all, and return their exit codes."""
    return [rank.wait() for rank in start_together(*arguments, **options)]
