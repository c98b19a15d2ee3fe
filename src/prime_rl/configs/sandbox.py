"""The block `[sandbox]`: how environments run code that a model writes."""

from pathlib import Path

from pydantic import Field, field_validator

from prime_rl.configs.lists import StrList
from prime_rl.configs.loading.base_config import BaseConfig
from prime_rl_sandbox.execution import BackendName, SandboxConfigError, SandboxLimits, SandboxSettings, check_paths

_LIMITS = SandboxLimits()
_SETTINGS = SandboxSettings()


class SandboxConfig(BaseConfig):
    """Isolation and limits of code that a model writes, per environment worker (docs/sandbox.md). It has no network."""

    backend: BackendName = _SETTINGS.backend
    """`bwrap` isolates by the kernel. `prime` runs the code in remote machines. `unsafe-subprocess` runs it with your
    permissions and without isolation."""

    timeout_seconds: float = Field(_LIMITS.timeout_seconds, gt=0)
    """Time of an execution, unless the environment sets one. Time without a free processor is not counted."""

    command_timeout_seconds: float = Field(_SETTINGS.command_timeout_seconds, gt=0)
    """Time of a command of an agent (v1 tasksets)."""

    memory_bytes: int = Field(_LIMITS.memory_bytes, ge=64 * 2**20)
    """Address space of each process."""

    jail_memory_bytes: int | None = Field(None, ge=256 * 2**20)
    """Memory of each jail, all executions together, where control groups are available (`doctor --sandbox`), and of
    each remote machine. None is half of this machine's memory, divided by the number of jails, or 4 GiB remotely. Each
    worker takes as much, so set it where several run."""

    num_processes: int = Field(_LIMITS.num_processes, ge=1)
    """Processes and threads of an execution."""

    output_bytes: int = Field(_LIMITS.output_bytes, ge=1024)
    """Standard output and error of an execution together; more ends it."""

    disk_bytes: int = Field(_LIMITS.disk_bytes, ge=2**16)
    """Files of an execution, which are in memory."""

    num_jails: int | None = Field(None, ge=1)
    """Jails of a worker, each with its own fork server; None starts one per processor and at most 8, or one remote
    machine."""

    max_running: int = Field(_SETTINGS.max_running, ge=1)
    """Executions at once in each jail; further ones wait."""

    paths: StrList = Field([])
    """Folders with further packages, which all users can read, on the module path of the code. Backends `bwrap` and
    `unsafe-subprocess`."""

    preload: StrList = Field([])
    """Modules that each execution finds imported already, such as `numpy`: importing them takes longer than most
    programs."""

    remote_image: str = _SETTINGS.remote_image
    """Container image of the remote machines of the backend `prime`. It contains `python3`."""

    @field_validator("paths")
    @classmethod
    def _check_paths(cls, paths: list[str]) -> list[str]:
        try:
            check_paths([Path(path) for path in paths])
        except SandboxConfigError as error:
            raise ValueError(str(error)) from None
        return paths

    @property
    def settings(self) -> SandboxSettings:
        """The settings of a worker process."""
        limits = SandboxLimits(
            timeout_seconds=self.timeout_seconds,
            memory_bytes=self.memory_bytes,
            num_processes=self.num_processes,
            output_bytes=self.output_bytes,
            disk_bytes=self.disk_bytes,
        )
        return SandboxSettings(
            backend=self.backend,
            limits=limits,
            num_jails=self.num_jails,
            max_running=self.max_running,
            jail_memory_bytes=self.jail_memory_bytes,
            command_timeout_seconds=self.command_timeout_seconds,
            preload=tuple(self.preload),
            paths=tuple(map(Path, self.paths)),
            remote_image=self.remote_image,
        )
