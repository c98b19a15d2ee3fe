"""I7 no hang, no orphan: run the roles until the work is done, one of them fails for good, or the user stops them.

    started --> ends with 0 --> done, when all that finish have            (called back, if its work was undone)
       |  \
       |   +--> fails --> its orphans are ended --> started again          as often as it may
       |          +--> bad input, or no restart left --> all end, the culprit is named
       +--> stopped, silent or stuck --> killed --> fails
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_rl.errors import RunError
from prime_rl.supervisor.children import Child, Role, end_all, end_orphans
from prime_rl.supervisor.events import Events
from prime_rl.supervisor.family import Family
from prime_rl.supervisor.lookout import LOOK_S, Lookout, kill
from prime_rl.supervisor.process import become_subreaper

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BAD_INPUT = 2
_REASON_S = 30.0
"""So long after a descendant was killed, the end of its role is held to be due to that."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that things may take.

    Attributes:
        grace: for an orderly end after SIGTERM.
        kill: for the kernel to end what was killed.
        spread: to look for the true culprit after the first failure, since a death makes others fail. A server whose
            engine has died needs two, and its clients fail at once.
        straggle: for the others that finish, once the role that does the last of the work has ended.
        start: more of that for one that was started again, and has to load everything first.
    """

    grace: float = 5.0
    kill: float = 4.0
    spread: float = 4.0
    straggle: float = 60.0
    start: float = 240.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        culprit: the role that ended it; None after success or a signal from outside.
        code: exit code of the culprit, minus the signal's number if one killed it; None if it did not end in time.
        reason: what was wrong with the culprit, if it was killed for it.
        stopped_by: the signal that stopped `rl`, if one did.
        left: process ids that could not be ended.
    """

    culprit: Role | None = None
    code: int | None = None
    reason: str | None = None
    stopped_by: signal.Signals | None = None
    left: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        """The work was done."""
        return self.culprit is None and self.stopped_by is None


async def supervise(
    roles: Sequence[Role],
    limits: Limits | None = None,
    events: Events | None = None,
    lookout: Lookout | None = None,
) -> Outcome:
    """Start the roles at once, and return when all is over and no process is left.

    Args:
        roles: what to start; each waits by itself for what it needs of the others.
        limits: how long things may take.
        events: takes down what happens.
        lookout: finds those who are stopped, silent or stuck; None looks for none.

    Raises:
        RunError: a role cannot be started; those already started have been ended.
    """
    limits = limits or Limits()
    become_subreaper()
    async with _signals() as (stopped, hurry):
        run = _Run(roles, limits, events or Events(None, lambda line: None), lookout, stopped)
        try:
            run.start()
            outcome = await run.until_over()
        except RunError as error:
            run.events.add("failed", "rl", detail=str(error))
            raise
        finally:
            left = await end_all(run.children, limits.grace, limits.kill, hurry) if run.children else []
    return Outcome(outcome.culprit, outcome.code, outcome.reason, outcome.stopped_by, tuple(left))


@asynccontextmanager
async def _signals() -> AsyncIterator[tuple[asyncio.Future[signal.Signals], asyncio.Event]]:
    """Turn the first signal into a result, and a further one into impatience."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[signal.Signals] = loop.create_future()
    hurry = asyncio.Event()

    def received(number: signal.Signals) -> None:
        if stopped.done():
            hurry.set()
        else:
            stopped.set_result(number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, received, number)
    try:
        yield stopped, hurry
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


class _Run:
    """The roles of a run, while it goes on; `children` has one of each, the latest."""

    def __init__(
        self,
        roles: Sequence[Role],
        limits: Limits,
        events: Events,
        lookout: Lookout | None,
        stopped: asyncio.Future[signal.Signals],
    ) -> None:
        self.children: list[Child] = []
        self._roles, self._limits, self.events, self._stopped = roles, limits, events, stopped
        self._lookout = lookout
        self._family = lookout.family if lookout else Family()
        self._used = dict.fromkeys((role.name for role in roles), 0)
        self._by_launcher = {role.name: role.restarted() for role in roles}
        self._before = dict(self._by_launcher)
        self._reasons: dict[str, tuple[float, str]] = {}
        self._said: set[int] = set()
        self._again: set[int] = set()
        self._look_due = time.monotonic() + LOOK_S

    def start(self) -> None:
        for role in self._roles:
            self.children.append(Child.start(role))
            self._say_started(self.children[-1])

    async def until_over(self) -> Outcome:
        """Wait for a failure that is not mended, the end of all roles that finish, or a signal."""
        straggling: float | None = None
        while True:
            watched: set[asyncio.Future[Any]] = {
                self._stopped,
                *(child.ended for child in self.children if not child.ended.done()),
            }
            patience = max(0.0, self._look_due - time.monotonic())
            await asyncio.wait(watched, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if self._stopped.done():
                number = self._stopped.result()
                self.events.add("finished", "rl", detail=f"stopped by {number.name}")
                return Outcome(stopped_by=number)
            for child in self.children:
                if child.ended.done() and not _failed(child):
                    self._say_ended(child)
            if self._all_done():
                self.events.add("finished", "rl")
                return Outcome()
            if (outcome := await self._mend()) is not None:
                return outcome
            if time.monotonic() >= self._look_due:
                if (hopeless := self._look()) is not None:
                    return self._give_up(hopeless, 1)
                self._look_due = time.monotonic() + LOOK_S
            if not any(child.role.last and child.ended.done() for child in self.children):
                straggling = None
                continue
            straggling = straggling or time.monotonic()
            late = next(child for child in self.children if child.role.finishes and not child.ended.done())
            patience = self._limits.straggle + (self._limits.start if late.pid in self._again else 0.0)
            if time.monotonic() - straggling > patience:
                return self._give_up(late, None)

    def _all_done(self) -> bool:
        return all(c.ended.done() and c.ended.result() == 0 for c in self.children if c.role.finishes)

    async def _mend(self) -> Outcome | None:
        """Start again what has failed; what cannot be mended ends the run."""
        for index, child in enumerate(self.children):
            if not _failed(child):
                continue
            if not self._may_restart(child):
                culprit = await _culprit(self.children, self._limits.spread)
                return self._give_up(culprit, culprit.ended.result())
            await self._restart(index)
        for index, child in enumerate(self.children):
            # Whoever does the last of the work is there, or all is over: then nothing was undone.
            at_work = any(other.role.last and not other.ended.done() for other in self.children)
            if child.ended.done() and not _failed(child) and at_work and child.role.recalled():
                self._start_again(index, f"{child.role.name} is called back: finished work was undone by a restart")
        return None

    def _may_restart(self, child: Child) -> bool:
        told = child.role.told()
        bad_input = child.ended.result() == _BAD_INPUT or (told is not None and told["code"] == _BAD_INPUT)
        return not bad_input and self._left(child.role) > 0

    def _left(self, role: Role) -> int:
        """Restarts that a role may still have; those by its launcher count."""
        return role.restarts - self._used[role.name] - (role.restarted() - self._before[role.name])

    async def _restart(self, index: int) -> None:
        child = self.children[index]
        role, code = child.role, child.ended.result()
        self._say_ended(child)
        orphans = self._family.of(role.name, self._alive())
        await end_orphans(orphans, self._limits.kill)
        left = self._left(role) - 1
        self._used[role.name] += 1
        number = f"restart {role.restarts - left} of {role.restarts}"
        why = f": {why}" if (why := self._why(role)) else ""
        self._start_again(index, f"{role.name} {how(code)}{why}; {number}", left)

    def _start_again(self, index: int, why: str, left: int | None = None) -> None:
        role = self.children[index].role
        if role.again is not None:
            role = role.again(self._left(role) if left is None else left)
        self.children[index] = Child.start(role, why)
        self._again.add(self.children[index].pid)
        self._say_started(self.children[index], why)

    def _look(self) -> Child | None:
        """Kill those who do nothing any more. Returns whose launcher goes on in vain, as the input is bad."""
        for one in self._lookout.look(self._alive()) if self._lookout else ():
            self._reasons[one.role] = time.monotonic(), one.why
            self.events.add("killed", one.name, one.pid, role=one.role, detail=one.why, say=f"killed: {one.why}")
            kill(one.pid)
        for child in self.children:
            if child.ended.done():
                continue
            told = child.role.told()
            if told is not None and told["code"] == _BAD_INPUT and child.role.restarts:
                return child
            self._note_launcher(child)
        return None

    def _note_launcher(self, child: Child) -> None:
        """Say so, if the role's child has started processes of its own again."""
        role = child.role
        if (times := role.restarted()) <= self._by_launcher[role.name]:
            return
        self._by_launcher[role.name] = times
        why = self._why(role)
        role.error.unlink(missing_ok=True)  # the next one's is another
        number = f"restart {role.restarts - self._left(role)} of {role.restarts}"
        detail = f"{number}, by its launcher" + (f": {why}" if why else "")
        self.events.add("restarted", role.name, child.pid, role=role.name, detail=detail, say=f"{role.name}: {detail}")

    def _alive(self) -> dict[int, str]:
        return {child.pid: child.role.name for child in self.children if not child.ended.done()}

    def _reason(self, role: Role) -> str | None:
        """Why a process of the role was killed just now."""
        when, why = self._reasons.get(role.name, (float("-inf"), ""))
        return why if time.monotonic() - when < _REASON_S else None

    def _why(self, role: Role) -> str | None:
        """What ended the role: why it was killed, or what it said itself."""
        told = role.told()
        return self._reason(role) or (told["message"] if told else None)

    def _give_up(self, child: Child, code: int | None) -> Outcome:
        if child.ended.done():
            self._say_ended(child)
        self.events.add("failed", child.role.name, child.pid, role=child.role.name, code=code, detail=how(code))
        return Outcome(child.role, code, self._reason(child.role))

    def _say_started(self, child: Child, why: str | None = None) -> None:
        role = child.role
        self.events.add(
            "started" if why is None else "restarted",
            role.name,
            child.pid,
            role=role.name,
            detail=why,
            say=f"started {role.name} (pid {child.pid}), log {role.log}" if why is None else f"{why} (pid {child.pid})",
        )

    def _say_ended(self, child: Child) -> None:
        role, code = child.role, child.ended.result()
        if child.pid not in self._said:
            self._said.add(child.pid)
            self.events.add("ended", role.name, child.pid, role=role.name, code=code, detail=self._why(role))


def how(code: int | None) -> str:
    """In words how a process has ended."""
    if code is None:
        return "did not end after the last step"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}" + ("" if code else " before the run was over")


def _failed(child: Child) -> bool:
    """A role that serves has failed whenever it ends by itself."""
    return child.ended.done() and (child.ended.result() != 0 or not child.role.finishes)


async def _culprit(children: Sequence[Child], spread_s: float) -> Child:
    """Tell the cause from its effects: who was killed, else who serves the others, else who ended first.

    The effect may well come first: the answers of a dying server end its clients before it has ended itself.
    """
    failed = [child for child in children if _failed(child)]
    with suppress(TimeoutError):
        async with asyncio.timeout(spread_s):
            while not any(map(_to_blame, failed)) and (running := [c.ended for c in children if not c.ended.done()]):
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                failed += [child for child in children if _failed(child) and child not in failed]
    killed = [child for child in failed if child.ended.result() < 0]
    serving = [child for child in failed if not child.role.finishes]
    return (killed or serving or failed)[0]


def _to_blame(child: Child) -> bool:
    """It was killed, serves the others, or found its input to be bad: not the effect of another's failure."""
    return child.ended.result() < 0 or not child.role.finishes or child.ended.result() == _BAD_INPUT


def tail(path: Path, lines: int = 15, most_bytes: int = 16384) -> list[str]:
    """The last lines of a log, for people; [] where there is none."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - most_bytes))
        return file.read(most_bytes).decode(errors="replace").splitlines()[-lines:]
