"""A distillation logs its loss, goes on from another drafter, and refuses what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_run import ARCHITECTURE, distill_arguments, metric_rows
from tokenizers.normalizers import Lowercase

from stree.checkpoints.configs import load_config
from stree.checkpoints.load_save import load_model, save_model
from stree.checkpoints.tokenizer import load_tokenizer
from stree.common.errors import CheckpointRefused, NotFound, UsageError
from stree.models.config import HybridConfig
from stree.models.model import HybridModel
from stree_pipelines.commands import distill


@pytest.fixture(scope="module")
def trained(workspace, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("trained")
    distill.main(distill_arguments(workspace, run_dir, "--model.loss.kind", "lk"))
    return run_dir


def test_what_is_learnt_is_logged_with_its_acceptance(trained):
    rows = metric_rows(trained)
    losses = [float(row["loss"]) for row in rows if row["loss"]]
    assert losses[-1] < losses[0]
    assert all(0 < float(row["simulated_acceptance"]) < 1 for row in rows if row["loss"])
    assert any(row["val_simulated_acceptance"] for row in rows)


def test_a_drafter_goes_on_with_another_loss(workspace, trained, tmp_path):
    latest = str(trained / "drafter" / "latest")
    distill.main(distill_arguments(
        workspace, tmp_path, "--model.start_from", latest, "--model.loss.kind", "tv",
        "--model.ce_weight", "0.1", "--model.optimizer.lr", "1e-9", steps=2,
    ))
    first = metric_rows(tmp_path)[0]
    # A step of no size leaves the drafter where it was.
    tv, accepted = float(first["divergence"]), float(first["simulated_acceptance"])
    assert tv == pytest.approx(1 - accepted, abs=1e-4)
    whole = tv + 0.1 * float(first["cross_entropy"])
    assert float(first["loss"]) == pytest.approx(whole, rel=1e-4)
    before, after = (load_model(folder) for folder in (latest, tmp_path / "drafter" / "latest"))
    torch.testing.assert_close(after.head_weight, before.head_weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize("more", [(), ("--dry_run",)], ids=["training", "dry run"])
@pytest.mark.parametrize(
    ("start", "options", "error", "message"),
    [
        ("trained", ("--model.drafter_layers", "[0]"), UsageError, "and model.drafter_layers out"),
        ("nowhere", (), NotFound, "nowhere"),
        ("wide", (), UsageError, "has a vocabulary of 512 tokens, the target"),
        ("other", (), CheckpointRefused, "the normalisers differ"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(
    more, start, options, error, message, workspace, trained, tmp_path
):
    tokenizer = load_tokenizer(workspace / "target")
    folder = trained / "drafter" / "latest" if start == "trained" else tmp_path / start
    if start == "wide":
        wide = HybridConfig(**{**ARCHITECTURE, "vocab_size": 512})
        save_model(HybridModel(wide), folder, tokenizer)
    if start == "other":
        tokenizer.backend_tokenizer.normalizer = Lowercase()
        save_model(HybridModel(load_config(workspace / "target")), folder, tokenizer)
    options = ("--model.start_from", str(folder), *options, *more)
    with pytest.raises(error, match=message):
        distill.main(distill_arguments(workspace, tmp_path / "run", *options))
