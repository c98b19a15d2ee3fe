"""`doctor` on a real run names a stopped process; the run continues afterwards."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.rl.conftest import StartCommand, own_server, rl_values
from tests.support.command import PROGRESS_TIMEOUT_SECONDS, Command, clean_environment, executable, metrics_of

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(600)]


def doctor(run: Command) -> tuple[int, dict[str, Any]]:
    command = [executable("doctor"), str(run.paths.root), "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=clean_environment(), timeout=PROGRESS_TIMEOUT_SECONDS
    )
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def environment_worker(run: Command) -> psutil.Process:
    """The youngest of the processes that the orchestrator has forked."""
    return max(run.role("orchestrator").children(recursive=True), key=lambda process: process.create_time())


def test_doctor_names_the_stopped_process(start: StartCommand, tmp_path: Path) -> None:
    # Long limits, so that the run's supervisor does not act before the process continues.
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
            code, report = doctor(run)
            culprits = [problem["culprit"] for problem in report["problems"]]
            assert code == 1, (name, report)
            named = f"{name}{process.pid}" if name.endswith("/") else name
            assert culprits == [named], report["problems"]
            assert f"pid {process.pid}" in report["problems"][0]["text"]
            assert "is stopped (SIGSTOP?)" in report["problems"][0]["text"]
        finally:
            process.send_signal(signal.SIGCONT)
    run.until_step("trainer", len(metrics_of(run.paths, "trainer")) + 2)
    code, report = doctor(run)
    assert (code, report["state"]) == (0, "running"), report["problems"]
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM
    code, report = doctor(run)
    assert (code, report["state"]) == (0, "stopped by a signal"), report["problems"]
