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


def test_tracker_with_new_heartbeats_reports_alive():
    report, _ = observe_all(LivenessTracker("trainer_0", LIMITS), beating(200))
    assert report.state is ProcessState.ALIVE


@pytest.mark.parametrize(
    ("seconds", "state"),
    [(5, ProcessState.ALIVE), (7, ProcessState.SILENT), (60, ProcessState.SILENT), (62, ProcessState.DEAD)],
)
def test_tracker_without_new_heartbeats_reports_silent_then_dead(seconds, state):
    report, _ = observe_all(LivenessTracker("trainer_0", LIMITS), [BEAT] * (seconds + 1))
    assert report.state is state


def test_tracker_with_unreadable_file_reports_silent():
    report, _ = observe_all(LivenessTracker("trainer_0", LIMITS), [BEAT, *[None] * 7])
    assert report.state is ProcessState.SILENT
    assert report.heartbeat == BEAT


def test_tracker_with_heartbeat_after_silence_reports_alive():
    tracker = LivenessTracker("trainer_0", LIMITS)
    _, now = observe_all(tracker, [BEAT] * 30)
    assert tracker.observe(replace(BEAT, beat=2), now).state is ProcessState.ALIVE


def test_tracker_counts_touched_file_as_heartbeat_without_progress():
    stuck = replace(BEAT, phase_deadline_s=10)
    report, _ = observe_all(LivenessTracker("trainer_0", LIMITS), [replace(stuck, touched=i) for i in range(17)])
    assert report.state is ProcessState.STUCK


def test_tracker_ignores_time_in_which_the_reader_slept():
    tracker = LivenessTracker("trainer_0", LIMITS)
    _, now = observe_all(tracker, beating(3))
    assert tracker.observe(replace(BEAT, beat=3), now + 3600.0).state is ProcessState.ALIVE
    assert tracker.observe(replace(BEAT, beat=3), now + 7200.0).state is ProcessState.ALIVE


def test_tracker_ignores_times_in_the_file_and_clock_jumps():
    tracker = LivenessTracker("trainer_0", LIMITS)
    observe_all(tracker, [replace(b, written=-1e9, phase_since=1e12) for b in beating(3)])
    assert tracker.observe(replace(BEAT, beat=9), -500.0).state is ProcessState.ALIVE


@pytest.mark.parametrize(
    ("life", "state"),
    [
        (KernelState.STOPPED, ProcessState.STOPPED),
        (KernelState.TRACED, ProcessState.SILENT),
        (KernelState.RUNNING, ProcessState.SILENT),
    ],
)
def test_tracker_reports_silence_of_stopped_process_as_stopped(life, state):
    report, _ = observe_all(LivenessTracker("trainer_0", LIMITS), [BEAT] * 7, life)
    assert report.state is state


def test_tracker_reports_missing_process_as_dead_at_second_poll():
    tracker = LivenessTracker("trainer_0", LIMITS)
    assert tracker.observe(BEAT, 0.0, KernelState.RUNNING).state is ProcessState.ALIVE
    last = replace(BEAT, beat=2)
    assert (
        tracker.observe(last, 0.5, KernelState.GONE).state is ProcessState.ALIVE
    )  # its last word may have come after this one
    assert tracker.observe(last, 1.0, KernelState.GONE).state is ProcessState.DEAD


def test_tracker_reports_regular_exit_as_ended():
    tracker = LivenessTracker("trainer_0", LIMITS)
    report, _ = observe_all(tracker, [BEAT, *[replace(BEAT, beat=2, phase="ended")] * 100], KernelState.GONE)
    assert report.state is ProcessState.ENDED


def test_tracker_reports_failed_process_as_dead_immediately():
    report = LivenessTracker("trainer_0", LIMITS).observe(replace(BEAT, phase="failed"), 0.0)
    assert report.state is ProcessState.DEAD
    assert "has failed" in report.description


def test_tracker_without_progress_beyond_phase_deadline_reports_stuck():
    slow = replace(BEAT, phase_deadline_s=10)
    report, now = observe_all(tracker := LivenessTracker("trainer_0", LIMITS), beating(15, slow))
    assert report.state is ProcessState.ALIVE  # silence_s more than the deadline, for the process to say so itself
    report, now = observe_all(tracker, beating(3, replace(slow, beat=100)), start=now)
    assert report.state is ProcessState.STUCK
    assert tracker.observe(replace(slow, beat=200, progress=8), float(now)).state is ProcessState.ALIVE


def test_tracker_without_phase_deadline_never_reports_stuck():
    report, _ = observe_all(LivenessTracker("trainer_0", LIMITS), beating(5000))
    assert report.state is ProcessState.ALIVE


def test_tracker_does_not_report_unchanged_old_file_as_seen_alive():
    tracker = LivenessTracker("trainer_0", LIMITS)
    report, now = observe_all(tracker, [BEAT] * 100)
    assert not report.seen_alive
    assert tracker.observe(replace(BEAT, beat=2), now).seen_alive


def test_report_text_contains_process_host_duration_phase_and_log():
    report, _ = observe_all(LivenessTracker("trainer_0", LIMITS), [BEAT] * 70)
    for part in ("trainer_0", "pid 12", "node7", "no heartbeat for 69 s", "'step 3'", "/x/t.log"):
        assert part in str(report)


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


def test_heartbeat_of_a_log_whose_name_is_not_utf8_is_readable(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat_writer, "log_path", lambda: os.fsdecode(b"/run/\xff.log"))
    with HeartbeatWriter(paths := RunPaths(tmp_path), "trainer_0", "trainer"):
        assert read_heartbeat(paths.heartbeat("trainer_0")).log == "/run/?.log"


def test_heartbeat_final_phase_is_failed_only_after_an_exception(tmp_path):
    paths = RunPaths(tmp_path)
    for error, last in ((ValueError, "failed"), (SystemExit, "ended"), (KeyboardInterrupt, "ended")):
        with pytest.raises(error), HeartbeatWriter(paths, "trainer_0", "trainer"):
            raise error
        assert read_heartbeat(paths.heartbeat("trainer_0")).phase == last


def test_heartbeat_of_blocked_event_loop_pauses_until_it_responds(tmp_path):
    paths = RunPaths(tmp_path)

    async def run():
        with HeartbeatWriter(paths, "orchestrator", "orchestrator", interval_seconds=0.01) as heart:
            heart.watch_event_loop(asyncio.get_running_loop())
            await asyncio.to_thread(beat_of, paths, lambda beat: beat.beat > 3)
            before = read_heartbeat(paths.heartbeat("orchestrator"))
            threading.Event().wait(0.3)  # blocks the loop
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


def test_read_heartbeats_skips_malformed_files(tmp_path):
    paths = RunPaths(tmp_path)
    assert read_heartbeats(paths) == {}
    paths.heartbeats_dir.mkdir()
    for name, text in (("empty", ""), ("half", '{"format": "prime'), ("other", '{"format": "x/1"}'), ("list", "[]")):
        paths.heartbeat(name).write_text(text)
    with HeartbeatWriter(paths, "inference", "inference"):
        assert list(read_heartbeats(paths)) == ["inference"]


@pytest.mark.parametrize(
    "change",
    [
        {"phase_deadline_s": "60"},
        {"name": ["trainer_0"]},
        {"name": None},
        {"pid": "12"},
        {"pid": None},
        {"host": None},
        {"progress": 1.5},
        {"format": "prime_rl.heartbeat/0"},
    ],
)
def test_read_heartbeats_skips_values_of_wrong_type(change, tmp_path):
    paths = RunPaths(tmp_path)
    with HeartbeatWriter(paths, "trainer_0", "trainer"):
        written = json.loads(paths.heartbeat("trainer_0").read_text())
    other = paths.heartbeat("trainer_1")
    other.write_text(json.dumps({**written, "name": "trainer_1", "phase_deadline_s": 60}))
    assert read_heartbeat(other).phase_deadline_s == 60
    other.write_text(json.dumps({**written, "name": "trainer_1", **change}))
    assert read_heartbeat(other) is None
    assert [report.name for report in HeartbeatMonitor(paths, LIMITS).poll()] == ["trainer_0"]


def test_read_heartbeats_skips_copied_files(tmp_path):
    """Otherwise the copy would be reported silent, and the living process would be killed."""
    paths = RunPaths(tmp_path)
    with HeartbeatWriter(paths, "trainer_0", "trainer"):
        file = paths.heartbeat("trainer_0")
        paths.heartbeat("trainer_0_backup").write_text(file.read_text())
        paths.heartbeat("deep").write_text("[" * 100_000)
        assert read_heartbeats(paths) == {"trainer_0": read_heartbeat(file)}


def test_read_kernel_state_of_foreign_process_is_unknown(tmp_path):
    with HeartbeatWriter(paths := RunPaths(tmp_path), "inference", "inference"):
        beat = read_heartbeat(paths.heartbeat("inference"))
    assert read_kernel_state(beat) is KernelState.RUNNING
    assert read_kernel_state(replace(beat, host="elsewhere")) is KernelState.UNKNOWN
    assert read_kernel_state(replace(beat, boot_id="another")) is KernelState.UNKNOWN
    assert (
        read_kernel_state(replace(beat, started=beat.started + 1)) is KernelState.GONE
    )  # the pid is somebody else's now


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
            ("trainer_0", "trainer", "node1"),
            ("trainer_1", "trainer", "node2"),
            ("inference", "inference", "node2"),
            ("node_node2", "trainer", "node2"),
        ):
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
    assert states == {
        "trainer_0": alive,
        "trainer_1": ProcessState.UNREACHABLE,
        "inference": alive,
        "node_node2": alive,
    }
    assert str(reports["trainer_1"]).startswith(
        "trainer_1 (pid 12 on node2) sends nothing to trainer_0 on node1 for 6 s"
    )
    assert poll({}, 3)["trainer_1"].state is alive
    poll({"node2": 6.4}, 4)
    reports = [poll(None, beats) for beats in range(5, 13)][-1]
    assert reports["trainer_0"].state is ProcessState.SILENT
    assert reports["trainer_1"].state is alive, "a silent process is no witness"


def beat_of(paths, holds, name=None, timeout_s=120.0):
    """Wait for a heartbeat that fulfils a condition."""
    tick = threading.Event()
    for _ in range(int(timeout_s / 0.005)):
        for beat in read_heartbeats(paths).values():
            if name in (None, beat.name) and holds(beat):
                return beat
        tick.wait(0.005)
    raise AssertionError("no such beat")
