"""Stops a trainer with a checkpoint after SIGTERM: a scheduler sends it some time before it kills the processes.

    SIGTERM, or STOP.json by `rl` --> a rank waits for batch N, or reaches it after the step that it trains
        --> all ranks agree to stop before batch N, and STOP.json names it --> checkpoint N --> exit

Without checkpoints, SIGTERM ends the process at once.
"""

import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import torch
from loguru import logger

from prime_rl.liveness.parent_process import is_supervised
from prime_rl.storage.checkpoint_artifacts import STOP, StopRecord, read_stop, write_stop
from prime_rl.storage.rollback import start_name
from prime_rl.trainer.parallel.process_group import World

EXIT_CODE = 128 + signal.SIGTERM


class StopRequest:
    """Whether this trainer should stop. A context: SIGTERM is handled inside of it, unless `rl` started the trainer.

    `rl` writes the request to the file instead, because torchrun answers SIGTERM by ending its ranks, and also sends it
    to the ranks that remain after a failure.

    Attributes:
        is_agreed: whether all ranks have agreed to stop.
    """

    def __init__(self, directory: Path | None, branch: int, world: World) -> None:
        """Watch for requests in the folder of the checkpoints; None never stops."""
        self.is_agreed = False
        self._directory, self._branch, self._world = directory, branch, world
        self._has_signal = False
        self._handles = directory is not None and not is_supervised()

    def __enter__(self) -> Self:
        if self._directory is not None and self._world.is_main:
            record = read_stop(self._directory)
            if record is not None and (record.step is not None or record.start != start_name()):
                (self._directory / STOP).unlink()  # of an earlier start
        if self._handles:
            self._previous = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handles:
            signal.signal(signal.SIGTERM, self._previous)

    def is_requested(self, step: int) -> bool:
        """Return whether this rank has a request to stop before batch `step`; the other ranks may not have it yet."""
        if self._directory is None:
            return False
        if self._has_signal:
            return True
        record = read_stop(self._directory)
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
        self._has_signal = True


def exit_if_stopped(stopped: bool) -> None:
    """Exit with the code of SIGTERM; under `rl` with 0, because torchrun restarts ranks that exit with another code."""
    if stopped:
        sys.exit(0 if is_supervised() else EXIT_CODE)
