"""I7 no orphan: a process of a run never outlives the process that started it (Linux)."""

import ctypes
import os
import signal

from prime_rl.configs.sources import SUPERVISED
from prime_rl.errors import RunError

__all__ = ["LAUNCHER", "SUPERVISED", "become_subreaper", "follow_parent", "is_supervised", "set_parent_death_signal"]

LAUNCHER = "PRIME_RL_LAUNCHER"
"""Environment variable: process id of torchrun, for its ranks: it may be gone before one of them can ask who it is."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def is_supervised() -> bool:
    """Whether `rl` has started this process."""
    return os.environ.get(SUPERVISED) == "1"


def follow_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process as soon as its parent is gone, however the parent ended.

    The signal is SIGKILL: whoever has lost its supervisor has nobody left to wait for a clean end. It is bound to the
    thread that made this process, so parents start processes from a thread that lasts. Processes that this one forks
    do not inherit it; they call this function themselves.

    Args:
        parent: its process id, where that is known from the start: after long imports it may be gone already. None is
            whose child this process is now.

    Raises:
        RunError: the parent went away before this was set up.
    """
    parent = os.getppid() if parent is None else parent
    set_parent_death_signal()
    if os.getppid() != parent:
        raise RunError("the process that started this one is gone")


def set_parent_death_signal() -> None:
    """Ask for SIGKILL at the parent's death. Also safe between fork and exec, where it survives the exec."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def become_subreaper() -> None:
    """Have orphaned descendants handed to this process instead of init, so that it can find and end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")
