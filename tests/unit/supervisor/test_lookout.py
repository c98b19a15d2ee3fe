"""Who is held to be stopped, silent or stuck, and what `rl` starts again, without a process."""

import json
import os
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from prime_rl.configs import RLConfig
from prime_rl.run.checkpoints import Resume, write_resume
from prime_rl.run.heartbeat import Beat, Life, Limits, State, Verdict
from prime_rl.run.paths import RunPaths
from prime_rl.supervisor.events import Events
from prime_rl.supervisor.family import Family, Member
from prime_rl.supervisor.lookout import Lookout, Stops
from prime_rl.supervisor.roles import make_roles

WORKER = Member(7, 100.0, "orchestrator", "worker", psutil.STATUS_SLEEPING)
HALTED = replace(WORKER, status=psutil.STATUS_STOPPED)
BEAT = Beat("trainer_0", "trainer", 8, "here", "boot", 1, 1, "step 3", 1, None, 0.0, None, "trainer.log", 0.0)
RANK = Member(8, 100.0, "trainer", "train", psutil.STATUS_SLEEPING)
ROLES = {1: "orchestrator", 2: "trainer"}


class Scene:
    """A lookout whose world is made up."""

    def __init__(self, tmp_path):
        self.now, self.members, self.verdicts = 0.0, [], []
        self.said, self.file = [], tmp_path / "events.jsonl"
        limits = Limits(silence_s=5, timeout_s=60)
        self.lookout = Lookout(RunPaths(tmp_path), limits, Events(self.file, self.said.append), lambda: self.now)
        self.lookout.family = SimpleNamespace(look=lambda roles: self.members)
        self.lookout._watch = SimpleNamespace(look=lambda: self.verdicts)

    def look(self, members, verdicts=(), after=1.0):
        self.now += after
        self.members, self.verdicts = list(members), list(verdicts)
        return self.lookout.look(ROLES)

    @property
    def events(self):
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        return [(e["event"], e["name"]) for e in map(json.loads, lines)]


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path)


def test_a_stop_is_counted_in_the_time_that_we_were_awake():
    stops = Stops()
    assert stops.observe([HALTED], 10) == {HALTED: 0}
    assert stops.observe([HALTED], 11) == {HALTED: 1}
    assert stops.observe([HALTED], 1000) == {HALTED: 3}, "a gap is our own sleep"
    assert stops.observe([WORKER], 1001) == {}
    assert stops.observe([HALTED], 1002) == {HALTED: 0}, "another stop"
    assert stops.observe([replace(HALTED, created=200.0)], 1003) == {replace(HALTED, created=200.0): 0}, "another one"


def test_a_stopped_process_is_reported_and_then_condemned_once(scene):
    assert scene.look([HALTED]) == []
    assert scene.look([HALTED]) == []
    assert scene.events == [("stopped", "orchestrator/7")]
    found = [one for _ in range(9) for one in scene.look([HALTED])]
    assert [(one.pid, one.role) for one in found] == [(7, "orchestrator")]
    assert "was stopped (SIGSTOP?) for 5 s" in found[0].why
    assert scene.events == [("stopped", "orchestrator/7")]


def test_who_goes_on_is_reported_and_left_alone(scene):
    for member in (HALTED, HALTED, WORKER, WORKER):
        assert scene.look([member]) == []
    assert scene.events == [("stopped", "orchestrator/7"), ("resumed", "orchestrator/7")]


def test_a_debugger_may_hold_a_process(scene):
    beat = Verdict("trainer_0", State.DEAD, BEAT, 90, Life.TRACED, True, "has been silent for 90 s")
    held = replace(RANK, status=psutil.STATUS_TRACING_STOP)
    for _ in range(100):
        assert scene.look([held], [beat]) == []
    assert ("traced", "trainer_0") in scene.events


@pytest.mark.parametrize(
    ("state", "life", "for_s", "phase", "condemned", "event"),
    [
        (State.ALIVE, Life.RUNNING, 1, "step 3", False, None),
        (State.SILENT, Life.RUNNING, 6, "step 3", False, "silent"),
        (State.DEAD, Life.RUNNING, 61, "step 3", True, "silent"),
        (State.STUCK, Life.RUNNING, 30, "step 3", True, "stuck"),
        (State.DEAD, Life.GONE, 1, "step 3", False, None),
        (State.DEAD, Life.RUNNING, 3, "failed", False, None),
        (State.DEAD, Life.RUNNING, 61, "failed", True, None),
        (State.ENDED, Life.RUNNING, 3, "ended", False, None),
        (State.ENDED, Life.RUNNING, 61, "ended", True, None),
    ],
)
def test_verdicts(scene, state, life, for_s, phase, condemned, event):
    verdict = Verdict("trainer_0", state, replace(BEAT, phase=phase), for_s, life, True, "is so")
    found = scene.look([RANK], [verdict])
    assert [one.name for one in found] == ["trainer_0"] * condemned
    assert scene.events == ([(event, "trainer_0")] if event else [])


def test_only_what_descends_from_us_is_killed_and_only_what_was_seen_alive_reported(scene):
    foreign = Verdict("inference", State.STUCK, replace(BEAT, pid=99), 30, Life.UNKNOWN, True, "is stuck")
    assert scene.look([RANK], [foreign]) == []
    assert scene.events == [("stuck", "inference")]
    assert scene.look([RANK], [replace(foreign, seen=False)]) == []


def test_ends_are_reported_of_those_that_lasted(scene):
    alive = Verdict("trainer_0", State.ALIVE, BEAT, 0, Life.RUNNING, True)
    passing = replace(WORKER, pid=9)
    child = Member(2, 1.0, "trainer", "torch.distributed.run", psutil.STATUS_SLEEPING)
    scene.look([child, RANK, WORKER], [alive])
    scene.look([child, RANK, WORKER, passing], [alive])
    scene.look([])
    assert sorted(scene.events) == [("ended", "orchestrator/7"), ("ended", "trainer_0")]


def test_orphans_that_were_handed_to_us_do_not_pile_up():
    """Our own children, whose exit codes are asked for elsewhere, are left alone."""
    orphan, child = (subprocess.Popen(["true"]) for _ in range(2))
    for process in (orphan, child):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    Family().look({child.pid: "trainer"})
    with pytest.raises(ChildProcessError):
        os.waitpid(orphan.pid, os.WNOHANG)
    assert os.waitpid(child.pid, os.WNOHANG)[0] == child.pid


def test_a_full_disk_ends_nothing(tmp_path):
    said = []
    events = Events(tmp_path, said.append)  # a directory
    events.add("started", "trainer")
    events.add("ended", "trainer")
    assert len(said) == 1
    assert "cannot be written" in said[0]


def roles_of(tmp_path, *keys):
    config = RLConfig.load(["--output-dir", str(tmp_path), "--inference", *keys])
    return {role.name: role for role in make_roles(config, config.run_paths)}, config.run_paths


def test_what_is_started_again(tmp_path):
    roles, paths = roles_of(tmp_path, "--max-restarts", "3", "--grace-seconds", "20")
    trainer, orchestrator = roles["trainer"], roles["orchestrator"]
    assert "--max-restarts=3" in trainer.argv
    assert trainer.env["PRIME_RL_RESTART"] == "0"
    assert trainer.env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "19", "torchrun takes whole seconds"
    again = trainer.again(2)
    assert "--max-restarts=2" in again.argv
    assert again.env["PRIME_RL_RESTART"] == "1"
    assert again.env["PRIME_RL_START"] == trainer.env["PRIME_RL_START"]
    assert again.last and again.again(0).restarts == 3
    assert orchestrator.again(2).argv == [*orchestrator.argv, "--restart"]
    assert orchestrator.again(2).recalled is orchestrator.recalled
    for attempt in ("one/attempt_0", "one/attempt_1", "one/attempt_2", "two/attempt_0", "two/attempt_1"):
        (paths.torchrun_logs / attempt).mkdir(parents=True)
    assert trainer.restarted() == 3


def test_without_restarts_nothing_changes(tmp_path):
    roles, _ = roles_of(tmp_path)
    assert "PRIME_RL_RESTART" not in roles["trainer"].env
    assert "--max-restarts=0" in roles["trainer"].argv
    assert {role.restarts for role in roles.values()} == {0}


def test_the_orchestrator_is_called_back_while_the_trainer_is_ahead_of_its_ledger(tmp_path):
    roles, paths = roles_of(tmp_path, "--ckpt")
    recalled = roles["orchestrator"].recalled
    assert not recalled()
    paths.ledger_dir.mkdir()
    paths.ledger(0).touch()
    paths.checkpoints_dir.mkdir()
    assert not recalled()
    write_resume(paths.checkpoints_dir, Resume(4, 1))
    assert recalled()
    paths.ledger(1).touch()
    assert not recalled()
