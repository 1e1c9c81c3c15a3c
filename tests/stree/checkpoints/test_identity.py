"""A drafter that was made for other weights, or reads shorter sequences, is named in a sentence."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

import stree
from stree.checkpoints.identity import checkpoint_sha256
from stree.checkpoints.load_save import load_model, save_model, weights_fingerprint
from stree.checkpoints.partners import TARGET_WEIGHTS, partner_remarks, require_made_for
from stree.checkpoints.tokenizer import load_tokenizer
from stree.common.errors import CheckpointRefused


def save_changed(source: Path, folder: Path, noise: float = 0.0, made_for: Path | None = None,
                 max_position_embeddings: int | None = None, **how) -> Path:
    """Save a checkpoint like `source`, with noise in its embedding and a record of a target."""
    model = load_model(source)
    with torch.no_grad():
        weight = model.model.embed_tokens.weight
        weight += noise * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    if max_position_embeddings is not None:
        model.config = model.config.replace(max_position_embeddings=max_position_embeddings)
    record = {} if made_for is None else {TARGET_WEIGHTS: weights_fingerprint(made_for)}
    save_model(model, folder, load_tokenizer(source), manifest_extra=record, **how)
    return folder


def loading_says(target: Path, drafter: Path, **options) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        stree.load(target, drafter, tree="chain-2", device="cpu", **options)
    return [str(each.message) for each in told if "drafter" in str(each.message)]


def test_the_fingerprint_is_of_the_weights_alone(workspace, tmp_path):
    target = workspace / "target"
    same = save_changed(target, tmp_path / "shards", shard_bytes=20_000)
    half = save_changed(target, tmp_path / "half", dtype=torch.bfloat16)
    assert len(list(same.glob("*.safetensors"))) > 1
    wanted = weights_fingerprint(target)
    assert weights_fingerprint(same) == weights_fingerprint(half) == wanted
    assert weights_fingerprint(save_changed(target, tmp_path / "other", noise=0.01)) != wanted


def test_a_drafter_of_other_weights_is_named_when_it_is_loaded(workspace, tmp_path):
    """Tokenizer and shape are the same, so only the weights tell them apart."""
    target = workspace / "target"
    other = save_changed(target, tmp_path / "other", noise=0.01)
    drafter = save_changed(target, tmp_path / "drafter", noise=0.1, made_for=target)
    assert loading_says(target, drafter) == []
    (said,) = loading_says(other, drafter)
    assert f"{drafter} was made for other weights (" in said and f"those of {other} (" in said
    require_made_for(target, drafter)
    with pytest.raises(CheckpointRefused, match="was made for other weights"):
        require_made_for(other, drafter)


def test_a_drafter_without_a_record_has_one_notice(workspace, tmp_path):
    target = workspace / "target"
    old = save_changed(target, tmp_path / "old", noise=0.1)
    (said,) = loading_says(target, old)
    assert "does not record its target's weights" in said
    require_made_for(target, old)
    assert loading_says(target, target) == []  # the target, drafting for itself


def test_a_shorter_context_is_said_where_sequences_may_outgrow_it(workspace, tmp_path):
    target = workspace / "target"
    short = save_changed(target, tmp_path / "short", made_for=target, max_position_embeddings=64)
    assert loading_says(target, short, max_length=64) == []
    (said,) = loading_says(target, short, max_length=200)
    assert "has 64 positions, sequences may have 200" in said
    assert len(list(partner_remarks(target, short))) == 1


def test_a_remark_about_files_is_safe_to_print(workspace, tmp_path):
    target = workspace / "target"
    drafter = save_changed(target, tmp_path / "drafter\x1b[2J", noise=0.1, made_for=target)
    manifest = json.loads((drafter / "MANIFEST.json").read_text())
    manifest[TARGET_WEIGHTS] = "\x1b]0;title\x07"
    (drafter / "MANIFEST.json").write_text(json.dumps(manifest))
    (said,) = partner_remarks(target, drafter)
    assert "was made for other weights (\ufffd]0;title" in said and "\x1b" not in said


def test_a_tokenizer_s_files_may_be_left_out(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text("{}")
    bare = checkpoint_sha256(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text("{}")
    assert checkpoint_sha256(folder, tokenizer=False) == bare != checkpoint_sha256(folder)
    (folder / "config.json").write_text("[]")
    assert checkpoint_sha256(folder, tokenizer=False) != bare
