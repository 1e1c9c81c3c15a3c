"""Training sets switches of the whole process; each test starts from PyTorch's defaults."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def default_torch_switches():
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="module")
def one_thread():
    """Models this small only lose by threads, badly so on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
