"""NaN wherever it may come from: code 70, a line that says where, and nothing of it on the disk."""

from __future__ import annotations

import re

import pytest
from run_checks import assert_same_run, assert_visible_is_whole, steps_in, table_without_timings

from stree_pipelines.evaluation.result_store import ResultStore


@pytest.mark.parametrize(
    ("what", "nth", "reason"),
    [
        ("loss", 5, r"loss or gradient is not finite at step 4 \(gradient of exported\."),
        ("gradient", 5, r"loss or gradient is not finite at step 4 \(gradient of exported\."),
        # Step 5 exports, 6 saves, 8 only validates: the next loss is what notices.
        ("weight", 5, r"exported\.\S+ is not finite after step 5: nothing was saved"),
        pytest.param(
            "weight", 6, r"exported\.\S+ is not finite after step 6: nothing was saved",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "weight", 8, r"loss or gradient is not finite at step 8", marks=pytest.mark.long
        ),
    ],
)
def test_training_stops_before_anything_is_written(training, tmp_path, what, nth, reason):
    run_dir = tmp_path / "run"
    before = ("planted:spoil_training", {"what": what, "nth": nth})
    command = training.run(run_dir, before=before)
    assert command.poll() == 70, command
    assert re.match(f"error: {reason}", command.text().splitlines()[-1]), command
    assert_visible_is_whole(run_dir)
    assert max(steps_in(run_dir / "checkpoints")) == (nth - 1) // 3 * 3
    # Had anything of it been kept, it would come back from the checkpoint.
    assert training.run(run_dir).poll() == 0
    assert_same_run(run_dir, training.whole)


@pytest.mark.costly
@pytest.mark.parametrize("model", ["target", pytest.param("drafter", marks=pytest.mark.long)])
def test_rows_that_are_not_finite_are_told_by_prompt_and_step(evaluation, tmp_path, model):
    """The other checkpoint is evaluated, and the same command later adds what is missing."""
    out = tmp_path / "out"
    command = evaluation.run(out, before=("planted:spoil_rows", {"model": model, "nth": 30}))
    assert command.poll() == 70, command
    said = command.text()
    assert re.search(
        rf"step-00000005 failed: sums prompt \d, turn \d, \w+: the {model}'s logits are not finite "
        r"at decoding step \d+", said,
    ), command
    assert re.match(r"error: 1 of 2 checkpoints failed.*step-00000005$", said.splitlines()[-1])
    store = ResultStore(out)
    assert 15 in {row.step for row in store.results()}
    assert all(len(store.samples(row)) == row.num_prompts for row in store.results())
    assert evaluation.run(out).poll() == 0
    assert sorted(table_without_timings(out).splitlines()) == sorted(evaluation.table.splitlines())
