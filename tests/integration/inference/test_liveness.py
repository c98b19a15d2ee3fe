"""The heartbeat of a server shows a hanging engine, although its own process still runs (I7)."""

import os
import signal
import threading
import time

import pytest

from prime_rl.liveness.heartbeat_limits import HeartbeatLimits
from prime_rl.liveness.heartbeat_monitor import HeartbeatMonitor, ProcessState
from prime_rl.storage.paths import RunPaths
from tests.integration.inference.conftest import METRIC_TIMEOUT_SECONDS
from tests.support.server import inference_server

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]


def wait_for_state(watch, state, phase="serve", timeout_seconds=METRIC_TIMEOUT_SECONDS):
    tick, end = threading.Event(), time.monotonic() + timeout_seconds
    while time.monotonic() < end:
        verdicts = watch.poll()
        if verdicts and verdicts[0].state is state and verdicts[0].heartbeat.phase == phase:
            return verdicts[0]
        tick.wait(0.25)
    raise AssertionError(f"not {state} but {verdicts}")


def test_server_with_a_stopped_engine_is_stuck_until_the_engine_continues(models, tmp_path):
    paths = RunPaths(tmp_path / "run")
    arguments = ["--output-dir", str(paths.root), "--engine-timeout-seconds", "2"]
    with inference_server(models.base, tmp_path / "server.log", arguments) as server:
        watch = HeartbeatMonitor(paths, HeartbeatLimits(warn_after_seconds=1, dead_after_seconds=60))
        assert wait_for_state(watch, ProcessState.ALIVE).heartbeat.role == "inference"
        (engine,) = server.engine_pids()
        os.kill(engine, signal.SIGSTOP)
        try:
            stuck = wait_for_state(watch, ProcessState.STUCK)
            assert "no progress" in str(stuck) and "'serve'" in str(stuck)
        finally:
            os.kill(engine, signal.SIGCONT)
        wait_for_state(watch, ProcessState.ALIVE)
    assert watch.poll()[0].state is ProcessState.ENDED
