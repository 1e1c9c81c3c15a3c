"""Choice of a batch's next tree: made by its tree policy, while the device works."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from stree.tree_policy.policy import TreePolicy
from stree.trees.token_tree import TokenTree


class TreeChoice:
    """The tree of the next step, chosen once and kept until a step has it.

    Attributes:
        policy: Chooses the trees.
        is_open: True if steps may have different trees.
    """

    def __init__(self, policy: TreePolicy) -> None:
        self.policy, self.is_open = policy, len(policy.trees) > 1
        self._next: tuple[int, TokenTree] | None = None  # rows, and the tree chosen for them

    def next(self, num_rows: int) -> TokenTree:
        """Return the tree of the next step of `num_rows` rows.

        It ignores what steps in flight will accept.
        """
        if self._next is None or self._next[0] != num_rows:
            self._next = num_rows, self.policy.choose(num_rows)
        return self._next[1]

    def drop(self) -> None:
        """Drop the tree that was chosen: a step has it, or the choice rests on something else."""
        self._next = None

    def block(self, longest: int, depth: int) -> int:
        """Return the longest block to launch a step for whose trees have a depth.

        longest is the most tokens of any row's last block. While trees change, a tree's steps have
        one of two blocks, so that few graphs serve them all.
        """
        if self.is_open and longest > depth + 1:
            return max(longest, self.policy.deepest.max_depth + 1)
        return longest

    def learn(self, tree: TokenTree, path: Sequence[int], calls: Counter[str]) -> None:
        """Learn the accepted path of a row's step, and count the tree in `calls`, by its name."""
        self.policy.learn_path(tree, path)
        if self.is_open:
            calls[tree.name] += 1

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
