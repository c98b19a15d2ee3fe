"""Tests of daemon futures: neither the event loop nor the exit of the process waits for hanging work."""

import asyncio
import subprocess
import sys
import threading
import weakref
from functools import partial

import pytest

from prime_rl.storage.wait_for import run_in_daemon_thread, start_daemon_future

HANGS = """
import asyncio, threading
from prime_rl.storage.wait_for import run_in_daemon_thread

async def main():
    try:
        async with asyncio.timeout(0.2):
            await run_in_daemon_thread(threading.Event().wait)
    except TimeoutError:
        print("given up", flush=True)

asyncio.run(main())
"""


async def test_run_in_daemon_thread_returns_and_raises_like_the_work():
    assert await run_in_daemon_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await run_in_daemon_thread(divmod, 7, 0)


def test_daemon_future_releases_its_work_before_the_result_is_set():
    """The process may exit as soon as it has the result, and must not do so while a thread frees tensors."""
    go, called, held = threading.Event(), threading.Event(), {"tensor"}
    reference, found = weakref.ref(held), list[object]()

    def look(_):
        found.append(reference())
        called.set()

    future = start_daemon_future(partial(lambda _: go.wait(120), held), "work")
    del held
    future.add_done_callback(look)
    go.set()
    assert future.result(120) and called.wait(120)
    assert found == [None]


async def test_run_in_daemon_thread_cancelled_does_not_stop_the_work():
    go, done = threading.Event(), threading.Event()

    def work():
        assert go.wait(120)
        done.set()

    task = asyncio.create_task(run_in_daemon_thread(work))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    assert await run_in_daemon_thread(done.wait, 120)


def test_process_with_hanging_work_exits():
    """The interpreter would wait for threads of the event loop's executor."""
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=240, check=True)
    assert (ended.stdout, ended.stderr) == ("given up\n", "")
