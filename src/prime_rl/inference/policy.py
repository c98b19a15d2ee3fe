"""Which policy the server samples from, and how it changes.

Invariant (I5): `PolicyServer.policy` is what the engine samples from. A candidate is read, checked and staged in full
while sampling goes on; only then is the engine paused, given the staged weights, told its version and the salt of its
prefix cache, and resumed. A policy is a model's weights, or the base model's and an adapter: then these stay where they
are, and the adapter takes the place of the one before. Until the pause a refusal costs nothing. A failure during the
pause leaves weights that are neither the old nor the new ones, so nothing is ever sampled from them: the engine stays
paused and the server ends with an error. After the switch the canary is asked; a policy that answers wrongly is named
in every answer from then on.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from prime_rl.inference.adapters import check_version
from prime_rl.inference.lease import Lease
from prime_rl.inference.pins import Pins
from prime_rl.inference.weights import Policy, Shapes, WeightsRefusedError
from prime_rl.types import PolicyVersion

PauseMode = Literal["keep", "abort"]


class PolicyWrongError(Exception):
    """The loaded weights do not say what the trainer's do; the message holds version, directory and difference."""


@dataclass(frozen=True, slots=True)
class Staged:
    """What staging took: seconds, and bytes over all workers."""

    seconds: float = 0.0
    bytes: int = 0


class Engine(Protocol):
    """What switching needs of the engine."""

    dtype: str
    """In which it computes, e.g. "float32"."""

    async def stage(self, policy: Policy, overtaken: Callable[[], str | None]) -> Staged:
        """Read and check the policy's weights, and make them ready, while sampling goes on.

        Raises:
            WeightsRefusedError: they are not what was published, or `overtaken` named something newer.
        """

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling; "keep" freezes the requests in flight, "abort" ends them."""

    async def load(self, policy: Policy) -> None:
        """Put the staged weights, or the staged adapter, into the paused model."""

    async def unadapt(self) -> None:
        """Let the paused model be the weights alone that are in place, without the policy's adapter."""

    async def commit(self, policy: Policy) -> None:
        """Tag the tokens from here on with the policy's version and its cache entries with its salt."""

    async def resume(self) -> float:
        """Go on sampling; return for how many seconds nothing was sampled."""

    async def prompt_logprobs(self, token_ids: tuple[int, ...]) -> list[list[float]]:
        """Compute the log-probabilities of tokens 1 ... T-1, as far as they fit, on each copy of the model."""


class PolicyServer:
    """Switches one engine between policies, one switch at a time, for the run that holds the lease.

    Args:
        engine: the engine, already sampling from `base`.
        base: policy version 0.
        shapes: the base checkpoint's tensor shapes.
        tied: the model's output head is its embedding.
        lease: who may switch.
        fail: called with a message when the weights are in an undefined state; it must end the server.
        canary_tolerance: how far a canary's log-probabilities may be off; None is what rounding explains.
        max_rank: largest rank of an adapter; None takes no adapters.
        pin_seconds: longest time that a switch waits for who is pinned.

    Attributes:
        pins: who is not switched away from.
        policy: what the engine samples from.
        guests: names of adapters that are served beside the policy and rest on the base model's weights.
    """

    def __init__(
        self,
        engine: Engine,
        base: Policy,
        shapes: Shapes,
        tied: bool,
        lease: Lease,
        fail: Callable[[str], None],
        canary_tolerance: float | None = None,
        max_rank: int | None = None,
        pin_seconds: float = 0,
    ) -> None:
        self.policy = base
        self.pins = Pins(pin_seconds)
        self.guests: Collection[str] = ()
        self._weights = base  # what is in place without an adapter
        self._engine = engine
        self._base = base
        self._shapes = shapes
        self._tied = tied
        self._lease = lease
        self._fail = fail
        self._canary_tolerance = canary_tolerance
        self._max_rank = max_rank
        self._canary_difference: float | None = None
        self._wrong: str | None = None
        self._staged: tuple[Policy, Staged] | None = None
        self._asked: list[PolicyVersion] = []
        self._returning = 0
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        """Tell the engine what it has loaded. To be called before the first request."""
        await self._engine.commit(self._base)

    def describe(self, run_id: str | None = None) -> dict[str, Any]:
        """Tell what is loaded and who holds the lease; renews the lease of `run_id`."""
        self._lease.renew(run_id)
        return {"run_id": self._lease.holder, **self._loaded()}

    def release(self, run_id: str) -> dict[str, Any]:
        """Give the lease of `run_id` back.

        Raises:
            LeaseHeldError: another run holds it.
        """
        self._lease.release(run_id)
        return self.describe()

    async def stage(self, version: PolicyVersion, weight_dir: Path, run_id: str | None) -> dict[str, Any]:
        """Read, check and stage a published version, so that `update` has little left to do.

        Several servers that are staged first switch within milliseconds of each other. One version is staged at a time.

        Returns:
            The staged version with `stage_s` and `bytes`.

        Raises: as `update`.
        """
        self._lease.take(run_id)
        return await to_the_end(self._stage_only(version, weight_dir, run_id))

    async def update(self, version: PolicyVersion, weight_dir: Path, run_id: str | None) -> dict[str, Any]:
        """Switch to a published version, keeping the requests in flight.

        Asking again for what is loaded changes nothing and succeeds, so a caller may retry.

        Args:
            version: the version to load.
            weight_dir: where it was published.
            run_id: the run that asks; it takes or renews the lease.

        Returns:
            The loaded version; `stage_s`, seconds of reading and checking while sampling went on; `pause_s`, seconds
            without sampling, of which `load_s` for putting `bytes` in place; `canary_difference`.

        Raises:
            LeaseHeldError: another run holds the server.
            WeightsRefusedError: older than what is loaded, or not what was published, or not for this model, or
                overtaken by a newer version while it was staged.
            PolicyWrongError: loaded, but the canary's log-probabilities are not the trainer's.
        """
        self._lease.take(run_id)
        return await to_the_end(self._update(version, weight_dir, run_id))

    async def reload(self, run_id: str | None) -> dict[str, Any]:
        """Go back to the base model, version (0, 0), and end every request in flight. Answers like `update`.

        Raises:
            LeaseHeldError: another run holds the server.
            WeightsRefusedError: the base model's files have changed since the start.
        """
        self._lease.take(run_id)
        return await to_the_end(self._reload())

    @asynccontextmanager
    async def base_in_place(self) -> AsyncIterator[None]:
        """Let the base model's weights stay in place while something is done that rests on them.

        Raises:
            WeightsRefusedError: others are.
        """
        async with self._lock:
            if self._weights.hash != self._base.hash:
                raise WeightsRefusedError(
                    f"the policy is all weights of version {self._weights.version}, and adapters rest on the base "
                    "model's; go back with POST /reload_weights first"
                )
            yield

    def _loaded(self) -> dict[str, Any]:
        version = self.policy.version
        described = {"branch": version.branch, "step": version.step, "hash": self.policy.hash}
        return described | {"canary_difference": self._canary_difference}

    async def _stage_only(self, version: PolicyVersion, weight_dir: Path, run_id: str | None) -> dict[str, Any]:
        with self._asking(version):
            async with self._lock:
                policy = await self._check(version, weight_dir, run_id)
                staged = await self._stage(policy)
                described = {"branch": version.branch, "step": version.step, "hash": policy.hash}
                return described | {"stage_s": staged.seconds, "bytes": staged.bytes}

    async def _update(self, version: PolicyVersion, weight_dir: Path, run_id: str | None) -> dict[str, Any]:
        with self._asking(version):
            async with self._lock:
                policy = await self._check(version, weight_dir, run_id)
                if (version, policy.salt) == (self.policy.version, self.policy.salt):
                    answer = {"stage_s": 0.0, "pause_s": 0.0, "load_s": 0.0, "bytes": 0}
                else:
                    staged = await self._stage(policy)
                    async with self.pins.switch():
                        answer = await self._switch(policy, "keep", staged)
                    await self._ask_canary(policy)
                if self._wrong is not None:
                    raise PolicyWrongError(self._wrong)
                return answer | self._loaded()

    async def _reload(self) -> dict[str, Any]:
        self._returning += 1
        try:
            async with self._lock:
                return await self._switch(self._base, "abort", await self._stage(self._base))
        finally:
            self._returning -= 1

    async def _check(self, version: PolicyVersion, weight_dir: Path, run_id: str | None) -> Policy:
        if version < self.policy.version:
            raise WeightsRefusedError(
                f"version {version} (branch.step) of {weight_dir} is older than {self.policy.version}, which is "
                "loaded; a new run starts with POST /reload_weights"
            )
        policy = await asyncio.to_thread(check_version, weight_dir, version, self._shapes, self._tied, self._max_rank)
        self._lease.renew(run_id)
        if policy.adapter is not None and self._weights.hash != self._base.hash:
            raise WeightsRefusedError(
                f"{weight_dir} holds an adapter of the base model, and all weights of version "
                f"{self._weights.version} are loaded; go back with POST /reload_weights first"
            )
        if policy.adapter is None and self.guests and not self._in_place(policy):
            raise WeightsRefusedError(
                f"{weight_dir} holds all weights, and adapters rest on the base model's: {', '.join(self.guests)}; "
                "POST /unload_adapter first"
            )
        return policy

    def _in_place(self, policy: Policy) -> bool:
        """Whether nothing needs to be read for this policy."""
        if policy.adapter is None:
            return policy.hash == self._weights.hash
        return policy.salt == self.policy.salt

    async def _stage(self, policy: Policy) -> Staged:
        """Stage `policy`, unless it is loaded or staged already."""
        if self._in_place(policy):
            return Staged()
        if self._staged is not None and self._staged[0] == policy:
            return self._staged[1]
        self._staged = None

        def overtaken() -> str | None:
            if policy is self._base:
                return None
            newest = max(self._asked, default=policy.version)
            newer = "the base model" if self._returning else f"version {newest}" if newest > policy.version else None
            return newer and f"version {policy.version} of {policy.path} was overtaken by {newer} while it was staged"

        staged = await self._engine.stage(policy, overtaken)
        self._staged = (policy, staged)
        return staged

    async def _switch(self, target: Policy, mode: PauseMode, staged: Staged) -> dict[str, Any]:
        await self._engine.pause(mode)
        paused = time.perf_counter()
        try:
            if not self._in_place(target):
                self._staged = None
                await self._engine.load(target)
            elif target.adapter is None and self.policy.adapter is not None:
                await self._engine.unadapt()
            loaded = time.perf_counter()
            await self._engine.commit(target)
            self.policy, self._canary_difference, self._wrong = target, None, None
            self._weights = self._weights if target.adapter is not None else target
        except BaseException as error:
            self._fail(
                f"loading {target.path} failed half way ({error}): the weights are undefined, so the server stops"
            )
            raise
        pause_s = await self._engine.resume()
        answer = {"stage_s": staged.seconds, "pause_s": pause_s, "load_s": loaded - paused, "bytes": staged.bytes}
        return self._loaded() | answer

    async def _ask_canary(self, policy: Policy) -> None:
        """Compare what the model says with what the trainer says of the same tokens; sampling goes on meanwhile."""
        self._canary_difference, self._wrong = await ask_canary(
            policy, self._engine.prompt_logprobs, self._engine.dtype, self._canary_tolerance
        )

    @contextmanager
    def _asking(self, version: PolicyVersion) -> Iterator[None]:
        """Let a version that is being staged know what else is asked for."""
        self._asked.append(version)
        try:
            yield
        finally:
            self._asked.remove(version)


async def ask_canary(
    policy: Policy,
    ask: Callable[[tuple[int, ...]], Awaitable[list[list[float]]]],
    dtype: str,
    tolerance: float | None,
) -> tuple[float | None, str | None]:
    """Compare what each copy of the model says of the policy's canary with what the trainer says.

    Returns:
        The largest difference, if there is a canary and the difference is finite; what is wrong, if anything is.
    """
    canary = policy.canary
    if canary is None:
        return None, None
    compared = [canary.compare(answer, dtype, tolerance) for answer in await ask(canary.token_ids)]
    largest = [one.largest for one in compared]
    difference = max(largest) if all(map(math.isfinite, largest)) else None
    for one in compared:
        if not one.passes:
            return difference, (
                f"version {policy.version} of {policy.path} is loaded, but is not the trainer's: the {one.which} "
                f"difference between log-probabilities of its canary is {one.difference:.3g}, more than "
                f"{one.tolerance:.3g} (canary_tolerance)"
            )
    return difference, None


async def to_the_end(operation: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Await `operation`, which goes on if the caller is cancelled: a client that hangs up leaves no half switch."""
    return await asyncio.shield(asyncio.ensure_future(operation))
