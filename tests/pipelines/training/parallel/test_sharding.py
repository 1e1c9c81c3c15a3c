"""Sharded gradients are clipped by the norm of all parts, in one exchange."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from stree_pipelines.training.parallel.sharding import clip_norm


@pytest.fixture
def mesh(monkeypatch):
    """Make a mesh of two processes, of which the other has the same parts as this one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    exchanged = []

    def double(tensor, group):
        exchanged.append(tensor)
        tensor.mul_(2)

    monkeypatch.setattr(dist, "all_reduce", double)
    yield init_device_mesh("cpu", (1,)), exchanged
    dist.destroy_process_group()


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_sharded_gradients_are_clipped_in_one_exchange(mesh, max_norm):
    device_mesh, exchanged = mesh
    whole = [torch.randn(4, 3), torch.randn(5), torch.randn(2, 2, 2)]
    parts = [DTensor.from_local(each.clone(), device_mesh, [Shard(0)]) for each in whole]
    norm = clip_norm(parts, max_norm)
    wanted = torch.cat([each.flatten() for each in whole] * 2).norm()
    torch.testing.assert_close(norm, wanted)
    assert len(exchanged) == 1
    scale = min(1.0, max_norm / float(wanted))
    for part, each in zip(parts, whole, strict=True):
        torch.testing.assert_close(part.to_local(), each * scale)


def test_whole_gradients_are_clipped_as_pytorch_clips_them():
    ours, theirs = ([torch.nn.Parameter(torch.zeros(4, 3)) for _ in range(2)] for _ in range(2))
    for one, other in zip(ours, theirs, strict=True):
        one.grad = torch.randn(4, 3)
        other.grad = one.grad.clone()
    norm = clip_norm([each.grad for each in ours], 0.5)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(theirs, 0.5))
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(ours, theirs, strict=True))
