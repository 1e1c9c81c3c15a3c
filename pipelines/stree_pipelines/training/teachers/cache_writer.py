"""Make a teacher cache shard by shard, each whole or absent, by any number of processes.

A shard's bytes are a function of its samples alone: it packs them by itself. Any process may make
it, in any order, after any number of kills.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stree.common.device_memory import free_disk_bytes
from stree.common.errors import CannotWrite, InvariantBroken, UsageError, naming_what_does_not_fit
from stree.common.files import make_directory, publish_directory, sweep_leftovers, write_atomically
from stree.common.words import size
from stree.models.layers.part import product_dtype
from stree.models.model import HybridModel
from stree_pipelines.console.progress import EvaluationProgress, clock
from stree_pipelines.data.packing import TokenTable, make_batch, pack
from stree_pipelines.evaluation.context import Workers
from stree_pipelines.training.losses.distillation_loss import chunk_rows
from stree_pipelines.training.module import shift_left
from stree_pipelines.training.parallel.precision import AUTOCAST
from stree_pipelines.training.teachers.cache import (
    ARRAYS,
    CACHE_NAME,
    CacheSpec,
    ShardPlan,
    cache_hash,
    identity_of,
    read_cache_file,
    shard_directory,
)
from stree_pipelines.training.teachers.teachers import LiveTeacher, top_k_of

Shard = tuple[str, int]  # split, number


class CacheWriter:
    """Writer of a cache's shards into a folder, which may hold some of them already.

    Raises UsageError when the folder holds another cache.
    """

    def __init__(
        self, directory: str | Path, spec: CacheSpec, tables: Mapping[str, TokenTable]
    ) -> None:
        self.directory = Path(directory)
        self.spec = spec
        self.tables = dict(tables)
        self.plans = {split: ShardPlan.of(table, spec) for split, table in tables.items()}
        self.identity = identity_of(spec, self.tables, self.plans)
        self.require_same_cache()

    @property
    def shards(self) -> list[Shard]:
        return [(split, shard) for split, plan in self.plans.items() for shard in range(len(plan))]

    def missing(self) -> list[Shard]:
        return [shard for shard in self.shards if not self.path_of(*shard).is_dir()]

    def num_bytes(self, shards: list[Shard]) -> int:
        return sum(self.plans[split].num_bytes(shard, self.spec) for split, shard in shards)

    def path_of(self, split: str, shard: int) -> Path:
        return shard_directory(self.directory, split, shard, len(self.plans[split]))

    def describe(self) -> str:
        """Describe the cache's size and disk, and how much of it is there already."""
        spec, shards, missing = self.spec, self.shards, self.missing()
        sizes = ", ".join(
            f"{split} {plan.num_rows:,} predictions in {len(plan)} shards"
            for split, plan in self.plans.items()
        )
        return (
            f"teacher cache {self.directory}: {sizes}\n"
            f"{spec.top_k} of {spec.vocab_size:,} tokens and the tail: {spec.row_bytes} bytes a "
            f"prediction, {size(self.num_bytes(shards))} in all\n"
            f"{len(shards) - len(missing)} of {len(shards)} shards are there; the others take "
            f"{size(self.num_bytes(missing))}, {size(free_disk_bytes(self.directory))} are free"
        )

    def require_space(self) -> None:
        """Raise CannotWrite when the missing shards do not fit on the disk."""
        wanted, free = self.num_bytes(self.missing()), free_disk_bytes(self.directory)
        if wanted > free:
            raise CannotWrite(
                f"the teacher cache still needs {size(wanted)}, {self.directory} has {size(free)} "
                "free: free some, choose another --out, or lower --top_k or data.limit"
            )

    def write(
        self,
        model: HybridModel,
        pad_id: int,
        batch_size: int,
        workers: Workers,
        made_with: Mapping[str, Any],
        precision: str = "32-true",
        progress: EvaluationProgress | None = None,
    ) -> None:
        """Write this worker's share of the missing shards; no worker waits for another.

        Args:
            model: the target, on the device that runs it.
            batch_size: packed rows in a forward pass.
            made_with: provenance for people; not compared.
            precision: the trainer's; of the forward passes.

        Raises CannotWrite when the disk refuses, InvariantBroken when the target's outputs are not
        finite, OutOfMemory; finished shards stay.
        """
        progress = progress or EvaluationProgress(enabled=workers.is_main)
        for split in self.plans:
            make_directory(self.directory / split)
            sweep_leftovers(self.directory / split)
        # All workers write the same bytes.
        content = {**self.identity, "made_with": dict(made_with)}
        write_atomically(self.directory / CACHE_NAME, json.dumps(content, indent=2) + "\n")
        # Shared before looking which shards exist: all workers must divide the same list.
        mine = [each for each in workers.share(self.shards) if not self.path_of(*each).is_dir()]
        started = time.monotonic()
        with progress.task("teacher cache", len(mine)) as task:
            for number, (split, shard) in enumerate(mine):
                with naming_what_does_not_fit(
                    "lower data.batch_size, or use model.target_dtype bfloat16"
                ):
                    arrays = self._compute(split, shard, model, pad_id, batch_size, precision)
                self._write_shard(split, shard, arrays)
                task.advance(f"{split} {shard + 1}/{len(self.plans[split])}")
                if number == 0 and len(mine) > 1:
                    shard_s = time.monotonic() - started
                    progress.say(
                        f"the first shard took {clock(shard_s)}: about "
                        f"{clock(shard_s * (len(mine) - 1))} for the other {len(mine) - 1}"
                    )

    def _write_shard(self, split: str, shard: int, arrays: Mapping[str, NDArray]) -> None:
        extra = {"cache": cache_hash(self.identity), "split": split, "shard": shard}
        needed = self.plans[split].num_bytes(shard, self.spec)
        with publish_directory(self.path_of(split, shard), extra, needed_bytes=needed) as folder:
            for name in ARRAYS:
                np.save(folder / f"{name}.npy", arrays[name], allow_pickle=False)

    @torch.no_grad()
    def _compute(
        self, split: str, shard: int, model: HybridModel, pad_id: int, batch_size: int,
        precision: str,
    ) -> dict[str, NDArray]:
        """Compute the arrays of a shard, rows in the order of its samples and their tokens."""
        spec, plan, autocast = self.spec, self.plans[split], AUTOCAST[precision]
        samples, cache_rows = plan.samples(shard), plan.rows(shard)
        table = _part_of(self.tables[split], samples)
        first_rows = plan.first_rows[samples.start : samples.stop + 1] - cache_rows.start
        packing = pack(table, spec.sequence_length, range(len(table)))
        ids = np.zeros((len(cache_rows), spec.top_k), np.int32)
        log_probs = np.zeros((len(cache_rows), spec.top_k), spec.dtype)
        log_tail = np.zeros(len(cache_rows), np.float32)
        for begin in range(0, len(packing), batch_size):
            rows = np.arange(begin, min(begin + batch_size, len(packing)))
            batch = {
                name: torch.from_numpy(array).to(model.device)
                for name, array in make_batch(table, packing, rows, pad_id).items()
            }
            with torch.autocast(model.device.type, autocast, enabled=autocast is not None):
                hidden = model.hidden_states(batch["tokens"], batch["segment_ids"])
                dtype = product_dtype(hidden)
            hidden_MD = hidden[shift_left(batch["loss_mask"])].to(dtype)
            teacher = LiveTeacher(hidden_MD, model.head_weight.to(dtype), spec.temperature)
            num_rows = chunk_rows(spec.vocab_size, hidden_MD.is_cuda)
            top = top_k_of(teacher, spec.top_k, num_rows)
            if not bool(top.log_probs[:, 0].isfinite().all()):
                raise InvariantBroken(
                    f"the target's outputs are not finite in shard {shard} of {split}: "
                    "check its weights, model.target_dtype and trainer.precision"
                )
            packed = packing.samples[packing.starts[begin] : packing.starts[rows[-1] + 1]]
            places = np.concatenate([np.arange(*first_rows[s : s + 2]) for s in packed])
            ids[places] = top.ids.cpu().numpy()
            log_probs[places] = top.log_probs.cpu().numpy().astype(spec.dtype)
            log_tail[places] = top.log_tail.cpu().numpy()
        return {"ids": spec.encode_ids(ids), "log_probs": log_probs, "log_tail": log_tail}

    def require_same_cache(self) -> None:
        """Raise UsageError when the folder holds another cache."""
        found = read_cache_file(self.directory)
        if found is None:
            return
        changed = [
            f"{name} was {found.get(name)!r}, now {value!r}"
            for name, value in self.identity.items()
            if name != "splits" and found.get(name) != value
        ]
        theirs, ours = found["splits"], self.identity["splits"]
        changed += [
            f"other {split} data"
            for split in sorted({*theirs, *ours})
            if theirs.get(split) != ours.get(split)
        ]
        if changed:
            raise UsageError(
                f"{self.directory} holds another teacher cache ({'; '.join(changed)}): choose "
                "another --out, or the old values"
            )


def _part_of(table: TokenTable, samples: range) -> TokenTable:
    offsets = table.offsets[samples.start : samples.stop + 1]
    tokens = slice(int(offsets[0]), int(offsets[-1]))
    return TokenTable(table.tokens[tokens], table.mask[tokens], offsets - offsets[0])
