"""The waits of the orchestrator end at their deadline, also if its loop wakes without progress (I7)."""

import asyncio
import os
import threading
import time
from types import SimpleNamespace

import pytest

from prime_rl.core.errors import RunError
from prime_rl.liveness.heartbeat_limits import HeartbeatLimits
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.liveness.peer_monitor import PeerLost, PeerMonitor
from prime_rl.orchestrator.asyncio_utils import end_tasks
from prime_rl.orchestrator.health import progress_watchdog
from prime_rl.orchestrator.health.progress_watchdog import (
    INFERENCE,
    SUPERVISOR,
    TRAINER,
    ProgressWatchdog,
    watch_supervisor,
)
from prime_rl.storage.paths import RunPaths


def make_watchdog(tmp_path, timeout_s, raises=True, limit_s=60.0):
    paths = RunPaths(tmp_path)
    heartbeat = HeartbeatWriter(paths, "orchestrator", "orchestrator")
    limits = HeartbeatLimits(limit_s, limit_s)
    peers = {role: PeerMonitor(paths, role, limits, raises, role == INFERENCE) for role in (TRAINER, INFERENCE)}
    return heartbeat, ProgressWatchdog(heartbeat, peers, timeout_s)


async def test_watchdog_wakeups_without_progress_keep_the_deadline(tmp_path):
    heartbeat, watchdog = make_watchdog(tmp_path, timeout_s=0.4)
    wake = asyncio.Event()

    async def wait(progress_token):
        async with asyncio.timeout(60):
            while True:
                wake.clear()
                asyncio.get_running_loop().call_later(0.02, wake.set)
                await watchdog.wait(wake, progress_token, "sample batch 3", INFERENCE, "2 groups in flight")

    begin = time.monotonic()
    with pytest.raises(RunError, match=r"nothing happened for 0 s \(wait_timeout_seconds\); waiting for 2 groups"):
        await wait((3, 1, 0))
    assert time.monotonic() - begin >= 0.4
    assert heartbeat._phase[:3] == ("sample batch 3", 0.4, "inference")
    progress = heartbeat._progress
    with pytest.raises(RunError):
        await wait((3, 1, 1))
    assert heartbeat._progress == progress + 1, "progress is what happened, not how often it was looked"


async def test_watchdog_progress_restarts_the_deadline(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(progress_watchdog, "time", SimpleNamespace(monotonic=lambda: now))
    _, watchdog = make_watchdog(tmp_path, timeout_s=60)
    wake = asyncio.Event()
    for progress_token in range(8):
        now += 50
        wake.clear()
        asyncio.get_running_loop().call_soon(wake.set)
        await watchdog.wait(wake, progress_token, "sample batch 3", INFERENCE, "groups")


async def test_watchdog_server_failing_at_start_ends_the_wait(tmp_path):
    heartbeat, watchdog = make_watchdog(tmp_path, timeout_s=60, limit_s=0.2)
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


async def test_startup_wait_returns_or_raises(tmp_path):
    _, watchdog = make_watchdog(tmp_path, timeout_s=60)
    await watchdog.start(asyncio.sleep(0), INFERENCE)

    async def fails():
        raise RunError("refused")

    with pytest.raises(RunError, match="refused"):
        await watchdog.start(fails(), INFERENCE)


@pytest.mark.parametrize("role", [TRAINER, INFERENCE])
async def test_watchdog_lost_trainer_ends_only_waits_for_it(tmp_path, role):
    _, watchdog = make_watchdog(tmp_path, timeout_s=60 if role == TRAINER else 1.5, limit_s=0.2)
    its = HeartbeatWriter(RunPaths(tmp_path), "trainer_0", "trainer")
    its.start()
    its.close("failed")
    error, words = (
        (PeerLost, f"trainer_0 .pid {os.getpid()} on .* has failed") if role == TRAINER else (RunError, "inf")
    )
    with pytest.raises(error, match=words):
        await watchdog.wait(asyncio.Event(), 0, "wait", role, "inf")


async def test_watchdog_deadline_error_describes_the_trainer(tmp_path):
    _, watchdog = make_watchdog(tmp_path, timeout_s=0.2, raises=False)
    with HeartbeatWriter(RunPaths(tmp_path), "trainer_0", "trainer") as its:
        its.enter("step 3")
        with pytest.raises(RunError, match=r"version 4; trainer_0 \(pid .* is alive; phase"):
            await watchdog.wait(asyncio.Event(), 0, "wait for version 4", TRAINER, "version 4")


async def test_watch_supervisor_silence_is_logged(tmp_path, said):
    paths = RunPaths(tmp_path)
    supervisor = PeerMonitor(paths, SUPERVISOR, HeartbeatLimits(0.5, 1), raises=False)
    with HeartbeatWriter(paths, SUPERVISOR, SUPERVISOR, interval_seconds=1000):  # one beat, and then none
        watching = asyncio.create_task(watch_supervisor(supervisor))
        async with asyncio.timeout(30):
            while not any("has written no heartbeat" in line for line in said()):
                assert not watching.done()
                await asyncio.sleep(0.02)
    await end_tasks(watching)


async def test_watchdog_hanging_file_system_keeps_the_deadline(tmp_path, monkeypatch):
    """Reading heartbeats hangs, as on a network file system without its server."""
    hang = threading.Event()
    monkeypatch.setattr(PeerMonitor, "check", lambda peers: hang.wait(60))
    _, watchdog = make_watchdog(tmp_path, timeout_s=0.4)
    try:
        with pytest.raises(RunError, match="nothing happened"):
            async with asyncio.timeout(20):
                await watchdog.wait(asyncio.Event(), (0,), "sample batch 3", INFERENCE, "groups")
    finally:
        hang.set()


async def test_watchdog_many_wakeups_check_the_peer_a_few_times(tmp_path, monkeypatch):
    _, watchdog = make_watchdog(tmp_path, timeout_s=60)
    checks = []
    monkeypatch.setattr(PeerMonitor, "check", lambda self: checks.append(self))
    now = 100.0
    monkeypatch.setattr(progress_watchdog, "time", SimpleNamespace(monotonic=lambda: now))
    wake = asyncio.Event()
    for turn in range(100):
        now += 0.01
        wake.clear()
        asyncio.get_running_loop().call_soon(wake.set)
        await watchdog.wait(wake, turn, "sample", (INFERENCE, TRAINER)[turn % 2], "a group")
    assert len(checks) == 4, "two of each role in a second"
