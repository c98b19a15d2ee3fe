"""The timeline: every finished phase is on disk, and a disk that fails or hangs stops nothing."""

import errno
import itertools
import json
import os
import queue
import resource
import signal
import threading
import time

import pytest

from prime_rl.liveness import timeline_writer
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter, record_interrupted_phases
from prime_rl.liveness.timeline_writer import TimelineWriter
from prime_rl.storage.paths import RunPaths

KEYS = ["name", "start", "end", "waiting_for", "step", "version"]


def read(paths, name="trainer_0"):
    return [json.loads(line) for line in paths.timeline(name).read_text().splitlines()]


def make(tmp_path, **settings):
    return TimelineWriter(RunPaths(tmp_path), "trainer_0", interval_seconds=0.001, **settings)


def test_add_writes_one_line_per_phase_in_order(tmp_path):
    make(tmp_path).close()
    assert not RunPaths(tmp_path).timeline_dir.exists(), "no phases, no file"
    writer = make(tmp_path)
    writer.add("below a millisecond, and so left out", 1.0, 1.0009)
    writer.add("step", 1.0, 2.5, step=3)
    writer.add("wait for batch", 2.5, 4.0, waiting_for="orchestrator", step=4)
    writer.add("swap", 4.0, 5.0, version=5, busy=0.5)
    with pytest.raises(KeyError), writer.phase("raises", version=2):
        time.sleep(0.002)
        raise KeyError
    writer.close()
    lines = read(RunPaths(tmp_path))
    assert [list(line) for line in lines] == [KEYS, KEYS, [*KEYS, "busy"], KEYS]
    assert (lines[3]["name"], lines[3]["version"]) == ("raises", 2)
    assert [tuple(line.values())[:6] for line in lines[:3]] == [
        ("step", 1.0, 2.5, None, 3, None),
        ("wait for batch", 2.5, 4.0, "orchestrator", 4, None),
        ("swap", 4.0, 5.0, None, None, 5),
    ]


def test_hanging_disk_drops_and_counts_phases_and_blocks_nobody(tmp_path, monkeypatch):
    original, entered, release = timeline_writer._append, threading.Event(), threading.Event()

    def append(*arguments):
        entered.set()
        release.wait()
        original(*arguments)

    monkeypatch.setattr(timeline_writer, "_append", append)
    writer = make(tmp_path, max_queued=3)
    writer.add("in the write that hangs", 0, 1)
    entered.wait()
    for number in range(10):
        writer.add(f"phase {number}", number, number + 1)
    writer.close(timeout_seconds=0)
    assert writer.num_dropped == 7
    release.set()
    writer._thread.join()
    assert [line["name"] for line in read(RunPaths(tmp_path))] == [
        "in the write that hangs", "dropped", "phase 0", "phase 1", "phase 2",
    ]  # fmt: skip
    assert read(RunPaths(tmp_path))[1] == dict.fromkeys(KEYS) | {"name": "dropped", "start": 3, "end": 10, "count": 7}


def test_full_disk_drops_counts_and_warns_once_then_continues(tmp_path, monkeypatch, said):
    original, failures, entered, go_on = timeline_writer._append, iter(range(2)), queue.Queue(), queue.Queue()

    def append(path, data, max_bytes):
        if next(failures, None) is not None:
            entered.put(None)
            go_on.get(timeout=120)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        original(path, data, max_bytes)

    monkeypatch.setattr(timeline_writer, "_append", append)
    writer = make(tmp_path)
    writer.add("lost", 0, 1)
    for phase in (("lost", 1, 2), ("written", 5, 6)):
        entered.get(timeout=120)
        writer.add(*phase)  # before the write fails: it is part of the next one
        go_on.put(None)
    writer.close()
    lines = read(RunPaths(tmp_path))
    assert [line["name"] for line in lines] == ["dropped", "written"]
    assert (lines[0]["count"], lines[0]["start"], lines[0]["end"]) == (2, 0, 2)
    assert sum("timeline: phases are not recorded: No space left on device" in line for line in said()) == 1


def test_partial_write_on_a_full_disk_leaves_no_partial_line(tmp_path):
    path = tmp_path / "trainer_0.jsonl"
    timeline_writer._append(path, b'{"name": "a"}\n', 1000)
    with pytest.raises(OSError, match="File too large"):
        _append_with_limit(path, b'{"name": "b"}\n' * 50, limit=100)
    assert path.read_bytes() == b'{"name": "a"}\n'


def _append_with_limit(path, data, limit):
    """Append while the kernel refuses files above `limit` bytes, after it has accepted a part."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        timeline_writer._append(path, data, 10**6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("torn", [b'{"name": "torn', b'{"name": "' + b"x" * 10_000])
def test_incomplete_last_line_of_a_killed_process_is_removed(tmp_path, torn):
    path = RunPaths(tmp_path).timeline("trainer_0")
    path.parent.mkdir()
    path.write_bytes(b'{"name": "whole"}\n' + torn)
    writer = make(tmp_path)
    writer.add("next", 1, 2)
    writer.close()
    assert [line["name"] for line in read(RunPaths(tmp_path))] == ["whole", "next"]


def test_file_at_its_limit_is_renamed_once(tmp_path):
    path = tmp_path / "trainer_0.jsonl"
    for number in range(4):
        timeline_writer._append(path, b"%d" % number * 39 + b"\n", 100)
    assert path.read_bytes() == b"2" * 39 + b"\n" + b"3" * 39 + b"\n"
    assert path.with_name("trainer_0.jsonl.1").read_bytes() == b"0" * 39 + b"\n" + b"1" * 39 + b"\n"


def test_heartbeat_writes_each_phase_at_its_end(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("prime_rl.liveness.heartbeat_writer.time.time", lambda: now[0])
    paths = RunPaths(tmp_path)
    heartbeat = HeartbeatWriter(paths, "trainer_0", "trainer", interval_seconds=0.01)
    phases = [
        ("wait for batch 7", {"deadline_seconds": 60.0, "waiting_for": "orchestrator", "step": 7}),
        ("step 7", {"step": 7}),
        ("publish version 8", {"step": 7, "version": 8}),
    ]
    with heartbeat:
        for phase, settings in phases:
            now[0] += 1
            heartbeat.enter(phase, **settings)
            heartbeat.enter(phase, settings.get("deadline_seconds"), settings.get("waiting_for"))  # no effect
        now[0] += 1
    assert [tuple(line.values()) for line in read(paths)] == [
        ("start", 100, 101, None, None, None),
        ("wait for batch", 101, 102, "orchestrator", 7, None),
        ("step", 102, 103, None, 7, None),
        ("publish version", 103, 104, None, 7, 8),
    ]


def test_interrupting_phase_splits_the_present_one_and_the_parts_have_files_of_their_own(tmp_path):
    paths = RunPaths(tmp_path)
    with HeartbeatWriter(paths, "inference", "inference", interval_seconds=0.001) as writer:
        writer.enter("serve", version=0)
        time.sleep(0.01)
        start = time.time()
        time.sleep(0.002)
        writer.interrupt("pause", start, 1)
        time.sleep(0.002)
        writer.part("updates").add("stage", start - 1, start, version=1)
    phases = [(line["name"], line["version"]) for line in read(paths, "inference") if line["name"] != "start"]
    assert phases == [("serve", 0), ("pause", 1), ("serve", 1)]
    lines = [line for line in read(paths, "inference") if line["name"] != "start"]
    for before, after in itertools.pairwise(lines):
        assert before["end"] == after["start"], "a lane neither overlaps itself nor has gaps"
    assert [line["name"] for line in read(paths, "inference_updates")] == ["stage"]


def test_phase_in_which_a_process_was_killed_is_added_once_by_the_next_start(tmp_path):
    paths = RunPaths(tmp_path)
    killed = HeartbeatWriter(paths, "trainer_0", "trainer")
    killed.enter("wait for batch 7", waiting_for="orchestrator")
    time.sleep(0.01)
    killed._write()
    record_interrupted_phases(paths)
    assert not paths.timeline_dir.exists(), "a cleared directory begins without phases"
    for _ in range(2):
        with HeartbeatWriter(paths, "trainer_0", "trainer", interval_seconds=0.001):
            pass
        record_interrupted_phases(paths)
    first, *others = read(paths)
    assert (first["name"], first["waiting_for"]) == ("wait for batch", "orchestrator") and first["end"] > first["start"]
    assert "wait for batch" not in [line["name"] for line in others], "the second one has ended"
    killed._write()
    record_interrupted_phases(paths)
    assert read(paths)[-1]["name"] == "wait for batch", "before a start of the whole run"
