"""What a `Sandbox` uses unless it is constructed with other values; a worker sets it from the run's configuration."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from prime_rl.sandbox.execution import SandboxLimits

BackendName = Literal["bwrap", "wasm", "prime", "unsafe-subprocess"]
BACKENDS: tuple[str, ...] = get_args(BackendName)


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """How this process runs code that a model writes.

    Attributes:
        backend: see `Sandbox`.
        limits: of each execution.
        num_jails: jails, None for one per processor.
        max_running: executions at once in each jail.
        jail_memory_bytes: memory of each jail, where control groups are available, and of each remote machine; None is
            half of this machine's, divided by the number of jails, and 4 GiB of a remote one.
        command_timeout_seconds: time of each command of an agent.
        remote_image: container image of the remote machines of the backend `prime`; it has `python3`.
    """

    backend: BackendName = "bwrap"
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    num_jails: int | None = None
    max_running: int = 128
    jail_memory_bytes: int | None = None
    command_timeout_seconds: float = 60.0
    remote_image: str = "python:3.12-slim"


_current = SandboxSettings()


def current_settings() -> SandboxSettings:
    """Return the settings of this process."""
    return _current


def use_settings(settings: SandboxSettings) -> None:
    """Set the settings for sandboxes that this process constructs from now on."""
    global _current
    _current = settings
