"""Control groups: found in the files of the kernel, a limit for a whole jail, and nothing left behind."""

import asyncio
import os
from pathlib import Path

import psutil
import pytest
from test_sandbox import find_process
from tests.support.isolation import needs_isolation

from prime_rl_sandbox.execution import ExecutionRequest, SandboxLimits, SandboxSettings, Verdict, use_settings
from prime_rl_sandbox.jail import jail as jail_module
from prime_rl_sandbox.jail.jail import create_control_group, find_group_folders
from prime_rl_sandbox.sandbox import Sandbox

V1 = "30 23 0:26 {root} /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}"


@pytest.mark.parametrize(
    ("groups", "mounts", "folders"),
    [
        ("4:memory:/a/b\n8:pids:/", [V1.format(root="/", name="memory"), V1.format(root="/", name="pids")],
         {"memory": "/sys/fs/cgroup/memory/a/b", "pids": "/sys/fs/cgroup/pids"}),
        ("4:memory:/docker/x", [V1.format(root="/docker/x", name="memory")], {"memory": "/sys/fs/cgroup/memory"}),
        ("0::/user.slice", ["30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"], {}),
        ("", [], {}),
    ],
)  # fmt: skip
def test_find_group_folders(groups, mounts, folders, monkeypatch):
    monkeypatch.setattr(jail_module, "_read", lambda path: "")  # the second version without controllers
    fields = [line.split(":", 2) for line in groups.splitlines()]
    found = find_group_folders(fields, [mount.split() for mount in mounts])
    assert found == {name: Path(path) for name, path in folders.items()}


def test_create_second_version_enables_the_controllers_and_sets_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(jail_module, "_find_parents", lambda: {"": tmp_path})
    left_behind = tmp_path / "prime_rl_jail_999999999_a"
    left_behind.mkdir()
    made = Path.mkdir
    owners = {}

    def mkdir(self):
        made(self)
        for name in ("memory.max", "pids.max", "cgroup.procs", "memory.events.local"):
            (self / name).touch()

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(os, "chown", lambda path, user, group: owners.update({path: user}))
    monkeypatch.setattr(jail_module.shutil, "which", lambda name: f"/usr/bin/{name}")
    group = create_control_group(2**28, 64000)
    (folder,) = group.folders
    assert (folder / "memory.max").read_text() == str(2**28)
    assert (folder / "cgroup.subtree_control").read_text() == "+memory"
    assert owners == dict.fromkeys([folder, folder / "cgroup.procs", folder / "server/cgroup.procs"], 64000)
    assert str(folder / "server") in group.enter_command(64000)  # a group with groups in it has no processes
    assert not group.reached_its_limit()
    (folder / "memory.events.local").write_text("low 0\noom 2\noom_kill 1\n")
    assert group.reached_its_limit()
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory +pids"
    assert not left_behind.exists()


def test_create_without_permission_or_setpriv_for_another_user_is_none(tmp_path, monkeypatch):
    with monkeypatch.context() as without_setpriv:
        without_setpriv.setenv("PATH", str(tmp_path))
        assert create_control_group(2**28, 64000) is None
    monkeypatch.setattr(jail_module, "_find_parents", lambda: {"": tmp_path / "missing" / "a"})
    assert create_control_group(2**28, None) is None
    monkeypatch.setattr(jail_module, "_find_parents", lambda: {"memory": tmp_path})
    assert create_control_group(2**28, None) is None  # memory without processes
    assert list(tmp_path.iterdir()) == []


HOG = """
import os, time
for _ in range({count}):
    if os.fork() == 0:
        data = bytearray(b"x") * ({mib} * 2**20)
        time.sleep(1)
        os._exit(0)
print([os.wait()[1] for _ in range({count})])
"""
INNOCENT = "import time\ndata = bytearray(b'x') * (120 * 2**20)\ntime.sleep(1.5)\nprint(len(data))"
INNOCENT_WITH_PROCESSES = """
import subprocess
child = "import time; data = bytearray(b'x') * (100 * 2**20); time.sleep(1.5); print(len(data))"
print(subprocess.run(["/usr/bin/python3", "-c", child], capture_output=True, text=True).stdout)
"""


def own_groups():
    """The groups of this process's jails, those of other tests included."""
    parents = jail_module._find_parents().values()
    return {folder for parent in parents for folder in parent.glob(f"prime_rl_jail_{os.getpid()}_*")}


@pytest.mark.extended
@needs_isolation
async def test_jail_without_memory_ends_the_program_that_uses_it_and_no_neighbour():
    limits = SandboxLimits(timeout_seconds=20, memory_bytes=256 * 2**20)
    use_settings(SandboxSettings(jail_memory_bytes=320 * 2**20, limits=limits))
    before = own_groups()
    async with Sandbox(num_jails=1, num_warm=4) as sandbox:
        if not sandbox.limits_whole_jails:
            pytest.skip("this process cannot create control groups")
        hogs = [HOG.format(count=3, mib=80), HOG.format(count=4, mib=200)]
        results = await asyncio.gather(*map(sandbox.run, [INNOCENT, *hogs, INNOCENT_WITH_PROCESSES]))
        assert [result.verdict for result in results] == ["ok", "ok", "memory", "ok"], results
        assert [result.stdout.strip() for result in results[::3]] == [str(120 * 2**20), str(100 * 2**20)]
        assert results[1].stdout == "[0, 0, 0]\n"  # within its own limit, so it is run again alone
        async with sandbox.session() as session:
            assert (await session.run(HOG.format(count=4, mib=200))).verdict is Verdict.MEMORY
            assert (await session.run("1")).verdict is Verdict.OK  # the cells are counted one by one
    assert own_groups() <= before


TAKE_ALL_PROCESSES = """
import os, signal
pids = []
try:
    while len(pids) < 30:
        if (pid := os.fork()) == 0:
            signal.pause()
        pids.append(pid)
except BlockingIOError:
    for _ in range({num_left}):
        os.kill(pids[-1], signal.SIGKILL)
        os.waitpid(pids.pop(), 0)
len(pids)
"""


@needs_isolation
@pytest.mark.parametrize("num_left", [0, 1])
async def test_jail_without_processes_keeps_those_that_run_and_continues_when_some_end(monkeypatch, num_left):
    """With one left, a supervisor starts and its child does not."""
    monkeypatch.setattr(jail_module, "_MAX_PROCESSES", 20)
    async with Sandbox(num_jails=1, num_warm=1) as sandbox:
        if not sandbox.limits_whole_jails:
            pytest.skip("this process cannot create control groups")
        (jail,) = sandbox.jail_pids
        async with sandbox.session() as session, sandbox.session() as waiting:
            while len(psutil.Process(jail).children(recursive=True)) < 8:  # an execution is prepared
                await asyncio.sleep(0.01)
            assert int((await session.run(TAKE_ALL_PROCESSES.format(num_left=num_left))).value) < 15
            task = asyncio.create_task(sandbox.run(argv=["/bin/sleep", "975"], timeout=1000))
            await find_process(sandbox, "975")
            for _ in range(100):  # the jail tries to prepare another execution
                assert (await waiting.run("1")).ok
            assert (await session.run("for pid in pids: os.kill(pid, signal.SIGKILL), os.waitpid(pid, 0)")).ok
            assert (await sandbox.run("print(1)")).stdout == "1\n"
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert sandbox.jail_pids == [jail]


@pytest.mark.extended
@needs_isolation
async def test_jail_kill_without_control_groups_says_nothing_about_the_code(monkeypatch):
    """The memory of the machine is short, for which any program can be the reason."""
    monkeypatch.setattr(jail_module, "_find_parents", dict)
    async with Sandbox(num_jails=1, num_warm=2) as sandbox:
        assert not sandbox.limits_whole_jails
        task = asyncio.create_task(sandbox._pool.run(ExecutionRequest(argv=["/bin/sleep", "976"])))
        (await find_process(sandbox, "976")).kill()  # as the kernel does
        assert (await task).verdict is Verdict.INFRA
