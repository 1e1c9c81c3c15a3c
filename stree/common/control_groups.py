"""Control groups (cgroups, version 1 or 2) of this process, which limit its cores and memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """Yield version and folder of each group that limits this process, the nearest one first.

    Args:
        controller: "cpu" or "memory".
        root: Folder of /proc and /sys.
    """
    for line in lines_of(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            version, top = 2, root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            version, top = 1, root / "sys/fs/cgroup" / controller
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):  # each limits those below it
            yield version, folder
            if folder == top:
                break


def lines_of(path: Path) -> list[str]:
    """Return a file's lines; none where it is missing (a container may not see its group's)."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
