"""A teacher cache holds the target's outputs, is made in whole shards, and is trained from.

Tolerances: the cache's forward pass packs a sample beside other samples than a batch does, which
changes the order of sums: about 1e-6 in fp32. Half precision rounds a log-probability x by at most
|x|·2⁻¹¹.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import signal
from collections import namedtuple
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from damage import flip_last_byte
from forked import wait_until
from tiny_run import (
    ARCHITECTURE,
    VOCAB_SIZE,
    distill_arguments,
    metric_rows,
    write_conversations,
)

from stree.checkpoints.load_save import load_model, save_model
from stree.checkpoints.tokenizer import load_tokenizer
from stree.common.errors import CannotWrite, CheckpointRefused, UsageError
from stree.common.files import publish_directory
from stree_pipelines.commands import cache_teacher, distill
from stree_pipelines.data.datamodule import ConversationDataModule
from stree_pipelines.data.packing import TokenTable
from stree_pipelines.evaluation.context import Workers
from stree_pipelines.training import distillation
from stree_pipelines.training.distillation import Distillation
from stree_pipelines.training.module import shift_left
from stree_pipelines.training.teachers import cache_writer as teacher_cache_writer
from stree_pipelines.training.teachers.cache import (
    CacheSpec,
    ShardPlan,
    TeacherCache,
    counted_tokens,
)
from stree_pipelines.training.teachers.teachers import LiveTeacher

SHARDED = ("--shard_positions", "100")


def cache_arguments(workspace: Path, out: Path, *more: str) -> list[str]:
    return [
        "--model.target", str(workspace / "target"), "--data.train", str(workspace / "train.jsonl"),
        "--data.valid", str(workspace / "valid.jsonl"), "--data.sequence_length", "64",
        "--data.batch_size", "2", "--device", "cpu", "--out", str(out), *more,
    ]


def make_cache(workspace: Path, out: Path, *more: str) -> Path:
    cache_teacher.main(cache_arguments(workspace, out, *more))
    return out


@pytest.fixture(scope="module")
def whole(workspace, tmp_path_factory) -> Path:
    """Make a cache of all of the vocabulary, in full precision."""
    out = tmp_path_factory.mktemp("whole") / "cache"
    return make_cache(workspace, out, "--top_k", "320", "--dtype", "float32", *SHARDED)


@pytest.fixture(scope="module")
def small(workspace, tmp_path_factory) -> Path:
    return make_cache(workspace, tmp_path_factory.mktemp("small") / "cache", "--top_k", "8")


def files_of(folder: Path) -> dict[str, str]:
    paths = sorted(path for path in folder.rglob("[!.]*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
    }


def data_of(workspace: Path, **changes) -> ConversationDataModule:
    options = {"sequence_length": 64, "batch_size": 2, "seed": 0, **changes}
    data = ConversationDataModule(
        str(workspace / "train.jsonl"), str(workspace / "target"),
        str(workspace / "valid.jsonl"), **options,
    )
    data.setup()
    return data


# What it holds


@pytest.mark.parametrize(
    "changes",
    [{}, {"seed": 3}, {"batch_size": 5}, {"sequence_length": 40, "seed": 1}],
    ids=["as made", "another order", "other batches", "shorter rows"],
)
def test_a_batch_finds_what_the_live_target_says(workspace, whole, changes):
    data = data_of(workspace, **changes)
    data.use_teacher(TeacherCache(whole))
    target = load_model(workspace / "target")
    batches = [data.micro_batches(1, 3)[k] for k in range(4)] + list(data.val_dataloader())
    for batch in batches:
        with torch.no_grad():
            hidden = target.hidden_states(batch["tokens"], batch["segment_ids"])
        hidden = hidden[shift_left(batch["loss_mask"])]
        live = LiveTeacher(hidden, target.head_weight).log_distribution(hidden)
        cached = live.new_full(live.shape, torch.nan)
        cached.scatter_(1, batch["teacher_ids"].long(), batch["teacher_log_probs"])
        torch.testing.assert_close(cached, live.detach(), rtol=1e-5, atol=1e-5)
        assert batch["teacher_log_tail"].isneginf().all()  # nothing is left over


def test_half_precision_costs_what_it_may(workspace, whole, small):
    """The rows are those in fp32, ids in order of probability and a mass of one in all."""
    data = data_of(workspace)
    data.use_teacher(TeacherCache(small))
    few = data.micro_batches()[0]
    data.use_teacher(TeacherCache(whole))
    many = data.micro_batches()[0]
    assert torch.equal(few["teacher_ids"], many["teacher_ids"][:, :8])
    want = many["teacher_log_probs"]
    allowed = want[:, :8].abs() * 2**-11 + 1e-3  # and once more in the normalisation
    assert ((few["teacher_log_probs"] - want[:, :8]).abs() <= allowed).all()
    torch.testing.assert_close(few["teacher_log_tail"], want[:, 8:].logsumexp(1), rtol=0, atol=2e-3)
    mass = few["teacher_log_probs"].exp().sum(1) + few["teacher_log_tail"].exp()
    torch.testing.assert_close(mass, torch.ones_like(mass))


@pytest.mark.parametrize(("vocab_size", "num_bytes"), [(1 << 16, 2), ((1 << 16) + 1, 3)])
def test_ids_come_back(vocab_size, num_bytes):
    spec = CacheSpec("t", "f", vocab_size, 8, 1.0, 2, "float16", 100)
    ids = np.array([[0, 255], [256, vocab_size - 1], [65535, 1]], dtype=np.int32)
    stored = spec.encode_ids(ids)
    assert stored.nbytes == ids.size * num_bytes == ids.size * spec.id_bytes
    assert np.array_equal(spec.decode_ids(stored), ids)


def test_shards_hold_whole_samples_and_every_row_once():
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths = rng.integers(1, 20, rng.integers(1, 40))
        offsets = np.cumsum([0, *lengths])
        mask = rng.random(offsets[-1]) < rng.random()
        table = TokenTable(np.zeros(offsets[-1], np.int32), mask, offsets)
        counts = counted_tokens(table, 12)
        by_hand = [
            mask[a + 1 : a + min(n, 12)].sum() for a, n in zip(offsets, lengths, strict=False)
        ]
        assert counts.tolist() == by_hand
        plan = ShardPlan.of(table, CacheSpec("t", "f", 300, 12, 1.0, 2, "float16", 15))
        samples = [sample for shard in range(len(plan)) for sample in plan.samples(shard)]
        assert samples == list(range(len(table)))
        rows = [row for shard in range(len(plan)) for row in plan.rows(shard)]
        assert rows == list(range(counts.sum()))
        assert all(len(plan.rows(shard)) < 15 + 12 for shard in range(len(plan)))


def test_the_estimate_is_what_the_disk_gets(workspace, tmp_path, capsys):
    make_cache(workspace, tmp_path / "cache", "--top_k", "8", *SHARDED)
    printed = capsys.readouterr().out
    value, unit = re.search(r"([\d.]+) (KiB) in all", printed).groups()
    shards = list((tmp_path / "cache").glob("*/*/*"))
    assert unit == "KiB"
    taken = sum(path.stat().st_size for path in shards) / 1024
    assert float(value) == pytest.approx(taken, rel=0.02)


# How it is made


def test_killed_at_any_time_it_becomes_the_same(forks, workspace, tmp_path):
    arguments = ["--top_k", "8", *SHARDED]
    make_cache(workspace, tmp_path / "whole", *arguments)
    killed = tmp_path / "killed"
    running = forks.start(
        Path(cache_teacher.__file__), cache_arguments(workspace, killed, *arguments),
        tmp_path / "out",
    )
    wait_until(lambda: bool(list(killed.glob("train/shard-*"))), lambda: str(running))
    running.send(signal.SIGKILL)
    running.wait()
    there = sorted(killed.glob("train/shard-*"))
    assert there
    written = {path: path.stat().st_mtime_ns for path in there}
    with pytest.raises(CheckpointRefused, match="not finished"):
        data_of(workspace).use_teacher(TeacherCache(killed))
    make_cache(workspace, killed, *arguments)
    assert files_of(killed) == files_of(tmp_path / "whole")
    assert {path: path.stat().st_mtime_ns for path in there} == written


def test_processes_share_the_shards_and_need_not_meet(workspace, tmp_path, monkeypatch):
    arguments = ["--top_k", "8", *SHARDED]
    make_cache(workspace, tmp_path / "one", *arguments)
    made = []
    original = teacher_cache_writer.CacheWriter._write_shard
    monkeypatch.setattr(
        teacher_cache_writer.CacheWriter, "_write_shard",
        lambda self, split, shard, *rest: (
            made.append((split, shard)), original(self, split, shard, *rest)),
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):  # the last to begin finds half of it there
        monkeypatch.setenv("RANK", rank)
        make_cache(workspace, tmp_path / "two", *arguments)
    assert files_of(tmp_path / "two") == files_of(tmp_path / "one")
    assert len(made) == len(set(made)) == len(list((tmp_path / "two").glob("*/shard-*"))) > 4


def test_a_second_command_waits_and_looks_again(workspace, tmp_path, monkeypatch):
    """The first one fills the folder by other settings while the second one waits."""
    make_cache(workspace, tmp_path / "whole", "--top_k", "8")
    first, cache = ExitStack(), tmp_path / "cache"
    first.enter_context(Workers().locked(cache, pytest.fail))
    take_turns = Workers.locked

    def locked(workers, folder, on_wait):
        def finish_first():
            on_wait()
            shutil.copytree(tmp_path / "whole", cache, dirs_exist_ok=True)
            first.close()

        return take_turns(workers, folder, finish_first)

    monkeypatch.setattr(Workers, "locked", locked)
    monkeypatch.setattr(cache_teacher, "load_model", None)
    with pytest.raises(UsageError, match=r"holds another teacher cache .*top_k was 8, now 4"):
        make_cache(workspace, cache, "--top_k", "4")
    assert files_of(cache) == files_of(tmp_path / "whole")


def test_a_full_disk_is_refused_before_anything_is_loaded(workspace, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(9000, 8000, 1000))
    monkeypatch.setattr(cache_teacher, "load_model", None)
    with pytest.raises(CannotWrite, match=r"needs [\d.]+ KiB, .* has 1000 B free") as refused:
        make_cache(workspace, tmp_path / "cache")
    assert refused.value.exit_code == 73
    assert not list(tmp_path.iterdir())


def test_another_cache_is_not_mixed_in(workspace, small):
    with pytest.raises(UsageError, match=r"another teacher cache \(top_k was 8, now 16\)"):
        make_cache(workspace, small, "--top_k", "16")
    with pytest.raises(UsageError, match=r"\(other train data\)"):
        make_cache(workspace, small, "--top_k", "8", "--data.limit", "7")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--top_k", "321"), "wanted 1 to the vocabulary's size 320"),
        (("--top_k", "0"), "top_k is 0"),
        (("--shard_positions", "63"), "wanted at least sequence_length = 64"),
        (("--model.temperature", "0"), "temperature is 0"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message, workspace, tmp_path):
    with pytest.raises(UsageError, match=message):
        make_cache(workspace, tmp_path / "cache", *options)
    assert not list(tmp_path.iterdir())


# What does not fit


def test_a_flipped_bit_is_found_at_the_start(workspace, small, tmp_path):
    shutil.copytree(small, tmp_path / "cache")
    path = next((tmp_path / "cache/train").glob("shard-*/log_probs.npy"))
    flip_last_byte(path)
    arguments = distill_arguments(
        workspace, tmp_path / "run", "--model.teacher_cache", str(tmp_path / "cache")
    )
    with pytest.raises(CheckpointRefused, match=r"log_probs.npy has sha256 .* delete that folder"):
        distill.main(arguments)
    shutil.rmtree(path.parent)
    make_cache(workspace, tmp_path / "cache", "--top_k", "8")
    assert files_of(tmp_path / "cache") == files_of(small)


def test_a_shard_of_another_cache_is_refused(workspace, small, whole, tmp_path):
    make_cache(workspace, tmp_path / "cache", "--top_k", "9")
    ours, theirs = (folder / "valid/shard-00000-of-00001" for folder in (tmp_path / "cache", small))
    shutil.rmtree(ours)
    shutil.copytree(theirs, ours)
    with pytest.raises(CheckpointRefused, match="belongs to another cache"):
        data_of(workspace).use_teacher(TeacherCache(tmp_path / "cache"))


def test_a_shard_in_the_place_of_another_is_refused(workspace, whole, tmp_path):
    """Shards of one length would train on wrong targets; caches of older versions name no split."""
    cache = tmp_path / "cache"
    shutil.copytree(whole, cache)
    first, second = sorted((cache / "train").glob("shard-*"))[:2]
    kept = Path(shutil.move(first, tmp_path / "first"))
    for theirs, message in (
        (second, "holds shard 1 of train, not 0 of train: delete that folder"),
        (min((cache / "valid").glob("shard-*")), "holds shard 0 of valid, not 0 of train"),
    ):
        shutil.copytree(theirs, first)
        with pytest.raises(CheckpointRefused, match=message):
            data_of(workspace).use_teacher(TeacherCache(cache))
        shutil.rmtree(first)
    shutil.copytree(kept, first)
    for path in cache.glob("*/shard-*/MANIFEST.json"):
        manifest = json.loads(path.read_text())
        del manifest["split"]
        path.write_text(json.dumps(manifest))
    data_of(workspace).use_teacher(TeacherCache(cache))


def refuses(workspace: Path, cache: Path, message: str, tmp_path: Path, *more: str) -> None:
    arguments = distill_arguments(workspace, tmp_path / "run", *more)
    with pytest.raises(CheckpointRefused, match=message) as refused:
        distill.main([*arguments, "--model.teacher_cache", str(cache)])
    assert refused.value.exit_code == 66


def test_a_stale_cache_is_refused(workspace, small, tmp_path):
    other = tmp_path / "workspace"
    shutil.copytree(workspace, other)
    write_conversations(other / "valid.jsonl", count=9)
    refuses(other, small, "from other valid data", tmp_path)
    write_conversations(other / "train.jsonl", count=39)
    refuses(other, small, r"from other train data \(40 conversations.*here 39", tmp_path)
    refuses(workspace, small, "cut to 64 tokens", tmp_path, "--data.sequence_length", "65")
    refuses(
        workspace, small, "temperature 1.0, this run has 2", tmp_path, "--model.temperature", "2"
    )
    refuses(workspace, tmp_path, "holds no teacher cache", tmp_path)
    shutil.rmtree(other / "target")
    model = load_model(workspace / "target")
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1
    save_model(model, other / "target", load_tokenizer(workspace / "target"))
    refuses(other, small, "made with target_sha256", tmp_path)


def test_a_cache_of_another_tokenizer_is_refused(small):
    with pytest.raises(CheckpointRefused, match="made with tokenizer_fingerprint"):
        TeacherCache(small).require(tokenizer_fingerprint="0" * 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, "cannot be read"),
        ({"version": 2}, "version 2, wanted 1"),
        *(({"splits": splits}, "cannot be read") for splits in
          ([], {"train": 3}, {"train": {"num_samples": "40"}}, None)),
    ],
)
def test_a_damaged_description_is_refused(changes, message, small, tmp_path):
    content = json.loads((small / "cache.json").read_text())
    text = "{" if changes is None else json.dumps({**content, **changes})
    (tmp_path / "cache.json").write_text(text)
    with pytest.raises(CheckpointRefused, match=message):
        TeacherCache(tmp_path)


def test_rows_of_another_form_are_refused(workspace, small, tmp_path):
    """Their manifest fits them, as somebody could make it."""
    shutil.copytree(small, tmp_path / "cache")
    folder = tmp_path / "cache/train/shard-00000-of-00001"
    extra = {"cache": json.loads((folder / "MANIFEST.json").read_text())["cache"]}
    arrays = {name: np.load(folder / f"{name}.npy") for name in ("ids", "log_probs", "log_tail")}
    for name, values, message in (
        ("log_probs", arrays["log_probs"][:, :7], "other rows than the data"),
        ("log_tail", arrays["log_tail"].astype(np.float64), "other rows than the data"),
        ("ids", np.full_like(arrays["ids"], 320), "holds token 320, its vocabulary has 320"),
    ):
        with publish_directory(folder, extra, overwrite=True) as into:
            for each, array in {**arrays, name: values}.items():
                np.save(into / f"{each}.npy", array)
        data = data_of(workspace)
        with pytest.raises(CheckpointRefused, match=message):
            data.use_teacher(TeacherCache(tmp_path / "cache"))
            data.micro_batches()[0]


# Training


def random_drafter() -> list[str]:
    values = {**ARCHITECTURE, "num_layers": 2, "attn_layers": [], "d_model": 24}
    return [f"--model.drafter.{key}={json.dumps(value)}" for key, value in values.items()]


@pytest.fixture(scope="module")
def live_rows(workspace, tmp_path_factory) -> list[dict[str, str]]:
    run_dir = tmp_path_factory.mktemp("live")
    distill.main(distill_arguments(workspace, run_dir, *random_drafter()))
    return metric_rows(run_dir)


def values(rows: list[dict[str, str]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if row[name]]


def test_the_whole_vocabulary_gives_the_live_curve(
    workspace, whole, live_rows, tmp_path, monkeypatch
):
    """The target's weights are not loaded: a drafter of its own kind needs its config only."""
    monkeypatch.setattr(distillation, "load_model", None)
    more = (*random_drafter(), "--model.teacher_cache", str(whole))
    distill.main(distill_arguments(workspace, tmp_path, *more))
    rows = metric_rows(tmp_path)
    for name in ("loss", "simulated_acceptance", "val_loss", "val_simulated_acceptance"):
        assert values(rows, name) == pytest.approx(values(live_rows, name), rel=1e-4)


def test_eight_tokens_give_less_at_first_and_a_falling_loss(workspace, small, live_rows, tmp_path):
    more = (*random_drafter(), "--model.teacher_cache", str(small))
    distill.main(distill_arguments(workspace, tmp_path, *more, steps=12))
    rows = metric_rows(tmp_path)
    for name in ("loss", "simulated_acceptance"):
        assert 0 < values(rows, name)[0] < values(live_rows, name)[0]
    assert values(rows, "loss")[-1] < values(rows, "loss")[0]


def test_a_cut_out_drafter_starts_from_the_target(workspace, small, tmp_path):
    """Its target is gone by the time that training starts."""
    module = Distillation(str(workspace / "target"), teacher_cache=str(small))
    assert module.target is None
    assert module.exported.config.vocab_size == VOCAB_SIZE
    distill.main(distill_arguments(
        workspace, tmp_path, "--model.teacher_cache", str(small), steps=2
    ))
    assert (tmp_path / "drafter/latest/model.safetensors").is_file()
