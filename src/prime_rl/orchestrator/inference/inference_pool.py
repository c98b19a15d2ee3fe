"""The inference servers of a run: which version each samples from, and the replacement of lost servers.

A new version is staged on all servers while they sample. When the last server is ready, all switch within milliseconds.
A version that is not yet switched to is abandoned as soon as a newer one appears.

    published --> staged on all servers --> (pinned evaluation ends) --> switched to --> older versions deleted
        |              |                              |                       |
        |              +------------------------------+                       +-- wrong canary: invalid, and the
        |              a newer version appears: abandoned                         server returns to the version before
        +-- invalid: the run ends or continues without it (`on_invalid_weights`)

The recorded version of a server changes after the server acknowledged the switch (I5). A lost server is detected within
seconds (I7) and returns with the newest version; the other servers do not wait for it.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

from loguru import logger

from prime_rl.core.errors import RunError, first_exception
from prime_rl.core.types import PolicyVersion
from prime_rl.orchestrator.inference.inference_server import (
    SERVER_ERRORS,
    InferenceServer,
    UnfitServer,
    first_reachable,
    load_metrics,
    may_recover,
    parse_load,
    warn_of_failure,
)
from prime_rl.orchestrator.inference.weight_versions import InvalidWeights, PublishedVersion, WeightVersions
from prime_rl.orchestrator.waits import deadline_scope, end_tasks, pause
from prime_rl.rollouts.clients.inference_client import InferenceError, InferenceServerLost, LoadedVersion
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.wait_for import run_in_daemon_thread, watch_directory

_LEASE_RENEWAL_SECONDS = 2.0
_MAX_FAILED_SWITCHES = 3
"""More consecutive failures of one server to switch end the run with its error."""
_PROBE_SECONDS = 0.25
_MAX_STARTS = 10
"""A server that is lost this many times while it is set up ends the run."""


class InferencePool:
    """Follows `weights/`, switches the servers, renews their leases, and removes and restores lost servers."""

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        paths: RunPaths,
        on_change: Callable[[], None],
        on_refused: Literal["fail", "keep_previous"] = "fail",
        reconnect_seconds: float = 4.0,
        min_servers: int | None = None,
    ) -> None:
        """Manage at least one server for the run at `paths`.

        Args:
            on_change: called when more groups may be dispatched than before.
            on_refused: after invalid weights, `fail` the run or `keep_previous`.
            reconnect_seconds: the run ends after this many seconds without an answer from any server.
            min_servers: a new run starts with so many servers; None waits for all.
        """
        self.servers, self.weight_versions = servers, WeightVersions(paths, on_refused)
        self._num_removed = self._num_skipped = 0
        self._switch_seconds = self._swap_seconds = 0.0
        self._last_switches: dict[InferenceServer, LoadedVersion] = {}
        self._paths, self._on_change = paths, on_change
        self.before_switch: Callable[[], Awaitable[None]] | None = None
        """Awaited before each switch; a pinned evaluation may delay it."""
        self._reconnect_seconds = reconnect_seconds
        self._min_servers = min_servers or len(servers)
        self._latest = self._version_before_loss = 0
        self._attempt: tuple[int, asyncio.Future[float]] | None = None
        self._hold_task: asyncio.Future[None] | None = None
        self._has_wanted, self._changed = asyncio.Event(), asyncio.Condition()
        self._all_lost_since: float | None = None

    @property
    def version(self) -> int:
        """Step of the oldest version that a server samples from; the last known one if no server is up."""
        return min((server.version.step for server in self.servers if server.up), default=self._version_before_loss)

    @property
    def records_routes(self) -> bool:
        """Whether a server records the experts of each token, for router replay."""
        return any(server.records_routes for server in self.servers)

    @property
    def concurrency_limit(self) -> float | None:
        """Rollouts that all servers may have in flight; None without a limit."""
        limit = sum(server.controller.limit for server in self.servers if server.up)
        return limit if math.isfinite(limit) else None

    def metrics(self) -> dict[str, float]:
        """Return the version, the duration of the last switch on the slowest server, and the load."""
        last = self._last_switches.values()
        canaries = [loaded.canary_difference for loaded in last if loaded.canary_difference is not None]
        return {
            "policy/version": self.version,
            "weights/versions_skipped": self._num_skipped,
            "policy/refused": len(self.weight_versions.refused),
            "inference/servers_removed": self._num_removed,
            "time/weight_update": self._switch_seconds,
            "time/weight_update_swap": self._swap_seconds,
            "time/weight_update_stage": max((loaded.stage_s for loaded in last), default=0.0),
            "time/weight_update_pause": max((loaded.pause_s for loaded in last), default=0.0),
            **({"canary/max_logprob_difference": max(canaries)} if canaries else {}),
            "inference/in_flight": sum(server.in_flight for server in self.servers),
            **load_metrics([server.last_load for server in self.servers if server.up and server.last_load is not None]),
        }

    async def base_canaries(self) -> list[dict[str, Any]]:
        """Return what each server that is up computed for the canary under the base model, with its `url`."""
        found = []
        for client in [server.client for server in self.servers if server.up]:
            with warn_of_failure(f"the base model of {client.url} is not compared with the trainer's"):
                if (canary := await client.base_canary()) is not None:
                    found.append({**canary, "url": client.url})
        return found

    def available_servers(self, rollouts: int) -> list[InferenceServer]:
        """Return the servers with capacity for `rollouts` more, the least loaded first; none in back-off."""
        servers = (s for s in self.servers if s.up and not s.backoff_seconds and s.has_capacity(rollouts))
        return sorted(servers, key=lambda s: s.in_flight)

    async def wait_for_server(self, step: int) -> InferenceServer:
        """Wait for a server that samples from version `step` or newer, with any load, and is not in back-off.

        During a wait servers may lose their version or return, so the choice is repeated after it.
        """
        async with self._changed:
            while True:
                candidates = [s for s in self.servers if s.up and s.version.step >= step]
                server = min(candidates, key=lambda s: (s.backoff_seconds, s.in_flight), default=None)
                backoff_seconds = None if server is None else server.backoff_seconds
                if server is not None and not backoff_seconds:
                    return server
                with suppress(TimeoutError):
                    async with asyncio.timeout(backoff_seconds):
                        await self._changed.wait()

    async def wait_until_acknowledged(self, server: InferenceServer, step: int) -> None:
        """Wait until the server acknowledged version `step`; its canary is correct then."""
        if server.version.step < step:
            async with self._changed:
                await self._changed.wait_for(lambda: server.version.step >= step)

    def take_out(self, server: InferenceServer, why: str = "it does not answer") -> None:
        """Send it no rollouts until `maintain` finds it alive with the right version."""
        if server.up:
            self._version_before_loss = self.version
            server.up = False
            self._num_removed += 1
            logger.warning("inference at {} is removed until it recovers: {}", server.client.url, why)

    def raise_if_refused(self, next_step: int) -> None:
        """Raise RunError if the run waits for version `next_step` and its weights are invalid.

        The trainer has the batches before `next_step`, so it makes no newer version.
        """
        error = self.weight_versions.refused.get(next_step)
        # An older version that was skipped for the invalid one may be about to be switched to.
        if error is not None and self.version < next_step and self._find_wanted() is None:
            raise RunError(
                f"{error}; without version {next_step} nothing more can be sampled within the staleness bound "
                f"(orchestrator.on_invalid_weights = keep_previous; servers sample from version {self.version})"
            )

    async def start(
        self, timeout_seconds: float, version: PolicyVersion | None = None, is_restart: bool = False
    ) -> None:
        """Wait for the servers, lease them, and load a version; raise RunError if that fails within `timeout_seconds`.

        Nothing may be dispatched before (I5). A new run waits for all servers, or for `min_servers` of them. After a
        restart or a trainer rollback one is enough; the others join when they are available (`maintain`).

        Without a `version`, load the base model, or after a restart the newest version.
        """
        if version is None and is_restart:
            await self._bring_to_newest(timeout_seconds)
            return
        published = None
        if version is not None:
            published = await run_in_daemon_thread(PublishedVersion.read, self._paths.weights(version.step))
            if published.version != version:
                raise RunError(f"{published.directory} holds version {published.version}, not {version}")
            self._latest = version.step
        await self._bring_up(published, timeout_seconds, 1 if is_restart else self._min_servers)

    async def follow_weights(self, stop: asyncio.Event) -> None:
        """Switch to each newest version until `stop` is set; raise InvalidWeights if `on_refused` is `fail`."""
        looking = asyncio.create_task(self._follow_versions(stop))
        try:
            while True:
                self._has_wanted.clear()
                if (step := self._find_wanted()) is not None:
                    await self._switch_to(step)
                elif looking.done():
                    looking.result()
                    return
                else:
                    await self._has_wanted.wait()
        finally:
            await end_tasks(looking, self._hold_task)

    async def maintain(self, stop: asyncio.Event) -> None:
        """Renew the leases and restore lost servers until `stop` is set.

        Raises InferenceServerLost after `reconnect_seconds` without answers, UnfitServer if then only servers of other
        settings answer, ConfigError if a trainer starts whose settings do not fit the servers, and InferenceError if
        another run leased a server.
        """
        async with asyncio.TaskGroup() as tasks:
            maintaining = [tasks.create_task(self._maintain_one(server, stop)) for server in self.servers]
            await stop.wait()
            for task in maintaining:  # one may wait for a slot as long as other runs last
                task.cancel()

    async def observe_load(self, stop: asyncio.Event, interval_seconds: float, adapts: bool = True) -> None:
        """Read each server's /metrics until `stop` is set; with `adapts` its concurrency limit follows them."""
        while not stop.is_set():
            for server in [server for server in self.servers if server.up]:
                with suppress(*SERVER_ERRORS):  # `maintain` detects a lost server
                    if (load := parse_load(await server.client.metrics())) is not None:
                        server.last_load = load
                        if adapts:
                            server.controller.observe(load, server.in_flight)
                            self._on_change()
            await pause(stop, interval_seconds)

    async def release(self) -> None:
        """Release the leases."""

        async def release(server: InferenceServer) -> None:
            with warn_of_failure(f"the lease of {server.client.url} was not released"):
                await server.client.release()

        await asyncio.gather(*map(release, self.servers))

    async def _bring_up(self, published: PublishedVersion | None, timeout_seconds: float, minimum: int) -> None:
        """Lease the servers and load a published version, or the base model, on all at the same time.

        It is enough if `minimum` servers answer within `timeout_seconds`. Raises RunError if a server belongs to
        another run or rejects the version, and UnfitServer if less than `minimum` have settings that fit the run's.
        """

        async def set_up(server: InferenceServer) -> None:
            await server.wait_until_reachable(timeout_seconds)
            for start in itertools.count(1):
                try:
                    loaded = await server.client.reset()
                    if published is not None:
                        async with server.switch_lock:
                            loaded = await server.load(published)
                    break
                except SERVER_ERRORS as error:
                    if not may_recover(error):
                        raise
                    if start == _MAX_STARTS:
                        raise RunError(f"{error}; lost {_MAX_STARTS} times while it was set up") from None
                    logger.warning("{}; waiting for the server to restart", error)
                    await server.wait_until_reachable(self._reconnect_seconds)
            server.version, server.up = loaded.version, True
            logger.info("inference at {} samples from {} ({})", server.client.url, loaded.version, loaded.hash)

        chosen = self.servers
        if minimum < len(chosen):
            chosen = await first_reachable(chosen, timeout_seconds, minimum)
        try:
            async with asyncio.TaskGroup() as tasks:
                for server in chosen:
                    tasks.create_task(set_up(server))
        except ExceptionGroup as group:
            raise first_exception(group) from group

    async def _bring_to_newest(self, timeout_seconds: float) -> None:
        """Lease the servers after a restart, and load the newest valid version or the base model.

        Raises as `_bring_up`, and InvalidWeights if the newest version is invalid and that ends the run.
        """
        versions = self.weight_versions
        silence = RunError(f"{versions.paths.weights_dir} did not answer within {timeout_seconds:.0f} s")
        while True:
            newest, published = None, None
            try:
                async with deadline_scope(lambda: silence, timeout_seconds):
                    await versions.refresh()
                    if (newest := versions.newest) is not None:
                        published = await run_in_daemon_thread(versions.read, newest)
                await self._bring_up(published, timeout_seconds, minimum=1)
                self._latest = newest or 0
                return
            except InvalidWeights as error:
                if newest is None:
                    raise
                await versions.refuse(newest, error)

    async def _follow_versions(self, stop: asyncio.Event) -> None:
        """Follow the published versions, and cancel the staging of a version when a newer one appears."""
        try:
            async for _ in watch_directory(self._paths.weights_dir, stop):
                await self.weight_versions.refresh()
                if self._attempt is not None and (self.weight_versions.newest or 0) > self._attempt[0]:
                    self._attempt[1].cancel()
                if self._find_wanted() is not None:
                    self._has_wanted.set()
        finally:
            self._has_wanted.set()

    def _find_wanted(self) -> int | None:
        """Return the newest version if a server does not have it."""
        newest = self.weight_versions.newest
        return newest if newest and any(s.up and s.version.step < newest for s in self.servers) else None

    async def _switch_to(self, step: int) -> None:
        """Stage a version and switch all servers to it, unless a newer one appears first or its weights are invalid."""
        started, staged = time.monotonic(), list[InferenceServer]()

        async def prepare() -> float:
            up = [s for s in self.servers if s.up and s.version.step < step]
            answers = await asyncio.gather(*(s.stage(published) for s in up), return_exceptions=True)
            staged.extend(s for s, answer in zip(up, answers, strict=True) if answer is None)
            self._check_answers(up, answers)
            stage_seconds = time.monotonic() - started
            if self.before_switch is not None:  # a pinned evaluation; its time limit does not restart with a version
                self._hold_task = self._hold_task or asyncio.ensure_future(self.before_switch())
                await asyncio.shield(self._hold_task)
            return stage_seconds

        try:
            published = await run_in_daemon_thread(self.weight_versions.read, step)
            attempt = asyncio.ensure_future(prepare())
            self._attempt = step, attempt
            try:
                await asyncio.wait({attempt})
            finally:
                self._attempt = None
                await end_tasks(attempt)
            if attempt.cancelled() or (attempt.exception() is None and (self.weight_versions.newest or step) > step):
                logger.info("version {} is skipped: a newer one was published", step)
                return
            stage_seconds, self._hold_task = attempt.result(), None
            await self._switch(published, staged, stage_seconds)
        except InvalidWeights as error:
            await self.weight_versions.refuse(step, error)
            self._on_change()
        else:
            await self.weight_versions.clean(self.version, [s.loading for s in self.servers if s.loading is not None])

    async def _switch(
        self, published: PublishedVersion, staged: Sequence[InferenceServer], stage_seconds: float
    ) -> None:
        """Switch all servers at once; a server that is lost meanwhile is taken out."""
        step, started = published.version.step, time.monotonic()

        async def switch(server: InferenceServer) -> LoadedVersion | None:
            loaded = await server.switch(published)
            if loaded is not None:
                self._last_switches[server], server.failed_switches = loaded, 0
                self._swap_seconds = time.monotonic() - started
                self._switch_seconds = stage_seconds + self._swap_seconds
            await self._notify()
            return loaded

        answers = await asyncio.gather(*map(switch, staged), return_exceptions=True)
        if pauses := [answer.pause_s for answer in answers if isinstance(answer, LoadedVersion)]:
            versions = self.weight_versions
            self._num_skipped += sum(self._latest < s < step and s not in versions.refused for s in versions.steps)
            self._latest = max(self._latest, step)
            logger.info("switched to version {} in {:.2f} s (pause {:.3f} s)", step, self._switch_seconds, max(pauses))
        for server, answer in zip(staged, answers, strict=True):
            if isinstance(answer, InvalidWeights):  # it may sample from them already: discard its rollouts
                self.take_out(server, f"it rejected version {step}")
                server.cancel_all()
        self._check_answers(staged, answers)

    def _check_answers(self, servers: Sequence[InferenceServer], answers: Sequence[object]) -> None:
        """Remove lost and failed servers, which may be retried, and raise any other error, `InvalidWeights` last."""
        errors = []
        for server, answer in zip(servers, answers, strict=True):
            can_retry = server.failed_switches < _MAX_FAILED_SWITCHES
            lost_slot = server.client.has_slot and isinstance(answer, InferenceError) and answer.status == 409
            if isinstance(answer, InferenceServerLost):
                self.take_out(server)
            elif lost_slot:  # `maintain` waits for another one, or raises
                self.take_out(server, str(answer))
            elif may_recover(answer) and can_retry:
                server.failed_switches += 1
                self.take_out(server, str(answer))
            elif isinstance(answer, BaseException):
                errors.append(answer)
        if errors:
            raise min(errors, key=lambda error: isinstance(error, InvalidWeights))

    async def _maintain_one(self, server: InferenceServer, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                loaded = await server.policy()
                if loaded.version != server.version or not loaded.is_ours or server.rejected_step is not None:
                    await self._rejoin(server)
                elif not server.up:
                    await self._restore(server)
                self._all_lost_since = None
            except (*SERVER_ERRORS, UnfitServer) as error:
                if isinstance(error, UnfitServer):
                    server.log_refusal(error)
                elif not may_recover(error):
                    raise
                self.take_out(server, str(error))
                server.cancel_all()
                if any(s.up for s in self.servers):
                    self._all_lost_since = None
                elif self._all_lost_since is None:
                    self._all_lost_since = time.monotonic()
                elif time.monotonic() - self._all_lost_since > self._reconnect_seconds:
                    if isinstance(error, UnfitServer):
                        raise
                    lost = f"inference at {server.client.url} cannot be reached"
                    raise InferenceServerLost(
                        f"{lost}, and no server answered for {self._reconnect_seconds:g} s"
                    ) from None
            await pause(stop, _LEASE_RENEWAL_SECONDS if server.up else _PROBE_SECONDS)

    async def _rejoin(self, server: InferenceServer) -> None:
        """Bring a server that restarted, or that loaded a wrong version, to the current version."""
        async with server.switch_lock:  # a switch in progress looks like a wrong version
            loaded = await server.client.policy()
            if loaded.is_ours and loaded.version == server.version and server.rejected_step is None:
                return
            await self.weight_versions.refresh()
            newest = self.weight_versions.newest
            if loaded.is_ours and newest is not None and server.rejected_step == newest:
                return  # no newer version to try yet
            self.take_out(server, f"it samples from {loaded.version}, not {server.version}, or lost this run's lease")
            server.cancel_all()
            await self._load_newest(server)
        if server.rejected_step is None:
            await self._restore(server)

    async def _restore(self, server: InferenceServer) -> None:
        logger.info("inference at {} is restored and samples from {}", server.client.url, server.version)
        server.up = True
        await self._notify()

    async def _load_newest(self, server: InferenceServer) -> None:
        """Load the newest version that the server accepts; sets `rejected_step` if others sample from it."""
        server.rejected_step = None
        while True:
            server.version = (await server.client.reset()).version
            await self.weight_versions.refresh()
            if (newest := self.weight_versions.newest) is None:
                return
            try:
                await server.load(await run_in_daemon_thread(self.weight_versions.read, newest))
                return
            except InvalidWeights as error:
                if any(other.up and other.version.step >= newest for other in self.servers):
                    server.rejected_step = newest
                    logger.warning("inference at {} stays removed until the next version: {}", server.client.url, error)
                    return
                await self.weight_versions.refuse(newest, error)
                self._on_change()

    async def _notify(self) -> None:
        self._on_change()
        async with self._changed:
            self._changed.notify_all()
