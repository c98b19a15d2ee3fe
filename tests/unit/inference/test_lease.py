"""The lease, by a clock that the test moves."""

from collections.abc import Iterator

import pytest

from prime_rl.inference.lease import Lease, LeaseHeldError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Iterator[Clock]:
    yield Clock()


@pytest.fixture
def lease(clock: Clock) -> Lease:
    lease = Lease(30, clock)
    lease.take("first")
    return lease


def test_another_run_is_told_who_holds_it_and_since_when(lease: Lease, clock: Clock) -> None:
    clock.now = 20
    lease.renew("first")
    clock.now = 25
    with pytest.raises(LeaseHeldError, match=r"run first holds this server since 25 s \(last call 5 s ago\)") as told:
        lease.take("second")
    assert told.value.free_in_s == 25
    with pytest.raises(LeaseHeldError):
        lease.take(None)
    assert lease.holder == "first"


def test_expires_after_the_last_call_of_its_holder(lease: Lease, clock: Clock) -> None:
    clock.now = 29
    lease.take("first")
    lease.renew("second")
    clock.now = 59
    assert lease.holder == "first"
    clock.now = 59.1
    assert lease.holder is None
    lease.renew("first")
    assert lease.holder is None, "a renewal does not bring an expired lease back"
    lease.take("second")
    with pytest.raises(LeaseHeldError):
        lease.take("first")


def test_only_its_holder_gives_it_back(lease: Lease) -> None:
    with pytest.raises(LeaseHeldError):
        lease.release("second")
    lease.release("first")
    assert lease.holder is None
    lease.release("anybody")
    lease.take(None)
    assert lease.holder is None
