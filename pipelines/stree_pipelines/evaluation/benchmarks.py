"""Load the prompts of a benchmark, by its name or from a file."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from stree.common.errors import BadData, NotFound, UsageError
from stree.common.plain_data import parse_json
from stree.speculation_profile import first_fault
from stree_pipelines.data.conversations import Turn
from stree_pipelines.evaluation.records import config_hash

DEFAULT_DIRECTORY = Path("data/benchmarks")  # where fetch_benchmarks.py writes
SHIPPED = Path(__file__).with_name("prompts")
DEFAULT_BENCHMARKS = ("starter",)  # ships with the package
# pipelines/corpus.py's file, the prefix of its rows' ids, and the benchmark's name
CORPUS_PROMPTS = "prompts.jsonl"
CORPUS_PREFIX = "python-docs-"
CORPUS_BENCHMARK = "python_docs"
PROMPT_FORMAT = (
    'a line is {"id": "q1", "turns": ["What the user says first", "then"]}; "category" may be given'
)
# Also: "history", the earlier texts of user and assistant in turn, and "reference_answer", the
# data's answer to the first of the turns. `ask_conversations.py --lengths` writes both. With
# "plain": true the turn is a text to go on with; `fetch_benchmarks.py c4` writes such prompts.


Text = Annotated[str, Field(pattern=r"\S")]


class BenchmarkPrompt(BaseModel):
    """A conversation to hold: the user's texts, turn by turn.

    Attributes:
        history: (role, text) of both speakers before, ending with an answer.
        reference_answer: the data's own answer to the first turn; "" without one.
        plain: whether the only turn is a text to go on with, without a chat template.
    """

    model_config = ConfigDict(frozen=True)

    id: Annotated[str, Field(min_length=1)]
    category: Annotated[str, BeforeValidator(str)] = ""
    turns: Annotated[tuple[Text, ...], Field(min_length=1)]
    history: tuple[tuple[str, Text], ...] = ()
    reference_answer: str = ""
    plain: bool = False

    @model_validator(mode="after")
    def _is_one_text(self) -> Self:
        if self.plain and (len(self.turns) > 1 or self.history or self.reference_answer):
            raise ValueError("plain: wanted a single turn, without history and reference_answer")
        return self

    @field_validator("id", mode="before")
    @classmethod
    def _id_as_text(cls, given: Any) -> Any:
        return str(given) if isinstance(given, int) and not isinstance(given, bool) else given

    @field_validator("history", mode="before")
    @classmethod
    def _in_turns(cls, texts: Any) -> tuple[Turn, ...]:
        if not isinstance(texts, list) or len(texts) % 2:
            raise ValueError("wanted a list of texts, of the user and the assistant in turn")
        return tuple(zip(cycle(("user", "assistant")), texts, strict=False))

    @property
    def content(self) -> list[Any]:
        """Everything in the prompt, as JSON values."""
        more = [[list(turn) for turn in self.history], self.reference_answer]
        plain = ["plain"] if self.plain else []
        return [self.id, list(self.turns), *(more if any(more) else ()), *plain]


@dataclass(frozen=True)
class Benchmark:
    name: str
    prompts: tuple[BenchmarkPrompt, ...]

    @property
    def prompts_hash(self) -> str:
        """Hash of the prompts, texts included: rows are comparable when it is equal."""
        return config_hash({"prompts": [prompt.content for prompt in self.prompts]})


def load_benchmark(
    name_or_path: str, directory: str | Path | None = None, limit: int | None = None
) -> Benchmark:
    """Load a benchmark.

    Args:
        name_or_path: `mt_bench`, `humaneval`, `gsm8k` or any other NAME.jsonl of `directory`, one
            that ships (`starter`), or the path of a JSONL file whose lines hold `id`, `turns` and,
            if you like, `category`. It is called as the file, a prompts.jsonl as its folder and
            the file (`sums_prompts`), the embedded corpus' own, known by its ids, `python_docs`.
        directory: where names are looked up; data/benchmarks when not given.
        limit: keep only the first `limit` prompts. The order is the file's.

    Raises:
        NotFound: no such benchmark. UsageError: a limit below 1.
        BadData: the file holds no prompts, or a line that is none; names file and line.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"limit is {limit}, wanted at least 1 prompt")
    path = find_benchmark(name_or_path, directory)
    prompts = parse_prompts(path.read_bytes(), path)
    return Benchmark(_name(path, prompts), tuple(prompts[:limit]))


def _name(path: Path, prompts: list[BenchmarkPrompt]) -> str:
    if path.name != CORPUS_PROMPTS:
        return path.stem
    if all(prompt.id.startswith(CORPUS_PREFIX) for prompt in prompts):
        return CORPUS_BENCHMARK
    return f"{path.resolve().parent.name}_{path.stem}"  # "prompts" alone fits any


def find_benchmark(name_or_path: str, directory: str | Path | None = None) -> Path:
    """Find the file of `load_benchmark`'s name. Raises NotFound."""
    directory = Path(directory) if directory is not None else DEFAULT_DIRECTORY
    given = Path(name_or_path)
    if given.suffix or len(given.parts) > 1:
        if given.is_dir():
            given = given / CORPUS_PROMPTS
        if not given.is_file():
            raise NotFound(f"no benchmark file {given}")
        return given
    candidates = [directory / f"{name_or_path}.jsonl"]
    if name_or_path == CORPUS_BENCHMARK:
        candidates.append(directory / CORPUS_PROMPTS)
    candidates.append(SHIPPED / f"{name_or_path}.jsonl")
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    known = sorted({path.stem for place in (directory, SHIPPED) for path in place.glob("*.jsonl")})
    raise NotFound(
        f"no benchmark {name_or_path!r} in {directory} (there are {', '.join(known)}): "
        "fetch_benchmarks.py gets the public ones; or give --benchmark_dir, or the path of a JSONL "
        f"file ({PROMPT_FORMAT})"
    )


def parse_prompts(content: bytes, where: object) -> list[BenchmarkPrompt]:
    """Parse the prompts of JSONL. Raises BadData with `where` and the line."""
    prompts: list[BenchmarkPrompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            prompt = BenchmarkPrompt.model_validate(parse_json(line))
        except ValueError as error:
            why = first_fault(error) if isinstance(error, ValidationError) else error
            raise BadData(f"{where}:{number}: {why}; {PROMPT_FORMAT}") from error
        if prompt.id in seen:
            raise BadData(
                f"{where}:{number}: id {prompt.id!r} is on line {seen[prompt.id]} already"
            )
        seen[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise BadData(f"{where} holds no prompts")
    return prompts
