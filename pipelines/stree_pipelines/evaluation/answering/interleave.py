"""Interleave the methods of an evaluation, batch by batch of prompts."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing

from stree_pipelines.evaluation.answering.answers import Answerer
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE, Job, Round
from stree_pipelines.evaluation.records import SampleRow

Answer = tuple[Round, Job, SampleRow]


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
