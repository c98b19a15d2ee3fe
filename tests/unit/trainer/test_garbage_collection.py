"""Garbage is collected at multiples of the interval, and at no other time."""

import gc
import weakref

from prime_rl.trainer.memory.garbage_collection import GarbageCollection


class Cycle:
    def __init__(self):
        self.me = self


def test_garbage_is_collected_at_the_interval_only():
    garbage = GarbageCollection(3)
    try:
        alive = []
        for step in range(4, 9):
            watched = weakref.ref(Cycle())
            for _ in range(3000):  # more than the thresholds of automatic collection
                Cycle()
            garbage.step_done(step)
            alive.append(watched() is not None)
        assert alive == [True, False, True, True, False]  # steps 5 and 8 end a third step
        assert not gc.isenabled()
    finally:
        garbage.close()
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_garbage_of_objects_that_survived_a_collection_is_collected_later():
    garbage = GarbageCollection(1)
    try:
        kept = Cycle()
        watched = weakref.ref(kept)
        for step in range(3):
            garbage.step_done(step)
        del kept
        garbage.step_done(3)
        assert watched() is None
    finally:
        garbage.close()
