"""Settings of a generation, its output and its statistics."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import operator
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypedDict

from stree.common.errors import UsageError, require_fitting, warn_once
from stree.common.words import counted
from stree.logits.log_probs import TokenLogprobs
from stree.metrics import tau
from stree.trees.token_tree import StepTree

if TYPE_CHECKING:
    from torch import Tensor

    from stree.logits.processors import LogitsProcessor

_NUMBERS = {
    "max_new_tokens": Integral, "temperature": Real, "top_k": Integral, "top_p": Real,
    "seed": Integral, "min_p": Real, "repetition_penalty": Real, "num_return_sequences": Integral,
    "logprobs": Integral, "presence_penalty": Real, "frequency_penalty": Real,
    "min_new_tokens": Integral,
}
# Settings that greedy decoding does not read, at the values that are off
_OF_SAMPLING: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": None}
LEAST_FACTOR, MOST_FACTOR = 1e-5, 1e5  # of a repetition penalty: no logit overflows
_FRESH_SEED_BITS = 48  # of a fresh seed: equal seeds are improbable, and it is readable


@dataclass(frozen=True)
class GenerationConfig:
    """Settings of a generation, under the names of `transformers`' GenerationConfig.

    Generation stops at EOS (also inside an accepted block), at the first token that completes a
    stop string, or after max_new_tokens.

    Attributes:
        max_new_tokens: The most tokens to generate after the prompt, at least 1.
        temperature: 0 is greedy, else at least 0.00001. Greedy decoding reads neither top_k, top_p,
            min_p nor seed, and warns once of one that is set.
        top_k: Sample from the k best tokens only; 0 is off.
        top_p: Sample from the best tokens that have this probability together; 1 is off.
        eos_token_id: One or several tokens that end the answer. None is all that the model's config
            files and its tokenizer name (`Decoder.eos_token_ids`).
        stop_strings: Texts that end the answer.
        seed: Seed of sampling, which gives the same text with and without drafts. None draws a
            fresh seed for each request that samples; `GenerationOutput.seed` has it.
        ignore_eos: Go on after EOS, for measuring speed.
        min_p: Sample from tokens with at least this share of the best one's probability; 0 is off.
        repetition_penalty: Divides the positive logits of all tokens of prompt and answer so far,
            and multiplies the negative ones, greedy or not; padding is no part of a prompt. From
            0.00001 to 100000; 1 is off.
        num_return_sequences: Sampled answers to each prompt, which is read once. The first has the
            seed of one answer alone, the others' seeds follow from it.
        logprobs: Return the log-probabilities of each new token and of this many best tokens in its
            place (`GenerationOutput.logprobs`); 0 is the new token's alone, None is none.
        presence_penalty: Subtracted from the logit of each token that the answer so far has. The
            prompt does not count, here and for frequency_penalty; 0 is off.
        frequency_penalty: Subtracted from the logit of each token as many times as the answer so
            far has it; 0 is off.
        logit_bias: Added to the logits of tokens, by their ids; −inf leaves a token out.
        min_new_tokens: Number of tokens before any that ends the answer (`eos_token_id`).
        bad_words_ids: Sequences of tokens that do not come up in the answer, also where the prompt
            begins them. As in `transformers`, one that only is a token which ends the answer is
            passed over.
        logits_processor: A function of your own, or several, that change logits by the tokens
            before them (`stree.logits.processors.LogitsProcessor`, as in `transformers`), such as
            the rules of a grammar. It runs on the host for each node, so steps take longer.

    The bias comes first, then repetition_penalty, the other penalties, what is left out, the
    processors, the temperature, top_k, top_p and min_p.

    Raises:
        UsageError: For values out of range, and for several greedy answers, which are equal.

    Example:
        >>> import stree
        >>> sampled = stree.GenerationConfig(max_new_tokens=64, temperature=0.7, top_p=0.9, seed=1)
        >>> sampled.max_new_tokens
        64
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    eos_token_id: int | Sequence[int] | Tensor | None = None
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    num_return_sequences: int = 1
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    min_new_tokens: int = 0
    bad_words_ids: Sequence[Sequence[int]] = ()
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor] = ()

    def __post_init__(self) -> None:
        for name, kind in _NUMBERS.items():
            value = getattr(self, name)
            if name in ("seed", "logprobs") and value is None:
                continue
            if not isinstance(value, kind) or isinstance(value, bool):
                raise UsageError(f"{name} is {value!r}, wanted a number (or leave it out)")
            if isinstance(value, Integral):  # NumPy's, too
                object.__setattr__(self, name, int(value))
        is_warm = 1e-5 <= self.temperature < float("inf")
        is_factor = LEAST_FACTOR <= self.repetition_penalty <= MOST_FACTOR
        require_fitting(self, {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (self.temperature == 0 or is_warm, "0 (greedy) or at least 0.00001"),
            "seed": (self.seed is None or 0 <= self.seed < 2**63, "0 to 2⁶³ − 1"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "top_k": (0 <= self.top_k < 2**63, "0 (off) to 2⁶³ − 1"),
            "min_p": (0 <= self.min_p <= 1, "0 (off) to 1"),
            "repetition_penalty": (is_factor, "0.00001 to 100000 (1 is off)"),
            "num_return_sequences": (self.num_return_sequences >= 1, "at least 1"),
            "presence_penalty": (math.isfinite(self.presence_penalty), "a finite number"),
            "frequency_penalty": (math.isfinite(self.frequency_penalty), "a finite number"),
            "min_new_tokens": (self.min_new_tokens >= 0, "at least 0"),
            "logprobs": ((self.logprobs or 0) >= 0, "at least 0 (the new token's alone)"),
        })
        if self.num_return_sequences > 1 and self.temperature == 0:
            raise UsageError(
                f"num_return_sequences is {self.num_return_sequences} and temperature 0, which "
                "gives equal answers: set a temperature, or do_sample=True"
            )
        strings = self.stop_strings
        strings = (strings,) if isinstance(strings, str) else strings
        if isinstance(strings, Iterable):
            strings = tuple(strings)
        if not isinstance(strings, tuple) or any(not isinstance(s, str) for s in strings):
            raise UsageError(f"stop_strings is {strings!r}, wanted a text or several")
        if not all(strings):
            raise UsageError("a stop string is empty; every text would stop at once")
        object.__setattr__(self, "stop_strings", tuple(strings))
        if self.eos_token_id is not None:
            object.__setattr__(self, "eos_token_id", _token_ids(self.eos_token_id))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "bad_words_ids", _words(self.bad_words_ids))
        given = self.logits_processor
        processors = tuple(given) if isinstance(given, list | tuple) else (given,)
        if not all(map(callable, processors)):
            raise UsageError(
                f"logits_processor is {given!r:.60}, wanted a function (input_ids, scores) -> "
                "scores, or a list of them"
            )
        object.__setattr__(self, "logits_processor", processors)

    @property
    def counts_tokens(self) -> bool:
        """True if a penalty looks at how often the answer has a token."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def bars_words(self) -> bool:
        """True if tokens are left out by what stands before them, or by their place."""
        return bool(self.bad_words_ids) or self.min_new_tokens > 0

    @property
    def named_tokens(self) -> dict[str, list[int]]:
        """The tokens that settings name, by the setting."""
        return {
            "eos_token_id": list(self.eos_ids(())),
            "logit_bias": list(dict(self.logit_bias)),
            "bad_words_ids": [token for word in self.bad_words_ids for token in word],
        }

    def without_unread(self) -> GenerationConfig:
        """Return these settings without filters and seed if they are greedy."""
        return self if self.temperature else dataclasses.replace(self, **_OF_SAMPLING)

    def warn_of_unread(self) -> None:
        """Warn, once in a process, of settings that greedy decoding does not read."""
        unread = [name for name, off in _OF_SAMPLING.items() if getattr(self, name) != off]
        if unread and self.temperature == 0:
            warn_once(
                f"temperature is 0, and greedy decoding does not read {', '.join(unread)}: "
                "set a temperature, or leave them out"
            )

    def seeded(self) -> GenerationConfig:
        """Return these settings, with a fresh seed if they sample without one."""
        if self.temperature == 0 or self.seed is not None:
            return self
        return dataclasses.replace(self, seed=secrets.randbits(_FRESH_SEED_BITS))

    def samples(self) -> list[GenerationConfig]:
        """Return the settings of each of `num_return_sequences` answers."""
        if self.num_return_sequences == 1:
            return [self]
        seed = self.seeded().seed
        further = range(1, self.num_return_sequences)
        seeds = [seed, *(_seed_of_sample(seed, number) for number in further)]
        return [dataclasses.replace(self, seed=seed, num_return_sequences=1) for seed in seeds]

    def eos_ids(self, model_ids: Sequence[int]) -> frozenset[int]:
        """Return the tokens that end an answer, given those of the model."""
        if self.ignore_eos:
            return frozenset()
        if self.eos_token_id is None:
            return frozenset(model_ids)
        return frozenset(_token_ids(self.eos_token_id))


class AnswerOptions(TypedDict, total=False):
    """Generation settings by keyword, except `num_return_sequences`; a None is not given.

    Attributes:
        do_sample: Whether to sample, as in `transformers`; it decides with the temperature.
        max_length: The most tokens with the prompt; `max_new_tokens` wins.
    """

    max_new_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    eos_token_id: int | Sequence[int] | Tensor | None
    stop_strings: str | Sequence[str] | None
    seed: int | None
    ignore_eos: bool | None
    min_p: float | None
    repetition_penalty: float | None
    logprobs: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    min_new_tokens: int | None
    bad_words_ids: Sequence[Sequence[int]] | None
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor] | None
    do_sample: bool | None
    max_length: int | None


class GenerationOptions(AnswerOptions, total=False):
    """Generation settings by keyword: those of `GenerationConfig`, do_sample and max_length."""

    num_return_sequences: int | None


class PromptOptions(GenerationOptions, total=False):
    """Keywords of a `generate`; `input_ids` stand for the prompts before them."""

    input_ids: Any


class CompleteOptions(AnswerOptions, total=False):
    """Keywords of `Decoder.complete`."""

    streamer: Any


class GenerateOptions(CompleteOptions, total=False):
    """Keywords of `Decoder.generate`; `input_ids` stand for the prompts before them."""

    input_ids: Any
    attention_mask: Any


class TargetOptions(GenerateOptions, total=False):
    """Keywords of `stree.generate`."""

    drafter: Any
    tree: StepTree | None
    tokenizer: Any


class ChatOptions(CompleteOptions, total=False):
    """Keywords of `Decoder.chat`."""

    tools: Sequence[Any] | None
    documents: Sequence[Any] | None
    enable_thinking: bool | None
    chat_template_kwargs: Mapping[str, Any] | None


def _seed_of_sample(seed: int | None, number: int) -> int:
    """Derive the seed of a further answer, as far from its neighbours' as any two seeds."""
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return int.from_bytes(digest[: _FRESH_SEED_BITS // 8])


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    """Return biases by token id, ascending. Raises `UsageError` for anything else."""
    wanted = "a dict of token ids and numbers below +inf, such as {50: -1.5}"
    try:
        found = dict(given)
        ids = [operator.index(token) for token in found]
        values = [float(value) for value in found.values()]
    except (TypeError, ValueError):
        raise UsageError(f"logit_bias is {given!r:.60}, wanted {wanted}") from None
    if not all(value < math.inf for value in values):  # nor NaN
        raise UsageError(f"logit_bias is {given!r:.60}, wanted {wanted}")
    return tuple(sorted(zip(ids, values, strict=True)))


def _words(given: Any) -> tuple[tuple[int, ...], ...]:
    """Return sequences of token ids. Raises `UsageError` for anything else."""
    try:
        words = tuple(tuple(operator.index(token) for token in word) for word in given)
    except TypeError:
        words = ((),)
    if not all(words):
        raise UsageError(
            f"bad_words_ids is {given!r:.60}, wanted a list of lists of at least one token's id"
        )
    return words


def _token_ids(given: Any) -> tuple[int, ...]:
    """Return one or several token ids of Python, NumPy or torch as ints.

    Raises `UsageError` for anything else.
    """
    several = given.tolist() if hasattr(given, "tolist") else given
    several = several if isinstance(several, list | tuple | set | frozenset) else [several]
    if not several:
        raise UsageError("eos_token_id is empty, wanted a token's id; ignore_eos=True goes on")
    try:
        if any(isinstance(each, bool) for each in several):
            raise TypeError
        return tuple(operator.index(each) for each in several)
    except TypeError:
        raise UsageError(f"eos_token_id is {given!r}, wanted a token's id, or several") from None


@dataclass(repr=False)
class DecodingStats:
    """Counts and times of one generation; counts follow the kept tokens. `print` shows a table.

    Attributes:
        num_new_tokens: Tokens after the first, which the prefill gives, without those that a stop
            dropped.
        num_calls: Target calls.
        num_nodes: Nodes of all calls' trees, roots included.
        accepted_per_call: Kept drafts of each call.
        end_node_per_call: Node of the tree at which they end; 0, the root, if none was kept.
        depth_per_call: Depth down to which each call's drafts were judged: that of its tree, as it
            was grown; where a stop cut the answer, that of the kept drafts; 0 for a plain step.
        tree_max_depth: Depth of the deepest tree that a call may have.
        prefill_s: Seconds until the first token.
        decode_s: Seconds of decoding, after the prefill.
        time_ms: Milliseconds of all calls by phase.
        num_reused_tokens: Tokens of the prompt that were taken from a kept prefix.
        tree_per_call: Tree of each call; empty unless trees were chosen by step.
    """

    num_new_tokens: int = 0
    num_calls: int = 0
    num_nodes: int = 0
    accepted_per_call: list[int] = field(default_factory=list)
    end_node_per_call: list[int] = field(default_factory=list)
    depth_per_call: list[int] = field(default_factory=list)
    tree_max_depth: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    time_ms: dict[str, float] = field(default_factory=dict)
    num_reused_tokens: int = 0
    tree_per_call: list[StepTree] = field(default_factory=list)

    @property
    def calls_by_tree(self) -> Counter[str]:
        """Number of calls with each tree, by its name; empty unless trees were chosen by step."""
        return Counter(tree.name for tree in self.tree_per_call)

    @property
    def acceptance_length(self) -> float:
        """New tokens per target call (τ); NaN without calls."""
        return tau(self.num_new_tokens, self.num_calls)

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second of decoding, without the prefill; NaN without a time."""
        return self.num_new_tokens / self.decode_s if self.decode_s else float("nan")

    def count_call(self, tree: StepTree, depth: int, path: Sequence[int], num_kept: int) -> int:
        """Count a call; return its number of kept drafts.

        Args:
            tree: The call's tree.
            depth: Depth of its deepest node, as it was grown.
            path: Accepted nodes, the root first.
            num_kept: New tokens that the stop rule kept.
        """
        if num_kept < len(path):  # the next draft would have stood after the answer's end
            depth, path = num_kept, path[: num_kept + 1]
        num_accepted = len(path) - 1
        self.num_calls += 1
        self.num_nodes += tree.num_nodes
        self.num_new_tokens += num_kept
        self.accepted_per_call.append(num_accepted)
        self.depth_per_call.append(depth)
        self.end_node_per_call.append(tree.end_of(path))
        return num_accepted

    def __repr__(self) -> str:
        return f"DecodingStats({self._summary()})"

    def __str__(self) -> str:
        calls = Counter(self.accepted_per_call)
        rows = [
            ("tokens after the first", f"{self.num_new_tokens}"),
            ("target calls", f"{self.num_calls}"),
            ("acceptance length τ", _figure(self.acceptance_length)),
            ("tokens/s", _figure(self.tokens_per_s)),
            ("prefill", f"{self.prefill_s:.3f} s"),
            ("decoding", f"{self.decode_s:.3f} s"),
        ]
        rows += [(f"  {phase}", f"{ms / 1e3:.3f} s") for phase, ms in self.time_ms.items()]
        rows += [(f"calls with {name}", f"{n}") for name, n in self.calls_by_tree.most_common()]
        if self.tree_max_depth:
            rows += [
                (f"calls that kept {counted(count, 'draft')}", f"{calls[count]}")
                for count in range(self.tree_max_depth + 1)
            ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(f"{name:<{widths[0]}}  {text:>{widths[1]}}" for name, text in rows)

    def _summary(self) -> str:
        return (
            f"{self.num_new_tokens} tokens after the first in {self.num_calls} calls, "
            f"τ {_figure(self.acceptance_length)}, {_figure(self.tokens_per_s)} tokens/s"
        )


def _figure(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.2f}"


@dataclass(repr=False)
class GenerationOutput:
    """Output of a generation after a prompt.

    Attributes:
        tokens: The new tokens, without the prompt; the EOS included if it came.
        finish_reason: Why they end: "eos", "stop_string" or "length"; of rows of a batch also
            "released" or "error".
        stats: Calls, accepted drafts and times; `print` shows a table.
        tokenizer: The decoder's, for `text`; None without one.
        seed: Seed of sampling: the request's, or the fresh one that it got. The same seed gives the
            same answer again. None for a greedy answer.
        logprobs: Log-probabilities of each of the tokens; None unless the request has `logprobs`.
    """

    tokens: list[int]
    finish_reason: str
    stats: DecodingStats
    tokenizer: Any = field(default=None, compare=False)
    seed: int | None = field(default=None, compare=False)
    logprobs: list[TokenLogprobs] | None = field(default=None, compare=False)

    @property
    def text(self) -> str:
        """Text of the tokens, without special ones. Raises `UsageError` without a tokenizer."""
        if self.tokenizer is None:
            raise UsageError(
                "the decoder has no tokenizer, so there is no text: make it with tokenizer=…"
            )
        return self.tokenizer.decode(self.tokens, skip_special_tokens=True)

    def __repr__(self) -> str:
        text = f", text={self.text!r:.99}" if self.tokenizer is not None else ""
        seed = "" if self.seed is None else f", seed={self.seed}"
        return (
            f"GenerationOutput({len(self.tokens)} tokens, finish_reason={self.finish_reason!r}, "
            f"{self.stats._summary()}{seed}{text})"
        )


def require_whole(name: str, value: Any, least: int = 1) -> None:
    """Raise `UsageError` unless a value is a whole number of at least `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name} is {value!r}, wanted a whole number of at least {least}")
