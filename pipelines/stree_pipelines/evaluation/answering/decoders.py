"""Hold the models and decoders of an evaluation, warmed up before any timed call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from stree.batching.batch_decoder import BatchDecoder
from stree.batching.memory_report import MemoryReport
from stree.batching.sequences import Request
from stree.batching.step_timing import length_to_time
from stree.chat_encoding import encode_prompt
from stree.checkpoints.configs import load_config
from stree.checkpoints.load_save import load_model
from stree.checkpoints.tokenizer import eos_token_ids, load_tokenizer, refusing_panics
from stree.common.errors import UsageError
from stree.common.words import dtype_name
from stree.decoder import Decoder
from stree.drafters.model import ModelDrafterSpec
from stree.generation import GenerationConfig
from stree.loading import pick_dtype
from stree.models.config import HybridConfig
from stree.models.model import READ_AT_ONCE, HybridModel
from stree.tree_policy.step_times import StepTimes
from stree_kernels.naive import accumulation_dtype
from stree_pipelines.console.progress import measured_step_times
from stree_pipelines.evaluation.answering import gc_freeze
from stree_pipelines.evaluation.benchmarks import Benchmark, BenchmarkPrompt
from stree_pipelines.evaluation.context import pick_device
from stree_pipelines.evaluation.plan import (
    ChosenTree,
    DrafterIdentity,
    EvaluationSettings,
    Job,
    policy_of,
)
from stree_pipelines.evaluation.records import Turn
from stree_pipelines.evaluation.sampling import sampling_of

WARMUP_TOKENS = 16
BATCH_WARMUP_TOKENS = 4  # per row: several rows share the cost of first calls
SLACK = 256  # tokens after an answer: a tree's path, and answers that come back as more tokens


class Decoders:
    """Holder of the target, the drafters and the decoders; each is made when first needed.

    Args:
        benchmarks: all that is to be answered, for which decoders have room.
        make_decoder: `stree.decoder.Decoder`, with a batch size `BatchDecoder` of that many
            rows, or a stand-in in a test.
        say: prints a message before slow work.
    """

    def __init__(
        self, settings: EvaluationSettings, benchmarks: Sequence[Benchmark],
        make_decoder: Callable[..., Any] | None = None,
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.settings, self.benchmarks, self.say = settings, benchmarks, say
        self.tokenizer = load_tokenizer(settings.target)
        if make_decoder is None:
            make_decoder = partial(BatchDecoder, num_rows=settings.batch_size)
            if settings.batch_size == 1:
                make_decoder = Decoder
        self.make_decoder = make_decoder
        self.device = pick_device(settings.device)
        self.dtype = pick_dtype(settings.dtype, self.device, settings.target)
        # By drafter and method, with the length that each has room for.
        self._decoders: dict[tuple[DrafterIdentity | None, str], tuple[int, Any]] = {}
        self._drafters: dict[DrafterIdentity, Any] = {}
        # Step times to choose trees by, by drafter, method and temperature
        self._costs: dict[tuple[DrafterIdentity | None, str, float], StepTimes] = {}
        # Work that each has done once: ("temperature", 1.0), ("prompt tokens", 57).
        self._warm: set[tuple[DrafterIdentity | None, str, tuple[str, float]]] = set()
        # Tokens of each conversation with empty answers
        self._num_given = {
            prompt: self._count(prompt) for benchmark in benchmarks for prompt in benchmark.prompts
        }

    @cached_property
    def target(self) -> HybridModel:
        settings = self.settings
        model = load_model(settings.target, self.device, self.dtype, bool(settings.target_dtype))
        model.config = self.target_config
        return model

    @cached_property
    def target_config(self) -> HybridConfig:
        config = load_config(self.settings.target)
        if self.settings.beyond_positions:
            most = max(config.max_position_embeddings, self.max_length)
            config = replace(config, max_position_embeddings=most)
        return config

    def require_positions(self) -> None:
        """Refuse now, not after an hour, a conversation that may outgrow the target's positions."""
        positions = self.target_config.num_positions
        if positions is None:
            return
        for benchmark in self.benchmarks:
            for prompt in benchmark.prompts:
                new = len(prompt.turns) * self.settings.max_new_tokens
                given = self._num_given[prompt]
                if given + new > positions:
                    raise UsageError(
                        f"{benchmark.name} prompt {prompt.id} has {given} tokens, and answers of "
                        f"up to {new}: the target was made for {positions} positions; lower "
                        "max_new_tokens, leave the prompt out, or give --beyond_positions to see "
                        "what it does there"
                    )

    def require_end(self) -> None:
        """Raise UsageError when answers shall end at EOS and no token is known to be one.

        Rows would say that they had ended.
        """
        known = eos_token_ids(self.target_config, self.tokenizer)
        if not self.settings.ignore_eos and not known:
            raise UsageError(
                f"neither the config of {self.settings.target} nor its tokenizer names an EOS, so "
                "no answer would end: give --ignore_eos, or set eos_token_id in its config.json"
            )

    def prompt_ids(self, prompt: BenchmarkPrompt, turns: Sequence[Turn] = ()) -> list[int]:
        """Return the ids of the conversation after these turns, up to the user's next one.

        Those of a plain prompt are its text's, as the tokenizer begins a text.
        """
        if prompt.plain:
            with refusing_panics():
                return list(self.tokenizer(prompt.turns[0]).input_ids)
        conversation = [*prompt.history, ("user", prompt.turns[0])]
        for answer, question in zip(turns, prompt.turns[1:], strict=False):
            conversation += [("assistant", answer.text), ("user", question)]
        return encode_prompt(self.tokenizer, conversation, self.settings.chat_template)

    @property
    def num_prefixes(self) -> int:
        """Number of prefixes that a decoder keeps, of earlier turns.

        There are two per conversation, with its answer and without, as the answer's ids may differ
        after the tokenizer; without batches a prompt runs twice, in a warm-up first.
        """
        if max(len(prompt.turns) for prompt in self._num_given) == 1:
            return 0
        return 4 if self.settings.batch_size == 1 else 2 * self.settings.batch_size

    @cached_property
    def max_length(self) -> int:
        """Tokens of the longest conversation, if answers come back as twice their generated
        tokens."""
        new = self.settings.max_new_tokens
        longest = max(
            given + (2 * len(prompt.turns) - 1) * new for prompt, given in self._num_given.items()
        )
        return longest + SLACK

    def _count(self, prompt: BenchmarkPrompt) -> int:
        silence = Turn(user="", num_prompt_tokens=0, tokens=(), text="", finish_reason="")
        return len(self.prompt_ids(prompt, [silence] * (len(prompt.turns) - 1)))

    @property
    def dtypes(self) -> dict[str, str]:
        """Dtypes of weights and state, as records hold them; "target" only of one in 8 bits."""
        state = dtype_name(accumulation_dtype(self.dtype))
        target = {"target": self.settings.target_dtype} if self.settings.target_dtype else {}
        return {"weights": self.settings.dtype, "state": state, **target}

    def drafter_model(self, drafter: DrafterIdentity | None) -> HybridModel | None:
        """Return the model that drafts alone with the target's tokens; None without one."""
        made = self._drafter(drafter) if drafter is not None else None
        return made.model if isinstance(made, ModelDrafterSpec) else None

    @property
    def room(self) -> MemoryReport | None:
        """Memory of the decoders with a row per prompt; None when prompts are answered one at a
        time."""
        decoders = [each for _, each in self._decoders.values()]
        reports = [each.room for each in decoders if isinstance(each, BatchDecoder)]
        return MemoryReport.together(reports) if reports else None

    def costs(self, job: Job) -> StepTimes | None:
        """Return the step times by which the job's trees are chosen; None without a choice."""
        return self._costs.get((*job.decoder_key, job.temperature))

    def is_warm(self, job: Job) -> bool:
        """Return True when the job's tree and drafter have decoded by its sampling rule before."""
        return (*job.decoder_key, ("temperature", job.temperature)) in self._warm

    def has_room(self, job: Job, num_prompt_tokens: int) -> bool:
        room, _ = self._decoders.get(job.decoder_key, (0, None))
        return self._needed(job, num_prompt_tokens) <= room

    def warm(self, job: Job, prompt_ids: list[int]) -> Any:
        """Return the job's decoder, after it has decoded by the job's rule and read as long a
        prompt.

        Graphs may hold the temperature itself; kernels, their tuning and buffers may be of one
        prompt length, and the first method to meet it would pay for all; for a long prompt, the
        shorter one of `_as_long` does the same. A batch reads prompts in pieces while it decodes,
        and is warmed up with the first one only.
        """
        decoder = self.decoder(job, len(prompt_ids))
        if isinstance(job.tree, ChosenTree):
            self._choose_by_costs(job, job.tree, decoder)
        what = {("temperature", job.temperature)}
        if self.settings.batch_size == 1:
            reused = decoder.num_reusable(prompt_ids)
            if not reused and self.is_warm(job):
                prompt_ids = self._as_long(job, prompt_ids)
            what.add(("prompt tokens", len(prompt_ids) - reused))
        once = {(*job.decoder_key, each) for each in what}
        if once - self._warm:
            generation = GenerationConfig(
                # prefill gives the first
                max_new_tokens=1 if self.is_warm(job) else num_warmup_tokens(self.settings),
                temperature=job.temperature, **sampling_of(self.settings), seed=0, ignore_eos=True,
            ).without_unread()
            if self.settings.batch_size == 1:
                with _batch_of(decoder).forgetting():
                    decoder.generate(prompt_ids, generation)
            else:
                decoder.warm_up(Request(prompt_ids, generation))
            self._warm |= once
        return decoder

    def decoder(self, job: Job, num_prompt_tokens: int) -> Any:
        """Return the job's decoder, made anew when a conversation outgrows it.

        An answer may come back through the tokenizer as more tokens than were generated.
        """
        key = job.decoder_key
        _, decoder = self._decoders.get(key, (0, None))
        if not self.has_room(job, num_prompt_tokens):
            decoder = None
            self._drop(lambda known: known == key)
            room = max(self._needed(job, num_prompt_tokens), self.max_length)
            decoder = self.make_decoder(
                self.target,
                drafter=self._drafter(job.drafter) if job.drafter else None,
                tree=job.tree and policy_of(job.tree),
                max_length=room, num_prefixes=self.num_prefixes, tokenizer=self.tokenizer,
                verifier=job.verifier, backtracking=job.backtracking,
            )
            self._decoders[key] = room, decoder
        return decoder

    def begin(self, job: Job) -> None:
        """Let the job's tree policy start anew."""
        if job.decoder_key in self._decoders:
            _, decoder = self._decoders[job.decoder_key]
            _batch_of(decoder).forget()

    def release(self, drafter: DrafterIdentity) -> None:
        """Free a drafter's weights and caches."""
        self._drop(lambda known: known[0] == drafter)
        self._drafters.pop(drafter, None)

    def _needed(self, job: Job, num_prompt_tokens: int) -> int:
        longest = 0 if job.tree is None else job.tree.max_depth + 1
        needed = num_prompt_tokens + self.settings.max_new_tokens + max(longest, SLACK)
        return max(needed, length_to_time(job.tree)) if isinstance(job.tree, ChosenTree) else needed

    def _choose_by_costs(self, job: Job, tree: ChosenTree, decoder: Any) -> None:
        """Give a decoder the step times at the job's temperature, measured on first use."""
        key = (*job.decoder_key, job.temperature)
        if key not in self._costs:
            generation = GenerationConfig(temperature=job.temperature, **sampling_of(self.settings))
            self._costs[key] = measured_step_times(decoder, tree.name, generation, self.say)
        _batch_of(decoder).tree_policy.costs = self._costs[key]

    def _drafter(self, drafter: DrafterIdentity) -> Any:
        if drafter not in self._drafters:
            name = drafter.name
            model = name.load(self.settings.target, self.device, self.dtype)
            self._drafters[drafter] = name.make(model, self.tokenizer, self.target)
        return self._drafters[drafter]

    def _as_long(self, job: Job, prompt_ids: list[int]) -> list[int]:
        """Return the end of a long prompt, whose prefill needs the same graphs and kernels.

        Those are a first piece of READ_AT_ONCE tokens, one after others, and a last one of the same
        size. Returns the whole prompt when the decoder has read none as long, since buffers grow
        with it, or when the drafter has a tokenizer of its own. The end and not the beginning: kept
        prefixes are not read again.
        """
        length = len(prompt_ids)
        alike = 2 * READ_AT_ONCE + (length - 1) % READ_AT_ONCE + 1
        read = {n for *key, (what, n) in self._warm
                if tuple(key) == job.decoder_key and what == "prompt tokens"}
        retokenised = job.drafter is not None and job.drafter.name.retokenised
        if length <= alike or length in read or length > max(read, default=0) or retokenised:
            return prompt_ids
        return prompt_ids[-alike:]

    def _drop(self, condemned: Callable[[tuple[DrafterIdentity | None, str]], bool]) -> None:
        """Free decoders; those with graphs refer to themselves and would stay for a while."""
        if any(map(condemned, self._decoders)):
            self._decoders = {k: v for k, v in self._decoders.items() if not condemned(k)}
            self._warm = {warm for warm in self._warm if not condemned(warm[:2])}
            self._costs = {k: v for k, v in self._costs.items() if not condemned(k[:2])}
            gc_freeze.collect()


def _batch_of(decoder: Any) -> Any:
    """Return a `Decoder`'s batch decoder, or the `BatchDecoder` itself."""
    return getattr(decoder, "batch", decoder)


def num_warmup_tokens(settings: EvaluationSettings) -> int:
    """Return the tokens of each prompt that warms a decoder up."""
    most = WARMUP_TOKENS if settings.batch_size == 1 else BATCH_WARMUP_TOKENS
    return min(most, settings.max_new_tokens)
