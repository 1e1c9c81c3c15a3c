"""Read and write a target's own answers: token ids as drawn, in shards that are whole or absent.

    DIR/generation.json                    the settings and inputs that made them
    DIR/shard-00000-of-00012/              samples.parquet, MANIFEST.json

A row is one answer: the prompt's ids and the answer's, exactly as the target read and wrote them
(decoding and encoding them again sometimes gives others), with its prompt, sample number,
temperature and seed. A shard's rows are a function of generation.json and the prompts alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stree.checkpoints.checked_json import LARGEST
from stree.common.errors import BadData, CheckpointRefused, UsageError, warn_once
from stree.common.files import require_own_files, verify_manifest
from stree.common.plain_data import read_json
from stree.metrics import tau
from stree.verifiers import named
from stree_pipelines.evaluation.records import config_hash
from stree_pipelines.evaluation.sampling import Sampling

SPEC_NAME, TABLE_NAME = "generation.json", "samples.parquet"
VERSION = 2
GO_ON = "run the same generate_data.py command to go on with it"
# Rows of a shard that are read together.
BATCH_ROWS = 256


@dataclass(frozen=True)
class GenerationSpec(Sampling):
    """Settings that, with the prompts, decide every answer.

    Two folders of one spec hold the same tokens, up to rounding on another device.
    """

    model_sha256: str  # the target without its tokenizer's files
    drafter_sha256: str | None
    tokens_sha256: str
    # Chat template and special tokens may differ between the prompts' reading and a training: the
    # ids in the folder stay as they are
    tokenizer_fingerprint: str = field(compare=False)
    vocab_size: int
    prompts_sha256: str
    num_prompts: int
    samples: int
    temperatures: tuple[float, ...]
    max_new_tokens: int
    tree: str
    seed: int
    dtype: str
    shard_samples: int
    verifier: str

    def __post_init__(self) -> None:
        named(self.verifier)
        for name in ("samples", "max_new_tokens", "shard_samples"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}, wanted at least 1")
        if not self.temperatures:
            raise UsageError("temperatures is empty, wanted at least one")
        cycle = len(self.temperatures)
        greedy = [place for place, each in enumerate(self.temperatures) if each == 0]
        if sum((self.samples - place + cycle - 1) // cycle for place in greedy) > 1:
            raise UsageError(
                f"samples is {self.samples}, temperatures are "
                f"{', '.join(f'{each:g}' for each in self.temperatures)} in turn: more than one "
                "sample is greedy, which is the same answer again; give fewer samples, or more "
                "temperatures"
            )

    @property
    def num_samples(self) -> int:
        return self.num_prompts * self.samples

    @property
    def num_shards(self) -> int:
        return -(-self.num_samples // self.shard_samples)

    def temperature(self, sample: int) -> float:
        return self.temperatures[sample % len(self.temperatures)]

    def rows(self, shard: int) -> range:
        """Return the numbers of a shard's answers; answer n is sample n mod `samples` of its
        prompt."""
        start = shard * self.shard_samples
        return range(start, min(start + self.shard_samples, self.num_samples))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> GenerationSpec:
        values = {each.name: content[each.name] for each in fields(cls)}
        values["temperatures"] = tuple(values["temperatures"])
        for name in ("num_prompts", "samples", "shard_samples", "vocab_size"):
            if not isinstance(values[name], int) or not 0 <= values[name] <= LARGEST:
                raise TypeError(f"{name} is {values[name]!r}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self), "temperatures": list(self.temperatures)}

    @property
    def sha256(self) -> str:
        """Hash of what decides the answers; each shard's manifest holds it."""
        content = self.to_dict()
        del content["tokenizer_fingerprint"]
        return config_hash(content)

    def warn_of_another_tokenizer(self, folder: Path, fingerprint: str) -> None:
        """Warn, once in a process, if the tokenizer that made the folder differs from this one.

        fingerprint: This run's (`stree.checkpoints.tokenizer.fingerprint`), of equal tokens.
        """
        if self.tokenizer_fingerprint != fingerprint:
            warn_once(
                f"{folder} was generated with another chat template, or other special tokens, than "
                "this run's: its ids are used as they are"
            )


@dataclass(frozen=True)
class Answer:
    """A row of a shard."""

    prompt_id: str
    prompt: int
    sample: int
    temperature: float
    seed: int
    prompt_tokens: Sequence[int]
    answer_tokens: Sequence[int]
    finish_reason: str
    num_calls: int  # of the target, the prompt's reading left out


def is_generated(source: str | Path) -> bool:
    return os.path.lexists(Path(source).expanduser() / SPEC_NAME)


def shard_path(folder: Path, spec: GenerationSpec, shard: int) -> Path:
    return folder / f"shard-{shard:05d}-of-{spec.num_shards:05d}"


def read_spec(folder: Path) -> GenerationSpec | None:
    """Read generation.json; None when there is none. Raises BadData when it cannot be read."""
    path = folder / SPEC_NAME
    if not os.path.lexists(path):
        return None
    try:
        content = read_json(path)
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']}, wanted {VERSION}")
        return GenerationSpec.from_dict(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadData(
            f"{path} cannot be read ({error}): copy the folder again, or make it anew"
        ) from error


def write_table(path: Path, answers: Sequence[Answer]) -> None:
    import pyarrow
    from pyarrow import parquet

    columns = {name: [getattr(each, name) for each in answers] for name in _schema().names}
    parquet.write_table(pyarrow.table(columns, schema=_schema()), path, compression="zstd")


def read_answers(
    folder: Path, tokens_sha256: str, fingerprint: str, limit: int | None = None
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.bool_], float]]:
    """Yield tokens (T,), the answer's mask (T,) and the acceptance length of each answer.

    An answer without a call has NaN. Verifies each shard's bytes before it is read. Warns of
    another chat template.

    Args:
        folder: The folder of generated data.
        tokens_sha256: Of this run's tokenizer (`stree.checkpoints.tokenizer`).
        fingerprint: Of this run's tokenizer, with its chat template.
        limit: Number of answers to read, from the first on; None reads all.

    Raises:
        CheckpointRefused: For data of a tokenizer that splits or ends texts otherwise.
        BadData: For a folder that is damaged or not finished.
    """
    spec = read_spec(folder)
    assert spec is not None, "is_generated() comes first"
    if spec.tokens_sha256 != tokens_sha256:
        raise CheckpointRefused(
            f"{folder} was generated with another tokenizer ({spec.tokens_sha256[:12]}…) than this "
            f"run's ({tokens_sha256[:12]}…): its ids would mean other words; use the target that "
            "wrote it, or generate with this one"
        )
    spec.warn_of_another_tokenizer(folder, fingerprint)
    left = spec.num_samples if limit is None else min(limit, spec.num_samples)
    for shard in range(spec.num_shards):
        if left <= 0:
            return
        path = shard_path(folder, spec, shard)
        for row in _shard_rows(path, spec, shard):
            yield row
            left -= 1
            if left <= 0:
                return


def num_answer_tokens(folder: Path, spec: GenerationSpec) -> int:
    """Count the tokens of the answers in a finished folder, from its tables' metadata."""
    from pyarrow import parquet

    count = 0
    for shard in range(spec.num_shards):
        path = shard_path(folder, spec, shard)
        require_own_files(path)  # another process may have written it
        about = parquet.read_metadata(path / TABLE_NAME)
        for group in map(about.row_group, range(about.num_row_groups)):
            columns = map(group.column, range(group.num_columns))
            count += sum(
                each.num_values
                for each in columns
                if each.path_in_schema.startswith("answer_tokens")
            )
    return count


def verify_shard(path: Path, spec: GenerationSpec, shard: int) -> None:
    """Raise BadData unless a shard's folder has its files, byte for byte, and is of this data."""
    try:
        manifest = verify_manifest(path)
    except (CheckpointRefused, OSError) as error:
        raise BadData(f"{error}. In generated data: delete that folder, and {GO_ON}") from error
    if manifest.get("generation") != spec.sha256:
        raise BadData(f"{path} belongs to other data: delete it, and {GO_ON}")
    if (number := manifest.get("shard")) != shard:
        raise BadData(f"{path} holds shard {number}, not {shard}: delete it, and {GO_ON}")


def _shard_rows(
    path: Path, spec: GenerationSpec, shard: int
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.bool_], float]]:
    import pyarrow
    from pyarrow import parquet

    if not path.is_dir():
        raise BadData(f"{path} is missing, the data is not finished: {GO_ON}")
    verify_shard(path, spec, shard)
    try:
        with parquet.ParquetFile(path / TABLE_NAME) as file:
            found, wanted = file.schema_arrow, _schema()
            if not found.equals(wanted):
                raise BadData(f"{path} has other columns than {', '.join(wanted.names)}: {GO_ON}")
            if file.metadata.num_rows != len(spec.rows(shard)):
                raise BadData(f"{path} has {file.metadata.num_rows} rows: delete it, and {GO_ON}")
            columns = ["prompt_tokens", "answer_tokens", "num_calls"]
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                *tokens, calls = batch.columns
                for prompt, answer, count in zip(*map(_lists, tokens), calls, strict=True):
                    # The first token came with the prompt, so a lone one took no call
                    length = tau(len(answer) - 1, count.as_py() or 0)
                    yield *_checked(path, spec, prompt, answer), length
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        if isinstance(error, BadData):
            raise
        raise BadData(f"{path} cannot be read ({error}): delete it, and {GO_ON}") from error


def _checked(
    path: Path, spec: GenerationSpec, prompt: NDArray[np.int32], answer: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    tokens = np.concatenate([prompt, answer])
    is_whole = len(prompt) > 0 and len(answer) > 0
    if not is_whole or not 0 <= tokens.min() <= tokens.max() < spec.vocab_size:
        raise BadData(
            f"{path} holds an empty text, or ids outside of a vocabulary of {spec.vocab_size}: "
            f"delete it, and {GO_ON}"
        )
    return tokens, np.arange(len(tokens)) >= len(prompt)


def _lists(column: Any) -> list[NDArray[np.int32]]:
    """Return the rows of a list column; a missing one is empty."""
    values = column.flatten()
    if values.null_count:
        raise ValueError("a token is missing")
    ends = np.cumsum(column.value_lengths().fill_null(0).to_numpy())
    return np.split(values.to_numpy(), ends)[:-1]


def _schema() -> Any:
    import pyarrow

    tokens = pyarrow.list_(pyarrow.int32())
    return pyarrow.schema([
        ("prompt_id", pyarrow.string()), ("prompt", pyarrow.int64()), ("sample", pyarrow.int32()),
        ("temperature", pyarrow.float64()), ("seed", pyarrow.int64()), ("prompt_tokens", tokens),
        ("answer_tokens", tokens), ("finish_reason", pyarrow.string()),
        ("num_calls", pyarrow.int32()),
    ])
