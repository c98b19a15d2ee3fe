"""Heartbeats distinguish living processes from dead and stuck ones (I7)."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, replace

import pytest

from prime_rl.liveness import heartbeat_writer
from prime_rl.liveness.heartbeat_limits import HeartbeatLimits
from prime_rl.liveness.heartbeat_monitor import (
    FORMAT,
    HeartbeatMonitor,
    HeartbeatRecord,
    KernelState,
    LivenessTracker,
    ProcessState,
    read_heartbeat,
    read_heartbeats,
    read_kernel_state,
)
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.storage.paths import RunPaths

LIMITS = HeartbeatLimits(warn_after_seconds=5, dead_after_seconds=60)
BEAT = HeartbeatRecord(
    "trainer_0", "trainer", 12, "node7", "boot", 99, 1, "step 3", 7, None, 0.0, None, "/x/t.log", 0.0
)


def observe_all(tracker, beats, life=KernelState.UNKNOWN, start=0.0):
    """Give a tracker one heartbeat per second; return the last report and the clock."""
    now = start
    for now, beat in enumerate(beats, int(start)):
        report = tracker.observe(beat, float(now), life)
    return report, now + 1


def beating(count, beat=BEAT):
    return [replace(beat, beat=beat.beat + i) for i in range(count)]


@pytest.mark.parametrize(
    ("beats", "kernel_state", "state"),
    [
        (beating(5000), KernelState.UNKNOWN, ProcessState.ALIVE),  # a phase without deadline is never stuck
        ([BEAT] * 6, KernelState.UNKNOWN, ProcessState.ALIVE),
        ([BEAT] * 8, KernelState.UNKNOWN, ProcessState.SILENT),
        ([BEAT] * 61, KernelState.UNKNOWN, ProcessState.SILENT),
        ([BEAT] * 63, KernelState.UNKNOWN, ProcessState.DEAD),
        ([BEAT, *[None] * 7], KernelState.UNKNOWN, ProcessState.SILENT),  # its file is unreadable
        ([BEAT] * 7, KernelState.STOPPED, ProcessState.STOPPED),
        ([BEAT] * 7, KernelState.TRACED, ProcessState.SILENT),
        ([BEAT] * 7, KernelState.RUNNING, ProcessState.SILENT),
        ([replace(BEAT, phase_deadline_s=10, touched=i) for i in range(17)], KernelState.UNKNOWN, ProcessState.STUCK),
        ([BEAT, *[replace(BEAT, beat=2, phase="ended")] * 100], KernelState.GONE, ProcessState.ENDED),
        ([replace(BEAT, phase="failed")], KernelState.UNKNOWN, ProcessState.DEAD),
    ],
)
def test_tracker_with_one_reading_a_second_reports_the_state(beats, kernel_state, state):
    report, _ = observe_all(LivenessTracker("trainer_0", LIMITS), beats, kernel_state)
    assert report.state is state
    assert report.heartbeat == next(beat for beat in reversed(beats) if beat is not None)


def test_tracker_ignores_times_in_the_file_and_jumps_of_the_clock():
    tracker = LivenessTracker("trainer_0", LIMITS)
    _, now = observe_all(tracker, [replace(b, written=-1e9, phase_since=1e12) for b in beating(3)])
    for later in (now + 3600.0, now + 7200.0):
        assert tracker.observe(replace(BEAT, beat=3), later).state is ProcessState.ALIVE, "the reader slept"
    assert tracker.observe(replace(BEAT, beat=9), -500.0).state is ProcessState.ALIVE


def test_tracker_reports_missing_process_as_dead_at_second_poll():
    tracker = LivenessTracker("trainer_0", LIMITS)
    assert tracker.observe(BEAT, 0.0, KernelState.RUNNING).state is ProcessState.ALIVE
    last = replace(BEAT, beat=2)
    # Its last word may have come after this one.
    assert tracker.observe(last, 0.5, KernelState.GONE).state is ProcessState.ALIVE
    assert tracker.observe(last, 1.0, KernelState.GONE).state is ProcessState.DEAD


def test_tracker_without_progress_beyond_phase_deadline_reports_stuck():
    slow = replace(BEAT, phase_deadline_s=10)
    report, now = observe_all(tracker := LivenessTracker("trainer_0", LIMITS), beating(15, slow))
    assert (
        report.state is ProcessState.ALIVE
    )  # silence_seconds more than the deadline, for the process to say so itself
    report, now = observe_all(tracker, beating(3, replace(slow, beat=100)), start=now)
    assert report.state is ProcessState.STUCK
    assert tracker.observe(replace(slow, beat=200, progress=8), float(now)).state is ProcessState.ALIVE


def test_tracker_of_an_old_file_is_not_seen_alive_until_it_changes():
    tracker = LivenessTracker("trainer_0", LIMITS)
    report, now = observe_all(tracker, [BEAT] * 70)
    assert not report.seen_alive
    for part in ("trainer_0", "pid 12", "node7", "no heartbeat for 69 s", "'step 3'", "/x/t.log"):
        assert part in str(report)
    again = tracker.observe(replace(BEAT, beat=2), now)
    assert again.seen_alive and again.state is ProcessState.ALIVE


def test_heartbeat_round_trip_ends_with_ended(tmp_path):
    paths = RunPaths(tmp_path)
    with HeartbeatWriter(paths, "trainer_0", "trainer", interval_seconds=0.01) as heart:
        heart.enter("wait for batch 3", 600, "orchestrator")
        first = beat_of(paths, lambda beat: beat.phase == "wait for batch 3")
        heart.enter("wait for batch 3", 600, "orchestrator")
        heart.advance(3)
        second = beat_of(paths, lambda beat: beat.progress == first.progress + 3)
        assert (first.pid, first.role, first.waiting_for) == (os.getpid(), "trainer", "orchestrator")
        assert (first.phase_deadline_s, first.phase_since) == (600, second.phase_since)
        assert second.beat > first.beat
        assert read_kernel_state(first) is KernelState.RUNNING
    assert read_heartbeat(paths.heartbeat("trainer_0")).phase == "ended"
    assert [path.name for path in paths.heartbeats_dir.iterdir()] == ["trainer_0.json"]


def test_heartbeat_final_phase_is_failed_only_after_an_exception(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat_writer, "log_path", lambda: os.fsdecode(b"/run/\xff.log"))
    paths = RunPaths(tmp_path)
    for error, last in ((ValueError, "failed"), (SystemExit, "ended"), (KeyboardInterrupt, "ended")):
        with pytest.raises(error), HeartbeatWriter(paths, "trainer_0", "trainer"):
            raise error
        beat = read_heartbeat(paths.heartbeat("trainer_0"))
        assert (beat.phase, beat.log) == (last, "/run/?.log"), "its name is not UTF-8"


def test_heartbeat_of_blocked_event_loop_pauses_until_it_responds(tmp_path):
    paths = RunPaths(tmp_path)

    async def run():
        with HeartbeatWriter(paths, "orchestrator", "orchestrator", interval_seconds=0.01) as heart:
            heart.watch_event_loop(asyncio.get_running_loop())
            await asyncio.to_thread(beat_of, paths, lambda beat: beat.beat > 3)
            before = read_heartbeat(paths.heartbeat("orchestrator"))
            threading.Event().wait(0.1)  # blocks the loop
            during = read_heartbeat(paths.heartbeat("orchestrator"))
            assert during.beat <= before.beat + 2, "the beat in progress, and that of a probe answered before"
            after = await asyncio.to_thread(beat_of, paths, lambda beat: beat.beat > during.beat)
            assert after.beat > during.beat

    asyncio.run(run())


def test_heartbeat_on_full_disk_still_touches_the_file(tmp_path, monkeypatch):
    paths = RunPaths(tmp_path)
    heart = HeartbeatWriter(paths, "trainer_0", "trainer")
    heart._write()
    os.utime(paths.heartbeat("trainer_0"), (1, 1))
    before = read_heartbeat(paths.heartbeat("trainer_0"))

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(tmp_path), "write_text", full)
    heart._write()
    after = read_heartbeat(paths.heartbeat("trainer_0"))
    assert after.beat == before.beat
    assert after != before


def test_read_heartbeats_skips_malformed_and_copied_files(tmp_path):
    paths = RunPaths(tmp_path)
    assert read_heartbeats(paths) == {}
    with HeartbeatWriter(paths, "trainer_0", "trainer"):
        written = json.loads(paths.heartbeat("trainer_0").read_text()) | {"name": "trainer_1"}
    other = paths.heartbeat("trainer_1")
    other.write_text(json.dumps(written | {"phase_deadline_s": 60}))
    assert read_heartbeat(other).phase_deadline_s == 60
    malformed = ["", '{"format": "prime', '{"format": "x/1"}', "[]", "[" * 100_000]
    changes = (
        {"phase_deadline_s": "60"}, {"name": ["trainer_1"]}, {"name": None}, {"pid": "12"}, {"pid": None},
        {"host": None}, {"progress": 1.5}, {"format": "prime_rl.heartbeat/0"},
        {"name": "trainer_0"},  # a copy would be reported silent, and the living process would be killed
    )  # fmt: skip
    for text in (*malformed, *(json.dumps(written | change) for change in changes)):
        other.write_text(text)
        assert list(read_heartbeats(paths)) == ["trainer_0"], text
        assert [report.name for report in HeartbeatMonitor(paths, LIMITS).poll()] == ["trainer_0"], text


def test_read_kernel_state_of_foreign_process_is_unknown(tmp_path):
    with HeartbeatWriter(paths := RunPaths(tmp_path), "inference", "inference"):
        beat = read_heartbeat(paths.heartbeat("inference"))
    assert read_kernel_state(beat) is KernelState.RUNNING
    assert read_kernel_state(replace(beat, host="elsewhere")) is KernelState.UNKNOWN
    assert read_kernel_state(replace(beat, boot_id="another")) is KernelState.UNKNOWN
    earlier = replace(beat, started=beat.started + 1)
    assert read_kernel_state(earlier) is KernelState.GONE, "the pid is somebody else's now"


def test_monitor_reports_real_process_as_stopped_then_dead(tmp_path):
    paths = RunPaths(tmp_path)
    code = (
        "import sys; from pathlib import Path\n"
        "from prime_rl.liveness.heartbeat_writer import HeartbeatWriter; from prime_rl.storage.paths import RunPaths\n"
        "with HeartbeatWriter(RunPaths(Path(sys.argv[1])), 'orchestrator', 'orchestrator', 0.01): sys.stdin.read()"
    )
    now = iter(range(1000))
    watch = HeartbeatMonitor(paths, LIMITS, ("orchestrator",), clock=lambda: next(now))
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE) as process:
        try:
            beat_of(paths, lambda beat: beat.beat > 2, name="orchestrator")
            os.kill(process.pid, signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)  # a signal takes its time
            reports = [v for _ in range(12) for v in watch.poll()]
            assert reports[-1].state is ProcessState.STOPPED
            assert reports[-1].seen_alive
        finally:
            process.kill()
        process.wait()
        assert [v.state for _ in range(2) for v in watch.poll()][-1] is ProcessState.DEAD
    assert HeartbeatMonitor(paths, LIMITS, ("trainer",)).poll() == []


def test_monitor_reports_living_processes_on_a_silent_host_as_unreachable(tmp_path):
    paths, now = RunPaths(tmp_path), iter(range(1000))
    watch = HeartbeatMonitor(paths, LIMITS, clock=lambda: next(now))
    paths.heartbeats_dir.mkdir()

    def poll(silent, beats):
        for name, role, host in (
            ("trainer_0", "trainer", "node1"), ("trainer_1", "trainer", "node2"),
            ("inference", "inference", "node2"), ("node_node2", "trainer", "node2"),
        ):  # fmt: skip
            hosts = silent if name == "trainer_0" else {}
            if hosts is None:
                continue
            beat = replace(BEAT, name=name, role=role, host=host, beat=beats, silent_hosts=hosts)
            paths.heartbeat(name).write_text(json.dumps({"format": FORMAT, **asdict(beat)}))
        return {report.name: report for report in watch.poll()}

    poll({}, 1)
    reports = poll({"node2": 6.4}, 2)
    states = {name: report.state for name, report in reports.items()}
    alive = ProcessState.ALIVE
    assert states == dict.fromkeys(("inference", "node_node2", "trainer_0"), alive) | {
        "trainer_1": ProcessState.UNREACHABLE
    }
    assert "trainer_1 (pid 12 on node2) sends nothing to trainer_0 on node1 for 6 s" in str(reports["trainer_1"])
    assert poll({}, 3)["trainer_1"].state is alive
    poll({"node2": 6.4}, 4)
    reports = [poll(None, beats) for beats in range(5, 13)][-1]
    assert reports["trainer_0"].state is ProcessState.SILENT
    assert reports["trainer_1"].state is alive, "a silent process is no witness"


def beat_of(paths, holds, name=None, timeout_seconds=120.0):
    """Wait for a heartbeat that fulfils a condition."""
    tick = threading.Event()
    for _ in range(int(timeout_seconds / 0.005)):
        for beat in read_heartbeats(paths).values():
            if name in (None, beat.name) and holds(beat):
                return beat
        tick.wait(0.005)
    raise AssertionError("no such beat")
