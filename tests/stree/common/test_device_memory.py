"""Memory within control groups, as files of either version say."""

from __future__ import annotations

import pytest
import torch

from stree.common import device_memory as free_resources
from stree.common.device_memory import free_memory_bytes, granted_memory_bytes
from stree.common.errors import UsageError

GIB = 1024**3


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def granted(tmp_path, membership):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(membership)
    return list(granted_memory_bytes(tmp_path))


def test_version_2_and_every_group_above(tmp_path):
    """A step is within a job within a machine, and any of them may be the narrowest."""
    top = tmp_path / "sys/fs/cgroup"
    write(top / "job/step", memory__max="max", memory__current=GIB)
    write(
        top / "job", memory__max=4 * GIB, memory__current=3 * GIB,
        memory__stat=f"anon {GIB}\ninactive_file {GIB}\nactive_file 0",
    )
    write(top, memory__max=9 * GIB, memory__current=4 * GIB)
    assert granted(tmp_path, "0::/job/step") == [2 * GIB, 5 * GIB]


def test_version_1(tmp_path):
    folder = tmp_path / "sys/fs/cgroup/memory"
    write(
        folder / "slurm/job_7", memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=GIB // 2,
        memory__stat="total_inactive_file 0",
    )
    write(folder, memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=GIB)
    lines = "12:cpu,cpuacct:/slurm\n4:memory:/slurm/job_7\n0::/"
    assert granted(tmp_path, lines)[0] == 3 * GIB // 2


def test_a_container_sees_its_own_group_as_the_top(tmp_path):
    write(tmp_path / "sys/fs/cgroup", memory__max=GIB, memory__current=2 * GIB)
    assert granted(tmp_path, "0::/../../elsewhere/of/the/host") == [0]


@pytest.mark.parametrize("membership", ["", "3:cpu:/a", "0::/a:b/c"])
def test_where_nothing_is_granted(tmp_path, membership):
    assert granted(tmp_path, membership) == []


def test_the_host_has_no_more_than_its_groups_grant(monkeypatch):
    assert free_memory_bytes(False) > 7
    monkeypatch.setattr(free_resources, "granted_memory_bytes", lambda: iter([2**60, 7]))
    assert free_memory_bytes(False) == 7


def test_a_host_that_does_not_say_its_free_memory_is_refused(monkeypatch):
    monkeypatch.setattr(free_resources, "lines_of", lambda path: [])
    with pytest.raises(UsageError, match="says no MemAvailable"):
        free_memory_bytes(False)


def test_what_the_allocator_holds_without_using_it_is_free(monkeypatch):
    """Segments of graphs, and of another GPU, do not count."""
    segments = [
        {"device": device, "segment_pool_id": pool, "total_size": 8 * GIB, "active_size": GIB}
        for device, pool in ((0, (0, 0)), (1, (0, 0)), (1, (0, 2)))
    ]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert free_memory_bytes(True) == GIB + 7 * GIB
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert free_memory_bytes(True) == GIB
