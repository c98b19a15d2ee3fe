"""The order of a switch, with an engine that writes down what it is told."""

import asyncio
from pathlib import Path

import pytest

from prime_rl.inference.lease import Lease, LeaseHeldError
from prime_rl.inference.policy import PauseMode, PolicyServer
from prime_rl.inference.weights import Policy, WeightsRefusedError
from prime_rl.types import PolicyVersion
from tests.unit.inference.test_weights import BASE, VERSION, _publish


class Engine:
    """Writes down its calls; `load` waits for `gate` and fails if told to."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.broken = False

    async def pause(self, mode: PauseMode) -> None:
        self.calls.append(f"pause {mode}")

    async def load(self, policy: Policy) -> None:
        await self.gate.wait()
        if self.broken:
            raise OSError("disk gone")
        self.calls.append(f"load {policy.version}")

    async def commit(self, policy: Policy) -> None:
        self.calls.append(f"commit {policy.version}")

    async def resume(self) -> None:
        self.calls.append("resume")


class Case:
    def __init__(self) -> None:
        self.engine = Engine()
        self.failures: list[str] = []
        base = Policy(PolicyVersion(0, 0), "base", Path("/base"))
        self.server = PolicyServer(self.engine, base, BASE, False, Lease(30), self.failures.append)


@pytest.fixture
async def case() -> Case:
    return Case()


async def test_switches_inside_the_pause(case: Case, tmp_path: Path) -> None:
    await case.server.start()
    answer = await case.server.update(VERSION, _publish(tmp_path), "run")
    assert case.engine.calls == ["commit 0.0", "pause keep", "load 0.7", "commit 0.7", "resume"]
    assert {key: answer[key] for key in ("branch", "step", "hash")} == {
        "branch": 0, "step": 7, "hash": case.server.policy.hash,
    }  # fmt: skip
    assert answer["pause_s"] >= answer["load_s"] >= 0
    assert case.server.describe()["run_id"] == "run"


async def test_a_refusal_does_not_touch_the_engine(case: Case, tmp_path: Path) -> None:
    directory = _publish(tmp_path)
    with pytest.raises(WeightsRefusedError):
        await case.server.update(PolicyVersion(0, 6), directory, "run")
    with pytest.raises(LeaseHeldError):
        await case.server.update(VERSION, directory, "other")
    with pytest.raises(LeaseHeldError):
        await case.server.reload(None)
    assert case.engine.calls == []
    assert case.server.describe()["step"] == 0


async def test_asking_twice_loads_once(case: Case, tmp_path: Path) -> None:
    directory = _publish(tmp_path)
    first, second = await asyncio.gather(*(case.server.update(VERSION, directory, "run") for _ in range(2)))
    assert case.engine.calls == ["pause keep", "load 0.7", "commit 0.7", "resume"]
    assert (first["hash"], second["pause_s"]) == (second["hash"], 0.0)


async def test_reload_aborts_and_loads_only_what_differs(case: Case, tmp_path: Path) -> None:
    await case.server.reload("run")
    assert case.engine.calls == ["pause abort", "commit 0.0", "resume"]
    await case.server.update(VERSION, _publish(tmp_path), "run")
    await case.server.reload("run")
    assert case.engine.calls[-4:] == ["pause abort", "load 0.0", "commit 0.0", "resume"]
    with pytest.raises(LeaseHeldError):
        case.server.release("other")
    assert case.server.release("run")["run_id"] is None


async def test_half_loaded_weights_are_never_sampled_from(case: Case, tmp_path: Path) -> None:
    case.engine.broken = True
    directory = _publish(tmp_path)
    with pytest.raises(OSError, match="disk gone"):
        await case.server.update(VERSION, directory, "run")
    assert case.engine.calls == ["pause keep"], "not resumed, not tagged"
    assert case.failures == [f"loading {directory} failed half way: the weights are undefined, so the server stops"]
    assert case.server.describe()["step"] == 0


async def test_a_caller_that_hangs_up_leaves_no_half_switch(case: Case, tmp_path: Path) -> None:
    case.engine.gate.clear()
    call = asyncio.create_task(case.server.update(VERSION, _publish(tmp_path), "run"))
    while not case.engine.calls:
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    reload = asyncio.create_task(case.server.reload("run"))
    await asyncio.sleep(0)
    case.engine.gate.set()
    await reload
    assert case.engine.calls[:4] == ["pause keep", "load 0.7", "commit 0.7", "resume"]
    assert case.engine.calls[4:] == ["pause abort", "load 0.0", "commit 0.0", "resume"]
