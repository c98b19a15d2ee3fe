"""The block `heartbeat`, which several commands share."""

from typing import ClassVar

from pydantic import Field

from prime_rl.configs.loading.base_config import BaseConfig
from prime_rl.liveness.heartbeat_limits import HeartbeatLimits


class HeartbeatConfig(BaseConfig):
    """Detection of unresponsive and dead processes (docs/fault_tolerance.md)."""

    deprecated: ClassVar[dict[str, str]] = {
        "silence": "warn_after_seconds",
        "silence_s": "warn_after_seconds",
        "timeout": "dead_after_seconds",
        "timeout_s": "dead_after_seconds",
    }

    warn_after_seconds: float = Field(5, gt=0)
    """Log a warning after this many seconds without a heartbeat; does not stop the run."""

    dead_after_seconds: float = Field(60, gt=0)
    """Treat a process, or a node of inference, as dead after this many seconds without a heartbeat."""

    @property
    def limits(self) -> HeartbeatLimits:
        """Both limits; the warning never comes after the process is declared dead."""
        return HeartbeatLimits(min(self.warn_after_seconds, self.dead_after_seconds), self.dead_after_seconds)
