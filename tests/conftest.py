"""Without CUDA the Triton kernels are tested through Triton's interpreter.

Triton reads the variable when it is first imported, which any library may do: so it is set here.
"""

import os
from collections import Counter
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What the tests of faults counted (`figures` in tests/faults), over all of them."""
    totals: Counter[str] = Counter()
    largest: dict[str, float] = {}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name.startswith("most "):
                largest[name] = max(largest.get(name, 0), value)
            else:
                totals[name] += value
    if totals:
        terminalreporter.section("faults survived")
        for name, value in {**totals, **largest}.items():
            terminalreporter.line(f"{value:6g}  {name}")
