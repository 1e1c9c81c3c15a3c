"""Base of tree policies, which choose the tree of each step, and a batch's choice by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar

from stree.common.errors import UsageError
from stree.common.words import counted
from stree.tree_policy.step_times import StepTimes
from stree.trees.token_tree import PLAIN, StepTree, as_tree


class TreePolicy:
    """Choice of the tree of each step, of several trees and plain decoding.

    A policy of your own overrides `choose`, and the methods by which it learns.

    Args:
        trees: Trees or their names, at least one with drafts; plain decoding is added.
        costs: Step times, as `BatchDecoder.measure_step_times` returns them; None until they are
            measured.

    Attributes:
        trees: The trees that a step may have.
        costs: Step times that the choice rests on; another record may be assigned at any time.
        state: Record of everything that was learned, as `new_state` makes it.
        needs_step_times: True if `costs` must be measured before the first step.

    Raises:
        UsageError: Without a tree that has drafts.
    """

    needs_step_times: ClassVar[bool] = True
    trees: tuple[StepTree, ...]
    costs: StepTimes
    state: Any

    def __init__(self, trees: Sequence[StepTree | str], costs: StepTimes | None = None) -> None:
        if isinstance(trees, str):
            raise UsageError(
                f"adaptive trees of {trees!r:.60}, wanted a list of trees: [{trees!r:.60}]"
            )
        given = dict.fromkeys(tree for tree in map(as_tree, trees) if tree.num_nodes > 1)
        if not given:
            raise UsageError(
                "adaptive trees without a tree: give at least one, to choose it or plain decoding"
            )
        self.trees = (PLAIN, *given)
        self.costs = costs or StepTimes()
        self.forget()

    def new_state(self) -> Any:
        """Return the record of a policy that has learned nothing yet."""

    def choose(self, num_rows: int) -> StepTree:
        """Return the tree of the next step of `num_rows` rows, idle ones below the last included.

        A step may not follow: the choice is made again if the number of rows changes.
        """
        raise NotImplementedError

    @property
    def drafts(self) -> bool:
        """True if drafters have to read the prompts of new requests."""
        return True

    @property
    def times_reads(self) -> bool:
        """True if the drafter's reads of prompts are to be timed now, for `learn_answer`."""
        return True

    def observes(self, num_rows: int) -> bool:
        """Return whether the paths of the step that is planned now are to be learned.

        It is asked once for each step, after the step's tree was chosen. `num_rows` rows decode.
        """
        return True

    def learn_paths(self, tree: StepTree, paths: Sequence[Sequence[int]]) -> None:
        """Learn from rows' steps of `tree`, given the accepted nodes of each, the root first.

        The nodes of dynamic trees are ranks. `tree` may be one that only requests have named.
        """

    def learn_step(self, num_rows: int, tree: StepTree, seconds: float) -> None:
        """Learn how long a step of `num_rows` rows with that tree alone has taken.

        That is from the report before to its own, where nothing came between. `tree` may be one
        that only its request has named.
        """

    def learn_tokens(self, num_tokens: int) -> None:
        """Learn of new tokens of requests for which this policy chooses the trees."""

    def learn_answer(self, prefill_s: float | None = None, catch_up_s: float | None = None) -> None:
        """Learn that an answer has ended.

        Args:
            prefill_s: Seconds of the drafter's prefill of the prompt; None if it did not read it.
            catch_up_s: Seconds of the drafter's catch-ups; None if there were none.
        """

    def forget(self) -> None:
        """Forget everything that was learned, and keep the step times."""
        self.state = self.new_state()

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Forget everything inside the block, and restore it after the block.

        A warm-up's answers are few, short and alike: they say nothing about requests. Step
        times that are set inside the block stay.
        """
        before = self.state
        self.forget()
        try:
            yield
        finally:
            self.state = before

    def misfit(self, target: Any, temperature: float, num_rows: int) -> str:
        """Return why `costs` do not hold for such steps (`StepTimes.misfit`); "" if they do.

        They hold for all steps of a policy that needs none.
        """
        if not self.needs_step_times:
            return ""
        return self.costs.misfit(target, self.trees, temperature, num_rows)

    @cached_property
    def deepest(self) -> StepTree:
        """The deepest tree that a step may have."""
        return max(self.trees, key=lambda tree: tree.max_depth)

    @cached_property
    def largest(self) -> StepTree:
        """The tree with the most nodes that a step may have."""
        return max(self.trees, key=lambda tree: tree.num_nodes)

    @property
    def name(self) -> str:
        """Name by which `stree.load` and the commands make such a policy."""
        return " or ".join(tree.name for tree in self.trees if tree != PLAIN)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        if not self.needs_step_times:
            return f"{type(self).__name__}({self})"
        most = self.costs.most_rows
        measured = f"costs of up to {counted(most, 'row')}" if most else "no costs measured"
        return f"{type(self).__name__}({self}, {measured})"


class FixedTree(TreePolicy):
    """Policy of one tree for all steps.

    Example:
        >>> import stree
        >>> FixedTree(stree.TokenTree.paper()).choose(num_rows=1).name
        'paper'
    """

    needs_step_times = False

    def __init__(self, tree: StepTree) -> None:
        self.trees, self.costs, self.state = (tree,), StepTimes(), None

    def choose(self, num_rows: int) -> StepTree:
        """Return the tree."""
        return self.trees[0]

    @property
    def name(self) -> str:
        return self.trees[0].name

    def __str__(self) -> str:
        return str(self.trees[0])


class TreeChoice:
    """The tree of the next step, kept until a step has it, or other rows decode.

    Args:
        policy: Chooses the trees.
        trees: All trees that steps may have, also by another policy; None for the policy's.

    Attributes:
        is_open: True if steps may have different trees.
        num_tokens: New tokens of which the policy is still to be told.
    """

    def __init__(self, policy: TreePolicy, trees: Sequence[StepTree] | None = None) -> None:
        trees = trees or policy.trees
        self.policy, self.is_open = policy, len(trees) > 1
        self._longest_block = max(tree.max_depth for tree in trees) + 1
        self._next: tuple[int, StepTree] | None = None  # rows, and the tree chosen for them
        # What the policy is still to be told, of many rows at once: the host's time counts
        self._tree: StepTree = policy.trees[0]
        self._paths: list[Sequence[int]] = []  # of rows with that tree
        self.num_tokens = 0

    @property
    def is_made(self) -> bool:
        """True if the next step's tree is chosen; other rows may still need another one."""
        return self._next is not None or not self.is_open

    def next(self, num_rows: int) -> StepTree:
        """Return the tree of the next step of `num_rows` rows.

        It ignores what steps in flight will accept.
        """
        if self._next is None or self._next[0] != num_rows:
            self._next = num_rows, self.policy.choose(num_rows)
        return self._next[1]

    def drop(self) -> None:
        """Drop the tree that was chosen: a step has it, or the choice rests on something else."""
        self._next = None

    def block(self, longest_block: int, depth: int) -> int:
        """Return the block length to launch a step with, of trees with `depth` levels of drafts.

        longest_block is the most tokens of any row's last block. While trees change, a step has one
        of two block lengths, so that few captured graphs serve all steps.
        """
        if self.is_open and longest_block > depth + 1:
            return max(longest_block, self._longest_block)
        return longest_block

    def note(self, tree: StepTree, path: Sequence[int]) -> None:
        """Note the accepted path of a row's step, for the policy to learn."""
        if tree is not self._tree:
            self.tell()
            self._tree = tree
        self._paths.append(path)

    def tell(self) -> None:
        """Let the policy learn the paths that were noted, and the new tokens."""
        if self._paths:
            paths, self._paths = self._paths, []
            self.policy.learn_paths(self._tree, paths)
        if self.num_tokens:
            num_tokens, self.num_tokens = self.num_tokens, 0
            self.policy.learn_tokens(num_tokens)

    def forget(self) -> None:
        """Let the policy forget everything except the step times."""
        self.drop()
        self.policy.forget()

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Let the policy learn nothing inside the block."""
        self.drop()
        try:
            with self.policy.forgetting():
                yield
        finally:
            self.drop()
