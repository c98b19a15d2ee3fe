"""Adapters that are served in addition to the policy, each under a name that requests give as their `model`."""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from prime_rl.core.types import PolicyVersion
from prime_rl.inference.policy.engine_group import VllmEngine
from prime_rl.inference.policy.policy_manager import VersionPins, WrongWeightsError, shielded
from prime_rl.inference.policy.slots import Slots
from prime_rl.inference.policy.weight_checks import CheckedVersion, WeightsRefusedError


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """A served adapter; its `number` is never reused."""

    pins: ClassVar = VersionPins(0)  # nothing switches it
    name: str
    number: int
    policy: CheckedVersion
    canary_difference: float | None = None

    def describe(self) -> dict[str, Any]:
        """Its entry in the response of GET /policy."""
        fields = {"weight_dir": str(self.policy.path), "canary_difference": self.canary_difference}
        return {"name": self.name, **self.policy.describe(), **fields}


class NamedAdapters:
    """Loads and unloads adapters, one at a time.

    A name stands for one version from loading to unloading (I5): requests can use it after the tensors were verified,
    loaded on every worker and compared by the canary, and no adapter is removed while a request samples from it.
    """

    def __init__(self, slots: Slots, engine: VllmEngine) -> None:
        self._slots = slots
        self._engine = engine
        self._by_name: dict[str, NamedAdapter] = {}
        self._lock = asyncio.Lock()

    def describe(self) -> list[dict[str, Any]]:
        """Return the entries of the served adapters."""
        return [adapter.describe() for adapter in self._by_name.values()]

    @shielded
    async def load(self, name: str, version: PolicyVersion, weight_dir: Path) -> dict[str, Any]:
        """Serve a published adapter under `name`. A repeated call succeeds without a change.

        Raises:
            LeaseHeldError: all adapters of the server are in use.
            WeightsRefusedError: the name is taken, or the adapter is damaged or of another model.
            WrongWeightsError: the canary's log-probabilities are not the trainer's; the adapter is not served.
        """
        async with self._lock:
            policy = await asyncio.to_thread(self._slots.base.check_adapter, weight_dir, version)
            if (existing := self._by_name.get(name)) is not None:
                if (existing.policy.version, existing.policy.salt) == (version, policy.salt):
                    return existing.describe()
                served = f"version {existing.policy.version} of {existing.policy.path}"
                raise WeightsRefusedError(f"name: {name!r} is {served}; call POST /unload_adapter first")
            number = await self._slots.reserve(name)
            try:
                # Outside the base slot's lock: the disk may be slow.
                await self._engine.stage(policy, lambda: None, number)
                try:
                    adapter = await self._add_staged(NamedAdapter(name, number, policy))
                finally:
                    await self._engine.drop(policy, number)
            except BaseException:
                self._slots.forget(name)
                raise
            self._by_name[name] = adapter
            self._slots.serve(name, number, adapter)
            return adapter.describe()

    @shielded
    async def unload(self, name: str) -> dict[str, Any]:
        """Stop serving an adapter; refused if no adapter has that name, or a request samples from it."""
        async with self._lock:
            adapter = self._by_name.get(name)
            if adapter is None:
                raise WeightsRefusedError(
                    f"name: there is no adapter {name!r}; the adapters are {', '.join(self._by_name) or 'none'}"
                )
            request = self._slots.requests.pop(name)  # no further request finds it
            if count := await self._engine.count_requests(adapter.number):
                self._slots.requests[name] = request
                raise WeightsRefusedError(f"{count} requests sample from {name!r}; unload it when they have ended")
            await self._engine.remove_adapter(adapter.number)
            del self._by_name[name]
            self._slots.forget(name)
            return adapter.describe()

    async def _add_staged(self, adapter: NamedAdapter) -> NamedAdapter:
        async with self._slots.base.base_weights_loaded():
            await self._engine.load(adapter.policy, adapter.number)
            await self._engine.commit(adapter.policy, adapter.number)
            try:
                difference, failure = await self._slots.base.check_canary(adapter.policy, adapter.number)
                if failure is not None:
                    raise WrongWeightsError(failure)
            except BaseException:
                await self._engine.remove_adapter(adapter.number)
                raise
            return replace(adapter, canary_difference=difference)
