"""Interleave the methods of an evaluation, batch by batch of prompts."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import chain

from stree_pipelines.evaluation.answering import stalls
from stree_pipelines.evaluation.answering.answers import Answerer
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE, Job, Round
from stree_pipelines.evaluation.records import SampleRow

Answer = tuple[Round, Job, SampleRow]
Finished = dict[str, dict[str, SampleRow]]  # the last answers, by method and prompt


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


def answers_again(
    answerer: Answerer,
    rounds: Sequence[Round],
    finished: Finished,
    say: Callable[[str], None] = lambda message: None,
) -> Iterator[Answer]:
    """Answer again, a few times at most, what the machine held up, and yield what is new.

    Whoever draws an answer puts it into `finished`. With a new answer of plain decoding the other
    methods' are yielded again, too, compared with it.
    """
    asked = {each.prompt.id: each for each in rounds}
    for _ in range(stalls.MOST_ATTEMPTS - 1):
        again: dict[str, list[str]] = {}
        for method, samples in finished.items():
            answers = list(samples.values())
            again[method] = [answers[at].prompt_id for at in stalls.outliers(answers)]
        if not any(again.values()):
            return
        say(
            f"{sum(map(len, again.values()))} answers waited, or took far longer a step than the "
            "others of their method: answered again"
        )
        for each in (asked[identity] for identity in dict.fromkeys(chain(*again.values()))):
            held_up = {method for method, prompts in again.items() if each.prompt.id in prompts}
            for job in each.jobs:  # plain decoding comes first
                sample = finished[job.method][each.prompt.id]
                is_baseline = job is each.baseline
                if job.method in held_up:
                    sample = answerer.again(job, each.prompt, sample)
                elif is_baseline or each.baseline is None or each.baseline.method not in held_up:
                    continue
                if each.baseline is not None and not is_baseline:
                    plain = finished[each.baseline.method][each.prompt.id]
                    sample = answerer.with_baseline(job, each.prompt, sample, plain)
                yield each, job, sample
