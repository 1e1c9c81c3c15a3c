"""Full collections do not fall into what is timed, and what is dropped meanwhile is freed."""

from __future__ import annotations

import gc
import weakref

import pytest
from tiny_evaluation import export, make_world, quiet, settings_for

from stree.decoder import Decoder
from stree_pipelines.evaluation.answering import gc_freeze

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def nothing_left_alone():
    """A process of its own freezes what it has imported, as a command does."""
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    yield
    if frozen:
        gc.freeze()


class Round:
    """Garbage as soon as nobody else has it."""

    def __init__(self) -> None:
        self.itself = self


def test_what_there_was_is_left_alone_until_the_end():
    old = Round()
    gone = weakref.ref(old)
    with gc_freeze.left_alone():
        del old
        gc.collect()
        assert gone() is not None
        fresh = weakref.ref(Round())
        gc.collect()
        assert fresh() is None
    gc.collect()
    assert gone() is None and gc.get_freeze_count() == 0


def test_what_is_left_alone_already_stays_so():
    with gc_freeze.left_alone():
        with gc_freeze.left_alone():
            pass
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_what_is_dropped_meanwhile_is_freed():
    old, kept = Round(), Round()
    gone = weakref.ref(old)
    with gc_freeze.left_alone():
        del old
        gc_freeze.collect()
        assert gone() is None and gc.get_freeze_count() > 0 and kept.itself is kept
    gc_freeze.collect()
    assert gc.get_freeze_count() == 0


@pytest.mark.costly
def test_an_evaluation_times_its_answers_so(tmp_path):
    """Timed answers run with collection frozen, warm-ups do not."""
    world = make_world(tmp_path)
    frozen = []

    class Watched(Decoder):
        def generate(self, *arguments, **options):
            frozen.append(gc.get_freeze_count() > 0)
            return super().generate(*arguments, **options)

    settings = settings_for(world, tmp_path / "out", temperatures=(0.0,))
    quiet(settings, make_decoder=Watched).evaluate(export(world, 10))
    assert not frozen[0]
    assert frozen[-1] and gc.get_freeze_count() == 0
