"""Scheduler: decide on the host what each step does, from requests and reports alone.

It imports no PyTorch and reads no clock. The same requests and the same reports give the same
plans, so that a run can be replayed without a model, and other ranks can follow one scheduler. The
end of a `SharedPrompt`, when nobody holds it any more, is an event like a request: its prefix is
dropped by the next plan, and a plan log has the event as `drop_shared`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stree.common.errors import UsageError, error_of_request
from stree.engine.plan import Admit, CatchUp, Limits, Report, Save, StepPlan
from stree.engine.prefix_index import PrefixIndex
from stree.engine.prompt_reads import PromptReads
from stree.engine.sequence import RunningSequence, StepOutput
from stree.tree_policy.policy import FixedTree, TreeChoice, TreePolicy
from stree.trees.token_tree import StepTree


@dataclass(slots=True)  # a frozen one is slower to make
class _Planned:
    """A plan without a report.

    Attributes:
        plan: The plan.
        rows: Sequences of the rows that decode, in the order of the plan's trees.
        reads: Sequences of the rows whose prompts are read.
        drafted: Whether the drafter ran.
        is_observed: Whether the tree policy learns the paths.
    """

    plan: StepPlan
    rows: dict[int, RunningSequence]
    reads: dict[int, RunningSequence]
    drafted: bool
    is_observed: bool = False


class Scheduler:
    """Queue of rows: who decodes with which tree, who reads, what is kept, and who has ended.

    Args:
        limits: Of the worker.
        tree_policy: Chooses the trees of requests that name none.
        tree: The tree of steps in which every request names one.
    """

    def __init__(self, limits: Limits, tree_policy: TreePolicy, tree: StepTree) -> None:
        self.limits, self.tree_policy, self.tree = limits, tree_policy, tree
        self.sequences: dict[int, RunningSequence] = {}  # by row, in the order of admission
        self.prefixes = PrefixIndex(limits.num_prefixes)
        self.prompts = PromptReads(limits, tree_policy, self.prefixes)
        self.choice = TreeChoice(tree_policy)
        self._planned: deque[_Planned] = deque()  # plans whose reports are awaited
        self._number = 0
        self._before = (0, 0.0)  # number and time of the last report
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
        tokens = sequence.tokens
        may_keep = self.prefixes.has_room_for(len(tokens)) and sequence.finish_reason != "error"
        if keep and may_keep and not sequence.is_stale and sequence.num_read:
            number = self.prefixes.new_number()
            self.prefixes.await_lengths(number, tokens, sequence.num_read)
            self._saves.append(self.prompts.save(number, row, sequence, len(tokens)))
        return sequence

    def limit_prefixes(self, budget: float, bytes_each: tuple[int, int]) -> None:
        """Drop all prefixes, and keep later ones within a budget (`PrefixIndex`)."""
        self.prefixes.budget, self.prefixes.bytes_each = budget, bytes_each
        self.prefixes.clear()

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
        return self.prompts.pieces(sequence, read, len(sequence.prompt)), drafted

    def steps_to_prepare(self) -> Iterator[tuple[int, dict[int, StepTree], int, int]]:
        """Yield `num_rows`, trees, `longest_block` and `position` of steps that may follow now."""
        deepest = self.tree_policy.deepest.max_depth + 1
        for tree in self.tree_policy.trees if self.sequences else ():
            trees = {row: each.tree or tree for row, each in self.sequences.items()}
            num_rows, longest_block, position = self._step_of(trees)
            depth = max(each.max_depth for each in trees.values())
            for most in {longest_block, self.choice.block(deepest, depth)}:
                yield num_rows, trees, most, position

    @contextmanager
    def only(self, tree: StepTree) -> Iterator[None]:
        """Give rows whose requests name no tree this one inside the block; nothing is learned."""
        before = self.tree_policy, self.choice
        self.tree_policy = self.prompts.tree_policy = FixedTree(tree)
        self.choice = TreeChoice(self.tree_policy, before[0].trees)
        try:
            yield
        finally:
            self.tree_policy, self.choice = before
            self.prompts.tree_policy = self.tree_policy

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
        if any(self._is_there(row, each) for row, each in planned.rows.items()):
            return True
        return bool(planned.plan.saves or self._beginning(planned))

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
        trees, catch_ups, drafted = {}, [], False
        if decoding:
            chosen = self._chosen_tree(decoding)
            trees = {row: each.tree or chosen for row, each in decoding.items()}
            drafted = any(tree.num_nodes > 1 for tree in trees.values())
            behind = {row: each for row, each in decoding.items() if each.is_behind}
            if drafted and behind:
                if self._planned:
                    return None
                catch_ups = [self._catch_up(row, each) for row, each in behind.items()]
            self.choice.drop()  # this step has it
        self._decoding = decoding
        return self._new_plan(decoding, trees, catch_ups, drafted)

    def _catch_up(self, row: int, sequence: RunningSequence) -> CatchUp:
        start = sequence.num_drafted_from
        *missed, root = sequence.tokens[start:]
        sequence.is_behind, sequence.longest_block = False, 1
        known = None if start else 0
        timed = sequence.tree is None
        return CatchUp(row, tuple(missed), known, sequence.position, root, timed)

    def abandon(self, plan: StepPlan | None = None) -> list[int]:
        """Forget a plan whose execution has failed; return its rows, which end with "error".

        Without a plan it is the oldest without a report, whose report could not be read. The next
        plan stops rows and drops prefixes as a given plan was to do.
        """
        if plan is None:
            planned = self._planned.popleft()
        elif plan.is_reported:
            planned = self._planned.pop()
        else:
            planned = _Planned(plan, {}, self._reading(plan), False)
        if plan is not None:
            self._stops[:0], self.prefixes.drops[:0] = plan.stops, plan.drops
        self._land(planned)
        rows = planned.reads | planned.rows | {
            each.row: self.sequences[each.row] for each in planned.plan.admits
            if each.row in self.sequences
        }
        ended = [row for row, each in rows.items() if self._is_there(row, each)]
        for row in ended:
            self._fail(row, rows[row])
        self.prefixes.clear()  # what the plan was to save may not be there
        return ended

    def _new_plan(
        self, decoding: dict[int, RunningSequence] | None = None,
        trees: dict[int, StepTree] | None = None, catch_ups: Iterable[CatchUp] = (),
        drafted: bool = False,
    ) -> StepPlan | None:
        """Return a plan with all changes that wait; without `decoding` nothing is read, either."""
        trees, changes = trees or {}, (tuple(self._stops), tuple(self._saves), tuple(self._admits))
        step = self._step_of(trees) if trees else (0, 1, 0)
        rows = decoding or {}
        if trees and len(trees) < len(self.sequences):  # the others' blocks are taken
            for each in self.sequences.values():
                each.longest_block = 1
        for each, tree in zip(rows.values(), trees.values(), strict=True):
            each.longest_block = longest_block = tree.max_depth + 1
            each.in_flight += longest_block
            each.is_behind = not drafted  # a row that was has a catch-up in this plan
        reads = [] if decoding is None or len(decoding) == len(self.sequences) else list(
            self.prompts.next(self.sequences, whole=not decoding)
        )
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
            is_observed = bool(rows) and self.tree_policy.observes(len(rows))
            self._planned.append(_Planned(plan, rows, self._reading(plan), drafted, is_observed))
        return plan

    def _reading(self, plan: StepPlan) -> dict[int, RunningSequence]:
        return {read.row: self.sequences[read.row] for read in plan.reads}

    def _step_of(self, trees: dict[int, StepTree]) -> tuple[int, int, int]:
        """Return `num_rows`, `longest_block` and `position` of a step.

        All rows that are taken take part, or their buffers would fall behind.
        """
        blocks = [each.longest_block for each in self.sequences.values()]  # faster than generators
        depths = [tree.max_depth for tree in trees.values()]
        longest_block = self.choice.block(max(blocks), max(depths))
        # A row that has ended may have dropped tokens of its last block
        positions = [
            each.position + each.in_flight + (each.longest_block if each.finish_reason else 0)
            for row, each in self.sequences.items() if row in trees or each.finish_reason
        ]
        return self._num_step_rows, longest_block, max(positions)

    @property
    def _num_step_rows(self) -> int:
        """Number of rows of a step now: up to the last row that is taken, idle ones included."""
        return self.limits.step_rows(max(self.sequences) + 1)

    def _chosen_tree(self, decoding: dict[int, RunningSequence]) -> StepTree:
        """Return the tree of the next step's rows whose requests name none."""
        if any(each.tree is None for each in decoding.values()):
            return self.choice.next(self._num_step_rows)
        return self.tree

    def look_ahead(self) -> None:
        """Choose the tree of the step after this one, while the device works on this one."""
        if self._decoding and self.sequences and not self.choice.is_made:
            self._chosen_tree(self._decoding)

    # Reports

    def take(self, report: Report) -> list[StepOutput]:
        """Learn from the oldest plan's report, and return the outputs of rows.

        A row has two outputs if the report has both its first token and a block.
        """
        self.look_ahead()  # the choice rests on what was known while the step ran
        planned = self._forget_first()
        self._learn_time(planned, report)
        for number, lengths in report.saved.items():
            self.prefixes.settle(number, *lengths)
        for row, seconds in report.drafter_s.items():
            if row in self.sequences:
                self.sequences[row].drafter_s = seconds
        failed = [
            self._fail(row, each) for row, each in planned.reads.items()
            if row in report.failed and self._is_there(row, each)
        ]
        blocks = [
            self._account(row, each, planned, report)
            for row, each in planned.rows.items() if self._is_there(row, each)
        ]
        begun = [self._begin(row, self.sequences[row], report) for row in self._beginning(planned)]
        self.choice.tell()
        return failed + begun + blocks

    def _learn_time(self, planned: _Planned, report: Report) -> None:
        """Let the tree policy learn what a step took that did nothing but decode one tree."""
        plan, (number, ended) = planned.plan, self._before
        self._before = plan.number, report.ended
        trees = list(plan.trees.values())
        is_alone = trees and not (plan.reads or plan.admits or plan.saves or plan.catch_ups)
        if number == plan.number - 1 and is_alone and trees.count(trees[0]) == len(trees):
            self.tree_policy.learn_step(plan.num_rows, trees[0], report.ended - ended)

    def _forget_first(self) -> _Planned:
        planned = self._planned.popleft()
        self._land(planned)
        return planned

    def _land(self, planned: _Planned) -> None:
        """Note that a plan's step is no longer in flight."""
        for each, tree in zip(planned.rows.values(), planned.plan.trees.values(), strict=True):
            each.in_flight -= tree.max_depth + 1

    def _is_there(self, row: int, sequence: RunningSequence) -> bool:
        """Return whether a sequence still has its row and is unfinished."""
        return not sequence.finish_reason and self.sequences.get(row) is sequence

    def _beginning(self, planned: _Planned) -> list[int]:
        """Return the rows whose first token a plan chooses and whose sequences are still there."""
        return [row for row in planned.plan.begins if self._is_there(row, planned.reads[row])]

    def _begin(self, row: int, sequence: RunningSequence, report: Report) -> StepOutput:
        """Take a row's first token."""
        token, finite, scores = report.firsts[row]
        sequence.has_begun = False
        sequence.stats.prefill_s, sequence.since = report.ended - sequence.since, report.ended
        if not finite:
            return self._fail(row, sequence, "target")
        return self._keep(row, sequence, [token], [scores])

    def _account(
        self, row: int, sequence: RunningSequence, planned: _Planned, report: Report
    ) -> StepOutput:
        """Take the block that a step gave a row."""
        given, tree, stats = report.rows[row], planned.plan.trees[row], sequence.stats
        path, depth = given.path, given.depth or tree.max_depth
        if given.finite != 1:
            return self._fail(row, sequence, "drafter" if given.finite == -1 else "target")
        if planned.drafted:  # up to the root, with which the draft began
            sequence.num_drafted_from = len(sequence.prompt) + len(sequence.stop.tokens)
        if planned.is_observed:
            self.choice.note(tree, path)
        if self.choice.is_open:
            stats.tree_per_call.append(tree)
        output = self._keep(row, sequence, given.tokens, given.scores)
        if output.error is not None:
            return output
        output.num_accepted = stats.count_call(tree, depth, path, len(output.tokens))
        if sequence.finish_reason:
            stats.decode_s = report.ended - sequence.since
        return output

    def _keep(
        self, row: int, sequence: RunningSequence, block: list[int], scores: list[list[float]]
    ) -> StepOutput:
        stop, count = sequence.stop, len(sequence.stop.tokens)
        try:
            tokens, sequence.finish_reason = stop.keep(block)
        except BaseException as error:  # of the tokenizer, by the request's stop strings
            del stop.tokens[count:]
            output = self._fail(row, sequence)
            output.error = error_of_request(error)
            return output
        logprobs = sequence.learn_logprobs(tokens, scores) if scores else []
        if sequence.finish_reason:
            self._stops.append(row)
        if sequence.tree is None:  # it has the policy's
            self.choice.num_tokens += len(tokens)
            if sequence.finish_reason:
                self.choice.tell()
                self.tree_policy.learn_answer(*sequence.drafter_s)
        return StepOutput(row, tokens, sequence.finish_reason, None, 0, logprobs)

    def _fail(self, row: int, sequence: RunningSequence, who: str = "") -> StepOutput:
        sequence.finish_reason = "error"
        sequence.num_read = len(sequence.prompt)  # it is not read any further
        self._stops.append(row)
        shared = sequence.shared
        if shared is not None and shared.read_by is sequence:
            shared.end()
            shared.read_by = None  # another row reads the prompt
        return StepOutput(row, [], "error", culprit=who)
