"""The descendants of `rl`, and the child process to which each belongs, also after its parents have exited."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Descendant:
    """A descendant at the time of the last scan.

    Attributes:
        created: start time, Unix seconds; unique together with `pid`.
        role: name of the child process that it belongs to; None for an orphan whose parents were never seen.
        command: short name of its program.
        status: as psutil names it.
    """

    pid: int
    created: float
    role: str | None
    command: str
    status: str


class ProcessTree:
    """The descendants of this process.

    A process has the role of the child that it descends from. Orphans, which the kernel hands to `rl` (a subreaper),
    keep the role of an earlier scan, or have that of their session.
    """

    def __init__(self) -> None:
        self._known: dict[psutil.Process, Descendant] = {}
        self._sessions: dict[int, str] = {}
        self.ignored: set[int] = set()
        """Children that are no part of the run, and that others end and reap: the page."""

    def scan(self, roles: Mapping[int, str]) -> list[Descendant]:
        """List all living descendants; reap exited orphans. `roles` maps the process id of each child to its role."""
        processes = {p.pid: p for p in psutil.Process().children(recursive=True) if p.pid not in self.ignored}
        seen: dict[psutil.Process, Descendant] = {}
        for process in processes.values():
            with suppress(psutil.Error, ProcessLookupError):  # it has just exited
                status = process.status()
                if has_ended(process):
                    if process.pid not in roles:
                        with suppress(ChildProcessError):  # its own parent reaps it
                            os.waitpid(process.pid, os.WNOHANG)
                    continue
                known, session = self._known.get(process), os.getsid(process.pid)
                role = _ancestor(process, processes, roles) or (known.role if known else self._sessions.get(session))
                # A forked child has the command line of its parent until it executes another program.
                command = known.command if known else _command(process)
                seen[process] = Descendant(process.pid, process.create_time(), role, command, status)
                if role is not None:
                    self._sessions[session] = role
        self._known = seen
        return list(seen.values())

    def leftovers(self, role: str, roles: Mapping[int, str]) -> list[int]:
        """Process ids that an exited child of `role` left behind; unknown orphans count as its own."""
        return [m.pid for m in self.scan(roles) if m.role in (role, None) and m.pid not in roles]


def has_ended(process: psutil.Process) -> bool:
    """Whether all threads of a process have ended. Its status is "zombie" as soon as the first thread has.

    Raises:
        psutil.NoSuchProcess: it has been reaped.
    """
    return process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1


def _ancestor(process: psutil.Process, processes: Mapping[int, psutil.Process], roles: Mapping[int, str]) -> str | None:
    """Role of the child process that `process` is, or descends from."""
    pid = process.pid
    with suppress(psutil.Error):  # it has just exited
        for _ in range(len(processes) + 1):
            if pid in roles or pid not in processes:
                return roles.get(pid)
            pid = processes[pid].ppid()
    return None


def _command(process: psutil.Process) -> str:
    """A short name: the Python module, the script, or the title that the process has set."""
    with suppress(psutil.ZombieProcess):  # its first thread has ended, others have not
        line: Sequence[str] = process.cmdline()
        if "-m" in line[:-1]:
            return line[line.index("-m") + 1]
        if len(line) > 1 and line[1].endswith(".py"):
            return Path(line[1]).name
        if line and line[0]:
            return Path(line[0]).name
    return process.name()
