"""The staleness bound (I1) without waste (I2): worked examples, and property tests with random durations and faults."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prime_rl.orchestrator.scheduler import DeadlineScheduler

A, B, C, D, E, F = range(6)


def test_worked_example_of_the_docstring():
    """And with the bound above the pace."""
    for bound, deadlines, second in ((1, [1, 1, 2, 2], None), (2, [2, 2, 3, 3], [A, E])):
        scheduler = DeadlineScheduler(batch_groups=2, async_level=1, max_off_policy_steps=bound)
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
        assert [scheduler.deadline(group) for group in (A, B, E, F)] == deadlines
        assert scheduler.ready() == second, "batch 1 waits for b if it is the last that b may join"
        scheduler.complete(B)
        assert scheduler.ready() == [A, B], "the earliest deadlines first"


def test_scheduler_lagging_server_gets_no_groups():
    scheduler = DeadlineScheduler(batch_groups=1, async_level=1, next_step=3, max_off_policy_steps=3, credit=5)
    assert not scheduler.can_admit(1), "deadline 4 would do, but the pace asks for version 2"
    assert scheduler.can_admit(2)


def test_scheduler_transition_that_breaks_the_bound_or_repeats_raises():
    scheduler = DeadlineScheduler(batch_groups=1, async_level=0)
    scheduler.admit(0, version=0)
    with pytest.raises(ValueError, match="group 1 at version 0 would break the bound"):
        scheduler.admit(1, version=0)
    with pytest.raises(ValueError, match="does not fit into the batches"):
        scheduler.restore(1, version=0)
    scheduler = DeadlineScheduler(batch_groups=2, async_level=0)
    scheduler.admit(0, version=0)
    with pytest.raises(ValueError, match="admitted already"):
        scheduler.admit(0, version=0)
    scheduler.complete(0)
    with pytest.raises(ValueError, match="complete already"):
        scheduler.complete(0)
    with pytest.raises(ValueError, match="is complete"):
        scheduler.repin(0, version=0)
    assert scheduler.placed == 1 and scheduler.in_flight == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"async_level": 2, "max_off_policy_steps": 1}, "below async_level"),
        ({"async_level": 0, "max_off_policy_steps": 2, "credit": 1}, "needs async_level >= 1"),
        ({"async_level": 1, "credit": -1}, "below 0"),
    ],
)
def test_scheduler_contradicting_settings_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        DeadlineScheduler(batch_groups=4, **settings)


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
TestFleet.settings = settings(max_examples=40, stateful_step_count=50)
