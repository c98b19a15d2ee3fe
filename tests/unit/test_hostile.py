"""Failing writes, late files and exhausted limits each end in one clear error."""

import asyncio
import errno
import json
import os
import re
import resource
import subprocess
import sys
import threading
from collections import namedtuple
from contextlib import contextmanager, suppress
from unittest.mock import Mock

import numpy as np
import pytest

from prime_rl.core.entry_point import ERROR_FILE, run_main
from prime_rl.core.errors import RunError
from prime_rl.core.os_errors import SystemResourceError, is_system_resource_error, summarize_os_error, wrap_os_errors
from prime_rl.orchestrator.ledger.ledger_records import AppendLog, Dropped
from prime_rl.storage import wait_for as wait
from prime_rl.storage.artifact import (
    ArtifactError,
    IncompleteArtifact,
    is_local,
    publish_artifact,
    read_manifest,
    retry_until_complete,
    visibility_timeout,
)
from prime_rl.storage.batch import read_batch, write_batch
from prime_rl.storage.file_locks import acquire_lock
from prime_rl.storage.wait_for import DeadlineError, wait_for
from tests.unit.storage.test_batch import make_batch

FIELDS = {"branch": 0, "step": 5, "async_level": 2}


@contextmanager
def small_disk(size: int):
    """Refuse to write a file beyond `size` bytes, as a full disk does."""
    earlier = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, earlier[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, earlier)


@contextmanager
def no_more_files():
    """Leave no file descriptor to open."""
    earlier = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(highest)]  # whatever gaps there are
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1, earlier[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, earlier)
        for descriptor in taken:
            os.close(descriptor)


@pytest.fixture(params=[OSError(errno.EMFILE, "Too many open files"), wait.WatchfilesRustInternalError("no instance")])
def no_watcher(request, monkeypatch):
    """The kernel's limits on inotify are reached on machines with many users."""
    monkeypatch.setattr(wait, "watch", Mock(side_effect=request.param))
    monkeypatch.setattr(wait, "_RECHECK_MS", 5)


def test_write_batch_on_full_disk_leaves_no_files_and_raises_one_line(tmp_path):
    with (
        small_disk(4096),
        pytest.raises(SystemResourceError, match=r"cannot write batch .*step_5: File too large.*MiB"),
    ):
        write_batch(tmp_path / "rollouts/step_5", make_batch([[4096]]), FIELDS)
    assert list((tmp_path / "rollouts").iterdir()) == []
    write_batch(tmp_path / "rollouts/step_5", make_batch([[4096]]), FIELDS)


def test_error_without_file_descriptors_names_the_limit(tmp_path):
    write_batch(tmp_path / "step_5", make_batch([[8]]), FIELDS)
    said = r"Too many open files.*may open \d+ files.*ulimit -n"
    with no_more_files(), pytest.raises(SystemResourceError, match=said), wrap_os_errors("read it", tmp_path):
        (tmp_path / "step_5/manifest.json").read_text()


def test_is_system_resource_error_excludes_defects():
    assert not is_system_resource_error(FileNotFoundError(errno.ENOENT, "No such file", "x"))
    for number in (errno.ENOSPC, errno.EROFS, errno.EMFILE, errno.EDQUOT, errno.EIO):
        assert is_system_resource_error(OSError(number, os.strerror(number)))
    assert "free there" in summarize_os_error(OSError(errno.ENOSPC, "No space left on device", "/no/such/place"))


def test_wait_for_without_watcher_finds_the_file(tmp_path, no_watcher):
    later = threading.Timer(0.05, (tmp_path / "step_0").mkdir)
    later.start()
    wait_for(tmp_path / "step_0", 120, "the test")
    with pytest.raises(DeadlineError):
        wait_for(tmp_path / "step_1", 0.02, "the test")
    later.join()


async def test_watch_directory_without_watcher_yields(tmp_path, no_watcher):
    stop, looks = asyncio.Event(), 0
    async with asyncio.timeout(120):
        async for _ in wait.watch_directory(tmp_path, stop):
            looks += 1
            if looks == 3:
                stop.set()
    assert looks >= 3


@pytest.mark.parametrize(
    ("name", "late", "message"),
    [
        ("manifest.json", None, "missing"),
        ("rows.safetensors", None, "missing"),
        ("rows.safetensors", lambda whole: bytes(len(whole)), r"rows\.safetensors is not"),
        ("rows.safetensors", lambda whole: whole[:-4] + bytes([1, 2, 3, 4]), r"rows\.safetensors differs"),
    ],
)
def test_read_batch_whose_file_or_contents_are_visible_late_is_retried(tmp_path, name, late, message):
    """As another machine's cache shows them: not yet, empty, or old."""
    path, errors = tmp_path / "step_5", []
    write_batch(path, make_batch([[8]]), FIELDS)
    whole = (path / name).read_bytes()
    (path / name).unlink()
    if late is not None:
        (path / name).write_bytes(late(whole))

    def read():
        try:
            return read_batch(path, 5)
        except IncompleteArtifact as error:
            errors.append(str(error))
            (path / name).write_bytes(whole)
            raise

    batch, _ = retry_until_complete(read, 120)
    assert batch.loss_tokens == 7
    (error,) = errors
    assert re.search(message, error)


def test_incomplete_artifact_raises_at_the_deadline_and_immediately_on_local_disk(tmp_path):
    publish_artifact(tmp_path / "step_5", lambda d: {"format": "test/1", "n": (d / "a").write_text("abc")})
    (tmp_path / "step_5/a").unlink()
    with pytest.raises(
        ArtifactError, match=r"a is missing; .* still so after 0\.05 s \(fs_consistency_timeout_seconds\)"
    ):
        retry_until_complete(lambda: read_manifest(tmp_path / "step_5", "test/1"), 0.05)
    looks = []
    with pytest.raises(ArtifactError, match="a is missing"):
        retry_until_complete(lambda: looks.append(1) or read_manifest(tmp_path / "step_5", "test/1"), 0)
    assert looks == [1]


def test_visibility_timeout_is_zero_for_local_file_systems(tmp_path, monkeypatch):
    Part = namedtuple("Part", "mountpoint fstype")
    parts = [Part("/", "ext4"), Part(str(tmp_path / "nfs"), "nfs4"), Part(str(tmp_path / "nf"), "xfs")]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: parts)
    is_local.cache_clear()
    try:
        assert visibility_timeout(tmp_path / "nfs/run/step_1") == 60
        assert visibility_timeout(tmp_path / "nfs/run/step_1", 3.0) == 3
        assert visibility_timeout(tmp_path / "run/step_1") == 0
    finally:
        is_local.cache_clear()


def test_acquire_lock_at_the_deadline_names_the_holder(tmp_path):
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-S", "-c", code, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with (tmp_path / "lock").open("w") as file:
            with pytest.raises(DeadlineError, match=rf"waited 0 s for process {holder.pid} .*, which rebuilds weights"):
                acquire_lock(file, 0.05, "rebuilds weights")
            holder.stdin.close()
            holder.wait(120)
            acquire_lock(file, 120, "rebuilds weights")


@pytest.mark.parametrize("value", [-1.0, 0.0, np.nan, np.inf])
def test_validate_batch_with_invalid_temperature_raises(tmp_path, value):
    batch = make_batch([[8]])
    batch.temperature[3] = value
    with pytest.raises(ValueError, match="temperature must be positive"):
        write_batch(tmp_path / "step_5", batch, FIELDS)


def test_run_main_prints_system_error_in_one_line_and_defect_with_traceback(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))

    def refused():
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "run/ledger"))

    with pytest.raises(SystemExit) as exit_:
        run_main(refused)
    (line,) = capsys.readouterr().err.splitlines()
    assert exit_.value.code == 1
    assert line.startswith(f"error: No space left on device: {tmp_path}/run/ledger (")
    assert "MiB free there" in line
    assert json.loads((tmp_path / "error.json").read_text())["message"] in line
    with pytest.raises(FileNotFoundError):
        run_main(lambda: (tmp_path / "missing").read_text())


async def test_ledger_on_full_disk_raises_one_line(tmp_path):
    journal = AppendLog(tmp_path / "ledger/branch_0.jsonl")
    with small_disk(2000):
        for group_id in range(200):
            with suppress(RunError):
                journal.append(Dropped(group_id, "error/x"))
        with pytest.raises(RunError, match=r"branch_0\.jsonl or its pending groups cannot be written: .*too large"):
            await journal.flush()
    with pytest.raises(RunError, match="cannot be written"):
        journal.close()
