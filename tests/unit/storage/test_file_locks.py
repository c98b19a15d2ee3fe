"""One process of a role in a run directory."""

import asyncio
import errno
import os
import subprocess
import sys
import threading
from contextlib import aclosing
from functools import partial

import pytest

from prime_rl.core.errors import ConfigError, RunError
from prime_rl.storage import file_locks
from prime_rl.storage import wait_for as wait_for_module
from prime_rl.storage.file_locks import check_no_writer, check_run_format, hold_role_lock, hold_run_lock
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.rollback import START_VARIABLE
from prime_rl.storage.wait_for import DeadlineError, wait_for, watch_directory
from tests.support.command import until

PROCESS = """
import sys, time
from pathlib import Path
from prime_rl.storage.file_locks import hold_role_lock
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
def test_second_process_of_a_role_is_refused_until_the_end_of_the_first(tmp_path, monkeypatch, start):
    monkeypatch.delenv(START_VARIABLE, raising=False)
    paths = RunPaths(tmp_path / "run")
    check_no_writer(paths, 0)
    with hold(paths, 600, **{START_VARIABLE: start}) as first:
        refusal = rf"run is in use: process {first.pid} \(.*\) is its trainer; stop it"
        with pytest.raises(RunError, match=refusal):
            hold_role_lock(paths, "trainer", 0)
        with pytest.raises(RunError, match=refusal):
            check_no_writer(paths, 0)
        hold_role_lock(paths, "orchestrator", 0)
        monkeypatch.setenv(START_VARIABLE, "8.0")
        hold_role_lock(paths, "trainer", 0)  # it takes the run over
        monkeypatch.delenv(START_VARIABLE)
        first.kill()
    hold_role_lock(paths, "trainer", 120)
    hold_role_lock(paths, "trainer", 0)  # once more in the same process


def test_run_directory_in_use_or_not_writable_is_refused(tmp_path):
    paths = RunPaths(tmp_path / "run")
    with hold_run_lock(paths), pytest.raises(ConfigError, match=rf"\(process {os.getpid()}\)"), hold_run_lock(paths):
        pass
    with hold_run_lock(paths):
        pass
    (tmp_path / "file").touch()
    below = RunPaths(tmp_path / "file" / "run")
    hold_role_lock(below, "trainer", 0)  # left to other checks
    with pytest.raises(ConfigError, match="cannot be written"), hold_run_lock(below):
        pass
    with pytest.raises(ConfigError, match=r"file is a file; set --output-dir"):
        hold_role_lock(RunPaths(tmp_path / "file"), "trainer")


def test_refused_start_leaves_nothing_behind(tmp_path):
    paths, other = RunPaths(tmp_path / "new" / "run"), RunPaths(tmp_path)
    (tmp_path / "mine").touch()
    for one, error in ((paths, ConfigError), (other, ConfigError), (paths, KeyboardInterrupt)):
        with pytest.raises(error, match="bad"), hold_run_lock(one):
            raise error("bad")
        assert [*tmp_path.rglob("*")] == [tmp_path / "mine"]
    with hold_run_lock(other):
        pass
    with pytest.raises(ConfigError, match="bad"), hold_run_lock(other):
        raise ConfigError("bad")
    assert other.lock.exists(), "of an earlier run"


def test_file_system_without_locks_does_not_prevent_a_run(tmp_path, monkeypatch, capsys):
    def flock(file, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(file_locks.fcntl, "flock", flock)
    with hold_run_lock(RunPaths(tmp_path)):
        check_no_writer(RunPaths(tmp_path), 0)
    assert "cannot be locked (Function not implemented): start one run at a time" in capsys.readouterr().err


def test_wait_for_returns_when_the_path_appears_or_names_it_at_the_deadline(tmp_path):
    target = tmp_path / "later" / "step_0"

    def write():
        until(target.parent.exists, "the start of the wait, which makes it")
        target.mkdir()

    thread = threading.Thread(target=write)
    thread.start()
    wait_for(target, timeout_seconds=120, owner="the test")
    assert target.exists()
    thread.join()
    with pytest.raises(DeadlineError, match=r"step_7, which the trainer \(log x\) should have written"):
        wait_for(tmp_path / "step_7", timeout_seconds=0.01, owner="the trainer (log x)")


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"format": "prime_rl.run/2"}',
            "has format prime_rl.run/2, and this release of prime-rl reads prime_rl.run/1; u",
        ),
        ('{"format": "other/1"}', "has format 'other/1', expected 'prime_rl.run/1'"),
        ("", "cannot be read .*; restore it, or choose another directory"),
    ],
)
def test_run_directory_of_another_format_is_refused_and_an_older_one_accepted(tmp_path, text, message):
    paths = RunPaths(tmp_path)
    paths.format.write_text(text)
    for start in check_run_format, partial(hold_role_lock, role="sft"), lambda paths: hold_run_lock(paths).__enter__():
        with pytest.raises(ConfigError, match=message) as caught:
            start(paths)
        assert "\n" not in str(caught.value)
    assert paths.format.read_text() == text and [file.name for file in tmp_path.iterdir()] == ["format.json"]
    paths.format.write_text('{"format": "prime_rl.run/0"}')
    with hold_run_lock(paths):
        assert "run/0" in paths.format.read_text()
    paths.format.unlink()  # of the first releases
    with hold_run_lock(paths):
        assert not check_run_format(paths), "a start that is refused writes nothing"
    hold_role_lock(paths, "sft")
    assert check_run_format(paths)
