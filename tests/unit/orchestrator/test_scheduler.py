"""I1 bound, I2 nothing wasted: property tests over random durations, drops and publication times."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.orchestrator.scheduler import DeadlineScheduler


def test_worked_example_of_the_docstring():
    scheduler = DeadlineScheduler(batch_groups=2, async_level=1)
    for group in "abcd":
        assert scheduler.admit(ord(group), version=0) == 1
    assert not scheduler.can_admit(0)
    for group in "cd":
        scheduler.complete(ord(group))
    assert scheduler.ready() == [ord("c"), ord("d")]
    scheduler.ship([ord("c"), ord("d")])
    scheduler.admit(ord("e"), version=1)
    scheduler.admit(ord("f"), version=1)
    scheduler.complete(ord("e"))
    scheduler.complete(ord("a"))
    assert scheduler.ready() is None, "e finished before b, but batch 1 is the last that b may join"
    scheduler.complete(ord("b"))
    assert scheduler.ready() == [ord("a"), ord("b")]


def test_synchronous_when_k_is_zero():
    scheduler = DeadlineScheduler(batch_groups=1, async_level=0)
    scheduler.admit(0, version=0)
    assert not scheduler.can_admit(0)
    scheduler.complete(0)
    scheduler.ship([0])
    assert not scheduler.can_admit(0), "batch 1 needs version 1"
    assert scheduler.can_admit(1)


def test_nothing_is_started_that_no_batch_can_take():
    scheduler = DeadlineScheduler(batch_groups=2, async_level=3, max_steps=2)
    for group in range(4):
        scheduler.admit(group, version=0)
    assert not scheduler.can_admit(0)


def test_admitting_against_the_bound_is_an_error():
    scheduler = DeadlineScheduler(batch_groups=1, async_level=0)
    scheduler.admit(0, version=0)
    with pytest.raises(ValueError, match="would break the bound"):
        scheduler.admit(1, version=0)


@settings(max_examples=200, deadline=None)
@given(
    batch_groups=st.integers(1, 4),
    async_level=st.integers(0, 4),
    max_steps=st.integers(1, 12),
    limit=st.integers(1, 24),
    data=st.data(),
)
def test_bound(batch_groups, async_level, max_steps, limit, data):
    """Random completion order, drops and publications: I1, I2, no deadlock, every group ends exactly once."""
    scheduler = DeadlineScheduler(batch_groups, async_level, max_steps)
    version, next_group = 0, 0
    started: dict[int, int] = {}
    running: list[int] = []
    shipped: list[int] = []
    dropped: list[int] = []
    while not scheduler.finished:
        while scheduler.in_flight < limit and scheduler.can_admit(version):
            scheduler.admit(next_group, version)
            started[next_group] = version
            running.append(next_group)
            next_group += 1
        events = ["finish"] * bool(running) + ["drop"] * bool(running and len(dropped) < 20)
        events += ["publish"] * (version < scheduler.next_step)
        assert events, "deadlock: nothing runs and no version can come"
        event = data.draw(st.sampled_from(events))
        if event == "publish":
            version += 1
            continue
        group = running.pop(data.draw(st.integers(0, len(running) - 1)))
        if event == "drop":
            scheduler.drop(group)
            dropped.append(group)
            continue
        scheduler.complete(group)
        while (batch := scheduler.ready()) is not None:
            step = scheduler.next_step
            assert len(batch) == batch_groups
            assert all(step - started[group] <= async_level for group in batch)
            scheduler.ship(batch)
            shipped += batch
    assert len(shipped) == max_steps * batch_groups
    assert sorted(shipped + dropped) == sorted(started), "nothing is left over: no sampled group is wasted"
