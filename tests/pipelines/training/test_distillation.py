"""The loss's options in a distillation: what the module makes of them, and what a user is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_run import ARCHITECTURE, distill_arguments, metric_rows

from stree.checkpoints.load_save import load_config, load_model, save_model
from stree.checkpoints.tokenizer import load_tokenizer
from stree.common.errors import CheckpointRefused, NotFound, UsageError
from stree.models.config import HybridConfig
from stree.models.model import HybridModel
from stree_pipelines import distill
from stree_pipelines.training.distillation import Distillation
from stree_pipelines.training.losses.config import LossConfig
from stree_pipelines.training.losses.distillation_loss import live_teacher, measure_rows
from stree_pipelines.training.losses.token_weights import token_weights
from stree_pipelines.training.module import shift_left


@pytest.fixture(scope="module")
def trained(workspace, tmp_path_factory) -> Path:
    """A run by the loss of one draft."""
    run_dir = tmp_path_factory.mktemp("trained")
    distill.main(distill_arguments(workspace, run_dir, "--model.loss.kind", "lk"))
    return run_dir


def a_batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    mask = torch.ones(2, 24, dtype=torch.bool)
    mask[:, :5] = mask[0, 11:14] = False
    segments = torch.zeros(2, 24, dtype=torch.long)
    segments[0, 11:] = 1
    tokens = torch.randint(ARCHITECTURE["vocab_size"], (2, 24))
    return {"tokens": tokens, "segment_ids": segments, "loss_mask": mask}


def test_what_is_learnt_is_logged_with_its_acceptance(trained):
    rows = metric_rows(trained)
    losses = [float(row["loss"]) for row in rows if row["loss"]]
    assert losses[-1] < losses[0]
    assert all(0 < float(row["simulated_acceptance"]) < 1 for row in rows if row["loss"])
    assert any(row["val_simulated_acceptance"] for row in rows)


def test_a_drafter_goes_on_with_another_loss_and_chosen_tokens(workspace, trained, tmp_path):
    latest = str(trained / "drafter" / "latest")
    distill.main(distill_arguments(
        workspace, tmp_path, "--model.start_from", latest, "--model.loss.kind", "tv",
        "--model.loss.reference", latest, "--model.ce_weight",
        "0.1", "--model.optimizer.lr", "1e-9", steps=2,
    ))
    first = metric_rows(tmp_path)[0]
    # A step of no size leaves the drafter where it was. Weighed, tv is not that of all tokens.
    tv, accepted = float(first["divergence"]), float(first["simulated_acceptance"])
    assert tv != pytest.approx(1 - accepted, abs=1e-4)
    whole = float(first["divergence"]) + 0.1 * float(first["cross_entropy"])
    assert float(first["loss"]) == pytest.approx(whole, rel=1e-4)
    before, after = (load_model(folder) for folder in (latest, tmp_path / "drafter" / "latest"))
    torch.testing.assert_close(after.head_weight, before.head_weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "loss", [LossConfig("lk", reference="R", keep=0.3), LossConfig(reference="R")], ids=["lk", "kl"]
)
def test_weights_are_for_the_gradient_and_not_for_what_is_compared(loss, workspace, trained):
    loss = LossConfig(**{**vars(loss), "reference": str(trained / "drafter" / "latest")})
    target = str(workspace / "target")
    module = Distillation(target, loss=loss)
    plain = Distillation(target, loss=LossConfig(loss.kind, eta=loss.eta))
    plain.exported.load_state_dict(module.exported.state_dict())
    batch = a_batch()
    mask = shift_left(batch["loss_mask"])
    normalizer = 3.0 * mask.sum()
    terms = module.loss_terms(batch, normalizer)
    unweighted = plain.loss_terms(batch, normalizer)
    assert terms.loss != unweighted.loss and terms.loss.requires_grad
    torch.testing.assert_close(terms.simulated_acceptance, unweighted.simulated_acceptance)
    with torch.no_grad():
        torch.testing.assert_close(module.loss_terms(batch).loss, plain.loss_terms(batch).loss)
    # The same by hand: each token's divergence times its weight.
    inputs = batch["tokens"], batch["segment_ids"]
    hidden = module.exported.hidden_states(*inputs)
    with torch.no_grad():
        target_hidden = module.target.hidden_states(*inputs)
    teacher = live_teacher(target_hidden, module.target.head_weight, mask, hidden)
    rows = measure_rows(hidden, module.exported.head_weight, teacher, mask, loss.divergence)
    model = module.reference.model
    reference = measure_rows(
        model.hidden_states(*inputs), model.head_weight, teacher, mask, loss.divergence
    )
    weights = token_weights(loss, mask, rows, reference)
    torch.testing.assert_close(terms.loss, (weights * rows.divergence).sum() / normalizer)


def test_a_dry_run_counts_the_reference(workspace, trained, tmp_path, capsys):
    more = ("--model.loss.reference", str(trained / "drafter" / "latest"), "--dry_run")
    distill.main(distill_arguments(workspace, tmp_path / "run", *more))
    said = capsys.readouterr().out
    assert "reference: " in said and "reference's activations" in said


@pytest.mark.parametrize("more", [(), ("--dry_run",)], ids=["training", "dry run"])
def test_what_does_not_go_together_is_refused(more, workspace, trained, tmp_path):
    latest = str(trained / "drafter" / "latest")

    def refused(error, message, *options):
        with pytest.raises(error, match=message):
            distill.main(distill_arguments(workspace, tmp_path / "run", *options, *more))

    layers = ("--model.drafter_layers", "[0]")
    refused(UsageError, "and model.drafter_layers out", "--model.start_from", latest, *layers)
    refused(NotFound, "nowhere", "--model.start_from", "nowhere")
    refused(NotFound, "nowhere", "--model.loss.reference", "nowhere")


def test_drafters_of_other_targets_are_refused(workspace, tmp_path):
    wide = HybridConfig(**{**ARCHITECTURE, "vocab_size": 512})
    save_model(HybridModel(wide), tmp_path / "wide", load_tokenizer(workspace / "target"))
    for option in ("--model.start_from", "--model.loss.reference"):
        with pytest.raises(UsageError, match="has a vocabulary of 512 tokens, the target"):
            distill.main(distill_arguments(
                workspace, tmp_path / "run", option, str(tmp_path / "wide"),
            ))
    tokenizer = load_tokenizer(workspace / "target")
    tokenizer.chat_template = "{{ messages }}"
    save_model(HybridModel(load_config(workspace / "target")), tmp_path / "other", tokenizer)
    with pytest.raises(CheckpointRefused, match="the chat templates differ"):
        distill.main(distill_arguments(
            workspace, tmp_path / "run", "--model.loss.reference", str(tmp_path / "other"),
        ))
