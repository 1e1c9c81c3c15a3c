"""Define the rows of an evaluation: results, samples, and readings of the data's answers.

`result_store.py` keeps them in a folder; metrics.md explains the names.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, Self

from pydantic import Field, model_validator

from stree import metrics
from stree.speculation_profile import Record, StepTimesRecord, Tree
from stree.trees.token_tree import MAX_NODES

SCHEMA_VERSION = 1

# (checkpoint sha256, method, tree, benchmark, prompt id, decoding hash, seed)
SampleKey = tuple[str | None, str, str | None, str, str, str, int]
# (checkpoint sha256, method, tree, benchmark, prompts hash, decoding hash, seed)
ResultKey = tuple[str | None, str, str | None, str, str, str, int]

# Figures that every version has computed alike from a row's samples
FROM_SAMPLES = (
    "acceptance_length", "acceptance_length_prompt_mean", "acceptance_histogram",
    "depth_accept_rates", "end_nodes", "open_ends", "nodes_per_call", "tokens_per_second",
    "tokens_per_second_e2e",
)
ROUNDING = 1e-9  # of sums in another order

# Ranges of figures: the report draws axes up to them.
Count = Annotated[int, Field(ge=0, le=2**53)]
Node = Annotated[int, Field(ge=0, lt=MAX_NODES)]  # of a tree, or a depth in one
NonNegative = Annotated[float, Field(ge=0)]
BatchSize = Annotated[int, Field(ge=1, le=2**53)]
Share = Annotated[float, Field(ge=0, le=1)]


class Divergence(Record):
    """First token that differs from plain decoding's, with the target's own margin there.

    `position` counts the turn's new tokens from 0; `logit_gap` is the target's top-1 minus top-2
    logit after the common prefix, when sampling with the noise that decides.
    """

    prompt_id: str
    turn: int
    position: int
    token: int | None
    autoregressive_token: int | None
    logit_gap: float


class Lossless(Record):
    """Comparison with plain decoding's tokens: the share of equal prompts, and each difference."""

    share: Share
    num_prompts: Count
    num_identical: Count
    divergences: tuple[Divergence, ...] = ()


class Environment(Record):
    git_sha: str | None
    device: str
    dtypes: dict[str, str]
    versions: dict[str, str]
    command_line: str
    num_processes: int
    num_threads: int


class ResultRow(Record):
    """Row of one (checkpoint, method, benchmark, temperature); metrics.md explains the names."""

    version: int = SCHEMA_VERSION
    step: Count | None
    checkpoint: str | None
    checkpoint_sha256: str | None
    target: str
    target_sha256: str
    method: str
    tree: Tree | None
    verifier: str | None  # None in rows of plain decoding, as the next
    backtracking: str | None
    benchmark: str
    prompts_hash: str
    temperature: NonNegative
    top_k: Count
    top_p: Share
    min_p: Share
    repetition_penalty: NonNegative
    num_prompts: Count
    max_new_tokens: Count
    ignore_eos: bool
    batch_size: BatchSize
    seed: int
    decoding_hash: str
    chat_template_sha256: str | None
    template_date: str | None  # that every prompt has, where the template prints one
    acceptance_length: NonNegative | None
    acceptance_length_prompt_mean: NonNegative | None
    acceptance_histogram: dict[Node, Count]
    depth_accept_rates: dict[Node, Share]
    end_nodes: dict[Node, Count]
    open_ends: dict[Node, Count]
    nodes_per_call: NonNegative | None
    tree_shares: dict[str, Share]  # of steps, where they were chosen
    # Where trees were chosen, before anything was timed; None for rows that a resumed run completed
    # without it
    measuring_costs_s: NonNegative | None
    costs: StepTimesRecord | None  # by which they were chosen
    rows_per_call: NonNegative | None
    tokens_per_second: NonNegative | None
    tokens_per_second_e2e: NonNegative | None
    speedup: NonNegative | None
    speedup_prompt_median: NonNegative | None
    speedup_per_tau: NonNegative | None
    num_stalled: Count | None  # samples with `is_stalled`; None: not looked for
    num_ended: Count | None  # answers by themselves; None, as the next: not counted
    num_cut: Count | None  # at max_new_tokens
    time_ms: dict[str, float]
    baseline_time_ms: dict[str, float]
    lossless: Lossless | None
    confidence_intervals: dict[str, tuple[float, float] | None]
    environment: Environment
    samples: Annotated[str, Field(pattern=r"^samples/[^/\x00]*\.jsonl(\.gz)?$")]  # in the folder

    @property
    def key(self) -> ResultKey:
        tree = self.tree.name if self.tree else None
        return (
            self.checkpoint_sha256, self.method, tree, self.benchmark, self.prompts_hash,
            self.decoding_hash, self.seed,
        )

    @model_validator(mode="after")
    def _require_figures_within_intervals(self) -> Self:
        for name, interval in self.confidence_intervals.items():
            value = getattr(self, name, None)
            if value is None or interval is None:
                continue
            low, high = interval
            if not low * (1 - ROUNDING) <= value <= high * (1 + ROUNDING):
                raise ValueError(f"{name} {value} lies outside of its interval {list(interval)}")
        return self

    def differs_from(self, samples: Sequence[SampleRow]) -> str:
        """Say how the row differs from the samples kept for it; "" where it does not."""
        for each in samples:
            # A profile shows the row of a drafter's form with the checkpoint of its folder
            is_of_one = each.checkpoint_sha256 == samples[0].checkpoint_sha256
            if not is_of_one or (*each.key[1:4], *each.key[5:]) != (*self.key[1:4], *self.key[5:]):
                return f"its answer to {each.prompt_id} was given for another row"
        if len({each.prompt_id for each in samples}) < len(samples):
            return "it answers a prompt twice"
        if len(samples) != self.num_prompts:
            return f"it has {len(samples)} answers, the row {self.num_prompts}"
        figures = {name: getattr(metrics, name)(samples) for name in FROM_SAMPLES}
        baselines = [each.baseline for each in samples if each.baseline is not None]
        if samples and len(baselines) == len(samples):
            figures["speedup"] = metrics.speedup(samples, baselines)
        for name, value in figures.items():
            own = getattr(self, name)
            both_floats = isinstance(value, float) and isinstance(own, float)
            if not (math.isclose(value, own, rel_tol=ROUNDING) if both_floats else value == own):
                return f"its {name} is {value}, the row's {own}"
        return ""


class Turn(Record):
    """A user's text and the answer, as text and as `tokens`.

    tokens: the new ones, with prefill's first token and a closing EOS.
    """

    user: str
    num_prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    finish_reason: str


class BaselineTiming(Record):
    """Timing of plain decoding of the same prompt, right before in the same process."""

    num_new_tokens: Count
    prefill_s: NonNegative
    decode_s: NonNegative
    time_ms: dict[str, float] = Field(default_factory=dict)
    call_share: NonNegative | None = None  # of batches, as a sample's

    @property
    def num_calls(self) -> int:
        """Calls of plain decoding, one per token."""
        return self.num_new_tokens


class SampleRow(Record):
    """Row of one prompt, all its turns, under one (checkpoint, method, tree, decoding).

    In a batch, seconds and call_share are the prompt's share of it, as `stree.metrics` says, and
    time_ms is empty: a batch's calls are not timed by part.
    """

    version: int = SCHEMA_VERSION
    checkpoint_sha256: str | None
    step: Count | None
    method: str
    tree: str | None
    benchmark: str
    prompt_id: str
    category: str
    temperature: NonNegative
    top_k: Count
    top_p: Share
    min_p: Share
    repetition_penalty: NonNegative
    batch_size: BatchSize = 1
    seed: int
    decoding_hash: str
    turns: tuple[Turn, ...]
    num_new_tokens: Count
    num_calls: Count
    num_nodes: Count
    accepted_per_call: tuple[Node, ...]
    end_node_per_call: tuple[Node, ...] | None = None  # None where trees are chosen
    depth_per_call: tuple[Node, ...] | None = None  # as in `DecodingStats`; None: not recorded
    calls_by_tree: dict[str, Count] = Field(default_factory=dict)
    call_share: NonNegative | None = None
    num_reused_tokens: Count = 0  # of earlier turns, which were not read again
    prefill_s: NonNegative
    decode_s: NonNegative
    time_ms: dict[str, float]
    is_stalled: bool = False  # the machine held it up, or plain decoding's answer beside it
    baseline: BaselineTiming | None = None
    lossless: bool | None = None
    divergence: Divergence | None = None

    @property
    def num_cut(self) -> int:
        """Count its answers that were cut at the most tokens; the others ended by themselves."""
        return sum(turn.finish_reason == "length" for turn in self.turns)

    @property
    def key(self) -> SampleKey:
        return (
            self.checkpoint_sha256, self.method, self.tree, self.benchmark, self.prompt_id,
            self.decoding_hash, self.seed,
        )


class ReadingKey(NamedTuple):
    """Everything that decides a reading; rows share these names, except the prompt's."""

    checkpoint_sha256: str | None
    target_sha256: str
    dtype: str
    chat_template_sha256: str | None
    benchmark: str
    prompts_hash: str
    prompt_id: str


class Reading(Record):
    """Target's and drafter's predictions of the data's own answer to a prompt.

    The drafter's numbers are None when no model drafts. Losses are in nats; losses and overlaps are
    sums over the answer's tokens.
    """

    version: int = SCHEMA_VERSION
    checkpoint_sha256: str | None
    target_sha256: str
    dtype: str
    chat_template_sha256: str | None
    benchmark: str
    prompts_hash: str
    prompt_id: str
    num_prompt_tokens: Count
    num_tokens: Count
    target_loss: NonNegative
    drafter_loss: NonNegative | None  # also None where its head lacks a token of the answer
    overlap: NonNegative | None
    same_choice: Count | None
    overlap_begun_anew: NonNegative | None  # by a drafter that read from the question on only

    @property
    def key(self) -> ReadingKey:
        return ReadingKey(*(getattr(self, name) for name in ReadingKey._fields))


def config_hash(content: dict[str, Any]) -> str:
    """Hash a JSON-able description (sha256), independent of its key order."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
