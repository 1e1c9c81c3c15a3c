"""However many processes share a step, the curve is one: gradients are sums over its tokens.

Tolerance: in fp32 only the order of those sums differs (rows of a matrix product, then
micro-batches and ranks), 6e-8 a sum; after six optimizer steps of a tiny model 1e-6 is seen. A
micro-batch weighed by its own number of tokens instead of the step's shows at 3e-3.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from process_group import run_together
from tiny_run import distill_arguments, metric_rows

from stree.checkpoints.load_save import load_model
from stree.common.errors import UsageError
from stree.models.model import Layer
from stree_pipelines.commands import distill
from stree_pipelines.training.parallel import sharding
from stree_pipelines.training.teachers.on_policy_check import OnPolicyCheck

STEPS = 6
TOLERANCE = 1e-5
DDP = ("--trainer.devices", "2", "--trainer.strategy", "ddp")


def arguments_of(workspace: Path, run_dir: Path, batch_size: int, *more: str, steps: int = STEPS):
    fixed = ("--model.optimizer.decay_steps", str(STEPS), "--model.optimizer.lr", "0.01")
    rest = ("--trainer.val_check_interval", "3", "--data.batch_size", str(batch_size), *more)
    return distill_arguments(workspace, run_dir, *fixed, *rest, steps=steps)


@pytest.fixture(scope="module")
def one_process(workspace, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "one"
    distill.main(arguments_of(workspace, run_dir, 4))
    return run_dir


def run_two_processes(forks, arguments: list[str]) -> str:
    """Run them to their end, and return what the first one printed."""
    log = Path(arguments[arguments.index("--run_dir") + 1] + ".log")
    codes = run_together(forks, 2, arguments, log, [("planted:print_shares", {})] * 2)
    text = Path(f"{log}.0").read_text()
    assert codes == [0, 0], text
    return text


def assert_same_curve(run_dir: Path, reference: Path) -> None:
    rows, others = metric_rows(run_dir), metric_rows(reference)
    assert [row["step"] for row in rows] == [row["step"] for row in others]
    for row, other in zip(rows, others, strict=True):
        for name, value in other.items():
            wanted = pytest.approx(float(value), rel=TOLERANCE) if value else None
            assert (float(row[name]) if row[name] else None) == wanted, (row["step"], name)


def assert_same_export(run_dir: Path, reference: Path) -> None:
    ours, theirs = (load_model(each / "drafter/latest") for each in (run_dir, reference))
    for weight, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(weight, other, rtol=0, atol=1e-5)


def test_accumulated_micro_batches_are_one_batch(workspace, one_process, tmp_path):
    more = ("--trainer.accumulate_grad_batches", "2")
    distill.main(arguments_of(workspace, tmp_path / "run", 2, *more))
    assert_same_curve(tmp_path / "run", one_process)


def test_activations_computed_twice_are_the_same(workspace, one_process, tmp_path, monkeypatch):
    """The second forward pass of a drafter's layer is the first one's computation, bit for bit."""
    calls = 0
    forward = Layer.forward

    def count(self, *arguments):
        nonlocal calls
        calls += 1
        return forward(self, *arguments)

    monkeypatch.setattr(Layer, "forward", count)
    monkeypatch.setattr(OnPolicyCheck, "on_train_end", lambda *arguments: None)  # behind the steps
    more = ("--model.activation_checkpointing", "true", "--trainer.limit_val_batches", "0")
    distill.main(arguments_of(workspace, tmp_path / "run", 4, *more))
    assert calls == STEPS * (4 + 2 * 2)  # the target's four layers once, the drafter's two twice
    steps = [row for row in metric_rows(one_process) if row["loss"]]
    assert metric_rows(tmp_path / "run") == steps


@pytest.mark.costly
def test_a_run_goes_on_with_another_number_of_processes(workspace, one_process, forks, tmp_path):
    """Two processes begin, one that accumulates goes on, then two."""
    run_dir = tmp_path / "run"
    run_two_processes(forks, arguments_of(workspace, run_dir, 2, *DDP, steps=2))
    distill.main(arguments_of(workspace, run_dir, 2, steps=4))
    run_two_processes(forks, arguments_of(workspace, run_dir, 2, *DDP))
    assert_same_curve(run_dir, one_process)


@pytest.mark.costly
def test_muon_in_two_processes_is_muon_in_one(workspace, forks, tmp_path):
    """One process accumulates what the two average."""
    muon = ("--model.optimizer.kind", "muon")
    accumulating = ("--trainer.accumulate_grad_batches", "2")
    distill.main(arguments_of(workspace, tmp_path / "one", 2, *muon, *accumulating, steps=3))
    run_two_processes(forks, arguments_of(workspace, tmp_path / "two", 2, *muon, *DDP, steps=3))
    assert_same_curve(tmp_path / "two", tmp_path / "one")


needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="needs pip install -e '.[deepspeed]'"
)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("strategy", "share"),
    [
        ("fsdp2", "0.50"),
        pytest.param("deepspeed_stage_2", "1.00", marks=needs_deepspeed),
        pytest.param("deepspeed_stage_3", "0.50", marks=needs_deepspeed),
    ],
)
def test_sharded_runs_and_others_go_on_with_each_other_s_checkpoints(
    strategy, share, workspace, one_process, forks, tmp_path
):
    """A sharded target's run begins, one process goes on, then activations are computed twice."""
    run_dir, two = tmp_path / "run", ("--trainer.devices", "2", "--trainer.strategy", strategy)
    more = ("--model.target_placement", "sharded")
    log = run_two_processes(forks, arguments_of(workspace, run_dir, 2, *two, *more, steps=2))
    assert f"holds {share} drafter, 0.50 target" in log
    distill.main(arguments_of(workspace, run_dir, 4, steps=4))
    more = ("--model.activation_checkpointing", "true")
    log = run_two_processes(forks, arguments_of(workspace, run_dir, 1, *two, *more))
    assert f"holds {share} drafter, 1.00 target" in log
    assert_same_curve(run_dir, one_process)
    assert_same_export(run_dir, one_process)


def test_deepspeed_that_is_not_installed_is_named(workspace, tmp_path, monkeypatch):
    monkeypatch.setattr(sharding, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"deepspeed_stage_3 needs DeepSpeed: .* or use fsdp2"):
        more = ("--trainer.strategy", "deepspeed_stage_3")
        distill.main(arguments_of(workspace, tmp_path, 4, *more))


def test_a_strategy_with_checkpoints_of_its_own_is_refused(workspace, tmp_path):
    with pytest.raises(UsageError, match="strategy fsdp is not supported: use one of auto"):
        distill.main(arguments_of(workspace, tmp_path, 4, "--trainer.strategy", "fsdp"))
