"""Limits of the time without a heartbeat, apart from the monitor because every command's `--help` imports them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeartbeatLimits:
    """Seconds without a heartbeat after which a process is silent, and after which it is dead (`[heartbeat]`)."""

    warn_after_seconds: float = 5.0
    dead_after_seconds: float = 60.0
