"""Let a target answer prompts, many at once and several times each, and write shards of answers."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stree.batching.batch_decoder import BatchDecoder
from stree.batching.sequences import Request
from stree.chat_encoding import ChatEncoder, Message, chat_encoder
from stree.common.errors import BadData, UsageError
from stree.common.files import make_directory, publish_directory, sweep_leftovers, write_atomically
from stree.common.plain_data import parse_json
from stree.generation import GenerationConfig, GenerationOutput
from stree.metrics import tau
from stree.tree_policy.policy import TreePolicy
from stree.trees.token_tree import TokenTree
from stree_pipelines.console.progress import EvaluationProgress
from stree_pipelines.data.conversations import read_conversations
from stree_pipelines.data.encoding import messages_of
from stree_pipelines.data.generated import (
    SPEC_NAME,
    TABLE_NAME,
    Answer,
    GenerationSpec,
    read_spec,
    shard_path,
    verify_shard,
    write_table,
)
from stree_pipelines.data.raw_rows import LINE_SUFFIXES
from stree_pipelines.evaluation.benchmarks import load_benchmark
from stree_pipelines.evaluation.context import Workers
from stree_pipelines.evaluation.sampling import sampling_of

COMPARED_TOKENS = 64  # of each answer, when speeds are compared


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens; `number` is its place among all prompts of the source."""

    id: str
    number: int
    tokens: list[int]


def read_prompts(
    source: str, tokenizer: Any, turn: str, limit: int | None = None, template: str | None = None,
    say: Callable[[str], None] = print,
) -> list[Prompt]:
    """Read prompts from conversations (as distill.py reads them), or from benchmark prompts.

    A conversation's prompt is everything before its `turn` ("first" or "last") answer; a
    benchmark's is its first turn. Those that the template refuses are left out, and `say` is told.
    Raises NotFound and BadData, as the readers of both do, and BadData when none is left.
    """
    encoder = chat_encoder(tokenizer, template)
    prompts, refused = [], []
    for number, (name, messages) in enumerate(_messages_of(source, turn, limit, encoder)):
        try:
            prompts.append(Prompt(name, number, encoder.encode_prompt(messages)))
        except BadData as error:
            refused.append(f"{name}: {error}")
    if refused:
        message = f"{len(refused):,} prompts of {source} are left out, the first is {refused[0]}"
        if not prompts:
            raise BadData(message)
        say(message)
    return prompts


def _messages_of(
    source: str, turn: str, limit: int | None, encoder: ChatEncoder
) -> Iterator[tuple[str, Sequence[Message]]]:
    if _holds_benchmark_prompts(Path(source)):
        for prompt in load_benchmark(source, limit=limit).prompts:
            yield prompt.id, [*prompt.history, ("user", prompt.turns[0])]
        return
    conversations, _ = read_conversations(source, limit=limit)
    for conversation in conversations:
        roles = [role for role, _ in conversation.turns]
        if "assistant" not in roles:  # a plain text
            continue
        end = roles.index("assistant") if turn == "first" else len(roles) - 1
        yield conversation.id, messages_of(conversation, encoder)[:end]


def _holds_benchmark_prompts(path: Path) -> bool:
    """Return True when the first row has `turns`, as no conversation does."""
    if not path.is_file() or not path.name.endswith(LINE_SUFFIXES) or path.suffix == ".gz":
        return False
    try:
        with path.open("rb") as file:
            row = parse_json(next((line for line in file if line.strip()), b"{}"))
    except (OSError, ValueError):
        return False  # the reader reports the error
    return isinstance(row, dict) and "turns" in row


def prompts_sha256(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.id, prompt.number, prompt.tokens]).encode())
    return digest.hexdigest()


def that_fit(
    prompts: Sequence[Prompt], max_length: int, max_new_tokens: int, deepest: int
) -> list[Prompt]:
    """Keep the prompts whose answer fits in `max_length` tokens, with a tree of depth `deepest`.

    Raises BadData when there is none.
    """
    longest = max_length - max_new_tokens - deepest - 1
    kept = [prompt for prompt in prompts if len(prompt.tokens) <= longest]
    if not kept:
        raise BadData(
            f"none of {len(prompts):,} prompts has at most {longest} tokens, which is what "
            f"max_length {max_length} leaves for it: raise that, or lower max_new_tokens"
        )
    return kept


def seed_of(seed: int, prompt: int, sample: int) -> int:
    """Return a seed in [0, 2⁶³) that is a function of seed, prompt and sample."""
    digest = hashlib.sha256(f"{seed} {prompt} {sample}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass
class Tally:
    """Tokens, target calls and seconds of many answers.

    The first token of each answer comes with its prompt, not from a call.
    """

    num_tokens: int = 0
    num_called_tokens: int = 0
    num_calls: int = 0
    seconds: float = 0.0

    def add(self, output: GenerationOutput) -> None:
        self.num_tokens += len(output.tokens)
        self.num_calls += output.stats.num_calls
        self.num_called_tokens += output.stats.num_new_tokens

    @property
    def acceptance_length(self) -> float:
        return tau(self.num_called_tokens, self.num_calls)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else float("nan")


class Generation:
    """A folder of generated data in the making: its spec, its prompts, and the shards that exist.

    Raises UsageError when the folder holds other data.
    """

    def __init__(
        self, folder: str | Path, spec: GenerationSpec, prompts: Sequence[Prompt],
        tree_policy: TreePolicy,
    ) -> None:
        self.folder, self.spec = Path(folder), spec
        self.prompts, self.tree_policy = prompts, tree_policy
        self._verified: set[int] = set()
        self.require_same_data()

    def missing(self) -> list[int]:
        """Return the numbers of the shards that are not there.

        The others are verified once. Raises BadData for one that is damaged.
        """
        there = {shard for shard in range(self.spec.num_shards) if self._path(shard).is_dir()}
        for shard in sorted(there - self._verified):
            verify_shard(self._path(shard), self.spec, shard)
        self._verified |= there
        return [shard for shard in range(self.spec.num_shards) if shard not in there]

    def disk(self) -> dict[str, int]:
        """Estimate the most bytes of the missing shards, as if nothing were compressed."""
        ids = sum(len(each.tokens) for each in self.prompts) * self.spec.samples
        ids += self.spec.num_samples * self.spec.max_new_tokens
        return {"answers": 4 * ids * len(self.missing()) // self.spec.num_shards}

    def request(self, number: int) -> Request:
        """Return the request for answer `number` of all."""
        prompt, sample = self._place(number)
        generation = GenerationConfig(
            max_new_tokens=self.spec.max_new_tokens,
            temperature=self.spec.temperature(sample),
            **sampling_of(self.spec),
            seed=seed_of(self.spec.seed, prompt.number, sample),
        ).without_unread()
        return Request(prompt.tokens, generation)

    def compare(
        self, decoder: BatchDecoder, plain: BatchDecoder, count: int
    ) -> tuple[Tally, Tally]:
        """Time speculation and plain decoding on the first `count` answers, interleaved.

        Answers have at most `COMPARED_TOKENS` tokens; two rounds count, after one that does not.
        """
        requests = []
        for number in range(min(count, self.spec.num_samples)):
            request = self.request(number)
            length = min(COMPARED_TOKENS, self.spec.max_new_tokens)
            generation = replace(request.generation, max_new_tokens=length)
            requests.append(replace(request, generation=generation))
        root = TokenTree.chain(0, "root")
        ways = (
            (decoder, requests, Tally()),
            (plain, [replace(each, tree=root) for each in requests], Tally()),
        )
        for is_counted in (False, True, True):
            for way, each, tally in ways:
                since = time.perf_counter()
                outputs = way.generate(each)
                if is_counted:
                    tally.seconds += time.perf_counter() - since
                    for output in outputs:
                        tally.add(output)
        return ways[0][2], ways[1][2]

    def write(
        self, decoder: BatchDecoder, workers: Workers, made_with: Mapping[str, Any],
        progress: EvaluationProgress,
    ) -> Tally:
        """Write this worker's share of the missing shards; no worker waits for another.

        Requests of the next shard are admitted while the last ones of a shard go on. Raises
        CannotWrite when the disk refuses, InvariantBroken when logits are not finite, OutOfMemory;
        finished shards stay.
        """
        make_directory(self.folder)
        sweep_leftovers(self.folder)
        if workers.is_main or not (self.folder / SPEC_NAME).exists():
            content = {**self.spec.to_dict(), "made_with": dict(made_with)}
            write_atomically(self.folder / SPEC_NAME, json.dumps(content, indent=2) + "\n")
        # Shared before looking which shards exist: all workers must divide the same list.
        shares = workers.share(range(self.spec.num_shards))
        mine = [shard for shard in shares if not self._path(shard).is_dir()]
        numbers = [number for shard in mine for number in self.spec.rows(shard)]
        finished: dict[int, dict[int, Answer]] = {shard: {} for shard in mine}
        tally, since = Tally(), time.perf_counter()
        reports = decoder.serve(map(self.request, numbers))
        with progress.task("answers", len(numbers)) as task, closing(reports):
            for served in reports:
                if not served.report.finish_reason or served.report.error is not None:
                    continue  # an error is raised when the next report is asked for
                number, output = numbers[served.number], served.release()
                shard = number // self.spec.shard_samples
                finished[shard][number] = self._answer(number, output)
                if len(finished[shard]) == len(self.spec.rows(shard)):
                    self._publish(shard, finished.pop(shard))
                tally.add(output)
                tally.seconds = time.perf_counter() - since
                task.advance(
                    f"τ {tally.acceptance_length:.2f}  {tally.tokens_per_second:,.0f} tokens/s"
                )
        return tally

    def _place(self, number: int) -> tuple[Prompt, int]:
        prompt, sample = divmod(number, self.spec.samples)
        return self.prompts[prompt], sample

    def _answer(self, number: int, output: GenerationOutput) -> Answer:
        prompt, sample = self._place(number)
        return Answer(
            prompt.id, prompt.number, sample, self.spec.temperature(sample),
            seed_of(self.spec.seed, prompt.number, sample), prompt.tokens, output.tokens,
            output.finish_reason, output.stats.num_calls,
        )

    def _publish(self, shard: int, answers: Mapping[int, Answer]) -> None:
        rows = [answers[number] for number in self.spec.rows(shard)]
        size = sum(4 * (len(each.prompt_tokens) + len(each.answer_tokens)) for each in rows)
        extra = {"generation": self.spec.sha256, "shard": shard}
        with publish_directory(self._path(shard), extra, needed_bytes=size) as folder:
            write_table(folder / TABLE_NAME, rows)

    def _path(self, shard: int) -> Path:
        return shard_path(self.folder, self.spec, shard)

    def require_same_data(self) -> None:
        """Raise UsageError when the folder holds data of another description."""
        found = read_spec(self.folder)
        if found is None:
            return
        if found == self.spec:
            found.warn_of_another_tokenizer(self.folder, self.spec.tokenizer_fingerprint)
            return
        old, new = found.to_dict(), self.spec.to_dict()
        changed = [f"{name} was {old[name]!r}, now {new[name]!r}" for name in new
                   if old[name] != new[name]]
        raise UsageError(
            f"{self.folder} holds other generated data ({'; '.join(changed)}): choose another "
            "--out, or the old values"
        )
