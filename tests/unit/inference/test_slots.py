"""The container of slots, with an engine that records its calls and a clock that the test sets."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from prime_rl.core.types import PolicyVersion
from prime_rl.inference.policy.engine_group import EnginePause
from prime_rl.inference.policy.policy_manager import Lease, LeaseHeldError, PolicyManager
from prime_rl.inference.policy.slots import Slots
from prime_rl.inference.policy.weight_checks import WeightsRefusedError
from tests.support.tiny_model import publish_weights
from tests.support.vllm_modules import needs_vllm
from tests.unit.inference.test_adapter_checks import BASE, VERSION, _model, make
from tests.unit.inference.test_policy_manager import Engine, called

pytestmark = needs_vllm


class Case:
    def __init__(self, capacity: int = 2, is_relayed: bool = False) -> None:
        self.engine, self.now = Engine(), 0.0
        self.failures: list[str] = []
        self.pause = EnginePause(self.engine, self.failures.append)
        self.copied: list[str] = []
        self.slots = Slots(self._make, ["model"], capacity, is_relayed=is_relayed)

    def _make(self, number: int, name: str) -> PolicyManager:
        lease = Lease(30, lambda: self.now, f"slot {name}")
        return PolicyManager(
            self.engine, self.pause, _model(), lease, number, max_rank=2, pin_timeout_seconds=60, copy=self._copy
        )

    async def _copy(self, published: Path, version: PolicyVersion, overtaken: Any) -> Path:
        self.copied.append(str(version))
        return published

    def names(self) -> dict[str, Any]:
        return {slot["name"]: slot["run_id"] for slot in self.slots.describe(None)["slots"]}


@pytest.fixture
async def case() -> Case:
    return Case()


async def test_first_call_makes_a_slot_at_the_base_model(case: Case) -> None:
    described = case.slots.describe("alpha", "a")
    assert (described["run_id"], described["step"], described["hash"]) == (None, 0, "base")
    first, second = await asyncio.gather(case.slots.open("alpha", "a"), case.slots.open("alpha", "a"))
    assert first is second
    assert case.engine.calls == ["empty of 2", "commit 0.0 of 2"]
    assert case.slots.describe("alpha", "a")["run_id"] == "a"
    assert case.names() == {"alpha": "a"} and case.slots.describe("model")["max_slots"] == 2
    assert await case.slots.open("model", "b") is await case.slots.open(None, "b") is case.slots.base
    assert case.slots.find(case.slots.requests["alpha"]) is first


async def test_switches_of_two_slots_share_the_pause_but_not_the_staging(case: Case, tmp_path: Path) -> None:
    one, other = await case.slots.open("alpha", "a"), await case.slots.open("beta", "b")
    case.engine.calls.clear()
    case.engine.staging_gate.clear()
    slow = asyncio.create_task(one.update(VERSION, make(tmp_path / "a"), "a"))
    await called(case.engine, "stage 0.7 of 2")
    async with asyncio.timeout(30):
        assert (await other.reload("b"))["step"] == 0
    assert case.engine.calls[1:] == ["pause", "end requests of 3", "commit 0.0 of 3", "resume"]
    case.engine.staging_gate.set()
    case.engine.gate.clear()
    fast = asyncio.create_task(other.update(PolicyVersion(0, 9), make(tmp_path / "b", step=9), "b"))
    await called(case.engine, "stage 0.9 of 3")
    for _ in range(10):
        await asyncio.sleep(0)
    assert case.engine.calls.count("pause") == 2, "one more switch is in the pause"
    case.engine.gate.set()
    await asyncio.gather(slow, fast)
    assert case.engine.calls.count("pause") == case.engine.calls.count("resume") == 3
    assert [case.slots.describe(name)["step"] for name in (None, "alpha", "beta")] == [0, 7, 9]


async def test_pin_of_one_slot_does_not_delay_another(case: Case, tmp_path: Path) -> None:
    one, other = await case.slots.open("alpha", "a"), await case.slots.open("beta", "b")
    pin = (await case.slots.pin("alpha"))["pin"]
    delayed = asyncio.create_task(one.update(VERSION, make(tmp_path / "a"), "a"))
    async with asyncio.timeout(30):
        await other.update(VERSION, make(tmp_path / "b"), "b")
        await case.slots.base.update(VERSION, make(tmp_path / "c"), "c")
    assert not delayed.done()
    case.slots.unpin(pin)
    assert (await delayed)["step"] == 7
    with pytest.raises(WeightsRefusedError, match="there is no slot 'gamma'"):
        await case.slots.pin("gamma")


async def test_full_server_names_the_slots_and_their_runs(case: Case) -> None:
    await case.slots.open("alpha", "a")
    await case.slots.reserve("named")
    case.now = 10
    with pytest.raises(
        LeaseHeldError, match=r"all 2 adapters .* \(alpha of run a, named\); .* max_loras above 2"
    ) as full:
        await case.slots.open("gamma", "c")
    assert full.value.free_in_seconds == 20
    with pytest.raises(LeaseHeldError, match="run a has held slot alpha"):
        await case.slots.open("alpha", "c")
    with pytest.raises(LeaseHeldError, match="run a has held slot alpha"):
        await case.slots.release("alpha", "c")
    case.slots.forget("named")
    await case.slots.open("gamma", "c")


async def test_expired_lease_frees_the_slot_for_another_run(case: Case, tmp_path: Path) -> None:
    one, kept = await case.slots.open("alpha", "a"), await case.slots.open("beta", "b")
    case.now = 29
    case.slots.describe("beta", "b")
    case.now = 31
    assert case.names() == {"alpha": None, "beta": "b"}, "until another run needs it"
    case.engine.calls.clear()
    await case.slots.open("gamma", "c")
    assert case.engine.calls[:2] == ["end requests of 2", "remove of 2"]
    assert case.names() == {"beta": "b", "gamma": "c"}
    assert not kept.is_expired
    with pytest.raises(WeightsRefusedError, match="was released meanwhile"):
        await one.update(VERSION, make(tmp_path), "a")
    assert case.slots.describe("alpha", "a")["step"] == 0
    case.now = 100
    base = await case.slots.open(None, "base run")
    await base.reload("base run")
    await base.update(VERSION, make(tmp_path / "adapter"), "base run")
    assert case.names() == {"beta": None, "gamma": None}, "an adapter in the base slot leaves them"
    await base.update(PolicyVersion(0, 8), _publish_full(tmp_path / "full"), "base run")
    assert case.names() == {}, "full weights replace the base model"
    assert not case.slots.base.dependent_adapters


def _publish_full(directory: Path) -> Path:
    model = directory / "model"
    model.mkdir(parents=True)
    save_file({name: np.ones(shape, np.float32) for name, shape in BASE.items()}, model / "model.safetensors")
    return publish_weights(directory, model, 8)


async def test_relayed_server_serves_one_run_at_a_time(tmp_path: Path) -> None:
    """Copies of versions are named by their steps, so those of two runs would replace each other."""
    case = Case(is_relayed=True)
    one, directory = await case.slots.open("alpha", "a"), make(tmp_path)
    await one.update(VERSION, directory, "a")
    for name in ("beta", "model"):
        with pytest.raises(LeaseHeldError, match=r"slot alpha .* in use by run a, .* relay.urls .* one run at a time"):
            await case.slots.open(name, "b")
    await case.slots.open("alpha", "a")
    case.now = 31
    await (await case.slots.open("beta", "b")).update(VERSION, directory, "b")
    with pytest.raises(LeaseHeldError, match="slot beta"):
        await case.slots.open("alpha", "a")
    await case.slots.release("beta", "b")
    await (await case.slots.open("alpha", "a")).update(VERSION, directory, "a")
    assert case.copied == ["0.7"] * 3, "the copy is made again after another run's"


async def test_waiting_for_the_base_slot_does_not_block_other_slots(case: Case, tmp_path: Path) -> None:
    await case.slots.open("alpha", "a")
    case.engine.staging_gate.clear()
    staging = asyncio.create_task(case.slots.base.stage(VERSION, make(tmp_path), "c"))
    await called(case.engine, "stage 0.7")
    opening = asyncio.create_task(case.slots.open("beta", "b"))
    async with asyncio.timeout(30):
        await case.slots.release("alpha", "a")
    assert not opening.done()
    case.engine.staging_gate.set()
    await asyncio.gather(staging, opening)
    assert case.names() == {"beta": "b"}


async def test_release_ends_a_staging_and_frees_the_number(case: Case, tmp_path: Path) -> None:
    one = await case.slots.open("alpha", "a")
    case.engine.staging_gate.clear()
    staging = asyncio.create_task(one.stage(VERSION, make(tmp_path), "a"))
    await called(case.engine, "stage 0.7 of 2")
    async with asyncio.timeout(30):
        assert (await case.slots.release("alpha", "a"))["run_id"] is None
    with pytest.raises(WeightsRefusedError, match="superseded by the base model"):
        await staging
    assert case.engine.calls[-2:] == ["end requests of 2", "remove of 2"]
    assert not case.slots.requests and case.names() == {}
    await case.slots.release("alpha", "a")
    await case.slots.release(None, "a")
    case.engine.staging_gate.set()
    await case.slots.open("alpha", "a")
    assert case.engine.calls[-1] == "commit 0.0 of 3", "a number is never reused"


async def test_slots_and_full_weights_exclude_each_other(case: Case, tmp_path: Path) -> None:
    case.slots.base._weights = replace(case.slots.base.base_policy, hash="other")
    with pytest.raises(WeightsRefusedError, match="an adapter needs the base model's weights"):
        await case.slots.open("alpha", "a")
    assert not case.slots.base.dependent_adapters
    case.slots.base._weights = case.slots.base.base_policy
    slot = await case.slots.open("alpha", "a")
    assert [*slot.dependent_adapters] == [*case.slots.base.dependent_adapters] == ["alpha"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("a b", "is invalid"), ("", "is invalid"), ("named", "is the name of the policy or of an adapter")],
)
async def test_slot_with_an_invalid_name_is_refused(case: Case, name: str, reason: str) -> None:
    await case.slots.reserve("named")
    with pytest.raises(WeightsRefusedError, match=reason):
        await case.slots.open(name, "a")
    with pytest.raises(WeightsRefusedError, match=r"is invalid|the server needs enable_lora = true"):
        await Case(capacity=0).slots.open(name, "a")
