"""Evaluate drafter checkpoints through the real engine, for the command and the callback.

Every speculative prompt carries the timing of plain decoding of the same prompt, made anew
for each checkpoint, at the same batch size and right before the methods' own: a speedup is always a
pair, even in rows that a resumed run finished. At T = 0 its tokens are compared with that run's,
and each difference gets the target's own top-2 margin.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from stree import metrics
from stree.chat_encoding import chat_encoder
from stree.chat_templates import resolve_template
from stree.checkpoints.identity import checkpoint_sha256
from stree.common.errors import (
    InvariantBroken,
    OutOfMemory,
    StreeError,
    UsageError,
    naming_what_does_not_fit,
)
from stree.common.template_dates import template_date
from stree.common.words import device_name
from stree_pipelines.console.progress import EvaluationProgress
from stree_pipelines.evaluation.answering import gc_freeze, stalls
from stree_pipelines.evaluation.answering.answers import (
    Answerer,
    interleaved_answers,
    timing_of,
)
from stree_pipelines.evaluation.answering.decoders import Decoders
from stree_pipelines.evaluation.answering.drafter_readings import read_answer
from stree_pipelines.evaluation.benchmarks import Benchmark, BenchmarkPrompt, load_benchmark
from stree_pipelines.evaluation.context import Workers, describe_environment
from stree_pipelines.evaluation.plan import (
    AUTOREGRESSIVE,
    DrafterIdentity,
    EvaluationSettings,
    Job,
    Method,
    Round,
    make_job,
    method_label,
)
from stree_pipelines.evaluation.records import (
    Lossless,
    Reading,
    ReadingKey,
    ResultKey,
    ResultRow,
    SampleRow,
    Tree,
)
from stree_pipelines.evaluation.result_store import ResultStore
from stree_pipelines.evaluation.sampling import sampling_text
from stree_pipelines.resources.disk import disk_shortage
from stree_pipelines.resources.folder_locks import LOCK_NAME, locked

# Bytes in a line of samples, measured on a run of configs/eval/quickstart.yaml: numbers of the
# prompt and of a turn, and text, id and acceptance of a token.
SAMPLE_BYTES, TURN_BYTES, TOKEN_BYTES = 1110, 100, 12
RESULT_BYTES = 2710

# Most logits by which a target's first choice may lead where two exact decodings differ, by dtype.
LARGEST_TIE = {"float32": 1e-3, "float64": 1e-9}


class Evaluation:
    """Evaluation of any number of checkpoints of one target, which stays in memory.

    All workers make the same calls.

    Args:
        settings: the evaluation's settings.
        workers: the processes to share prompts with; those of `accelerate launch` unless given.
            `Workers()` is this process alone.
    """

    def __init__(
        self, settings: EvaluationSettings, workers: Workers | None = None,
        make_decoder: Callable[..., Any] | None = None, progress: EvaluationProgress | None = None,
    ) -> None:
        self.settings = settings
        self.benchmarks = [
            load_benchmark(name, settings.benchmark_dir, settings.limit)
            for name in settings.benchmarks
        ]
        names = [benchmark.name for benchmark in self.benchmarks]
        if len(set(names)) < len(names):
            raise UsageError(f"benchmarks {names} share a name: name each once, or rename a file")
        self.methods = [settings.method(name) for name in settings.methods]
        self.plain = settings.method(AUTOREGRESSIVE)
        self.target_sha256 = checkpoint_sha256(settings.target)
        self.workers = workers or Workers.start(settings.device)
        self.progress = progress or EvaluationProgress(enabled=self.workers.is_main)
        self.decoders = Decoders(settings, self.benchmarks, make_decoder, self.progress.say)
        self.decoders.require_end()
        self.decoders.require_positions()
        self.answerer = Answerer(self.decoders)
        tokenizer, template = self.decoders.tokenizer, settings.chat_template
        # The text with its fixed date decides the tokens; rows name the template by its own text
        self.chat_template = chat_encoder(tokenizer, template).renderer.template
        own_text = resolve_template(tokenizer, template)
        self.chat_template_sha256 = hashlib.sha256(own_text.encode()).hexdigest()
        self.store = ResultStore(settings.out)
        self._published: set[ResultKey] = set()
        self._told_bytes = 0  # per sequence, when the number that fits was last printed

    def announce(self, num_checkpoints: int) -> None:
        """Print the number of answers, and the device."""
        settings = self.settings
        counts = {
            "checkpoints": num_checkpoints, "methods": len(settings.methods),
            "temperatures": len(settings.temperatures), "prompts": self.num_prompts,
        }
        product = " × ".join(f"{count} {name}" for name, count in counts.items())
        beside = ""
        if AUTOREGRESSIVE in settings.methods and num_checkpoints > 1:
            beside = ", plain decoding beside each checkpoint"
        at_once = f", {settings.batch_size} at once" if settings.batch_size > 1 else ""
        self.progress.say(
            f"{product} of {', '.join(benchmark.name for benchmark in self.benchmarks)}: "
            f"{math.prod(counts.values()):,} answers{beside}{at_once}, {self.where}"
        )

    @property
    def num_prompts(self) -> int:
        return sum(len(benchmark.prompts) for benchmark in self.benchmarks)

    @property
    def where(self) -> str:
        """Text of the devices, the dtype and the sampling settings."""
        return (
            f"on {self.workers.count} × {device_name(self.decoders.device)}, "
            f"{self.settings.held_dtype}{sampling_text(self.settings, ', ')}"
        )

    def say_room(self) -> None:
        """Print how many prompts fit in memory at once, and again when methods take more."""
        room = self.decoders.room
        if room is not None and room.sequence_bytes > self._told_bytes:
            self._told_bytes = room.sequence_bytes
            self.progress.say(str(room))

    def plan(self, checkpoint: str | Path | None) -> list[Job]:
        """List the jobs of a checkpoint.

        Raises CheckpointRefused when it is no checkpoint, or does not fit the target.
        """
        return self.jobs_of(None if checkpoint is None else self.drafter(checkpoint))

    def drafter(self, checkpoint: str | Path) -> DrafterIdentity:
        """Identify a drafter, and print remarks on it. Raises as `plan`."""
        drafter = DrafterIdentity.at(checkpoint)
        drafter.require_fit(self.settings.target)
        for remark in drafter.remarks(self.settings.target, self.decoders.max_length):
            self.progress.say(remark)
        return drafter

    def jobs_of(self, drafter: DrafterIdentity | None) -> list[Job]:
        """List the jobs of a drafter, or those without one."""
        return [
            self._job(method, drafter, benchmark, temperature)
            for benchmark in self.benchmarks
            for temperature in self.settings.temperatures
            for method in self.methods
            if drafter is not None or method.tree is None
        ]

    def evaluate(self, checkpoint: str | Path | None) -> list[ResultRow]:
        """Measure one drafter checkpoint (None: plain decoding only) and return its rows.

        The baseline's rows are included. Existing rows are returned unchanged, unless `overwrite`.
        Raises as `measure`.
        """
        return self.measure(self.plan(checkpoint))

    def measure(self, jobs: Sequence[Job]) -> list[ResultRow]:
        """Measure jobs and return their rows, in the order of the jobs.

        Raises the first worker's StreeError on every worker; finished prompts stay journalled.
        Raises InvariantBroken, with all rows saved, as `require_lossless` does.
        """
        try:
            with ExitStack() as stack:
                waiting = f"waiting for another evaluation in {self.store.directory} to finish"
                # Others would disturb its timing and its journals
                lock = locked(
                    self.store.directory / LOCK_NAME, partial(self.progress.say, waiting)
                )
                self._on_main(lambda: stack.enter_context(lock))
                self._on_main(lambda: self._prepare_folder(jobs))
                existing = {row.key for row in self.store.results()}
                groups = groups_of([job for job in jobs if job.result_key not in existing])
                num_interleaved = max(map(len, groups), default=0)
                disk = disk_of(self.settings, list(chain(*groups)), num_interleaved)
                if shortage := disk_shortage(self.store.directory, disk):
                    self.progress.say(f"warning: {shortage}")
                mine = (set(self.workers.share(group[0].benchmark.prompts)) for group in groups)
                rounds = [
                    [each for each in self.rounds(group) if each.prompt in prompts]
                    for group, prompts in zip(groups, mine, strict=True)
                ]
                self.workers.gather(None)  # all have read before any worker appends or publishes
                self._together("warm-up", lambda: self._warm_up(list(chain(*rounds))))
                self.say_room()
                for group, own in zip(groups, rounds, strict=True):
                    with gc_freeze.left_alone():
                        self._together(group[0].benchmark.name, partial(self._run, own))
                    for job in group:
                        self._on_main(partial(self._publish, job))
                        self._published.add(job.result_key)
                self._read_answers(jobs)
        finally:  # a checkpoint that failed must not leave less memory to the next one
            for drafter in dict.fromkeys(job.drafter for job in jobs if job.drafter):
                self.decoders.release(drafter)
        found = {row.key: row for row in self.store.results()}
        rows = [found[job.result_key] for job in jobs]
        require_lossless(rows)
        return rows

    def rounds(self, group: Sequence[Job]) -> list[Round]:
        """List the answers that no journal has for one benchmark and temperature, prompt by
        prompt."""
        done = {key for job in group for key in self.store.journalled(job.samples_name)}
        benchmark, temperature = group[0].benchmark, group[0].temperature
        baseline = next((job for job in group if job.method == AUTOREGRESSIVE), None)
        if baseline is None and AUTOREGRESSIVE in self.settings.methods:
            baseline = self._job(self.plain, None, benchmark, temperature)
        rounds = []
        for prompt in benchmark.prompts:
            missing = tuple(job for job in group if job.sample_key(prompt) not in done)
            if missing:
                rounds.append(Round(prompt, baseline, missing))
        return rounds

    def _job(
        self, method: Method, drafter: DrafterIdentity | None, benchmark: Benchmark,
        temperature: float,
    ) -> Job:
        return make_job(
            self.settings, method, drafter, benchmark, temperature,
            target_sha256=self.target_sha256, chat_template=self.chat_template,
            device_type=self.decoders.device.type,
        )

    def _warm_up(self, rounds: Sequence[Round]) -> None:
        """Let every decoder and sampling rule make its first calls before anything is timed."""
        cold: dict[Any, tuple[Job, BenchmarkPrompt]] = {}
        for each in rounds:
            for job in each.jobs:
                if not self.decoders.is_warm(job):
                    cold.setdefault((job.decoder_key, job.temperature), (job, each.prompt))
        with self.progress.task(f"{_label(rounds)}warm-up", len(cold)) as task:
            for job, prompt in cold.values():
                self.answerer.warm_up(job, prompt)
                task.advance(f"{method_label(job.method)} T={job.temperature:g}")

    def _read_answers(self, jobs: Sequence[Job]) -> None:
        """Let target and drafters read the data's own answers, for prompts that have them."""
        known: set[ReadingKey] = set()
        if not self.settings.overwrite:
            known = {each.key for each in self.store.readings()}
        drafters: list[DrafterIdentity | None] = [
            *dict.fromkeys(job.drafter for job in jobs if job.drafter)
        ]
        benchmarks = {job.benchmark.name: job.benchmark for job in jobs}.values()
        missing = []
        for drafter in drafters or [None]:
            for benchmark in benchmarks:
                for prompt in benchmark.prompts:
                    key = ReadingKey(
                        drafter.sha256 if drafter else None, self.target_sha256,
                        self.settings.held_dtype, self.chat_template_sha256, benchmark.name,
                        benchmark.prompts_hash, prompt.id,
                    )
                    if prompt.reference_answer and key not in known:
                        missing.append((drafter, prompt, key))
        if not missing:
            return
        readings: list[Reading] = []

        def read() -> None:
            mine = self.workers.share(missing)
            with self.progress.task("answers of the data", len(mine)) as task:
                for each in mine:
                    readings.append(read_answer(self.decoders, *each))
                    task.advance(f"{readings[-1].num_prompt_tokens:,} tokens")

        self._together("answers of the data", read)
        gathered = list(chain(*self.workers.gather(readings)))
        self._on_main(lambda: self.store.save_readings(gathered))

    def _publish(self, job: Job) -> None:
        found = self.store.journalled(job.samples_name)
        samples = [found[job.sample_key(prompt)] for prompt in job.benchmark.prompts]
        stalled = {each.prompt_id for each in stalls.stalled(samples)}
        samples = [
            each.model_copy(update={"is_stalled": each.prompt_id in stalled}) for each in samples
        ]
        self.store.publish(self._row(job, samples), samples)

    def _prepare_folder(self, jobs: Sequence[Job]) -> None:
        self.store.tidy()
        if self.settings.overwrite:
            # Rows that this process measured, such as an earlier checkpoint's baseline, stay.
            stale = [job for job in jobs if job.result_key not in self._published]
            self.store.forget({job.result_key: job.samples_name for job in stale})

    def _on_main(self, action: Callable[[], object]) -> None:
        """Run an action on the main worker; all wait for it, and fail with it."""
        self._together("rows", action if self.workers.is_main else lambda: None)

    def _together(self, what: str, action: Callable[[], object]) -> None:
        """Run an action on every worker; all wait for the last, and fail with the first that fails.

        what: named in the error when memory does not suffice.
        """
        problem: StreeError | None = None
        try:
            with naming_what_does_not_fit(what_to_lower(self.settings)):
                action()
        except OutOfMemory as error:
            size = self.settings.batch_size
            at_once = f", batch_size {size}" if size > 1 else ""
            problem = OutOfMemory(f"{what}{at_once}: {error}")
        except StreeError as error:
            # Frames hold decoders, and with them memory for as long as the error is kept.
            error.__cause__ = error.__context__ = None
            problem = error.with_traceback(None)
        problems = [each for each in self.workers.gather(problem) if each is not None]
        if problems:
            raise problems[0]

    def _run(self, rounds: Sequence[Round]) -> None:
        if not rounds:
            return
        finished: dict[str, list[SampleRow]] = defaultdict(list)  # by method
        num_left = {each.prompt.id: len(each.jobs) for each in rounds}
        first = rounds[0].missing[0]
        label = f"{_label(rounds)}{first.benchmark.name} T={first.temperature:g}"
        # A batch's answers come one by one, but its prompts are all done only at the end.
        by_answer = self.settings.batch_size > 1
        with (
            self.progress.task(label, sum(num_left.values()) if by_answer else len(rounds)) as task,
            closing(interleaved_answers(self.answerer, rounds)) as answers,
        ):
            for each, job, sample in answers:
                if job in each.missing:
                    self.store.journal(job.samples_name, self.workers.rank, sample)
                finished[job.method].append(sample)
                num_left[each.prompt.id] -= 1
                if by_answer or num_left[each.prompt.id] == 0:
                    task.advance(_so_far(finished))

    def _row(self, job: Job, samples: Sequence[SampleRow]) -> ResultRow:
        baselines = [sample.baseline for sample in samples if sample.baseline is not None]
        if job.method == AUTOREGRESSIVE:
            baselines = [timing_of(sample) for sample in samples]
        costs = self.decoders.costs(job)
        return ResultRow(
            **job.columns(self.settings),
            checkpoint=job.drafter.path if job.drafter else None,
            target=self.settings.target, target_sha256=self.target_sha256,
            tree=Tree(name=job.tree.name, parents=job.tree.parents) if job.tree else None,
            verifier=job.verifier if job.tree else None,
            backtracking=job.backtracking if job.tree else None,
            prompts_hash=job.benchmark.prompts_hash, num_prompts=len(samples),
            max_new_tokens=self.settings.max_new_tokens, ignore_eos=self.settings.ignore_eos,
            chat_template_sha256=self.chat_template_sha256,
            template_date=template_date(self.chat_template),
            measuring_costs_s=None if costs is None else costs.took_s,
            costs=None if costs is None else costs.record(),
            lossless=summarise_lossless(samples),
            num_stalled=sum(each.is_stalled for each in samples),
            num_ended=sum(len(each.turns) - each.num_cut for each in samples),
            num_cut=sum(each.num_cut for each in samples),
            environment=describe_environment(
                self.decoders.device, self.decoders.dtypes, self.workers.count
            ),
            samples=job.samples_name,
            **metrics.summarise(samples, baselines if len(baselines) == len(samples) else None),
        )


def disk_of(
    settings: EvaluationSettings, jobs: Sequence[Job], num_interleaved: int
) -> dict[str, int]:
    """Estimate the bytes by part of the jobs' files, as if every answer had its most tokens.

    num_interleaved: Jobs of a group, which are all journalled before the first is published.
    """
    samples = [
        sum(
            SAMPLE_BYTES + sum(
                TURN_BYTES + len(turn.encode()) + TOKEN_BYTES * settings.max_new_tokens
                for turn in prompt.turns
            )
            for prompt in job.benchmark.prompts
        )
        for job in jobs
    ]
    journals = sum(sorted(samples, reverse=True)[:num_interleaved])
    return {"samples": sum(samples), "journals": journals, "rows": RESULT_BYTES * len(jobs)}


def groups_of(jobs: Sequence[Job]) -> list[list[Job]]:
    """Group jobs, in the order of a plan, by benchmark and temperature; a group is interleaved."""
    groups = groupby(jobs, lambda job: (job.benchmark.name, job.temperature))
    return [list(group) for _, group in groups]


def summarise_lossless(samples: Sequence[SampleRow]) -> Lossless | None:
    """Summarise the compared prompts; None without any (T > 0, or no baseline)."""
    checked = [sample for sample in samples if sample.lossless is not None]
    if not checked:
        return None
    identical = sum(bool(sample.lossless) for sample in checked)
    return Lossless(
        share=identical / len(checked), num_prompts=len(checked), num_identical=identical,
        divergences=tuple(s.divergence for s in checked if s.divergence is not None),
    )


def require_lossless(rows: Sequence[ResultRow]) -> None:
    """Raise InvariantBroken when an answer differs by more than rounding can explain.

    Two orders of summation give logits that differ by a few hundred roundings of the largest: a
    unit roundoff of 6e-8 in fp32 and logits of some tens make about 1e-4, in fp64 1e-13. When the
    target's first choice leads by more than `LARGEST_TIE`, at least ten times that, it leads in any
    order, so another token is a fault. An answer that ends earlier or later than the other one has
    no other token to tie with and is a fault at any gap. In bf16 and fp16 neighbouring numbers are
    0.1 apart at that size, no bound separates rounding from faults, and divergences are only
    reported.
    """
    for row in rows:
        bound = LARGEST_TIE.get(row.environment.dtypes.get("weights", ""))
        if row.lossless is None or bound is None:
            continue
        for each in row.lossless.divergences:
            ended = each.token is None or each.autoregressive_token is None
            if ended or each.logit_gap > bound:
                raise InvariantBroken(
                    f"{method_label(row.method)} is not lossless: {row.benchmark} prompt "
                    f"{each.prompt_id}, turn {each.turn}, position {each.position} has token "
                    f"{each.token}, plain decoding {each.autoregressive_token}, and the target "
                    f"prefers its first choice by {each.logit_gap:.3g} logits (rounding explains "
                    f"{bound:g} in {row.environment.dtypes['weights']}); the rows are saved, don't "
                    "use them"
                )


def what_to_lower(settings: EvaluationSettings) -> str:
    """Return advice for an evaluation that needs too much memory."""
    lower = "batch_size or max_new_tokens" if settings.batch_size > 1 else "max_new_tokens"
    return f"lower {lower}, or use dtype bfloat16 or a larger GPU"


def _label(rounds: Sequence[Round]) -> str:
    """Return the step of the rounds' checkpoint as a label; "" without a step."""
    steps = (job.step for each in rounds for job in each.missing if job.drafter)
    step = next(steps, None)
    return "" if step is None else f"step {step}  "


def _so_far(finished: Mapping[str, Sequence[SampleRow]]) -> str:
    """Format each method's figures, the tree's first; three methods fit 80 columns."""
    parts: list[str] = []
    for method, samples in reversed(list(finished.items())):
        tau, speed = metrics.acceptance_length(samples), metrics.tokens_per_second(samples)
        if tau is not None and speed is not None:
            drafts = "" if method == AUTOREGRESSIVE else f"τ {tau:.2f}, "
            digits, unit = 0 if speed >= 100 else 1, "" if parts else " tok/s"
            parts.append(f"{method_label(method)} {drafts}{speed:.{digits}f}{unit}")
    return "; ".join(parts)
