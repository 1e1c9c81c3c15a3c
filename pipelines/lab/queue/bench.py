"""Plan and measure the settings of `bench_queue.py`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stree.batching.batch_decoder import BatchDecoder
from stree.batching.sequences import Request
from stree.batching.step_timing import row_counts
from stree.checkpoints.load_save import load_config
from stree.common.errors import UsageError, naming_what_does_not_fit, require_fitting
from stree.common.words import device_name
from stree.generation import GenerationConfig
from stree.speculation_profile import Tree
from stree_pipelines.console.progress import EvaluationProgress, clock
from stree_pipelines.evaluation.answering import gc_freeze
from stree_pipelines.evaluation.context import Workers, describe_environment
from stree_pipelines.evaluation.estimates import drafter_paths, memory_of
from stree_pipelines.evaluation.evaluate import Evaluation, what_to_lower
from stree_pipelines.evaluation.plan import (
    AUTOREGRESSIVE,
    TREE,
    EvaluationSettings,
    Job,
    prompt_seed,
)
from stree_pipelines.evaluation.records import config_hash
from stree_pipelines.lab.queue.queueing import (
    CLEARING,
    POLICIES,
    Clock,
    Policy,
    QueueRow,
    Served,
    WallClock,
    figures_of,
    poisson_arrivals,
    serve,
)
from stree_pipelines.resources.dry_run import config_lines, model_line


@dataclass(frozen=True)
class Setting:
    """A row to measure."""

    job: Job
    policy: Policy
    rate: float
    num_requests: int
    hash: str


class QueueBench:
    """Bench of one target and drafter; `Evaluation` plans, loads and warms up."""

    def __init__(self, options: Any, progress: EvaluationProgress | None = None) -> None:
        settings = settings_of(options)
        self.options, self.settings = options, settings
        self.evaluation = Evaluation(
            settings, workers=Workers(), progress=progress,
            make_decoder=partial(BatchDecoder, num_rows=settings.batch_size),
        )
        self.progress, self.benchmark = self.evaluation.progress, self.evaluation.benchmarks[0]
        self.jobs = self.evaluation.plan(options.drafter)
        self.wanted = self._settings()

    def _settings(self) -> list[Setting]:
        options, found = self.options, []
        for rate in options.rates:
            for job in self.jobs:
                for policy in (policy_of(options, name) for name in options.policies):
                    identity = {
                        "decoding": job.result_key, "policy": asdict(policy), "rate": rate,
                        "num_requests": options.num_requests,
                        "device": device_name(self.evaluation.decoders.device),
                    }
                    setting_hash = config_hash(identity)
                    found.append(Setting(job, policy, rate, options.num_requests, setting_hash))
        return found

    def announce(self, num_left: int) -> None:
        longest = sum(each.num_requests / each.rate for each in self.wanted)
        self.progress.say(
            f"{len(self.wanted)} settings of {self.options.num_requests} requests, "
            f"{num_left} to go; their traffic takes {clock(longest)} in all, on "
            f"{device_name(self.evaluation.decoders.device)}, {self.settings.dtype}"
        )

    def measure(self, setting: Setting, moments: Clock | None = None) -> QueueRow:
        """Serve the setting's traffic. Raises decoding's errors and OutOfMemory."""
        job, answerer = setting.job, self.evaluation.answerer
        prompts = [
            self.benchmark.prompts[index % len(self.benchmark.prompts)]
            for index in range(setting.num_requests)
        ]
        requests = [
            Request(answerer.prompt_ids(prompt), self._generation(job, prompt.id, index))
            for index, prompt in enumerate(prompts)
        ]
        arrivals = poisson_arrivals(setting.rate, setting.num_requests, self.settings.seed)
        with naming_what_does_not_fit(what_to_lower(self.settings)):
            longest = max((request.prompt_ids for request in requests), key=len)
            decoder = self.evaluation.decoders.warm(job, list(longest))
            self.evaluation.say_room()
            rehearse(decoder, requests)
            label = f"{setting.policy.name} {job.method} {setting.rate:g}/s"
            finished: list[float] = []

            def show(one: Served) -> None:
                finished.append(one.finished - one.arrival)
                mean = sum(finished) / len(finished)
                task.advance(f"latency {mean:.2f} s, longest {max(finished):.2f} s")

            with self.progress.task(label, setting.num_requests) as task:
                moments = moments or WallClock()
                with gc_freeze.left_alone():
                    traffic = serve(
                        decoder, requests, list(arrivals), setting.policy, moments, show
                    )
        return self._row(setting, figures_of(traffic))

    def _generation(self, job: Job, prompt_id: str, index: int) -> GenerationConfig:
        """Return a request's settings; a prompt that comes again gets another seed."""
        return GenerationConfig(
            max_new_tokens=self.settings.max_new_tokens,
            temperature=job.temperature,
            seed=prompt_seed(self.settings.seed, self.benchmark.name, prompt_id, index),
            ignore_eos=self.settings.ignore_eos,
        )

    def _row(self, setting: Setting, figures: dict[str, Any]) -> QueueRow:
        job, policy, settings = setting.job, setting.policy, self.settings
        decoders = self.evaluation.decoders
        is_clearing = policy.name == CLEARING
        return QueueRow(
            policy=policy.name,
            queue_size=policy.queue_size if is_clearing else None,
            max_wait_s=policy.max_wait_s if is_clearing else None,
            rate=setting.rate,
            num_requests=setting.num_requests,
            batch_size=settings.batch_size,
            method=job.method,
            tree=Tree(name=job.tree.name, parents=job.tree.parents) if job.tree else None,
            step=job.drafter.step if job.drafter else None,
            checkpoint=job.drafter.path if job.drafter else None,
            checkpoint_sha256=job.drafter.sha256 if job.drafter else None,
            target=settings.target,
            target_sha256=self.evaluation.target_sha256,
            benchmark=self.benchmark.name,
            prompts_hash=self.benchmark.prompts_hash,
            temperature=job.temperature,
            max_new_tokens=settings.max_new_tokens,
            ignore_eos=settings.ignore_eos,
            seed=settings.seed,
            setting_hash=setting.hash,
            environment=describe_environment(decoders.device, decoders.dtypes, 1),
            **figures,
        )

    def describe(self, num_left: int) -> Iterator[str]:
        """Yield lines about a run's settings and resources.

        Raises OutOfMemory, after the last line, when there is less memory.
        """
        memory = memory_of(self.evaluation, self.jobs)
        yield config_lines(self.options.as_dict())
        yield model_line("target", load_config(self.settings.target))
        for path in drafter_paths(self.jobs):
            yield model_line(path, load_config(path))
        longest = sum(each.num_requests / each.rate for each in self.wanted)
        yield (
            f"rows: {len(self.wanted)}, {len(self.wanted) - num_left} are there; "
            f"traffic of {clock(longest)} in all, longer where it comes faster than it is served"
        )
        yield str(memory)
        memory.require(what_to_lower(self.settings))


def settings_of(options: Any) -> EvaluationSettings:
    """Return the options' evaluation settings. Raises UsageError for values out of range."""
    methods = tuple(options.methods)
    if not methods:
        methods = (AUTOREGRESSIVE, TREE) if options.drafter else (AUTOREGRESSIVE,)
    if set(methods) - {AUTOREGRESSIVE} and options.drafter is None:
        raise UsageError(f"methods {', '.join(methods)} need a drafter: give --drafter")
    require_fitting(options, {
        "batch_size": (options.batch_size >= 2, "at least 2 rows"),
        "num_requests": (options.num_requests >= 1, "at least 1"),
    }, "--")
    if not options.rates or not all(0 < rate < float("inf") for rate in options.rates):
        raise UsageError(f"--rates: wanted requests a second, above 0, got {options.rates}")
    if not options.policies or set(options.policies) - set(POLICIES):
        raise UsageError(
            f"--policies: wanted some of {', '.join(POLICIES)}, got {options.policies}"
        )
    for name in ("rates", "policies"):
        if len(set(getattr(options, name))) < len(getattr(options, name)):
            raise UsageError(f"--{name}: wanted each once, got {getattr(options, name)}")
    for name in options.policies:
        policy_of(options, name)
    return EvaluationSettings(
        target=options.target, out=str(Path(options.out).parent), benchmarks=(options.prompts,),
        methods=methods, temperatures=(options.temperature,), tree=options.tree,
        num_chain_drafts=options.num_chain_drafts, max_new_tokens=options.max_new_tokens,
        benchmark_dir=options.benchmark_dir, chat_template=options.chat_template,
        dtype=options.dtype, device=options.device, seed=options.seed,
        batch_size=options.batch_size, ignore_eos=options.ignore_eos,
    )


def policy_of(options: Any, name: str) -> Policy:
    if name != CLEARING:
        return Policy(name)
    queue_size = options.batch_size if options.queue_size is None else options.queue_size
    if not 1 <= queue_size <= options.batch_size:
        raise UsageError(
            f"--queue_size is {queue_size}, wanted 1 to the {options.batch_size} rows of "
            "--batch_size: a cleared queue is decoded at once"
        )
    if not 0 <= options.max_wait_s < float("inf"):
        raise UsageError(f"--max_wait_s is {options.max_wait_s}, wanted seconds from 0 on")
    return Policy(name, queue_size, options.max_wait_s)


def rehearse(decoder: BatchDecoder, requests: Sequence[Request]) -> None:
    """Capture the graphs that prompts of each size and steps of each number of rows need.

    No request then waits for a capture. Nothing is decoded.
    """
    of_sizes = {len(each.prompt_ids).bit_length(): each for each in requests}
    together = [[each] for each in of_sizes.values()]
    together += [
        list(itertools.islice(itertools.cycle(requests), count))
        for count in row_counts(decoder.num_rows)
    ]
    for some in together:
        rows = [decoder.admit(each) for each in some]
        decoder.prepare()
        for row in rows:
            decoder.release(row)
