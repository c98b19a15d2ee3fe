"""The settings that each inference server must fit: the orchestrator's, and those of the running trainer.

A server reports its own with each answer to `GET /policy`, so they are compared before it is leased, and again when it
returns after a restart. The trainer's are in its heartbeat, which a relay copies as well. Nothing is compared with a
heartbeat of a server, which may be of another run.
"""

import asyncio
import time

from prime_rl.core.daemon_futures import run_in_daemon_thread
from prime_rl.core.errors import ConfigError
from prime_rl.liveness.heartbeat_limits import HeartbeatLimits
from prime_rl.liveness.heartbeat_monitor import LivenessTracker, read_heartbeat, read_kernel_state
from prime_rl.liveness.run_settings import (
    ADAPTER_RANK,
    PUBLISHED_DTYPE,
    SAMPLED_LENGTH,
    ProcessSettings,
    RunSettings,
    find_difference,
)
from prime_rl.storage.paths import RunPaths

_TRAINER = "trainer_0"
"""All ranks have the same settings."""
_POLL_SECONDS = 1.0


class UnfitServer(ConfigError):
    """The settings of a server do not fit those of the run; the message has places, values and cure."""


class RequiredSettings:
    """What servers must fit."""

    def __init__(self, model: str, seq_len: int, paths: RunPaths, limits: HeartbeatLimits) -> None:
        """Know the orchestrator's settings: the model as it is named in requests, and the longest sample in tokens."""
        own: RunSettings = {"model.name": model, SAMPLED_LENGTH: seq_len}
        self._orchestrator, self._trainer = ProcessSettings("here", own), ProcessSettings("", {})
        self._file = paths.heartbeat(_TRAINER)
        self._tracker = LivenessTracker(_TRAINER, limits)

    def find_problem(self, url: str, settings: RunSettings) -> str | None:
        """Return why the server at `url` cannot be used with these settings of it; None if it can."""
        server = ProcessSettings(f"at {url}", settings)
        return find_difference(self._orchestrator, server) or find_difference(self._trainer, server)

    def read_trainer(self) -> None:
        """Read the settings of the trainer, if it has been seen alive and has not ended. Blocks."""
        if (beat := read_heartbeat(self._file)) is None:
            return
        report = self._tracker.observe(beat, time.monotonic(), read_kernel_state(beat))
        is_known = report.seen_alive and not report.has_exited
        values = {key: beat.settings[key] for key in (PUBLISHED_DTYPE, ADAPTER_RANK) if key in beat.settings}
        self._trainer = ProcessSettings(f"at {beat}", values if is_known else {})

    async def follow_trainer(self) -> None:
        """Read the settings of the trainer every second, until cancelled."""
        while True:
            await run_in_daemon_thread(self.read_trainer)
            await asyncio.sleep(_POLL_SECONDS)
