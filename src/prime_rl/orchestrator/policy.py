"""I5: which version each server samples from. The version moves after the server acknowledged the switch.

A version is staged on all servers while they sample, and put in place on all of them at once when the last one is
ready: between the first and the last switch lie milliseconds. Newest wins: until it is put in place a version gives way
to any that appears, and what was left out is never asked for again.

    published --> staged on all servers --> (an evaluation lets go) --> put in place on all at once --> older deleted
        |              |                              |                       |
        |              +------------------------------+                       +-- its canary is wrong: refused,
        |              a newer one appears: given up for that                     and the server goes back
        +-- refused: the run ends, or goes on without it (`on_refused_weights`)

I7: a server that dies is noticed within seconds, taken out, and brought to the current version before it rejoins; the
others do not wait for it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from loguru import logger

from prime_rl.errors import RunError
from prime_rl.orchestrator.engine import EngineError, EngineLost, LoadedPolicy
from prime_rl.orchestrator.joining import bring_up
from prime_rl.orchestrator.publications import Publications
from prime_rl.orchestrator.server import Published, Server, VersionRefused
from prime_rl.orchestrator.tasks import end_tasks, pause
from prime_rl.run.paths import RunPaths
from prime_rl.run.wait import changes
from prime_rl.types import PolicyVersion

_LEASE_RENEWAL_S = 2.0
_MOST_FAILED_SWITCHES = 3
"""In a row on one server, by a fault of its own; more, and the run ends with what it says."""
_PROBE_S = 0.25


class Policy:
    """Watches `weights/`, switches the servers, keeps them leased, and takes dead ones out and in again.

    Attributes:
        servers: all of them.
        deaths: how often one was taken out.
        skipped: versions that were published and never sampled from, as a newer one was there.
        published: what there is to switch to.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        paths: RunPaths,
        on_change: Callable[[], None],
        before_switch: Callable[[], Awaitable[None]] | None = None,
        on_refused: Literal["end", "keep"] = "end",
        reconnect_s: float = 4.0,
    ) -> None:
        """Manage `servers` for the run at `paths`.

        Args:
            servers: at least one.
            paths: of the run.
            on_change: called when more may be dispatched than before.
            before_switch: awaited before each switch: an evaluation may hold it up.
            on_refused: what a version that is refused does: `end` the run, or `keep` the version before.
            reconnect_s: longest time in which not one server answers, before the run ends.
        """
        self.servers = servers
        self.deaths = 0
        self.skipped = 0
        self.published = Publications(paths, on_refused)
        self._switch_s = self._place_s = 0.0
        self._last: dict[Server, LoadedPolicy] = {}
        self._paths = paths
        self._on_change = on_change
        self._before_switch = before_switch
        self._reconnect_s = reconnect_s
        self._latest = 0
        self._looked = asyncio.Event()
        self._attempt: tuple[int, asyncio.Future[bool]] | None = None
        self._holding: asyncio.Future[None] | None = None
        self._changed = asyncio.Condition()
        self._all_lost_since: float | None = None

    @property
    def version(self) -> int:
        """Step of the oldest version that a server samples from."""
        up = [server.version.step for server in self.servers if server.up]
        return min(up or [server.version.step for server in self.servers])

    def metrics(self) -> dict[str, float]:
        """Tell what is sampled from, and what the last switch cost on the slowest server."""
        last = self._last.values()
        canaries = [loaded.canary_difference for loaded in last if loaded.canary_difference is not None]
        return {
            "policy/version": self.version,
            "policy/skipped": self.skipped,
            "policy/refused": len(self.published.refused),
            "servers/deaths": self.deaths,
            "time/switch": self._switch_s,
            "time/switch_place": self._place_s,
            "time/switch_stage": max((loaded.stage_s for loaded in last), default=0.0),
            "time/switch_pause": max((loaded.pause_s for loaded in last), default=0.0),
            **({"canary/max_logprob_difference": max(canaries)} if canaries else {}),
        }

    def by_load(self, rollouts: int) -> list[Server]:
        """Return the servers that have room for so many rollouts, the least loaded first; none that has just failed."""
        able = (s for s in self.servers if s.up and not s.bar_s and s.has_room(rollouts))
        return sorted(able, key=lambda s: s.in_flight)

    async def any_at(self, step: int) -> Server:
        """Wait for a server that samples from version `step` or newer, whatever its load: for what was admitted.

        One that has just failed is the last choice, and is left alone for as long as it is barred.
        """
        async with self._changed:
            while not (able := [s for s in self.servers if s.up and s.version.step >= step]):
                await self._changed.wait()
        server = min(able, key=lambda s: (s.bar_s, s.in_flight))
        await asyncio.sleep(server.bar_s)
        return server

    async def acknowledged(self, server: Server, step: int) -> None:
        """Wait until the server has acknowledged version `step`: its canary has answered, so the weights are right."""
        if server.version.step < step:
            async with self._changed:
                await self._changed.wait_for(lambda: server.version.step >= step)

    def suspect(self, server: Server, why: str = "it does not answer") -> None:
        """Give it no rollouts until `keep` has seen it alive with the right version."""
        if server.up:
            server.up = False
            self.deaths += 1
            logger.warning("inference at {} is taken out: {}", server.engine.url, why)

    def end_if_refused(self, next_step: int) -> None:
        """Raise if a refused version is all that could have come; to be called where nothing can be done without one.

        Args:
            next_step: n; the trainer has been given the batches before it, and so can make versions up to n.

        Raises:
            RunError: says why it was refused.
        """
        error = self.published.refused.get(next_step)
        # An older version that was passed over for the refused one may be on its way now.
        if error is not None and self.version < next_step and self._wanted() is None:
            raise RunError(
                f"{error}; without version {next_step} nothing more can be sampled within the bound "
                f"(orchestrator.on_refused_weights = keep, version {self.version} is sampled from)"
            )

    async def start(self, timeout_s: float, version: PolicyVersion | None = None, goes_on: bool = False) -> None:
        """Wait until the servers answer, lease them, and bring them to a published version, or to the base model.

        Args:
            timeout_s: longest wait for one.
            version: what is published; None is the base model.
            goes_on: the run began before, so that one server is enough.

        Raises:
            RunError: a server did not answer within `timeout_s` seconds, another run holds it, or it refuses `version`.
        """
        published = None
        if version is not None:
            published = await asyncio.to_thread(Published.read, self._paths.weights(version.step))
            if published.version != version:
                raise RunError(f"{published.directory} holds version {published.version}, not {version}")
            self._latest = version.step
        await bring_up(self.servers, published, timeout_s, self._reconnect_s, goes_on)

    async def watch(self, stop: asyncio.Event) -> None:
        """Switch to every newest version as it is published, until `stop` is set.

        Raises:
            VersionRefused: a version is refused, and `on_refused` is `end`.
            RunError: a server says that it has loaded something else.
        """
        looking = asyncio.create_task(self._look(stop))
        try:
            while True:
                self._looked.clear()
                if (step := self._wanted()) is not None:
                    await self._bring(step)
                elif looking.done():
                    looking.result()
                    return
                else:
                    await self._looked.wait()
        finally:
            await end_tasks(looking, self._holding)

    async def keep(self, stop: asyncio.Event) -> None:
        """Renew the leases, and look after what died, until `stop` is set.

        Raises:
            EngineLost: no server answered for `reconnect_s` seconds.
            RunError: a server was leased by another run.
        """
        async with asyncio.TaskGroup() as tasks:
            for server in self.servers:
                tasks.create_task(self._keep_one(server, stop))

    async def observe_load(self, stop: asyncio.Event, interval_s: float) -> None:
        """Let each server's concurrency follow its /metrics, every `interval_s` seconds, until `stop` is set."""
        while not stop.is_set():
            for server in self.servers:
                load = await server.load_figures() if server.up else None
                if load is not None:
                    server.controller.observe(load, server.in_flight)
                    self._on_change()
            await pause(stop, interval_s)

    async def release(self) -> None:
        """Give the leases back; a server that is gone has none to give."""
        for server in self.servers:
            try:
                await server.engine.release()
            except (EngineError, EngineLost) as error:
                logger.warning("the lease of {} was not given back: {}", server.engine.url, error)

    async def _look(self, stop: asyncio.Event) -> None:
        """See what is published; a version that is being staged gives way to a newer one."""
        try:
            async for _ in changes(self._paths.weights_dir, stop):
                self.published.look()
                if self._attempt is not None and (self.published.newest or 0) > self._attempt[0]:
                    self._attempt[1].cancel()
                if self._wanted() is not None:
                    self._looked.set()
        finally:
            self._looked.set()

    def _wanted(self) -> int | None:
        """Return the newest version, if a server lacks it."""
        newest = self.published.newest
        lacks = newest is not None and any(s.up and s.version.step < newest for s in self.servers)
        return newest if lacks else None

    async def _bring(self, step: int) -> None:
        """Bring all servers to a version, unless a newer one appears before it is put in place, or it is refused."""
        started = time.monotonic()
        try:
            published = await asyncio.to_thread(self.published.read, step)
            staged = list[Server]()
            if not await self._unless_overtaken(step, lambda: self._stage(published, staged)):
                return
            stage_s = time.monotonic() - started
            if not await self._unless_overtaken(step, self._hold):
                return
            self._holding = None
            await self._put_in_place(published, staged, stage_s)
        except VersionRefused as error:
            self._refuse(step, error)
        else:
            loading = [server.loading for server in self.servers if server.loading is not None]
            await self.published.clean(self.version, loading)

    async def _unless_overtaken(self, step: int, work: Callable[[], Awaitable[None]]) -> bool:
        """Do `work`; False if it was given up for a version that is newer than `step`."""

        async def done() -> bool:
            await work()
            return (self.published.newest or step) <= step

        attempt = asyncio.ensure_future(done())
        self._attempt = step, attempt
        try:
            await asyncio.wait({attempt})
        finally:
            self._attempt = None
            await end_tasks(attempt)
        goes_on = not attempt.cancelled() and attempt.result()
        if not goes_on:
            logger.info("version {} gives way to a newer one", step)
        return goes_on

    async def _stage(self, published: Published, staged: list[Server]) -> None:
        """Have the version staged on all servers that are up; `staged` gets those that have it."""
        up = [s for s in self.servers if s.up and s.version.step < published.version.step]
        answers = await asyncio.gather(*(s.stage(published) for s in up), return_exceptions=True)
        staged += [s for s, answer in zip(up, answers, strict=True) if answer is None]
        self._sort_out(up, answers)

    async def _hold(self) -> None:
        """Let an evaluation hold the switch up, no longer than it may, however many versions come meanwhile."""
        if self._before_switch is not None:
            if self._holding is None:
                self._holding = asyncio.ensure_future(self._before_switch())
            await asyncio.shield(self._holding)

    async def _put_in_place(self, published: Published, staged: Sequence[Server], stage_s: float) -> None:
        """Switch all servers at once; one that is lost meanwhile is taken out."""
        step, begun = published.version.step, time.monotonic()

        async def switch(server: Server) -> LoadedPolicy | None:
            loaded = await server.switch(published)
            if loaded is not None:
                self._last[server], server.failed_switches = loaded, 0
                self._place_s = time.monotonic() - begun
                self._switch_s = stage_s + self._place_s
            await self._notify()
            return loaded

        answers = await asyncio.gather(*map(switch, staged), return_exceptions=True)
        if pauses := [answer.pause_s for answer in answers if isinstance(answer, LoadedPolicy)]:
            self.skipped += self.published.between(self._latest, step)
            self._latest = max(self._latest, step)
            logger.info("switched to version {} in {:.2f} s (pause {:.3f} s)", step, self._switch_s, max(pauses))
        for server, answer in zip(staged, answers, strict=True):
            if isinstance(answer, VersionRefused):  # perhaps it has loaded it: nothing that it samples now may count
                self.suspect(server, "it refuses the version that it was to switch to")
                server.died()
        self._sort_out(staged, answers)

    def _sort_out(self, servers: Sequence[Server], answers: Sequence[object]) -> None:
        """Take out the servers that are lost or fail; raise what else went wrong, what is worse than a refusal first.

        One that fails comes back with the version that it had, and is asked for the newest again, a few times.
        """
        errors = []
        for server, answer in zip(servers, answers, strict=True):
            if isinstance(answer, EngineLost):
                self.suspect(server)
            elif isinstance(answer, EngineError) and answer.is_fault and server.failed_switches < _MOST_FAILED_SWITCHES:
                server.failed_switches += 1
                self.suspect(server, str(answer))
            elif isinstance(answer, BaseException):
                errors.append(answer)
        if errors:
            raise min(errors, key=lambda error: isinstance(error, VersionRefused))

    def _refuse(self, step: int, error: VersionRefused) -> None:
        if self.published.refuse(step, error):
            self._on_change()

    async def _keep_one(self, server: Server, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                loaded = await server.engine.policy()
                if loaded.version != server.version or not loaded.is_ours or server.rejects is not None:
                    await self._rejoin(server)
                elif not server.up:
                    await self._set_up(server)
                self._all_lost_since = None
            except (EngineLost, EngineError) as error:
                if isinstance(error, EngineError) and not error.is_fault:
                    raise
                self.suspect(server, str(error))
                server.died()
                self._give_up_if_all_are_lost(server)
            await pause(stop, _LEASE_RENEWAL_S if server.up else _PROBE_S)

    async def _rejoin(self, server: Server) -> None:
        """Bring a server that was started again, or has loaded what it should not, to the current version.

        While nobody else switches it, because a switch that is under way looks the same from outside.
        """
        async with server.steering:
            loaded = await server.engine.policy()
            if loaded.is_ours and loaded.version == server.version and server.rejects is None:
                return
            self.published.look()
            if loaded.is_ours and server.rejects is not None and server.rejects == self.published.newest:
                return  # nothing else to try yet
            self.suspect(
                server, f"it samples from {loaded.version}, not {server.version}, or is not this run's any more"
            )
            server.died()
            await self._load_newest(server)
        if server.rejects is None:
            logger.info("inference at {} is back and samples from {}", server.engine.url, server.version)
            await self._set_up(server)

    async def _load_newest(self, server: Server) -> None:
        """Load the newest version that the server does not refuse; `rejects` is set if others sample from that one."""
        server.rejects = None
        while True:
            server.version = (await server.engine.reset()).version
            self.published.look()
            if (newest := self.published.newest) is None:
                return
            try:
                await server.load(await asyncio.to_thread(self.published.read, newest))
                return
            except VersionRefused as error:
                if any(other.up and other.version.step >= newest for other in self.servers):
                    server.rejects = newest
                    logger.warning(
                        "inference at {} stays out until a newer version comes: {}", server.engine.url, error
                    )
                    return
                self._refuse(newest, error)

    async def _set_up(self, server: Server) -> None:
        server.up = True
        await self._notify()

    def _give_up_if_all_are_lost(self, server: Server) -> None:
        now = time.monotonic()
        if any(s.up for s in self.servers):
            self._all_lost_since = None
        elif self._all_lost_since is None:
            self._all_lost_since = now
        elif now - self._all_lost_since > self._reconnect_s:
            raise EngineLost(f"inference at {server.engine.url} cannot be reached, and no other server is left")

    async def _notify(self) -> None:
        self._on_change()
        async with self._changed:
            self._changed.notify_all()
