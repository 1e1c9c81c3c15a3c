"""Ports for processes that are to meet each other."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress


def free_ports(count: int) -> list[int]:
    """Below those that the system gives to whoever asks, such as another test's connections,
    before the processes come to use them."""
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
