"""Retries: one after each pause, then no more."""

import asyncio

from prime_rl.core.retries import Retries, growing_pauses


async def test_pause_sleeps_as_planned_or_as_wanted_and_ends_after_the_last(monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    retries = Retries(growing_pauses(0.5, 3))
    assert (await retries.pause(), await retries.pause(7.0), retries.left) == (True, True, 1)
    assert (await retries.pause(), await retries.pause(), retries.left) == (True, False, 0)
    assert slept == [0.5, 7.0, 8.0]
    assert not await Retries(()).pause()
