"""The data module: batch k depends on (seed, k) alone, also after a resume and over ranks."""

import json
import warnings
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from other_days import DATED, set_day

from stree.common.errors import BadData, CheckpointRefused, NotFound, UsageError
from stree_pipelines.data.datamodule import ConversationDataModule, accumulation
from stree_pipelines.data.micro_batches import permutation
from stree_pipelines.data.tokenizer_training import train_tokenizer
from stree_pipelines.training.module import real_tokens

NUM_CHATS = 60


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    words = ["red", "green", "blue", "cat", "dog", "fox", "runs", "eats", "sleeps", "fast"]

    def text():
        return " ".join(rng.choice(words, rng.integers(1, 12)))

    for name, count in (("train", NUM_CHATS), ("valid", 20)):
        rows = [
            {"conversations": [{"from": "human", "value": f"{i} {text()}"},
                               {"from": "gpt", "value": text()}] * rng.integers(1, 4)}
            for i in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_tokenizer([" ".join(words)] * 9, 320, folder / "tokenizer")
    return {
        "train": str(folder / "train.jsonl"),
        "valid": str(folder / "valid.jsonl"),
        "tokenizer": str(folder / "tokenizer"),
    }


def module(paths, **options):
    settings = {"sequence_length": 64, "batch_size": 3, "seed": 5, **paths, **options}
    made = ConversationDataModule(**settings)
    made.setup()
    return made


def same(one, other):
    return all(
        torch.equal(one[name], other[name]) for name in ("tokens", "segment_ids", "loss_mask")
    )


def test_batches_have_the_shapes_of_the_contract(paths):
    batch = module(paths).micro_batches()[0]
    assert batch.pop("totals").keys() == {"tokens", "assistant", "all"}
    assert len(batch.pop("number")) == 3
    assert {name: (tuple(t.shape), t.dtype) for name, t in batch.items()} == {
        "tokens": ((3, 64), torch.int64),
        "segment_ids": ((3, 64), torch.int64),
        "loss_mask": ((3, 64), torch.bool),
    }


def test_batch_k_is_a_function_of_seed_and_k(paths):
    one, two, other = module(paths), module(paths), module(paths, seed=6)
    forwards = [one.micro_batches()[k] for k in range(40)]
    for k in reversed(range(40)):
        assert same(forwards[k], two.micro_batches()[k])
    assert not any(same(forwards[k], other.micro_batches()[k]) for k in range(40))


def test_each_pass_has_every_row_once_in_its_own_order(paths):
    batches = module(paths).micro_batches()
    num_rows = len(batches.packing)
    stream = np.concatenate([batches.rows(k) for k in range(4 * num_rows)])  # 12 passes
    passes = stream.reshape(12, num_rows)
    assert (np.sort(passes, axis=1) == np.arange(num_rows)).all()
    assert len({tuple(rows) for rows in passes}) == 12


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_ranks_partition_the_global_batch(paths, world_size):
    data = module(paths)
    whole = module(paths, batch_size=3 * world_size).micro_batches()
    for k in range(30):
        parts = [data.micro_batches(rank, world_size).rows(k) for rank in range(world_size)]
        assert np.concatenate(parts).tolist() == whole.rows(k).tolist()


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 4), (4, 1), (2, 2)])
def test_totals_are_those_of_the_global_batch(paths, world_size, accumulate):
    """Each micro-batch has the token counts of all ranks' tensors of its step."""
    data = module(paths)
    ranks = [data.micro_batches(rank, world_size, accumulate) for rank in range(world_size)]
    for step in range(30):
        wanted = dict.fromkeys(("tokens", "assistant", "all"), 0)
        parts = [each[step * accumulate + i] for each in ranks for i in range(accumulate)]
        for part in parts:
            real = real_tokens(part["segment_ids"], part["loss_mask"])
            firsts = part["segment_ids"].diff(dim=1, prepend=-torch.ones(3, 1)) != 0
            wanted["tokens"] += int(real.sum())
            wanted["assistant"] += int(part["loss_mask"].sum())
            wanted["all"] += int((real & ~firsts).sum())
        assert all(part["totals"] == wanted for part in parts)


@pytest.mark.parametrize(
    ("batch_size", "world_size", "given", "wanted", "trained", "accumulate"),
    [(2, 1, 1, None, None, 1), (2, 4, 3, None, None, 3), (2, 2, 1, 8, None, 2), (1, 2, 1, 8, 8, 4),
     (2, 1, 1, None, 8, 4), (4, 2, 4, None, 8, 1)],
)
def test_accumulation_keeps_the_global_batch(
    batch_size, world_size, given, wanted, trained, accumulate
):
    assert accumulation(batch_size, world_size, given, wanted, trained) == accumulate


def test_a_global_batch_that_cannot_be_shared_or_was_another_is_refused():
    with pytest.raises(UsageError, match=r"8 rows a step cannot be shared by 3 processes"):
        accumulation(2, 3, 1, None, 8)
    with pytest.raises(UsageError, match=r"8 rows .* by 2 processes in micro-batches of 8"):
        accumulation(8, 2, 1, 8, None)
    with pytest.raises(UsageError, match=r"trained with 8 rows a step, .* is now 16"):
        accumulation(2, 1, 1, 16, 8)


def test_permutation_is_pinned():
    """A change here would silently change what every resumed run trains on."""
    assert permutation(0, 0, 8).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert sorted(permutation(3, 2, 1000).tolist()) == list(range(1000))


class Recorder(pl.LightningModule):
    """Module that records the batch of each training and validation step."""

    def __init__(self, save_at=(), folder=None, asks_early=False):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.save_at, self.folder, self.asks_early = save_at, folder, asks_early
        self.seen, self.steps, self.validated = [], [], 0

    def training_step(self, batch, batch_idx):
        self.seen.append(batch)
        self.steps.append((batch_idx, self.global_step))
        return (self.weight * batch["tokens"].float().mean()).sum()

    def validation_step(self, batch, batch_idx):
        self.validated += 1

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if len(self.seen) in self.save_at:
            self.trainer.save_checkpoint(self.folder / f"{len(self.seen)}.ckpt")

    def configure_optimizers(self):
        if self.asks_early:  # makes Lightning build the loader before it restores the checkpoint
            assert self.trainer.estimated_stepping_batches == self.trainer.max_steps
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(data, model, max_steps, ckpt=None, **options):
    trainer = pl.Trainer(
        max_steps=max_steps, accelerator="cpu", devices=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, check_val_every_n_epoch=None,
        **{"val_check_interval": 4, "max_epochs": -1, **options},
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not resumable.*")
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        trainer.fit(model, datamodule=data, ckpt_path=ckpt, weights_only=False)
    return trainer


@pytest.mark.parametrize("asks_early", [False, True], ids=["plain", "estimated-steps"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_resumed_training_sees_the_batches_of_the_uninterrupted_run(
    paths, tmp_path, accumulate, asks_early
):
    total = 12
    ends = range(accumulate, total, accumulate)
    options = {"max_steps": total // accumulate, "accumulate_grad_batches": accumulate}
    if asks_early:  # with endless epochs Lightning need not look at the loader to answer
        options["max_epochs"] = 1
    whole = Recorder(save_at=ends, folder=tmp_path)
    fit(module(paths), whole, **options)
    wanted = module(paths).micro_batches()
    assert len(whole.seen) == total
    assert all(same(batch, wanted[k]) for k, batch in enumerate(whole.seen))
    for end in ends:
        resumed = Recorder(asks_early=asks_early)
        trainer = fit(module(paths), resumed, ckpt=tmp_path / f"{end}.ckpt", **options)
        assert trainer.global_step == total // accumulate
        assert resumed.steps == whole.steps[end:]
        assert len(resumed.seen) == total - end
        assert all(same(a, b) for a, b in zip(resumed.seen, whole.seen[end:], strict=True))
        assert torch.equal(resumed.weight, whole.weight)


def test_a_finished_run_can_be_made_longer(paths, tmp_path):
    fit(module(paths), Recorder(save_at=[6], folder=tmp_path), max_steps=6)
    longer = Recorder()
    fit(module(paths), longer, max_steps=9, ckpt=tmp_path / "6.ckpt")
    wanted = module(paths).micro_batches()
    assert len(longer.seen) == 3
    assert all(same(batch, wanted[6 + i]) for i, batch in enumerate(longer.seen))


def test_a_checkpoint_between_two_steps_is_refused(paths, tmp_path):
    options = {"max_steps": 4, "accumulate_grad_batches": 2}
    fit(module(paths), Recorder(save_at=[3], folder=tmp_path), **options)
    with pytest.raises(CheckpointRefused, match="seen 3 micro-batches, but its 1 steps"):
        fit(module(paths), Recorder(), ckpt=tmp_path / "3.ckpt", **options)


@pytest.mark.parametrize(
    ("change", "accumulate", "said"),
    [
        ({"seed": 6}, 1, "seed=5"), ({"batch_size": 2}, 1, "global_batch_size=3, this run has 2"),
        ({}, 2, "global_batch_size=3, this run has 6"),
        ({"sequence_length": 32}, 1, "sequence_length=64"), ({"limit": 50}, 1, "data_sha256="),
    ],
)
def test_other_data_is_refused_on_resume(paths, tmp_path, change, accumulate, said):
    fit(module(paths), Recorder(save_at=[4], folder=tmp_path), 6)
    with pytest.raises(CheckpointRefused, match=f"trained with {said}"):
        fit(
            module(paths, **change), Recorder(), 6, ckpt=tmp_path / "4.ckpt",
            accumulate_grad_batches=accumulate,
        )


def test_a_template_that_prints_the_date_lets_a_run_go_on_the_next_day(
    paths, tmp_path, monkeypatch
):
    set_day(monkeypatch, 26)
    first = module(paths, template=DATED)
    fit(first, Recorder(save_at=[4], folder=tmp_path), 4)
    set_day(monkeypatch, 27)
    second = module(paths, template=DATED)
    trainer = fit(second, Recorder(), 6, ckpt=tmp_path / "4.ckpt")
    assert trainer.global_step == 6 and same(first.micro_batches()[0], second.micro_batches()[0])
    state = torch.load(tmp_path / "4.ckpt")["ConversationDataModule"]
    assert state["template_date"] == "2024-07-26"
    assert module(paths).template_date is None


def test_training_without_an_end_is_refused(paths):
    with pytest.raises(UsageError, match=r"trainer\.max_steps must say"):
        fit(module(paths), Recorder(), -1, max_time="00:00:01:00")


def test_validation_has_the_same_batches_every_time(paths):
    data = module(paths, num_valid_batches=2)
    one, two = data.val_dataloader(), data.val_dataloader()
    assert len(one) == len(two) == 2
    assert all(same(a, b) for a, b in zip(one, two, strict=True))
    recorder = Recorder()
    fit(module(paths, num_valid_batches=2), recorder, 8)  # every 4 batches
    assert recorder.validated == 4
    assert module({**paths, "valid": None}).val_dataloader() == []


@pytest.mark.parametrize(("batch_size", "world_size", "accumulate"), [(2, 2, 3), (3, 4, 1)])
def test_ranks_validate_the_same_rows_in_equally_many_batches(
    paths, batch_size, world_size, accumulate
):
    """The ranks share 12 rows a step; two such batches have more rows than the data."""
    whole = [
        row for batch in module(paths, batch_size=12).val_dataloader() for row in rows_of(batch)
    ]
    loads = []
    for rank in range(world_size):
        data = module(paths, num_valid_batches=2, batch_size=batch_size)
        data.trainer = SimpleNamespace(
            global_rank=rank, world_size=world_size, accumulate_grad_batches=accumulate
        )
        loads.append(list(data.val_dataloader()))
    assert len({len(load) for load in loads}) == 1
    rows = [row for load in loads for batch in load for row in rows_of(batch)]
    assert sorted(rows) == sorted(whole)


def rows_of(batch):
    """Return the rows that count."""
    return [row.tolist() for row in batch["tokens"][batch["loss_mask"].any(dim=1)]]


def test_several_sources_and_a_limit_over_all(paths):
    data = module(paths, train=[paths["train"], paths["valid"]], limit=NUM_CHATS + 5)
    assert [report.accepted for report in data.reports[:2]] == [NUM_CHATS, 5]
    assert len(module(paths, limit=7).reports) == 2  # train and valid


def test_show_mask_prints_a_conversation(paths):
    text = module(paths).show_mask(0, color=False)
    assert text.count("⟦") == text.count("⟧") >= 2 and "<|user|>0 " in text


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 0}, UsageError, "batch_size is 0, wanted at least 1"),
        ({"sequence_length": 1}, UsageError, "sequence_length is 1, wanted at least 2"),
        ({"limit": 0}, UsageError, "limit is 0, wanted at least 1"),
        ({"seed": -1}, UsageError, "seed is -1, wanted at least 0"),
        ({"train": []}, UsageError, "names no data"),
        ({"train": "missing.jsonl"}, NotFound, "no such file"),
        ({"tokenizer": "missing"}, NotFound, "missing"),
        ({"template": "missing"}, UsageError, "no chat template"),
        ({"sequence_length": 2}, BadData, "raise it"),
    ],
)
def test_bad_settings_are_refused(paths, options, error, message):
    with pytest.raises(error, match=message):
        module({**paths, "valid": None}, **options)
