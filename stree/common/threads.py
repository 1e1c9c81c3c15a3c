"""Set how PyTorch's threads on a CPU wait, and how many there are; import it before torch.

OpenMP's threads wait for each other some hundred times a decoding step. By default they spin: if
another process needs one of the cores, all spin until it is free again, which made decoding and
training 5 to 25 times slower. The policy is read once, when torch is loaded. Settings of the user
stay.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from stree.common.control_groups import control_groups, lines_of

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

SHARED_FROM_BYTES = 2**28  # weights that a decoding step reads, from which on threads share them


def granted_cores(root: Path = Path("/")) -> float | None:
    """Return the cores that the control groups of this process may use; None without a quota.

    Containers and batch systems grant a share of a machine this way, which OpenMP does not see.
    """
    shares = []
    for version, folder in control_groups("cpu", root):
        names = ["cpu.max"] if version == 2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        numbers = " ".join(text for name in names for text in lines_of(folder / name)).split()
        if len(numbers) == 2 and numbers[0].isdigit():  # "max" and -1 are no limits
            shares.append(int(numbers[0]) / int(numbers[1]))
    return min(shares, default=None)


def _limit() -> None:
    granted = granted_cores()
    if granted is not None and granted < len(os.sched_getaffinity(0)):
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, int(granted))))


if hasattr(os, "sched_getaffinity"):  # Linux; OpenMP itself heeds the affinity
    _limit()


_small: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # asked for in each step


def _is_small(target: Any) -> bool:
    if not hasattr(target, "parameters"):
        return True
    if target not in _small:
        _small[target] = sum(each.nbytes for each in target.parameters()) < SHARED_FROM_BYTES
    return _small[target]


def for_decoding(target: Any, device: Any = None) -> contextlib.AbstractContextManager[None]:
    """Compute inside the block as decoding does, whatever PyTorch's modes outside.

    The target's GPU is the current one, autocast is off (the weights' dtype decides), and a small
    target on a CPU has one thread: its operations take less time than the threads' communication.
    device is the target's, where the caller knows it: to ask the model in each step takes time.
    """
    import torch

    from stree_kernels import ops

    device = device or target.device
    is_alone = torch.get_num_threads() > 1 and device.type == "cpu" and _is_small(target)
    if is_alone or torch.is_autocast_enabled(device.type):
        return _set_modes(device, is_alone)
    return ops.current(device)


@contextlib.contextmanager
def _set_modes(device: Any, is_alone: bool) -> Iterator[None]:
    import torch

    from stree_kernels import ops

    usual = torch.get_num_threads()
    is_mixed = torch.is_autocast_enabled(device.type)  # turning off what is off takes time
    autocast = torch.autocast(device.type, enabled=False) if is_mixed else contextlib.nullcontext()
    with ops.current(device), autocast:
        if is_alone:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            if is_alone:
                torch.set_num_threads(usual)


P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


def one_at_a_time(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Make a method wait until no other thread is in one of its object, by the object's `lock`."""

    @wraps(method)
    def alone(self: S, *arguments: P.args, **options: P.kwargs) -> T:
        with self.lock:  # type: ignore[attr-defined]
            return method(self, *arguments, **options)

    return alone
