"""What a `Sandbox` uses unless it is constructed with other values; a worker sets it from the run's configuration."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from prime_rl.sandbox.execution import SandboxLimits

BackendName = Literal["bwrap", "unsafe-subprocess"]

_NOT_AVAILABLE = {
    "wasm": "there is no CPython component for wasmtime on PyPI, only tools to build one",
    "prime": "remote sandboxes take about a second for each command, and a rollout needs a local session",
}
"""Backends that other systems have, and why this one does not."""


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """How this process runs code that a model writes.

    Attributes:
        backend: see `Sandbox`.
        limits: of each execution.
        num_jails: jails, None for one per processor.
        max_running: executions at once in each jail.
        jail_memory_bytes: memory of each jail, where control groups are available; None is half of this machine's,
            divided by the number of jails.
        command_timeout_seconds: time of each command of an agent.
    """

    backend: BackendName = "bwrap"
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    num_jails: int | None = None
    max_running: int = 128
    jail_memory_bytes: int | None = None
    command_timeout_seconds: float = 60.0


_current = SandboxSettings()


def check_backend(name: object) -> None:
    """Raise ValueError if there is no backend of this name; the message says what to use instead."""
    names = get_args(BackendName)
    if name not in names:
        reason = f": {_NOT_AVAILABLE[name]}" if isinstance(name, str) and name in _NOT_AVAILABLE else ""
        raise ValueError(f"sandbox backend {name!r} is not available{reason}; use {' or '.join(names)}")


def current_settings() -> SandboxSettings:
    """Return the settings of this process."""
    return _current


def use_settings(settings: SandboxSettings) -> None:
    """Set the settings for sandboxes that this process constructs from now on."""
    global _current
    _current = settings
