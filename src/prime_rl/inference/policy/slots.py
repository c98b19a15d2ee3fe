"""The slots of a server: each has a policy that one run may switch while the other slots sample.

    base slot   number 1    all weights, or an adapter; the name of the base model, or none
    of a run    number N    an adapter; its name is the `model` of requests, and the run's first call makes it

Every slot is a `PolicyManager` with its own version, lease, salt, canary and pins. They share the engine, its pause and
the numbers of adapters, the latter with `NamedAdapters`.
"""

import asyncio
import itertools
import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Protocol

from prime_rl.inference.policy.engine_group import lora_request
from prime_rl.inference.policy.policy_manager import LeaseHeldError, PolicyManager, VersionPins, shielded
from prime_rl.inference.policy.weight_checks import POLICY_ADAPTER, CheckedVersion, WeightsRefusedError

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

_NAME = re.compile(r"[\w.@:/+-]+")


class SampledPolicy(Protocol):
    """What a request samples from: a slot, or a named adapter."""

    @property
    def policy(self) -> CheckedVersion:
        """The loaded version."""

    @property
    def pins(self) -> VersionPins:
        """The pins that delay its switch."""


class Slots:
    """Finds, makes and frees the slots.

    Args:
        make: makes the policy manager of an adapter's number and the name of a slot.
        reserved: names of the base model, which stand for the base slot.
        capacity: number of adapters besides that of the base slot; 0 if the server takes none.
        requests: vLLM's `lora_requests`, by name, where it looks up the `model` of a request.
        is_relayed: the slots share the copies of versions, so one run at a time may use the server.
    """

    def __init__(
        self,
        make: Callable[[int, str], PolicyManager],
        reserved: Collection[str],
        capacity: int = 0,
        requests: "dict[str, LoRARequest] | None" = None,
        is_relayed: bool = False,
    ) -> None:
        self.capacity, self._is_relayed = capacity, is_relayed
        self.requests = {} if requests is None else requests
        self._make = make
        self._numbers = itertools.count(POLICY_ADAPTER + 1)  # never reused
        self.base = make(POLICY_ADAPTER, "")
        self._slots: dict[str | None, PolicyManager] = dict.fromkeys([None, *reserved], self.base)
        self._adapters: dict[str, SampledPolicy | None] = {}  # of runs, and named ones; None: it is being loaded
        self._lock = asyncio.Lock()
        self.base.dependent_adapters, self.base.free_expired = self._adapters.keys(), self._free_expired_slots

    def describe(self, name: str | None, run_id: str | None = None) -> dict[str, Any]:
        """Describe a slot and renew the lease of `run_id`; the base slot's answer lists the others.

        A slot that does not exist is described as it would be made.
        """
        if (slot := self._slots.get(name)) is None:
            return {"run_id": None, **self.base.base_policy.describe(), "canary_difference": None}
        if slot is not self.base:
            return slot.describe(run_id)
        others = [{"name": other, **one.describe()} for other, one in self._slots.items() if one is not self.base]
        return {**slot.describe(run_id), "slots": others, "max_slots": self.capacity}

    def find(self, request: "LoRARequest | None") -> SampledPolicy:
        """Return what a request samples from; raises vLLM's error of status 404 if it was removed meanwhile."""
        from vllm.exceptions import VLLMNotFoundError

        if request is None:
            return self.base
        served, adapter = self.requests.get(request.lora_name), self._adapters.get(request.lora_name)
        if adapter is None or served is None or served.lora_int_id != request.lora_int_id:
            raise VLLMNotFoundError(f"adapter {request.lora_name!r} was unloaded")
        return adapter

    @shielded
    async def open(self, name: str | None, run_id: str | None) -> PolicyManager:
        """Return a slot that `run_id` has leased. It is made at version (0, 0) if it does not exist.

        Raises:
            LeaseHeldError: another run holds the slot, or all adapters or the relayed server are in use.
            WeightsRefusedError: the name is invalid, the server takes no adapters, or full weights are loaded.
        """
        slot = self._slots.get(name)
        if slot is None:
            self._check_name(name or "")
            # The base slot waits for `_lock` in a switch, so the order is the same here.
            async with self.base.base_weights_loaded(), self._lock:
                slot = self._slots.get(name) or await self._add(name or "")
        if self._is_relayed:
            self._take_copies(slot)
        slot.lease.take(run_id)
        return slot

    @shielded
    async def release(self, name: str | None, run_id: str) -> dict[str, Any]:
        """Release the lease of `run_id`, and free a run's slot; raises LeaseHeldError if another run holds it."""
        if (slot := self._slots.get(name)) is not None:
            slot.lease.release(run_id)
            if slot is not self.base:
                async with self._lock:
                    if self._slots.get(name) is slot and slot.lease.holder is None:
                        await self._free(name or "")
        return self.describe(name)

    async def pin(self, name: str | None) -> dict[str, Any]:
        """Delay the switches of a slot by a new pin; returns its name and the slot's description."""
        if (slot := self._slots.get(name)) is None:
            raise WeightsRefusedError(f"name: there is no slot {name!r}")
        return {"pin": await slot.pins.acquire(), **self.describe(name)}

    def unpin(self, pin: str) -> None:
        """Release a pin of any slot."""
        for slot in self._slots.values():
            slot.pins.release(pin)

    async def reserve(self, name: str) -> int:
        """Return the number of a new named adapter, which `serve` uses or `forget` gives up; raises as `open`."""
        self._check_name(name)
        async with self._lock:
            return await self._reserve(name)

    def serve(self, name: str, number: int, adapter: SampledPolicy) -> None:
        """Let requests find a loaded adapter."""
        self._adapters[name] = adapter
        self.requests[name] = lora_request(number, name)

    def forget(self, name: str) -> None:
        """Give up the number of an adapter that is not loaded."""
        del self._adapters[name]

    async def _add(self, name: str) -> PolicyManager:
        number = await self._reserve(name)
        try:
            slot = self._make(number, name)
            slot.base_canary, slot.dependent_adapters = self.base.base_canary, self._adapters.keys()
            await slot.start()
        except BaseException:
            self.forget(name)
            raise
        self.serve(name, number, slot)
        self._slots[name] = slot
        return slot

    def _take_copies(self, slot: PolicyManager) -> None:
        """Refuse a second run: versions of both would be copied to the same directory, `step_N`."""
        for name, other in self._slots.items():
            if other is slot:
                continue
            if not other.is_expired:
                raise LeaseHeldError(
                    f"slot {name or 'of the base model'} of this server is in use by run {other.lease.holder}, and a "
                    "server with relay.urls serves one run at a time; end that run, or use another server",
                    other.lease.free_in_seconds,
                )
            other.forget_copy()

    def _check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise WeightsRefusedError(f"name: {name!r} is invalid; use letters, digits and _ . - @ : / +")
        if not self.capacity:
            raise WeightsRefusedError(f"name: {name!r} is of an adapter; the server needs enable_lora = true")

    async def _reserve(self, name: str) -> int:
        if name in self._slots or name in self._adapters:
            raise WeightsRefusedError(f"name: {name!r} is the name of the policy or of an adapter; choose another one")
        if len(self._adapters) >= self.capacity:
            await self._free_expired()
        if len(self._adapters) >= self.capacity:
            leases = {one: slot.lease for one, slot in self._slots.items() if slot is not self.base}
            used = (f"{one} of run {leases[one].holder}" if one in leases else one for one in self._adapters)
            raise LeaseHeldError(
                f"all {self.capacity} adapters of this server are in use ({', '.join(used)}); end a run, unload an "
                f"adapter, or set max_loras above {self.capacity}",
                min((lease.free_in_seconds for lease in leases.values()), default=None),
            )
        self._adapters[name] = None
        return next(self._numbers)

    async def _free_expired_slots(self) -> None:
        async with self._lock:
            await self._free_expired()

    async def _free_expired(self) -> None:
        def first() -> str | None:
            slots = self._slots.items()
            return next((name for name, slot in slots if slot is not self.base and slot.is_expired), None)

        while name := first():  # a run may return during the previous `_free`
            await self._free(name)

    async def _free(self, name: str) -> None:
        slot = self._slots.pop(name)
        self.requests.pop(name)  # no further request finds it
        await slot.close()
        self.forget(name)
