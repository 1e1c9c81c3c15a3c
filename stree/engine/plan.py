"""Plans of steps, reports of them, and a worker's limits: all that scheduler and worker exchange.

Both are plain data without tensors, so that they can be sent to other ranks, and written to a file
and replayed (`stree.engine.plan_log`, where Pydantic reads and writes them by their annotations).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from pydantic_core import CoreSchema, core_schema

from stree.generation import GenerationConfig
from stree.speculation_profile import Tree
from stree.trees.token_tree import StepTree


@dataclass(frozen=True)
class _Saved:
    """Rules by which Pydantic turns values of one of our classes into JSON and back."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, *_: Any) -> CoreSchema:
        write = core_schema.plain_serializer_function_ser_schema(self.write)
        return core_schema.no_info_plain_validator_function(self.read, serialization=write)


SavedTree = Annotated[StepTree, _Saved(
    lambda tree: {"name": tree.name, "parents": tree.parents},
    lambda saved: Tree(**saved).to_token_tree(),
)]


def _write_settings(asked: GenerationConfig) -> dict[str, Any]:
    """Return settings as JSON has them, without a user's own processors."""
    biases = [(token, "-Infinity" if bias == -math.inf else bias)
              for token, bias in dict(asked.logit_bias).items()]
    return asdict(replace(asked, logits_processor=())) | {"logit_bias": biases}


SavedSettings = Annotated[GenerationConfig, _Saved(
    _write_settings, lambda saved: GenerationConfig(**saved),
)]


@dataclass(frozen=True)
class Limits:
    """Limits of a worker.

    Attributes:
        num_rows: Sequences at once.
        rounds_rows: Whether a step has a power of two of rows, so that few graphs serve any number.
        num_in_flight: Steps that are planned before the report of the first of them is read.
        chunk: Prompt tokens that a row reads between two steps of other rows.
        prompt_tokens_per_step: Most prompt tokens of such a step, the chunk that passes it
            excepted; None for one chunk of each row.
        num_prefixes: Prefixes to keep.
        has_drafter: Whether there is a drafter.
        saves_drafter: Whether the drafter's part of a row can be saved.
    """

    num_rows: int
    rounds_rows: bool = False
    num_in_flight: int = 1
    chunk: int = 512
    prompt_tokens_per_step: int | None = None
    num_prefixes: int = 0
    has_drafter: bool = False
    saves_drafter: bool = False

    def step_rows(self, taken: int) -> int:
        """Return the number of rows of a step in which the first `taken` rows take part."""
        return min(1 << (taken - 1).bit_length(), self.num_rows) if self.rounds_rows else taken


@dataclass(frozen=True)
class Admit:
    """A row is cleared and given to a request.

    Attributes:
        row: The row.
        prompt: The prompt's tokens.
        generation: The request's settings.
        eos_ids: Tokens that end its answer.
    """

    row: int
    prompt: tuple[int, ...]
    generation: SavedSettings
    eos_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Save:
    """Caches of a row are copied before anything else changes them; the report has their lengths.

    Attributes:
        prefix: Number of the saved prefix.
        row: The row.
        most: The most tokens that its caches may hold.
        with_drafter: Whether the drafter's cache is copied, too.
    """

    prefix: int
    row: int
    most: int
    with_drafter: bool


@dataclass(frozen=True)
class Read:
    """Tokens of a row's prompt are read.

    Attributes:
        row: The row.
        start: Tokens of the prompt that the target has read, those of `load` included.
        stop: Tokens of the prompt that the target has read afterwards.
        drafter_start: Tokens that the drafter has read; None if the drafter reads none now.
        load: Number of a saved prefix that is copied into the row first; None for none.
        with_drafter: Whether the drafter's part of that prefix is copied, too.
        save: How the row's caches are saved afterwards; None if they are not.
        begins: Whether the prompt ends here: the first token is chosen, and the row decodes.
        is_timed: Whether the tree policy learns from the drafter's time.
    """

    row: int
    start: int
    stop: int
    drafter_start: int | None
    load: int | None = None
    with_drafter: bool = False
    save: Save | None = None
    begins: bool = False
    is_timed: bool = False


@dataclass(frozen=True)
class CatchUp:
    """The drafter reads tokens that it missed while its row decoded without drafts.

    Attributes:
        row: The row.
        tokens: What it missed; may be empty.
        start: Tokens that the drafter has read; None if only the device knows how many.
        position: Tokens before the root.
        root: The last token, which no cache holds yet.
        is_timed: Whether the tree policy learns from the time.
    """

    row: int
    tokens: tuple[int, ...]
    start: int | None
    position: int
    root: int
    is_timed: bool


@dataclass  # a frozen one is slower to make
class StepPlan:
    """Work of one step, in the order of these fields.

    Attributes:
        number: Number of the plan, from 1.
        stops: Rows that decode no longer.
        saves: Rows whose caches are saved.
        admits: Rows that are given to requests.
        catch_ups: Tokens that the drafter reads first.
        trees: Tree of each row that decodes in this step.
        num_rows: Number of rows of the step, from row 0 on, idle ones included.
        longest_block: The most tokens of any row's last block.
        position: The largest position of any row's root.
        reads: Parts of prompts, read one after the other.
        drops: Saved prefixes that no later plan loads.
    """

    number: int
    stops: tuple[int, ...] = ()
    saves: tuple[Save, ...] = ()
    admits: tuple[Admit, ...] = ()
    catch_ups: tuple[CatchUp, ...] = ()
    trees: dict[int, SavedTree] = field(default_factory=dict)
    num_rows: int = 0
    longest_block: int = 1
    position: int = 0
    reads: tuple[Read, ...] = ()
    drops: tuple[int, ...] = ()

    @property
    def begins(self) -> list[int]:
        """Rows whose first token is chosen in this step."""
        return [read.row for read in self.reads if read.begins]

    @property
    def is_reported(self) -> bool:
        """True if the worker reports anything: tokens, or lengths of saved prefixes."""
        return bool(self.trees or self.saves or self.begins)


@dataclass(slots=True)  # a frozen one is slower to make, and a step makes one for each row
class RowReport:
    """Outcome of a step for a row that decoded.

    Attributes:
        finite: 1 when all logits were finite, 0 when the target's were not, −1 when the drafter's
            were not.
        tokens: New tokens, the next root last.
        path: Accepted nodes of the tree, the root first.
        depth: Depth of a tree that was grown in the step; 0 for a tree whose depth is known before.
        scores: Log-probabilities of each new token (`log_probs_of`); empty if no row wants them.
    """

    finite: int
    tokens: list[int]
    path: list[int]
    depth: int = 0
    scores: list[list[float]] = field(default_factory=list)


@dataclass  # a frozen one is slower to make
class Report:
    """Outcome of a step: all that a scheduler learns of the device.

    Attributes:
        number: Number of the plan.
        ended: Time of the host's clock when the report was there, in seconds.
        rows: Rows that decoded.
        firsts: First token of each row that begins, whether the logits were finite, and the
            token's log-probabilities if the request wants them.
        saved: Tokens that the target and the drafter hold in each saved prefix of `saves`; 0 for a
            drafter whose cache was not copied.
        drafter_s: Seconds that the drafter has read prompts and missed tokens of a row so far, of
            rows whose reads are timed; None where it read none.
        failed: Rows whose prompts could not be read, or whose own processors failed.
    """

    number: int
    ended: float
    rows: dict[int, RowReport] = field(default_factory=dict)
    firsts: dict[int, tuple[int, bool, list[float]]] = field(default_factory=dict)
    saved: dict[int, tuple[int, int]] = field(default_factory=dict)
    drafter_s: dict[int, tuple[float | None, float | None]] = field(default_factory=dict)
    failed: tuple[int, ...] = ()
