"""Health checks, event log and process specs, without processes of a run."""

import json
import os
import signal
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from prime_rl.configs.rl import RLConfig
from prime_rl.liveness.heartbeat_limits import HeartbeatLimits
from prime_rl.liveness.heartbeat_monitor import HeartbeatRecord, KernelState, LivenessReport, ProcessState
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.storage.checkpoint_artifacts import ResumeRecord, write_resume
from prime_rl.storage.paths import RunPaths
from prime_rl.supervisor.health_monitor import HealthMonitor, StopTracker
from prime_rl.supervisor.launch_specs import make_process_specs
from prime_rl.supervisor.lifecycle_events import EventLog
from prime_rl.supervisor.process_tree import Descendant, ProcessTree

WORKER = Descendant(7, 100.0, "orchestrator", "worker", psutil.STATUS_SLEEPING)
HALTED = replace(WORKER, status=psutil.STATUS_STOPPED)
BEAT = HeartbeatRecord(
    "trainer_0", "trainer", 8, "here", "boot", 1, 1, "step 3", 1, None, 0.0, None, "trainer.log", 0.0
)
THERE = replace(BEAT, host="node2", name="trainer_1")
RANK = Descendant(8, 100.0, "trainer", "train", psutil.STATUS_SLEEPING)
ROLES = {1: "orchestrator", 2: "trainer"}


def report(state, beat=BEAT, for_seconds=90, life=KernelState.RUNNING, **fields):
    return LivenessReport(
        beat.name, state, beat, for_seconds, life, **({"seen_alive": True, "description": "is so"} | fields)
    )


class Scene:
    """A health monitor over made-up processes and reports."""

    def __init__(self, tmp_path):
        self.now, self.members, self.reports = 0.0, [], []
        self.printed, self.file = [], tmp_path / "events.jsonl"
        limits = HeartbeatLimits(warn_after_seconds=5, dead_after_seconds=60)
        self.health = HealthMonitor(
            RunPaths(tmp_path), limits, EventLog(self.file, self.printed.append), lambda: self.now
        )
        self.health.process_tree = SimpleNamespace(scan=lambda roles: self.members)
        self.forgotten = []
        self.health._heartbeats = SimpleNamespace(poll=lambda: self.reports, forget=self.forgotten.extend)

    def look(self, members, reports=(), after=1.0, roles=ROLES):
        self.now += after
        self.members, self.reports = list(members), list(reports)
        return self.health.check(roles)

    @property
    def events(self):
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        return [(e["event"], e["name"]) for e in map(json.loads, lines)]


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path)


def test_stop_tracker_does_not_count_time_in_which_it_was_suspended():
    stops = StopTracker()
    assert stops.observe([HALTED], 10) == {HALTED: 0}
    assert stops.observe([HALTED], 11) == {HALTED: 1}
    assert stops.observe([HALTED], 1000) == {HALTED: 3}, "a gap is time in which it was suspended"
    assert stops.observe([WORKER], 1001) == {}
    assert stops.observe([HALTED], 1002) == {HALTED: 0}, "another stop"
    assert stops.observe([replace(HALTED, created=200.0)], 1003) == {replace(HALTED, created=200.0): 0}, "another one"


def test_check_stopped_process_is_reported_then_returned_once_unless_it_continues(scene):
    for member in (HALTED, HALTED, WORKER, WORKER):
        assert scene.look([member]) == []
    assert scene.events == [("stopped", "orchestrator/7"), ("resumed", "orchestrator/7")]
    found = [one for _ in range(9) for one in scene.look([HALTED])]
    assert [(one.pid, one.role) for one in found] == [(7, "orchestrator")]
    assert "was stopped (SIGSTOP?) for 5 s" in found[0].reason
    assert scene.events[2:] == [("stopped", "orchestrator/7")]


def test_check_traced_process_is_not_returned(scene):
    held = replace(RANK, status=psutil.STATUS_TRACING_STOP)
    for _ in range(100):
        assert scene.look([held], [report(ProcessState.DEAD, life=KernelState.TRACED)]) == []
    assert ("traced", "trainer_0") in scene.events


@pytest.mark.parametrize(
    ("state", "life", "for_seconds", "phase", "killed", "event"),
    [
        (ProcessState.ALIVE, KernelState.RUNNING, 1, "step 3", False, None),
        (ProcessState.SILENT, KernelState.RUNNING, 6, "step 3", False, "silent"),
        (ProcessState.UNREACHABLE, KernelState.RUNNING, 61, "step 3", False, "silent"),
        (ProcessState.DEAD, KernelState.RUNNING, 61, "step 3", True, "silent"),
        (ProcessState.STUCK, KernelState.RUNNING, 30, "step 3", True, "stuck"),
        (ProcessState.DEAD, KernelState.GONE, 1, "step 3", False, None),
        (ProcessState.DEAD, KernelState.RUNNING, 3, "failed", False, None),
        (ProcessState.DEAD, KernelState.RUNNING, 61, "failed", True, None),
        (ProcessState.ENDED, KernelState.RUNNING, 3, "ended", False, None),
        (ProcessState.ENDED, KernelState.RUNNING, 61, "ended", True, None),
    ],
)
def test_check_heartbeat_states_are_reported_or_returned(scene, state, life, for_seconds, phase, killed, event):
    found = scene.look([RANK], [report(state, replace(BEAT, phase=phase), for_seconds, life)])
    assert [one.name for one in found] == ["trainer_0"] * killed
    assert scene.events == ([(event, "trainer_0")] if event else [])


@pytest.mark.parametrize("pid", [8, 99])
@pytest.mark.parametrize(
    ("state", "phase", "event"),
    [
        (ProcessState.DEAD, "step 3", "silent"),
        (ProcessState.STUCK, "serve", "stuck"),
        (ProcessState.DEAD, "failed", None),
    ],
)
def test_check_foreign_heartbeat_returns_nothing_also_with_a_local_pid(scene, state, phase, event, pid):
    """Process ids of another host or container can coincide with local ones."""
    beat = replace(BEAT, name="inference_node2_8000", role="inference", host="node2", phase=phase, pid=pid)
    foreign, ours = report(state, beat, life=KernelState.UNKNOWN), report(ProcessState.ALIVE, for_seconds=0)
    for seen_alive in (True, True, False):
        assert scene.look([RANK], [replace(foreign, seen_alive=seen_alive), ours]) == []
    assert scene.health.name_of(RANK) == "trainer_0"
    assert scene.events == ([] if event is None else [(event, beat.name)]), "reported, and only once"


def test_check_dead_child_with_the_pid_of_a_foreign_heartbeat_is_returned(scene):
    foreign, ours = report(ProcessState.ALIVE, THERE, 0, KernelState.UNKNOWN), report(ProcessState.DEAD)
    for reports in ([foreign, ours], [ours, foreign]):
        scene.health._killed.clear()
        assert [one.name for one in scene.look([RANK], reports)] == ["trainer_0"]


def test_check_exits_of_lasting_descendants_are_reported(scene):
    alive = report(ProcessState.ALIVE, for_seconds=0)
    passing = replace(WORKER, pid=9)
    child = Descendant(2, 1.0, "trainer", "torch.distributed.run", psutil.STATUS_SLEEPING)
    scene.look([child, RANK, WORKER], [alive])
    scene.look([child, RANK, WORKER, passing], [alive])
    scene.look([])
    assert sorted(scene.events) == [("ended", "orchestrator/7"), ("ended", "trainer_0")]


def test_process_tree_scan_reaps_orphans_only():
    """The exit codes of the children are read elsewhere."""
    orphan, child = (subprocess.Popen(["true"]) for _ in range(2))
    for process in (orphan, child):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    ProcessTree().scan({child.pid: "trainer"})
    with pytest.raises(ChildProcessError):
        os.waitpid(orphan.pid, os.WNOHANG)
    assert os.waitpid(child.pid, os.WNOHANG)[0] == child.pid


def test_event_log_write_error_is_reported_once(tmp_path):
    printed = []
    events = EventLog(tmp_path, printed.append)  # a directory
    events.add("started", "trainer")
    events.add("ended", "trainer")
    assert len(printed) == 1
    assert "cannot be written" in printed[0]


def roles_of(tmp_path, *keys):
    config = RLConfig.load(["--output-dir", str(tmp_path), "--inference", *keys])
    return {role.name: role for role in make_process_specs(config, config.run_paths)}, config.run_paths


def test_processes_keep_freed_memory_unless_the_user_says_otherwise(tmp_path, monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "7")
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    for role in roles_of(tmp_path)[0].values():
        assert (role.env["MALLOC_TRIM_THRESHOLD_"], role.env["MALLOC_MMAP_THRESHOLD_"]) == ("7", str(2**25))


def test_restart_specs_keep_restarts_and_start_id(tmp_path):
    roles, _ = roles_of(tmp_path)
    assert "PRIME_RL_RESTART" not in roles["trainer"].env and "--max-restarts=0" in roles["trainer"].argv
    assert {role.max_restarts for role in roles.values()} == {0}
    roles, paths = roles_of(tmp_path, "--max-restarts", "3", "--grace-timeout-seconds", "20")
    trainer, orchestrator = roles["trainer"], roles["orchestrator"]
    assert "--max-restarts=3" in trainer.argv
    assert trainer.env["PRIME_RL_RESTART"] == "0"
    assert trainer.env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "19", "torchrun takes whole seconds"
    again = trainer.restart_spec(2)
    assert "--max-restarts=2" in again.argv
    assert again.env["PRIME_RL_RESTART"] == "1"
    assert again.env["PRIME_RL_START"] == trainer.env["PRIME_RL_START"]
    assert again.is_last and again.restart_spec(0).max_restarts == 3
    assert orchestrator.restart_spec(2).argv == [*orchestrator.argv, "--restart"]
    assert orchestrator.restart_spec(2).needs_rerun is orchestrator.needs_rerun
    for attempt in ("one/attempt_0", "one/attempt_1", "one/attempt_2", "two/attempt_0", "two/attempt_1"):
        (paths.torchrun_logs / attempt).mkdir(parents=True)
    assert trainer.num_launcher_restarts() == 3


def test_orchestrator_needs_rerun_while_the_trainer_is_on_a_later_branch(tmp_path):
    roles, paths = roles_of(tmp_path, "--ckpt")
    needs_rerun = roles["orchestrator"].needs_rerun
    assert not needs_rerun()
    paths.ledger_dir.mkdir()
    paths.ledger(0).touch()
    paths.checkpoints_dir.mkdir()
    assert not needs_rerun()
    write_resume(paths.checkpoints_dir, ResumeRecord(4, 1))
    assert needs_rerun()
    paths.ledger(1).touch()
    assert not needs_rerun()


@pytest.mark.parametrize("spans_nodes", [True, False])
def test_lost_process_of_another_node_ends_its_child_once_and_only_with_several_nodes(scene, spans_nodes):
    scene.health._spans_nodes = spans_nodes
    silent = report(ProcessState.DEAD, THERE, life=KernelState.UNKNOWN)
    child, lost = replace(RANK, pid=2), [("trainer_1", 2, "trainer", signal.SIGTERM)] if spans_nodes else []
    assert scene.look([child], []) == []
    found = scene.look([child], [silent, replace(silent, name="trainer_2")])
    assert [(one.name, one.pid, one.role, one.kill_signal) for one in found] == lost, "the others end on their nodes"
    assert scene.look([child], [silent]) == []
    again = {1: "orchestrator", 3: "trainer"}
    assert scene.look([replace(RANK, pid=3)], [silent], roles=again) == [], "the silence is that of its predecessor"
    assert scene.forgotten[:1] == ["trainer_1"] * spans_nodes


@pytest.mark.parametrize(("names", "root"), [(("run_a", "run_b"), ""), (("run_a",), "run_a")])
def test_check_stuck_orchestrator_of_one_of_several_runs_is_named_after_its_run(tmp_path, names, root):
    """The trainer's heartbeat in the folder of a run ends with the run; the process continues."""
    runs = {name: RunPaths(tmp_path / name) for name in names}
    now, events = [0.0], EventLog(None, print)
    health = HealthMonitor(RunPaths(tmp_path / root), HeartbeatLimits(5, 60), events, lambda: now[0], runs=runs)
    member = replace(RANK, pid=os.getpid())
    health.process_tree = SimpleNamespace(scan=lambda roles: [member])
    for paths in runs.values():
        paths.heartbeats_dir.mkdir(parents=True)
        HeartbeatWriter(paths, "trainer_0", "trainer")._write()
        writer = HeartbeatWriter(paths, "orchestrator", "orchestrator")
        writer.enter("sample batch 3", 1)
        writer._write()
    found, file = [], runs["run_a"].heartbeat("orchestrator")
    for beat in range(2, 30):
        now[0] += 1
        file.write_text(json.dumps(json.loads(file.read_text()) | {"beat": beat}))  # alive, but without progress
        found += health.check({os.getpid(): "run_a"})
    assert {(one.name, one.role) for one in found} == {("run_a", "run_a")}
    assert "run_a (pid" in found[0].reason and "is stuck" in found[0].reason
