"""Make small students and teachers for the losses, and measure how much memory a step takes."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stree_pipelines.training.losses.distillation_loss import (
    LossSpec,
    chunked_loss,
    counted_rows,
    teacher_of,
)


def distillation_loss(
    student_hidden, student_head, teacher, mask, labels=None, normalizer=None, **spec
):
    """Return `chunked_loss` by a `LossSpec` of the options `spec`."""
    rows = counted_rows(mask, student_hidden)
    return chunked_loss(
        student_hidden, student_head, teacher, rows, LossSpec(**spec), labels, normalizer
    )


def target_loss(student_hidden, student_head, teacher_hidden, teacher_head, mask, **options):
    """Return the same for a teacher of hidden states."""
    temperature = options.get("temperature", 1.0)
    rows = counted_rows(mask, teacher_hidden)
    teacher = teacher_of(teacher_hidden, teacher_head, rows, student_hidden, temperature)
    return distillation_loss(student_hidden, student_head, teacher, mask, **options)


def make_case(shape=(3, 21), vocab=97, student_width=12, teacher_width=20, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*size, scale=1.0):
        return torch.randn(*size, generator=generator) * scale

    return {
        "student_hidden": randn(*shape, student_width).requires_grad_(),
        "student_head": randn(vocab, student_width, scale=0.5).requires_grad_(),
        "teacher_hidden": randn(*shape, teacher_width),
        "teacher_head": randn(vocab, teacher_width, scale=0.5),
        "mask": torch.rand(shape, generator=generator) < 0.6,
    }, torch.randint(vocab, shape, generator=generator)


class StorageCounter(TorchDispatchMode):
    """Counts the bytes of all living storages that operations under this mode have made."""

    def __init__(self):
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {
            t.untyped_storage()._cdata
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage(), given)
        return out

    def _count(self, storage, given):
        key = storage._cdata
        if key in given or key in self.sizes:
            return
        self.sizes[key] = storage.nbytes()
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._free, key)

    def _free(self, key):
        self.live_bytes -= self.sizes.pop(key)


def peak_bytes(step) -> int:
    with StorageCounter() as counter:
        step()
    return counter.peak_bytes
