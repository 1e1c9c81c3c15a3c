"""Find ports for processes that connect to each other."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress


def free_ports(count: int) -> list[int]:
    """Return `count` free TCP ports between 10,000 and 30,000.

    The system gives higher ones to any connection that asks, such as another test's, and could do
    so before the processes come to use them.
    """
    with ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            port = random.SystemRandom().randrange(10_000, 30_000)
            probe = stack.enter_context(socket.socket())
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                ports.append(port)
        return ports


def free_port() -> int:
    return free_ports(1)[0]
