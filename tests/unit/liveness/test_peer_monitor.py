"""A wait for another process ends when that process is lost (I7)."""

import json
from dataclasses import asdict, replace
from types import MappingProxyType

import pytest

from prime_rl.liveness.heartbeat_limits import HeartbeatLimits
from prime_rl.liveness.heartbeat_monitor import FORMAT, HeartbeatRecord
from prime_rl.liveness.peer_monitor import PeerLost, PeerMonitor
from prime_rl.storage.paths import RunPaths

BEAT = HeartbeatRecord(
    "trainer_0", "trainer", 12, "node7", "boot", 99, 1, "step 3", 7, None, 0.0, None, "/x/t.log", 0.0
)


class World:
    """A run directory with a trainer's heartbeat, and an orchestrator's clock."""

    def __init__(self, root, raises=True, answers_requests=False):
        self.paths, self.now, self.beats = RunPaths(root), 0.0, 0
        self.paths.heartbeats_dir.mkdir()
        self.peers = PeerMonitor(
            self.paths, "trainer", HeartbeatLimits(5, 60), raises, answers_requests, clock=lambda: self.now
        )

    def say(self, beat=BEAT, **changes):
        self.beats += 1
        written = asdict(replace(beat, beat=self.beats, **changes))
        self.paths.heartbeat(beat.name).write_text(json.dumps({"format": FORMAT, **written}))

    def wait(self, seconds, each=lambda: None):
        for _ in range(seconds):
            self.now += 1
            each()
            self.peers.check()


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_check_of_living_absent_or_earlier_peer_does_not_raise(tmp_path):
    for name, before, each in (("living", 0, True), ("absent", 0, False), ("earlier", 1, False)):
        (tmp_path / name).mkdir()
        world = World(tmp_path / name)
        for _ in range(before):
            world.say()
        world.wait(100, each=world.say if each else lambda: None)
        assert ("has no heartbeat of trainer" in world.peers.describe()) == (name == "absent")


def test_check_of_peer_that_another_one_does_not_hear_warns_without_raising(world, said):
    """The trainer decides how long its steps wait for a node, and the phase of the peer may be long."""
    other = replace(BEAT, name="trainer_1", host="node8")

    def say(silent=MappingProxyType({})):
        world.say(silent_hosts=dict(silent))
        world.say(other)

    world.wait(3, each=say)
    world.wait(65, each=lambda: say({"node8": 7.0}))
    world.wait(1, each=say)
    assert said() == [
        "trainer_1 (pid 12 on node8) sends nothing to trainer_0 on node7 for 7 s; phase 'step 3', log /x/t.log",
        "trainer_1 (pid 12 on node8) is alive again",
    ]


def test_check_of_silent_peer_warns_then_raises(world, said):
    world.wait(3, each=world.say)
    world.wait(50)
    assert "has written no heartbeat" in "".join(said())
    world.wait(10, each=world.say)
    assert "is alive again" in said()[-1]
    with pytest.raises(PeerLost, match=r"trainer_0 \(pid 12 on node7\).*for 61 s; phase 'step 3', log /x/t.log"):
        world.wait(70)


@pytest.mark.parametrize("expected", [False, True])
def test_check_of_peer_that_ends_or_fails_raises_after_dead_after_seconds_unless_expected(tmp_path, expected):
    for last in ("ended", "failed"):
        (tmp_path / last).mkdir()
        world = World(tmp_path / last)
        world.wait(3, each=world.say)
        if expected:
            world.peers.expect_end()
        world.say(phase=last)
        world.wait(55)
        if expected and last == "ended":
            world.wait(100)
        else:
            with pytest.raises(PeerLost, match=f"has {last}"):
                world.wait(15)


def test_check_of_stuck_peer_raises_immediately(world, said):
    with pytest.raises(PeerLost, match=r"no progress for 16 s .limit 10 s"):
        world.wait(18, each=lambda: world.say(phase_deadline_s=10))
    assert "waiting for it" not in said()[-1]


def test_check_of_two_ranks_raises_when_one_is_lost_but_not_when_its_file_is_removed(world):
    def both():
        world.say()
        world.say(replace(BEAT, name="trainer_1"))

    world.wait(3, each=both)
    world.wait(50, each=world.say)
    world.paths.heartbeat("trainer_1").unlink()
    world.wait(30, each=world.say)
    world.wait(3, each=both)
    with pytest.raises(PeerLost, match=r"trainer_1 .* no heartbeat"):
        world.wait(70, each=world.say)


def test_check_of_servers_raises_only_when_all_are_lost(tmp_path):
    """Silence is no loss: requests show whether a server answers."""
    world = World(tmp_path, answers_requests=True)
    world.wait(3, each=world.say)
    world.wait(100)
    stuck = replace(BEAT, name="trainer_1", phase_deadline_s=10)
    world.wait(30, each=lambda: (world.say(), world.say(stuck)))
    world.say(phase="failed")
    with pytest.raises(PeerLost, match=r"trainer_0 .* has failed"):
        world.wait(70, each=lambda: world.say(stuck))


def test_log_changes_and_check_under_rl_warn_and_do_not_raise(tmp_path, said):
    """The orchestrator monitors `rl`, because no other process does."""
    world = World(tmp_path, raises=False)
    world.wait(3, each=world.say)
    for _ in range(200):
        world.now += 1
        world.peers.log_changes()
    assert [line.split(";")[0] for line in said()] == [
        f"trainer_0 (pid 12 on node7) has written no heartbeat for {since} s" for since in (6, 61)
    ]
    assert not any("waiting for it" in line for line in said())
    world.wait(1)
    assert "no heartbeat for 201 s" in world.peers.describe()
    world.say()
    world.peers.log_changes()
    assert "is alive again" in said()[-1]


def test_check_after_polls_without_wait_raises_in_time(world):
    """`poll` never raises, but a later `check` does."""
    world.say()
    world.peers.poll()
    world.say()
    for _ in range(100):
        world.now += 1
        world.peers.poll()
    with pytest.raises(PeerLost, match="no heartbeat"):
        world.wait(1)
