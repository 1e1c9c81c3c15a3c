"""Print the --dry_run of the evaluating commands: their measurements, memory and disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from stree.checkpoints.configs import load_config
from stree.common.words import counted
from stree.models.config import HybridConfig
from stree_pipelines.evaluation.answering.decoders import num_warmup_tokens
from stree_pipelines.evaluation.answering.drafter_readings import MAX_ANSWER_TOKENS
from stree_pipelines.evaluation.arms import TUNED, Comparison
from stree_pipelines.evaluation.benchmarks import BenchmarkPrompt
from stree_pipelines.evaluation.evaluate import Evaluation, disk_of, groups_of, what_to_lower
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE, DRAFTING, ChosenTree, Job, Round
from stree_pipelines.evaluation.records import ResultKey
from stree_pipelines.evaluation.sampling import sampling_text
from stree_pipelines.resources.disk import require_disk, require_writable
from stree_pipelines.resources.estimates import (
    MemoryEstimate,
    cache_bytes,
    config_lines,
    decoding_memory,
    largest_of,
    model_line,
    models_of,
)

# Bytes per token of an answer and entry of the vocabulary: both models' in fp32, and temporaries
PROBABILITY_BYTES = 20


class Work:
    """Jobs of an evaluation, group by group in the order of its plan, and the work that is left.

    Attributes:
        jobs: all, by the key of their row.
        pending: jobs without a row.
        rounds: prompts to answer for them.
        most_interleaved: methods that are interleaved at most, and journalled together.
        memory: an estimate for each `measure`.
    """

    def __init__(self, evaluation: Evaluation) -> None:
        require_writable(evaluation.settings.out)
        self.evaluation = evaluation
        rows = [] if evaluation.settings.overwrite else evaluation.store.results()
        self._existing = {row.key for row in rows}
        self.jobs: dict[ResultKey, Job] = {}
        self.pending: list[Job] = []
        self.rounds: list[Round] = []
        self.most_interleaved = 0
        self.memory: list[MemoryEstimate] = []

    def add(self, jobs: Sequence[Job]) -> None:
        """Add the jobs of a `measure`."""
        new = {job.result_key: job for job in jobs}
        to_go = [job for key, job in new.items() if key not in self._existing | self.jobs.keys()]
        groups = groups_of(to_go)
        rounds = [each for group in groups for each in self.evaluation.rounds(group)]
        plain = [each.baseline for each in rounds if each.baseline]
        self.memory.append(memory_of(self.evaluation, [*jobs, *plain[:1]]))
        self.most_interleaved = max(self.most_interleaved, *map(len, groups), 0)
        self.rounds += rounds
        self.pending += to_go
        self.jobs |= new

    @property
    def answers(self) -> list[tuple[BenchmarkPrompt, Job]]:
        return [(each.prompt, job) for each in self.rounds for job in each.jobs]

    @property
    def num_tokens(self) -> int:
        """Most tokens of all answers."""
        turns = sum(len(prompt.turns) for prompt, _ in self.answers)
        return turns * self.evaluation.settings.max_new_tokens

    @property
    def fewest_calls(self) -> int:
        """Calls of the target for the most tokens, if every draft were accepted."""
        most = self.evaluation.settings.max_new_tokens
        return sum(
            len(prompt.turns) * -(-most // (1 + (job.tree.max_depth if job.tree else 0)))
            for prompt, job in self.answers
        )

    @property
    def num_journalled(self) -> int:
        store = self.evaluation.store
        return sum(len(store.journalled(job.samples_name)) for job in self.pending)

    def describe(self, config: Mapping[str, Any], facts: Iterable[str]) -> Iterator[str]:
        """Yield the lines of a dry run: first `facts`, then memory and time.

        Raises CannotWrite when its rows do not fit on the disk and, after the last line,
        OutOfMemory when the models do not fit into memory.
        """
        settings = self.evaluation.settings
        yield config_lines(config)
        yield model_line("target", load_config(settings.target))
        names = (job.drafter.name for job in self.jobs.values() if job.drafter)
        by_folder = {name.folder or name: name for name in names}
        for name, drafter in models_of(by_folder.values(), settings.target).items():
            yield model_line(str(name.folder or name), drafter)
        yield from facts
        if sampling := sampling_text(settings):
            yield f"sampling: {sampling}, at every temperature and by every method"
        warm_ups = len({(job.decoder_key, job.temperature) for _, job in self.answers})
        lengths = ", and prefill where a decoder first meets a prompt's length, of long ones less"
        if settings.batch_size > 1:
            yield f"batches: {settings.batch_size} prompts at once"
            lengths = ""
        chosen = {
            job.result_key: job for _, job in self.answers if isinstance(job.tree, ChosenTree)
        }
        shown = sum(len(settings.first_prompts(job.benchmark)) for job in chosen.values())
        first = f"; {shown} answers to first prompts, for what chooses trees" if chosen else ""
        tokens = num_warmup_tokens(settings)
        yield f"untimed: {warm_ups} warm-ups of {tokens} tokens{lengths}{first}"
        memory = max(self.memory, key=lambda each: sum(each.parts.values()))
        yield f"each process: {memory}"
        yield require_disk(settings.out, disk_of(settings, self.pending, self.most_interleaved))
        memory.require(what_to_lower(settings))


def describe_evaluation(
    evaluation: Evaluation, checkpoints: Sequence[str | None], more: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Yield lines about the evaluation of these checkpoints; `more` is added to the printed config.

    Raises the errors that the evaluation would raise before its first answer, and as
    `Work.describe`.
    """
    settings, work = evaluation.settings, Work(evaluation)
    for name in checkpoints:
        work.add(evaluation.plan(name))
    plain = sum(each.baseline is not None for each in work.rounds)
    facts = (
        f"rows: {len(work.jobs)} ({len(checkpoints)} checkpoints, {len(settings.methods)} methods, "
        f"{len(settings.temperatures)} temperatures, {len(evaluation.benchmarks)} benchmarks), "
        f"{len(work.jobs) - len(work.pending)} are there",
        f"answers: {len(work.answers):,} prompts × methods to go, {plain:,} of them plain decoding "
        f"(measured beside each checkpoint), at most {work.num_tokens:,} tokens; "
        f"{work.num_journalled:,} more are journalled",
    )
    yield from work.describe(
        {**asdict(settings), "checkpoints": checkpoints, **(more or {})}, facts
    )


def describe_comparison(comparison: Comparison) -> Iterator[str]:
    """Yield lines about a comparison. Raises as `describe_evaluation`."""
    settings, work = comparison.settings, Work(comparison)
    trials, plan = comparison.trials(), comparison.plan()
    tunings = [] if settings.overwrite else comparison.tunings()
    tuned = {(each.arm, each.benchmark, each.temperature) for each in tunings}
    work.add(trials)
    num_trials = len(work.answers)
    work.add(plan)
    facts = []
    for arm in comparison.arms:
        mine = [job for job in plan if job.method == arm.name]
        trees = {
            f"{job.tree.name} ({job.tree.num_nodes} nodes, {job.tree.max_depth} deep)": None
            for job in mine if job.tree
        }
        places = {(arm.name, job.benchmark.name, job.temperature) for job in mine}
        if arm.tree == TUNED and not places <= tuned:
            trees = {f"a chain, tuned: {len(arm.trees)} lengths tried on the first prompts": None}
        facts.append(
            f"arm {arm.name}: {arm.drafter}, {' or '.join(trees)}, verifier {arm.verifier}, "
            f"backtracking {arm.backtracking}"
        )
    facts += [
        f"rows: {len(work.jobs)} ({len(trials)} of chains that are tried, {len(comparison.arms)} "
        f"arms and plain decoding × {len(settings.temperatures)} temperatures × "
        f"{len(comparison.benchmarks)} benchmarks), {len(work.jobs) - len(work.pending)} are there",
        f"answers: {len(work.answers):,} to go, {num_trials:,} of them to tune chains by, at most "
        f"{work.num_tokens:,} tokens; {work.num_journalled:,} more are journalled",
        f"calls of the target: {work.fewest_calls:,} where all drafts are accepted to "
        f"{work.num_tokens:,} where none is, shared by "
        + counted(comparison.workers.count, "process"),
    ]
    content = {name: value for name, value in asdict(settings).items() if name not in DRAFTING}
    yield from work.describe({**content, "arms": list(map(asdict, comparison.arms))}, facts)


def memory_of(evaluation: Evaluation, jobs: Sequence[Job]) -> MemoryEstimate:
    """Estimate a process's most memory, in which jobs are measured: the target, their drafters and
    every method's caches."""
    settings, decoders = evaluation.settings, evaluation.decoders
    target = load_config(settings.target)
    # A folder's model is loaded again for another name, such as FOLDER+ngram
    names = [each.name for each in dict.fromkeys(job.drafter for job in jobs if job.drafter)]
    drafters = models_of(names, settings.target)
    methods = {job.decoder_key[1]: job for job in jobs}
    trees = {name: job.tree.num_nodes if job.tree else 1 for name, job in methods.items()}
    parts = decoding_memory(
        target, drafters, decoders.dtype, decoders.max_length, trees, settings.batch_size,
        in_8_bits=bool(settings.target_dtype), folder=settings.target,
    )

    def of_caches(*configs: HybridConfig) -> int:
        sizes = (cache_bytes(each, decoders.max_length, 1, decoders.dtype) for each in configs)
        return sum(sizes)

    both = [target, *largest_of(drafters)]
    if decoders.num_prefixes:
        drafting = both[1:] * (len(trees) - (AUTOREGRESSIVE in trees))
        prefixes = of_caches(*[target] * len(trees), *drafting)
        parts["earlier turns"] = decoders.num_prefixes * prefixes
    if any(prompt.reference_answer for job in jobs for prompt in job.benchmark.prompts):
        probabilities = PROBABILITY_BYTES * MAX_ANSWER_TOKENS * target.vocab_size
        parts["answers of the data"] = probabilities + of_caches(*both)
    return MemoryEstimate(parts, decoders.device.type == "cuda")
