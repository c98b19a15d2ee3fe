"""A policy that the server samples from, and how it is switched.

A version is read, checked and staged while sampling continues. Then the engine is paused, gets the staged weights, its
version and the salt of its prefix cache, and is resumed. Finally, the canary check compares the loaded weights
with the trainer's. A policy is all weights of a model, or the base model's weights and an adapter.

A server has several policies (`Slots`). One run at a time may switch one of them (`Lease`), and a switch waits for
requests that one version must sample (`VersionPins`).
"""

import asyncio
import math
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from prime_rl.core.types import PolicyVersion
from prime_rl.inference.policy.engine_group import EnginePause, VllmEngine
from prime_rl.inference.policy.weight_checks import (
    POLICY_ADAPTER,
    CheckedVersion,
    ServedModel,
    WeightsRefusedError,
    check_adapter,
    check_version,
)
from prime_rl.storage.weights.canary import PolicyCanary

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Answer = dict[str, Any]
_Overtaken = Callable[[], str | None]
"""Returns why a newer request makes the one in progress obsolete, if so."""
_running = set[asyncio.Future[Any]]()

_MAX_PINS = 2**16  # more than there are concurrent rollouts; the oldest pin is released for a new one


class WrongWeightsError(Exception):
    """The log-probabilities of the loaded weights are not the trainer's; the message has version and difference."""


def shielded(operation: Callable[_P, Coroutine[Any, Any, _T]]) -> Callable[_P, Coroutine[Any, Any, _T]]:
    """Decorate a method that continues if its caller is cancelled: a lost client leaves no incomplete switch."""

    @wraps(operation)
    async def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        task = asyncio.ensure_future(operation(*args, **kwargs))
        _running.add(task)  # the event loop keeps no reference
        task.add_done_callback(_running.discard)
        return await asyncio.shield(task)

    return call


class LeaseHeldError(Exception):
    """Other runs hold the server, the slot, or all slots; the message names them."""

    def __init__(self, message: str, free_in_seconds: float | None) -> None:
        super().__init__(message)
        self.free_in_seconds = free_in_seconds  # seconds until a lease expires, unless its holder calls again


class Lease:
    """The right to switch the policy.

    The first call with a run_id takes the lease. It expires `seconds` after the last call of its holder, which may also
    release it. Calls without a run_id are admitted while no run holds it.
    """

    def __init__(
        self, seconds: float, clock: Callable[[], float] = time.monotonic, subject: str = "this server"
    ) -> None:
        self.seconds = seconds
        self._clock, self._subject = clock, subject
        self._holder: str | None = None
        self._since = 0.0
        self._renewed = 0.0

    @property
    def holder(self) -> str | None:
        """The run that holds the lease now, or None."""
        if self._holder is not None and self._clock() - self._renewed > self.seconds:
            self._holder = None
        return self._holder

    @property
    def free_in_seconds(self) -> float:
        """Seconds until it expires, unless its holder calls again."""
        return 0.0 if self.holder is None else self.seconds - (self._clock() - self._renewed)

    def take(self, run_id: str | None) -> None:
        """Take or renew the lease for `run_id`; raises LeaseHeldError if another run holds it.

        None only checks that no run holds it.
        """
        now = self._clock()
        if self.holder is not None and self.holder != run_id:
            raise LeaseHeldError(
                f"run {self.holder} has held {self._subject} for {now - self._since:.0f} s "
                f"(last call {now - self._renewed:.0f} s ago); the lease expires {self.seconds:.0f} s after that",
                self.free_in_seconds,
            )
        if run_id is not None:
            self._since = self._since if self.holder == run_id else now
            self._holder, self._renewed = run_id, now

    def renew(self, run_id: str | None) -> None:
        """Renew the lease if `run_id` holds it; otherwise do nothing."""
        if run_id is not None and self.holder == run_id:
            self._renewed = self._clock()

    def release(self, run_id: str) -> None:
        """Release the lease, if `run_id` holds it; raises LeaseHeldError if another run does."""
        if self.holder is not None:
            self.take(run_id)
            self._holder = None


class VersionPins:
    """Pins hold back weight updates until a request, or a rollout of several requests, is complete.

    `/v1/chat/completions` and similar routes cannot report which version sampled which token, so one version samples
    the whole response (I5). A rollout of several requests is pinned by `POST /pin_policy`; it sends its pin with every
    request (header `X-Policy-Pin`) and releases it at the end.

        rollouts   |---pin 1---|    |--pin 2--|          (waits)|---pin 3---
        update          (staged: waits.........)|in place|

    A waiting update admits no new pin, so it waits for the longest of the existing pins and at most `seconds`. After
    that it proceeds, and the headers of the responses name two versions. It does not wait for a pin that no request has
    used for `seconds`: its client may be gone.
    """

    def __init__(self, seconds: float) -> None:
        """An update waits at most `seconds`; 0 disables pins."""
        self.seconds = seconds
        self._last_use: dict[str, float] = {}  # by pin, the oldest pin first
        self._active_requests = Counter[str]()  # by pin
        self._no_pins = asyncio.Event()
        self._no_pins.set()
        self._admits_pins = asyncio.Event()
        self._admits_pins.set()

    def __contains__(self, name: str) -> bool:
        return name in self._last_use

    async def acquire(self) -> str:
        """Return the name of a new pin, after the end of any update that is waiting or in progress."""
        await self._admits_pins.wait()
        name = secrets.token_hex(16)
        while len(self._last_use) >= _MAX_PINS:
            self.release(next(iter(self._last_use)))
        self._last_use[name] = time.monotonic()
        self._no_pins.clear()
        return name

    def release(self, name: str) -> None:
        """Remove a pin, if it exists."""
        self._last_use.pop(name, None)
        if not self._last_use:
            self._no_pins.set()

    @asynccontextmanager
    async def request(self, pin: str = "") -> AsyncIterator[None]:
        """Hold the request's pin, or if it has none a new one, for the length of the block."""
        is_own = pin in self
        if not is_own and not self.seconds:
            yield
            return
        name = pin if is_own else await self.acquire()
        self._active_requests[name] += 1
        try:
            yield
        finally:
            self._active_requests[name] -= 1
            if not self._active_requests[name]:
                del self._active_requests[name]
            if not is_own:
                self.release(name)
            elif name in self:
                self._last_use[name] = time.monotonic()

    @asynccontextmanager
    async def update(self) -> AsyncIterator[None]:
        """Wait until all pins are released or expired, and admit none for the length of the block."""
        self._admits_pins.clear()
        try:
            deadline = time.monotonic() + self.seconds
            while self._last_use and (remaining := self._longest_wait(deadline)) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(remaining):
                        await self._no_pins.wait()
            self.release_all()
            yield
        finally:
            self._admits_pins.set()

    def release_all(self) -> None:
        """Remove all pins."""
        self._last_use.clear()
        self._no_pins.set()

    def _longest_wait(self, deadline: float) -> float:
        """Seconds until all pins have expired, if no request is sent until then."""
        expiry = (deadline if name in self._active_requests else t + self.seconds for name, t in self._last_use.items())
        return min(deadline, max(expiry)) - time.monotonic()


class PolicyManager:
    """Switches one slot of an engine, which samples from the base `model`, between policies, one switch at a time.

    Keeps the version tags exact (I5): `policy` is always what the engine samples from in this slot.

    Args:
        pause: of the engine, which all slots share.
        lease: decides which run may switch.
        number: of the slot's adapter. All weights can be switched in the base slot only.
        canary_tolerance: largest accepted difference of log-probabilities; None derives it from the precision.
        max_rank: largest rank of an adapter; None accepts no adapters.
        pin_timeout_seconds: longest time that a switch waits for pins.
        on_phase: called at the end of `stage`, `pause` and `swap`, with the start in Unix seconds and the version.
        copy: copies a published version to this node and returns its directory, as `RelayedVersions.copy`.
    """

    def __init__(
        self,
        engine: VllmEngine,
        pause: EnginePause,
        model: ServedModel,
        lease: Lease,
        number: int = POLICY_ADAPTER,
        canary_tolerance: float | None = None,
        max_rank: int | None = None,
        pin_timeout_seconds: float = 0,
        on_phase: Callable[[str, float, PolicyVersion], None] = lambda name, start, version: None,
        copy: "Callable[[Path, PolicyVersion, _Overtaken], Awaitable[Path]] | None" = None,
    ) -> None:
        self.policy = self.base_policy = model.policy
        self.pins = VersionPins(pin_timeout_seconds)
        self.lease = lease
        self.base_canary: PolicyCanary | None = None  # measured at the start
        self.dependent_adapters: Collection[str] = ()  # of runs, and named ones, on top of the base model's weights
        self.free_expired: Callable[[], Awaitable[None]] | None = None  # removes those of expired slots
        self._weights = model.policy  # without an adapter
        self._engine, self._pause, self._number = engine, pause, number
        self._model = model
        self._canary_tolerance = canary_tolerance
        self._on_phase = on_phase
        self._max_rank = max_rank
        self._copy = copy
        self._copied: tuple[PolicyVersion, Path] | None = None  # the last one of this run
        # Difference and failure of the loaded policy; None until it is compared.
        self._canary: tuple[float | None, str | None] | None = (None, None)
        self._staged: tuple[CheckedVersion, _Answer] | None = None
        self._requested: list[PolicyVersion] = []
        self._num_reloads = 0  # requested ones
        self._is_closed = False
        self._lock = asyncio.Lock()

    @property
    def is_expired(self) -> bool:
        """Whether no run holds the slot, and no switch is in progress."""
        return self.lease.holder is None and not self._lock.locked()

    async def start(self) -> None:
        """Set the version and salt of the base model. Must be called before the first request."""
        await self._engine.empty_adapter(self._number)
        await self._engine.commit(self.base_policy, self._number)

    @shielded
    async def close(self) -> None:
        """End the requests of a run's slot and remove its adapter; later switches are refused."""
        self._is_closed = True
        self._num_reloads += 1
        self.pins.release_all()
        async with self._lock:
            await self._engine.end_requests(self._number)
            await self._engine.remove_adapter(self._number)

    def forget_copy(self) -> None:
        """Copy a version again, because those of another run may replace its files."""
        self._copied = None

    def describe(self, run_id: str | None = None) -> _Answer:
        """Return the loaded version and the holder of the lease; renews the lease of `run_id`."""
        self.lease.renew(run_id)
        return {"run_id": self.lease.holder, **self._loaded()}

    @shielded
    async def stage(self, version: PolicyVersion, weight_dir: Path, run_id: str | None) -> _Answer:
        """Read, check and stage a published version, so that `update` is fast; raises as `update`.

        Several servers that are staged first switch within milliseconds of each other. One version is staged at a time.
        """
        async with self._checked(version, weight_dir, run_id) as policy:
            return policy.describe() | await self._stage(policy)

    @shielded
    async def update(self, version: PolicyVersion, weight_dir: Path, run_id: str | None) -> _Answer:
        """Switch to a published version and keep the requests in flight. A repeated call succeeds without a change.

        Returns:
            The loaded version; `stage_s`, seconds of reading and checking; `pause_s`, seconds without sampling, of
            which `load_s` for loading `bytes`; `canary_difference`.

        Raises:
            LeaseHeldError: another run holds the slot.
            WeightsRefusedError: the version is older than the loaded one, damaged, of another model, or was overtaken
                by a newer version while it was staged.
            WrongWeightsError: it is loaded, but the canary's log-probabilities are not the trainer's.
        """
        async with self._checked(version, weight_dir, run_id) as policy:
            if (version, policy.salt) == (self.policy.version, self.policy.salt):
                answer = {"stage_s": 0.0, "pause_s": 0.0, "load_s": 0.0, "bytes": 0}
            else:
                staged = await self._stage(policy)
                async with self.pins.update():
                    answer = await self._switch(policy, staged)
            if self._canary is None:
                self._canary = await self.check_canary(policy, self._number)
            if failure := self._canary[1]:
                raise WrongWeightsError(failure)
            return answer | self._loaded()

    @shielded
    async def reload(self, run_id: str | None) -> _Answer:
        """Return to the base model, version (0, 0), and end the slot's requests. Returns the same as `update`.

        Raises:
            LeaseHeldError: another run holds the slot.
            WeightsRefusedError: the base model's files have changed since the start.
        """
        self.lease.take(run_id)
        self._num_reloads += 1
        self._copied = None  # the next run has other weights under the same version
        try:
            async with self._turn():
                base = self.base_policy
                return await self._switch(base, await self._stage(base), ends_requests=True)
        finally:
            self._num_reloads -= 1

    @shielded
    async def measure(self) -> _Answer:
        """Measure the shortest possible switch, during a pause; returns the answer of one engine."""
        async with self._lock, self._pause.during("measuring a switch"):
            return await self._engine.measure()

    @asynccontextmanager
    async def base_weights_loaded(self) -> AsyncIterator[None]:
        """Keep the base model's weights loaded for the length of the block; refused if others are loaded."""
        async with self._lock:
            if self._weights.hash != self.base_policy.hash:
                raise WeightsRefusedError(
                    f"version {self._weights.version} with all weights is loaded, but an adapter needs the base "
                    "model's weights; call POST /reload_weights first"
                )
            yield

    def check_adapter(self, weight_dir: Path, version: PolicyVersion) -> CheckedVersion:
        """Check a published adapter of the base model by `check_adapter`."""
        return check_adapter(weight_dir, version, self._model.shapes, self._max_rank)

    async def check_canary(self, policy: CheckedVersion, number: int) -> tuple[float | None, str | None]:
        """Compare each copy's log-probabilities of the canary's tokens with the trainer's; `number` is of the adapter.

        Returns:
            The largest difference, if there is a canary and it is finite; an error message if it is too large.
        """
        canary = policy.canary
        if canary is None:
            return None, None
        answers = await self._engine.prompt_logprobs(canary.token_ids, number)
        dtype, tolerance = self._engine.dtype, self._canary_tolerance
        compared = [canary.compare(answer, dtype, tolerance, self.base_canary) for answer in answers]
        largest = [one.largest for one in compared]
        difference = max(largest) if all(map(math.isfinite, largest)) else None
        if (wrong := next((one for one in compared if not one.passes), None)) is None:
            return difference, None
        return difference, (
            f"version {policy.version} of {policy.path} is loaded, but is not the trainer's: the {wrong.which} "
            f"difference between log-probabilities of its canary is {wrong.difference:.3g}, more than "
            f"{wrong.tolerance:.3g} (canary_tolerance)"
        )

    def _loaded(self) -> _Answer:
        return self.policy.describe() | {"canary_difference": self._canary[0] if self._canary else None}

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait for the end of the previous switch; refused if the slot was closed."""
        async with self._lock:
            if self._is_closed:
                raise WeightsRefusedError("the slot was released meanwhile; call POST /reload_weights first")
            yield

    @asynccontextmanager
    async def _checked(
        self, version: PolicyVersion, weight_dir: Path, run_id: str | None
    ) -> AsyncIterator[CheckedVersion]:
        """Take the lease, wait for the end of the previous switch, and check a version; yields its policy.

        An older version that is being staged gives way to the requested one.
        """
        self.lease.take(run_id)
        self._requested.append(version)
        try:
            async with self._turn():
                yield await self._check(version, weight_dir, run_id)
        finally:
            self._requested.remove(version)

    async def _check(self, version: PolicyVersion, weight_dir: Path, run_id: str | None) -> CheckedVersion:
        if version < self.policy.version:
            raise WeightsRefusedError(
                f"version {version} (branch.step) of {weight_dir} is older than the loaded version "
                f"{self.policy.version}; a new run starts with POST /reload_weights"
            )
        if self._copy is not None:
            if self._copied is None or self._copied[0] != version:
                self._copied = None
                copy = await self._copy(weight_dir, version, lambda: self._overtaken(version, weight_dir))
                self._copied = version, copy
            weight_dir = self._copied[1]
        policy = await asyncio.to_thread(check_version, weight_dir, version, self._model, self._max_rank)
        self.lease.renew(run_id)
        if policy.adapter is not None and self._weights.hash != self.base_policy.hash:
            raise WeightsRefusedError(
                f"{weight_dir} contains an adapter of the base model, but version {self._weights.version} with all "
                "weights is loaded; call POST /reload_weights first"
            )
        if policy.adapter is not None or self._is_loaded(policy):
            return policy
        if self.free_expired is not None:
            await self.free_expired()
        if self.dependent_adapters:
            raise WeightsRefusedError(
                f"{weight_dir} contains full weights, but these adapters depend on the base model: "
                f"{', '.join(self.dependent_adapters)}; end their runs, or call POST /unload_adapter first"
            )
        return policy

    def _is_loaded(self, policy: CheckedVersion) -> bool:
        """Whether the tensors of this policy are loaded already."""
        if policy.adapter is None:
            return policy.hash == self._weights.hash
        return policy.salt == self.policy.salt

    async def _stage(self, policy: CheckedVersion) -> _Answer:
        """Stage `policy`, unless it is loaded or staged already; returns `stage_s`, and `bytes` over all workers."""
        if self._is_loaded(policy):
            return {"stage_s": 0.0, "bytes": 0}
        if self._staged is not None and self._staged[0] == policy:
            return self._staged[1]
        self._staged = None

        def overtaken() -> str | None:
            return None if policy is self.base_policy else self._overtaken(policy.version, policy.path)

        start = time.time()
        self._staged = policy, await self._engine.stage(policy, overtaken, self._number)
        self._on_phase("stage", start, policy.version)
        return self._staged[1]

    def _overtaken(self, version: PolicyVersion, directory: Path) -> str | None:
        """Return why a newer request makes this version obsolete, if so."""
        newest = max(self._requested, default=version)
        newer = "the base model" if self._num_reloads else f"version {newest}" if newest > version else None
        return newer and f"version {version} of {directory} was superseded by {newer} during staging"

    async def _switch(self, target: CheckedVersion, staged: _Answer, ends_requests: bool = False) -> _Answer:
        async with self._pause.during(f"loading {target.path}") as pause_seconds:
            paused, swap_start = time.perf_counter(), time.time()
            if ends_requests:
                await self._engine.end_requests(self._number)
            if not self._is_loaded(target):
                self._staged = None
                await self._engine.load(target, self._number)
            elif target.adapter is None and self.policy.adapter is not None:
                await self._engine.empty_adapter(self._number)
            loaded = time.perf_counter()
            await self._engine.commit(target, self._number)
            self.policy = target
            self._canary = (None, None) if target is self.base_policy else None
            self._weights = self._weights if target.adapter is not None else target
            self._on_phase("swap", swap_start, target.version)
        end = time.time()
        self._on_phase("pause", end - pause_seconds[0], target.version)
        return self._loaded() | staged | {"pause_s": pause_seconds[0], "load_s": loaded - paused}
