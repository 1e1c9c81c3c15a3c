"""Print the --dry_run of the evaluating commands: their measurements, memory and disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from stree.checkpoints.load_save import load_config
from stree.trees.token_tree import TokenTree
from stree_pipelines.evaluation.answering.decoders import num_warmup_tokens
from stree_pipelines.evaluation.answering.drafter_readings import MOST_TOKENS
from stree_pipelines.evaluation.arms import TUNED, Comparison
from stree_pipelines.evaluation.benchmarks import BenchmarkPrompt
from stree_pipelines.evaluation.evaluate import Evaluation, groups_of, what_to_lower
from stree_pipelines.evaluation.plan import (
    AUTOREGRESSIVE,
    ChosenTree,
    EvaluationSettings,
    Job,
    Round,
)
from stree_pipelines.evaluation.records import ResultKey
from stree_pipelines.evaluation.sampling import told_sampling
from stree_pipelines.resources.dry_run import (
    MemoryEstimate,
    config_lines,
    model_line,
    require_disk,
    require_writable,
)
from stree_pipelines.resources.estimates import (
    cache_bytes,
    decoding_memory,
    head_in_8_bits_bytes,
    num_parameters,
)

# Bytes in a line of samples, measured on a run of configs/eval/quickstart.yaml: numbers of the
# prompt and of a turn, and text, id and acceptance of a token.
SAMPLE_BYTES, TURN_BYTES, TOKEN_BYTES = 1110, 100, 12
RESULT_BYTES = 2710
# Bytes per token of an answer and entry of the vocabulary: both models' in fp32, and temporaries
PROBABILITY_BYTES = 20
# Options that each arm of a comparison sets itself
ARM_OPTIONS = ("methods", "tree", "verifier", "backtracking", "num_chain_drafts")


class Work:
    """Jobs of an evaluation, group by group in the order of its plan, and the work that is left.

    Attributes:
        jobs: all, by the key of their row.
        pending: jobs without a row.
        rounds: prompts to answer for them.
    """

    def __init__(self, evaluation: Evaluation) -> None:
        self.evaluation = evaluation
        rows = [] if evaluation.settings.overwrite else evaluation.store.results()
        self._existing = {row.key for row in rows}
        self.jobs: dict[ResultKey, Job] = {}
        self.pending: list[Job] = []
        self.rounds: list[Round] = []

    def add(self, jobs: Iterable[Job]) -> None:
        new = {job.result_key: job for job in jobs}
        to_go = [job for key, job in new.items() if key not in self._existing | self.jobs.keys()]
        self.rounds += [
            each for group in groups_of(to_go) for each in self.evaluation.rounds(group)
        ]
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

    def how(self) -> Iterator[str]:
        """Yield lines about sampling, batches and warm-ups."""
        settings = self.evaluation.settings
        if sampling := told_sampling(settings):
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


def describe_evaluation(
    evaluation: Evaluation, checkpoints: Sequence[str | None], more: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Yield lines about the evaluation of these checkpoints; `more` is added to the printed config.

    Raises the errors that the evaluation would raise before its first answer, CannotWrite when its
    rows do not fit on the disk and, after the last line, OutOfMemory when the models do not fit
    into memory.
    """
    settings = evaluation.settings
    require_writable(settings.out)
    work = Work(evaluation)
    for name in checkpoints:
        work.add(evaluation.plan(name))
    jobs = work.jobs
    plain = sum(each.baseline is not None for each in work.rounds)
    memory = memory_of(evaluation, list(jobs.values()))
    yield config_lines({**asdict(settings), "checkpoints": checkpoints, **(more or {})})
    yield model_line("target", load_config(settings.target))
    for path in drafter_paths(jobs.values()):
        yield model_line(path, load_config(path))
    yield (
        f"rows: {len(jobs)} ({len(checkpoints)} checkpoints, {len(settings.methods)} methods, "
        f"{len(settings.temperatures)} temperatures, {len(evaluation.benchmarks)} benchmarks), "
        f"{len(jobs) - len(work.pending)} are there"
    )
    yield (
        f"answers: {len(work.answers):,} prompts × methods to go, {plain:,} of them plain decoding "
        f"(measured beside each checkpoint), at most {work.num_tokens:,} tokens; "
        f"{work.num_journalled:,} more are journalled"
    )
    yield from work.how()
    yield f"each process: {memory}"
    yield require_disk(settings.out, _disk(work.pending, settings, len(settings.methods)))
    memory.require(what_to_lower(settings))


def describe_comparison(comparison: Comparison) -> Iterator[str]:
    """Yield lines about a comparison. Raises as `describe_evaluation`."""
    settings = comparison.settings
    require_writable(settings.out)
    trials, plan = comparison.trials(), comparison.plan()
    tunings = [] if settings.overwrite else comparison.tunings()
    tuned = {(each.arm, each.benchmark, each.temperature) for each in tunings}
    work = Work(comparison)
    work.add(trials)
    num_trials = len(work.answers)
    work.add(plan)
    plain = [job for job in plan if job.drafter is None]
    memory = max(
        (memory_of(comparison, jobs, together=True) for jobs in (plan, plain + trials)),
        key=lambda each: sum(each.parts.values()),
    )
    content = {name: value for name, value in asdict(settings).items() if name not in ARM_OPTIONS}
    yield config_lines({**content, "arms": [asdict(arm) for arm in comparison.arms]})
    yield model_line("target", load_config(settings.target))
    for path in drafter_paths(plan):
        yield model_line(path, load_config(path))
    places = {(job.method, job.benchmark.name, job.temperature): job for job in plan}
    for arm in comparison.arms:
        mine = {place: job for place, job in places.items() if place[0] == arm.name}
        trees = list(dict.fromkeys(_described(job.tree) for job in mine.values()))
        if not mine.keys() <= tuned and arm.tree == TUNED:
            trees = [f"a chain, tuned: {len(arm.trees)} lengths tried on the first prompts"]
        yield (
            f"arm {arm.name}: {arm.drafter}, {' or '.join(trees)}, verifier {arm.verifier}, "
            f"backtracking {arm.backtracking}"
        )
    yield (
        f"rows: {len(work.jobs)} ({len(trials)} of chains that are tried, {len(comparison.arms)} "
        f"arms and plain decoding × {len(settings.temperatures)} temperatures × "
        f"{len(comparison.benchmarks)} benchmarks), {len(work.jobs) - len(work.pending)} are there"
    )
    yield (
        f"answers: {len(work.answers):,} to go, {num_trials:,} of them to tune chains by, at most "
        f"{work.num_tokens:,} tokens; {work.num_journalled:,} more are journalled"
    )
    yield (
        f"calls of the target: {work.fewest_calls:,} where all drafts are accepted to "
        f"{work.num_tokens:,} where none is, shared by {comparison.workers.count} processes"
    )
    yield from work.how()
    yield f"each process: {memory}"
    yield require_disk(settings.out, _disk(work.pending, settings, _most_interleaved(work.pending)))
    memory.require(what_to_lower(settings))


def drafter_paths(jobs: Iterable[Job]) -> list[str]:
    """Return the folders of the models that draft."""
    names = (job.drafter.name for job in jobs if job.drafter)
    return list(dict.fromkeys(str(name.folder) for name in names if name.folder is not None))


def memory_of(
    evaluation: Evaluation, jobs: Sequence[Job], together: bool = False
) -> MemoryEstimate:
    """Estimate a process's most memory: the target, the largest drafter and every method's caches.

    together: all drafters are in memory at once.
    """
    settings, decoders = evaluation.settings, evaluation.decoders
    drafters = [load_config(path) for path in drafter_paths(jobs)]
    largest = max(drafters, key=lambda config: config.d_model * config.num_layers, default=None)
    methods = {job.decoder_key[1]: job for job in jobs}
    trees = {name: job.tree.num_nodes if job.tree else 1 for name, job in methods.items()}
    parts = decoding_memory(
        load_config(settings.target), largest, decoders.dtype, decoders.max_length, trees,
        settings.batch_size,
    )
    if together:  # a folder's model is loaded again for another name, such as FOLDER+ngram
        names = dict.fromkeys(job.drafter for job in jobs if job.drafter)
        folders = [drafter.name.folder for drafter in names if drafter.name.folder is not None]
        weights = sum(num_parameters(load_config(folder)) for folder in folders)
        parts["drafters"] = decoders.dtype.itemsize * weights
        parts.pop("drafter", None)
    heads = _heads_in_8_bits(jobs)
    if heads:
        parts["heads in 8 bits"] = sum(heads) if together else max(heads)
    if decoders.num_prefixes:
        drafting = [largest] * (len(trees) - (AUTOREGRESSIVE in trees)) if largest else []
        parts["earlier turns"] = decoders.num_prefixes * sum(
            cache_bytes(config, decoders.max_length, 1, decoders.dtype)
            for config in [*[load_config(settings.target)] * len(trees), *drafting]
        )
    if any(prompt.reference_answer for job in jobs for prompt in job.benchmark.prompts):
        configs = [load_config(settings.target), *([largest] if largest else [])]
        probabilities = PROBABILITY_BYTES * MOST_TOKENS * configs[0].vocab_size
        parts["answers of the data"] = probabilities + sum(
            cache_bytes(config, decoders.max_length, 1, decoders.dtype) for config in configs
        )
    return MemoryEstimate(parts, decoders.device.type == "cuda")


def _heads_in_8_bits(jobs: Sequence[Job]) -> list[int]:
    """Count the bytes of the drafters' extra heads in 8 bits."""
    names = dict.fromkeys(job.drafter.name for job in jobs if job.drafter)
    configs = [load_config(name.folder) for name in names if name.float8 and name.folder]
    return [head_in_8_bits_bytes(each) for each in configs]


def _num_turns(job: Job) -> int:
    return sum(len(prompt.turns) for prompt in job.benchmark.prompts)


def _described(tree: TokenTree | None) -> str:
    assert tree is not None
    return f"{tree.name} ({tree.num_nodes} nodes, {tree.max_depth} deep)"


def _most_interleaved(pending: Sequence[Job]) -> int:
    """Return the most methods that are interleaved, and journalled together."""
    return max(map(len, groups_of(pending)), default=0)


def _disk(pending: Sequence[Job], settings: EvaluationSettings, num_methods: int) -> dict[str, int]:
    """Estimate the bytes by part, as if every answer had its most tokens."""
    samples = [
        sum(
            SAMPLE_BYTES + sum(TURN_BYTES + len(turn.encode()) for turn in prompt.turns)
            for prompt in job.benchmark.prompts
        )
        + TOKEN_BYTES * settings.max_new_tokens * _num_turns(job)
        for job in pending
    ]
    # All methods of a benchmark and temperature are journalled before the first is published.
    journals = sum(sorted(samples, reverse=True)[:num_methods])
    return {"samples": sum(samples), "journals": journals, "rows": RESULT_BYTES * len(pending)}
