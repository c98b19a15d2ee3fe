"""The waits of the orchestrator end at their deadline, also if its loop wakes without progress (I7)."""

import asyncio
import os
import threading
import time

import pytest

from prime_rl.core.errors import RunError
from prime_rl.liveness.heartbeat_limits import HeartbeatLimits
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.liveness.peer_monitor import PeerLost, PeerMonitor
from prime_rl.orchestrator import waits
from prime_rl.orchestrator.waits import (
    INFERENCE,
    SUPERVISOR,
    TRAINER,
    ProgressWatchdog,
    end_tasks,
    watch_supervisor,
)
from prime_rl.storage.paths import RunPaths
from tests.support.virtual_clock import virtual_clock

ROLES = (TRAINER, INFERENCE)


def make_watchdog(tmp_path, timeout_seconds, raises=True, limit_seconds=60.0):
    paths = RunPaths(tmp_path)
    heartbeat = HeartbeatWriter(paths, "orchestrator", "orchestrator")
    limits = HeartbeatLimits(limit_seconds, limit_seconds)
    peers = {
        role: PeerMonitor(paths, role, limits, raises, role == INFERENCE, clock=time.monotonic)
        for role in (TRAINER, INFERENCE)
    }
    return heartbeat, ProgressWatchdog(heartbeat, peers, timeout_seconds)


@virtual_clock
async def test_watchdog_wakeups_without_progress_keep_the_deadline(tmp_path):
    heartbeat, watchdog = make_watchdog(tmp_path, timeout_seconds=0.4)
    wake = asyncio.Event()

    async def wait(progress_token):
        while True:
            wake.clear()
            asyncio.get_running_loop().call_later(0.02, wake.set)
            await watchdog.wait(wake, progress_token, "sample batch 3", INFERENCE, "2 groups in flight")

    begin = time.monotonic()
    with pytest.raises(RunError, match=r"nothing happened for 0 s \(wait_timeout_seconds\); waiting for 2 groups"):
        await wait((3, 1, 0))
    assert time.monotonic() - begin == pytest.approx(0.4)
    assert heartbeat._phase[:3] == ("sample batch 3", 0.4, "inference")
    progress = heartbeat._progress
    with pytest.raises(RunError):
        await wait((3, 1, 1))
    assert heartbeat._progress == progress + 1, "progress is what happened, not how often it was looked"


@virtual_clock
async def test_watchdog_progress_restarts_the_deadline(tmp_path):
    _, watchdog = make_watchdog(tmp_path, timeout_seconds=60)
    wake = asyncio.Event()
    for progress_token in range(8):
        await asyncio.sleep(50)
        wake.clear()
        asyncio.get_running_loop().call_soon(wake.set)
        await watchdog.wait(wake, progress_token, "sample batch 3", INFERENCE, "groups")


@virtual_clock
async def test_watchdog_server_failing_at_start_ends_the_wait(tmp_path):
    heartbeat, watchdog = make_watchdog(tmp_path, timeout_seconds=60, limit_seconds=0.2)
    its = HeartbeatWriter(RunPaths(tmp_path), "inference_node_8000", "inference")
    its.start()
    its.close("failed")
    ended = asyncio.Event()

    async def work():
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    with pytest.raises(PeerLost, match=r"inference_node_8000 .* has failed"):
        await watchdog.start(work(), INFERENCE)
    assert ended.is_set()
    assert heartbeat._phase[:3] == ("wait for inference", None, "inference")


@pytest.mark.parametrize("role", ROLES)
@virtual_clock
async def test_watchdog_lost_trainer_ends_only_waits_for_it(tmp_path, role):
    _, watchdog = make_watchdog(tmp_path, timeout_seconds=60 if role == TRAINER else 1.5, limit_seconds=0.2)
    its = HeartbeatWriter(RunPaths(tmp_path), "trainer_0", "trainer")
    its.start()
    its.close("failed")
    error, words = (
        (PeerLost, f"trainer_0 .pid {os.getpid()} on .* has failed") if role == TRAINER else (RunError, "inf")
    )
    with pytest.raises(error, match=words):
        await watchdog.wait(asyncio.Event(), 0, "wait", role, "inf")


@virtual_clock
async def test_watchdog_deadline_error_describes_the_trainer(tmp_path):
    _, watchdog = make_watchdog(tmp_path, timeout_seconds=0.2, raises=False)
    with HeartbeatWriter(RunPaths(tmp_path), "trainer_0", "trainer") as its:
        its.enter("step 3")
        with pytest.raises(RunError, match=r"version 4; trainer_0 \(pid .* is alive; phase"):
            await watchdog.wait(asyncio.Event(), 0, "wait for version 4", TRAINER, "version 4")


@virtual_clock
async def test_watch_supervisor_silence_is_logged(tmp_path, said):
    paths = RunPaths(tmp_path)
    supervisor = PeerMonitor(paths, SUPERVISOR, HeartbeatLimits(0.5, 1), raises=False, clock=time.monotonic)
    with HeartbeatWriter(paths, SUPERVISOR, SUPERVISOR, interval_seconds=1000):  # one beat, and then none
        watching = asyncio.create_task(watch_supervisor(supervisor))
        await asyncio.sleep(5)
    assert any("has written no heartbeat" in line for line in said())
    await end_tasks(watching)


@virtual_clock
async def test_watchdog_hanging_file_system_keeps_the_deadline(tmp_path, monkeypatch):
    """Reading heartbeats hangs, as on a network file system without its server."""
    hang = threading.Event()
    monkeypatch.setattr(waits, "_CHECK_INTERVAL_SECONDS", 0.1)
    monkeypatch.setattr(PeerMonitor, "check", lambda peers: hang.wait(60))
    _, watchdog = make_watchdog(tmp_path, timeout_seconds=0.4)
    try:
        with pytest.raises(RunError, match="nothing happened"):
            await watchdog.wait(asyncio.Event(), (0,), "sample batch 3", INFERENCE, "groups")
    finally:
        hang.set()
