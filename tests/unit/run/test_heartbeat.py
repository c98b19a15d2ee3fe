"""I7: a process that does not live, or does not get on, is told apart from one that does."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from prime_rl.run.heart import Heartbeat
from prime_rl.run.heartbeat import Beat, Life, Limits, Pulse, State, Watch, life_of, read_beat, read_beats
from prime_rl.run.paths import RunPaths

LIMITS = Limits(silence_s=5, timeout_s=60)
BEAT = Beat("trainer_0", "trainer", 12, "node7", "boot", 99, 1, "step 3", 7, None, 0.0, None, "/x/t.log", 0.0)


def look(pulse, beats, life=Life.UNKNOWN, start=0.0):
    """Show a pulse one beat a second; return the last verdict and the clock."""
    now = start
    for now, beat in enumerate(beats, int(start)):
        verdict = pulse.observe(beat, float(now), life)
    return verdict, now + 1


def beating(count, beat=BEAT):
    return [replace(beat, beat=beat.beat + i) for i in range(count)]


def test_a_process_that_beats_is_alive():
    verdict, _ = look(Pulse("trainer_0", LIMITS), beating(200))
    assert verdict.state is State.ALIVE
    assert not verdict.lost


def test_one_that_never_was_there_is_absent():
    assert Pulse("trainer_0", LIMITS).observe(None, 0.0).state is State.ABSENT


@pytest.mark.parametrize(
    ("seconds", "state"), [(5, State.ALIVE), (7, State.SILENT), (60, State.SILENT), (62, State.DEAD)]
)
def test_silence_is_reported_and_then_is_death(seconds, state):
    verdict, _ = look(Pulse("trainer_0", LIMITS), [BEAT] * (seconds + 1))
    assert verdict.state is state
    assert verdict.lost == (state is State.DEAD)


def test_a_file_that_cannot_be_read_any_more_is_silence():
    verdict, _ = look(Pulse("trainer_0", LIMITS), [BEAT, *[None] * 7])
    assert verdict.state is State.SILENT
    assert verdict.beat == BEAT


def test_a_word_after_silence_is_life():
    pulse = Pulse("trainer_0", LIMITS)
    _, now = look(pulse, [BEAT] * 30)
    assert pulse.observe(replace(BEAT, beat=2), now).state is State.ALIVE


def test_a_touch_is_a_word_but_no_progress():
    stuck = replace(BEAT, phase_deadline_s=10)
    verdict, _ = look(Pulse("trainer_0", LIMITS), [replace(stuck, touched=i) for i in range(17)])
    assert verdict.state is State.STUCK


def test_the_sleep_of_the_reader_is_counted_against_nobody():
    pulse = Pulse("trainer_0", LIMITS)
    _, now = look(pulse, beating(3))
    assert pulse.observe(replace(BEAT, beat=3), now + 3600.0).state is State.ALIVE
    assert pulse.observe(replace(BEAT, beat=3), now + 7200.0).state is State.ALIVE


def test_times_in_the_file_and_a_clock_that_goes_back_mean_nothing():
    pulse = Pulse("trainer_0", LIMITS)
    look(pulse, [replace(b, written=-1e9, phase_since=1e12) for b in beating(3)])
    assert pulse.observe(replace(BEAT, beat=9), -500.0).state is State.ALIVE


@pytest.mark.parametrize(
    ("life", "state"), [(Life.STOPPED, State.STOPPED), (Life.TRACED, State.SILENT), (Life.RUNNING, State.SILENT)]
)
def test_silence_of_a_stopped_process_is_told_as_that(life, state):
    verdict, _ = look(Pulse("trainer_0", LIMITS), [BEAT] * 7, life)
    assert verdict.state is state


def test_a_process_that_is_gone_is_dead_at_the_second_look():
    pulse = Pulse("trainer_0", LIMITS)
    assert pulse.observe(BEAT, 0.0, Life.RUNNING).state is State.ALIVE
    last = replace(BEAT, beat=2)
    assert pulse.observe(last, 0.5, Life.GONE).state is State.ALIVE  # its last word may have come after this one
    assert pulse.observe(last, 1.0, Life.GONE).state is State.DEAD


def test_one_that_ended_in_order_is_not_dead():
    pulse = Pulse("trainer_0", LIMITS)
    verdict, _ = look(pulse, [BEAT, *[replace(BEAT, beat=2, phase="ended")] * 100], Life.GONE)
    assert verdict.state is State.ENDED
    assert not verdict.lost


def test_one_that_failed_is_dead_at_once():
    verdict = Pulse("trainer_0", LIMITS).observe(replace(BEAT, phase="failed"), 0.0)
    assert verdict.state is State.DEAD
    assert "has failed" in verdict.why


def test_no_progress_in_a_phase_with_a_deadline_is_stuck():
    slow = replace(BEAT, phase_deadline_s=10)
    verdict, now = look(pulse := Pulse("trainer_0", LIMITS), beating(15, slow))
    assert verdict.state is State.ALIVE  # silence_s more than the deadline, for the process to say so itself
    verdict, now = look(pulse, beating(3, replace(slow, beat=100)), start=now)
    assert verdict.state is State.STUCK
    assert pulse.observe(replace(slow, beat=200, progress=8), float(now)).state is State.ALIVE


def test_without_a_deadline_nothing_is_stuck():
    verdict, _ = look(Pulse("trainer_0", LIMITS), beating(5000))
    assert verdict.state is State.ALIVE


def test_a_file_of_an_earlier_run_was_not_seen_alive():
    pulse = Pulse("trainer_0", LIMITS)
    verdict, now = look(pulse, [BEAT] * 100)
    assert not verdict.seen
    assert pulse.observe(replace(BEAT, beat=2), now).seen


def test_a_verdict_says_who_where_since_when_in_which_phase_and_where_the_log_is():
    verdict, _ = look(Pulse("trainer_0", LIMITS), [BEAT] * 70)
    for part in ("trainer_0", "pid 12", "node7", "silent for 69 s", "'step 3'", "/x/t.log"):
        assert part in str(verdict)


def test_what_is_written_is_read_back_and_ends_with_ended(tmp_path):
    paths = RunPaths(tmp_path)
    with Heartbeat(paths, "trainer_0", "trainer", interval_s=0.01) as heart:
        heart.enter("wait for batch 3", 600, "orchestrator")
        first = beat_of(paths, lambda beat: beat.phase == "wait for batch 3")
        heart.enter("wait for batch 3", 600, "orchestrator")
        heart.advance(3)
        second = beat_of(paths, lambda beat: beat.progress == first.progress + 3)
        assert (first.pid, first.role, first.waiting_for) == (os.getpid(), "trainer", "orchestrator")
        assert (first.phase_deadline_s, first.phase_since) == (600, second.phase_since)
        assert second.beat > first.beat
        assert life_of(first) is Life.RUNNING
    assert read_beat(paths.heartbeat("trainer_0")).phase == "ended"
    assert [path.name for path in paths.heartbeats_dir.iterdir()] == ["trainer_0.json"]


def test_an_exception_is_told_and_an_order_to_end_is_an_orderly_end(tmp_path):
    paths = RunPaths(tmp_path)
    for error, last in ((ValueError, "failed"), (SystemExit, "ended"), (KeyboardInterrupt, "ended")):
        with pytest.raises(error), Heartbeat(paths, "trainer_0", "trainer"):
            raise error
        assert read_beat(paths.heartbeat("trainer_0")).phase == last


def test_a_loop_that_is_blocked_falls_silent_and_is_heard_again(tmp_path):
    paths = RunPaths(tmp_path)

    async def run():
        with Heartbeat(paths, "orchestrator", "orchestrator", interval_s=0.01) as heart:
            heart.follow(asyncio.get_running_loop())
            before = await asyncio.to_thread(beat_of, paths, lambda beat: beat.beat > 3)
            threading.Event().wait(0.3)  # blocks the loop
            during = read_beat(paths.heartbeat("orchestrator"))
            after = await asyncio.to_thread(beat_of, paths, lambda beat: beat.beat > during.beat)
            assert during.beat <= before.beat + 5
            assert after.beat > during.beat

    asyncio.run(run())


def test_a_disk_that_takes_nothing_does_not_make_the_living_look_dead(tmp_path, monkeypatch):
    paths = RunPaths(tmp_path)
    heart = Heartbeat(paths, "trainer_0", "trainer")
    heart._write()
    os.utime(paths.heartbeat("trainer_0"), (1, 1))
    before = read_beat(paths.heartbeat("trainer_0"))

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(tmp_path), "write_text", full)
    heart._write()
    after = read_beat(paths.heartbeat("trainer_0"))
    assert after.beat == before.beat
    assert after != before


def test_what_is_no_heartbeat_is_left_out(tmp_path):
    paths = RunPaths(tmp_path)
    assert read_beats(paths) == {}
    paths.heartbeats_dir.mkdir()
    for name, text in (("empty", ""), ("half", '{"format": "prime'), ("other", '{"format": "x/1"}'), ("list", "[]")):
        paths.heartbeat(name).write_text(text)
    with Heartbeat(paths, "inference", "inference"):
        assert list(read_beats(paths)) == ["inference"]


def test_a_process_of_another_node_namespace_or_time_is_not_judged_by_its_pid(tmp_path):
    with Heartbeat(paths := RunPaths(tmp_path), "inference", "inference"):
        beat = read_beat(paths.heartbeat("inference"))
    assert life_of(beat) is Life.RUNNING
    assert life_of(replace(beat, host="elsewhere")) is Life.UNKNOWN
    assert life_of(replace(beat, boot_id="another")) is Life.UNKNOWN
    assert life_of(replace(beat, started=beat.started + 1)) is Life.GONE  # the pid is somebody else's now


def test_a_real_process_that_is_stopped_is_told_and_then_that_it_is_gone(tmp_path):
    paths = RunPaths(tmp_path)
    code = (
        "import sys; from pathlib import Path\n"
        "from prime_rl.run.heart import Heartbeat; from prime_rl.run.paths import RunPaths\n"
        "with Heartbeat(RunPaths(Path(sys.argv[1])), 'orchestrator', 'orchestrator', 0.01): sys.stdin.read()"
    )
    now = iter(range(1000))
    watch = Watch(paths, LIMITS, ("orchestrator",), clock=lambda: next(now))
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE) as process:
        try:
            beat_of(paths, lambda beat: beat.beat > 2, name="orchestrator")
            os.kill(process.pid, signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)  # a signal takes its time
            verdicts = [v for _ in range(12) for v in watch.look()]
            assert verdicts[-1].state is State.STOPPED
            assert verdicts[-1].seen
        finally:
            process.kill()
        process.wait()
        assert [v.state for _ in range(2) for v in watch.look()][-1] is State.DEAD
    assert Watch(paths, LIMITS, ("trainer",)).look() == []


def beat_of(paths, holds, name=None, timeout_s=20.0):
    """Wait for a heartbeat of which something holds."""
    tick = threading.Event()
    for _ in range(int(timeout_s / 0.005)):
        for beat in read_beats(paths).values():
            if name in (None, beat.name) and holds(beat):
                return beat
        tick.wait(0.005)
    raise AssertionError("no such beat")
