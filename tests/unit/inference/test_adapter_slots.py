"""vLLM gets a missing adapter from verified memory, or an error, and never from a file."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.vllm_modules import LazyModule, needs_vllm

pytestmark = needs_vllm

slots = LazyModule("prime_rl.inference.worker.worker_weight_update")


class Manager:
    """The part of vLLM's adapter manager that its loader uses."""

    capacity = 2

    def __init__(self) -> None:
        self.adapters: dict[int, Any] = {}
        self.active: list[int] = []

    def __len__(self) -> int:
        return len(self.adapters)

    def list_adapters(self) -> dict[int, Any]:
        return self.adapters

    def get_adapter(self, number: int) -> Any:
        return self.adapters.get(number)

    def add_adapter(self, lora: Any) -> bool:
        self.adapters[lora.id] = lora
        return True

    def activate_adapter(self, number: int) -> None:
        self.active.append(number)

    def remove_adapter(self, number: int) -> bool:
        return self.adapters.pop(number, None) is not None

    def create_dummy_lora(self, number: int, rank: int, modules: Any) -> Any:
        return SimpleNamespace(id=number, rank=rank)


def _loader() -> Any:
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    loader = object.__new__(LRUCacheWorkerLoRAManager)
    loader._adapter_manager = Manager()
    loader.embedding_modules = {}
    return loader


def test_slot_contains_the_newest_adapter():
    loader = _loader()
    one = slots.AdapterSlots(SimpleNamespace(lora_manager=loader))
    one.empty(1)
    assert loader._adapter_manager.adapters[1].rank == 1, "adds nothing"
    first, second = SimpleNamespace(id=1), SimpleNamespace(id=1)
    for lora in (first, second):
        one.load(lora)
        assert loader._adapter_manager.adapters == {1: lora}
    one.empty(1)
    assert loader._adapter_manager.adapters[1] not in (first, second)


def test_adapter_missing_in_vllm_is_loaded_from_memory():
    from vllm.lora.request import LoRARequest

    loader = _loader()
    one = slots.AdapterSlots(SimpleNamespace(lora_manager=loader))
    named = SimpleNamespace(id=5)
    one.load(named)
    one.empty(1)
    loader._adapter_manager.adapters.clear()
    loader.add_adapter(LoRARequest("five", 5, "/no/such/path"))
    assert loader._adapter_manager.adapters == {5: named}
    one.remove(5)
    with pytest.raises(KeyError):
        loader.add_adapter(LoRARequest("five", 5, "/no/such/path"))
