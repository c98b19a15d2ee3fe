import asyncio
import threading
from contextlib import aclosing

import pytest

from prime_rl.storage import wait_for as wait_for_module
from prime_rl.storage.wait_for import DeadlineError, wait_for, watch_directory
from tests.support.command import until


def test_wait_for_returns_when_the_path_appears(tmp_path):
    target = tmp_path / "later" / "step_0"

    def write():
        until(target.parent.exists, "the start of the wait, which makes it")
        target.mkdir()

    thread = threading.Thread(target=write)
    thread.start()
    wait_for(target, timeout_s=120, owner="the test")
    assert target.exists()
    thread.join()


def test_wait_for_at_the_deadline_names_path_and_owner(tmp_path):
    with pytest.raises(DeadlineError, match=r"step_7, which the trainer \(log x\) should have written"):
        wait_for(tmp_path / "step_7", timeout_s=0.3, owner="the trainer (log x)")


async def test_watch_directory_yields_immediately_and_after_events_until_stopped(tmp_path):
    stop, seen = asyncio.Event(), []
    async for _ in watch_directory(tmp_path / "weights", stop):
        seen.append((tmp_path / "weights" / "step_1").exists())
        if seen[-1]:
            stop.set()
        elif len(seen) == 1:
            (tmp_path / "weights" / "step_1").mkdir()
    assert seen[0] is False
    assert seen[-1] is True


async def test_watch_directory_raises_what_its_thread_raises(tmp_path, monkeypatch):
    def fail(directory, stop):
        raise MemoryError
        yield

    monkeypatch.setattr(wait_for_module, "_ticks", fail)
    with pytest.raises(MemoryError):
        async with asyncio.timeout(60):
            async for _ in watch_directory(tmp_path, asyncio.Event()):
                pass


async def test_abandoned_watch_ends_its_thread(tmp_path):
    earlier = set(threading.enumerate())  # also those of watches that have just been abandoned
    async with aclosing(watch_directory(tmp_path, asyncio.Event())) as changes:
        await anext(changes)
        await anext(changes)
        (watching,) = [each for each in set(threading.enumerate()) - earlier if each.name == "watch_directory"]
    await asyncio.to_thread(watching.join, 60)
    assert not watching.is_alive()
