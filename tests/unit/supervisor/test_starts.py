"""First starts and restarts: their order, orphans before a restart, and signals."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from prime_rl.liveness.heartbeat_monitor import ENDED, SERVING
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.storage.paths import RunPaths
from prime_rl.supervisor import child_processes
from prime_rl.supervisor import supervisor as module
from prime_rl.supervisor.child_processes import ChildProcess, ProcessSpec, kill_all
from prime_rl.supervisor.process_tree import ProcessTree
from tests.support.command import PROGRESS_TIMEOUT_SECONDS, until
from tests.support.virtual_clock import virtual_clock
from tests.unit.supervisor.fake_children import Scene
from tests.unit.supervisor.test_health_monitor import roles_of
from tests.unit.supervisor.test_supervisor import FOREVER, REPORT, assert_gone

REPOSITORY = Path(__file__).parents[3]
# Its first thread has ended, another has not: the kernel calls it a zombie.
HALF_DEAD = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print("up", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def hold_orphans(monkeypatch, left=()):
    """Let the end of orphans wait for the returned event; then `left` are still there."""
    released = asyncio.Event()

    async def end(find, kill_seconds):
        await released.wait()
        return list(left)

    monkeypatch.setattr(module, "kill_all", end)
    return released


@virtual_clock
async def test_supervise_last_child_ends_while_orphans_are_ended_succeeds(monkeypatch, tmp_path):
    released, scene = hold_orphans(monkeypatch), Scene(monkeypatch, tmp_path)
    (await scene.started("trainer")).end(0)
    (await scene.started("inference")).end(-9)
    await asyncio.sleep(0)
    (await scene.started("orchestrator")).end(0)
    released.set()
    assert (await scene.outcome).ok


@virtual_clock
async def test_supervise_bad_input_while_orphans_are_ended_is_not_delayed(monkeypatch, tmp_path):
    """A process that is about to be restarted is not the culprit."""
    hold_orphans(monkeypatch)
    scene = Scene(monkeypatch, tmp_path)
    (await scene.started("inference")).end(-9)
    (await scene.started("orchestrator")).end(2)
    outcome = await scene.outcome
    assert (outcome.culprit.name, outcome.code) == ("orchestrator", 2)


@virtual_clock
async def test_supervise_second_failure_while_orphans_are_ended_restarts_both(monkeypatch, tmp_path):
    released, scene = hold_orphans(monkeypatch), Scene(monkeypatch, tmp_path)
    (await scene.started("inference")).end(-9)
    (await scene.started("trainer")).end(1)
    await asyncio.sleep(4)  # longer than `exit_seconds`: the orchestrator is not late, since the trainer is not done
    assert [child.spec.name for child in scene.children] == ["inference", "orchestrator", "trainer"]
    released.set()
    await scene.started("inference", 2)
    (await scene.started("trainer", 2)).end(0)
    (await scene.started("orchestrator")).end(0)
    assert (await scene.outcome).ok


@virtual_clock
async def test_supervise_orphan_that_does_not_end_fails_with_its_pid(monkeypatch, tmp_path):
    hold_orphans(monkeypatch, left=[4711]).set()
    scene = Scene(monkeypatch, tmp_path)
    (await scene.started("inference")).end(-9)
    outcome = await scene.outcome
    assert (outcome.culprit.name, outcome.code) == ("inference", -9)
    assert "process 4711" in outcome.reason
    assert len(scene.children) == 3, "it is not restarted"


@virtual_clock
async def test_supervise_start_after_waits_until_the_server_is_ready(monkeypatch, tmp_path):
    serving = set()
    fields = {"inference": {"is_ready": serving.__contains__}, "trainer": {"start_after": "inference"}}
    scene = Scene(monkeypatch, tmp_path, **fields)
    server, orchestrator = await scene.started("inference"), await scene.started("orchestrator")
    await asyncio.sleep(60)
    assert len(scene.children) == 2
    serving.add(server.pid)
    trainer = await scene.started("trainer")
    server.end(-9)
    trainer.end(-9)
    second = await scene.started("inference", 2)
    await asyncio.sleep(60)
    assert len(scene.children) == 4, "the trainer waits for the new server"
    serving.add(second.pid)
    (await scene.started("trainer", 2)).end(0)
    orchestrator.end(0)
    assert (await scene.outcome).ok
    assert scene.printed.count("trainer starts when inference is ready") == 2


@virtual_clock
async def test_supervise_servers_alone_are_not_finished_until_a_signal(monkeypatch, tmp_path):
    """As those of `tinker-server`."""
    server = {"must_finish": False, "is_last": False}
    scene = Scene(monkeypatch, tmp_path, orchestrator=server, trainer=server)
    await scene.started("trainer")
    await asyncio.sleep(5)
    assert not scene.outcome.done()
    scene.run._stopped.set_result(signal.SIGTERM)
    assert (await scene.outcome).stopped_by is signal.SIGTERM


@virtual_clock
async def test_supervise_start_after_an_unknown_process_is_rejected(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="start_after = evaluation of trainer is not one of"):
        Scene(monkeypatch, tmp_path, trainer={"start_after": "evaluation"})


@virtual_clock
async def test_supervise_restarts_by_a_launcher_count(monkeypatch, tmp_path):
    """The launcher retries once, as torchrun does, and then fails: one of two restarts is left."""
    retries = []
    fields = {"num_launcher_restarts": lambda: len(retries)}
    scene = Scene(monkeypatch, tmp_path, max_restarts=2, trainer=fields)
    trainer = await scene.started("trainer")
    retries.append("the first")
    await asyncio.sleep(10)
    trainer.end(1)
    (await scene.started("trainer", 2)).end(1)
    assert (await scene.outcome).culprit.name == "trainer"
    assert [line.partition(" (pid")[0] for line in scene.printed if "restart " in line] == [
        "trainer: restart 1 of 2, by its launcher", "trainer exited with code 1; restart 2 of 2",
    ]  # fmt: skip


@virtual_clock
async def test_supervise_bad_input_below_a_launcher_that_retries_ends_the_run(monkeypatch, tmp_path):
    scene = Scene(monkeypatch, tmp_path, max_restarts=3)
    trainer = await scene.started("trainer")
    trainer.spec.error.write_text('{"code": 2, "message": "fix this"}')
    assert (await scene.outcome).culprit.name == "trainer" and len(scene.children) == 3


@virtual_clock
async def test_supervise_undone_work_restarts_the_finished_process(monkeypatch, tmp_path):
    """The orchestrator has exited when the trainer rolls back."""
    undone = []
    scene = Scene(monkeypatch, tmp_path, orchestrator={"needs_rerun": lambda: bool(undone)})
    (await scene.started("orchestrator")).end(0)
    await asyncio.sleep(10)
    undone.append("by a rollback")
    again = await scene.started("orchestrator", 2)
    undone.clear()
    again.end(0)
    (await scene.started("trainer")).end(0)
    assert (await scene.outcome).ok
    assert any("orchestrator is restarted: its finished work was undone" in line for line in scene.printed)


async def test_kill_all_process_without_first_thread_is_ended():
    process = subprocess.Popen([sys.executable, "-c", HALF_DEAD], stdout=subprocess.PIPE)
    process.stdout.readline()
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        await asyncio.sleep(0.01)
    try:
        tree = ProcessTree()
        assert process.pid in [member.pid for member in tree.scan({process.pid: "trainer"})]
        assert await kill_all(lambda: [m.pid for m in tree.scan({}) if m.pid == process.pid], 20) == []
    finally:
        process.kill()


async def test_kill_all_returns_what_cannot_be_killed_and_finds_what_starts_meanwhile(monkeypatch):
    processes = [subprocess.Popen([sys.executable, "-c", FOREVER], stdout=subprocess.DEVNULL) for _ in range(2)]
    first, second = (process.pid for process in processes)

    def refuse(pid, number):
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", refuse)
        assert await kill_all(lambda: [first], 0.05) == [first]
    rounds = [[first], [second], []]
    assert await kill_all(lambda: rounds.pop(0), 20) == []
    assert_gone([first, second])


async def test_stop_all_third_signal_gives_up_on_what_cannot_be_killed(monkeypatch, role):
    """The second one skips the stop timeout."""
    child, hurry, killing = ChildProcess.start(role), asyncio.Event(), asyncio.Event()

    async def kill_in_vain(find, kill_seconds, own):
        assert list(find()) == [child.pid]
        killing.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(child_processes, "kill_all", kill_in_vain)
    monkeypatch.setattr(child_processes, "descendants", lambda ignored: [child.pid])
    monkeypatch.setattr(child, "terminate", lambda: None)
    try:
        ending = asyncio.ensure_future(child_processes.stop_all([child], 600, 600, hurry))
        await asyncio.sleep(0)
        hurry.set()
        await asyncio.wait_for(killing.wait(), 30)
        await asyncio.sleep(0)
        assert not ending.done()
        hurry.set()
        assert await asyncio.wait_for(ending, 30) == [child.pid]
    finally:
        os.kill(child.pid, signal.SIGKILL)


@pytest.fixture
def role(tmp_path):
    return ProcessSpec(
        "trainer", [sys.executable, "-c", FOREVER], dict(os.environ), tmp_path / "log", tmp_path / "error"
    )


async def test_child_start_sets_the_death_signal_and_a_session_and_ignores_no_signal(role):
    """A Python program sets the death signal; Python ignores SIGPIPE, which the command must not inherit."""
    script = "import ctypes, os, signal; n = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(n))\n"
    script += "print(n.value, os.getsid(0) == os.getpid())"
    child = ChildProcess.start(replace(role, argv=[sys.executable, "-c", script]))
    assert await asyncio.wait_for(child.exited, 120) == 0
    assert role.log.read_text().split() == ["9", "True"]
    child = ChildProcess.start(replace(role, argv=["grep", "SigIgn", "/proc/self/status"]))
    assert await asyncio.wait_for(child.exited, 120) == 0
    assert not int(role.log.read_text().split()[1], 16) & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)


@pytest.mark.parametrize(
    ("visible", "keys", "after"),
    [
        ("0,1", (), None),
        ("0", ("--trainer-gpu-ids", "0"), "inference"),
        ("0,1,2", ("--inference-gpu-ids", "0,1", "--trainer-gpu-ids", "1,2"), "inference"),
        ("0", ("--trainer-gpu-ids", "0", "--trainer.device", "cpu"), None),
        ("", ("--trainer-gpu-ids", "0"), None),
    ],
)
def test_make_process_specs_shared_gpu_starts_the_trainer_after_inference(tmp_path, monkeypatch, visible, keys, after):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    roles, _ = roles_of(tmp_path, "--max-restarts", "2", *keys)
    assert roles["trainer"].start_after == after
    assert roles["trainer"].restart_spec(1).start_after == after
    assert roles["orchestrator"].start_after is None


def test_inference_restart_on_a_shared_gpu_keeps_its_kv_cache_size(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    paths = RunPaths(tmp_path)
    paths.kv_cache.write_text('{"bytes": 1}')
    roles, _ = roles_of(tmp_path, "--trainer-gpu-ids", "0")
    role = roles["inference"]
    assert role.restart_spec(0).argv == role.argv, "the size of an earlier run does not count"
    paths.kv_cache.write_text('{"bytes": 123456}')
    extra = role.restart_spec(0).argv[len(role.argv) :]
    assert extra == ["--vllm.kv-cache-memory-bytes", "123456", "--gpu-memory-utilization", "0.01"]
    paths.kv_cache.write_text('{"bytes"')
    assert role.restart_spec(0).argv == role.argv


def test_inference_is_ready_only_as_the_started_process(tmp_path):
    roles, paths = roles_of(tmp_path)
    serves = roles["inference"].is_ready
    assert not serves(os.getpid())
    heart = HeartbeatWriter(paths, "inference", "inference")
    heart.enter("start engines")
    heart._write()
    assert not serves(os.getpid())
    heart.enter(SERVING)
    heart._write()
    assert serves(os.getpid())
    assert not serves(os.getpid() + 1)
    beat = json.loads(paths.heartbeat("inference").read_text())
    paths.heartbeat("inference").write_text(json.dumps(beat | {"host": "another"}))
    assert not serves(os.getpid()), "the same pid on another host"
    heart.close(ENDED)
    assert not serves(os.getpid())


@pytest.mark.parametrize(
    ("wrapper", "code"),
    [(["setsid", "--ctty"], 129), (["setsid", "--ctty", "nohup"], 0), (["setsid"], 0)],
    ids=["terminal", "nohup", "setsid"],
)
@pytest.mark.extended
def test_rl_closed_terminal_ends_only_a_run_that_belongs_to_it(tmp_path, monkeypatch, wrapper, code):
    """Under nohup SIGHUP is ignored; under setsid none is sent, and each write to the terminal fails."""
    monkeypatch.chdir(tmp_path)  # for nohup.out
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    until_done = (
        "import os, pathlib, time; p = pathlib.Path(os.environ['RUN']) / 'done'\nwhile not p.exists(): time.sleep(0.02)"
    )
    report = REPORT.replace("ROWS", "[{'reward/mean': 1.0, 'loss': 0.5}]")
    roles = {"orchestrator": until_done + report, "trainer": until_done + report + "time.sleep(2)"}
    out = tmp_path / "out"
    master, slave = os.openpty()
    command = [*wrapper, sys.executable, "-m", "tests.unit.supervisor.driver", str(out), json.dumps(roles), "{}"]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave)
    try:
        os.close(slave)
        until(lambda: (out / "events.jsonl").exists(), "rl has not started anything")
        os.close(master)
        if code == 0:
            (out / "done").touch()
        assert process.wait(PROGRESS_TIMEOUT_SECONDS) == code
    finally:
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
async def test_signal_ignored_at_start_stays_ignored(number):
    """As with nohup, and in the background of a shell."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        async with module.stop_signals() as (stopped, _):
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGTERM)
            assert await stopped is signal.SIGTERM
            assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
