"""I5: which version each server samples from. The version moves after the server acknowledged the switch.

I7: a server that dies is noticed within seconds, taken out, and brought to the current version before it rejoins.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from loguru import logger

from prime_rl.errors import RunError
from prime_rl.orchestrator.concurrency import ConcurrencyController, Load, parse_load
from prime_rl.orchestrator.engine import Engine, EngineError, EngineLost, LoadedPolicy
from prime_rl.run.artifact import WEIGHTS_FORMAT, read_manifest, remove
from prime_rl.run.paths import RunPaths, steps_in
from prime_rl.run.wait import changes
from prime_rl.types import PolicyVersion

_LEASE_RENEWAL_S = 2.0
_PROBE_S = 0.25
_LOST_AFTER_S = 4.0
"""Longest time in which not one server answers, before the run ends."""


class Server:
    """One inference server: what it has acknowledged to sample from, and what it is given to do.

    Attributes:
        engine: its admin connection; rollouts have connections of their own, so that a switch never queues behind them.
        version: what it samples from.
        up: it takes rollouts.
        in_flight: rollouts that it is playing.
        controller: how many it should be given.
    """

    def __init__(self, engine: Engine, controller: ConcurrencyController) -> None:
        """Start as down, at version 0; `Policy.start` makes it true."""
        self.engine = engine
        self.controller = controller
        self.version = PolicyVersion(0, 0)
        self.up = False
        self.in_flight = 0
        self._lives = set[asyncio.Timeout]()

    @asynccontextmanager
    async def life(self) -> AsyncIterator[None]:
        """End what runs inside with EngineLost as soon as `died` is called.

        A connection does not always tell: that of a machine that lost its power stays open until its own timeout.
        """
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._lives.add(scope)
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise EngineLost(f"inference at {self.engine.url} has died") from None
        finally:
            self._lives.discard(scope)

    def died(self) -> None:
        """End everything that runs inside `life`."""
        now = asyncio.get_running_loop().time()
        lives, self._lives = self._lives, set()
        for scope in lives:
            scope.reschedule(now)

    def has_room(self, rollouts: int) -> bool:
        """Tell whether it should be given so many more; always, where it has none."""
        return self.in_flight == 0 or self.in_flight + rollouts <= self.controller.limit

    async def load(self, directory: Path) -> LoadedPolicy:
        """Switch to the published weights in `directory`.

        Raises:
            RunError: it says that it has loaded something else.
            EngineLost, EngineError: it is gone, or refuses.
        """
        manifest = read_manifest(directory, WEIGHTS_FORMAT)
        version = PolicyVersion(manifest["branch"], manifest["step"])
        loaded = await self.engine.load(str(directory.resolve()), version)
        if loaded.version != version or loaded.hash != manifest["hash"]:
            raise RunError(
                f"inference at {self.engine.url} loaded {loaded.version} ({loaded.hash}) where {directory} holds "
                f"{version} ({manifest['hash']})"
            )
        self.version = version
        return loaded


class Policy:
    """Watches `weights/`, switches the servers, keeps them leased, and takes dead ones out and in again."""

    def __init__(
        self,
        servers: Sequence[Server],
        paths: RunPaths,
        on_change: Callable[[], None],
        before_switch: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Manage `servers` for the run at `paths`.

        Args:
            servers: at least one.
            paths: of the run.
            on_change: called when more may be dispatched than before.
            before_switch: awaited before each switch: an evaluation may hold it up.
        """
        self.servers = servers
        self.switch_s = 0.0
        self.deaths = 0
        self._last: list[LoadedPolicy] = []
        self._paths = paths
        self._on_change = on_change
        self._before_switch = before_switch
        self._changed = asyncio.Condition()
        self._loading = asyncio.Lock()
        self._all_lost_since: float | None = None

    @property
    def version(self) -> int:
        """Step of the oldest version that a server samples from."""
        up = [server.version.step for server in self.servers if server.up]
        return min(up or [server.version.step for server in self.servers])

    def metrics(self) -> dict[str, float]:
        """Tell what is sampled from, and what the last switch cost on the slowest server."""
        canaries = [loaded.canary_difference for loaded in self._last if loaded.canary_difference is not None]
        return {
            "policy/version": self.version,
            "servers/deaths": self.deaths,
            "time/switch": self.switch_s,
            "time/switch_stage": max((loaded.stage_s for loaded in self._last), default=0.0),
            "time/switch_pause": max((loaded.pause_s for loaded in self._last), default=0.0),
            **({"canary/max_logprob_difference": max(canaries)} if canaries else {}),
        }

    def by_load(self, rollouts: int) -> list[Server]:
        """Return the servers that have room for so many rollouts, the least loaded first."""
        return sorted((s for s in self.servers if s.up and s.has_room(rollouts)), key=lambda s: s.in_flight)

    async def any_at(self, step: int) -> Server:
        """Wait for a server that samples from version `step` or newer, whatever its load: for what was admitted."""
        async with self._changed:
            while not (able := [s for s in self.servers if s.up and s.version.step >= step]):
                await self._changed.wait()
            return min(able, key=lambda s: s.in_flight)

    def suspect(self, server: Server) -> None:
        """Give it no rollouts until `keep` has seen it alive with the right version."""
        if server.up:
            server.up = False
            self.deaths += 1
            logger.warning("inference at {} is taken out: it does not answer", server.engine.url)

    async def start(self, timeout_s: float) -> None:
        """Wait until every server answers, lease it, and bring it to the base model.

        Raises:
            RunError: a server did not answer within `timeout_s` seconds, or another run holds it.
        """
        for server in self.servers:
            await _until_reachable(server.engine, timeout_s)
            loaded = await server.engine.reset()
            server.version, server.up = loaded.version, True
            logger.info("inference at {} samples from {} ({})", server.engine.url, loaded.version, loaded.hash)

    async def watch(self, stop: asyncio.Event) -> None:
        """Switch to every newest version as it is published, until `stop` is set."""
        async for _ in changes(self._paths.weights_dir, stop):
            newest = self._newest()
            if newest is not None and any(s.up and s.version.step < newest for s in self.servers):
                await self._switch(newest)

    async def keep(self, stop: asyncio.Event) -> None:
        """Renew the leases, and look after what died, until `stop` is set.

        Raises:
            EngineLost: no server answered for 4 seconds.
            RunError: a server was leased by another run.
        """
        async with asyncio.TaskGroup() as tasks:
            for server in self.servers:
                tasks.create_task(self._keep_one(server, stop))

    async def observe_load(self, stop: asyncio.Event, interval_s: float) -> None:
        """Let each server's concurrency follow its /metrics, every `interval_s` seconds, until `stop` is set."""
        while not stop.is_set():
            for server in self.servers:
                load = await _load_of(server) if server.up else None
                if load is not None:
                    server.controller.observe(load, server.in_flight)
                    self._on_change()
            await _pause(stop, interval_s)

    async def release(self) -> None:
        """Give the leases back; a server that is gone has none to give."""
        for server in self.servers:
            try:
                await server.engine.release()
            except (EngineError, EngineLost) as error:
                logger.warning("the lease of {} was not given back: {}", server.engine.url, error)

    async def _keep_one(self, server: Server, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                loaded = await server.engine.policy()
                if loaded.version != server.version or not loaded.is_ours:
                    await self._rejoin(server)
                elif not server.up:
                    await self._set_up(server)
                self._all_lost_since = None
            except EngineLost:
                self.suspect(server)
                server.died()
                self._give_up_if_all_are_lost(server)
            await _pause(stop, _LEASE_RENEWAL_S if server.up else _PROBE_S)

    async def _rejoin(self, server: Server) -> None:
        """Bring a server that was started again to the current version.

        Under the lock, because a switch that is under way looks the same from outside.
        """
        async with self._loading:
            loaded = await server.engine.policy()
            if loaded.is_ours and loaded.version == server.version:
                return
            self.suspect(server)
            server.died()
            server.version = (await server.engine.reset()).version
            newest = self._newest()
            if newest is not None:
                await server.load(self._paths.weights(newest))
        logger.info("inference at {} is back and samples from {}", server.engine.url, server.version)
        await self._set_up(server)

    async def _set_up(self, server: Server) -> None:
        server.up = True
        await self._notify()

    def _give_up_if_all_are_lost(self, server: Server) -> None:
        now = time.monotonic()
        if any(s.up for s in self.servers):
            self._all_lost_since = None
        elif self._all_lost_since is None:
            self._all_lost_since = now
        elif now - self._all_lost_since > _LOST_AFTER_S:
            raise EngineLost(f"inference at {server.engine.url} cannot be reached, and no other server is left")

    async def _switch(self, step: int) -> None:
        """Switch all servers; one that is lost meanwhile is taken out, one that refuses ends the run."""
        if self._before_switch is not None:
            await self._before_switch()
        directory = self._paths.weights(step)
        started = time.monotonic()
        async with self._loading:
            up = [server for server in self.servers if server.up]
            answers = await asyncio.gather(*(s.load(directory) for s in up), return_exceptions=True)
        loaded = []
        for server, answer in zip(up, answers, strict=True):
            if isinstance(answer, EngineLost):
                self.suspect(server)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                loaded.append(answer)
        if not loaded:
            return
        self.switch_s = time.monotonic() - started
        self._last = loaded
        pause_s = max(answer.pause_s for answer in loaded)
        logger.info("switched to version {} in {:.2f} s (pause {:.3f} s)", step, self.switch_s, pause_s)
        await self._notify()
        for old in steps_in(self._paths.weights_dir):
            if old < step:
                await asyncio.to_thread(remove, self._paths.weights(old))

    def _newest(self) -> int | None:
        published = steps_in(self._paths.weights_dir)
        return published[-1] if published else None

    async def _notify(self) -> None:
        self._on_change()
        async with self._changed:
            self._changed.notify_all()


async def _load_of(server: Server) -> Load | None:
    try:
        return parse_load(await server.engine.metrics())
    except (EngineLost, EngineError):
        return None  # `keep` notices a server that died; one without /metrics goes on without


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    """Return after `seconds`, or as soon as `stop` is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()


async def _until_reachable(engine: Engine, timeout_s: float) -> None:
    """Ask until the server answers: a server that is not up yet sends no event that could be waited for."""
    deadline = time.monotonic() + timeout_s
    logger.info("waiting for inference at {}", engine.url)
    while True:
        try:
            await engine.policy()
            return
        except EngineLost as error:
            if time.monotonic() > deadline:
                raise RunError(f"{error}; waited {timeout_s:.0f} s for it to start") from None
        await asyncio.sleep(_PROBE_S)
