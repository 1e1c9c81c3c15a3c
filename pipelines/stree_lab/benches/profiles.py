"""Profile a call kernel by kernel. Rows are those of `bench_decode.py`."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from stree.batching.runners import CudaGraph

PRODUCTS = re.compile(r"nvjet|cublas|cutlass|gemm|gemv", re.IGNORECASE)
WAITING = "nothing"
Event = tuple[float, float, str]  # start and end in µs, name


def exposed(events: Iterable[Event]) -> dict[str, dict[str, float]]:
    """Sum the µs by kind of kernel in which nothing that began earlier ran, and count launches.

    These and the time in which nothing ran at all, `WAITING`, add up to the whole.
    """
    kinds: dict[str, dict[str, float]] = {}

    def add(kind: str, us: float, count: int) -> None:
        sums = kinds.setdefault(kind, dict(us=0.0, count=0))
        sums["us"] += us
        sums["count"] += count

    last = None
    for start, end, name in sorted(events):
        last = start if last is None else last
        if start > last:
            add(WAITING, start - last, 1)
        add(kind_of(name), max(0.0, end - max(start, last)), 1)
        last = max(last, end)
    return kinds


def kind_of(kernel: str) -> str:
    """Return a kernel's name without template arguments; NVIDIA's matrix products are one kind."""
    if PRODUCTS.search(kernel):
        return "matrix products"
    return kernel.removeprefix("void ").split("<")[0].split("(")[0].split("::")[-1]


def profile_call(call: Callable[[], object], repeats: int) -> dict[str, Any]:
    """Return medians over profiled replays of a call's graph: {"us": whole, "kernels": by kind}."""
    replay = CudaGraph(torch.device("cuda"), call).graph.replay
    for _ in range(3):
        replay()
    runs = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            replay()
            torch.cuda.synchronize()
        runs.append(exposed(
            (event.time_range.start, event.time_range.end, event.name)
            for event in recorded.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ))
    kinds = dict.fromkeys(kind for run in runs for kind in run)
    none = dict(us=0.0, count=0)
    kernels = {
        kind: {key: statistics.median(run.get(kind, none)[key] for run in runs) for key in none}
        for kind in kinds
    }
    return dict(us=sum(each["us"] for each in kernels.values()), kernels=kernels)
