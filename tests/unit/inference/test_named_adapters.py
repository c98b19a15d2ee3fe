"""Adapters under names, over an engine that writes down what it is told."""

import asyncio
from pathlib import Path

import pytest

from prime_rl.inference.lease import Lease
from prime_rl.inference.named_adapters import Named, NamedAdapters
from prime_rl.inference.policy import PolicyServer, PolicyWrongError
from prime_rl.inference.weights import Policy, WeightsRefusedError
from prime_rl.types import PolicyVersion
from tests.support.adapters import publish_adapter
from tests.unit.inference.test_adapters import BASE, VERSION, AdaptedEngine, make
from tests.unit.inference.test_policy import CANARY


class NamingEngine(AdaptedEngine):
    """Takes adapters; `requests` sample from each."""

    requests = 0
    refuses = False

    async def add_adapter(self, number: int, policy: Policy) -> None:
        self.calls.append(f"add {number} {policy.version}")
        if self.refuses:
            raise WeightsRefusedError("another hash")

    async def remove_adapter(self, number: int) -> None:
        self.calls.append(f"remove {number}")

    async def requests_of(self, number: int) -> int:
        self.calls.append(f"count {number}")
        return self.requests

    async def prompt_logprobs(self, token_ids: tuple[int, ...], number: int = 0) -> list[list[float]]:
        self.calls.append(f"canary {number}")
        return self.logprobs


class Case:
    def __init__(self) -> None:
        self.engine = NamingEngine()
        self.names: list[str] = []
        base = Policy(PolicyVersion(0, 0), "base", Path("/base"))
        self.policies = PolicyServer(self.engine, base, BASE, False, Lease(30), lambda _: None, None, 2)
        self.adapters = NamedAdapters(
            self.policies, self.engine, self, BASE, max_rank=2, capacity=2, reserved=["policy/model"]
        )

    def give(self, named: Named) -> None:
        self.names.append(named.name)
        self.engine.calls.append(f"give {named.name}")

    def take(self, named: Named) -> None:
        self.names.remove(named.name)
        self.engine.calls.append(f"take {named.name}")


@pytest.fixture
async def case() -> Case:
    return Case()


def _with_canary(tmp_path: Path, logprobs: list[float]) -> Path:
    """Publish an adapter with a canary."""
    make(tmp_path)
    canary = {"canary": {**CANARY, "logprobs": logprobs}}
    return publish_adapter(tmp_path / "with_canary", tmp_path / "adapter", 7, overrides=canary)


async def test_a_name_is_given_last_and_taken_first(case: Case, tmp_path: Path) -> None:
    directory = _with_canary(tmp_path, CANARY["logprobs"])
    answer = await case.adapters.load("eval", VERSION, directory)
    assert (answer["name"], answer["step"], answer["canary_difference"]) == ("eval", 7, 0)
    assert await case.adapters.load("eval", VERSION, directory) == answer, "asking again changes nothing"
    assert (case.adapters.describe(), case.policies.guests) == ([answer], ("eval",))
    await case.adapters.unload("eval")
    assert case.engine.calls == ["add 2 0.7", "canary 2", "give eval", "take eval", "count 2", "remove 2"]
    assert (case.adapters.describe(), case.policies.guests) == ([], ())
    await case.adapters.load("eval", VERSION, directory)
    assert case.engine.calls[6] == "add 3 0.7", "a number is never used for another"


async def test_what_does_not_say_what_the_trainer_says_is_not_served(case: Case, tmp_path: Path) -> None:
    with pytest.raises(PolicyWrongError, match="is not the trainer's"):
        await case.adapters.load("eval", VERSION, _with_canary(tmp_path, [-1.0, -2.5]))
    assert case.engine.calls == ["add 2 0.7", "canary 2", "remove 2"]
    case.engine.refuses = True
    with pytest.raises(WeightsRefusedError, match="another hash"):
        await case.adapters.load("eval", VERSION, make(tmp_path / "other"))
    assert case.names == []


async def test_what_is_sampled_from_is_not_unloaded(case: Case, tmp_path: Path) -> None:
    await case.adapters.load("eval", VERSION, make(tmp_path))
    case.engine.requests = 3
    with pytest.raises(WeightsRefusedError, match="3 requests sample from 'eval'"):
        await case.adapters.unload("eval")
    assert case.names == ["eval"]
    assert "remove 2" not in case.engine.calls


async def test_names_that_cannot_be_given(case: Case, tmp_path: Path) -> None:
    directory, other = make(tmp_path / "one"), make(tmp_path / "two", alpha=5)
    await case.adapters.load("one", VERSION, directory)
    for name, path, reason in [
        ("policy/model", directory, "stands for the policy"),
        ("two words", directory, "is no name"),
        ("", directory, "is no name"),
        ("one", other, r"'one' is version 0\.7 of .*; POST /unload_adapter first"),
    ]:
        with pytest.raises(WeightsRefusedError, match=reason):
            await case.adapters.load(name, VERSION, path)
    await case.adapters.load("two", VERSION, other)
    with pytest.raises(WeightsRefusedError, match=r"2 adapters .* \(one, two\); unload one, or set max_loras above 3"):
        await case.adapters.load("three", VERSION, directory)
    with pytest.raises(WeightsRefusedError, match="no adapter is called 'three'; there are one, two"):
        await case.adapters.unload("three")


async def test_a_caller_that_hangs_up_leaves_nothing_half_loaded(case: Case, tmp_path: Path) -> None:
    gate = asyncio.Event()
    add = case.engine.add_adapter

    async def slowly(number: int, policy: Policy) -> None:
        await gate.wait()
        await add(number, policy)

    case.engine.add_adapter = slowly  # type: ignore[method-assign]
    call = asyncio.create_task(case.adapters.load("eval", VERSION, make(tmp_path)))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    gate.set()
    with pytest.raises(WeightsRefusedError, match="no adapter is called 'other'"):
        await case.adapters.unload("other")  # waits its turn
    assert case.names == ["eval"]
