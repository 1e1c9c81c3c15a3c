"""Drafters learn to read their target's features; what is exported drafts with them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from in_8_bits import write
from mtp_heads import save_with_head
from tiny_run import ARCHITECTURE, distill_arguments, metric_rows

from stree import Decoder, GenerationConfig
from stree.checkpoints.configs import load_config
from stree.checkpoints.heads.mtp import plan_mtp
from stree.checkpoints.load_save import load_model
from stree.checkpoints.plan.build import build
from stree.checkpoints.tokenizer import load_tokenizer
from stree.common.errors import UsageError
from stree.models.config import HybridConfig
from stree.models.hidden_states import HiddenStateTap
from stree.models.in_8_bits import plain_state
from stree.models.model import HybridModel
from stree_pipelines.commands import distill
from stree_pipelines.training.distillation import Distillation, drafter_config_of
from stree_pipelines.training.hidden_states import FeatureConfig, default_layers, features_of

TARGET = HybridConfig(**ARCHITECTURE)
DRAFTER = HybridConfig(**{**ARCHITECTURE, "num_layers": 2, "attn_layers": []})


def run(workspace: Path, run_dir: Path, *more: str) -> None:
    drafter = [
        word for name, value in vars(DRAFTER).items() if name in ARCHITECTURE
        for word in (f"--model.drafter.{name}", json.dumps(value))
    ]
    distill.main(distill_arguments(
        workspace, run_dir, *drafter, "--model.features.layers", "[0,2,3]",
        "--model.optimizer.lr", "0.01", *more, steps=12,
    ))


@pytest.fixture(scope="module")
def trained(workspace, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("trained")
    run(workspace, run_dir)
    return run_dir


def losses_of(run_dir: Path) -> list[float]:
    return [float(row["loss"]) for row in metric_rows(run_dir) if row["loss"]]


def in_fp64(target_dir: Path, run_dir: Path) -> tuple[HybridModel, HybridModel]:
    """Load a target, and the drafter that a run has exported last."""
    folders = target_dir, run_dir / "drafter/latest"
    return tuple(load_model(each, dtype=torch.float64) for each in folders)


def require_plain_tokens(target: HybridModel, drafter: HybridModel, *trees: str) -> None:
    generation = GenerationConfig(24, ignore_eos=True)
    wanted = Decoder(target).generate([1, 2, 3], generation).tokens
    for tree in trees:
        assert Decoder(target, drafter, tree).generate([1, 2, 3], generation).tokens == wanted


@pytest.mark.costly
def test_chance_is_a_function_of_the_micro_batch(workspace, tmp_path):
    """An export that ends a decay of its own is that of a shorter training, bit for bit."""
    wsd = ("--model.optimizer.schedule", "wsd", "--model.optimizer.warmup_steps", "1")
    run(workspace, tmp_path / "long", *wsd, "--export.steps", "[4,6]", "--trainer.max_steps", "6")
    run(workspace, tmp_path / "short", *wsd, "--export.steps", "[4]", "--trainer.max_steps", "4")
    mine = load_model(tmp_path / "long/drafter/step-00000004").state_dict()
    theirs = load_model(tmp_path / "short/drafter/latest").state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.costly
def test_a_drafter_learns_to_read_features_and_decodes(workspace, trained):
    losses = losses_of(trained)
    assert losses[-1] < 0.9 * losses[0]
    target, drafter = in_fp64(workspace / "target", trained)
    assert drafter.config.feature_layers == (0, 2, 3)
    assert drafter.config.target_num_layers == 4
    assert drafter.model.features.unknown.abs().max() > 0  # it began at zero
    require_plain_tokens(target, drafter, "paper")


@pytest.mark.costly
def test_a_drafter_goes_on_reading_what_it_read(workspace, trained, tmp_path):
    latest = str(trained / "drafter" / "latest")
    more = ["--model.start_from", latest, "--model.optimizer.lr", "1e-9"]
    distill.main(distill_arguments(workspace, tmp_path, *more, steps=2))
    before, after = (load_model(each) for each in (latest, tmp_path / "drafter" / "latest"))
    assert after.config == before.config
    torch.testing.assert_close(
        after.model.features.proj.weight, before.model.features.proj.weight, rtol=0, atol=1e-5
    )
    with pytest.raises(UsageError, match=r"\[0, 1\], the drafter .* reads \[0, 2, 3\]"):
        drafter_config_of(
            load_config(workspace / "target"), None, None, latest, FeatureConfig([0, 1])
        )


def test_features_of_a_drafter_that_reads_none_are_refused(workspace):
    folder = workspace / "target"
    for features in (FeatureConfig(), FeatureConfig(own=True, ahead=2), FeatureConfig([0])):
        with pytest.raises(UsageError, match="reads no hidden states: leave"):
            drafter_config_of(load_config(folder), None, None, str(folder), features)


def test_a_sliced_drafter_begins_as_one_without_features(workspace):
    target = str(workspace / "target")
    with_features = Distillation(target, features=FeatureConfig())
    without = Distillation(target)
    tokens = torch.randint(320, (1, 9))
    features = HiddenStateTap(with_features.exported.config.feature_layers)
    with_features.target.hidden_states(tokens, features=features)
    torch.testing.assert_close(
        with_features.exported.hidden_states(tokens, read=features.values),
        without.exported.hidden_states(tokens), rtol=0, atol=0,
    )


def test_features_are_as_large_as_embeddings_whatever_their_projection():
    torch.manual_seed(0)
    model = HybridModel(FeatureConfig(own=True, ahead=1).added_to(DRAFTER, TARGET))
    reader, features = model.model.features, 10 * torch.randn(50, model.config.feature_width)
    for factor in (1, 100):
        reader.proj.weight.data.mul_(factor)
        reader.own.weight.data.mul_(factor)
        for added in (reader.of_tokens(features), reader.of_drafts(torch.randn(50, 32))):
            size = added.pow(2).mean().sqrt() / model.model.embed_tokens.weight.std()
            assert 0.9 < size < 1.1


@pytest.mark.parametrize(("share", "longest"), [(0.5, 5), (0.2, 1), (0.8, 3)])
def test_runs_of_tokens_are_unknown(share, longest):
    torch.manual_seed(0)
    config = FeatureConfig(unknown_share=share, longest_run=longest)
    known = config.known((1, 100_000), torch.Generator().manual_seed(0))[0]
    # The share's standard error is below 0.003 where runs are of five tokens
    assert abs((~known).double().mean() - share) < 0.012
    ends = torch.diff(known.int()).ne(0).nonzero()[:, 0]
    assert torch.diff(ends).max() > longest  # runs meet, or tokens between them are known


def test_layers_that_are_read():
    assert default_layers(1) == (0,) and default_layers(2) == (0, 1)
    assert default_layers(6) == (1, 3, 5) and default_layers(32) == (5, 16, 31)


def test_what_cannot_be_trained_is_refused(workspace, tmp_path):
    target = str(workspace / "target")
    with pytest.raises(UsageError, match="feature_layers"):
        Distillation(target, features=FeatureConfig([0, 4]))
    with pytest.raises(UsageError, match=r"say in model\.features\.layers"):
        drafter_config_of(TARGET, DRAFTER.reading((0,), TARGET), None)
    for wrong in (
        {"unknown_share": 1.0}, {"longest_run": 0}, {"ahead": -1}, {"ahead_decay": 0},
        {"own": True}, {"eagle": True, "ahead": 2},
    ):
        with pytest.raises(UsageError, match=rf"model\.features\.{next(iter(wrong))}"):
            FeatureConfig(**wrong).require_sensible()
    eagle = FeatureConfig(ahead=2, own=True, eagle=True)
    with pytest.raises(UsageError, match="first layer of attention, this one is 'mamba mlp'"):
        drafter_config_of(TARGET, DRAFTER, None, features=eagle)
    ahead = FeatureConfig(ahead=2)
    with pytest.raises(UsageError, match="attention and MLPs, this one has a sliding window"):
        features_of(DRAFTER.reading((0,), TARGET).replace(sliding_window=4), ahead, False)
    with pytest.raises(UsageError, match="activation_checkpointing"):
        Distillation(target, features=ahead, activation_checkpointing=True)


def a_batch() -> dict[str, torch.Tensor]:
    """Make a batch with two sequences in the first row; some tokens count."""
    torch.manual_seed(1)
    mask = torch.ones(2, 24, dtype=torch.bool)
    mask[:, :4] = mask[0, 11:14] = False
    segments = torch.zeros(2, 24, dtype=torch.long)
    segments[0, 11:] = 1
    tokens = torch.randint(320, (2, 24))
    return {"tokens": tokens, "segment_ids": segments, "loss_mask": mask}


@pytest.mark.parametrize(
    ("own", "eagle"), [(True, False), (False, False), (True, True)], ids=["own", "no", "eagle"]
)
def test_the_loss_is_that_of_the_tokens_and_of_drafts(own, eagle, workspace):
    """The loss equals dense softmaxes of all passes in fp64, given each token's drawn depth."""
    module = Distillation(
        str(workspace / "target"), None if eagle else DRAFTER,
        features=FeatureConfig(ahead=3, own=own, eagle=eagle),
    )
    module.exported.double()
    module.target.double()
    batch, drawn = a_batch(), []
    depths = FeatureConfig.depths

    def noted(self, segment_ids, chance):
        drawn.append(depths(self, segment_ids, chance))
        return drawn[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureConfig, "depths", noted)
        terms = module.loss_terms(
            module.on_before_batch_transfer({**batch, "number": (0, 0, 0)}, 0)
        )
    terms.loss.backward()
    got = {name: each.grad for name, each in module.exported.named_parameters()}
    assert (got.get("model.features.own.weight") is not None) == (own and not eagle)
    module.zero_grad()
    (chosen, there), (tokens, segments) = drawn[0], (batch["tokens"], batch["segment_ids"])
    features = HiddenStateTap(module.exported.config.feature_layers)
    hidden = module.target.hidden_states(tokens, segments, features=features)
    log_p = module.target.logits(hidden).log_softmax(-1)
    passes = module.exported.hidden_ahead(tokens, segments, features.values, None, 3)
    losses = torch.stack([
        (log_p.exp() * (log_p - module.exported.logits(each).log_softmax(-1))).sum(-1)
        for each in passes
    ])
    mask = torch.zeros_like(there)
    mask[:, :-1] = batch["loss_mask"][:, 1:]
    for row, at in there.nonzero().tolist():  # a draft begins in the sequence that it is of
        assert segments[row, at - chosen[row, at]] == segments[row, at] and at >= chosen[row, at]
    weight = 0.8 + 0.8**2 + 0.8**3
    first = losses[0][mask].mean()
    drafts = losses.gather(0, chosen[None])[0][mask & there].mean()
    wanted = (first + weight * drafts) / (1 + weight)
    # Sums over the vocabulary are fp32 in the product
    torch.testing.assert_close(terms.loss.double(), wanted, rtol=1e-5, atol=1e-7)
    wanted.backward()
    for name, parameter in module.exported.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-4, atol=1e-7)


def test_depths_are_as_likely_as_they_count():
    config = FeatureConfig(ahead=3, ahead_decay=0.5)
    chance = torch.Generator().manual_seed(0)
    depths, there = config.depths(torch.zeros(1, 60_000, dtype=torch.long), chance)
    shares = depths.flatten().bincount(minlength=4) / depths.numel()
    # Standard errors are below 0.002
    assert torch.allclose(shares, torch.tensor([0, 4, 2, 1]) / 7, atol=0.01)
    assert there[0, 3:].all() and not there[0, 0] and config.ahead_weight == 0.875


@pytest.mark.costly
def test_passes_ahead_train_and_their_drafter_decodes(workspace, tmp_path):
    run(workspace, tmp_path, "--model.features.ahead", "3", "--model.features.own", "true")
    losses = losses_of(tmp_path)
    assert losses[-1] < 0.9 * losses[0]
    target, drafter = in_fp64(workspace / "target", tmp_path)
    assert drafter.config.own_features and drafter.config.feature_layers == (0, 2, 3)
    require_plain_tokens(target, drafter, "paper")


def test_an_eagle_head_is_trained_for_trees(workspace, tmp_path):
    """It has the target's embedding at first, and a head over some tokens, which are drafted."""
    distill.main(distill_arguments(
        workspace, tmp_path, "--model.features.eagle", "true", "--model.features.own", "true",
        "--model.features.ahead", "3", "--model.features.layers", "[0,2,3]",
        "--model.head.vocab_size", "200", "--model.optimizer.lr", "0.01", steps=12,
    ))
    losses = losses_of(tmp_path)
    assert losses[-1] < losses[0] - 0.05  # a sum over some tokens alone may be below 0
    target, drafter = in_fp64(workspace / "target", tmp_path)
    assert drafter.config.eagle_inputs and drafter.config.layer_types == ("attention mlp",)
    moved = drafter.model.embed_tokens.weight - target.model.embed_tokens.weight
    assert 0 < moved.abs().max() < 0.3
    require_plain_tokens(target, drafter, "paper", "beam-3-3-8")


def test_training_begins_with_an_mtp_head_s_own_numbers_whatever_the_target_s_dtype(tmp_path):
    write(partial(save_with_head, family="qwen3_5", seed=0), tmp_path, "channel")
    stored, plain = (str(tmp_path / name) for name in ("stored", "plain"))
    wanted = Distillation(plain, start_from="mtp").exported.state_dict()
    begun = Distillation(stored, start_from="mtp", target_dtype="bfloat16").exported.state_dict()
    assert begun.keys() == wanted.keys()
    for name, weight in begun.items():
        shared = name.startswith(("model.embed_tokens.", "lm_head.", "model.features.target_norm."))
        tolerance = {"rtol": 1e-2, "atol": 1e-2} if shared else {"rtol": 0.0, "atol": 1e-6}
        torch.testing.assert_close(weight, wanted[name], **tolerance)


@pytest.mark.costly
@pytest.mark.parametrize("form", ["", "fp8", "modelopt"])
def test_an_mtp_head_is_trained_on_for_trees(form, workspace, tmp_path):
    """Without options it reads what the head reads; in 8 bits its numbers are trained, too."""

    def save(folder: Path) -> None:
        save_with_head(folder, "qwen3_5", 0, vocab=TARGET.vocab_size)
        load_tokenizer(workspace / "target").save_pretrained(folder)

    folder = tmp_path / "stored"
    if form:
        write(save, tmp_path, form)
    else:
        save(folder)
    distill.main(distill_arguments(
        workspace, tmp_path / "run", "--model.target", str(folder), "--model.start_from", "mtp",
        "--model.optimizer.lr", "0.01", steps=12,
    ))
    losses = losses_of(tmp_path / "run")
    assert losses[-1] < 0.95 * losses[0]
    target, drafter = in_fp64(folder, tmp_path / "run")
    begun = plain_state(build(plan_mtp(folder), dtype=torch.float64))
    assert drafter.config.fused_inputs
    moved = drafter.model.features.proj.weight - begun["model.features.proj.weight"]
    assert 0 < moved.abs().max() < 0.3  # it began with the head
    require_plain_tokens(target, drafter, "paper")
