"""The same plans start the same work on the device, in the same order, on any worker.

A run's plans are read from its log and executed by new workers without a scheduler, as other ranks
would. Outside of CUDA graphs nothing may depend on what tokens are, also where a target with other
weights chooses others. PyTorch's operations on a CPU have the lengths of what was accepted.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import DEVICE
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from toys import mixed_requests, right_now_and_then, tiny_model
from triton.runtime.jit import JITFunction

from stree import BatchDecoder, Request, TokenTree
from stree.batching import runners
from stree.batching.sequences import samples_of
from stree.engine.plan import StepPlan
from stree.engine.plan_log import read_plan_log, replay_by_worker
from stree.tree_policy.policy import TreePolicy
from stree.trees.token_tree import balanced
from stree_kernels import index_plan

ON_GPU = DEVICE == "cuda"
TREES = (TokenTree.chain(3), balanced([2, 2]))
CANCELLED = (1, 4)  # numbers of requests


class InTurn(TreePolicy):
    """Policy that takes each tree for three steps, plain decoding too, and learns nothing."""

    needs_step_times = False

    def __init__(self) -> None:
        super().__init__(TREES)
        self.turns = itertools.cycle(tree for tree in self.trees for _ in range(3))

    def choose(self, num_rows: int):
        return next(self.turns)


class Launches(TorchDispatchMode):
    """Record of operations with their shapes, kernels with their grids, and graphs by number.

    Operations inside of a replay, which only a stand-in for graphs runs anew, are left out.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.record: list[tuple[Any, ...]] = []
        launches, run = self, JITFunction.run

        class Graph(runners.CudaGraph):
            def __init__(self, *given: Any, **named: Any) -> None:
                self.name = len(launches.record)
                launches.note("capture", self.name)
                super().__init__(*given, **named)

            def replay(self) -> Any:
                launches.note("replay", self.name)
                with _disable_current_modes():
                    return super().replay()

        def launched(kernel: JITFunction, *given: Any, grid: Any, **named: Any) -> Any:
            launches.note(kernel.__name__, grid if isinstance(grid, tuple) else None)
            return run(kernel, *given, grid=grid, **named)

        patch.setattr(runners, "CudaGraph", Graph)
        patch.setattr(JITFunction, "run", launched)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # PyTorch would import its compiler, which takes seconds

    def note(self, *what: Any) -> None:
        self.record.append(what)

    def __torch_dispatch__(self, function, types, given=(), named=None):
        listed = (each if isinstance(each, list) else [each] for each in given)
        tensors = (each for parts in listed for each in parts if isinstance(each, torch.Tensor))
        self.note(function.name(), *(tuple(each.shape) for each in tensors))
        return function(*given, **named or {})


def requests() -> list[Request]:
    """Return requests of all settings, some with trees of their own, and what prefixes serve."""
    mixed = mixed_requests(5, [None, *TREES[1:]], seed=3)
    prompt = [token % 61 for token in range(1, 15)]
    several = replace(mixed[0].generation, num_return_sequences=3)
    kept = Request(prompt, mixed[1].generation, keep_prompt=True)
    later = [Request([*prompt, token], each.generation) for token, each in enumerate(mixed[:2])]
    return [kept, *mixed, *later, *samples_of(Request(prompt[::-1], several))]


def assert_all_kinds(plans: list[StepPlan]) -> None:
    """Require that the run has everything that a plan can say."""
    assert all(any(getattr(plan, kind) for plan in plans) for kind in vars(plans[0]))
    assert len({tree for plan in plans for tree in plan.trees.values()}) == 1 + len(TREES)
    reads = [read for plan in plans for read in plan.reads]
    assert any(read.load is not None for read in reads)
    assert any(read.save is not None for read in reads)
    assert any(not read.begins and read.start < read.stop for read in reads)


@pytest.mark.parametrize(
    "graphs", [pytest.param(False, marks=pytest.mark.costly), True], ids=["eager", "graphs"]
)
def test_the_same_plans_give_the_same_launches(graphs, request, monkeypatch, tmp_path):
    if graphs and not ON_GPU:
        request.getfixturevalue("captured_on_cpu")
        monkeypatch.setattr(index_plan, "on_host", lambda tensor: False)  # nor does a GPU tell it
    elif not graphs:
        monkeypatch.setattr("stree.engine.worker.runner_of", runners.EagerRunner)
    reads_no_tokens = graphs or ON_GPU
    monkeypatch.setattr("stree.batching.batch_decoder.LONGEST_CHUNK", 5)
    dtype = torch.float32 if ON_GPU else torch.float64
    target, other = (tiny_model(seed, dtype, num_layers=2).to(DEVICE) for seed in (1, 2))
    drafter = right_now_and_then(target)

    def decoder(target=target) -> BatchDecoder:
        return BatchDecoder(
            target, drafter, InTurn(), num_rows=3, max_length=64, num_prefixes=6,
            prompt_tokens_per_step=6,
        )

    played, cancelled = decoder(), []
    played.log_plans(tmp_path / "plans.jsonl")
    for served in played.serve(requests()):
        if served.number in CANCELLED and len(played.tokens_of(served.row)) > 2:
            cancelled.append(served.release().finish_reason)
    played.log_plans(None)
    events = list(read_plan_log(tmp_path / "plans.jsonl"))
    assert cancelled == ["released"] * len(CANCELLED)
    assert_all_kinds([event.plan for event in events if event.plan is not None])

    def launches(target) -> tuple[list[Any], list[Any]]:
        with monkeypatch.context() as patch:
            launches, worker = Launches(patch), decoder(target).worker
            with torch.no_grad(), launches:
                reports = [report for report, _ in replay_by_worker(events, worker)]
        return launches.record, [(report.rows, report.firsts) for report in reports]

    record, reports = launches(target)
    assert any(what == "replay" for what, *_ in record) is graphs
    for model in (target, other if reads_no_tokens else target):
        again, told = launches(model)
        assert again == record
        assert (told == reports) is (model is target)
