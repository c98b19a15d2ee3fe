"""scripts/install.sh in an empty home, `doctor --install`, and the files of docker/."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from prime_rl.entrypoints import doctor
from prime_rl.inference.vllm import libnuma
from prime_rl.supervisor.doctor import installation_check
from prime_rl.supervisor.doctor.installation_check import (
    CheckLevel,
    InstallationCheck,
    SandboxReport,
    check_installation,
)
from tests.support.command import executable
from tests.support.isolation import make_readable, needs_isolation
from tests.support.server import free_port

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "install.sh"
NAMES = ["python", "torch", "cuda", "vllm", "flash-attn", "open files", "/dev/shm", "write access", "hub", "sandbox"]
CPU_TORCH = {"version": "2.13.0", "cuda": None, "available": False, "gpus": []}


def install(*arguments, cwd, home, **variables):
    """Run the script with the system's commands, among which is no uv."""
    inherited = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    environment = inherited | {"HOME": str(home), "PATH": "/usr/bin:/bin", **variables}
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cpuu"], "unknown argument '--cpuu'"),
        (["--dir"], "--dir needs a value"),
        (["--dir", "elsewhere"], "elsewhere is not a checkout of prime-rl"),
        (["--dir", "full", "--repository", "x"], "full is not a checkout and not empty"),
    ],
)
def test_install_with_bad_arguments_exits_with_2(tmp_path, arguments, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    done = install(*arguments, cwd=tmp_path, home=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"error: .*{re.escape(message)}.*\n", done.stderr)
    done = install(cwd=tmp_path, home="")
    assert (done.returncode, done.stderr) == (2, "error: the variable HOME is not set\n")


def test_install_exits_with_1_if_a_step_fails(tmp_path):
    done = install("--repository", str(tmp_path / "none"), cwd=tmp_path, home=tmp_path)
    assert done.returncode == 1 and "does not exist" in done.stderr
    tools = fake_uv(tmp_path, "exit 2")
    done = install(cwd=tmp_path, home=tmp_path, PATH=f"{tools}:/usr/bin:/bin")
    assert done.returncode == 1 and done.stdout.endswith("sync --locked --extra cpu\n")
    assert "3.11 or 3.12 is needed" in done.stderr


def test_install_finds_its_checkout_with_cdpath_and_a_driver(tmp_path):
    tools = fake_uv(tmp_path)
    (tools / "nvidia-smi").write_text("#!/bin/bash\necho 'GPU 0: H100'\n")
    (tools / "nvidia-smi").chmod(0o755)
    done = install(cwd=ROOT, home=tmp_path, PATH=f"{tools}:/usr/bin:/bin", CDPATH=".:/tmp")
    assert done.returncode == 0, done.stderr
    assert f"  cd {ROOT}\n  uv run --extra gpu rl @ configs/reverse_text/gpu.toml --trainer-gpu-ids 0" in done.stdout


def fake_uv(tmp_path, after=""):
    """A folder with a `uv` that prints its arguments."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "uv").write_text(f"#!/bin/bash\necho $*\n{after}\n")
    (tools / "uv").chmod(0o755)
    return tools


def test_shell_scripts_pass_shellcheck():
    scripts = [*ROOT.glob("scripts/*.sh"), *ROOT.glob("deploy/slurm/*.sbatch"), *ROOT.glob(".ci/*")]
    done = subprocess.run([executable("shellcheck"), *map(str, scripts)], capture_output=True, text=True)
    assert len(scripts) >= 4 and done.returncode == 0, done.stdout


@pytest.mark.extended
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed, whose cache the test uses")
def test_install_in_an_empty_home_leads_to_a_running_main_job(tmp_path):
    home, checkout = tmp_path / "home", tmp_path / "a checkout"
    home.mkdir()
    cache = subprocess.run(["uv", "cache", "dir"], capture_output=True, text=True, check=True).stdout.strip()
    arguments = ["--cpu", "--repository", str(ROOT), "--dir", str(checkout)]
    first = install(*arguments, cwd=tmp_path, home=home, UV_CACHE_DIR=cache)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "installing uv to ~/.local/bin" in first.stdout
    again = install(*arguments, cwd=tmp_path, home=home, UV_CACHE_DIR=cache)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "installing uv" not in again.stdout and "Installed" not in again.stderr
    commands = re.findall(r"^  (.+)$", again.stdout.partition("Start a run with:")[2], re.MULTILINE)
    assert len(commands) == 3 and commands[-1].startswith("uv run --extra cpu rl @ ")
    program = " && ".join(commands) + f" --max-steps 2 --inference.server.port {free_port()}"
    environment = os.environ | {"HOME": str(home), "PATH": "/usr/bin:/bin", "UV_CACHE_DIR": cache}
    environment.pop("VIRTUAL_ENV", None)
    done = subprocess.run(["bash", "-c", program], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (checkout / "outputs" / "weights" / "step_2").is_dir()


def test_doctor_install_prints_one_line_per_check_and_its_exit_code(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(installation_check, "check_sandbox", lambda: SandboxReport(False, "no namespaces"))
    monkeypatch.setattr(installation_check, "_import", lambda program: CPU_TORCH | {"device": "cpu", "kernels": True})
    assert doctor._main(["--install"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[6:18].strip() for line in lines] == NAMES
    assert {line[:5].strip() for line in lines} <= {"ok", "warn"}
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/trainer.toml").write_text(f'model.name = "{ROOT / "configs/reverse_text/model"}"')
    assert doctor._main([str(tmp_path), "--install"]) == 0
    assert "model        qwen3: " in capsys.readouterr().out
    monkeypatch.setattr(installation_check, "_import", lambda program: 1 / 0)
    assert doctor._main(["--install", "--json"]) == 1
    by_name = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    levels = {name: by_name[name]["level"] for name in ("torch", "cuda", "sandbox")}
    assert levels == {"torch": "fail", "cuda": "warn", "sandbox": "warn"}
    assert "ZeroDivisionError" in by_name["torch"]["message"]


@pytest.mark.extended
def test_check_installation_imports_the_real_packages(tmp_path):
    checks = {check.name: check for check in check_installation(tmp_path)}
    assert list(checks) == NAMES
    assert {checks["torch"].level, checks["vllm"].level, checks["python"].level} == {CheckLevel.OK}


PROBE_LIBNUMA = """
import ctypes, subprocess, sys
from prime_rl.inference.vllm.libnuma import provide_libnuma
call = "import ctypes; print(ctypes.CDLL('libnuma.so.1').numa_available(), end=' ')"
print(provide_libnuma(), provide_libnuma())
exec(call)
subprocess.run([sys.executable, "-c", call], check=True)
"""


def test_provide_libnuma_without_the_library_serves_this_process_and_its_children(tmp_path):
    (tmp_path / "libnuma.so.1").touch()  # the loader takes it and finds no library in it
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", PROBE_LIBNUMA]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["True", "True", "-1", "-1"], done.stderr


@pytest.mark.extended
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_stand_in_for_libnuma_is_what_its_source_builds(tmp_path):
    """Compared by the symbols with their versions: compilers differ in the bytes."""
    folder = Path(libnuma.__file__).with_name("libnuma_stand_in")
    source = (folder / "libnuma.c").read_text()
    command = re.search(r"cc -shared.*libnuma\.c", source, re.DOTALL).group().replace("\\\n *", "")
    built = tmp_path / "libnuma.so.1"
    subprocess.run(command.replace("-o libnuma.so.1", f"-o {built}").split(), cwd=folder, check=True)
    assert exported(built) == exported(folder / "libnuma.so.1")
    assert len(exported(built)) == 8


def exported(library):
    """Return the functions of a library with their versions."""
    done = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in done.stdout.splitlines() if line.split()[1] == "T"}


@pytest.mark.parametrize(
    ("torch", "has_driver", "level"),
    [
        ({}, True, CheckLevel.WARN),
        (CPU_TORCH, False, CheckLevel.OK),
        (CPU_TORCH, True, CheckLevel.WARN),
        (CPU_TORCH | {"cuda": "13.0"}, False, CheckLevel.OK),
        (CPU_TORCH | {"cuda": "13.0"}, True, CheckLevel.FAIL),
        (CPU_TORCH | {"cuda": "13.0", "available": True, "gpus": ["H100"] * 2}, True, CheckLevel.OK),
    ],
)
def test_check_cuda_compares_driver_and_build(tmp_path, monkeypatch, torch, has_driver, level):
    file = tmp_path / "version"
    monkeypatch.setattr(installation_check, "_DRIVER_FILE", file)
    if has_driver:
        file.touch()
    assert installation_check._check_cuda(torch)[0] is level


def test_checks_name_the_cause_and_escape_control_characters(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match=r"No module named 'no_such_package'; run `uv sync"):
        installation_check._import("import no_such_package")
    found = CPU_TORCH | {"device": "cpu", "kernels": False, "folder": "/place"}
    monkeypatch.setattr(installation_check, "_import", lambda program: found)
    level, message = installation_check._check_vllm(CPU_TORCH)
    assert level is CheckLevel.FAIL and "ldd /place/_C*.so" in message
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    level, message = installation_check._check_hub(5)
    assert level is CheckLevel.WARN and "http://127.0.0.1:9 is not reachable" in message
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert installation_check._check_python()[0] is CheckLevel.OK
    (tmp_path / "eval").write_text("from verifiers.scripts.eval import main")
    level, message = installation_check._check_python()
    assert level is CheckLevel.WARN
    assert message == f"{tmp_path}/eval is verifiers' command; run `uv sync --reinstall-package prime-rl`"
    assert "\x1b" not in str(InstallationCheck("torch", CheckLevel.OK, "\x1b[2J"))


def test_check_write_access_names_a_place_that_is_not_writable(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "file").touch()
    assert installation_check._check_write_access(tmp_path / "new" / "run")[0] is CheckLevel.OK
    level, message = installation_check._check_write_access(tmp_path / "file" / "run")
    assert level is CheckLevel.FAIL and f"{tmp_path}/file/run" in message
    refusal = PermissionError(13, "Permission denied", "/root/runs")
    monkeypatch.setattr(Path, "exists", Mock(side_effect=refusal))  # the home of another user
    level, message = installation_check._check_write_access(Path("/root/runs"))
    assert level is CheckLevel.FAIL
    assert message == "/root/runs: Permission denied; choose others with OUTPUT_DIR and HF_HOME"


@needs_isolation
def test_doctor_sandbox_reports_isolation(capsys):
    assert doctor._main(["--sandbox", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["isolated"]
    assert "self-test passed" in report["message"]
    assert "control group" in report["message"]


def test_doctor_sandbox_that_cannot_isolate_exits_with_2(tmp_path, monkeypatch, capsys):
    fake = make_readable(tmp_path) / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: no namespaces' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor._main(["--sandbox"]) == 2
    error = "sandbox: not available: the sandbox cannot isolate code"
    assert capsys.readouterr().out.splitlines()[0].startswith(error)


def test_doctor_without_arguments_asks_for_one(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["doctor"])
    with pytest.raises(SystemExit, match="2"):
        doctor.main()
    assert "pass the output_dir of a run" in capsys.readouterr().err


FILES = sorted((ROOT / "docker").glob("Dockerfile.*"))


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.suffix[1:])
def test_dockerfile_passes_hadolint_runs_without_root_and_forwards_signals(file):
    done = subprocess.run([executable("hadolint"), str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    text = file.read_text()
    assert "nvidia/cuda" not in text or "-devel-" in text, "kernels are compiled with nvcc at their first use"
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE)[-1] == "1001"
    assert 'ENTRYPOINT ["tini", "-g", "--"]' in text
