"""Answer benchmark prompts with a decoder, and compare the answers with plain decoding's."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stree import metrics
from stree.batching.sequences import Request
from stree.batching.serve import serve
from stree.batching.state import BatchState
from stree.common.errors import InvariantBroken
from stree.generation import DecodingStats, GenerationConfig, GenerationOutput
from stree_kernels import naive
from stree_pipelines.evaluation.answering.batching import TimedRows
from stree_pipelines.evaluation.answering.decoders import Decoders
from stree_pipelines.evaluation.benchmarks import BenchmarkPrompt
from stree_pipelines.evaluation.plan import (
    AUTOREGRESSIVE,
    ChosenTree,
    Job,
    Round,
    method_label,
    prompt_seed,
)
from stree_pipelines.evaluation.records import BaselineTiming, Divergence, SampleRow, Turn
from stree_pipelines.evaluation.sampling import sampling_of

Answer = tuple[Round, Job, SampleRow]


@dataclass
class Conversation:
    """A prompt in progress: its finished turns, and their statistics."""

    prompt: BenchmarkPrompt
    turns: list[Turn] = field(default_factory=list)
    stats: list[DecodingStats] = field(default_factory=list)
    call_shares: list[float] = field(default_factory=list)  # of batches

    @property
    def is_over(self) -> bool:
        return len(self.turns) == len(self.prompt.turns)

    @property
    def goes_on(self) -> bool:
        """True when another turn follows the current one, and begins with its tokens."""
        return len(self.turns) + 1 < len(self.prompt.turns)


class Answerer:
    """Runner of an evaluation's conversations with every method."""

    def __init__(self, decoders: Decoders) -> None:
        self.decoders, self.settings = decoders, decoders.settings

    def warm_up(self, job: Job, prompt: BenchmarkPrompt) -> None:
        """Make the first calls of a decoder or a sampling rule (kernels, graphs, buffers)
        untimed."""
        with _naming(job, Conversation(prompt)):
            self.decoders.warm(job, self.decoders.prompt_ids(prompt))

    def answers(
        self, job: Job, prompts: Sequence[BenchmarkPrompt]
    ) -> Generator[SampleRow, None, None]:
        """Hold the prompts' conversations by the job's method, and yield each when it is over.

        `batch_size` run at a time; except within a batch they are yielded in the order of the
        prompts. Adaptive trees start anew and learn from `EvaluationSettings.first_prompts`,
        not from earlier answers, of another benchmark or of a stopped run.

        Raises the errors of decoding a prompt; other conversations of its batch are finished and
        yielded first, unless the prompt is one of those first prompts.
        """
        self.decoders.begin(job)
        if isinstance(job.tree, ChosenTree):
            for _ in self._answers(job, self.settings.first_prompts(job.benchmark)):
                pass  # learned from, and not reported
        yield from self._answers(job, prompts)

    def _answers(self, job: Job, prompts: Sequence[BenchmarkPrompt]) -> Iterator[SampleRow]:
        if self.settings.batch_size > 1:
            yield from self._answers_in_batches(job, prompts)
            return
        for prompt in prompts:
            conversation = Conversation(prompt)
            while not conversation.is_over:
                prompt_ids = self.decoders.prompt_ids(prompt, conversation.turns)
                with _naming(job, conversation):
                    decoder = self.decoders.warm(job, prompt_ids)
                    output = decoder.generate(prompt_ids, self._generation(job, conversation))
                self._add_turn(conversation, len(prompt_ids), output)
            yield self._sample(job, conversation)

    def _answers_in_batches(
        self, job: Job, prompts: Sequence[BenchmarkPrompt]
    ) -> Iterator[SampleRow]:
        """Yield conversations of a batch; a free row takes the next turn of its conversation or
        a prompt."""
        waiting = deque(map(Conversation, prompts))
        failure: Exception | None = None
        while waiting:
            prompt_ids = self.decoders.prompt_ids(waiting[0].prompt, waiting[0].turns)
            rows = TimedRows(self.decoders.warm(job, prompt_ids))
            under_way: dict[int, tuple[Conversation, int]] = {}  # with the prompt's tokens
            with closing(serve(rows, self._requests(job, waiting, under_way))) as reports:
                for served in reports:
                    if not served.report.finish_reason:
                        continue
                    output, (conversation, num_tokens) = (
                        served.release(), under_way.pop(served.number)
                    )
                    if served.report.error is not None:
                        failure = failure or _named(served.report.error, job, conversation)
                        for each in [each for each in waiting if not each.turns]:
                            waiting.remove(each)
                        continue
                    conversation.call_shares.append(rows.shares[served.row].num_calls)
                    self._add_turn(conversation, num_tokens, output)
                    if conversation.is_over:
                        yield self._sample(job, conversation)
                    else:
                        waiting.appendleft(conversation)
            del rows, reports  # two decoders may not fit
        if failure is not None:
            raise failure

    def _requests(
        self, job: Job, waiting: deque[Conversation],
        under_way: dict[int, tuple[Conversation, int]],
    ) -> Iterator[Request | None]:
        """Yield the next turns of the conversations that wait, until one needs a larger decoder.

        Each is noted in under_way by its number; None says that it depends on those.
        """
        number = 0
        while waiting or under_way:
            if not waiting:
                yield None
                continue
            prompt_ids = self.decoders.prompt_ids(waiting[0].prompt, waiting[0].turns)
            if not self.decoders.has_room(job, len(prompt_ids)):
                return
            conversation = waiting.popleft()
            under_way[number] = conversation, len(prompt_ids)
            number += 1
            yield Request(
                prompt_ids, self._generation(job, conversation), keep_prompt=conversation.goes_on
            )

    def with_baseline(
        self, job: Job, prompt: BenchmarkPrompt, sample: SampleRow, baseline: SampleRow
    ) -> SampleRow:
        """Add plain decoding of the same prompt to a sample: its timing, and the
        comparison.

        Tokens must be equal at T = 0, and above with the verifier coupled, whose samples are plain
        decoding's of the same seed.
        """
        timing = {"baseline": timing_of(baseline)}
        if sample.temperature > 0 and job.verifier != "coupled":
            return sample.model_copy(update=timing)
        divergence = self._divergence(job, prompt, sample.turns, baseline.turns)
        compared = {"divergence": divergence, "lossless": divergence is None}
        return sample.model_copy(update={**timing, **compared})

    def _add_turn(
        self, conversation: Conversation, num_prompt_tokens: int, output: GenerationOutput
    ) -> None:
        text = self.decoders.tokenizer.decode(output.tokens, skip_special_tokens=True)
        conversation.turns.append(Turn(
            user=conversation.prompt.turns[len(conversation.turns)], text=text,
            num_prompt_tokens=num_prompt_tokens, tokens=tuple(output.tokens),
            finish_reason=str(output.finish_reason),
        ))
        conversation.stats.append(output.stats)

    def _sample(self, job: Job, conversation: Conversation) -> SampleRow:
        prompt, stats = conversation.prompt, conversation.stats
        parts = metrics.STEP_PARTS if any(s.time_ms for s in stats) else ()
        shares = conversation.call_shares
        chosen = isinstance(job.tree, ChosenTree)
        ends = tuple(node for s in stats for node in s.end_node_per_call)
        depths = tuple(depth for s in stats for depth in s.depth_per_call)
        return SampleRow(
            **job.columns(self.settings),
            tree=job.tree.name if job.tree else None,
            prompt_id=prompt.id, category=prompt.category, turns=tuple(conversation.turns),
            num_new_tokens=sum(s.num_new_tokens for s in stats),
            num_calls=sum(s.num_calls for s in stats), num_nodes=sum(s.num_nodes for s in stats),
            accepted_per_call=tuple(a for s in stats for a in s.accepted_per_call),
            end_node_per_call=None if chosen else ends,
            depth_per_call=depths,
            calls_by_tree=sum((s.calls_by_tree for s in stats), Counter[str]()),
            call_share=sum(shares) if shares else None,
            num_reused_tokens=sum(s.num_reused_tokens for s in stats),
            prefill_s=sum(s.prefill_s for s in stats), decode_s=sum(s.decode_s for s in stats),
            time_ms={part: sum(s.time_ms.get(part, 0.0) for s in stats) for part in parts},
        )

    def _divergence(
        self, job: Job, prompt: BenchmarkPrompt, turns: Sequence[Turn], reference: Sequence[Turn]
    ) -> Divergence | None:
        """Return the first difference; later turns answer another conversation and say nothing."""
        for index, (mine, theirs) in enumerate(zip(turns, reference, strict=True)):
            position = metrics.first_difference(mine.tokens, theirs.tokens)
            if position is None:
                continue
            before = Conversation(prompt, list(turns[:index]))
            prefix = [*self.decoders.prompt_ids(prompt, before.turns), *mine.tokens[:position]]
            tokens = _at(mine.tokens, position), _at(theirs.tokens, position)
            return Divergence(
                prompt_id=prompt.id, turn=index, position=position,
                token=tokens[0], autoregressive_token=tokens[1],
                logit_gap=self._logit_gap(prefix, self._generation(job, before), tokens),
            )
        return None

    @torch.no_grad()
    def _logit_gap(
        self, tokens: list[int], generation: GenerationConfig, answered: Sequence[int | None]
    ) -> float:
        """Return the target's top-1 minus top-2 logit after `tokens`, from one plain forward pass.

        When sampling, the scores that choose a token are compared, at the scale of logits. With
        top-k, top-p or min-p it is `_least_change`, for the tokens that were `answered` there.
        """
        tokens_BT = torch.tensor([tokens], device=self.decoders.device)
        last_BD = self.decoders.target.hidden_states(tokens_BT)[:, -1:]
        logits_BTV = self.decoders.target.logits(last_BD)
        rows = BatchState.new(1, device=self.decoders.device)
        rows.set(0, generation, tokens, logits_BTV.shape[2])
        rows = rows.narrow(0, 1, [generation])
        rows.position.fill_(len(tokens) - 1)
        depths = torch.zeros(1, 1, dtype=torch.int32, device=self.decoders.device)

        def scores(logits: Tensor) -> Tensor:
            return naive.choice_scores(rows.processed(logits), depths, rows.sampling)[0, 0]

        if rows.asked.filtered:
            others = {token for token in answered if token is not None}
            return _least_change(logits_BTV, lambda each: int(scores(each).argmax()), others)
        first, second = scores(logits_BTV).topk(2).values.tolist()
        return (first - second) * (generation.temperature or 1.0)

    def _generation(self, job: Job, conversation: Conversation) -> GenerationConfig:
        """Return the settings of a conversation's next turn."""
        prompt_id, turn = conversation.prompt.id, len(conversation.turns)
        return GenerationConfig(
            max_new_tokens=self.settings.max_new_tokens, ignore_eos=self.settings.ignore_eos,
            temperature=job.temperature, **sampling_of(self.settings),
            seed=prompt_seed(job.seed, job.benchmark.name, prompt_id, turn),
        ).without_unread()


def _least_change(logits: Tensor, choice: Callable[[Tensor], int], others: Iterable[int]) -> float:
    """Return the least change of one logit of (1, 1, V) that makes another token the choice.

    The choice's own logit goes down, or one of the others' up. A token that a filter leaves out by
    a hair is a tie, too.
    """
    logits = logits.double()
    chosen = choice(logits)

    def changes(token: int, by: float) -> bool:
        changed = logits.clone()
        changed[..., token] += by
        return choice(changed) != chosen

    least = []
    for token in {chosen, *others}:
        sign = -1.0 if token == chosen else 1.0
        low, high = 0.0, 1e-6
        while not changes(token, sign * high):
            low, high = high, 2 * high
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (low, middle) if changes(token, sign * middle) else (middle, high)
        least.append(high)
    return min(least)


def interleaved_answers(
    answerer: Answerer, rounds: Sequence[Round]
) -> Generator[Answer, None, None]:
    """Answer the rounds of one benchmark and temperature, interleaving their methods.

    Yields each answer as soon as it and the baseline's answer to its prompt are there.

    A method's turn lasts until a batch of prompts is answered: anything that slows the machine for
    a while then slows all methods alike. Rows that come free meanwhile go to the prompts after the
    batch, which stay in progress until the method's next turn.
    """
    rounds_by_id = {each.prompt.id: each for each in rounds}
    found = {job.method: job for each in rounds for job in each.jobs}
    jobs = sorted(found.values(), key=lambda job: job.method != AUTOREGRESSIVE)
    baselines: dict[str, SampleRow] = {}
    early: dict[str, list[tuple[Job, SampleRow]]] = {}  # before their baseline

    def with_baseline(job: Job, sample: SampleRow) -> Answer:
        each = rounds_by_id[sample.prompt_id]
        if each.baseline is not None:
            sample = answerer.with_baseline(job, each.prompt, sample, baselines[sample.prompt_id])
        return each, job, sample

    with ExitStack() as stack:
        streams, answered = {}, {}
        for job in jobs:
            prompts = [each.prompt for each in rounds if job in each.jobs]
            stream = stack.enter_context(closing(answerer.answers(job, prompts)))
            streams[job.method], answered[job.method] = stream, set[str]()
        batch_size = answerer.settings.batch_size
        for first in range(0, len(rounds), batch_size):
            batch = rounds[first : first + batch_size]
            for job in jobs:
                wanted = {each.prompt.id for each in batch if job in each.jobs}
                while wanted - answered[job.method]:
                    sample = next(streams[job.method])
                    identity = sample.prompt_id
                    answered[job.method].add(identity)
                    if job.method == AUTOREGRESSIVE:
                        baselines[identity] = sample
                        yield rounds_by_id[identity], job, sample
                        for waiting in early.pop(identity, []):
                            yield with_baseline(*waiting)
                    elif rounds_by_id[identity].baseline is None or identity in baselines:
                        yield with_baseline(job, sample)
                    else:
                        early.setdefault(identity, []).append((job, sample))


def timing_of(sample: SampleRow) -> BaselineTiming:
    """Return the timing of a run, to measure speedups by."""
    return BaselineTiming(**{name: getattr(sample, name) for name in BaselineTiming.model_fields})


@contextmanager
def _naming(job: Job, conversation: Conversation) -> Iterator[None]:
    """Add the place to an InvariantBroken: benchmark, prompt, turn and method."""
    try:
        yield
    except InvariantBroken as error:
        raise _named(error, job, conversation) from error


def _named(error: Exception, job: Job, conversation: Conversation) -> Exception:
    if not isinstance(error, InvariantBroken):
        return error
    prompt, turn = conversation.prompt, len(conversation.turns)
    return InvariantBroken(
        f"{job.benchmark.name} prompt {prompt.id}, turn {turn}, {method_label(job.method)}: {error}"
    )


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None
