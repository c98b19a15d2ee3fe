"""Adapters that are served in addition to the policy, each under a name that requests give as their `model`."""

import asyncio
import itertools
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.core.types import PolicyVersion
from prime_rl.inference.policy.adapter_checks import POLICY_ADAPTER
from prime_rl.inference.policy.policy_manager import PolicyManager, WrongWeightsError, shielded
from prime_rl.inference.policy.weight_checks import PublishedPolicy, WeightsRefusedError

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

    from prime_rl.inference.vllm.engine_group import VllmEngine

_NAME = re.compile(r"[\w.@:/+-]+")


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """A served adapter; its `number` is never reused."""

    name: str
    number: int
    policy: PublishedPolicy
    canary_difference: float | None = None

    def describe(self) -> dict[str, Any]:
        """Its entry in the response of GET /policy."""
        fields = {"weight_dir": str(self.policy.path), "canary_difference": self.canary_difference}
        return {"name": self.name, **self.policy.describe(), **fields}


class NamedAdapters:
    """Loads and unloads adapters, one at a time.

    A name stands for one version from loading to unloading (I5): requests can use it after the tensors were verified,
    loaded on every worker and compared by the canary, and no adapter is removed while a request samples from it.

    `requests` are vLLM's `lora_requests`, by name, where it looks up the `model` of a request. At most `capacity`
    adapters are served, under names other than those `reserved` for the policy.
    """

    def __init__(
        self,
        policies: PolicyManager,
        engine: "VllmEngine",
        requests: "dict[str, LoRARequest]",
        capacity: int,
        reserved: Collection[str],
    ) -> None:
        self._policies = policies
        self._engine = engine
        self._requests = requests
        self._capacity = capacity
        self._reserved = frozenset(reserved)
        self._numbers = itertools.count(POLICY_ADAPTER + 1)
        self._by_name: dict[str, NamedAdapter] = {}
        self._by_number: dict[int, NamedAdapter] = {}  # also unloaded ones: their last responses may be in flight
        self._lock = asyncio.Lock()

    def describe(self) -> list[dict[str, Any]]:
        """Return the entries of the served adapters."""
        return [adapter.describe() for adapter in self._by_name.values()]

    def find(self, request: "LoRARequest") -> NamedAdapter:
        """Return the adapter of a request; raises ValueError if it was unloaded after the request arrived."""
        served = self._requests.get(request.lora_name)
        if served is None or served.lora_int_id != request.lora_int_id:
            raise ValueError(f"adapter {request.lora_name!r} was unloaded")
        return self._by_number[request.lora_int_id]

    def version_of(self, number: int) -> str | None:
        """Return the version of the adapter with this number; None for the policy's adapter."""
        adapter = self._by_number.get(number)
        return str(adapter.policy.version) if adapter is not None else None

    @shielded
    async def load(self, name: str, version: PolicyVersion, weight_dir: Path) -> dict[str, Any]:
        """Serve a published adapter under `name`. A repeated call succeeds without a change.

        Raises:
            WeightsRefusedError: the name is taken, all slots are used, or the adapter is damaged or of another model.
            WrongWeightsError: the canary's log-probabilities are not the trainer's; the adapter is not served.
        """
        async with self._lock:
            if name in self._reserved:
                raise WeightsRefusedError(f"name: {name!r} is the name of the policy; choose another one")
            if not _NAME.fullmatch(name):
                raise WeightsRefusedError(f"name: {name!r} is invalid; use letters, digits and _ . - @ : / +")
            policy = await asyncio.to_thread(self._policies.check_adapter, weight_dir, version)
            if (existing := self._by_name.get(name)) is not None:
                if (existing.policy.version, existing.policy.salt) == (version, policy.salt):
                    return existing.describe()
                served = f"version {existing.policy.version} of {existing.policy.path}"
                raise WeightsRefusedError(f"name: {name!r} is {served}; call POST /unload_adapter first")
            if len(self._by_name) >= self._capacity:
                raise WeightsRefusedError(
                    f"{len(self._by_name)} adapters are served in addition to the policy's "
                    f"({', '.join(self._by_name) or 'none'}); unload one, or set max_loras above {self._capacity + 1}"
                )
            number = next(self._numbers)
            await self._engine.stage_adapter(number, policy)  # outside the policy's lock: the disk may be slow
            try:
                adapter = await self._add_staged(NamedAdapter(name, number, policy))
            finally:
                await self._engine.drop_adapter(number)
            self._by_name[name] = self._by_number[number] = adapter
            self._policies.named_adapters = tuple(self._by_name)
            self._requests[name] = lora_request(number, name)
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
            request = self._requests.pop(name)  # no further request finds it
            if count := await self._engine.count_requests(adapter.number):
                self._requests[name] = request
                raise WeightsRefusedError(f"{count} requests sample from {name!r}; unload it when they have ended")
            await self._engine.remove_adapter(adapter.number)
            del self._by_name[name]
            self._policies.named_adapters = tuple(self._by_name)
            return adapter.describe()

    async def _add_staged(self, adapter: NamedAdapter) -> NamedAdapter:
        async with self._policies.base_weights_loaded():
            await self._engine.add_adapter(adapter.number, adapter.policy)
            try:
                difference, failure = await self._policies.check_canary(adapter.policy, adapter.number)
                if failure is not None:
                    raise WrongWeightsError(failure)
            except BaseException:
                await self._engine.remove_adapter(adapter.number)
                raise
            return replace(adapter, canary_difference=difference)


def lora_request(number: int, name: str | None = None) -> "LoRARequest":
    """Make vLLM's reference to an adapter. It has no path: `lora_slots` supplies the verified tensors."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name or f"adapter {number}", number, "in memory")
