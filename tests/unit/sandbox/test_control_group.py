"""Control groups: found in the files of the kernel, a limit for a whole jail, and nothing left behind."""

from pathlib import Path

import pytest

from prime_rl.sandbox.execution import SandboxLimits, Verdict
from prime_rl.sandbox.jail import control_group
from prime_rl.sandbox.jail.control_group import create_control_group, find_group_folders
from prime_rl.sandbox.sandbox import Sandbox
from prime_rl.sandbox.settings import SandboxSettings, use_settings

from .conftest import needs_bubblewrap

MEMORY_HOGS = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        data = bytearray(150 * 2**20)
        data[::4096] = bytes(len(data[::4096]))[:len(data[::4096])].replace(b"\\0", b"x")
        time.sleep(1)
        os._exit(0)
print(sorted(os.wait()[1] for _ in range(4)))
"""
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
    monkeypatch.setattr(control_group, "_read", lambda path: "")  # the second version without controllers
    fields = [line.split(":", 2) for line in groups.splitlines()]
    found = find_group_folders(fields, [mount.split() for mount in mounts])
    assert found == {name: Path(path) for name, path in folders.items()}


def test_create_second_version_enables_the_controllers_and_sets_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(control_group, "_find_parents", lambda: {"": tmp_path})
    left_behind = tmp_path / "prime_rl_jail_999999999_a"
    left_behind.mkdir()
    made = Path.mkdir

    def mkdir(self):
        made(self)
        for name in ("memory.max", "pids.max"):
            (self / name).touch()

    monkeypatch.setattr(Path, "mkdir", mkdir)
    group = create_control_group(2**28, None)
    (folder,) = group.folders
    assert (folder / "memory.max").read_text() == str(2**28)
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory +pids"
    assert not left_behind.exists()


def test_create_without_permission_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(control_group, "_find_parents", lambda: {"": tmp_path / "missing" / "a"})
    assert create_control_group(2**28, None) is None
    monkeypatch.setattr(control_group, "_find_parents", lambda: {"memory": tmp_path})
    assert create_control_group(2**28, None) is None  # memory without processes
    assert list(tmp_path.iterdir()) == []


def test_create_without_setpriv_is_none_for_another_user(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert create_control_group(2**28, 64000) is None


@needs_bubblewrap
async def test_jail_beyond_its_memory_loses_the_execution_only():
    use_settings(SandboxSettings(jail_memory_bytes=256 * 2**20, limits=SandboxLimits(timeout_seconds=10)))
    try:
        async with Sandbox(num_jails=1, num_warm=2) as sandbox:
            if not sandbox.limits_whole_jails:
                pytest.skip("this process cannot create control groups")
            groups = [folder for jail in sandbox._pool._jails for folder in jail.control_group.folders]
            pids = sandbox.jail_pids
            result = await sandbox.run(MEMORY_HOGS)
            assert result.verdict is Verdict.MEMORY or result.stdout.count("9") >= 2, result
            assert (await sandbox.run("print(1)")).stdout == "1\n"
            assert sandbox.jail_pids == pids
            assert all(folder.exists() for folder in groups)
    finally:
        use_settings(SandboxSettings())
    assert not any(folder.exists() for folder in groups)
