"""--dry_run of the evaluating commands: what there is to measure, and what it takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from stree.models.convert import load_config
from stree_pipelines.dry_run import (
    MemoryNeeds,
    config_lines,
    model_line,
    require_disk,
    require_writable,
)
from stree_pipelines.estimates import cache_bytes, decoding_memory
from stree_pipelines.evaluation.answers import num_warmup_tokens
from stree_pipelines.evaluation.evaluate import Evaluation, groups_of, what_to_lower
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE, EvaluationSettings, Job, Round
from stree_pipelines.evaluation.records import ResultKey

# Of a line of samples_*.jsonl, measured on a run of configs/eval/quickstart.yaml: numbers of the
# prompt and of a turn, and text, id and acceptance of a token.
SAMPLE_BYTES, TURN_BYTES, TOKEN_BYTES = 1050, 100, 12
RESULT_BYTES = 2650


def describe_evaluation(
    evaluation: Evaluation, checkpoints: Sequence[str | None], more: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """What an evaluation of these checkpoints would do, line by line; `more` is added to the
    printed config.

    Raises what it would raise before its first answer, CannotWrite when its rows do not fit on the
    disk and, when all is said, OutOfMemory when the models do not fit into the memory.
    """
    settings = evaluation.settings
    require_writable(settings.out)
    jobs: dict[ResultKey, Job] = {}
    pending: list[Job] = []
    rounds: list[Round] = []
    existing = set() if settings.overwrite else {row.key for row in evaluation.store.results()}
    for name in checkpoints:
        new = {job.result_key: job for job in evaluation.plan(name)}
        to_go = [job for key, job in new.items() if key not in existing | jobs.keys()]
        rounds += [each for group in groups_of(to_go) for each in evaluation.rounds(group)]
        pending += to_go
        jobs |= new
    answers = [(each.prompt, job) for each in rounds for job in each.jobs]
    plain = sum(each.baseline is not None for each in rounds)
    warm_ups = len({(job.decoder_key, job.temperature) for _, job in answers})
    num_tokens = sum(len(prompt.turns) for prompt, _ in answers) * settings.max_new_tokens
    journalled = sum(len(evaluation.store.journalled(job.samples_name)) for job in pending)
    memory = memory_of(evaluation, list(jobs.values()))
    yield config_lines({**asdict(settings), "checkpoints": checkpoints, **(more or {})})
    yield model_line("target", load_config(settings.target))
    for path in drafter_paths(jobs.values()):
        yield model_line(path, load_config(path))
    yield (
        f"rows: {len(jobs)} ({len(checkpoints)} checkpoints, {len(settings.methods)} methods, "
        f"{len(settings.temperatures)} temperatures, {len(evaluation.benchmarks)} benchmarks), "
        f"{len(jobs) - len(pending)} are there"
    )
    yield (
        f"answers: {len(answers):,} prompts × methods to go, {plain:,} of them plain decoding "
        f"(measured beside each checkpoint), at most {num_tokens:,} tokens; {journalled:,} more "
        "are journalled"
    )
    lengths = ", and prefill where a decoder first meets a prompt's length"
    if settings.batch_size > 1:
        yield f"batches: {settings.batch_size} prompts at once"
        lengths = ""
    yield f"untimed: {warm_ups} warm-ups of {num_warmup_tokens(settings)} tokens{lengths}"
    yield f"each process: {memory}"
    yield require_disk(settings.out, _disk(pending, settings))
    memory.require(what_to_lower(settings))


def drafter_paths(jobs: Iterable[Job]) -> list[str]:
    """Of the models that draft."""
    names = (job.drafter.name for job in jobs if job.drafter)
    return list(dict.fromkeys(str(name.folder) for name in names if name.folder is not None))


def memory_of(evaluation: Evaluation, jobs: Sequence[Job]) -> MemoryNeeds:
    """What a process holds at most: the target, the largest drafter, and every method's caches."""
    settings, answerer = evaluation.settings, evaluation.answerer
    drafters = [load_config(path) for path in drafter_paths(jobs)]
    largest = max(drafters, key=lambda config: config.d_model * config.num_layers, default=None)
    trees = {job.method: job.tree.num_nodes if job.tree else 1 for job in jobs}
    parts = decoding_memory(
        load_config(settings.target), largest, answerer.dtype, answerer.max_length, trees,
        settings.batch_size,
    )  # fmt: skip
    if answerer.num_prefixes:
        drafting = [largest] * (len(trees) - (AUTOREGRESSIVE in trees)) if largest else []
        parts["earlier turns"] = answerer.num_prefixes * sum(
            cache_bytes(config, answerer.max_length, 1, answerer.dtype)
            for config in [*[load_config(settings.target)] * len(trees), *drafting]
        )
    return MemoryNeeds(parts, answerer.device.type == "cuda")


def _num_turns(job: Job) -> int:
    return sum(len(prompt.turns) for prompt in job.benchmark.prompts)


def _disk(pending: Sequence[Job], settings: EvaluationSettings) -> dict[str, int]:
    """At most, as if every answer were as long as it may be."""
    samples = [
        sum(
            SAMPLE_BYTES + sum(TURN_BYTES + len(turn.encode()) for turn in prompt.turns)
            for prompt in job.benchmark.prompts
        )
        + TOKEN_BYTES * settings.max_new_tokens * _num_turns(job)
        for job in pending
    ]
    # All methods of a benchmark and temperature are journalled before the first is published.
    journals = sum(sorted(samples, reverse=True)[: len(settings.methods)])
    return {"samples": sum(samples), "journals": journals, "rows": RESULT_BYTES * len(pending)}
