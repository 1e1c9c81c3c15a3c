"""Answering benchmark prompts with a decoder, and comparing the answers with plain decoding's."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from stree import metrics
from stree.engine import Decoder
from stree.errors import InvariantBroken, UsageError
from stree.generation import GenerationConfig
from stree.models.convert import load_config, load_model
from stree.tokenizer import eos_token_ids, load_tokenizer
from stree.tree import MAX_NODES
from stree_pipelines.data.chat import encode_prompt
from stree_pipelines.evaluation.benchmarks import Benchmark, BenchmarkPrompt
from stree_pipelines.evaluation.context import pick_device, pick_dtype
from stree_pipelines.evaluation.plan import Drafter, EvaluationSettings, Job, prompt_seed
from stree_pipelines.evaluation.records import BaselineTiming, Divergence, SampleRow, Turn

WARMUP_TOKENS = 16


class Answerer:
    """Holds the models and decoders of an evaluation; each is made when first needed.

    Args:
        make_decoder: `stree.engine.Decoder`, or what stands in for it in a test.
        target_model: loaded from `settings.target` unless given.
    """

    def __init__(
        self,
        settings: EvaluationSettings,
        benchmarks: Sequence[Benchmark],
        target_model: Any = None,
        tokenizer: Any = None,
        make_decoder: Callable[..., Any] = Decoder,
    ) -> None:
        self.settings = settings
        self.benchmarks = benchmarks
        self.make_decoder = make_decoder
        self.tokenizer = tokenizer or load_tokenizer(settings.target)
        self.dtype = pick_dtype(settings.dtype)
        self.device = pick_device(settings.device)
        self._target = target_model
        # With the length that each has room for.
        self._decoders: dict[tuple[Drafter | None, Any], tuple[int, Any]] = {}
        self._drafters: dict[Drafter, Any] = {}
        # What each has done once: ("temperature", 1.0), ("prompt tokens", 57).
        self._warm: set[tuple[Drafter | None, Any, tuple[str, float]]] = set()
        if target_model is not None:
            self.device = target_model.device
            if target_model.dtype != self.dtype:
                raise UsageError(
                    f"the target is in {target_model.dtype} but dtype is {settings.dtype}: "
                    "evaluate in the dtype that the target is in"
                )

    @property
    def target(self) -> Any:
        if self._target is None:
            self._target = load_model(self.settings.target, self.device, self.dtype).eval()
        return self._target

    def is_warm(self, job: Job) -> bool:
        """Whether the job's tree and drafter have decoded by its sampling rule before."""
        return (job.drafter, job.tree, ("temperature", job.temperature)) in self._warm

    def warm_up(self, job: Job, prompt: BenchmarkPrompt) -> None:
        """Pay for what comes with a decoder's or a sampling rule's first calls (kernels, graphs,
        buffers) outside of every measurement."""
        with _naming(job, prompt, 0):
            self._warm_decoder(job, self._prompt_ids(prompt, (), 0))

    def require_end(self) -> None:
        """Raise UsageError when answers shall end at EOS and no token is known to be one: rows
        would say that they had."""
        model = self._target
        config = load_config(self.settings.target) if model is None else model.config
        if not self.settings.ignore_eos and not eos_token_ids(config, self.tokenizer):
            raise UsageError(
                f"neither the config of {self.settings.target} nor its tokenizer names an EOS, so "
                "no answer would end: give --ignore_eos, or set eos_token_id in its config.json"
            )

    def answer(self, job: Job, prompt: BenchmarkPrompt, baseline: SampleRow | None) -> SampleRow:
        """Hold the prompt's conversation by the job's method. `baseline` is the autoregressive run
        of the same prompt in this process: its timing is kept beside, and at T = 0 its tokens are
        compared."""
        turns: list[Turn] = []
        stats = []
        for index in range(len(prompt.turns)):
            prompt_ids = self._prompt_ids(prompt, turns, index)
            seed = prompt_seed(job.seed, job.benchmark.name, prompt.id, index)
            with _naming(job, prompt, index):
                decoder = self._warm_decoder(job, prompt_ids)
                output = decoder.generate(prompt_ids, self._generation(job.temperature, seed))
            turn = Turn(
                user=prompt.turns[index],
                num_prompt_tokens=len(prompt_ids),
                tokens=tuple(output.tokens),
                text=self.tokenizer.decode(output.tokens, skip_special_tokens=True),
                finish_reason=str(output.finish_reason),
            )
            turns.append(turn)
            stats.append(output.stats)
        divergence, lossless = None, None
        if baseline is not None and job.temperature == 0:
            divergence = self._divergence(prompt, turns, baseline.turns)
            lossless = divergence is None
        return SampleRow(
            checkpoint_sha256=job.drafter.sha256 if job.drafter else None,
            step=job.drafter.step if job.drafter else None,
            method=job.method,
            tree=job.tree.name if job.tree else None,
            benchmark=job.benchmark.name,
            prompt_id=prompt.id,
            category=prompt.category,
            temperature=job.temperature,
            seed=job.seed,
            decoding_hash=job.decoding_hash,
            turns=tuple(turns),
            num_new_tokens=sum(s.num_new_tokens for s in stats),
            num_calls=sum(s.num_calls for s in stats),
            num_nodes=sum(s.num_nodes for s in stats),
            accepted_per_call=tuple(a for s in stats for a in s.accepted_per_call),
            end_node_per_call=tuple(node for s in stats for node in s.end_node_per_call),
            tree_max_depth=job.tree.max_depth if job.tree else 0,
            prefill_s=sum(s.prefill_s for s in stats),
            decode_s=sum(s.decode_s for s in stats),
            time_ms={
                part: sum(s.time_ms.get(part, 0.0) for s in stats) for part in metrics.STEP_PARTS
            },
            baseline=timing_of(baseline) if baseline is not None else None,
            lossless=lossless,
            divergence=divergence,
        )

    def release(self, drafter: Drafter | None) -> None:
        """Free a drafter's weights and caches."""
        if drafter is not None:
            self._drop(lambda known: known[0] == drafter)
            self._drafters.pop(drafter, None)

    def _divergence(
        self, prompt: BenchmarkPrompt, turns: Sequence[Turn], reference: Sequence[Turn]
    ) -> Divergence | None:
        """The first difference; turns after it answer another conversation and say nothing."""
        for index, (mine, theirs) in enumerate(zip(turns, reference, strict=True)):
            position = metrics.first_difference(mine.tokens, theirs.tokens)
            if position is None:
                continue
            prefix = [*self._prompt_ids(prompt, turns, index), *mine.tokens[:position]]
            return Divergence(
                prompt_id=prompt.id,
                turn=index,
                position=position,
                token=_at(mine.tokens, position),
                autoregressive_token=_at(theirs.tokens, position),
                logit_gap=self._logit_gap(prefix),
            )
        return None

    @torch.no_grad()
    def _logit_gap(self, tokens: list[int]) -> float:
        """The target's top-1 minus top-2 logit after `tokens`, from one plain forward pass."""
        tokens_BT = torch.tensor([tokens], device=self.device)
        last_BD = self.target.hidden_states(tokens_BT)[:, -1]
        logits_BV = (last_BD @ self.target.head_weight.T).float()
        first, second = logits_BV.topk(2, dim=-1).values[0].tolist()
        return first - second

    def _prompt_ids(self, prompt: BenchmarkPrompt, turns: Sequence[Turn], index: int) -> list[int]:
        """The conversation up to user turn `index`, with the model's own answers before it."""
        conversation = [("user", prompt.turns[0])]
        for answer, question in zip(turns[:index], prompt.turns[1:], strict=False):
            conversation += [("assistant", answer.text), ("user", question)]
        return encode_prompt(self.tokenizer, conversation, self.settings.chat_template)

    def _generation(self, temperature: float, seed: int) -> GenerationConfig:
        return GenerationConfig(
            max_new_tokens=self.settings.max_new_tokens,
            temperature=temperature,
            seed=seed,
            ignore_eos=self.settings.ignore_eos,
        )

    def _decoder(self, job: Job, num_prompt_tokens: int) -> Any:
        """The job's decoder, made anew where a conversation outgrows it: an answer that comes back
        through the tokenizer may be cut into more tokens than were generated."""
        key = (job.drafter, job.tree)
        needed = num_prompt_tokens + self.settings.max_new_tokens + MAX_NODES
        room, decoder = self._decoders.get(key, (0, None))
        if decoder is None or room < needed:
            decoder = None
            self._drop(lambda known: known == key)
            room = max(needed, self.max_length)
            decoder = self.make_decoder(
                self.target,
                drafter=self._drafter(job.drafter) if job.drafter else None,
                tree=job.tree,
                max_length=room,
                tokenizer=self.tokenizer,
            )
            self._decoders[key] = room, decoder
        return decoder

    def _drop(self, condemned: Callable[[tuple[Drafter | None, Any]], bool]) -> None:
        """Free decoders; those with graphs refer to themselves and would stay for a while."""
        if any(map(condemned, self._decoders)):
            self._decoders = {k: v for k, v in self._decoders.items() if not condemned(k)}
            self._warm = {warm for warm in self._warm if not condemned(warm[:2])}
            gc.collect()

    def _drafter(self, drafter: Drafter) -> Any:
        if drafter not in self._drafters:
            self._drafters[drafter] = load_model(drafter.path, self.device, self.dtype).eval()
        return self._drafters[drafter]

    def _warm_decoder(self, job: Job, prompt_ids: list[int]) -> Any:
        """The job's decoder, which has decoded by the job's rule and read as long a prompt before.

        Graphs may hold the temperature itself; kernels, their tuning and buffers may be of one
        prompt length, and whichever method met it first would pay for all.
        """
        decoder = self._decoder(job, len(prompt_ids))
        rule, length = ("temperature", job.temperature), ("prompt tokens", len(prompt_ids))
        once = {(job.drafter, job.tree, what) for what in (rule, length)}
        if once - self._warm:
            num_tokens = min(WARMUP_TOKENS, self.settings.max_new_tokens)
            generation = GenerationConfig(
                max_new_tokens=1 if self.is_warm(job) else num_tokens,  # prefill gives the first
                temperature=job.temperature,
                ignore_eos=True,
            )
            decoder.generate(prompt_ids, generation)
            self._warm |= once
        return decoder

    @cached_property
    def max_length(self) -> int:
        """Room for about every conversation, with answers that come back as twice as many tokens
        as were generated."""
        silence = Turn(user="", num_prompt_tokens=0, tokens=(), text="", finish_reason="")
        longest = 0
        for prompt in (prompt for benchmark in self.benchmarks for prompt in benchmark.prompts):
            last = len(prompt.turns) - 1
            num_given = len(self._prompt_ids(prompt, [silence] * last, last))
            longest = max(longest, num_given + (2 * last + 1) * self.settings.max_new_tokens)
        return longest + MAX_NODES


def timing_of(sample: SampleRow) -> BaselineTiming:
    """What of a run the speed of another is measured by."""
    return BaselineTiming(
        num_new_tokens=sample.num_new_tokens,
        prefill_s=sample.prefill_s,
        decode_s=sample.decode_s,
        time_ms=sample.time_ms,
    )


@contextmanager
def _naming(job: Job, prompt: BenchmarkPrompt, turn: int) -> Iterator[None]:
    """Where an invariant broke, before what broke."""
    try:
        yield
    except InvariantBroken as error:
        raise InvariantBroken(
            f"{job.benchmark.name} prompt {prompt.id}, turn {turn}, {job.method}: {error}"
        ) from error


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None
