"""Pins and updates: an update waits for pins, new pins wait for it, and both waits end."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from prime_rl.inference.policy.policy_manager import Lease, LeaseHeldError, VersionPins
from tests.unit.inference.test_request_layer import run_tasks


async def _update(pins: VersionPins, events: list[str]) -> None:
    async with pins.update():
        events.append("updated")


async def test_update_waits_for_all_pins_and_new_pins_wait_for_it():
    pins, events = VersionPins(60), list[str]()
    first, second = await pins.acquire(), await pins.acquire()
    assert first in pins
    update = asyncio.create_task(_update(pins, events))
    await run_tasks()
    late = asyncio.create_task(pins.acquire())
    await run_tasks()
    pins.release(first)
    await run_tasks()
    assert not events
    assert not late.done()
    pins.release(second)
    await update
    assert events == ["updated"]
    assert await late in pins
    pins.release("unknown")


async def test_update_after_the_time_limit_removes_the_pins():
    pins, events = VersionPins(0.01), list[str]()
    name = await pins.acquire()
    await _update(pins, events)
    assert events == ["updated"]
    assert name not in pins, "it was for the old version"
    pins.release(name)
    async with asyncio.timeout(60):
        await _update(pins, events)


async def test_pins_above_the_limit_release_the_oldest(monkeypatch):
    monkeypatch.setattr("prime_rl.inference.policy.policy_manager._MAX_PINS", 3)
    pins = VersionPins(60)
    names = [await pins.acquire() for _ in range(5)]
    assert [name in pins for name in names] == [False, False, True, True, True]


@pytest.mark.parametrize(("use", "passes"), [("none", True), ("recent", False), ("active", False)])
async def test_update_waits_for_used_pins_but_not_for_expired_ones(monkeypatch, use, passes):
    now = 0.0
    monkeypatch.setattr("prime_rl.inference.policy.policy_manager.time.monotonic", lambda: now)
    pins, events = VersionPins(60), list[str]()
    pin = await pins.acquire()
    async with AsyncExitStack() as requests:
        if use == "active":
            await requests.enter_async_context(pins.request(pin))
        now = 40
        if use == "recent":
            async with pins.request(pin):
                pass
        now = 61
        update = asyncio.create_task(_update(pins, events))
        await run_tasks()
        assert bool(events) is passes
        update.cancel()


# The lease, with a fake clock


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    yield Clock()


@pytest.fixture
def lease(clock):
    lease = Lease(30, clock)
    lease.take("first")
    return lease


def test_take_by_another_run_names_the_holder(lease, clock):
    clock.now = 20
    lease.renew("first")
    clock.now = 25
    with pytest.raises(LeaseHeldError, match=r"run first has held this server for 25 s \(last call 5 s ago\)") as error:
        lease.take("second")
    assert error.value.free_in_seconds == 25
    with pytest.raises(LeaseHeldError):
        lease.take(None)
    assert lease.holder == "first"


def test_lease_expires_after_the_last_call_of_its_holder(lease, clock):
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


def test_release_by_another_run_raises(lease):
    with pytest.raises(LeaseHeldError):
        lease.release("second")
    lease.release("first")
    assert lease.holder is None
    lease.release("anybody")
    lease.take(None)
    assert lease.holder is None
