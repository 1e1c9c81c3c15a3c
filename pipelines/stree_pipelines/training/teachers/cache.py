"""Read the target's outputs from disk: top-k log-probabilities and the mass of the rest.

    DIR/cache.json                     the inputs that made it, and its splits
    DIR/train/shard-00000-of-00012/    ids.npy, log_probs.npy, log_tail.npy, MANIFEST.json

A row belongs to a sample and a token of it with a loss, never to a batch: a training with any
order, batch size, packing seed or number of ranks finds its rows. Only the row length may not
exceed the cache's, because samples were cut there. Shards hold whole samples.

Per row: k token ids (2 bytes each up to 65,536 tokens, else 3), k log-probabilities (2 or 4 bytes
each) and the log of the tail mass (4 bytes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stree.common.errors import CheckpointRefused, NotFound, require_fitting
from stree.common.files import verify_manifest
from stree.common.plain_data import read_json
from stree_pipelines.data.packing import Packing, TokenTable
from stree_pipelines.evaluation.records import config_hash

CACHE_NAME = "cache.json"
VERSION = 1
ARRAYS = ("ids", "log_probs", "log_tail")
AGAIN = "cache_teacher.py makes one"
# Headers of three .npy files and a manifest.
SHARD_OVERHEAD_BYTES = 3 * 128 + 560


@dataclass(frozen=True)
class CacheSpec:
    """Settings that, with the data, decide every byte of a cache.

    Two caches of one spec and one table are the same.
    """

    target_sha256: str
    tokenizer_fingerprint: str
    vocab_size: int
    sequence_length: int
    temperature: float
    top_k: int
    dtype: Literal["float16", "float32"]
    shard_positions: int

    def __post_init__(self) -> None:
        least, most = self.sequence_length, self.vocab_size
        require_fitting(self, {
            "top_k": (1 <= self.top_k <= most, f"1 to the vocabulary's size {most}"),
            "temperature": (self.temperature > 0, "more than 0"),
            "shard_positions": (
                self.shard_positions >= least,
                f"at least sequence_length = {least}: a shard holds whole samples",
            ),
        })

    @property
    def id_bytes(self) -> int:
        return 2 if self.vocab_size <= 1 << 16 else 3

    @property
    def row_bytes(self) -> int:
        return self.top_k * (self.id_bytes + np.dtype(self.dtype).itemsize) + 4

    def layout(self, num_rows: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return shape and dtype of each array of a shard with `num_rows` rows."""
        shape = num_rows, self.top_k
        return {
            "ids": (shape, "<u2") if self.id_bytes == 2 else ((*shape, 3), "|u1"),
            "log_probs": (shape, np.dtype(self.dtype).str),
            "log_tail": ((num_rows,), "<f4"),
        }

    def encode_ids(self, ids: NDArray[np.integer]) -> NDArray:
        """Encode ids (M, k) as (M, k) uint16, or (M, k, 3) uint8, lowest byte first."""
        if self.id_bytes == 2:
            return ids.astype("<u2")
        whole = np.ascontiguousarray(ids, dtype="<u4")
        return whole.view(np.uint8).reshape(*ids.shape, 4)[..., :3].copy()

    def decode_ids(self, stored: NDArray) -> NDArray[np.int32]:
        """Decode stored ids to (M, k) int32, the inverse of `encode_ids`."""
        if self.id_bytes == 2:
            return stored.astype(np.int32)
        whole = np.zeros((*stored.shape[:-1], 4), np.uint8)
        whole[..., :3] = stored
        return whole.view("<i4").reshape(stored.shape[:-1])


@dataclass(frozen=True)
class ShardPlan:
    """Assignment of a table's samples to shards, and the place of their rows.

    first_rows: (samples + 1,) int64, the cache row of each sample's first counted token;
    first_samples: (shards + 1,) int64.
    """

    first_rows: NDArray[np.int64]
    first_samples: NDArray[np.int64]

    @classmethod
    def of(cls, table: TokenTable, spec: CacheSpec) -> ShardPlan:
        counts = counted_tokens(table, spec.sequence_length)
        first_rows = _running_total(counts)
        # A sample is in the shard in which its first row falls.
        last = int(first_rows[:-1][counts > 0].max(initial=0))
        bounds = np.arange(1, last // spec.shard_positions + 1) * spec.shard_positions
        inner = np.searchsorted(first_rows[:-1], bounds, side="left")
        return cls(first_rows, np.array([0, *inner, len(table)], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.first_samples) - 1

    @property
    def num_rows(self) -> int:
        return int(self.first_rows[-1])

    def samples(self, shard: int) -> range:
        return range(int(self.first_samples[shard]), int(self.first_samples[shard + 1]))

    def rows(self, shard: int) -> range:
        """Return the cache rows of a shard, counted from the start of the split."""
        samples = self.samples(shard)
        return range(int(self.first_rows[samples.start]), int(self.first_rows[samples.stop]))

    def num_bytes(self, shard: int, spec: CacheSpec) -> int:
        return len(self.rows(shard)) * spec.row_bytes + SHARD_OVERHEAD_BYTES


def counted_tokens(table: TokenTable, sequence_length: int) -> NDArray[np.int64]:
    """Count the tokens with a loss of each sample, cut to `sequence_length` tokens: (samples,).

    The first token of a sample never counts: nothing predicts it.
    """
    seen = _running_total(table.mask)
    ends = table.offsets[:-1] + np.minimum(table.lengths, sequence_length)
    return seen[ends] - seen[np.minimum(table.offsets[:-1] + 1, ends)]


def _running_total(counts: NDArray) -> NDArray[np.int64]:
    total = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=total[1:])
    return total


def shard_directory(cache: Path, split: str, shard: int, num_shards: int) -> Path:
    return cache / split / f"shard-{shard:05d}-of-{num_shards:05d}"


def identity_of(
    spec: CacheSpec, tables: Mapping[str, TokenTable], plans: Mapping[str, ShardPlan]
) -> dict[str, Any]:
    """Build cache.json: what decides every byte of the cache."""
    splits = {
        split: {
            "data_sha256": table.sha256,
            "num_samples": len(table),
            "num_positions": plans[split].num_rows,
            "num_shards": len(plans[split]),
        }
        for split, table in tables.items()
    }
    return {"version": VERSION, **asdict(spec), "splits": splits}


def _spec_of(content: Mapping[str, Any]) -> CacheSpec:
    return CacheSpec(**{name: content[name] for name in CacheSpec.__dataclass_fields__})


def read_cache_file(cache: Path) -> dict[str, Any] | None:
    """Read cache.json; None when there is none.

    Raises CheckpointRefused when it cannot be read.
    """
    path = cache / CACHE_NAME
    if not path.is_file():
        return None
    try:
        content = read_json(path)
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']}, wanted {VERSION}")
        _spec_of(content)
        for split in content["splits"].values():
            kinds = type(split["num_samples"]), type(split["data_sha256"])
            if kinds != (int, str):
                raise TypeError("a split is not described")
        return content
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointRefused(
            f"{path} cannot be read ({error}): choose another folder, or make the cache anew"
        ) from error


class TeacherCache:
    """Finished cache, open for reading.

    Raises NotFound without the folder, CheckpointRefused when it holds no cache.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise NotFound(f"no folder {self.directory}: {AGAIN}")
        content = read_cache_file(self.directory)
        if content is None:
            raise CheckpointRefused(f"{self.directory} holds no teacher cache: {AGAIN}")
        self.content, self.spec = content, _spec_of(content)

    def require(self, **wanted: Any) -> None:
        """Raise CheckpointRefused unless the cache was made with these values of its spec."""
        for name, value in wanted.items():
            got = getattr(self.spec, name)
            if got != value:
                raise CheckpointRefused(
                    f"the teacher cache {self.directory} was made with {name} {got}, this run has "
                    f"{value}: use what it was made with, or make another ({AGAIN})"
                )

    def split(self, name: str, table: TokenTable, sequence_length: int) -> CachedTargets:
        """Open the rows of a split for training on `table` in rows of `sequence_length` tokens.

        Verifies every shard's bytes. Raises CheckpointRefused with the reason when the split does
        not fit.
        """
        made, cut = self.content["splits"].get(name), self.spec.sequence_length
        wrong = None
        if made is None:
            there = ", ".join(self.content["splits"])
            wrong = f"holds no {name} data, only {there}: make it with data.{name}"
        elif made["data_sha256"] != table.sha256:
            wrong = (
                f"was made from other {name} data ({made['num_samples']:,} conversations, sha256 "
                f"{made['data_sha256'][:12]}…; here {len(table):,}, {table.sha256[:12]}…): give "
                f"the same data, limit and template, or make another cache ({AGAIN})"
            )
        elif sequence_length > cut:
            wrong = (
                f"was made with samples cut to {cut} tokens, data.sequence_length is "
                f"{sequence_length}: lower it, or make another cache ({AGAIN})"
            )
        if wrong:
            raise CheckpointRefused(f"the teacher cache {self.directory} {wrong}")
        plan = ShardPlan.of(table, self.spec)
        shards = [self._open_shard(name, plan, shard) for shard in range(len(plan))]
        return CachedTargets(self.spec, plan, shards, counted_tokens(table, sequence_length))

    def _open_shard(self, split: str, plan: ShardPlan, shard: int) -> dict[str, NDArray]:
        directory = shard_directory(self.directory, split, shard, len(plan))
        if not directory.is_dir():
            raise CheckpointRefused(
                f"{directory} is missing, the teacher cache is not finished: run the same "
                "cache_teacher.py command to go on with it"
            )
        try:
            manifest = verify_manifest(directory)
            if manifest.get("cache") != cache_hash(self.content):
                raise ValueError(f"{directory} belongs to another cache")
            # Caches of older versions say no split
            found = (manifest.get("split", split), manifest.get("shard", shard))
            if found != (split, shard):
                raise ValueError(
                    f"{directory} holds shard {found[1]} of {found[0]}, not {shard} of {split}"
                )
            arrays = {
                name: np.load(directory / f"{name}.npy", mmap_mode="r", allow_pickle=False)
                for name in ARRAYS
            }
            forms = {name: (array.shape, array.dtype.str) for name, array in arrays.items()}
            if forms != self.spec.layout(len(plan.rows(shard))):
                raise ValueError(f"{directory} has other rows than the data")
        except (CheckpointRefused, OSError, ValueError) as error:
            raise CheckpointRefused(
                f"a shard of the teacher cache cannot be used: {error}: delete that folder and run "
                "the same cache_teacher.py command to make it again"
            ) from error
        return arrays


def cache_hash(content: Mapping[str, Any]) -> str:
    """Hash the cache's identity; each shard's manifest holds it."""
    names = ("version", *CacheSpec.__dataclass_fields__, "splits")
    return config_hash({name: content[name] for name in names})


@dataclass(frozen=True)
class CachedTargets:
    """Memory-mapped rows of one split, looked up by sample."""

    spec: CacheSpec
    plan: ShardPlan
    shards: list[dict[str, NDArray]]
    counts: NDArray[np.int64]  # (samples,) rows of each that the training reads

    def of_rows(self, packing: Packing, rows: NDArray[np.int64]) -> dict[str, NDArray]:
        """Read the cached targets of a batch's packed rows, in the order of its loss mask's True
        entries.

        Returns `teacher_ids` (M, k) int32, `teacher_log_probs` (M, k) and `teacher_log_tail` (M,)
        fp32.
        """
        pieces = [tuple(self.shards[0][name][:0] for name in ARRAYS)]  # a batch may have no row
        for row in rows:
            for sample in packing.samples[packing.starts[row] : packing.starts[row + 1]]:
                pieces.append(self._of_sample(int(sample)))
        ids, log_probs, log_tail = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
        decoded = self.spec.decode_ids(ids)
        if decoded.size and decoded.max() >= self.spec.vocab_size:
            raise CheckpointRefused(
                f"a teacher cache holds token {decoded.max()}, its vocabulary has "
                f"{self.spec.vocab_size:,}: make it anew"
            )
        # Rounded values sum to one again
        log_probs = log_probs.astype(np.float32)
        log_mass = np.log(np.exp(log_probs).sum(axis=1) + np.exp(log_tail))
        return {
            "teacher_ids": decoded,
            "teacher_log_probs": log_probs - log_mass[:, None],
            "teacher_log_tail": log_tail - log_mass,
        }

    def _of_sample(self, sample: int) -> tuple[NDArray, ...]:
        shard = int(np.searchsorted(self.plan.first_samples, sample, side="right")) - 1
        start = int(self.plan.first_rows[sample]) - self.plan.rows(shard).start
        part = slice(start, start + int(self.counts[sample]))
        return tuple(self.shards[shard][name][part] for name in ARRAYS)
