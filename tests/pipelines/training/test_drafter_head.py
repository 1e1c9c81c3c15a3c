"""A drafter is trained with a head over the data's frequent tokens, or of low rank."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from run_checks import assert_same_run
from tiny_run import VOCAB_SIZE, distill_arguments
from toys import with_head

import stree
from stree.checkpoints.configs import load_config
from stree.checkpoints.load_save import load_model, save_model
from stree.checkpoints.tokenizer import load_tokenizer
from stree.common.errors import UsageError
from stree_pipelines.commands import distill
from stree_pipelines.data.packing import TokenTable
from stree_pipelines.training.distillation import Distillation
from stree_pipelines.training.drafter_head import (
    HeadConfig,
    count_tokens,
    coverage_of,
    most_frequent,
)

SIZE, RANK = 120, 6
HEAD = ("--model.head.vocab_size", str(SIZE), "--model.head.rank", str(RANK))


@pytest.fixture(scope="module")
def whole_run(workspace, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("headed") / "run"
    more = (*HEAD, "--export.steps", "[2]", "--model.optimizer.lr", "0.01")
    distill.main(distill_arguments(workspace, run_dir, *more, steps=4))
    return run_dir


def test_the_most_frequent_of_what_counts_with_special_tokens_first():
    tokens = np.array([7, 7, 7, 2, 2, 5, 1, 1, 1, 1], dtype=np.int32)
    table = TokenTable(tokens, tokens != 1, np.array([0, 10]))
    counts = count_tokens(table, 9)
    assert counts.tolist() == [0, 0, 2, 0, 0, 1, 0, 3, 0]
    assert most_frequent(counts, 3, [8]).tolist() == [2, 7, 8]
    assert most_frequent(counts, 6, [8]).tolist() == [0, 1, 2, 5, 7, 8]  # then the smaller
    ids = most_frequent(counts, 2, [8])
    assert coverage_of(ids, {"train": table}, 9) == {"train": 3 / 6}
    with pytest.raises(UsageError, match="the special tokens alone are 2"):
        most_frequent(counts, 1, [3, 8])


def test_a_run_says_its_coverage_and_exports_a_drafter_that_decodes_losslessly(
    workspace, whole_run
):
    folder = whole_run / "drafter/latest"
    drafter, target = load_model(folder), load_model(workspace / "target")
    assert (drafter.config.head_vocab_size, drafter.config.head_rank) == (SIZE, RANK)
    origin = json.loads((folder / "provenance.json").read_text())
    coverage = origin["head_coverage"]
    assert 0.5 < coverage["train"] <= 1 and 0.5 < coverage["valid"] <= 1
    special = {*target.config.eos_token_ids, *load_tokenizer(folder).all_special_ids}
    assert special <= set(drafter.head_ids.tolist())
    options = dict(device="cpu", tree="paper", max_length=256)
    decoder = stree.load(workspace / "target", folder, **options)
    plain = stree.load(workspace / "target", device="cpu", max_length=256)
    for temperature in (0.0, 1.0):
        setting = stree.GenerationConfig(24, temperature=temperature, seed=1)
        prompt = [5, 6, 7]
        assert decoder.generate(prompt, setting).tokens == plain.generate(prompt, setting).tokens


@pytest.mark.costly
def test_a_resumed_run_is_the_same_bit_for_bit(workspace, whole_run, tmp_path):
    more = (*HEAD, "--export.steps", "[2]", "--model.optimizer.lr", "0.01")
    arguments = distill_arguments(workspace, tmp_path / "run", *more, steps=4)
    distill.main(arguments)
    for folder, kept in (("checkpoints", 1), ("drafter", 0)):
        for path in (tmp_path / "run" / folder).glob("step-*"):
            if int(path.name[5:]) > kept:
                shutil.rmtree(path)
    distill.main(arguments)
    assert_same_run(tmp_path / "run", whole_run)


def test_a_sliced_head_begins_with_the_targets_rows(workspace):
    module = Distillation(str(workspace / "target"), head=HeadConfig(vocab_size=SIZE))
    ids = torch.arange(SIZE) * 2
    module.begin_head(ids, is_resumed=False)
    assert torch.equal(module.exported.lm_head.weight, module.target.head_weight[ids])
    low = Distillation(str(workspace / "target"), head=HeadConfig(rank=32))
    low.begin_head(None, is_resumed=False)
    product = low.exported.lm_head.weight @ low.exported.head_down.weight
    torch.testing.assert_close(product, low.target.head_weight)


def test_the_loss_is_that_of_the_masked_distribution(workspace):
    """The loss equals the definition, token by token, from full logits."""
    torch.manual_seed(2)
    ids = torch.arange(0, VOCAB_SIZE, 3)
    module = Distillation(str(workspace / "target"), head=HeadConfig(len(ids), 5))
    module.begin_head(ids, is_resumed=False)
    tokens = torch.randint(VOCAB_SIZE, (2, 9))
    batch = {"tokens": tokens, "segment_ids": torch.zeros_like(tokens),
             "loss_mask": torch.ones(2, 9, dtype=torch.bool)}
    batch["loss_mask"][:, 0] = False
    p = module.target(tokens)[:, :-1].softmax(-1)
    log_q = module.exported(tokens)[:, :-1].log_softmax(-1)
    assert log_q[..., 1].eq(-torch.inf).all()
    wanted = (p * (p.log() - log_q))[..., ids].sum(-1).mean()
    terms = module.loss_terms(module.on_before_batch_transfer(batch, 0))
    torch.testing.assert_close(terms.loss, wanted)
    accepted = torch.minimum(p, log_q.exp()).sum(-1).mean()
    torch.testing.assert_close(terms.simulated_acceptance, accepted)


@pytest.mark.costly
def test_a_trained_drafters_head_can_be_cut_and_one_with_a_head_goes_on(
    workspace, whole_run, tmp_path, capsys
):
    tokenizer = load_tokenizer(workspace / "target")
    own = Distillation(str(workspace / "target")).exported
    save_model(own, tmp_path / "whole", tokenizer)
    quick = ("--trainer.limit_val_batches", "0")
    start = ("--model.start_from", str(tmp_path / "whole"), *HEAD[:2], *quick)
    distill.main(distill_arguments(workspace, tmp_path / "cut", *start, steps=1))
    assert load_config(tmp_path / "cut/drafter/latest").head_vocab_size == SIZE
    start = ("--model.start_from", str(whole_run / "drafter/latest"), *quick)
    distill.main(distill_arguments(workspace, tmp_path / "on", *start, steps=1))
    assert capsys.readouterr().out.count(f"head is over {SIZE} of {VOCAB_SIZE} tokens") == 2
    before, after = (load_model(each / "drafter/latest") for each in (whole_run, tmp_path / "on"))
    assert torch.equal(before.head_ids, after.head_ids)
    with pytest.raises(UsageError, match="a head of its own already"):
        distill.main(distill_arguments(workspace, tmp_path / "no", *start, *HEAD))


def test_a_dry_run_says_the_coverage(workspace, tmp_path, capsys):
    arguments = distill_arguments(workspace, tmp_path / "run", *HEAD, "--dry_run")
    distill.main(arguments)
    out = capsys.readouterr().out
    assert f"the drafter's head is over {SIZE} of {VOCAB_SIZE} tokens" in out
    assert "in train" in out and "in valid" in out and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "more, said",
    [
        (("--model.head.vocab_size", "0"), "model.head.vocab_size is 0"),
        (("--model.head.vocab_size", "999"), "head_vocab_size is 999, it must be at most 320"),
        (("--model.head.vocab_size", "1"), "the special tokens alone are"),
        ((*HEAD, "--model.ce_weight", "0.1"), "model.ce_weight is 0.1, and the drafter's head"),
    ],
)
def test_what_cannot_be_is_refused(workspace, tmp_path, more, said):
    for dry in ((), ("--dry_run",)):
        with pytest.raises(UsageError, match=said):
            distill.main(distill_arguments(workspace, tmp_path / "run", *more, *dry))


def test_a_drafter_is_no_target(workspace, tmp_path):
    target = load_model(workspace / "target")
    cut = with_head(target, ids=torch.arange(50))
    save_model(cut, tmp_path / "target", load_tokenizer(workspace / "target"))
    with pytest.raises(UsageError, match="name the target itself"):
        Distillation(str(tmp_path / "target"))
