"""I7: a wait for another process ends when that process does not come back."""

import json
from dataclasses import asdict, replace

import pytest

from prime_rl.run.heartbeat import FORMAT, Beat, Limits
from prime_rl.run.paths import RunPaths
from prime_rl.run.peers import PeerLost, Peers

BEAT = Beat("trainer_0", "trainer", 12, "node7", "boot", 99, 1, "step 3", 7, None, 0.0, None, "/x/t.log", 0.0)


class World:
    """A run directory with a trainer's heartbeat, and an orchestrator's clock."""

    def __init__(self, root, judges=True, heard_otherwise=False):
        self.paths, self.now, self.beats = RunPaths(root), 0.0, 0
        self.paths.heartbeats_dir.mkdir()
        self.peers = Peers(self.paths, "trainer", Limits(5, 60), judges, heard_otherwise, clock=lambda: self.now)

    def say(self, beat=BEAT, **changes):
        self.beats += 1
        told = asdict(replace(beat, beat=self.beats, **changes))
        self.paths.heartbeat(beat.name).write_text(json.dumps({"format": FORMAT, **told}))

    def wait(self, seconds, each=lambda: None):
        for _ in range(seconds):
            self.now += 1
            each()
            self.peers.check()


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_a_wait_for_the_living_goes_on(world):
    world.wait(200, each=world.say)


def test_a_wait_for_what_is_not_there_yet_goes_on(world):
    world.wait(1000)
    assert "has no heartbeat of trainer" in world.peers.told()


def test_silence_is_reported_and_ends_the_wait_in_time(world, said):
    world.wait(3, each=world.say)
    world.wait(10)
    assert "has been silent" in "".join(said())
    with pytest.raises(PeerLost, match=r"trainer_0 \(pid 12 on node7\).*silent for 61 s; phase 'step 3', log /x/t.log"):
        world.wait(60)


def test_one_that_comes_back_is_waited_for_again(world, said):
    world.wait(3, each=world.say)
    world.wait(50)
    world.wait(100, each=world.say)
    assert "goes on" in said()[-1]


def test_a_heartbeat_of_an_earlier_run_ends_nothing(world):
    world.say()
    world.wait(1000)


@pytest.mark.parametrize("last", ["ended", "failed"])
def test_one_that_has_ended_is_waited_for_as_long_as_one_that_is_silent(world, last):
    world.wait(3, each=world.say)
    world.say(phase=last)
    world.wait(55)
    with pytest.raises(PeerLost, match=f"has {last}"):
        world.wait(10)


def test_a_stuck_one_ends_the_wait_at_once(world):
    with pytest.raises(PeerLost, match="no progress for 16 s, where 10 s"):
        world.wait(18, each=lambda: world.say(phase_deadline_s=10))


def test_under_rl_it_only_tells(tmp_path):
    world = World(tmp_path, judges=False)
    world.wait(3, each=world.say)
    world.wait(100)
    assert "silent for 100 s" in world.peers.told()


def test_a_rank_of_a_larger_world_is_forgotten_with_its_file(world):
    other = replace(BEAT, name="trainer_1")
    world.wait(3, each=lambda: (world.say(), world.say(other)))
    world.wait(50, each=world.say)
    world.paths.heartbeat("trainer_1").unlink()
    world.wait(100, each=world.say)


def test_silence_of_what_answers_requests_says_nothing(tmp_path):
    world = World(tmp_path, heard_otherwise=True)
    world.wait(3, each=world.say)
    world.wait(1000)


def test_it_is_lost_when_each_says_so(tmp_path):
    world = World(tmp_path, heard_otherwise=True)
    stuck = replace(BEAT, name="trainer_1", phase_deadline_s=10)
    world.wait(100, each=lambda: (world.say(), world.say(stuck)))
    world.say(phase="failed")
    with pytest.raises(PeerLost, match=r"trainer_0 .* has failed"):
        world.wait(70, each=lambda: world.say(stuck))


def test_one_that_nobody_waits_for_is_reported_and_ends_nothing(tmp_path, said):
    """`rl`, by the orchestrator: whoever looks after all others must not be the one whose stop nobody tells."""
    world = World(tmp_path, judges=False)
    for silent_s in (3, 200):
        for _ in range(silent_s):
            world.now += 1
            if silent_s == 3:
                world.say()
            world.peers.report()
    assert [line.split(";")[0] for line in said()] == [
        f"trainer_0 (pid 12 on node7) has been silent for {since} s" for since in (6, 61)
    ]
    assert not any("waiting for it" in line for line in said())
    world.say()
    world.peers.report()
    assert "goes on" in said()[-1]


def test_who_was_seen_alive_while_nobody_waited_is_known_to_be_lost_in_time(world):
    """A look ends nothing, however long somebody is silent; the wait after it does."""
    world.say()
    world.peers.look()
    world.say()
    for _ in range(100):
        world.now += 1
        world.peers.look()
    with pytest.raises(PeerLost, match="silent"):
        world.wait(1)
