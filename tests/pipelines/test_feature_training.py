"""Drafters learn to read their target's features; what is exported drafts with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_run import ARCHITECTURE, distill_arguments, make_workspace, metric_rows

from stree import Decoder, GenerationConfig, TokenTree
from stree.errors import UsageError
from stree.models.config import HybridConfig
from stree.models.convert import load_config, load_model
from stree.models.features import Features
from stree_pipelines import distill
from stree_pipelines.training.distillation import Distillation, drafter_config_of
from stree_pipelines.training.features import FeatureConfig, default_layers

TARGET = HybridConfig(**ARCHITECTURE)
DRAFTER = HybridConfig(**{**ARCHITECTURE, "num_layers": 2, "attn_layers": []})


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("workspace"))


@pytest.fixture(scope="module")
def trained(workspace, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("trained")
    drafter = [
        word for name, value in vars(DRAFTER).items() if name in ARCHITECTURE
        for word in (f"--model.drafter.{name}", json.dumps(value))
    ]  # fmt: skip
    distill.main(distill_arguments(
        workspace, run_dir, *drafter, "--model.features.layers", "[0,2,3]",
        "--model.optimizer.lr", "0.01", steps=12,
    ))  # fmt: skip
    return run_dir


def test_a_drafter_learns_to_read_features_and_decodes(workspace, trained):
    losses = [float(row["loss"]) for row in metric_rows(trained) if row["loss"]]
    assert losses[-1] < 0.9 * losses[0]
    target = load_model(workspace / "target", dtype=torch.float64)
    drafter = load_model(trained / "drafter" / "latest", dtype=torch.float64)
    assert drafter.config.feature_layers == (0, 2, 3)
    assert drafter.config.target_num_layers == 4
    assert drafter.model.features.unknown.abs().max() > 0  # it began at zero
    generation = GenerationConfig(24, ignore_eos=True)
    wanted = Decoder(target).generate([1, 2, 3], generation)
    got = Decoder(target, drafter, TokenTree.paper()).generate([1, 2, 3], generation)
    assert got.tokens == wanted.tokens


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


def test_a_sliced_drafter_begins_as_one_without_features(workspace):
    target = str(workspace / "target")
    with_features = Distillation(target, features=FeatureConfig())
    without = Distillation(target)
    tokens = torch.randint(320, (1, 9))
    features = Features(with_features.exported.config.feature_layers)
    with_features.target.hidden_states(tokens, features=features)
    torch.testing.assert_close(
        with_features.exported.hidden_states(tokens, read=features.values),
        without.exported.hidden_states(tokens), rtol=0, atol=0,
    )  # fmt: skip


def test_features_are_about_as_large_as_embeddings_to_begin_with():
    torch.manual_seed(0)
    from stree.models.hybrid import HybridModel

    model = HybridModel(FeatureConfig().added_to(DRAFTER, TARGET))
    size = model.model.features(10 * torch.randn(50, model.config.feature_width)).std()
    assert 0.015 < size < 0.025


@pytest.mark.parametrize(("share", "longest"), [(0.5, 5), (0.2, 1), (0.8, 3)])
def test_runs_of_tokens_are_unknown(share, longest):
    torch.manual_seed(0)
    known = FeatureConfig(None, share, longest).known((1, 100_000), torch.device("cpu"))[0]
    # The share's standard error is below 0.003 where runs are of five tokens
    assert abs((~known).double().mean() - share) < 0.012
    ends = torch.diff(known.int()).ne(0).nonzero()[:, 0]
    assert torch.diff(ends).max() > longest  # runs meet, or tokens between them are known


def test_layers_that_are_read():
    assert default_layers(1) == (0,) and default_layers(2) == (0, 1)
    assert default_layers(6) == (1, 3, 5) and default_layers(32) == (5, 16, 31)


def test_what_cannot_be_trained_is_refused(workspace, tmp_path):
    target = str(workspace / "target")
    with pytest.raises(UsageError, match=r"teacher_cache has the target's law and no features"):
        Distillation(target, features=FeatureConfig(), teacher_cache="cache")
    with pytest.raises(UsageError, match="feature_layers"):
        Distillation(target, features=FeatureConfig([0, 4]))
    with pytest.raises(UsageError, match=r"say in model\.features\.layers"):
        drafter_config_of(TARGET, DRAFTER.reading((0,), TARGET), None)
    for wrong in ({"unknown_share": 1.0}, {"longest_run": 0}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            FeatureConfig(**wrong)
