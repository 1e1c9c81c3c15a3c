"""The LightningDataModule: conversations packed into batches that depend on (seed, k) alone.

There are no epochs for the trainer: micro-batch k, counted from the start of training, is a pure
function of the seed and k (and of rank and world size), and `len` of the loader is the whole
training. Resuming therefore needs no loader state, only the number of batches done, which the
trainer restores. Rows come in a new order every pass over the data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from numpy.typing import NDArray

from stree.errors import BadData, CheckpointRefused, UsageError
from stree.tokenizer import load_tokenizer
from stree_pipelines.chat import ChatEncoder, show_mask
from stree_pipelines.conversations import ReadReport, read_conversations
from stree_pipelines.packing import Packing, TokenTable, make_batch, pack

Batch = dict[str, torch.Tensor]
CHUNK = 1024  # conversations encoded together


def tokenize(
    sources: list[str], encoder: ChatEncoder, strict: bool = False, limit: int | None = None
) -> tuple[TokenTable, list[ReadReport]]:
    """All conversations of `sources` (at most `limit` over all) as one flat table, and what each
    source gave. Raises `BadData` as `read_conversations` does."""
    tokens: list[NDArray[np.int32]] = []
    masks: list[NDArray[np.bool_]] = []
    lengths: list[int] = []
    reports: list[ReadReport] = []
    for source in sources:
        left = None if limit is None else limit - len(lengths)
        if left == 0:
            break
        conversations, report = read_conversations(source, strict=strict, limit=left)
        while chunk := list(islice(conversations, CHUNK)):
            for chat in encoder.encode([conversation.turns for conversation in chunk]):
                tokens.append(chat.tokens)
                masks.append(chat.assistant)
                lengths.append(len(chat.tokens))
        reports.append(report)
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    return TokenTable(np.concatenate(tokens), np.concatenate(masks), offsets), reports


@lru_cache(maxsize=4)  # every micro-batch of a pass asks for the same one
def permutation(seed: int, stream: int, size: int) -> NDArray[np.int64]:
    """A permutation of range(size) that is a function of (seed, stream). Built on the raw output of
    PCG64, which NumPy keeps stable across versions (shuffling functions it does not)."""
    keys = np.random.PCG64(np.random.SeedSequence((seed, stream))).random_raw(size)
    order = np.argsort(keys, kind="stable")
    order.flags.writeable = False
    return order


@dataclass(frozen=True)
class MicroBatches:
    """The endless sequence of training batches of one rank: item k is a function of (seed, k).

    The packed rows are laid out pass after pass, each pass permuted by (seed, its number); global
    micro-batch k is the k-th stretch of `world_size * batch_size` rows, of which each rank takes
    `batch_size` in turn.
    """

    table: TokenTable
    packing: Packing
    batch_size: int
    seed: int
    pad_id: int
    rank: int = 0
    world_size: int = 1

    def rows(self, k: int) -> NDArray[np.int64]:
        """Rows of the packing that stand in micro-batch k of this rank: (batch_size,)."""
        start = (k * self.world_size + self.rank) * self.batch_size
        places = np.arange(start, start + self.batch_size)
        passes, within = np.divmod(places, len(self.packing))
        rows = np.empty(self.batch_size, dtype=np.int64)
        for number in np.unique(passes):
            chosen = passes == number
            # stream 0 ordered the samples for packing
            order = permutation(self.seed, int(number) + 1, len(self.packing))
            rows[chosen] = order[within[chosen]]
        return rows

    def __getitem__(self, k: int) -> Batch:
        arrays = make_batch(self.table, self.packing, self.rows(k), self.pad_id)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


class TrainLoader:
    """Micro-batches from where the trainer stands to the end of training.

    Lightning 2.6.6 counts on three things when it resumes inside an epoch. `len` is the whole
    length, because the fit loop adds the restored count to what it fetched. The position is looked
    up at the first `next` and no sooner: a module that asks for `estimated_stepping_batches` makes
    Lightning call `iter` before it restores the checkpoint (for the same reason there are no
    worker processes, which would prefetch from batch 0; a batch is a copy out of memory). And the
    two state methods say that the loader is resumable; they carry nothing.
    """

    def __init__(self, batches: MicroBatches, length: int, trainer: pl.Trainer):
        self.batches = batches
        self.length = length
        self.trainer = trainer

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Batch]:
        for k in range(micro_batches_done(self.trainer), self.length):
            yield self.batches[k]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


@dataclass(frozen=True)
class FixedBatches:
    """A loader of ready batches (a bare list would be several loaders to Lightning)."""

    batches: list[Batch]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def micro_batches_done(trainer: pl.Trainer) -> int:
    """How many micro-batches the finished optimizer steps took; where training goes on.

    Raises `CheckpointRefused` when a restored trainer stands between two optimizer steps: its
    checkpoint lacks the gradients accumulated so far, or accumulate_grad_batches was changed.
    """
    done = trainer.global_step * trainer.accumulate_grad_batches
    counted = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    if trainer.current_epoch == 0 and counted != done:
        raise CheckpointRefused(
            f"the checkpoint has seen {counted} micro-batches, but its {trainer.global_step} steps "
            f"of accumulate_grad_batches={trainer.accumulate_grad_batches} make {done}: resume "
            "with the value it was trained with, from a checkpoint saved at a step's end"
        )
    return done


class ConversationDataModule(pl.LightningDataModule):
    """Chat data for distillation and training.

    Batches are dicts of `tokens` (B, T) int64, `segment_ids` (B, T) int64 and `loss_mask` (B, T)
    bool; see `packing.make_batch`. `trainer.max_steps` must be set: it says how long training is.
    """

    def __init__(
        self,
        train: str | list[str],
        tokenizer: str,
        valid: str | list[str] | None = None,
        sequence_length: int = 1024,
        batch_size: int = 8,
        seed: int = 0,
        template: str | None = None,
        strict: bool = False,
        limit: int | None = None,
        num_valid_batches: int = 16,
    ):
        """
        Args:
            train: JSONL(.gz) or Parquet file, folder, `datasets` name (`name:split`), or several.
            tokenizer: folder of the tokenizer, e.g. the target's checkpoint.
            valid: like `train`, for the validation loss; None for none.
            sequence_length: tokens in a packed row (T).
            batch_size: rows in a micro-batch on one device (B).
            seed: of the order of the data.
            template: chat template by name, .jinja file or text; default the tokenizer's own.
            strict: stop at the first bad row instead of skipping and counting it.
            limit: use at most this many training conversations.
            num_valid_batches: batches in a validation, over all devices.
        """
        super().__init__()
        for name, value in (("batch_size", batch_size), ("num_valid_batches", num_valid_batches)):
            if value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        if sequence_length < 2:
            raise UsageError(f"sequence_length must be at least 2, got {sequence_length}")
        if seed < 0:
            raise UsageError(f"seed must not be negative, got {seed}")
        if limit is not None and limit < 1:
            raise UsageError(f"limit must be at least 1, or null for all, got {limit}")
        self.train_sources = [train] if isinstance(train, str) else list(train)
        self.valid_sources = [valid] if isinstance(valid, str) else list(valid or [])
        self.tokenizer_path = tokenizer
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.seed = seed
        self.template = template
        self.strict = strict
        self.limit = limit
        self.num_valid_batches = num_valid_batches
        self.reports: list[ReadReport] = []
        self.tokenizer: Any = None
        self.pad_id = 0
        self._data_sha256 = ""
        self._train: tuple[TokenTable, Packing] | None = None
        self._valid: tuple[TokenTable, Packing] | None = None

    def setup(self, stage: str | None = None) -> None:
        """Read, tokenise and pack, once."""
        if self._train is not None:
            return
        if not self.train_sources:
            raise UsageError("train names no data; give a file, a folder or a datasets name")
        self.tokenizer = load_tokenizer(self.tokenizer_path)
        pads = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        self.pad_id = next((pad for pad in pads if pad is not None), 0)
        encoder = ChatEncoder(self.tokenizer, self.template)
        self._train = self._prepare("train", self.train_sources, encoder, self.seed, self.limit)
        self._data_sha256 = _digest(self._train[0])
        if self.valid_sources:
            self._valid = self._prepare("valid", self.valid_sources, encoder, None, None)

    def _prepare(
        self, name: str, sources: list[str], encoder: ChatEncoder, seed: int | None,
        limit: int | None,
    ) -> tuple[TokenTable, Packing]:  # fmt: skip
        table, reports = tokenize(sources, encoder, self.strict, limit)
        order = np.arange(len(table)) if seed is None else permutation(seed, 0, len(table))
        packing = pack(table, self.sequence_length, order)
        self.reports += reports
        for report in reports:
            rank_zero_info(str(report))
        if not len(packing):
            raise BadData(
                f"{', '.join(sources)}: no conversation has an assistant token within "
                f"sequence_length={self.sequence_length} tokens; raise it"
            )
        num_tokens = int(np.minimum(table.lengths[packing.samples], self.sequence_length).sum())
        rank_zero_info(
            f"{name}: {len(table):,} conversations, {num_tokens:,} tokens in {len(packing):,} rows "
            f"of {self.sequence_length}; {packing.num_truncated:,} cut "
            f"(−{packing.num_dropped_tokens:,} tokens), {packing.num_unused:,} left out "
            "(no assistant token within a row)"
        )
        return table, packing

    def micro_batches(self, rank: int = 0, world_size: int = 1) -> MicroBatches:
        """The training batches of a rank by number; needs `setup` only, no trainer."""
        assert self._train is not None, "setup() comes first"
        return MicroBatches(*self._train, self.batch_size, self.seed, self.pad_id, rank, world_size)

    def train_dataloader(self) -> TrainLoader:
        trainer = self.trainer
        assert trainer is not None
        if trainer.max_steps < 1:
            raise UsageError(
                f"trainer.max_steps must say how long to train, got {trainer.max_steps}; the data "
                "has no epochs (set max_epochs to -1)"
            )
        length = trainer.max_steps * trainer.accumulate_grad_batches
        batches = self.micro_batches(trainer.global_rank, trainer.world_size)
        return TrainLoader(batches, length, trainer)

    def val_dataloader(self) -> FixedBatches | list[Batch]:
        """The same batches every time, the data's first rows in order; ranks take them in turn."""
        if self._valid is None:
            return []
        rank, world_size = 0, 1
        if self.trainer is not None:
            rank, world_size = self.trainer.global_rank, self.trainer.world_size
        table, packing = self._valid
        num_full = -(-len(packing) // self.batch_size)
        total = min(self.num_valid_batches, num_full)
        mine = [(i * world_size + rank) % total for i in range(max(1, total // world_size))]
        batches = []
        for number in mine:
            begin = number * self.batch_size
            rows = np.arange(begin, min(begin + self.batch_size, len(packing)))
            arrays = make_batch(table, packing, rows, self.pad_id)
            batches.append({name: torch.from_numpy(array) for name, array in arrays.items()})
        return FixedBatches(batches)

    def state_dict(self) -> dict[str, Any]:
        """What the batches are a function of, so that a resumed run can refuse other data."""
        assert self._train is not None, "setup() comes first"
        world_size = self.trainer.world_size if self.trainer is not None else 1
        return {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "sequence_length": self.sequence_length,
            "world_size": world_size,
            "data_sha256": self._data_sha256,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        mine = self.state_dict()
        for name, value in state_dict.items():
            if name in mine and mine[name] != value:
                raise CheckpointRefused(
                    f"the checkpoint was trained with {name}={value}, this run has {mine[name]}: "
                    "the batches would not continue. Use the same, or start a new run"
                )

    def show_mask(self, index: int = 0, color: bool | None = None) -> str:
        """Training conversation `index` as text with what counts for the loss set apart."""
        assert self._train is not None, "setup() comes first"
        table, _ = self._train
        if not 0 <= index < len(table):
            raise UsageError(f"there are {len(table):,} conversations, no number {index}")
        part = slice(table.offsets[index], table.offsets[index + 1])
        return show_mask(table.tokens[part], table.mask[part], self.tokenizer, color)


def _digest(table: TokenTable) -> str:
    digest = hashlib.sha256()
    for array in (table.tokens, table.mask, table.offsets):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
