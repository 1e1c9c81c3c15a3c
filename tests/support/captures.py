"""Stand in for CUDA graphs and events, so that captured steps can be tested without CUDA."""

from __future__ import annotations

import gc
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch

from stree_kernels import index_plan as places


def living_captures() -> set[int]:
    """Return the numbers of the stand-in captures that something still holds."""
    gc.collect()
    return {each.number for each in Replayed.living}


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Refuse what a CUDA graph cannot hold: values that the host reads.

    Plain PyTorch takes the CPU for a device whose values it may not read. Other threads go on.
    """
    thread, library = threading.get_ident(), torch.library.Library("aten", "IMPL", "CPU")

    def unless_refused(name: str, read: Callable[[torch.Tensor], Any]) -> None:
        def impl(tensor: torch.Tensor) -> Any:
            assert threading.get_ident() != thread, name
            return read(tensor)

        library.impl(name, impl)

    with (
        warnings.catch_warnings(action="ignore"),  # that the library replaces PyTorch's own
        mock.patch.object(places, "on_host", lambda _: False),
    ):
        unless_refused("_local_scalar_dense", torch.Tensor.tolist)
        unless_refused("nonzero", lambda tensor: torch.from_numpy(np.argwhere(tensor.numpy())))
        try:
            yield
        finally:
            library._destroy()


class Replayed:
    """Stands in for `CudaGraph`: its outputs are fixed tensors that each replay overwrites.

    A replay also overwrites the outputs of other captures that share its memory.
    """

    living: ClassVar[weakref.WeakSet[Replayed]] = weakref.WeakSet()
    numbers = itertools.count()

    def __init__(self, device, function, beside=None):
        self.living.add(self)
        self.sharing = weakref.WeakSet() if beside is None else beside.sharing
        self.sharing.add(self)
        self.number = next(self.numbers)
        function()
        self.function = function
        with nothing_waits():
            self.outputs = function()

    def replay(self):
        for other in self.sharing - {self}:
            for each in tensors_of(other.outputs):
                if torch.is_tensor(each):
                    each.fill_(torch.nan if each.is_floating_point() else -1)
        for mine, theirs in zip(tensors_of(self.outputs), tensors_of(self.function()), strict=True):
            if mine is not None and mine is not theirs:
                mine.copy_(theirs)
        return self.outputs


def tensors_of(outputs):
    """List the tensors in a capture's outputs, which are None, one tensor, or a proposal."""
    if outputs is None or torch.is_tensor(outputs):
        return [] if outputs is None else [outputs]
    return list(vars(outputs).values())


class Event:
    is_there = True

    def record(self): ...

    def query(self):
        return self.is_there

    def synchronize(self): ...
