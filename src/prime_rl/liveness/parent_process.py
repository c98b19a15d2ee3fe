"""Ties processes to their parent: no process of a run outlives the one that started it (Linux, I7)."""

import os
import signal
import sys
from collections.abc import Sequence

from prime_rl.core.errors import RunError

ENGINE_DIRECTORY, ENGINE_SERVER = "PRIME_RL_ENGINE_DIRECTORY", "PRIME_RL_ENGINE_SERVER"
"""Environment variables of an engine: the run's directory, if its server writes to it, and the name of the server."""
NODE_VARIABLE = "PRIME_RL_NODE"
"""Environment variable of a process that `rl` started on one of several nodes: the name of the node."""
SUPERVISED = "PRIME_RL_SUPERVISED"
"""Environment variable, `1` in processes that `rl` started: they take their configuration from `rl` alone."""

LAUNCHER = "PRIME_RL_LAUNCHER"
"""Environment variable with torchrun's process id, for its ranks: torchrun may exit before a rank reads its parent."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# exec keeps ignored signals ignored, and Python ignores SIGPIPE and SIGXFSZ: they get their default action back.
_SET_AND_EXEC = f"""
import ctypes, os, signal, sys
if ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)}, 0, 0, 0) or os.getppid() != int(sys.argv[1]):
    os._exit(1)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def is_supervised() -> bool:
    """Return whether `rl` has started this process."""
    return os.environ.get(SUPERVISED) == "1"


def die_with_parent(parent: int | None = None) -> None:
    """Make the kernel send SIGKILL to this process when its parent exits or is killed.

    The kernel binds this to the parent's thread that started the process, so that thread must keep running. Forked
    children do not inherit the setting and must call this function themselves.

    Args:
        parent: process id of the parent if known from the start, since it may exit during long imports.

    Raises:
        RunError: the parent exited before this call.
    """
    parent = os.getppid() if parent is None else parent
    request_parent_death_signal()
    if os.getppid() != parent:
        raise RunError("the process that started this one has exited")


def request_parent_death_signal() -> None:
    """Request SIGKILL at the exit of the parent, without checking that it still exists."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def with_parent_death_signal(argv: Sequence[str]) -> list[str]:
    """Return a command that requests SIGKILL at the exit of this process and then executes `argv`.

    It is a small Python program instead of a `preexec_fn`, because Python code between fork and exec can deadlock if
    the parent has threads. The request survives the exec.
    """
    return [sys.executable, "-S", "-P", "-c", _SET_AND_EXEC, str(os.getpid()), *argv]


def become_subreaper() -> None:
    """Make this process, instead of init, the parent of its orphaned descendants, so that it can end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    import ctypes  # every command imports this module, and `--help` does not need ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")
