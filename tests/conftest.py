"""Without CUDA the Triton kernels are tested through Triton's interpreter.

Triton reads the variable when it is first imported, which any library may do: so it is set here.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from captures import Event, Replayed

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import interpreted

    interpreted.do_once_what_comes_out_the_same()

from stree.batching.runners import GraphRunner
from stree.common.errors import warn_once

LONGEST = (
    "test_slurm.py",
    "test_compile.py",
    "test_ranks.py",
    "test_lossless.py",
    "test_verifiers.py",
)

gc.disable()  # until all tests are imported: what is imported stays


def leave_to_test_all(items: list[Any]) -> None:
    """Mark cases as `costly` but for as many of a test as its marker `quick` says, from first to
    last at equal distances."""
    cases: dict[tuple[Path, str], list[Any]] = {}
    for item in items:
        if item.get_closest_marker("quick") and not (
            item.get_closest_marker("costly") or item.get_closest_marker("long")
        ):
            cases.setdefault((item.path, item.originalname), []).append(item)
    for of_one_test in cases.values():
        (count,) = of_one_test[0].get_closest_marker("quick").args
        kept = {len(of_one_test) * number // count for number in range(count)}
        for number, item in enumerate(of_one_test):
            if number not in kept:
                item.add_marker("costly")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Put the longest first, so that no worker waits at the end for another, and say what needs a
    GPU: tests that are marked, and all of modules that run their kernels on one where there is."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    leave_to_test_all(items)
    for item in items:
        if (needed := item.get_closest_marker("gpu")) is not None:
            count = needed.args[0] if needed.args else 1
            missing = torch.cuda.device_count() < count
            reason = "needs a GPU" if count == 1 else f"needs {count} GPUs"
            item.add_marker(pytest.mark.skipif(missing, reason=reason))
        elif getattr(item.module, "DEVICE", None) == "cuda":
            item.add_marker(pytest.mark.gpu)


def pytest_collection_finish() -> None:
    """No collection need look through what was imported."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries count at the end what is left


@pytest.fixture(scope="session")
def forks() -> Iterator[forked.Forks]:
    """Commands in processes of their own, without what importing takes."""
    with forked.forks() as started:
        yield started


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and a little chat data, of a module's own."""
    from tiny_run import make_workspace  # with the pipelines, which tests of kernels do without

    return make_workspace(tmp_path_factory.mktemp("workspace"))


@pytest.fixture(scope="module")
def one_thread():
    """Models this small only lose by threads, badly so on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def one_timing(monkeypatch):
    """Let step times be measured once, not as often as a speed needs: no test rests on a speed."""
    monkeypatch.setattr("stree.batching.step_timing.NUM_TIMINGS", 1)


@pytest.fixture(autouse=True)
def warned_anew():
    """Let each test hear the warnings that a process gives once."""
    yield
    warn_once.cache_clear()


@pytest.fixture
def captured_on_cpu(monkeypatch):
    """Steps are graphs, as on a GPU: captured functions simply run whenever they are replayed."""
    monkeypatch.setattr("stree.batching.runners.CudaGraph", Replayed)
    monkeypatch.setattr("stree.engine.worker.runner_of", GraphRunner)
    monkeypatch.setattr(
        "stree.batching.prefillers.SHORTEST_CHUNK", 2
    )  # padding takes time without a GPU
    monkeypatch.setattr(torch.cuda, "Event", Event)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, pin_memory=False, **k: zeros(*a, **k))
