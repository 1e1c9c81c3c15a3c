"""Scheduler: decide on the host what each step does, from requests and reports alone.

It imports no PyTorch and reads no clock. The same requests and the same reports give the same
plans, so that a run can be replayed without a model, and other ranks can follow one scheduler.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stree.common.errors import UsageError
from stree.engine.plan import Admit, CatchUp, Read, Report, RowReport, Save, StepPlan
from stree.engine.prefix_index import Prefix, PrefixIndex
from stree.engine.sequence import RunningSequence, SharedPrompt, StepOutput
from stree.tree_policy.policy import TreeChoice, TreePolicy
from stree.trees.token_tree import TokenTree


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
class _Planned:
    """A plan without a report: its sequences and trees by row, and whether the drafter ran."""

    plan: StepPlan
    rows: dict[int, tuple[RunningSequence, TokenTree]]
    begins: dict[int, RunningSequence]
    drafted: bool


class Scheduler:
    """Queue of rows: who decodes with which tree, who reads, what is kept, and who has ended.

    Args:
        limits: Of the worker.
        tree_policy: Chooses the trees of requests that name none.
        tree: The tree of steps in which every request names one.
    """

    def __init__(self, limits: Limits, tree_policy: TreePolicy, tree: TokenTree) -> None:
        self.limits, self.tree_policy, self.tree = limits, tree_policy, tree
        self.sequences: dict[int, RunningSequence] = {}  # by row, in the order of admission
        self.prefixes = PrefixIndex(limits.num_prefixes)
        self.choice = TreeChoice(tree_policy)
        self._planned: deque[_Planned] = deque()  # plans whose reports are awaited
        self._number = 0
        self._decoding: dict[int, RunningSequence] = {}  # rows of the last step
        self._stops: list[int] = []
        self._saves: list[Save] = []
        self._admits: list[Admit] = []

    @property
    def num_free_rows(self) -> int:
        """Number of free rows."""
        return self.limits.num_rows - len(self.sequences)

    def taken(self, row: int) -> RunningSequence:
        """Return the row's sequence. Raises `UsageError` for a row that is free."""
        if row not in self.sequences:
            raise UsageError(
                f"row {row!r} is free, wanted one that is taken ({sorted(self.sequences)}): "
                "release a row once, with the number that admit returned"
            )
        return self.sequences[row]

    # Requests

    def admit(self, sequence: RunningSequence) -> int:
        """Give a sequence the first free row, and return the row; the next plan has it."""
        if not self.num_free_rows:
            raise UsageError(
                f"all rows ({self.limits.num_rows}) are taken: release one, or make the decoder "
                "with more"
            )
        row = next(row for row in range(self.limits.num_rows) if row not in self.sequences)
        self.sequences[row] = sequence
        eos_ids = tuple(sorted(sequence.stop.eos_ids))
        self._admits.append(Admit(row, tuple(sequence.prompt), sequence.generation, eos_ids))
        return row

    def release(self, row: int, keep: bool = False) -> RunningSequence:
        """Free a row, and return its sequence; with `keep` its tokens are kept as a prefix."""
        sequence = self.taken(row)
        del self.sequences[row]
        self._admits = [each for each in self._admits if each.row != row]
        if sequence.shared is not None and sequence.shared.read_by is sequence:
            sequence.shared.read_by = None  # another row reads the prompt, unless that is done
        self._stops.append(row)
        cut_short = not sequence.finish_reason and len(sequence.stop.tokens) > 0
        if sequence.tree is None and cut_short:
            self.tree_policy.learn_answer()  # for these tokens its prompt was read
        may_keep = self.prefixes.most and sequence.finish_reason != "error"
        if keep and may_keep and not sequence.is_stale and sequence.num_read:
            number, tokens = self.prefixes.new_number(), sequence.tokens
            self.prefixes.await_lengths(number, tokens, sequence.num_read)
            self._saves.append(self._save(number, row, sequence, len(tokens)))
        return sequence

    def forget_prefixes(self) -> None:
        """Drop all prefixes: the weights have changed, and rows that go on are not kept."""
        self.prefixes.clear()
        for each in self.sequences.values():
            each.is_stale = True

    def num_reusable(self, prompt: list[int]) -> int:
        """Return how many tokens of a prompt are in a kept prefix."""
        found = self.prefixes.longest_of(prompt)
        return found.target if found else 0

    def reads_to_prepare(self, sequence: RunningSequence) -> tuple[list[tuple[int, int]], int]:
        """Return the pieces (start, stop) of a prompt that are still to be read.

        The second value is the number of tokens that the drafter need not read.
        """
        read, drafted = sequence.num_read, sequence.num_drafted_from
        if read == 0 and (found := self.prefixes.longest_of(sequence.prompt)):
            read, drafted = found.target, found.drafter
        return self._pieces(sequence, read, len(sequence.prompt)), drafted

    def steps_to_prepare(self) -> Iterator[tuple[int, dict[int, TokenTree], int, int]]:
        """Yield `num_rows`, trees, `longest` and `position` of the steps that may follow now."""
        deepest = self.tree_policy.deepest.max_depth + 1
        for tree in self.tree_policy.trees if self.sequences else ():
            trees = {row: each.tree or tree for row, each in self.sequences.items()}
            num_rows, longest, position = self._step_of(trees)
            depth = max(each.max_depth for each in trees.values())
            for most in {longest, self.choice.block(deepest, depth)}:
                yield num_rows, trees, most, position

    # Plans

    @property
    def awaits_steps(self) -> int:
        """Number of steps without a report."""
        return sum(bool(each.plan.trees) for each in self._planned)

    @property
    def awaits_reports(self) -> int:
        """Number of plans without a report."""
        return len(self._planned)

    def drop_useless(self) -> int:
        """Forget the oldest plans of which nothing is to be learned; return their number."""
        dropped = 0
        while self._planned and not self._is_useful(self._planned[0]):
            self._forget_first()
            dropped += 1
        return dropped

    def _is_useful(self, planned: _Planned) -> bool:
        rows = [*self._living(planned.rows), *self._beginning(planned)]
        return bool(planned.plan.saves or rows)

    def plan_changes(self) -> StepPlan | None:
        """Return a plan of stops, saves and admissions alone; None if there are none."""
        changed = self._stops or self._saves or self._admits or self.prefixes.drops
        return self._new_plan() if changed else None

    def plan(self) -> StepPlan | None:
        """Return the plan of the next step; None if reports come first, or nothing is to be done.

        The drafter catches up by reading the last block of every row, whatever tree each has, so a
        plan in which it does needs all reports first.
        """
        decoding = {row: each for row, each in self.sequences.items() if each.is_decoding}
        trees, catch_ups = {}, []
        if decoding:
            chosen = self._chosen_tree(decoding)
            trees = {row: each.tree or chosen for row, each in decoding.items()}
            drafted = any(tree.num_nodes > 1 for tree in trees.values())
            if drafted and any(each.is_behind for each in decoding.values()):
                if self._planned:
                    return None
                behind = {row: each for row, each in decoding.items() if each.is_behind}
                catch_ups = [self._catch_up(row, each) for row, each in behind.items()]
            self.choice.drop()  # this step has it
        self._decoding = decoding
        return self._new_plan(decoding, trees, catch_ups)

    def _catch_up(self, row: int, sequence: RunningSequence) -> CatchUp:
        start = sequence.num_drafted_from
        *missed, root = sequence.tokens[start:]
        sequence.is_behind, sequence.longest = False, 1
        known = None if start else 0
        timed = sequence.tree is None
        return CatchUp(row, tuple(missed), known, sequence.position, root, timed)

    def abandon(self, plan: StepPlan) -> None:
        """Forget a plan whose execution has failed: its rows end with "error"."""
        if self._planned and self._planned[-1].plan is plan:
            for each, tree in self._planned.pop().rows.values():
                each.in_flight -= tree.max_depth + 1
        begun = (*(each.row for each in plan.reads), *(each.row for each in plan.admits))
        for row in {*plan.trees, *begun}:
            self.sequences[row].finish_reason = "error"
            self.sequences[row].num_read = len(self.sequences[row].prompt)
            self._stops.append(row)
        for shared in [self.sequences[read.row].shared for read in plan.reads if read.save]:
            if shared is not None:
                shared.end()
                shared.read_by = None  # another row reads the prompt
        self.prefixes.clear()  # what the plan was to save may not be there

    def _new_plan(
        self, decoding: dict[int, RunningSequence] | None = None,
        trees: dict[int, TokenTree] | None = None, catch_ups: Iterable[CatchUp] = (),
    ) -> StepPlan | None:
        """Return a plan with all changes that wait; without `decoding` nothing is read, either."""
        trees, changes = trees or {}, (tuple(self._stops), tuple(self._saves), tuple(self._admits))
        step = self._step_of(trees) if trees else (0, 1, 0)
        rows = {row: (self.sequences[row], tree) for row, tree in trees.items()}
        drafted = any(tree.num_nodes > 1 for tree in trees.values())
        if trees:
            for each in self.sequences.values():
                each.longest = 1
        for each, tree in rows.values():
            each.longest = tree.max_depth + 1
            each.in_flight += each.longest
            each.is_behind = each.is_behind or not drafted
        reads = [] if decoding is None else list(self._reads(whole=not decoding))
        if not (any(changes) or trees or reads or self.prefixes.drops):
            return None
        self._number += 1
        drops = tuple(self.prefixes.drops)
        del self.prefixes.drops[: len(drops)]  # another thread may add to it meanwhile
        self._stops, self._saves, self._admits = [], [], []
        plan = StepPlan(
            self._number, *changes, tuple(catch_ups), trees, *step, tuple(reads), drops
        )
        if plan.is_reported:
            begins = {row: self.sequences[row] for row in plan.begins}
            self._planned.append(_Planned(plan, rows, begins, drafted))
        return plan

    def _step_of(self, trees: dict[int, TokenTree]) -> tuple[int, int, int]:
        """Return `num_rows`, `longest` and `position` of a step.

        All rows that are taken take part, or their buffers would fall behind.
        """
        longest = max(each.longest for each in self.sequences.values())
        longest = self.choice.block(longest, max(tree.max_depth for tree in trees.values()))
        # A row that has ended may have dropped tokens of its last block
        position = max(
            each.position + each.in_flight + (each.longest if each.finish_reason else 0)
            for row, each in self.sequences.items() if row in trees or each.finish_reason
        )
        return self._num_step_rows, longest, position

    @property
    def _num_step_rows(self) -> int:
        """Number of rows of a step now: up to the last row that is taken, idle ones included."""
        return self.limits.step_rows(max(self.sequences) + 1)

    def _chosen_tree(self, decoding: dict[int, RunningSequence]) -> TokenTree:
        """Return the tree of the next step's rows whose requests name none."""
        if any(each.tree is None for each in decoding.values()):
            return self.choice.next(self._num_step_rows)
        return self.tree

    def look_ahead(self) -> None:
        """Choose the tree of the step after this one, while the device works on this one."""
        if self._decoding and self.sequences:
            self._chosen_tree(self._decoding)

    def _reads(self, whole: bool) -> Iterator[Read]:
        """Yield the parts of prompts to read, in the order in which the rows were admitted.

        With `whole` each row reads its whole prompt, else one chunk; all chunks together stay
        within `prompt_tokens_per_step`. A row begins to decode after its last chunk.
        """
        left: float = math.inf if whole else self.limits.prompt_tokens_per_step or math.inf
        for row, each in self.sequences.items():
            if not each.is_prefilling or left <= 0:
                continue
            if each.num_read == 0:
                if self.prefixes.may_grow(each.prompt):
                    continue  # until the report tells what was saved
                if each.tree is None:
                    each.is_behind = not self.tree_policy.drafts
            for read in self._reads_of(row, each, whole):
                left -= read.stop - read.start
                yield read

    def _reads_of(self, row: int, sequence: RunningSequence, whole: bool) -> Iterator[Read]:
        """Yield what a row reads next; nothing while another row reads the prompt for it.

        Drafters whose rows cannot be saved read a prompt again.
        """
        shared, prompt = sequence.shared, sequence.prompt
        load, with_drafter = None, False
        if sequence.num_read == 0 and shared is not None:
            if shared.prefix is not None:
                yield self._take_over(row, sequence, shared)
                return
            if shared.read_by not in (None, sequence):
                return
            shared.read_by = sequence
        if sequence.num_read == 0 and (prefix := self.prefixes.longest_of(prompt)):
            self.prefixes.use(prefix)
            load, with_drafter = prefix.number, prefix.drafter > 0
            sequence.num_read, sequence.num_drafted_from = prefix.target, prefix.drafter
            sequence.stats.num_reused_tokens = prefix.target
        drafts = self.limits.has_drafter and not sequence.is_behind
        last = len(prompt) if whole else min(len(prompt), sequence.num_read + self.limits.chunk)
        for start, stop in self._pieces(sequence, sequence.num_read, last):
            drafted = sequence.num_drafted_from if drafts else None
            sequence.num_read = stop
            if drafts:
                sequence.num_drafted_from = stop
            sequence.has_begun = stop == len(prompt)
            yield Read(
                row, start, stop, drafted, load, with_drafter, self._saved_after(row, sequence),
                sequence.has_begun, sequence.tree is None,
            )
            load = None

    def _pieces(
        self, sequence: RunningSequence, start: int, stop: int
    ) -> list[tuple[int, int]]:
        """Divide the tokens from `start` to `stop` where a prefix to keep ends between them."""
        end = sequence.num_to_keep
        is_inside = self.limits.num_prefixes and start < end < stop
        return [(start, end), (end, stop)] if is_inside else [(start, stop)]

    def _take_over(self, row: int, sequence: RunningSequence, shared: SharedPrompt) -> Read:
        """Return the read of a prompt that another row has read: a copy of its caches."""
        length, prefix = len(sequence.prompt), shared.prefix
        assert prefix is not None
        shared.left -= 1
        if not shared.left:
            shared.end()
        drafts = self.limits.has_drafter and not sequence.is_behind
        with_drafter = drafts and shared.drafter == length
        sequence.num_read = sequence.stats.num_reused_tokens = length
        drafted = length if with_drafter else 0
        if drafts:
            sequence.num_drafted_from = length
        sequence.has_begun = True
        return Read(
            row, length, length, drafted if drafts else None, prefix, with_drafter,
            begins=True, is_timed=sequence.tree is None,
        )

    def _saved_after(self, row: int, sequence: RunningSequence) -> Save | None:
        """Return what is saved of a row that has just read a piece of its prompt; None if nothing.

        Saved are the tokens to keep, and at the prompt's end what other rows wait for.
        """
        shared, read = sequence.shared, sequence.num_read
        keep = read == sequence.num_to_keep and self.prefixes.most and not sequence.is_stale
        waiting = sequence.has_begun and shared is not None and shared.left > 0
        if not (keep or waiting):
            return None
        number = self.prefixes.new_number(bool(waiting) + bool(keep))
        save = self._save(number, row, sequence, read)
        drafter = sequence.num_drafted_from if save.with_drafter else 0
        if keep:
            self.prefixes.add(Prefix(number, tuple(sequence.prompt[:read]), read, drafter))
        if waiting:
            assert shared is not None
            shared.prefix, shared.drafter = number, drafter
            shared.drop_at_end(self.prefixes.drop)
        return save

    def _save(self, number: int, row: int, sequence: RunningSequence, most: int) -> Save:
        with_drafter = self.limits.saves_drafter and sequence.num_drafted_from > 0
        return Save(number, row, most, with_drafter)

    # Reports

    def take(self, report: Report) -> list[StepOutput]:
        """Learn from the oldest plan's report, and return the outputs of rows.

        A row has two outputs if the report has both its first token and a block.
        """
        self.look_ahead()  # the choice rests on what was known while the step ran
        planned = self._forget_first()
        for number, lengths in report.saved.items():
            self.prefixes.settle(number, *lengths)
        for row, seconds in report.drafter_s.items():
            if row in self.sequences:
                self.sequences[row].drafter_s = seconds
        blocks = [
            self._account(row, *planned.rows[row], planned.drafted, report)
            for row in self._living(planned.rows)
        ]
        return [
            self._begin(row, self.sequences[row], report) for row in self._beginning(planned)
        ] + blocks

    def _forget_first(self) -> _Planned:
        planned = self._planned.popleft()
        for each, tree in planned.rows.values():
            each.in_flight -= tree.max_depth + 1
        return planned

    def _living(self, rows: dict[int, tuple[RunningSequence, TokenTree]]) -> list[int]:
        """Return the rows whose sequences are still there and unfinished."""
        return [
            row for row, (each, _) in rows.items()
            if self.sequences.get(row) is each and not each.finish_reason
        ]

    def _beginning(self, planned: _Planned) -> list[int]:
        """Return the rows whose first token a plan chooses and whose sequences are still there."""
        return [row for row, each in planned.begins.items() if self.sequences.get(row) is each]

    def _begin(self, row: int, sequence: RunningSequence, report: Report) -> StepOutput:
        """Take a row's first token."""
        token, finite, scores = report.firsts[row]
        sequence.has_begun = False
        sequence.stats.prefill_s, sequence.since = report.ended - sequence.since, report.ended
        if not finite:
            return self._fail(row, sequence, "target")
        return self._keep(row, sequence, [token], [scores])

    def _account(
        self, row: int, sequence: RunningSequence, tree: TokenTree, drafted: bool, report: Report
    ) -> StepOutput:
        """Take the block that a step gave a row."""
        given: RowReport = report.rows[row]
        if given.finite != 1:
            return self._fail(row, sequence, "drafter" if given.finite == -1 else "target")
        stats = sequence.stats
        if drafted:  # up to the root, with which the draft began
            sequence.num_drafted_from = sequence.position + 1
        self.choice.learn(tree, given.path, stats.calls_by_tree)
        output = self._keep(row, sequence, given.tokens, given.scores)
        depth = given.depth or tree.max_depth
        output.num_accepted = stats.count_call(tree, depth, given.path, len(output.tokens))
        if sequence.finish_reason:
            stats.decode_s = report.ended - sequence.since
        return output

    def _keep(
        self, row: int, sequence: RunningSequence, block: list[int], scores: list[list[float]]
    ) -> StepOutput:
        kept, sequence.finish_reason = sequence.stop.keep(block)
        logprobs = sequence.learn_logprobs(kept, scores)
        if sequence.finish_reason:
            self._stops.append(row)
        if sequence.tree is None:  # it has the policy's
            self.tree_policy.learn_tokens(len(kept))
            if sequence.finish_reason:
                self.tree_policy.learn_answer(*sequence.drafter_s)
        return StepOutput(row, kept, sequence.finish_reason, logprobs=logprobs)

    def _fail(self, row: int, sequence: RunningSequence, who: str) -> StepOutput:
        sequence.finish_reason = "error"
        self._stops.append(row)
        return StepOutput(row, [], "error", culprit=who)
