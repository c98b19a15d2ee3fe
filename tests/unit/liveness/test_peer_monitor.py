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


def test_check_of_living_peer_does_not_raise(world):
    world.wait(200, each=world.say)


def test_check_of_peer_that_another_one_does_not_hear_warns_without_raising(world, said):
    """The trainer decides how long its steps wait for a node, and the phase of the peer may be long."""
    other = replace(BEAT, name="trainer_1", host="node8")

    def say(silent=MappingProxyType({})):
        world.say(silent_hosts=dict(silent))
        world.say(other)

    world.wait(3, each=say)
    world.wait(100, each=lambda: say({"node8": 7.0}))
    world.wait(1, each=say)
    assert said() == [
        "trainer_1 (pid 12 on node8) sends nothing to trainer_0 on node7 for 7 s; phase 'step 3', log /x/t.log",
        "trainer_1 (pid 12 on node8) is alive again",
    ]


def test_check_of_absent_peer_does_not_raise(world):
    world.wait(1000)
    assert "has no heartbeat of trainer" in world.peers.describe()


def test_check_of_silent_peer_warns_then_raises(world, said):
    world.wait(3, each=world.say)
    world.wait(10)
    assert "has written no heartbeat" in "".join(said())
    with pytest.raises(PeerLost, match=r"trainer_0 \(pid 12 on node7\).*for 61 s; phase 'step 3', log /x/t.log"):
        world.wait(60)


def test_check_of_returning_peer_does_not_raise(world, said):
    world.wait(3, each=world.say)
    world.wait(50)
    world.wait(100, each=world.say)
    assert "is alive again" in said()[-1]


def test_check_ignores_heartbeat_of_an_earlier_run(world):
    world.say()
    world.wait(1000)


@pytest.mark.parametrize("last", ["ended", "failed"])
def test_check_of_ended_peer_raises_after_dead_after_seconds(world, last):
    world.wait(3, each=world.say)
    world.say(phase=last)
    world.wait(55)
    with pytest.raises(PeerLost, match=f"has {last}"):
        world.wait(10)


def test_check_of_peer_whose_end_is_expected_raises_only_if_it_fails(world, said):
    world.wait(3, each=world.say)
    world.peers.expect_end()
    world.say(phase="ended")
    world.wait(1000)
    assert said() == []
    world.say(phase="failed")
    with pytest.raises(PeerLost, match="has failed"):
        world.wait(70)


def test_check_of_stuck_peer_raises_immediately(world, said):
    with pytest.raises(PeerLost, match=r"no progress for 16 s .limit 10 s"):
        world.wait(18, each=lambda: world.say(phase_deadline_s=10))
    assert "waiting for it" not in said()[-1]


def test_check_under_rl_only_describes(tmp_path):
    world = World(tmp_path, raises=False)
    world.wait(3, each=world.say)
    world.wait(100)
    assert "no heartbeat for 100 s" in world.peers.describe()


def test_check_forgets_rank_whose_file_is_removed(world):
    other = replace(BEAT, name="trainer_1")
    world.wait(3, each=lambda: (world.say(), world.say(other)))
    world.wait(50, each=world.say)
    world.paths.heartbeat("trainer_1").unlink()
    world.wait(100, each=world.say)


def test_check_of_two_ranks_raises_when_one_is_lost(world):
    world.wait(3, each=lambda: (world.say(), world.say(replace(BEAT, name="trainer_1"))))
    with pytest.raises(PeerLost, match=r"trainer_1 .* no heartbeat"):
        world.wait(70, each=world.say)


def test_check_of_silent_server_does_not_raise(tmp_path):
    world = World(tmp_path, answers_requests=True)
    world.wait(3, each=world.say)
    world.wait(1000)


def test_check_of_servers_raises_when_all_are_lost(tmp_path):
    world = World(tmp_path, answers_requests=True)
    stuck = replace(BEAT, name="trainer_1", phase_deadline_s=10)
    world.wait(100, each=lambda: (world.say(), world.say(stuck)))
    world.say(phase="failed")
    with pytest.raises(PeerLost, match=r"trainer_0 .* has failed"):
        world.wait(70, each=lambda: world.say(stuck))


def test_log_changes_warns_and_does_not_raise(tmp_path, said):
    """The orchestrator monitors `rl`, because no other process does."""
    world = World(tmp_path, raises=False)
    for silent_seconds in (3, 200):
        for _ in range(silent_seconds):
            world.now += 1
            if silent_seconds == 3:
                world.say()
            world.peers.log_changes()
    assert [line.split(";")[0] for line in said()] == [
        f"trainer_0 (pid 12 on node7) has written no heartbeat for {since} s" for since in (6, 61)
    ]
    assert not any("waiting for it" in line for line in said())
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
