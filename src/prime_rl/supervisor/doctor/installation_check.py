"""`doctor --install` and `doctor --sandbox`: can this machine run the project, and isolate model-written code?"""

import asyncio
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prime_rl.core.errors import ConfigError, summarize_exception
from prime_rl.core.http_requests import send_request
from prime_rl.core.terminal_escape import escape_control_chars
from prime_rl.inference.vllm.libnuma import provide_libnuma
from prime_rl.storage.paths import RunPaths
from prime_rl.supervisor.planning.model_shape import describe_family
from prime_rl_sandbox.execution import SandboxConfigError
from prime_rl_sandbox.jail.bubblewrap import JAIL_UID, bubblewrap_version, find_bubblewrap, find_interpreter
from prime_rl_sandbox.prime_jail import check_prime
from prime_rl_sandbox.sandbox import Sandbox

_PYTHON_VERSIONS = ((3, 11), (3, 12))
_FEW_OPEN_FILES = 4096
_LITTLE_SHARED_MEMORY_BYTES = 1 << 30
_IMPORT_TIMEOUT_SECONDS = 300
_HUB_TIMEOUT_SECONDS = 10
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_NUM_EXECUTIONS = 20
"""Executions in a sandbox whose speed is measured."""
_SYNC = "run `uv sync --extra cpu`, or `--extra gpu` with NVIDIA GPUs"

# In a process of its own: only the trainer and the server import these packages, and a broken library may crash it.
_PROBE_TORCH = """
import json, torch
available = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "available": available,
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if available else [],
}))
"""
_PROBE_VLLM = """
import json, torch, vllm
from vllm.platforms import current_platform
current_platform.import_kernels()
print(json.dumps({
    "version": vllm.__version__, "device": current_platform.device_type, "folder": vllm.__path__[0],
    "kernels": not current_platform.is_cpu() or hasattr(torch.ops._C, "init_cpu_memory_env"),
}))
"""


class CheckLevel(StrEnum):
    """Outcome of a check. Only `FAIL` makes `doctor --install` exit with 1."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class InstallationCheck:
    """One line of the report: what was checked, the outcome, and the value or the fix."""

    name: str
    level: CheckLevel
    message: str

    def __str__(self) -> str:
        """Return e.g. `ok    torch        2.13.0+cpu`."""
        return f"{self.level:<5} {self.name:<12} {escape_control_chars(self.message)}"


def check_installation(directory: Path) -> Iterator[InstallationCheck]:
    """Run all checks and yield each result when it is known. Runs will be written to `directory`.

    If it holds a run already, a check names what works with its model.
    """
    yield _check("python", _check_python)
    torch: dict[str, Any] = {}
    yield _check("torch", lambda: _check_torch(torch))
    yield _check("cuda", lambda: _check_cuda(torch))
    yield _check("vllm", lambda: _check_vllm(torch))
    yield _check("flash-attn", _check_flash_attention)
    yield _check("open files", _check_open_files)
    yield _check("/dev/shm", lambda: _check_shared_memory(Path("/dev/shm")))
    yield _check("write access", lambda: _check_write_access(directory))
    yield _check("hub", lambda: _check_hub(_HUB_TIMEOUT_SECONDS))
    yield _check("sandbox", _check_sandbox)
    if (file := RunPaths(directory).config("trainer")).is_file():
        yield _check("model", lambda: _check_model(file))


def _check(name: str, check: Callable[[], tuple[CheckLevel, str]]) -> InstallationCheck:
    try:
        return InstallationCheck(name, *check())
    except ConfigError as error:
        return InstallationCheck(name, CheckLevel.FAIL, str(error))
    except Exception as error:  # noqa: BLE001 - a check that breaks is a finding; the others still run
        return InstallationCheck(name, CheckLevel.FAIL, summarize_exception(error))


def _check_python() -> tuple[CheckLevel, str]:
    here = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] not in _PYTHON_VERSIONS:
        return CheckLevel.FAIL, f"{here} is not supported; run `uv sync --python 3.12`"
    script = Path(sysconfig.get_path("scripts"), "eval")
    if script.is_file() and "prime_rl" not in script.read_text(errors="replace"):
        return CheckLevel.WARN, f"{script} is verifiers' command; run `uv sync --reinstall-package prime-rl`"
    return CheckLevel.OK, f"{here}, {sys.executable}"


def _check_torch(found: dict[str, Any]) -> tuple[CheckLevel, str]:
    found.update(_import(_PROBE_TORCH))
    return CheckLevel.OK, found["version"]


def _check_cuda(torch: dict[str, Any]) -> tuple[CheckLevel, str]:
    """Compare the driver with torch's build; `torch` is what `_PROBE_TORCH` prints, empty if torch is broken."""
    has_driver = _DRIVER_FILE.exists()
    if not torch:
        return CheckLevel.WARN, "not checked, because torch cannot be imported"
    if torch["available"]:
        return CheckLevel.OK, f"{torch['cuda']}, {len(torch['gpus'])} GPUs: {', '.join(sorted(set(torch['gpus'])))}"
    if not has_driver:
        return CheckLevel.OK, "no NVIDIA driver; runs use the CPU"
    if torch["cuda"] is None:
        return CheckLevel.WARN, "there is an NVIDIA driver, but torch is a CPU build; run `uv sync --extra gpu`"
    return CheckLevel.FAIL, (
        f"torch is built for CUDA {torch['cuda']} and finds no GPU; compare with the driver's version in `nvidia-smi`"
    )


def _check_vllm(torch: dict[str, Any]) -> tuple[CheckLevel, str]:
    stand_in = ", a stand-in for libnuma: no memory binding" if provide_libnuma() else ""
    vllm = _import(_PROBE_VLLM)
    line = f"{vllm['version']}, device {vllm['device'] or 'unknown'}{stand_in}"
    if torch and (vllm["device"] == "cuda") != torch["available"]:
        return CheckLevel.FAIL, f"{line}, which is not torch's device; {_SYNC}"
    if not vllm["kernels"]:
        return CheckLevel.FAIL, f"{line}: its kernels cannot be loaded; `ldd {vllm['folder']}/_C*.so` names what lacks"
    return CheckLevel.OK, line


def _import(program: str) -> dict[str, Any]:
    """Run a program that prints one JSON object on its last line.

    Raises:
        RuntimeError: it failed; the message is its last line on stderr, with the fix.
    """
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_SECONDS)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(f"{lines[-1]}; {_SYNC}")
    return json.loads(done.stdout.splitlines()[-1])


def _check_flash_attention() -> tuple[CheckLevel, str]:
    found = [name for name in ("flash_attn_interface", "flash_attn") if find_spec(name) is not None]
    return CheckLevel.OK, ", ".join(found) or "not installed; optional, attention uses torch's own kernel"


def _check_open_files() -> tuple[CheckLevel, str]:
    """Processes raise the soft limit themselves (`core.os_errors.allow_open_files`), so that the hard one counts."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard >= _FEW_OPEN_FILES:
        return CheckLevel.OK, f"hard limit {'unlimited' if hard == resource.RLIM_INFINITY else hard}"
    return CheckLevel.WARN, f"hard limit {hard}; a thousand rollouts in flight need more: `ulimit -Hn 65536` as root"


def _check_shared_memory(place: Path) -> tuple[CheckLevel, str]:
    free = shutil.disk_usage(place).free
    line = f"{free / 2**30:.1f} GiB free"
    if free >= _LITTLE_SHARED_MEMORY_BYTES:
        return CheckLevel.OK, line
    return CheckLevel.WARN, f"{line}; engines with several GPUs need more: `--shm-size 8g` for a container"


def _check_write_access(directory: Path) -> tuple[CheckLevel, str]:
    cache = Path(os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
    for place in (directory, cache):
        try:
            existing = next(path for path in (place, *place.absolute().parents) if path.exists())
            with tempfile.TemporaryDirectory(dir=existing):
                pass
        except OSError as error:
            return CheckLevel.FAIL, f"{place}: {error.strerror}; choose others with OUTPUT_DIR and HF_HOME"
    return CheckLevel.OK, f"{directory.absolute()} ({_free(directory)}), {cache} ({_free(cache)})"


def _free(place: Path) -> str:
    existing = next(path for path in (place, *place.absolute().parents) if path.exists())
    return f"{shutil.disk_usage(existing).free / 2**30:,.0f} GiB free"


def _check_hub(timeout_seconds: float) -> tuple[CheckLevel, str]:
    """Ask the hub for its first page. Without it, local models and data sets still work."""
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return CheckLevel.OK, "HF_HUB_OFFLINE is set; only local and cached files are used"
    url = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        status = send_request("HEAD", url, timeout_seconds).status_code
    except ConnectionError as error:
        return CheckLevel.WARN, f"{url} is not reachable ({error}); use local files, and set HF_HUB_OFFLINE=1"
    if status >= 500:
        return CheckLevel.WARN, f"{url} answers with status {status}"
    return CheckLevel.OK, f"{url} is reachable"


def _check_sandbox() -> tuple[CheckLevel, str]:
    report = check_sandbox()
    if report.isolated:
        return CheckLevel.OK, f"bwrap, isolated: {report.message}"
    return CheckLevel.WARN, f"not available: {report.message}; only environments that run code need it"


def _check_model(file: Path) -> tuple[CheckLevel, str]:
    """Compare with the table of families the model in the trainer's configuration."""
    name = tomllib.loads(file.read_text())["model"]["name"]
    family = describe_family(name)
    return CheckLevel.OK, family or f"{name} is not on this machine yet; docs/reference/models.md has the families"


@dataclass(frozen=True, slots=True)
class SandboxReport:
    """What the machine supports: `isolated` after a successful self-test, else the reason in `message`."""

    isolated: bool
    message: str

    def lines(self) -> list[str]:
        """Return the report as text, with the other backends and what `prime` needs."""
        if self.isolated:
            return [f"sandbox: bwrap, isolated: {self.message}"]
        return [
            f"sandbox: not available: {self.message}",
            f"sandbox: backend prime, in remote machines: {_prime_state()}",
            "sandbox: unsafe-subprocess would run model-written code with your rights and without any isolation",
        ]


def _prime_state() -> str:
    try:
        check_prime()
    except SandboxConfigError as error:
        return f"not available: {error}"
    return "installed; select it with `backend` (docs/sandbox.md)"


def check_sandbox() -> SandboxReport:
    """Start a sandbox, try to escape from it, and measure a few executions."""
    try:
        milliseconds, limits_whole_jails = asyncio.run(_measure())
        user = JAIL_UID if os.getuid() == 0 else None
        interpreter = find_interpreter(user)
        version = bubblewrap_version(find_bubblewrap())
    except SandboxConfigError as error:
        return SandboxReport(False, str(error))
    memory = "a control group limits each jail" if limits_whole_jails else "no control groups: limits of processes only"
    speed = f"{milliseconds:.1f} ms for an execution (median)"
    return SandboxReport(True, f"{version}, {interpreter}, self-test passed, {memory}, {speed}")


async def _measure() -> tuple[float, bool]:
    """Return the median milliseconds of an execution, and whether control groups are available."""
    async with Sandbox(num_jails=1) as sandbox:
        results = [await sandbox.run("print(1)") for _ in range(_NUM_EXECUTIONS)]
        return statistics.median(result.milliseconds for result in results), sandbox.limits_whole_jails
