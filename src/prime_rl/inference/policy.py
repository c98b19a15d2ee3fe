"""Which policy the server samples from, and how it changes.

Invariant (I5): `PolicyServer.policy` is what the engine samples from. A candidate is checked in full while sampling
goes on; only then is the engine paused, loaded, told its version and the salt of its prefix cache, and resumed.
Until the pause a refusal costs nothing. A failure during the pause leaves weights that are neither the old nor the
new ones, so nothing is ever sampled from them: the engine stays paused and the server ends with an error.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal, Protocol

from prime_rl.inference.lease import Lease
from prime_rl.inference.weights import Policy, Shapes, WeightsRefusedError, check_weights
from prime_rl.types import PolicyVersion

PauseMode = Literal["keep", "abort"]


class Engine(Protocol):
    """What switching needs of the engine."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling; "keep" freezes the requests in flight, "abort" ends them."""

    async def load(self, policy: Policy) -> None:
        """Load the policy's weights into the paused model."""

    async def commit(self, policy: Policy) -> None:
        """Tag the tokens from here on with the policy's version and its cache entries with its hash."""

    async def resume(self) -> None:
        """Go on sampling."""


class PolicyServer:
    """Switches one engine between policies, one switch at a time, for the run that holds the lease.

    Args:
        engine: the engine, already sampling from `base`.
        base: policy version 0.
        shapes: the base checkpoint's tensor shapes.
        tied: the model's output head is its embedding.
        lease: who may switch.
        fail: called with a message when the weights are in an undefined state; it must end the server.
    """

    def __init__(
        self, engine: Engine, base: Policy, shapes: Shapes, tied: bool, lease: Lease, fail: Callable[[str], None]
    ) -> None:
        self.policy = base
        self._engine = engine
        self._base = base
        self._shapes = shapes
        self._tied = tied
        self._lease = lease
        self._fail = fail
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

    async def update(self, version: PolicyVersion, weight_dir: Path, run_id: str | None) -> dict[str, Any]:
        """Switch to a published version, keeping the requests in flight.

        Asking again for what is loaded changes nothing and succeeds, so a caller may retry.

        Args:
            version: the version to load.
            weight_dir: where it was published.
            run_id: the run that asks; it takes or renews the lease.

        Returns:
            The loaded version, and `pause_s`, seconds without sampling, of which `load_s` for loading.

        Raises:
            LeaseHeldError: another run holds the server.
            WeightsRefusedError: older than what is loaded, or not what was published, or not for this model.
        """
        self._lease.take(run_id)
        return await _to_the_end(self._update(version, weight_dir, run_id))

    async def reload(self, run_id: str | None) -> dict[str, Any]:
        """Go back to the base model, version (0, 0), and end every request in flight. Answers like `update`.

        Raises:
            LeaseHeldError: another run holds the server.
        """
        self._lease.take(run_id)
        return await _to_the_end(self._reload())

    def _loaded(self) -> dict[str, Any]:
        version = self.policy.version
        return {"branch": version.branch, "step": version.step, "hash": self.policy.hash}

    async def _update(self, version: PolicyVersion, weight_dir: Path, run_id: str | None) -> dict[str, Any]:
        async with self._lock:
            if version < self.policy.version:
                raise WeightsRefusedError(
                    f"version {version} (branch.step) is older than {self.policy.version}, which is loaded; "
                    "a new run starts with POST /reload_weights"
                )
            checked = await asyncio.to_thread(check_weights, weight_dir, version, self._shapes, self._tied)
            self._lease.renew(run_id)
            if (version, checked.hash) == (self.policy.version, self.policy.hash):
                return self._loaded() | {"pause_s": 0.0, "load_s": 0.0}
            return await self._switch(checked, "keep")

    async def _reload(self) -> dict[str, Any]:
        async with self._lock:
            return await self._switch(self._base, "abort")

    async def _switch(self, target: Policy, mode: PauseMode) -> dict[str, Any]:
        start = time.perf_counter()
        await self._engine.pause(mode)
        paused = time.perf_counter()
        complete = False
        try:
            if target.hash != self.policy.hash:
                await self._engine.load(target)
            loaded = time.perf_counter()
            await self._engine.commit(target)
            self.policy = target
            complete = True
        finally:
            if complete:
                await self._engine.resume()
            else:
                self._fail(f"loading {target.path} failed half way: the weights are undefined, so the server stops")
        return self._loaded() | {"pause_s": time.perf_counter() - start, "load_s": loaded - paused}


async def _to_the_end(operation: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Await `operation`, which goes on if the caller is cancelled: a client that hangs up leaves no half switch."""
    return await asyncio.shield(asyncio.ensure_future(operation))
