"""Training sets switches of the whole process; each test starts from PyTorch's defaults."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def default_torch_switches():
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
