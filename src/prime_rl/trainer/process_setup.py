"""Setup of a trainer process: threads, garbage collection, checks of directories and settings.

A `StopRequest` stops it with a checkpoint after SIGTERM: a scheduler sends it some time before it kills the processes.

    SIGTERM, or STOP.json by `rl` --> a rank waits for batch N, or reaches it after the step that it trains
        --> all ranks agree to stop before batch N, and STOP.json names it --> checkpoint N --> exit

Without checkpoints, SIGTERM ends the process at once.
"""

import gc
import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from loguru import logger
from transformers.utils.logging import disable_progress_bar

from prime_rl.configs.command_bases import TrainingConfig
from prime_rl.configs.monitoring import METRIC_LOGGERS
from prime_rl.core.errors import ConfigError, translate_error
from prime_rl.core.os_errors import allow_open_files, wrap_os_errors
from prime_rl.liveness.parent_process import is_supervised
from prime_rl.storage.checkpoint_artifacts import STOP, StopRecord, read_stop, write_stop
from prime_rl.storage.paths import RunPaths, steps_in
from prime_rl.storage.rollback import start_name
from prime_rl.trainer.parallel.process_group import RankConsensus, World

_OF_A_NODE = {
    "output_dir", "exp_id", "log", "heartbeat", *METRIC_LOGGERS, "memory_profiler_path", "trace_path",
}  # fmt: skip
"""Keys that do not decide what is trained, and may differ: for example paths of mounts."""


def limit_process(deterministic: bool = False) -> None:
    """Set the limits of this process: open files, threads, the output of libraries, and deterministic kernels."""
    allow_open_files()  # gloo opens a connection to every other rank, for each of several groups
    disable_progress_bar()
    # One thread by default: results are the same on every machine, and the sampler keeps the cores that it shares.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    if deterministic:  # cuBLAS reads its variable at its first call, transformers the one of flash_attention_2 per call
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"
        torch.use_deterministic_algorithms(True)


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


class GarbageCollection:
    """Collects every `interval` steps, which are the same on all ranks, and at no other time. Created after the setup.

    With automatic collection each rank collects at its own time, and all others wait for it in the next collective.
    Objects of the setup are frozen, so that one collection takes milliseconds.
    """

    def __init__(self, interval: int) -> None:
        """Collect the garbage of the setup and disable automatic collection."""
        self._interval = interval
        gc.collect()
        gc.freeze()
        gc.disable()

    def step_done(self, step: int) -> None:
        """Collect at multiples of the interval, which are the same steps on every rank, also after a restart."""
        if (step + 1) % self._interval == 0:
            gc.collect()

    def close(self) -> None:
        """Enable automatic collection again."""
        gc.unfreeze()
        gc.enable()


def check_rank_settings(config: TrainingConfig, world: World) -> None:
    """Raise ConfigError on all ranks if one has other settings than rank 0 (I9). All ranks call it together.

    Each rank updates its own shards, so different settings, such as two learning rates, would train a mixture. One
    torchrun gives all its ranks the same settings, so those of one node are not compared.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) == world.size:
        return
    own = config.model_dump(mode="json", exclude=_OF_A_NODE)
    ranks, here = RankConsensus(world), f"rank {world.rank} on {socket.gethostname()}"
    place, expected = ranks.on_main(lambda: (here, own))

    def compare() -> None:
        if (found := _find_difference(expected, own)) is not None:
            key, theirs, mine = found
            raise ConfigError(f"{key} = {theirs} at {place} and {mine} at {here}; give all ranks the same")

    ranks.gather(compare)


def _find_difference(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> tuple[str, Any, Any] | None:
    """Return the first key with different values, with both values; the type of a block comes before its other keys."""
    for name in sorted(one.keys() | other.keys(), key=lambda name: (name != "type", name)):
        key, first, second = f"{prefix}{name}", one.get(name), other.get(name)
        if isinstance(first, Mapping) and isinstance(second, Mapping):
            if (found := _find_difference(first, second, f"{key}.")) is not None:
                return found
        elif first != second:
            return key, "set" if isinstance(first, Mapping) else first, "set" if isinstance(second, Mapping) else second
    return None


EXIT_CODE = 128 + signal.SIGTERM


class StopRequest:
    """Whether this trainer should stop. A context: SIGTERM is handled inside of it, unless `rl` started the trainer.

    `rl` writes the request to the file instead, because torchrun answers SIGTERM by ending its ranks, and also sends it
    to the ranks that remain after a failure.

    Attributes:
        is_agreed: whether all ranks have agreed to stop.
        has_signal: whether this rank has received SIGTERM.
    """

    def __init__(self, directory: Path | None, branch: int, world: World) -> None:
        """Watch for requests in the folder of the checkpoints; None never stops."""
        self.is_agreed = False
        self._directory, self._branch, self._world = directory, branch, world
        self.has_signal = False
        self._reads_file = not int(os.environ.get("LOCAL_RANK", 0))
        self._handles = directory is not None and not is_supervised()

    def __enter__(self) -> Self:
        self.discard_earlier()
        if self._handles:
            self._previous = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._handles:
            signal.signal(signal.SIGTERM, self._previous)

    def discard_earlier(self) -> None:
        """Remove the request of an earlier start."""
        if self._directory is not None and self._world.is_main:
            record = read_stop(self._directory)
            if record is not None and (record.step is not None or record.start != start_name()):
                (self._directory / STOP).unlink()

    def declare(self, step: int) -> None:
        """Record that all ranks stop before batch `step`, on which they have agreed elsewhere."""
        self.is_agreed = self._directory is not None
        if self._directory is not None and self._world.is_main:
            with wrap_os_errors("record the stop", self._directory / STOP):
                write_stop(self._directory, StopRecord(step, self._branch, start_name()))

    def is_requested(self, step: int) -> bool:
        """Return whether this rank has a request to stop before batch `step`; the other ranks may not have it yet.

        One rank of each node reads the file.
        """
        if self._directory is None:
            return False
        if self.has_signal:
            return True
        record = read_stop(self._directory) if self._reads_file else None
        if record is None:
            return False
        if record.step is None:
            return record.start is not None and record.start == start_name()
        return (record.step, record.branch) == (step, self._branch)

    def agree(self, step: int) -> bool:
        """Return whether the trainer stops before batch `step`. All ranks call it together, once for each step."""
        if self._directory is None:
            return False
        agreed = self.is_requested(step)
        record = StopRecord(step, self._branch, start_name())
        if agreed:
            with suppress(FileNotFoundError):  # another rank replaces it at the same moment
                write_stop(self._directory, record)  # ends the wait of the ranks without a signal
        if self._world.size > 1:
            agreed = bool(self._world.sum(torch.tensor(float(agreed), device=self._world.device)).item())
        if agreed and self._world.is_main:
            write_stop(self._directory, record)
            logger.info("stopping before batch {} on request", step)
        self.is_agreed = agreed
        return agreed

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.has_signal = True


def exit_if_stopped(stopped: bool) -> None:
    """Exit with the code of SIGTERM; under `rl` with 0, because torchrun restarts ranks that exit with another code."""
    if stopped:
        sys.exit(0 if is_supervised() else EXIT_CODE)
