"""Named adapters, with an engine that records its calls."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from prime_rl.inference.policy.named_adapters import NamedAdapters
from prime_rl.inference.policy.policy_manager import PolicyManager, WrongWeightsError
from prime_rl.inference.policy.run_lease import Lease
from prime_rl.inference.policy.weight_checks import PublishedPolicy, WeightsRefusedError
from tests.support.adapters import publish_adapter
from tests.support.vllm_modules import needs_vllm
from tests.unit.inference.test_adapter_checks import VERSION, AdaptedEngine, _model, make
from tests.unit.inference.test_policy_manager import CANARY

pytestmark = needs_vllm


class NamingEngine(AdaptedEngine):
    """Accepts adapters; `requests` sample from each."""

    requests = 0
    refuses = False

    async def stage_adapter(self, number: int, policy: PublishedPolicy) -> None:
        self.calls.append(f"stage {number} {policy.version}")
        await self.staging_gate.wait()
        if self.refuses:
            raise WeightsRefusedError("another hash")

    async def drop_adapter(self, number: int) -> None:
        self.calls.append(f"drop {number}")

    async def add_adapter(self, number: int, policy: PublishedPolicy) -> None:
        self.calls.append(f"add {number}")

    async def remove_adapter(self, number: int) -> None:
        self.calls.append(f"remove {number}")

    async def count_requests(self, number: int) -> int:
        self.calls.append(f"count {number}")
        return self.requests

    async def prompt_logprobs(self, token_ids: tuple[int, ...], number: int = 0) -> list[list[float]]:
        self.calls.append(f"canary {number}")
        return self.logprobs


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
        self.policies = PolicyManager(self.engine, _model(), Lease(30), lambda _: None, None, 2)
        self.adapters = NamedAdapters(self.policies, self.engine, self.requests, capacity=2, reserved=["policy/model"])


@pytest.fixture
async def case() -> Case:
    return Case()


def _with_canary(tmp_path: Path, logprobs: list[float]) -> Path:
    """Publish an adapter with a canary."""
    make(tmp_path)
    canary = {"canary": {**CANARY, "logprobs": logprobs}}
    return publish_adapter(tmp_path / "with_canary", tmp_path / "adapter", 7, overrides=canary)


async def test_load_adds_the_name_last_and_unload_removes_it_first(case: Case, tmp_path: Path) -> None:
    directory = _with_canary(tmp_path, CANARY["logprobs"])
    answer = await case.adapters.load("eval", VERSION, directory)
    assert (answer["name"], answer["step"], answer["canary_difference"]) == ("eval", 7, 0)
    assert await case.adapters.load("eval", VERSION, directory) == answer, "a repeated call changes nothing"
    assert (case.adapters.describe(), case.policies.named_adapters) == ([answer], ("eval",))
    await case.adapters.unload("eval")
    assert case.engine.calls == [
        "stage 2 0.7", "add 2", "canary 2", "drop 2", "add eval", "remove eval", "count 2", "remove 2",
    ]  # fmt: skip
    assert (case.adapters.describe(), case.policies.named_adapters) == ([], ())
    await case.adapters.load("eval", VERSION, directory)
    assert case.engine.calls[8] == "stage 3 0.7", "a number is never reused"


async def test_load_with_a_different_canary_raises(case: Case, tmp_path: Path) -> None:
    with pytest.raises(WrongWeightsError, match="is not the trainer's"):
        await case.adapters.load("eval", VERSION, _with_canary(tmp_path, [-1.0, -2.5]))
    assert case.engine.calls == ["stage 2 0.7", "add 2", "canary 2", "remove 2", "drop 2"]
    case.engine.refuses = True
    with pytest.raises(WeightsRefusedError, match="another hash"):
        await case.adapters.load("eval", VERSION, make(tmp_path / "other"))
    assert not case.requests


async def test_load_from_a_slow_disk_does_not_block_the_policy(case: Case, tmp_path: Path) -> None:
    case.engine.staging_gate.clear()
    loading = asyncio.create_task(case.adapters.load("eval", VERSION, make(tmp_path / "adapter")))
    while "stage 2 0.7" not in case.engine.calls:
        await asyncio.sleep(0)
    async with asyncio.timeout(30):
        assert (await case.policies.reload("run"))["step"] == 0
    case.engine.staging_gate.set()
    assert (await loading)["name"] == "eval"


async def test_unload_of_an_adapter_in_use_raises(case: Case, tmp_path: Path) -> None:
    await case.adapters.load("eval", VERSION, make(tmp_path))
    case.engine.requests = 3
    with pytest.raises(WeightsRefusedError, match="3 requests sample from 'eval'"):
        await case.adapters.unload("eval")
    assert list(case.requests) == ["eval"]
    assert "remove 2" not in case.engine.calls


async def test_load_with_an_invalid_name_raises(case: Case, tmp_path: Path) -> None:
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
    with pytest.raises(WeightsRefusedError, match=r"2 adapters .* \(one, two\); unload one, or set max_loras above 3"):
        await case.adapters.load("three", VERSION, directory)
    with pytest.raises(WeightsRefusedError, match="there is no adapter 'three'; the adapters are one, two"):
        await case.adapters.unload("three")


async def test_cancelled_load_completes(case: Case, tmp_path: Path) -> None:
    gate = asyncio.Event()
    add = case.engine.add_adapter

    async def slowly(number: int, policy: PublishedPolicy) -> None:
        await gate.wait()
        await add(number, policy)

    case.engine.add_adapter = slowly  # type: ignore[method-assign]
    call = asyncio.create_task(case.adapters.load("eval", VERSION, make(tmp_path)))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    gate.set()
    with pytest.raises(WeightsRefusedError, match="there is no adapter 'other'"):
        await case.adapters.unload("other")  # waits for the other call
    assert list(case.requests) == ["eval"]


async def test_find_returns_served_adapters_only(case: Case, tmp_path: Path) -> None:
    directory = make(tmp_path)
    await case.adapters.load("eval", VERSION, directory)
    first = case.requests["eval"]
    assert (case.adapters.find(first).name, case.adapters.version_of(2)) == ("eval", "0.7")
    await case.adapters.unload("eval")
    with pytest.raises(ValueError, match="adapter 'eval' was unloaded"):
        case.adapters.find(first)
    await case.adapters.load("eval", VERSION, directory)
    with pytest.raises(ValueError, match="adapter 'eval' was unloaded"):
        case.adapters.find(first)
    assert case.adapters.find(case.requests["eval"]).number == 3
    assert case.adapters.version_of(2) == "0.7", "its last responses may be in flight"
    assert case.adapters.version_of(1) is None
