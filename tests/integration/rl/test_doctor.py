"""`doctor` beside a real run: whichever process is stopped, it is named; and all go on as if nothing had been."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.rl.conftest import StartCommand, own_server, rl_values
from tests.support.command import Command, clean_environment, executable, metrics_of

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(600)]


def doctor(run: Command) -> tuple[int, dict[str, Any]]:
    command = [executable("doctor"), str(run.paths.root), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), timeout=60)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def environment_worker(run: Command) -> psutil.Process:
    """The youngest of the processes that the orchestrator has forked."""
    return max(run.role("orchestrator").children(recursive=True), key=lambda process: process.create_time())


def test_whoever_is_stopped_is_named(start: StartCommand, tmp_path: Path) -> None:
    # So patient that the run's own supervisor does not act before it goes on.
    values = rl_values(tmp_path / "run", inference=own_server(), heartbeat={"silence": 300, "timeout": 300})
    run = start("rl", values, tmp_path / "run")
    run.until_step("trainer", 1)
    assert doctor(run)[0] == 0
    victims = {
        "trainer_0": run.ranks()[0],
        "orchestrator": run.role("orchestrator"),
        "inference": run.role("inference"),
        "rl": psutil.Process(run.process.pid),
        "inference/": run.engines()[0],
        "orchestrator/": environment_worker(run),
        "trainer": run.role("trainer"),
    }
    for name, process in victims.items():
        process.send_signal(signal.SIGSTOP)
        try:
            code, told = doctor(run)
            culprits = [problem["culprit"] for problem in told["problems"]]
            assert code == 1, (name, told)
            named = f"{name}{process.pid}" if name.endswith("/") else name
            assert culprits == [named], told["problems"]
            assert f"pid {process.pid}" in told["problems"][0]["text"]
            assert "is stopped (SIGSTOP?)" in told["problems"][0]["text"]
        finally:
            process.send_signal(signal.SIGCONT)
    run.until_step("trainer", len(metrics_of(run.paths, "trainer")) + 2)
    code, told = doctor(run)
    assert (code, told["state"]) == (0, "running"), told["problems"]
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM
    code, told = doctor(run)
    assert (code, told["state"]) == (0, "stopped by a signal"), told["problems"]
