"""What every trainer process does before it trains: die with its parent, log, choose threads, look at its directory."""

import os
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from prime_rl.configs.shared import LogConfig
from prime_rl.errors import ConfigError
from prime_rl.logs import set_up_logging
from prime_rl.run.heart import Heartbeat
from prime_rl.run.heartbeat import forget
from prime_rl.run.paths import RunPaths, steps_in
from prime_rl.supervisor.process import LAUNCHER, follow_parent, is_supervised


def start_process(log: LogConfig) -> None:
    """Prepare this process; ranks of one trainer and a lone trainer alike."""
    if is_supervised():
        launcher = os.environ.get(LAUNCHER)
        follow_parent(int(launcher) if launcher else None)
    set_up_logging(log)
    disable_progress_bar()
    # One thread unless the user says otherwise: results are then the same everywhere, and the sampler, which shares
    # the cores of a small machine, is not starved.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def rank_heartbeat(paths: RunPaths, timeout_s: float) -> Heartbeat:
    """Make this rank's heartbeat, not started, in the phase in which the ranks find each other.

    Args:
        paths: of the run.
        timeout_s: longest wait of one rank for another.
    """
    rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    if not rank:
        forget(paths, "trainer", [f"trainer_{one}" for one in range(size)])
    # So that a thousand ranks do not keep the file system of the run directory busy; still well below `silence`.
    interval_s = min(3.0, max(1.0, size / 64))
    heart = Heartbeat(paths, f"trainer_{rank}", "trainer", interval_s)
    heart.enter("wait for all ranks", timeout_s)
    return heart


def check_output_dir(paths: RunPaths, resuming: bool) -> None:
    """Refuse a directory that cannot be written, or that holds the weights of an earlier run that is not resumed.

    Raises:
        ConfigError: says which.
    """
    check_writable("output_dir", paths.root)
    if not resuming and (steps := steps_in(paths.weights_dir)):
        raise ConfigError(
            f"output_dir: {paths.weights_dir} holds versions {steps[0]} to {steps[-1]} of an earlier run, which would "
            "be taken for this one's; remove it or choose another output_dir"
        )


def check_writable(key: str, directory: Path) -> None:
    """Make `directory`, which `key` names; look now whether files can be put there, and not after hours of training.

    Raises:
        ConfigError: they cannot.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{key}: cannot make {directory}: {error.strerror}") from None
    if not os.access(directory, os.W_OK):
        raise ConfigError(f"{key}: {directory} is not writable")
