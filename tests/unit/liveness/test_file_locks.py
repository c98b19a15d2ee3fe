"""One process of a role in a run directory."""

import errno
import os
import subprocess
import sys

import pytest

from prime_rl.core.errors import RunError
from prime_rl.liveness import file_locks
from prime_rl.liveness.file_locks import check_no_writer, hold_role_lock, hold_run_lock
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.rollback import START_VARIABLE

PROCESS = """
import sys, time
from pathlib import Path
from prime_rl.liveness.file_locks import hold_role_lock
from prime_rl.storage.paths import RunPaths
hold_role_lock(RunPaths(Path(sys.argv[1])), "trainer")
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


def hold(paths, seconds, **variables):
    command = [sys.executable, "-c", PROCESS, str(paths.root), str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | variables)
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("start", ["", "7.0"])
def test_second_process_of_a_role_is_refused(tmp_path, monkeypatch, start):
    monkeypatch.delenv(START_VARIABLE, raising=False)
    paths = RunPaths(tmp_path / "run")
    first = hold(paths, 600, **{START_VARIABLE: start})
    try:
        with pytest.raises(RunError, match=rf"run is in use: process {first.pid} \(.*\) is its trainer; stop it"):
            hold_role_lock(paths, "trainer", 0)
        hold_role_lock(paths, "orchestrator", 0)
        monkeypatch.setenv(START_VARIABLE, "8.0")
        hold_role_lock(paths, "trainer", 0)  # it takes the run over
    finally:
        first.kill()
        first.wait()


def test_lock_is_free_after_the_end_of_its_process(tmp_path, monkeypatch):
    monkeypatch.delenv(START_VARIABLE, raising=False)
    paths = RunPaths(tmp_path)
    with hold(paths, 0.2):
        hold_role_lock(paths, "trainer", 120)
    hold_role_lock(paths, "trainer", 0)  # once more in the same process


def test_directory_that_cannot_be_written_is_left_to_other_checks(tmp_path):
    (tmp_path / "file").touch()
    hold_role_lock(RunPaths(tmp_path / "file" / "run"), "trainer", 0)


def test_directory_that_a_process_writes_is_refused(tmp_path):
    paths = RunPaths(tmp_path / "run")
    check_no_writer(paths, 0)
    with hold(paths, 600) as trainer:
        with pytest.raises(RunError, match=rf"is in use: process {trainer.pid} \(.*\) is its trainer; stop it"):
            check_no_writer(paths, 0)
        trainer.kill()
    check_no_writer(paths, 120)
    hold_role_lock(paths, "trainer", 0)  # the check has released it


def test_file_system_without_locks_does_not_prevent_a_run(tmp_path, monkeypatch, capsys):
    def flock(file, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(file_locks.fcntl, "flock", flock)
    with hold_run_lock(RunPaths(tmp_path)):
        check_no_writer(RunPaths(tmp_path), 0)
    assert "cannot be locked (Function not implemented): start one run at a time" in capsys.readouterr().err
