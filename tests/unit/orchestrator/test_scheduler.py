"""The staleness bound (I1) without waste (I2): worked examples, and property tests with random durations and faults."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prime_rl.orchestrator.scheduler import DeadlineScheduler

A, B, C, D, E, F = range(6)


def after_the_first_batch(**settings) -> DeadlineScheduler:
    """The docstring's example until e and a are complete: batch 0 = {c, d}, version 1 is published."""
    scheduler = DeadlineScheduler(batch_groups=2, async_level=1, **settings)
    for group in (A, B, C, D):
        scheduler.admit(group, version=0)
    assert not scheduler.can_admit(0)
    scheduler.complete(C)
    scheduler.complete(D)
    assert scheduler.ready() == [C, D]
    scheduler.ship([C, D])
    for group in (E, F):
        scheduler.admit(group, version=1)
    scheduler.complete(E)
    scheduler.complete(A)
    return scheduler


def test_worked_example_of_the_docstring():
    scheduler = after_the_first_batch()
    assert [scheduler.deadline(group) for group in (A, B, E, F)] == [1, 1, 2, 2]
    assert scheduler.ready() is None, "e finished before b, but batch 1 is the last that b may join"
    scheduler.complete(B)
    assert scheduler.ready() == [A, B]


def test_scheduler_worked_example_with_bound_above_pace():
    scheduler = after_the_first_batch(max_off_policy_steps=2)
    assert [scheduler.deadline(group) for group in (A, B, E, F)] == [2, 2, 3, 3]
    assert scheduler.ready() == [A, E], "b may still join batch 2"
    scheduler.ship([A, E])
    scheduler.complete(F)
    assert scheduler.ready() is None
    scheduler.complete(B)
    assert scheduler.ready() == [B, F]


def test_scheduler_bound_above_pace_starts_no_more_groups():
    schedulers = [DeadlineScheduler(batch_groups=3, async_level=1, max_off_policy_steps=m) for m in (1, 4)]
    for group in range(6):
        assert [s.admit(group, 0) for s in schedulers] == [1, 4]
    assert [s.can_admit(0) for s in schedulers] == [False, False]


def test_scheduler_async_level_0_is_synchronous():
    scheduler = DeadlineScheduler(batch_groups=1, async_level=0)
    scheduler.admit(0, version=0)
    assert not scheduler.can_admit(0)
    scheduler.complete(0)
    scheduler.ship([0])
    assert not scheduler.can_admit(0), "batch 1 needs version 1"
    assert scheduler.can_admit(1)


def test_scheduler_starts_no_group_that_no_batch_can_take():
    for extra in ({}, {"max_off_policy_steps": 5}, {"max_off_policy_steps": 5, "credit": 4}):
        scheduler = DeadlineScheduler(batch_groups=2, async_level=3, max_steps=2, **extra)
        for group in range(4):
            scheduler.admit(group, version=0)
        assert not scheduler.can_admit(0)


def test_scheduler_transition_that_breaks_the_bound_raises():
    scheduler = DeadlineScheduler(batch_groups=1, async_level=0)
    scheduler.admit(0, version=0)
    with pytest.raises(ValueError, match="would break the bound"):
        scheduler.admit(1, version=0)
    with pytest.raises(ValueError, match="does not fit into the batches"):
        scheduler.restore(1, version=0)
    with pytest.raises(ValueError, match="below async_level"):
        DeadlineScheduler(batch_groups=1, async_level=2, max_off_policy_steps=1)


def test_scheduler_duplicate_admit_or_complete_raises():
    scheduler = DeadlineScheduler(batch_groups=2, async_level=1)
    scheduler.admit(0, version=0)
    with pytest.raises(ValueError, match="admitted already"):
        scheduler.admit(0, version=0)
    scheduler.complete(0)
    with pytest.raises(ValueError, match="complete already"):
        scheduler.complete(0)
    with pytest.raises(ValueError, match="is complete"):
        scheduler.repin(0, version=0)
    assert scheduler.placed == 1 and scheduler.in_flight == 0


def test_scheduler_lagging_server_gets_no_groups():
    scheduler = DeadlineScheduler(batch_groups=1, async_level=1, next_step=3, max_off_policy_steps=3, credit=5)
    assert not scheduler.can_admit(1), "deadline 4 would do, but the pace asks for version 2"
    assert scheduler.can_admit(2)


def test_scheduler_repinned_group_gets_a_new_deadline():
    scheduler = DeadlineScheduler(batch_groups=2, async_level=1)
    for group in range(4):
        scheduler.admit(group, version=0)
    for group in (0, 1):
        scheduler.complete(group)
    scheduler.ship([0, 1])
    assert scheduler.repin(2, version=1) == 2
    assert (scheduler.version(2), scheduler.version(3)) == (1, 0)
    assert scheduler.admit(4, version=1) == scheduler.admit(5, version=1) == 2
    assert not scheduler.can_repin(5, version=-1), "batch 0 was shipped"


@given(st.data())
def test_scheduler_restored_with_other_settings_keeps_f(data):
    """Groups finished at any versions, with another bound, batch size or number of batches."""
    number = st.integers(0, 4)
    done, level, batch_groups = data.draw(number), data.draw(number), data.draw(st.integers(1, 4))
    batches = data.draw(st.one_of(st.none(), st.integers(done, done + 3)))
    scheduler = DeadlineScheduler(batch_groups, level, batches, next_step=done)
    for group, version in enumerate(data.draw(st.lists(st.integers(0, done), max_size=20))):
        if scheduler.can_restore(version):
            scheduler.restore(group, version)
            assert version + level >= done
    admitted, group = [], 100
    for _ in range(3):
        while scheduler.can_admit(scheduler.next_step):
            scheduler.admit(group, scheduler.next_step)
            scheduler.complete(group)
            group += 1
        if (batch := scheduler.ready()) is None:
            break
        assert all(scheduler.next_step - scheduler.version(one) <= level for one in batch)
        scheduler.ship(batch)
        admitted.append(batch)
    assert len(admitted) == (3 if batches is None else min(3, batches - done))


def test_scheduler_restored_groups_keep_their_deadlines():
    scheduler = DeadlineScheduler(batch_groups=2, async_level=2, next_step=4)
    scheduler.restore(11, version=2)
    scheduler.restore(13, version=4)
    scheduler.admit(12, version=4)
    assert scheduler.deadline(11) == 4 and scheduler.version(13) == 4
    assert scheduler.ready() == [11, 13]


def test_scheduler_credit_exceeds_the_pace_but_not_the_bound():
    scheduler = DeadlineScheduler(batch_groups=4, async_level=1, max_off_policy_steps=2, credit=100)
    for group in range(12):
        scheduler.admit(group, version=0)
    assert not scheduler.can_admit(0), "three batches, 0 to 2, may hold version 0"
    scheduler = DeadlineScheduler(batch_groups=4, async_level=1, max_off_policy_steps=2, credit=2)
    for group in range(10):
        scheduler.admit(group, version=0)
    assert not scheduler.can_admit(0)
    scheduler.credit = 3
    assert scheduler.can_admit(0)


def test_scheduler_credit_at_async_level_0_raises():
    with pytest.raises(ValueError, match="needs async_level >= 1"):
        DeadlineScheduler(batch_groups=4, async_level=0, max_off_policy_steps=2, credit=1)
    with pytest.raises(ValueError, match="below 0"):
        DeadlineScheduler(batch_groups=4, async_level=1, credit=-1)


class Fleet(RuleBasedStateMachine):
    """Servers at different versions, a trainer, an orchestrator that may restart: events in any order.

    The model keeps plain lists and recomputes every condition from the definition.
    """

    @initialize(
        batch_groups=st.integers(1, 4),
        async_level=st.integers(0, 3),
        slack=st.integers(0, 3),
        max_steps=st.integers(1, 10),
        servers=st.integers(1, 3),
    )
    def begin(self, batch_groups, async_level, slack, max_steps, servers):
        self.pace, self.bound = async_level, async_level + slack
        self.batch_groups, self.max_steps = batch_groups, max_steps
        self.credit = 0
        self.scheduler = self.new_scheduler(0)
        self.trained = 0
        self.servers = [0] * servers
        self.next_group = 0
        self.again: list[int] = []  # lost by a restart, to be started before any other
        self.running: dict[int, int] = {}  # group -> oldest version of its tokens
        self.complete: dict[int, int] = {}
        self.shipped: list[int] = []
        self.dropped: list[int] = []

    def new_scheduler(self, next_step):
        bound = None if self.bound == self.pace else self.bound
        return DeadlineScheduler(self.batch_groups, self.pace, self.max_steps, next_step, bound, self.credit)

    def unshipped(self):
        return {**self.running, **self.complete}

    def room(self, e, n):
        return (min(e, self.max_steps - 1) - n + 1) * self.batch_groups

    def admissible(self, version):
        """The two conditions of the docstring."""
        n, ages = self.scheduler.next_step, list(self.unshipped().values())
        horizon = range(n, n + 40)
        pace = all(
            sum(age <= e - self.pace for age in ages) + 1 <= self.room(e, n) + self.credit
            for e in horizon
            if e >= version + self.pace and n < self.max_steps
        )
        fits = all(
            sum(age + self.bound <= e for age in ages) + 1 <= self.room(e, n)
            for e in horizon
            if e >= version + self.bound
        )
        return version + self.pace >= n and pace and fits

    @rule(data=st.data(), count=st.integers(1, 8))
    def start(self, data, count):
        version = self.servers[data.draw(st.integers(0, len(self.servers) - 1))]
        for _ in range(count):
            if not self.scheduler.can_admit(version):
                return
            group = self.again.pop(0) if self.again else self.next_group
            self.next_group = max(self.next_group, group + 1)
            assert self.scheduler.admit(group, version) == version + self.bound
            self.running[group] = version

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 6))
    def finish(self, data, count):
        for _ in range(min(count, len(self.running))):
            group = data.draw(st.sampled_from(sorted(self.running)))
            self.scheduler.complete(group)
            self.complete[group] = self.running.pop(group)

    @precondition(lambda self: self.running or self.complete)
    @rule(data=st.data())
    def drop(self, data):
        group = data.draw(st.sampled_from(sorted(self.unshipped())))
        self.scheduler.drop(group)
        self.running.pop(group, None)
        self.complete.pop(group, None)
        self.dropped.append(group)

    @rule()
    def ship(self):
        batch = self.scheduler.ready()
        if batch is None:
            return
        step = self.scheduler.next_step
        assert len(set(batch)) == self.batch_groups and set(batch) <= set(self.complete)
        assert all(step - self.complete[group] <= self.bound for group in batch), "I1"
        self.scheduler.ship(batch)
        for group in batch:
            del self.complete[group]
        self.shipped += batch

    @rule()
    def train(self):
        self.trained = min(self.trained + 1, self.scheduler.next_step)

    @rule(data=st.data())
    def switch(self, data):
        self.servers[data.draw(st.integers(0, len(self.servers) - 1))] = self.trained

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def lose_a_server(self, data):
        """Some groups start again at another server, newer or older."""
        for group in data.draw(st.lists(st.sampled_from(sorted(self.running)), unique=True)):
            version = data.draw(st.sampled_from(self.servers))
            if self.scheduler.can_repin(group, version):
                assert self.scheduler.repin(group, version) == version + self.bound
                self.running[group] = version
            else:
                assert version < self.running[group], "a newer server can always take it"

    @rule()
    def restart(self):
        """The orchestrator restarts: finished groups are restored, groups in flight start again."""
        old, self.scheduler = self.scheduler, self.new_scheduler(self.scheduler.next_step)
        for group in self.complete:
            self.scheduler.restore(group, old.version(group))
        self.again = sorted([*self.again, *self.running])
        self.running = {}

    @rule(credit=st.integers(0, 6))
    def expect_drops(self, credit):
        if self.pace:
            self.credit = self.scheduler.credit = credit

    @invariant()
    def keeps_f(self):
        n, ages = self.scheduler.next_step, self.unshipped().values()
        for e in range(n, n + 40):
            assert sum(age + self.bound <= e for age in ages) <= self.room(e, n)

    @invariant()
    def agrees_with_the_definition(self):
        for version in range(self.trained + 1):
            assert self.scheduler.can_admit(version) == self.admissible(version)
        assert self.scheduler.in_flight == len(self.running)
        assert self.scheduler.placed == len(self.shipped) + len(self.unshipped())

    def teardown(self):
        """Without further faults, every batch ships, and every group ends exactly once (I2)."""
        if not hasattr(self, "scheduler"):
            return
        while not self.scheduler.finished:
            before = self.scheduler.next_step
            self.trained = before
            self.servers = [self.trained] * len(self.servers)
            while self.scheduler.can_admit(self.trained):
                group = self.again.pop(0) if self.again else self.next_group
                self.next_group = max(self.next_group, group + 1)
                self.scheduler.admit(group, self.trained)
                self.running[group] = self.trained
            for group in list(self.running):
                self.scheduler.complete(group)
                self.complete[group] = self.running.pop(group)
            self.ship()
            assert self.scheduler.next_step == before + 1, "deadlock"
        assert not self.unshipped(), "I2: started, and no batch took it"
        assert len(self.shipped) == self.max_steps * self.batch_groups
        assert not self.again, "I3: lost"
        assert sorted(self.shipped + self.dropped) == list(range(self.next_group)), "every group ends exactly once"


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=75, stateful_step_count=60, deadline=None)


@settings(max_examples=100, deadline=None)
@given(
    batch_groups=st.integers(1, 4),
    async_level=st.integers(0, 3),
    slack=st.integers(0, 2),
    max_steps=st.integers(1, 12),
    limit=st.integers(1, 24),
    data=st.data(),
)
def test_scheduler_any_finish_order_has_no_deadlock(batch_groups, async_level, slack, max_steps, limit, data):
    """One server, random completions, drops and weight updates, admission up to `limit`."""
    scheduler = DeadlineScheduler(batch_groups, async_level, max_steps, max_off_policy_steps=async_level + slack)
    version, next_group, drops = 0, 0, 0
    started: dict[int, int] = {}
    running: list[int] = []
    while not scheduler.finished:
        while scheduler.in_flight < limit and scheduler.can_admit(version):
            scheduler.admit(next_group, version)
            started[next_group] = version
            running.append(next_group)
            next_group += 1
        events = ["finish"] * bool(running) + ["drop"] * bool(running and drops < 20)
        events += ["publish"] * (version < scheduler.next_step)
        assert events, "deadlock: nothing runs and no version can come"
        event = data.draw(st.sampled_from(events))
        if event == "publish":
            version += 1
            continue
        group = running.pop(data.draw(st.integers(0, len(running) - 1)))
        if event == "drop":
            scheduler.drop(group)
            drops += 1
            continue
        scheduler.complete(group)
        while (batch := scheduler.ready()) is not None:
            assert all(scheduler.next_step - started[group] <= async_level + slack for group in batch)
            scheduler.ship(batch)
    assert max_steps * batch_groups + drops == len(started), "no sampled group is wasted"


@settings(max_examples=100, deadline=None)
@given(
    batch_groups=st.integers(1, 4),
    async_level=st.integers(0, 3),
    max_steps=st.integers(1, 8),
    done=st.integers(0, 7),
    data=st.data(),
)
def test_scheduler_after_rollback_all_in_flight_groups_can_start(batch_groups, async_level, max_steps, done, data):
    """At checkpoint N with version N: finished groups keep their deadlines, all others fit at once."""
    assume(done < max_steps)
    scheduler = DeadlineScheduler(batch_groups, async_level, max_steps)
    version, next_group, complete, in_flight = 0, 0, set(), []
    while scheduler.next_step < done:
        while scheduler.can_admit(version):
            scheduler.admit(next_group, version)
            in_flight.append(next_group)
            next_group += 1
        for _ in range(min(len(in_flight), data.draw(st.integers(1, max(1, len(in_flight)))))):
            complete.add(in_flight[0])
            scheduler.complete(in_flight.pop(0))
        while scheduler.next_step < done and (batch := scheduler.ready()) is not None:
            scheduler.ship(batch)
            complete -= set(batch)
        version = data.draw(st.integers(version, scheduler.next_step))
    resumed = DeadlineScheduler(batch_groups, async_level, max_steps, next_step=done)
    for group in sorted(complete):
        resumed.restore(group, scheduler.version(group))
    for group in in_flight:
        assert resumed.can_admit(done)
        assert resumed.admit(group, done) == done + async_level
