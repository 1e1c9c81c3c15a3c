"""Time functions interleaved, and write rows of results with their environment."""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stree import metrics
from stree.batching.runners import CudaGraph
from stree.common.files import write_atomically
from stree_pipelines.evaluation.context import describe_environment

Row = dict[str, Any]
Times = dict[str, dict[str, float]]  # by function: median, p20 and p80 in µs


def side_by_side(
    functions: Mapping[str, Callable[[], object]], device: torch.device, repeats: int
) -> Times:
    """Time functions interleaved, `repeats` times each: median, p20 and p80 in µs.

    On CUDA each is a graph, timed by events; on the CPU it is called and the clock is read.
    """
    if device.type == "cuda":
        captures = {name: CudaGraph(device, each) for name, each in functions.items()}
        functions = {name: capture.graph.replay for name, capture in captures.items()}
    return interleave(functions, device, repeats)


def interleave(
    functions: Mapping[str, Callable[[], object]], device: torch.device, repeats: int
) -> Times:
    """Time functions interleaved without graphs; on CUDA they launch work that the host need not
    await."""
    times = interleaved_times(functions, device, repeats)
    return {name: spread(each) for name, each in times.items()}


def per_layer(times: Times, layers: int) -> Times:
    """Divide the times of several layers' calls by their number."""
    return {
        name: {key: value / layers for key, value in each.items()} for name, each in times.items()
    }


def us_fields(times: Times) -> dict[str, Any]:
    """Return the times as fields of a row."""
    return {f"us_{name}": each for name, each in times.items()}


def interleaved_times(
    functions: Mapping[str, Callable[[], object]], device: torch.device, repeats: int
) -> dict[str, list[float]]:
    """Return the µs of each function in each turn."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 2):
        for name, function in functions.items():
            elapsed = elapsed_us(function, device)
            if turn >= 2:  # the first turns warm up
                times[name].append(elapsed)
    return times


def spread(values: list[float]) -> dict[str, float]:
    """Return median, p20 and p80."""
    ordered, fifth = sorted(values), len(values) // 5
    return dict(median=statistics.median(ordered), p20=ordered[fifth], p80=ordered[-1 - fifth])


def ratio_by_turn(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Return `spread` of the ratio in each turn, and the ends of its median's 95 % interval.

    The interval is a bootstrap over turns; a single turn has none.
    """
    ratios_Q = np.array(over) / np.array(under)
    interval = metrics.bootstrap_interval(
        lambda i_RQ: np.median(ratios_Q[i_RQ], axis=1), len(ratios_Q)
    )
    ends = {} if interval is None else dict(zip(("low", "high"), interval, strict=True))
    return {**spread(ratios_Q.tolist()), **ends}


def elapsed_us(function: Callable[[], object], device: torch.device) -> float:
    """Time a function in µs by the device's clock, once the host has had time to launch it all."""
    if device.type != "cuda":
        start = time.perf_counter()
        function()
        return (time.perf_counter() - start) * 1e6
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)  # half a millisecond, in which the host launches everything
    before.record()
    function()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) * 1e3


def peak_field(
    name: str, run: Callable[[], object], device: torch.device, held_bytes: int
) -> dict[str, int]:
    """Return a row's field of the most bytes that PyTorch holds at once during a call.

    The field is {} on a CPU, whose bytes PyTorch does not count.

    Args:
        name: Of the field.
        run: Makes all that it needs except for what is held already. It is called twice: the first
            call may choose among kernels, which holds bytes that no later one does.
        device: Of the call.
        held_bytes: Bytes of the weights that the call reads, which are there before it.
    """
    if device.type != "cuda":
        return {}
    run()
    release_memory(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return {name: held_bytes + torch.cuda.max_memory_allocated(device) - before}


def release_memory(device: torch.device) -> None:
    """Free the last models' memory: they and their graphs point at each other."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def write_rows(path: str | Path, rows: Iterable[Row], device: torch.device) -> list[Row]:
    """Print each row when it is there, and save all rows so far, with commit, device and
    versions."""
    done: list[Row] = []
    for row in rows:
        made_by = describe_environment(device, {}, 1).model_dump(mode="json")
        done.append({**row, "environment": made_by})
        save_rows(path, done)
        print(" ".join(f"{key}={_short(value)}" for key, value in row.items()), flush=True)
    return done


def save_rows(path: str | Path, rows: Iterable[Row]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    write_atomically(path, "\n".join(lines) + "\n")


def _short(value: Any) -> str:
    if isinstance(value, dict):  # times, or the times of several
        return "/".join(
            f"{name} {_short(each)}"
            if isinstance(each, dict)
            else f"{each:.{1 if each >= 100 else 3}f}"
            for name, each in value.items()
        )
    return f"{value:.3f}" if isinstance(value, float) else str(value)
