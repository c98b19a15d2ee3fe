"""Named adapters, with an engine that records its calls."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from prime_rl.inference.policy.engine_group import EnginePause
from prime_rl.inference.policy.named_adapters import NamedAdapters
from prime_rl.inference.policy.policy_manager import Lease, LeaseHeldError, PolicyManager, WrongWeightsError
from prime_rl.inference.policy.slots import Slots
from prime_rl.inference.policy.weight_checks import CheckedVersion, WeightsRefusedError
from tests.support.adapters import publish_adapter
from tests.support.vllm_modules import needs_vllm
from tests.unit.inference.test_adapter_checks import VERSION, _model, make
from tests.unit.inference.test_policy_manager import CANARY, Engine

pytestmark = needs_vllm


class NamingEngine(Engine):
    """`requests` sample from each adapter."""

    requests = 0

    async def drop(self, policy: CheckedVersion, number: int) -> None:
        self.calls.append(f"drop of {number}")

    async def count_requests(self, number: int) -> int:
        self.calls.append(f"count of {number}")
        return self.requests


class Requests(dict[str, Any]):
    """vLLM's list of adapters; the engine records the changes."""

    def __init__(self, engine: NamingEngine) -> None:
        self.engine = engine

    def __setitem__(self, name: str, request: Any) -> None:
        super().__setitem__(name, request)
        self.engine.calls.append(f"add {name}")

    def pop(self, name: str) -> Any:
        self.engine.calls.append(f"remove {name}")
        return super().pop(name)


class Case:
    def __init__(self) -> None:
        self.engine = NamingEngine()
        self.requests = Requests(self.engine)
        pause = EnginePause(self.engine, [].append)
        self.slots = Slots(
            lambda number, name: PolicyManager(self.engine, pause, _model(), Lease(30), number, max_rank=2),
            ["policy/model"], 2, self.requests,
        )  # fmt: skip
        self.adapters = NamedAdapters(self.slots, self.engine)


@pytest.fixture
async def case():
    return Case()


def _with_canary(tmp_path: Path, logprobs: list[float]) -> Path:
    """Publish an adapter with a canary."""
    make(tmp_path)
    canary = {"canary": {**CANARY, "logprobs": logprobs}}
    return publish_adapter(tmp_path / "with_canary", tmp_path / "adapter", 7, overrides=canary)


async def test_load_adds_the_name_last_and_unload_removes_it_first(case, tmp_path):
    directory = _with_canary(tmp_path, CANARY["logprobs"])
    answer = await case.adapters.load("eval", VERSION, directory)
    assert (answer["name"], answer["step"], answer["canary_difference"]) == ("eval", 7, 0)
    assert await case.adapters.load("eval", VERSION, directory) == answer, "a repeated call changes nothing"
    assert (case.adapters.describe(), [*case.slots.base.dependent_adapters]) == ([answer], ["eval"])
    case.engine.requests = 3
    with pytest.raises(WeightsRefusedError, match="3 requests sample from 'eval'"):
        await case.adapters.unload("eval")
    assert list(case.requests) == ["eval"]
    case.engine.requests = 0
    await case.adapters.unload("eval")
    assert case.engine.calls == [
        "stage 0.7 of 2", "load 0.7 of 2", "commit 0.7 of 2", "canary (5, 6, 7) of 2", "drop of 2", "add eval",
        "remove eval", "count of 2", "add eval", "remove eval", "count of 2", "remove of 2",
    ]  # fmt: skip
    assert (case.adapters.describe(), [*case.slots.base.dependent_adapters]) == ([], [])
    await case.adapters.load("eval", VERSION, directory)
    assert case.engine.calls[12] == "stage 0.7 of 3", "a number is never reused"


async def test_load_with_a_different_canary_raises(case, tmp_path):
    with pytest.raises(WrongWeightsError, match="is not the trainer's"):
        await case.adapters.load("eval", VERSION, _with_canary(tmp_path, [-1.0, -2.5]))
    assert case.engine.calls[-3:] == ["canary (5, 6, 7) of 2", "remove of 2", "drop of 2"]
    case.engine.altered = True
    with pytest.raises(WeightsRefusedError, match="another hash"):
        await case.adapters.load("eval", VERSION, make(tmp_path / "other"))
    assert not case.requests and not case.slots.base.dependent_adapters


async def test_load_from_a_slow_disk_does_not_block_the_policy(case, tmp_path):
    case.engine.staging_gate.clear()
    loading = asyncio.create_task(case.adapters.load("eval", VERSION, make(tmp_path / "adapter")))
    while "stage 0.7 of 2" not in case.engine.calls:
        await asyncio.sleep(0)
    async with asyncio.timeout(30):
        assert (await case.slots.base.reload("run"))["step"] == 0
    case.engine.staging_gate.set()
    assert (await loading)["name"] == "eval"


async def test_load_with_an_invalid_name_raises(case, tmp_path):
    directory, other = make(tmp_path / "one"), make(tmp_path / "two", alpha=5)
    await case.adapters.load("one", VERSION, directory)
    for name, path, reason in [
        ("policy/model", directory, "is the name of the policy"),
        ("two words", directory, "is invalid"),
        ("", directory, "is invalid"),
        ("one", other, r"'one' is version 0\.7 of .*; call POST /unload_adapter first"),
    ]:
        with pytest.raises(WeightsRefusedError, match=reason):
            await case.adapters.load(name, VERSION, path)
    await case.adapters.load("two", VERSION, other)
    with pytest.raises(LeaseHeldError, match=r"all 2 adapters .* in use \(one, two\); .*, or set max_loras above 2"):
        await case.adapters.load("three", VERSION, directory)
    with pytest.raises(WeightsRefusedError, match="there is no adapter 'three'; the adapters are one, two"):
        await case.adapters.unload("three")


async def test_find_returns_served_adapters_only(case, tmp_path):
    from vllm.exceptions import VLLMNotFoundError

    directory = make(tmp_path)
    await case.adapters.load("eval", VERSION, directory)
    first = case.requests["eval"]
    assert case.slots.find(first).policy.version == VERSION
    assert case.slots.find(None) is case.slots.base
    await case.adapters.unload("eval")
    with pytest.raises(VLLMNotFoundError, match="adapter 'eval' was unloaded"):
        case.slots.find(first)
    await case.adapters.load("eval", VERSION, directory)
    with pytest.raises(VLLMNotFoundError, match="adapter 'eval' was unloaded"):
        case.slots.find(first)
    assert case.slots.find(case.requests["eval"]).number == 3
