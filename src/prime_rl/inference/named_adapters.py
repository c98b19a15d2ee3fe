"""Adapters that are served beside the policy, each under a name of its own, which requests give as their `model`.

Invariant (I5): a name stands for one version from its loading to its unloading. It is given to requests after its
tensors were verified, put in place on every worker and its canary was asked; it is taken away before they are removed,
and they are not removed while a request samples from them. All adapters rest on the base model: none is named while the
policy is a model of other weights.
"""

import asyncio
import itertools
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from prime_rl.inference.adapters import POLICY_ADAPTER, check_adapter
from prime_rl.inference.policy import PolicyServer, PolicyWrongError, ask_canary, to_the_end
from prime_rl.inference.weights import Policy, Shapes, WeightsRefusedError
from prime_rl.types import PolicyVersion

_NAME = re.compile(r"[\w.@:/+-]+")


class AdapterEngine(Protocol):
    """What named adapters need of the engine; `number` tells them apart."""

    dtype: str

    async def add_adapter(self, number: int, policy: Policy) -> None:
        """Read and verify the adapter's tensors, and put them in place.

        Raises:
            WeightsRefusedError: they are not what was published, or cannot be applied to the model.
        """

    async def remove_adapter(self, number: int) -> None:
        """Forget an adapter that no request uses."""

    async def requests_of(self, number: int) -> int:
        """Count the requests that sample from it."""

    async def prompt_logprobs(self, token_ids: tuple[int, ...], number: int) -> list[list[float]]:
        """As `policy.Engine.prompt_logprobs`, under the adapter."""


@dataclass(frozen=True, slots=True)
class Named:
    """An adapter that is served; `number` is never used again for another."""

    name: str
    number: int
    policy: Policy
    canary_difference: float | None = None

    def describe(self) -> dict[str, Any]:
        """What GET /policy tells of it."""
        version = self.policy.version
        described = {"name": self.name, "branch": version.branch, "step": version.step, "hash": self.policy.hash}
        return described | {"weight_dir": str(self.policy.path), "canary_difference": self.canary_difference}


class Registry(Protocol):
    """Where requests find adapters by name."""

    def give(self, named: Named) -> None:
        """Let requests find it."""

    def take(self, named: Named) -> None:
        """Let no further request find it."""


class NamedAdapters:
    """Loads and unloads them, one at a time.

    Args:
        policies: whose weights they rest on.
        engine: the engine.
        registry: where requests find them.
        base: the base checkpoint's tensor shapes.
        max_rank: largest rank.
        capacity: how many there may be.
        reserved: names that requests use for the policy.
        canary_tolerance: as in `PolicyServer`.
    """

    def __init__(
        self,
        policies: PolicyServer,
        engine: AdapterEngine,
        registry: Registry,
        base: Shapes,
        *,
        max_rank: int,
        capacity: int,
        reserved: Collection[str],
        canary_tolerance: float | None = None,
    ) -> None:
        self._policies = policies
        self._engine = engine
        self._base = base
        self._max_rank = max_rank
        self._capacity = capacity
        self._reserved = frozenset(reserved)
        self._registry = registry
        self._canary_tolerance = canary_tolerance
        self._numbers = itertools.count(POLICY_ADAPTER + 1)
        self._named: dict[str, Named] = {}
        self._lock = asyncio.Lock()

    def describe(self) -> list[dict[str, Any]]:
        """Tell which are served."""
        return [named.describe() for named in self._named.values()]

    async def load(self, name: str, version: PolicyVersion, weight_dir: Path) -> dict[str, Any]:
        """Serve a published adapter under `name`. Asking again for the same changes nothing and succeeds.

        Raises:
            WeightsRefusedError: the name is taken, there is no room, or it is not what was published, or not for the
                model that is served.
            PolicyWrongError: the canary's log-probabilities are not the trainer's; it is not served.
        """
        return await to_the_end(self._load(name, version, weight_dir))

    async def unload(self, name: str) -> dict[str, Any]:
        """Serve it no longer.

        Raises:
            WeightsRefusedError: no adapter has that name, or a request samples from it.
        """
        return await to_the_end(self._unload(name))

    async def _load(self, name: str, version: PolicyVersion, weight_dir: Path) -> dict[str, Any]:
        async with self._lock:
            if name in self._reserved:
                raise WeightsRefusedError(f"name: {name!r} stands for the policy; give the adapter another one")
            if not _NAME.fullmatch(name):
                raise WeightsRefusedError(f"name: {name!r} is no name; letters, digits and _ . - @ : / + make one")
            policy = await asyncio.to_thread(check_adapter, weight_dir, version, self._base, self._max_rank)
            there = self._named.get(name)
            if there is not None and (there.policy.version, there.policy.salt) == (version, policy.salt):
                return there.describe()
            if there is not None:
                served = f"version {there.policy.version} of {there.policy.path}"
                raise WeightsRefusedError(f"name: {name!r} is {served}; POST /unload_adapter first")
            if len(self._named) >= self._capacity:
                raise WeightsRefusedError(
                    f"{len(self._named)} adapters are served beside the policy's ({', '.join(self._named) or 'none'}); "
                    f"unload one, or set max_loras above {self._capacity + 1}"
                )
            named = await self._put_in_place(Named(name, next(self._numbers), policy))
            self._named[name] = named
            self._policies.guests = tuple(self._named)
            self._registry.give(named)
            return named.describe()

    async def _put_in_place(self, named: Named) -> Named:
        async with self._policies.base_in_place():
            await self._engine.add_adapter(named.number, named.policy)
            try:
                ask, dtype = partial(self._engine.prompt_logprobs, number=named.number), self._engine.dtype
                difference, wrong = await ask_canary(named.policy, ask, dtype, self._canary_tolerance)
                if wrong is not None:
                    raise PolicyWrongError(wrong)
            except BaseException:
                await self._engine.remove_adapter(named.number)
                raise
            return Named(named.name, named.number, named.policy, difference)

    async def _unload(self, name: str) -> dict[str, Any]:
        async with self._lock:
            named = self._named.get(name)
            if named is None:
                raise WeightsRefusedError(
                    f"name: no adapter is called {name!r}; there are {', '.join(self._named) or 'none'}"
                )
            self._registry.take(named)
            if count := await self._engine.requests_of(named.number):
                self._registry.give(named)
                raise WeightsRefusedError(f"{count} requests sample from {name!r}; unload it when they have ended")
            await self._engine.remove_adapter(named.number)
            del self._named[name]
            self._policies.guests = tuple(self._named)
            return named.describe()
