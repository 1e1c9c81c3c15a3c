"""Three restarts that save nothing end a run; anything they save starts the count anew."""

from __future__ import annotations

import json
import signal

import pytest
from process_group import run_together
from tiny_run import distill_arguments

from stree.common.errors import Interrupted, InvariantBroken, NotFound
from stree_pipelines.commands import distill
from stree_pipelines.data.datamodule import ConversationDataModule
from stree_pipelines.training.checkpoints.saving import TrainingCheckpoints
from stree_pipelines.training.run.restarts import Restarts
from stree_pipelines.training.run.stopping import STOP_SIGNALS


def note_start(run_dir, step, config):
    restarts = Restarts(run_dir)
    with restarts.counted(step, config):
        return restarts.vain


def test_restarts_are_counted_until_step_or_configuration_change(tmp_path):
    assert [note_start(tmp_path, 0, "a") for _ in range(3)] == [0, 1, 2]
    assert [note_start(tmp_path, 5, "a") for _ in range(2)] == [0, 1]
    assert [note_start(tmp_path, 5, "b") for _ in range(2)] == [0, 1]


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"step": 5}', b"\xff"])
def test_a_count_that_cannot_be_read_starts_anew(tmp_path, content):
    note_start(tmp_path, 5, "a")
    path = tmp_path / "restarts.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert [note_start(tmp_path, 5, "a") for _ in range(2)] == [0, 1]
    known = json.loads(path.read_text())
    path.write_text(json.dumps({**known, "restarts": "many"}))
    assert note_start(tmp_path, 5, "a") == 0


def lose_the_node(monkeypatch, at_step: int) -> None:
    def lose(self, trainer, *arguments):
        if trainer.global_step == at_step:
            raise RuntimeError("node lost")

    monkeypatch.setattr(TrainingCheckpoints, "on_train_batch_start", lose)


@pytest.mark.costly
def test_three_restarts_without_progress_end_the_chain(workspace, tmp_path, monkeypatch):
    arguments = distill_arguments(workspace, tmp_path, steps=4)
    lose_the_node(monkeypatch, at_step=0)
    for _ in range(3):  # the start and two restarts
        with pytest.raises(RuntimeError, match="node lost"):
            distill.main(arguments)
    lose_the_node(monkeypatch, at_step=2)
    for _ in range(5):  # the third gets to step 2; a start and three restarts from there do not
        with pytest.raises(RuntimeError, match="node lost"):
            distill.main(arguments)
    with pytest.raises(InvariantBroken, match=r"3 restarts .* delete .*restarts\.json") as stopped:
        distill.main(arguments)
    assert stopped.value.exit_code == 70
    monkeypatch.undo()
    (tmp_path / "restarts.json").unlink()
    distill.main(arguments)
    assert (tmp_path / "checkpoints/step-00000004").is_dir()


def test_what_is_refused_is_no_restart(workspace, tmp_path):
    absent = ("--data.train", str(tmp_path / "absent.jsonl"))
    for _ in range(2):
        with pytest.raises(NotFound, match="absent"):
            distill.main(distill_arguments(workspace, tmp_path / "run", *absent, steps=1))
    assert not (tmp_path / "run/restarts.json").exists()


@pytest.mark.quick(1)
@pytest.mark.parametrize("where", ["fit", "data"])
def test_whoever_interrupts_is_not_a_chain(where, workspace, tmp_path, monkeypatch):
    def interrupt(self, *arguments):
        signal.raise_signal(signal.SIGINT)

    place = {
        "fit": (TrainingCheckpoints, "on_train_batch_start"),
        "data": (ConversationDataModule, "setup"),
    }[where]
    monkeypatch.setattr(*place, interrupt)
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    # Python's own, which a shell that starts tests in the background takes away
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(Interrupted if where == "fit" else KeyboardInterrupt):
        distill.main(distill_arguments(workspace, tmp_path, steps=3))
    for number, handler in before.items():
        signal.signal(number, handler)
    assert not (tmp_path / "restarts.json").exists()


@pytest.mark.costly
def test_all_ranks_end_with_the_same_code(workspace, forks, tmp_path):
    """Only the main process counts."""
    more = ("--trainer.devices", "2", "--trainer.strategy", "ddp")
    arguments = distill_arguments(workspace, tmp_path / "run", *more, steps=1)
    assert run_together(forks, 2, arguments, tmp_path / "first") == [0, 0]
    counted = json.loads((tmp_path / "run/restarts.json").read_text())
    (tmp_path / "run/restarts.json").write_text(json.dumps({**counted, "restarts": 3}))
    for checkpoint in (tmp_path / "run/checkpoints").iterdir():
        checkpoint.rename(tmp_path / checkpoint.name)
    assert run_together(forks, 2, arguments, tmp_path / "second") == [70, 70]
    for rank in range(2):
        assert "error: 3 restarts" in (tmp_path / f"second.{rank}").read_text()
