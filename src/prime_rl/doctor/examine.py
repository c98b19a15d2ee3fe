"""Observes the heartbeats of a run for a moment and diagnoses it."""

import time
from contextlib import suppress

from pydantic import ValidationError

from prime_rl.configs.shared.heartbeat import HeartbeatConfig
from prime_rl.doctor.collect import read_facts, read_toml
from prime_rl.doctor.diagnosis import Diagnosis, diagnose, is_settled
from prime_rl.liveness.heartbeat_monitor import HeartbeatMonitor, ProcessState, read_heartbeats
from prime_rl.storage.paths import RunPaths

_OBSERVE_INTERVAL_SECONDS = 1.0
_NUM_OBSERVATIONS = 2
"""After the first one: enough for each process to write another heartbeat."""


def examine(paths: RunPaths) -> Diagnosis:
    """Observe the heartbeats for a moment, longer if a process writes none, and diagnose."""
    limits = HeartbeatConfig().limits
    with suppress(ValidationError):  # a run of another version
        limits = HeartbeatConfig.model_validate(read_toml(paths.run_toml).get("heartbeat", {})).limits
    monitor, first = HeartbeatMonitor(paths, limits), read_heartbeats(paths)
    begin = time.monotonic()
    reports = monitor.poll()
    longest = int((limits.warn_after_seconds + 1) / _OBSERVE_INTERVAL_SECONDS) + 1
    for count in range(longest if first else 0):
        over = all(report.state in (ProcessState.ENDED, ProcessState.DEAD) for report in reports)
        if over or (count >= _NUM_OBSERVATIONS and is_settled(first, reports)):
            break
        time.sleep(_OBSERVE_INTERVAL_SECONDS)  # a missing heartbeat causes no event, so this polls
        reports = monitor.poll()
    return diagnose(read_facts(paths, tuple(reports), time.time(), time.monotonic() - begin))
