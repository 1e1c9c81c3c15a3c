"""Locks on files and folders (flock): they go with the process that holds them, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def take_lock(descriptor: int, shared: bool = False) -> bool:
    """Lock an open file without waiting; return False when another holds it.

    Some network filesystems have no locks: taking turns is then up to the user.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    return True


@contextmanager
def holding(path: Path, wait: bool = False, shared: bool = False) -> Iterator[bool]:
    """Lock a file or folder inside the block, and yield True.

    Yields False where it cannot be locked: not there, a link, or on a filesystem without locks. A
    `shared` lock keeps out those alone that do not share it. Raises BlockingIOError when another
    holds it, unless `wait` is true.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield False
        return
    try:
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(descriptor, kind | (0 if wait else fcntl.LOCK_NB))
            is_held = True
        except BlockingIOError:
            raise
        except OSError:
            is_held = False
        yield is_held
    finally:
        os.close(descriptor)
