"""A server that the tests of a folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from running_server import Running


@pytest.fixture(scope="package")
def running() -> Iterator[Running]:
    made = Running()
    yield made
    made.close()
