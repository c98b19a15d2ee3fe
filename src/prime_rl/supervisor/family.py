"""Who descends from `rl`, and to which role each belongs, also after its parents have died.

A process is of the role whose child it descends from. Orphans are handed to `rl` (a subreaper); they are known from an
earlier look, or by the session of one that is known. What descends from nobody known belongs to whoever has just died.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Member:
    """A descendant as it was at the last look.

    Attributes:
        pid: its process id.
        created: when it was started, unix seconds; with `pid` it is unique.
        role: that it belongs to; None of an orphan whose parents were never seen.
        command: what it is, for people.
        status: as psutil calls it.
    """

    pid: int
    created: float
    role: str | None
    command: str
    status: str

    @property
    def name(self) -> str:
        """What it is called in events, if it has no name of its own."""
        return f"{self.role or 'orphan'}/{self.pid}"


class Family:
    """The descendants of this process, looked at again and again."""

    def __init__(self) -> None:
        """Nobody is known yet."""
        self._known: dict[psutil.Process, Member] = {}
        self._sessions: dict[int, str] = {}

    def look(self, roles: Mapping[int, str]) -> list[Member]:
        """Look around.

        Args:
            roles: process id of each role's child -> its role.

        Returns:
            Everyone who is alive, children included.
        """
        processes = {p.pid: p for p in psutil.Process().children(recursive=True)}
        seen: dict[psutil.Process, Member] = {}
        for process in processes.values():
            with suppress(psutil.Error):  # it has just ended
                status = process.status()
                if status == psutil.STATUS_ZOMBIE:
                    if process.pid not in roles:
                        _bury(process.pid)
                    continue
                known = self._known.get(process)
                role = _ancestor(process, processes, roles) or (known.role if known else self._by_session(process.pid))
                # A child that was forked is what its parent is until it becomes another program.
                command = known.command if known else _command(process)
                seen[process] = Member(process.pid, process.create_time(), role, command, status)
                if role is not None:
                    self._remember_session(process.pid, role)
        self._known = seen
        return list(seen.values())

    def of(self, role: str, roles: Mapping[int, str]) -> list[int]:
        """Return the process ids of what a role whose child has ended leaves behind."""
        own = set(roles)
        return [m.pid for m in self.look(roles) if m.role in (role, None) and m.pid not in own]

    def _by_session(self, pid: int) -> str | None:
        with suppress(ProcessLookupError):
            return self._sessions.get(os.getsid(pid))
        return None

    def _remember_session(self, pid: int, role: str) -> None:
        with suppress(ProcessLookupError):
            self._sessions[os.getsid(pid)] = role


def _bury(pid: int) -> None:
    """Reap an orphan that was handed to us and has ended, lest they pile up; one with living parents is theirs."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _ancestor(process: psutil.Process, processes: Mapping[int, psutil.Process], roles: Mapping[int, str]) -> str | None:
    """The role whose child the process descends from, or is."""
    pid = process.pid
    for _ in range(len(processes) + 1):
        if pid in roles:
            return roles[pid]
        if pid not in processes:
            return None
        try:
            pid = processes[pid].ppid()
        except psutil.Error:  # it has just ended
            return None
    return None


def _command(process: psutil.Process) -> str:
    """A short name: the module that Python runs, the script, or the title that the process has given itself."""
    line: Sequence[str] = process.cmdline()
    if "-m" in line[:-1]:
        return line[line.index("-m") + 1]
    if len(line) > 1 and line[1].endswith(".py"):
        return Path(line[1]).name
    return Path(line[0]).name if line and line[0] else process.name()
