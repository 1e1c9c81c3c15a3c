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
from stree.common.errors import UsageError, naming_what_does_not_fit, require_fitting
from stree.common.words import device_name
from stree.generation import GenerationConfig
from stree_lab.benches.command import require_some
from stree_lab.benches.timing import Row
from stree_lab.queue.queueing import (
    CLEARING,
    POLICIES,
    Policy,
    Served,
    WallClock,
    figures_of,
    poisson_arrivals,
    serve,
)
from stree_pipelines.console.progress import EvaluationProgress, clock
from stree_pipelines.evaluation.answering import gc_freeze
from stree_pipelines.evaluation.context import Workers, describe_environment
from stree_pipelines.evaluation.evaluate import Evaluation, what_to_lower
from stree_pipelines.evaluation.plan import (
    AUTOREGRESSIVE,
    TREE,
    EvaluationSettings,
    Job,
    method_of,
    prompt_seed,
)
from stree_pipelines.evaluation.records import config_hash

# Options of an evaluation that the bench has, too
SETTINGS = (
    "benchmark_dir", "batch_size", "tree", "num_chain_drafts", "max_new_tokens", "ignore_eos",
    "seed", "chat_template", "dtype", "device",
)
VERSION = 2  # of rows; 1 had a row's seconds in steps for its occupancy


@dataclass(frozen=True)
class Setting:
    """A row to measure; the hash is of all that decides it."""

    job: Job
    policy: Policy
    rate: float
    hash: str


class QueueBench:
    """Bench of one target and drafter; `Evaluation` plans, loads and warms up."""

    def __init__(self, options: Any, progress: EvaluationProgress | None = None) -> None:
        self.num_requests = options.num_requests
        self.settings = settings_of(options)
        self.evaluation = Evaluation(
            self.settings, workers=Workers(), progress=progress,
            make_decoder=partial(BatchDecoder, num_rows=self.settings.batch_size),
        )
        self.progress, self.benchmark = self.evaluation.progress, self.evaluation.benchmarks[0]
        self.wanted = list(self._settings(options))

    def _settings(self, options: Any) -> Iterator[Setting]:
        jobs = self.evaluation.plan(options.drafter)
        for rate, job, name in itertools.product(options.rates, jobs, options.policies):
            policy = policy_of(options, name)
            identity = {
                "version": VERSION,
                "decoding": job.result_key, "policy": asdict(policy), "rate": rate,
                "num_requests": self.num_requests,
                "device": device_name(self.evaluation.decoders.device),
            }
            yield Setting(job, policy, rate, config_hash(identity))

    def announce(self, num_left: int) -> None:
        longest = sum(self.num_requests / each.rate for each in self.wanted)
        self.progress.say(
            f"{len(self.wanted)} settings of {self.num_requests} requests, "
            f"{num_left} to go; their traffic takes {clock(longest)} in all, on "
            f"{device_name(self.evaluation.decoders.device)}, {self.settings.dtype}"
        )

    def measure(self, setting: Setting) -> Row:
        """Serve the setting's traffic. Raises decoding's errors and OutOfMemory."""
        job, decoders = setting.job, self.evaluation.decoders
        prompts = itertools.islice(itertools.cycle(self.benchmark.prompts), self.num_requests)
        requests = [
            Request(decoders.prompt_ids(prompt), self._generation(job, prompt.id, index))
            for index, prompt in enumerate(prompts)
        ]
        arrivals = poisson_arrivals(setting.rate, self.num_requests, self.settings.seed)
        with naming_what_does_not_fit(what_to_lower(self.settings)):
            longest = max((request.prompt_ids for request in requests), key=len)
            decoder = decoders.warm(job, list(longest))
            self.evaluation.say_room()
            rehearse(decoder, requests)
            label = f"{setting.policy.name} {job.method} {setting.rate:g}/s"
            finished: list[float] = []

            def show(one: Served) -> None:
                finished.append(one.finished - one.arrival)
                mean = sum(finished) / len(finished)
                task.advance(f"latency {mean:.2f} s, longest {max(finished):.2f} s")

            with (
                self.progress.task(label, self.num_requests) as task,
                gc_freeze.left_alone(),
            ):
                moments, waiting = WallClock(), list(arrivals)
                traffic = serve(decoder, requests, waiting, setting.policy, moments, show)
        return {**self._about(setting), **figures_of(traffic), "environment": self._environment()}

    def _generation(self, job: Job, prompt_id: str, index: int) -> GenerationConfig:
        """Return a request's settings; a prompt that comes again gets another seed."""
        return GenerationConfig(
            max_new_tokens=self.settings.max_new_tokens,
            temperature=job.temperature,
            seed=prompt_seed(self.settings.seed, self.benchmark.name, prompt_id, index),
            ignore_eos=self.settings.ignore_eos,
        ).without_unread()

    def _about(self, setting: Setting) -> Row:
        """Return the fields of a row that tell its setting."""
        job, policy, settings = setting.job, setting.policy, self.settings
        clears, drafter = policy.name == CLEARING, job.drafter
        return {
            "version": VERSION,
            "policy": policy.name,
            "queue_size": policy.queue_size if clears else None,
            "max_wait_s": policy.max_wait_s if clears else None,
            "rate": setting.rate,
            "num_requests": self.num_requests,
            "batch_size": settings.batch_size,
            "method": job.method,
            "tree": {"name": job.tree.name, "parents": job.tree.parents} if job.tree else None,
            "step": drafter.step if drafter else None,
            "checkpoint": drafter.path if drafter else None,
            "checkpoint_sha256": drafter.sha256 if drafter else None,
            "target": settings.target,
            "target_sha256": self.evaluation.target_sha256,
            "benchmark": self.benchmark.name,
            "prompts_hash": self.benchmark.prompts_hash,
            "temperature": job.temperature,
            "max_new_tokens": settings.max_new_tokens,
            "ignore_eos": settings.ignore_eos,
            "seed": settings.seed,
            "setting_hash": setting.hash,
        }

    def _environment(self) -> Row:
        decoders = self.evaluation.decoders
        environment = describe_environment(decoders.device, decoders.dtypes, 1)
        return environment.model_dump(mode="json")


def settings_of(options: Any) -> EvaluationSettings:
    """Return the options' evaluation settings. Raises UsageError for values out of range."""
    methods = tuple(map(method_of, options.methods))
    if not methods:
        methods = (AUTOREGRESSIVE, TREE) if options.drafter else (AUTOREGRESSIVE,)
    if set(methods) - {AUTOREGRESSIVE} and options.drafter is None:
        raise UsageError(f"methods {', '.join(methods)} need a drafter: give --drafter")
    rates = options.rates
    require_some("policies", options.policies, POLICIES)
    require_fitting(options, {
        "batch_size": (options.batch_size >= 2, "at least 2 rows"),
        "num_requests": (options.num_requests >= 1, "at least 1"),
        "rates": (
            len(set(rates)) == len(rates) > 0 and all(0 < rate < float("inf") for rate in rates),
            "requests a second, above 0, each once",
        ),
        "policies": (len(set(options.policies)) == len(options.policies), "each once"),
    }, "--")
    for name in options.policies:
        policy_of(options, name)
    return EvaluationSettings(
        target=options.target, out=str(Path(options.out).parent), benchmarks=(options.prompts,),
        methods=methods, temperatures=(options.temperature,),
        **{name: getattr(options, name) for name in SETTINGS},
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
