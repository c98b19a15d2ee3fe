"""The policy that the server samples from, and how it is switched.

A version is read, checked and staged while sampling continues. Then the engine is paused, gets the staged weights, its
version and the salt of its prefix cache, and is resumed. At last the canary compares the loaded weights with the
trainer's. A policy is all weights of a model, or the base model's weights and an adapter.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec

from prime_rl.core.types import PolicyVersion
from prime_rl.inference.policy.adapter_checks import check_adapter, check_version
from prime_rl.inference.policy.run_lease import Lease
from prime_rl.inference.policy.version_pins import VersionPins
from prime_rl.inference.policy.weight_checks import PublishedPolicy, ServedModel, WeightsRefusedError

if TYPE_CHECKING:
    from prime_rl.inference.vllm.engine_group import VllmEngine

PauseMode = Literal["keep", "abort"]
"""Requests in flight are suspended, or ended."""

_P = ParamSpec("_P")
_Answer = dict[str, Any]
_Overtaken = Callable[[], str | None]
"""Returns why a newer request makes the one in progress obsolete, if so."""
_running = set[asyncio.Future[_Answer]]()


class WrongWeightsError(Exception):
    """The log-probabilities of the loaded weights are not the trainer's; the message has version and difference."""


def shielded(operation: Callable[_P, Coroutine[Any, Any, _Answer]]) -> Callable[_P, Coroutine[Any, Any, _Answer]]:
    """Decorate a method that continues if its caller is cancelled: a lost client leaves no incomplete switch."""

    @wraps(operation)
    async def call(*args: _P.args, **kwargs: _P.kwargs) -> _Answer:
        task = asyncio.ensure_future(operation(*args, **kwargs))
        _running.add(task)  # the event loop keeps no reference
        task.add_done_callback(_running.discard)
        return await asyncio.shield(task)

    return call


class PolicyManager:
    """Switches one engine, which samples from the base `model`, between policies, one switch at a time.

    Keeps the version tags exact (I5): `policy` is always what the engine samples from.

    Args:
        lease: decides which run may switch.
        fail: called with a message when the weights are undefined; must end the server.
        canary_tolerance: largest accepted difference of log-probabilities; None derives it from the precision.
        max_rank: largest rank of an adapter; None accepts no adapters.
        pin_timeout_seconds: longest time that a switch waits for pins.
        on_phase: called at the end of `stage`, `pause` and `swap`, with the start in Unix seconds and the version.
        copy: copies a published version to this node and returns its directory, as `RelayedVersions.copy`.
    """

    def __init__(
        self,
        engine: "VllmEngine",
        model: ServedModel,
        lease: Lease,
        fail: Callable[[str], None],
        canary_tolerance: float | None = None,
        max_rank: int | None = None,
        pin_timeout_seconds: float = 0,
        on_phase: Callable[[str, float, PolicyVersion], None] = lambda name, start, version: None,
        copy: "Callable[[Path, PolicyVersion, _Overtaken], Awaitable[Path]] | None" = None,
    ) -> None:
        self.policy = self._base = model.policy
        self.pins = VersionPins(pin_timeout_seconds)
        self.named_adapters: Collection[str] = ()  # served in addition, on top of the base model's weights
        self._weights = model.policy  # without an adapter
        self._engine = engine
        self._model = model
        self._lease = lease
        self._fail = fail
        self._canary_tolerance = canary_tolerance
        self._on_phase = on_phase
        self._max_rank = max_rank
        self._copy = copy
        self._copied: tuple[PolicyVersion, Path] | None = None  # the last one of this run
        # Difference and failure of the loaded policy; None until it is compared.
        self._canary: tuple[float | None, str | None] | None = (None, None)
        self._staged: tuple[PublishedPolicy, _Answer] | None = None
        self._requested: list[PolicyVersion] = []
        self._num_reloads = 0  # requested ones
        self._lock = asyncio.Lock()
        self._not_paused = asyncio.Event()
        self._not_paused.set()

    async def start(self) -> None:
        """Set the version and salt of the base model. Must be called before the first request."""
        await self._engine.commit(self._base)

    def describe(self, run_id: str | None = None) -> _Answer:
        """Return the loaded version and the holder of the lease; renews the lease of `run_id`."""
        self._lease.renew(run_id)
        return {"run_id": self._lease.holder, **self._loaded()}

    def release(self, run_id: str) -> _Answer:
        """Release the lease of `run_id`; raises LeaseHeldError if another run holds it."""
        self._lease.release(run_id)
        return self.describe()

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
            LeaseHeldError: another run holds the server.
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
                    answer = await self._switch(policy, "keep", staged)
            if self._canary is None:
                self._canary = await self.check_canary(policy)
            if failure := self._canary[1]:
                raise WrongWeightsError(failure)
            return answer | self._loaded()

    @shielded
    async def reload(self, run_id: str | None) -> _Answer:
        """Return to the base model, version (0, 0), and end every request in flight. Returns the same as `update`.

        Raises:
            LeaseHeldError: another run holds the server.
            WeightsRefusedError: the base model's files have changed since the start.
        """
        self._lease.take(run_id)
        self._num_reloads += 1
        self._copied = None  # the next run has other weights under the same version
        try:
            async with self._lock:
                return await self._switch(self._base, "abort", await self._stage(self._base))
        finally:
            self._num_reloads -= 1

    @shielded
    async def measure(self) -> _Answer:
        """Measure the shortest possible switch, during a pause; returns the answer of one engine."""
        async with self._lock, self._paused("keep", "measuring a switch"):
            return await self._engine.measure()

    @asynccontextmanager
    async def base_weights_loaded(self) -> AsyncIterator[None]:
        """Keep the base model's weights loaded for the length of the block; refused if others are loaded."""
        async with self._lock:
            if self._weights.hash != self._base.hash:
                raise WeightsRefusedError(
                    f"version {self._weights.version} with all weights is loaded, but an adapter needs the base "
                    "model's weights; call POST /reload_weights first"
                )
            yield

    async def wait_until_sampling(self) -> None:
        """Return when the engine is not paused."""
        await self._not_paused.wait()

    def check_adapter(self, weight_dir: Path, version: PolicyVersion) -> PublishedPolicy:
        """Check a published adapter of the base model by `adapter_checks.check_adapter`."""
        return check_adapter(weight_dir, version, self._model.shapes, self._max_rank)

    async def check_canary(self, policy: PublishedPolicy, number: int = 0) -> tuple[float | None, str | None]:
        """Compare each copy's log-probabilities of the canary's tokens with the trainer's; `number` is of an adapter.

        Returns:
            The largest difference, if there is a canary and it is finite; an error message if it is too large.
        """
        canary = policy.canary
        if canary is None:
            return None, None
        answers = await self._engine.prompt_logprobs(canary.token_ids, number)
        compared = [canary.compare(answer, self._engine.dtype, self._canary_tolerance) for answer in answers]
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
    async def _checked(
        self, version: PolicyVersion, weight_dir: Path, run_id: str | None
    ) -> AsyncIterator[PublishedPolicy]:
        """Take the lease, wait for the end of the previous switch, and check a version; yields its policy.

        An older version that is being staged gives way to the requested one.
        """
        self._lease.take(run_id)
        self._requested.append(version)
        try:
            async with self._lock:
                yield await self._check(version, weight_dir, run_id)
        finally:
            self._requested.remove(version)

    async def _check(self, version: PolicyVersion, weight_dir: Path, run_id: str | None) -> PublishedPolicy:
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
        self._lease.renew(run_id)
        if policy.adapter is not None and self._weights.hash != self._base.hash:
            raise WeightsRefusedError(
                f"{weight_dir} contains an adapter of the base model, but version {self._weights.version} with all "
                "weights is loaded; call POST /reload_weights first"
            )
        if policy.adapter is None and self.named_adapters and not self._is_loaded(policy):
            raise WeightsRefusedError(
                f"{weight_dir} contains full weights, but these adapters depend on the base model: "
                f"{', '.join(self.named_adapters)}; call POST /unload_adapter first"
            )
        return policy

    def _is_loaded(self, policy: PublishedPolicy) -> bool:
        """Whether the tensors of this policy are loaded already."""
        if policy.adapter is None:
            return policy.hash == self._weights.hash
        return policy.salt == self.policy.salt

    async def _stage(self, policy: PublishedPolicy) -> _Answer:
        """Stage `policy`, unless it is loaded or staged already; returns `stage_s`, and `bytes` over all workers."""
        if self._is_loaded(policy):
            return {"stage_s": 0.0, "bytes": 0}
        if self._staged is not None and self._staged[0] == policy:
            return self._staged[1]
        self._staged = None

        def overtaken() -> str | None:
            return None if policy is self._base else self._overtaken(policy.version, policy.path)

        start = time.time()
        self._staged = policy, await self._engine.stage(policy, overtaken)
        self._on_phase("stage", start, policy.version)
        return self._staged[1]

    def _overtaken(self, version: PolicyVersion, directory: Path) -> str | None:
        """Return why a newer request makes this version obsolete, if so."""
        newest = max(self._requested, default=version)
        newer = "the base model" if self._num_reloads else f"version {newest}" if newest > version else None
        return newer and f"version {version} of {directory} was overtaken by {newer} while it was staged"

    @asynccontextmanager
    async def _paused(self, mode: PauseMode, purpose: str) -> AsyncIterator[list[float]]:
        """Pause the engine for the length of the block; appends the seconds of the pause to the yielded list.

        An error during the pause leaves undefined weights or paused engines. The engine then stays paused and the
        server ends, so no token is sampled from undefined weights.
        """
        pause_s: list[float] = []
        outcome = "the engines may stay paused"
        self._not_paused.clear()
        try:
            await self._engine.pause(mode)
            outcome = "the weights are undefined"
            yield pause_s
            outcome = "the engines may stay paused"
            pause_s.append(await self._engine.resume())
        except BaseException as error:
            self._fail(f"{purpose} failed ({error or type(error).__name__}): {outcome}; the server stops")
            raise
        self._not_paused.set()

    async def _switch(self, target: PublishedPolicy, mode: PauseMode, staged: _Answer) -> _Answer:
        start = time.time()
        async with self._paused(mode, f"loading {target.path}") as pause_s:
            paused, swap_start = time.perf_counter(), time.time()
            if not self._is_loaded(target):
                self._staged = None
                await self._engine.load(target)
            elif target.adapter is None and self.policy.adapter is not None:
                await self._engine.disable_adapter()
            loaded = time.perf_counter()
            await self._engine.commit(target)
            self.policy = target
            self._canary = (None, None) if target is self._base else None
            self._weights = self._weights if target.adapter is not None else target
            self._on_phase("swap", swap_start, target.version)
        self._on_phase("pause", start, target.version)
        return self._loaded() | staged | {"pause_s": pause_s[0], "load_s": loaded - paused}
