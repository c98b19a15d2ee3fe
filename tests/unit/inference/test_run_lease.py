"""The lease, with a fake clock."""

from collections.abc import Iterator

import pytest

from prime_rl.inference.policy.run_lease import Lease, LeaseHeldError


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


def test_take_by_another_run_names_the_holder(lease: Lease, clock: Clock) -> None:
    clock.now = 20
    lease.renew("first")
    clock.now = 25
    with pytest.raises(LeaseHeldError, match=r"run first has held this server for 25 s \(last call 5 s ago\)") as error:
        lease.take("second")
    assert error.value.free_in_s == 25
    with pytest.raises(LeaseHeldError):
        lease.take(None)
    assert lease.holder == "first"


def test_lease_expires_after_the_last_call_of_its_holder(lease: Lease, clock: Clock) -> None:
    clock.now = 29
    lease.take("first")
    lease.renew("second")
    clock.now = 59
    assert lease.holder == "first"
    clock.now = 59.1
    assert lease.holder is None
    lease.renew("first")
    assert lease.holder is None, "an expired lease is not renewed"
    lease.take("second")
    with pytest.raises(LeaseHeldError):
        lease.take("first")


def test_release_by_another_run_raises(lease: Lease) -> None:
    with pytest.raises(LeaseHeldError):
        lease.release("second")
    lease.release("first")
    assert lease.holder is None
    lease.release("anybody")
    lease.take(None)
    assert lease.holder is None
