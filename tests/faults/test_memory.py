"""Out of memory: code 71, what did not fit, and which setting shrinks it."""

from __future__ import annotations

import pytest
from run_checks import assert_same_run, table_without_timings

GPU = ("planted:run_out_of_memory", "CUDA out of memory. Tried to allocate 20.00 GiB")
HOST = (
    "planted:refuse_memory",
    "can't allocate memory: you tried to allocate 28147497671065",
)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("fault", "call"),
    [
        (GPU, "stree_pipelines.training.distillation:Distillation.loss_terms"),
        (GPU, "torch:Tensor.backward"),
        (HOST, "stree_pipelines.training.distillation:Distillation.loss_terms"),
    ],
    ids=["gpu-forward", "gpu-backward", "host-forward"],
)
def test_training(training, tmp_path, fault, call):
    function, reason = fault
    run_dir = tmp_path / "run"
    command = training.run(run_dir, before=(function, {"call": call, "nth": 4}))
    assert command.poll() == 71, command
    last = command.text().splitlines()[-1]
    assert last.startswith("error: ") and reason in last and "lower data.batch_size" in last
    assert training.run(run_dir).poll() == 0
    assert_same_run(run_dir, training.whole)


@pytest.mark.costly
@pytest.mark.parametrize(
    "fault", [pytest.param(GPU, id="gpu"), pytest.param(HOST, id="host", marks=pytest.mark.long)]
)
def test_evaluation(evaluation, tmp_path, fault):
    function, reason = fault
    call = "stree.models.model:HybridModel.tree_batch_forward"
    command = evaluation.run(tmp_path / "out", before=(function, {"call": call, "nth": 30}))
    assert command.poll() == 71, command
    (said,) = (line for line in command.text().splitlines() if reason in line)
    assert "step-00000005 failed: sums: " in said and "lower max_new_tokens" in said
    assert evaluation.run(tmp_path / "out").poll() == 0
    mine = table_without_timings(tmp_path / "out").splitlines()
    assert sorted(mine) == sorted(evaluation.table.splitlines())
