"""Locks of workers that fill one folder: those of one launch share it, other commands wait."""

from contextlib import ExitStack

import pytest

from stree_pipelines.evaluation.context import Workers


class Waits(Exception):
    """Raised in place of waiting."""


def refuse_to_wait():
    raise Waits


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        (Workers(), Workers(), True),
        (Workers(), Workers(1, 2), True),
        (Workers(1, 2), Workers(), True),
        (Workers(1, 2), Workers(1, 2), True),
        (Workers(0, 2), Workers(1, 2), False),
    ],
)
def test_only_workers_of_one_launch_share_a_folder(first, second, waits, tmp_path):
    folder = tmp_path / "new"
    with ExitStack() as stack:
        stack.enter_context(first.locked(folder, refuse_to_wait))
        if waits:
            with pytest.raises(Waits):
                stack.enter_context(second.locked(folder, refuse_to_wait))
        else:
            stack.enter_context(second.locked(folder, refuse_to_wait))
    with second.locked(folder, refuse_to_wait):  # free again
        pass
