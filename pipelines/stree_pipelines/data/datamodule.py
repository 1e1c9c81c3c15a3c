"""Serve conversations to Lightning, packed into batches that depend on (seed, k) alone.

There are no epochs for the trainer. The unit is the global batch, the rows of one optimizer step
over all ranks and accumulated micro-batches: it is a pure function of the seed and the step's
number, for any number of ranks. `len` of the loader is the whole training. Resuming therefore needs
no loader state, only the number of steps done, which the trainer restores. Rows come in a new order
every pass over the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from numpy.typing import NDArray

from stree.chat_encoding import ChatEncoder
from stree.checkpoints.tokenizer import fingerprint, load_tokenizer, tokens_sha256
from stree.common.errors import BadData, CheckpointRefused, UsageError, require_fitting
from stree.common.template_dates import template_date
from stree_pipelines.data.conversations import ReadReport, read_conversations
from stree_pipelines.data.encoding import encoded
from stree_pipelines.data.generated import is_generated, read_answers
from stree_pipelines.data.loss_mask import show_mask
from stree_pipelines.data.micro_batches import Batch, MicroBatches, as_tensors, permutation
from stree_pipelines.data.packing import Packing, TokenTable, joined, make_batch, pack, shared_out

MIX_STREAM = 1 << 40  # stream of random numbers; passes over the data use the small numbers


def tokenize(
    source: str, tokenizer: Any, encoder: ChatEncoder, limit: int | None = None,
    hardest: float = 1.0,
) -> tuple[TokenTable, ReadReport]:
    """Read and tokenise the conversations of a source (at most `limit`) into one flat table.

    Answers of generate_data.py keep the ids that they have there; of them, only the share `hardest`
    with the lowest acceptance lengths is taken; an answer of one token, which took no call, comes
    last. The report counts the rows. Raises `BadData` as `read_conversations` and `read_answers`
    do, and `CheckpointRefused` for generated data of another tokenizer.
    """
    tokens: list[NDArray[np.int32]] = []
    masks: list[NDArray[np.bool_]] = []
    report = ReadReport(source)
    if is_generated(source):
        hashes = tokens_sha256(tokenizer), fingerprint(tokenizer)
        answers = list(read_answers(Path(source).expanduser(), *hashes, limit))
        by_tau = np.argsort([tau for *_, tau in answers], kind="stable")
        for number in sorted(by_tau[: math.ceil(hardest * len(answers))]):
            tokens.append(answers[number][0])
            masks.append(answers[number][1])
        report.given = report.accepted = len(tokens)
    else:
        conversations, report = read_conversations(source, limit=limit)
        for _, samples in encoded(conversations, report, encoder):
            tokens += [sample.tokens for sample in samples]
            masks += [sample.assistant for sample in samples]
    offsets = np.cumsum([0, *map(len, tokens)], dtype=np.int64)
    return TokenTable(np.concatenate(tokens), np.concatenate(masks), offsets), report


class TrainLoader:
    """Loader of micro-batches, from the trainer's step to the end of training.

    Lightning 2.6.6 relies on three things when it resumes inside an epoch. `len` is the whole
    length, because the fit loop adds the restored count to the batches it fetched. The position is
    looked up at the first `next` and no sooner: a module that asks for `estimated_stepping_batches`
    makes Lightning call `iter` before it restores the checkpoint (for the same reason there are no
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


def accumulation(
    batch_size: int, world_size: int, given: int, wanted: int | None, trained: int | None
) -> int:
    """Return the micro-batches per step that give the wanted global batch.

    Args:
        batch_size: rows in a micro-batch on one device.
        given: trainer.accumulate_grad_batches, which is taken when nothing else is known.
        wanted: data.global_batch_size, rows a step.
        trained: rows a step of the checkpoint to resume from.

    Raises UsageError when the rows cannot be shared like that.
    """
    rows = batch_size * world_size
    total = trained or wanted or rows * given
    if wanted not in (None, total):
        raise UsageError(
            f"the run was trained with {total} rows a step, data.global_batch_size is now {wanted}:"
            " the curve would not continue. Use the same, or start a new run"
        )
    if total % rows:
        raise UsageError(
            f"{total} rows a step cannot be shared by {world_size} processes in micro-batches of "
            f"{batch_size}: choose a number of processes and a data.batch_size whose product "
            f"divides {total}"
        )
    return total // rows


def recount_micro_batches(checkpoint: dict[str, Any], accumulate: int) -> None:
    """Convert a checkpoint's progress to this trainer's micro-batches per step.

    The checkpoint's steps may have had fewer or more.
    """
    steps = checkpoint["global_step"]
    before = checkpoint[ConversationDataModule.__qualname__]["accumulate"]
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        for name in counts:
            counts[name] += steps * (accumulate - before)


def micro_batches_done(trainer: pl.Trainer) -> int:
    """Return the micro-batches of the finished optimizer steps, where training goes on.

    Raises `CheckpointRefused` when a restored trainer stands between two optimizer steps: its
    checkpoint lacks the gradients accumulated so far.
    """
    done = trainer.global_step * trainer.accumulate_grad_batches
    counted = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    if trainer.current_epoch == 0 and counted != done:
        raise CheckpointRefused(
            f"the checkpoint has seen {counted} micro-batches, but its {trainer.global_step} steps "
            f"of accumulate_grad_batches={trainer.accumulate_grad_batches} make {done}: resume "
            "from a checkpoint saved at a step's end"
        )
    return done


class ConversationDataModule(pl.LightningDataModule):
    """Chat data for distillation and training.

    Batches are dicts of `tokens` (B, T) int64, `segment_ids` (B, T) int64 and `loss_mask` (B, T)
    bool; see `packing.make_batch`. `trainer.max_steps` must be set: it is the length of the
    training.
    """

    def __init__(
        self,
        train: str | list[str],
        tokenizer: str,
        valid: str | list[str] | None = None,
        sequence_length: int = 1024,
        batch_size: int = 8,
        global_batch_size: int | None = None,
        seed: int = 0,
        template: str | None = None,
        limit: int | None = None,
        mix: list[float] | None = None,
        hardest: float = 1.0,
        num_valid_batches: int = 16,
    ):
        """
        Args:
            train: JSONL(.gz) or Parquet file, folder (also of generate_data.py), `datasets` name
                (`name:split`, `owner/name/config:split`), or several.
            tokenizer: folder of the tokenizer, e.g. the target's checkpoint.
            valid: like `train`, for the validation loss; None for none.
            sequence_length: tokens in a packed row (T).
            batch_size: rows in a micro-batch on one device (B). A resumed run may change it; the
                number of accumulated micro-batches follows.
            global_batch_size: rows in an optimizer step, over all devices and micro-batches; the
                number of accumulated micro-batches follows. By default it is processes ×
                batch_size × accumulate_grad_batches at the first start, and stays that.
            seed: of the order of the data.
            template: chat template by name, .jinja file or text; default the tokenizer's own.
            limit: use at most this many training conversations.
            mix: shares of the sources of `train` in the tokens that count for the loss; of a source
                that has more, a part is used. Default: all of each.
            hardest: of the answers of a generate_data.py folder, the share to train on: those in
                which the fewest drafts were accepted, the drafter's mistakes.
            num_valid_batches: size of a validation, in global batches.
        """
        super().__init__()
        num_sources = 1 if isinstance(train, str) else len(train)
        if mix is not None and (num_sources < 2 or len(mix) != num_sources):
            raise UsageError(
                f"mix has {len(mix)} shares for {num_sources} sources in train: give one share to "
                "each of two or more"
            )
        if any(share <= 0 for share in mix or ()):
            raise UsageError(
                f"mix is {mix}, wanted shares above 0: leave a source without a share out of train"
            )
        self.mix = mix
        self.hardest = hardest
        self.train_sources = [train] if isinstance(train, str) else list(train)
        self.valid_sources = [valid] if isinstance(valid, str) else list(valid or [])
        self.tokenizer_path = tokenizer
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.template = template
        self.limit = limit
        self.num_valid_batches = num_valid_batches
        require_fitting(self, {
            "batch_size": (batch_size >= 1, "at least 1"),
            "num_valid_batches": (num_valid_batches >= 1, "at least 1"),
            "global_batch_size": ((global_batch_size or batch_size) >= 1, "at least 1"),
            "sequence_length": (sequence_length >= 2, "at least 2"),
            "seed": (seed >= 0, "at least 0"),
            "limit": (limit is None or limit >= 1, "at least 1, or null for all"),
            "hardest": (0 < hardest <= 1, "a share above 0, at most 1"),
        })
        self.reports: list[ReadReport] = []
        self.tokenizer: Any = None
        self.pad_id = 0
        self.template_date: str | None = None
        self._train: tuple[TokenTable, Packing] | None = None
        self._valid: tuple[TokenTable, Packing] | None = None

    def setup(self, stage: str | None = None) -> None:
        """Read, tokenise and pack the data, once."""
        if self._train is not None:
            return
        if not self.train_sources:
            raise UsageError("train names no data; give a file, a folder or a datasets name")
        self.tokenizer = load_tokenizer(self.tokenizer_path)
        pads = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        self.pad_id = next((pad for pad in pads if pad is not None), 0)
        encoder = ChatEncoder(self.tokenizer, self.template)
        self.template_date = template_date(encoder.renderer.template)
        if self.mix is None:
            tables = self._read(self.train_sources, encoder, self.limit)
        else:
            tables = self._mixed(self.mix, encoder)
        self._train = self._pack("train", self.train_sources, joined(tables), self.seed)
        if self.valid_sources:
            tables = self._read(self.valid_sources, encoder, None)
            self._valid = self._pack("valid", self.valid_sources, joined(tables), None)

    def _read(
        self, sources: list[str], encoder: ChatEncoder, limit: int | None
    ) -> list[TokenTable]:
        """Read sources in turn until there are `limit` conversations; a table per source."""
        tables: list[TokenTable] = []
        reports: list[ReadReport] = []
        for source in sources:
            left = None if limit is None else limit - sum(each.accepted for each in reports)
            if left == 0:
                break
            table, report = tokenize(source, self.tokenizer, encoder, left, self.hardest)
            rank_zero_info(str(report))
            reports.append(report)
            tables.append(table)
        self.reports += reports
        return tables

    def _mixed(self, mix: list[float], encoder: ChatEncoder) -> list[TokenTable]:
        """Read the sources in these shares of tokens; a limit is shared out in them, too."""
        tables = []
        for source, share in zip(self.train_sources, mix, strict=True):
            limit = self.limit and math.ceil(self.limit * share / sum(mix))
            tables += self._read([source], encoder, limit)
        orders = [permutation(0, MIX_STREAM + n, len(table)) for n, table in enumerate(tables)]
        parts = shared_out(tables, mix, orders)
        for source, table, part in zip(self.train_sources, tables, parts, strict=True):
            rank_zero_info(
                f"{source}: {len(part):,} of {len(table):,} samples are mixed in, "
                f"{part.counted.sum():,} tokens that count"
            )
        return parts

    def _pack(
        self, name: str, sources: list[str], table: TokenTable, seed: int | None
    ) -> tuple[TokenTable, Packing]:
        order = np.arange(len(table)) if seed is None else permutation(seed, 0, len(table))
        packing = pack(table, self.sequence_length, order)
        if not len(packing):
            raise BadData(
                f"{', '.join(sources)}: no conversation has an assistant token within "
                f"sequence_length={self.sequence_length} tokens; raise it"
            )
        num_tokens = int(np.minimum(table.lengths[packing.samples], self.sequence_length).sum())
        rank_zero_info(
            f"{name}: {len(table):,} samples, {num_tokens:,} tokens in {len(packing):,} rows "
            f"of {self.sequence_length}; {packing.num_truncated:,} cut "
            f"(−{packing.num_dropped_tokens:,} tokens), {packing.num_unused:,} left out "
            "(no assistant token within a row)"
        )
        return table, packing

    @property
    def tables(self) -> dict[str, TokenTable]:
        """The conversations of `train` and, if given, `valid`."""
        assert self._train is not None, "setup() comes first"
        valid = {} if self._valid is None else {"valid": self._valid[0]}
        return {"train": self._train[0], **valid}

    def micro_batches(
        self, rank: int = 0, world_size: int = 1, accumulate: int = 1
    ) -> MicroBatches:
        """Return the training batches of a rank by number; needs `setup` only, no trainer."""
        assert self._train is not None, "setup() comes first"
        return MicroBatches(
            *self._train, self.batch_size, self.seed, self.pad_id, rank, world_size, accumulate
        )

    @property
    def _sharing(self) -> tuple[int, int, int]:
        """Rank, number of ranks, and micro-batches per step."""
        if self.trainer is None:
            return 0, 1, 1
        trainer = self.trainer
        return trainer.global_rank, trainer.world_size, trainer.accumulate_grad_batches

    def train_dataloader(self) -> TrainLoader:
        trainer = self.trainer
        assert trainer is not None
        if trainer.max_steps < 1:
            raise UsageError(
                f"trainer.max_steps must say how long to train, got {trainer.max_steps}; the data "
                "has no epochs (set max_epochs to -1)"
            )
        length = trainer.max_steps * trainer.accumulate_grad_batches
        return TrainLoader(self.micro_batches(*self._sharing), length, trainer)

    def val_dataloader(self) -> FixedBatches | list[Batch]:
        """Return batches of the data's first rows in order; ranks take them in turn.

        All ranks have the same number, because a sharded model gathers weights for each: when rows
        run out, a batch repeats the first rows and counts none of their tokens.
        """
        if self._valid is None:
            return []
        rank, world_size, accumulate = self._sharing
        table, packing = self._valid
        per_round = self.batch_size * world_size
        num_rows = min(self.num_valid_batches * per_round * accumulate, len(packing))
        batches = []
        for begin in range(rank * self.batch_size, num_rows + rank * self.batch_size, per_round):
            rows = np.arange(begin, min(begin + self.batch_size, num_rows))
            batch = as_tensors(make_batch(table, packing, rows if len(rows) else [0], self.pad_id))
            batch["loss_mask"] &= len(rows) > 0
            batches.append(batch)
        return FixedBatches(batches)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides the batches, so that a resumed run can refuse other
        data."""
        assert self._train is not None, "setup() comes first"
        _, world_size, accumulate = self._sharing
        return {
            "seed": self.seed,
            "global_batch_size": world_size * self.batch_size * accumulate,
            "accumulate": accumulate,
            "sequence_length": self.sequence_length,
            "template_date": self.template_date,
            "data_sha256": self._train[0].sha256,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, mine in self.state_dict().items():
            value = state_dict.get(name)
            if name != "accumulate" and mine != value:
                raise CheckpointRefused(
                    f"the checkpoint was trained with {name}={value}, this run has {mine}: "
                    "the batches would not continue. Use the same, or start a new run"
                )

    def show_mask(self, index: int = 0, color: bool | None = None) -> str:
        """Format training sample `index` as text, with the tokens that have a loss marked."""
        assert self._train is not None, "setup() comes first"
        table, _ = self._train
        if not 0 <= index < len(table):
            raise UsageError(f"there are {len(table):,} samples, no number {index}")
        part = slice(table.offsets[index], table.offsets[index + 1])
        return show_mask(table.tokens[part], table.mask[part], self.tokenizer, color)
