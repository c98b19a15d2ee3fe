"""A start that resumes a run ends what is left of an earlier start (I3)."""

import os
import subprocess
import sys

import pytest

from prime_rl.liveness import heartbeat_writer
from prime_rl.liveness.heartbeat_writer import RunTakeover, take_over
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.rollback import START_VARIABLE
from tests.support.command import PROGRESS_TIMEOUT_SECONDS, until

PROCESS = """
import sys, time
from pathlib import Path
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.storage.paths import RunPaths
with HeartbeatWriter(RunPaths(Path(sys.argv[1])), sys.argv[2], "trainer", 0.05):
    while not Path(sys.argv[1], "go").exists():
        time.sleep(0.05)
"""


@pytest.fixture
def paths(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat_writer, "TAKEOVER_SECONDS", 0)
    return RunPaths(tmp_path)


def test_takeover_ends_processes_of_the_earlier_start_alone(paths, monkeypatch):
    starts = {"trainer_0": "7.0", "trainer_1": "7.1", "trainer_2": ""}
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(paths.root), name],
            env={**os.environ, START_VARIABLE: start},
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, start in starts.items()
    }
    until(lambda: all(paths.heartbeat(name).exists() for name in starts), "the heartbeats")
    monkeypatch.setenv(START_VARIABLE, "7.1")
    take_over(paths)
    _, error = processes["trainer_0"].communicate(timeout=PROGRESS_TIMEOUT_SECONDS)
    (paths.root / "go").touch()
    assert (processes["trainer_0"].returncode, error) == (
        2, f"error: {paths.root} was taken over by start 7.1; this process (start 7.0) exits\n",
    )  # fmt: skip
    assert [processes[name].wait(PROGRESS_TIMEOUT_SECONDS) for name in ("trainer_1", "trainer_2")] == [0, 0]


def test_takeover_before_this_process_or_without_a_name_is_no_concern(paths, monkeypatch):
    """The last resume of an earlier job, whose name is still in the file when the next job begins."""
    monkeypatch.delenv(START_VARIABLE, raising=False)
    take_over(paths)
    assert not paths.owner.exists()
    monkeypatch.setenv(START_VARIABLE, "7.1")
    take_over(paths)
    monkeypatch.setenv(START_VARIABLE, "8.0")
    assert RunTakeover(paths).new_owner() is None
