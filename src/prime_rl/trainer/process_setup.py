"""Setup of a trainer process: parent monitoring, logging, threads, heartbeat, and checks of its directories."""

import os
from pathlib import Path
from types import MappingProxyType

import torch
from transformers.utils.logging import disable_progress_bar

from prime_rl.configs.shared.blocks import LogConfig
from prime_rl.core.errors import ConfigError, translate_error
from prime_rl.core.logs.logging import set_up_logging
from prime_rl.liveness.file_locks import hold_role_lock
from prime_rl.liveness.heartbeat_monitor import remove_heartbeats
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.liveness.parent_process import LAUNCHER, die_with_parent, is_supervised
from prime_rl.liveness.run_settings import RunSettings
from prime_rl.storage.paths import RunPaths, steps_in


def start_process(log: LogConfig, paths: RunPaths | None = None, role: str = "trainer") -> None:
    """Prepare this process, with or without torchrun; it logs to the file of `role` in `paths`, if they are given."""
    if is_supervised():
        launcher = os.environ.get(LAUNCHER)
        die_with_parent(int(launcher) if launcher else None)
    name = f"{role}_rank_{os.environ['RANK']}" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else role
    set_up_logging(log.level, log.utc, paths.log(name) if paths is not None and log.file else None)
    if paths is not None and not int(os.environ.get("RANK", "0")):
        hold_role_lock(paths, role)
    disable_progress_bar()
    # One thread by default: results are the same on every machine, and the sampler keeps the cores that it shares.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def rank_heartbeat(paths: RunPaths, timeout_s: float, settings: RunSettings = MappingProxyType({})) -> HeartbeatWriter:
    """Create this rank's heartbeat, not started, in the phase in which the ranks connect for up to `timeout_s`."""
    rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    if not rank:
        remove_heartbeats(paths, "trainer", [f"trainer_{one}" for one in range(size)])
    # Longer with many ranks, to limit the load on the file system; well below `heartbeat.warn_after_seconds`.
    interval_s = min(3.0, max(1.0, size / 64))
    heartbeat = HeartbeatWriter(paths, f"trainer_{rank}", "trainer", interval_s, settings)
    heartbeat.enter("wait for all ranks", timeout_s)
    return heartbeat


def check_output_dir(paths: RunPaths, resuming: bool) -> None:
    """Raise ConfigError if the directory cannot be written, or contains weights of a run that is not resumed."""
    check_writable("output_dir", paths.root)
    if not resuming and (steps := steps_in(paths.weights_dir)):
        versions = f"versions {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"version {steps[0]}"
        raise ConfigError(
            f"output_dir: {paths.weights_dir} contains {versions} of an earlier run, which would be mistaken for this "
            "run's; remove it or choose another output_dir"
        )


def check_writable(key: str, directory: Path) -> None:
    """Create `directory`, the value of `key`, and raise ConfigError if it is not writable."""
    problem = f"{key}: cannot create {directory}"
    with translate_error(OSError, lambda error: ConfigError(f"{problem}: {error.strerror}")):
        directory.mkdir(parents=True, exist_ok=True)
    if not os.access(directory, os.W_OK):
        raise ConfigError(f"{key}: {directory} is not writable")
