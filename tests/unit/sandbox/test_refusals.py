"""Hosts that cannot isolate code: one line with the fix, exit code 2."""

import json
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from itertools import takewhile

import pytest

from prime_rl.configs.rollouts.sandbox import SandboxConfig
from prime_rl.core.errors import ConfigError
from prime_rl.sandbox import escape_test
from prime_rl.sandbox.execution import ExecutionResult, Verdict
from prime_rl.sandbox.jail import bubblewrap
from prime_rl.sandbox.prime import prime_jail
from prime_rl.sandbox.sandbox import Sandbox
from prime_rl.sandbox.wasm import component

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


def test_sandbox_without_bubblewrap_names_the_package(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="apt-get install bubblewrap"):
        Sandbox()


def test_sandbox_unknown_backend_is_refused():
    with pytest.raises(ConfigError, match="'docker' is unknown; use one of bwrap, wasm, prime, unsafe-subprocess"):
        Sandbox("docker")
    with pytest.raises(ValueError, match="bwrap"):
        SandboxConfig(backend="docker")


def test_sandbox_backend_without_its_packages_names_the_extra(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(component, "version", missing)
    monkeypatch.setattr(prime_jail.importlib.util, "find_spec", lambda name: None)
    for backend in ("wasm", "prime"):
        with pytest.raises(ConfigError, match=f"uv sync --extra {backend}"):
            Sandbox(backend)


def test_sandbox_prime_without_key_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="set PRIME_API_KEY"):
        Sandbox("prime")


@pytest.mark.parametrize("backend", ["wasm", "prime"])
def test_sandbox_backend_with_its_own_python_refuses_folders(backend, tmp_path):
    with pytest.raises(ConfigError, match="remove `paths`"):
        Sandbox(backend, paths=[tmp_path])


async def test_sandbox_refused_namespaces_are_one_line_with_bubblewraps_message(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    fake.chmod(0o755)
    # The jail runs as another user, and pytest's folders are its own.
    for folder in takewhile(lambda parent: parent.parent != parent.parent.parent, (tmp_path, *tmp_path.parents)):
        folder.chmod(folder.stat().st_mode | 0o055)
    monkeypatch.setattr("prime_rl.sandbox.jail.backend.find_bubblewrap", lambda: str(fake))
    with pytest.raises(ConfigError, match="uid map: Permission denied; ") as caught:
        await Sandbox(num_jails=1).__aenter__()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "environment", "fix"),
    [
        ({"/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1"}, {}, "profile bwrap"),
        ({"/proc/sys/user/max_user_namespaces": "0"}, {}, "sysctl user.max_user_namespaces"),
        ({"/proc/sys/kernel/unprivileged_userns_clone": "0"}, {}, "sysctl kernel.unprivileged_userns_clone=1"),
        ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "hostUsers: false"),
        ({}, {}, "docs/sandbox.md"),
    ],
)
def test_explain_refusal_names_the_fix_for_this_host(monkeypatch, settings, environment, fix):
    monkeypatch.setattr(bubblewrap, "_read_setting", settings.get)
    monkeypatch.setattr(bubblewrap, "_in_docker", lambda: False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    line = bubblewrap.explain_refusal("bwrap: no\n")
    assert "bwrap: no; " in line
    assert fix in line
    assert "\n" not in line


def test_explain_refusal_in_docker_names_its_options(monkeypatch):
    monkeypatch.setattr(bubblewrap, "_read_setting", lambda path: None)
    monkeypatch.setattr(bubblewrap, "_in_docker", lambda: True)
    assert "--security-opt seccomp=unconfined" in bubblewrap.explain_refusal("")


async def test_check_isolation_of_a_host_without_isolation_names_what_was_possible():
    async with Sandbox("unsafe-subprocess", num_jails=1, num_warm=1) as unsafe:
        with pytest.raises(ConfigError) as caught:
            await escape_test.check_isolation(unsafe.run)
    for escape in ("read a file of the host", "connect to the host", "see processes of the host"):
        assert escape in str(caught.value)


async def test_check_isolation_that_cannot_run_is_an_error():
    async def run(code, **options):
        return ExecutionResult(Verdict.ERROR, stderr="broken")

    with pytest.raises(ConfigError, match="broken"):
        await escape_test.check_isolation(run)


def run_doctor(*arguments, **environment):
    command = [sys.executable, "-m", "prime_rl.entrypoints.doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment or None)


@needs_bubblewrap
def test_doctor_sandbox_reports_isolation():
    result = run_doctor("--sandbox", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["isolated"]
    assert "self-test passed" in report["message"]
    assert "control group" in report["message"]


def test_doctor_sandbox_without_bubblewrap_exits_with_2(tmp_path):
    result = run_doctor("--sandbox", PATH=str(tmp_path))
    assert result.returncode == 2
    assert result.stdout.splitlines()[0].startswith("sandbox: not available: bubblewrap is not installed")


def test_doctor_without_arguments_asks_for_one():
    result = run_doctor()
    assert result.returncode == 2
    assert "pass the output_dir of a run" in result.stderr
