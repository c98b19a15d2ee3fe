"""I7: a server whose engine hangs says so by its heartbeat, though its own process lives and listens."""

import os
import signal
import threading
import time

import pytest

from prime_rl.run.heartbeat import Limits, State, Watch
from prime_rl.run.paths import RunPaths
from tests.support.server import inference_server

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]


def wait_for_state(watch, state, phase="serve", timeout_s=60):
    tick, end = threading.Event(), time.monotonic() + timeout_s
    while time.monotonic() < end:
        verdicts = watch.look()
        if verdicts and verdicts[0].state is state and verdicts[0].beat.phase == phase:
            return verdicts[0]
        tick.wait(0.25)
    raise AssertionError(f"not {state} but {verdicts}")


def test_an_engine_that_hangs_makes_the_server_stuck_until_it_goes_on(models, tmp_path):
    paths = RunPaths(tmp_path / "run")
    arguments = ["--output-dir", str(paths.root), "--engine-timeout", "2"]
    with inference_server(models.base, tmp_path / "server.log", arguments) as server:
        watch = Watch(paths, Limits(silence_s=1, timeout_s=60))
        assert wait_for_state(watch, State.ALIVE).beat.role == "inference"
        (engine,) = server.engine_pids()
        os.kill(engine, signal.SIGSTOP)
        try:
            stuck = wait_for_state(watch, State.STUCK)
            assert "no progress" in str(stuck) and "'serve'" in str(stuck)
        finally:
            os.kill(engine, signal.SIGCONT)
        wait_for_state(watch, State.ALIVE)
    assert watch.look()[0].state is State.ENDED
