"""What we use of Lightning's private parts is there: a newer version that breaks it is named."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DeepSpeedStrategy

import stree_pipelines
from stree_pipelines.training import lightning_internals
from stree_pipelines.training.parallel.zero import ZeroStrategy
from stree_pipelines.training.run.cli import TrainingCLI

ROOT = Path(stree_pipelines.__file__).parent
OVERRIDDEN = {
    (TrainingCLI, LightningCLI): {"_set_seed", "_run_subcommand"},
    (ZeroStrategy, DeepSpeedStrategy): {
        "_init_deepspeed_distributed", "_init_optimizers", "_setup_model_and_optimizer",
    },
}


def private_attributes(path: Path) -> set[str]:
    """Return the private attributes in a file that are not read off self, cls or super()."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and node.attr[1] != "_":
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls", "super()"):
                names.add(node.attr)
    return names


USED = private_attributes(Path(lightning_internals.__file__))


@pytest.mark.parametrize("name", sorted(USED))
def test_lightning_has_what_is_used(name):
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, barebones=True)
    owners = (
        trainer, trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer._signal_connector,
        pl.LightningModule(),
    )
    installed = f"Lightning {importlib.metadata.version('lightning')}"
    assert any(hasattr(owner, name) for owner in owners), f"{installed} has no {name}"


@pytest.mark.parametrize(("ours", "theirs"), OVERRIDDEN, ids=lambda kind: kind.__name__)
def test_lightning_has_what_is_overridden(ours, theirs):
    for name in OVERRIDDEN[ours, theirs]:
        assert callable(getattr(theirs, name, None)), f"{theirs.__name__} has no {name}"


def test_the_private_attributes_are_used_in_one_file():
    for path in ROOT.rglob("*.py"):
        if path != Path(lightning_internals.__file__):
            assert not private_attributes(path) & USED, path


def test_a_fetched_batch_is_uncounted():
    for is_due, completed in ((False, 3), (True, 4)):
        counts = [SimpleNamespace(ready=5, completed=4) for _ in range(2)]
        loop = SimpleNamespace(
            batch_progress=SimpleNamespace(total=counts[0], current=counts[1]),
            _batches_that_stepped=4, _should_check_val_fx=lambda fetcher, due=is_due: due,
        )
        trainer = SimpleNamespace(
            fit_loop=SimpleNamespace(epoch_loop=loop, _data_fetcher=object())
        )
        lightning_internals.uncount_next_batch(trainer)
        assert counts == [SimpleNamespace(ready=4, completed=completed)] * 2
        assert loop._batches_that_stepped == 3
