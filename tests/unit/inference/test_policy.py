"""The order of a switch, with an engine that writes down what it is told."""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_rl.inference.lease import Lease, LeaseHeldError
from prime_rl.inference.policy import PauseMode, PolicyServer, PolicyWrongError, Staged
from prime_rl.inference.weights import Policy, WeightsRefusedError
from prime_rl.types import PolicyVersion
from tests.support.tiny_model import publish_weights
from tests.unit.inference.test_weights import BASE, VERSION, _publish

SWITCH = ["stage 0.7", "pause keep", "load 0.7", "commit 0.7", "resume"]
CANARY = {"token_ids": [5, 6, 7], "logprobs": [-1.0, -2.0], "dtype": "float32"}


class Engine:
    """Writes down its calls; `stage` and `load` wait for their gates and fail if told to."""

    dtype = "float32"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.staging_gate = asyncio.Event()
        self.staging_gate.set()
        self.broken = False
        self.altered = False
        self.logprobs = [[-1.0, -2.0]]

    async def stage(self, policy: Policy, overtaken: Callable[[], str | None]) -> Staged:
        self.calls.append(f"stage {policy.version}")
        while not self.staging_gate.is_set():
            if reason := overtaken():
                raise WeightsRefusedError(reason)
            await asyncio.sleep(0)
        if self.altered:
            raise WeightsRefusedError("another hash")
        return Staged(2.0, 96)

    async def pause(self, mode: PauseMode) -> None:
        self.calls.append(f"pause {mode}")

    async def load(self, policy: Policy) -> None:
        await self.gate.wait()
        if self.broken:
            raise OSError("disk gone")
        self.calls.append(f"load {policy.version}")

    async def commit(self, policy: Policy) -> None:
        self.calls.append(f"commit {policy.version}")

    async def resume(self) -> float:
        self.calls.append("resume")
        return 0.25

    async def prompt_logprobs(self, token_ids: tuple[int, ...]) -> list[list[float]]:
        self.calls.append(f"canary {token_ids}")
        return self.logprobs


class Case:
    def __init__(self) -> None:
        self.engine = Engine()
        self.failures: list[str] = []
        base = Policy(PolicyVersion(0, 0), "base", Path("/base"))
        self.server = PolicyServer(self.engine, base, BASE, False, Lease(30), self.failures.append)


@pytest.fixture
async def case() -> Case:
    return Case()


def _also(tmp_path: Path, step: int, **fields: Any) -> Path:
    """Publish the weights of `_publish` as another step."""
    return publish_weights(tmp_path / str(step), tmp_path / "model", step, overrides=fields)


async def test_switches_inside_the_pause(case: Case, tmp_path: Path) -> None:
    await case.server.start()
    answer = await case.server.update(VERSION, _publish(tmp_path), "run")
    assert case.engine.calls == ["commit 0.0", *SWITCH]
    assert {key: answer[key] for key in ("branch", "step", "hash", "canary_difference")} == {
        "branch": 0, "step": 7, "hash": case.server.policy.hash, "canary_difference": None,
    }  # fmt: skip
    assert (answer["stage_s"], answer["pause_s"], answer["bytes"]) == (2.0, 0.25, 96)
    assert answer["load_s"] >= 0
    assert case.server.describe()["run_id"] == "run"


async def test_a_refusal_does_not_touch_the_engine(case: Case, tmp_path: Path) -> None:
    directory = _publish(tmp_path)
    with pytest.raises(WeightsRefusedError):
        await case.server.update(PolicyVersion(0, 6), directory, "run")
    with pytest.raises(LeaseHeldError):
        await case.server.update(VERSION, directory, "other")
    with pytest.raises(LeaseHeldError):
        await case.server.stage(VERSION, directory, "other")
    with pytest.raises(LeaseHeldError):
        await case.server.reload(None)
    assert case.engine.calls == []
    case.engine.altered = True
    with pytest.raises(WeightsRefusedError, match="another hash"):
        await case.server.update(VERSION, directory, "run")
    assert case.engine.calls == ["stage 0.7"], "sampling was not paused"
    assert case.server.describe()["step"] == 0


async def test_asking_twice_loads_once(case: Case, tmp_path: Path) -> None:
    directory = _publish(tmp_path)
    first, second = await asyncio.gather(*(case.server.update(VERSION, directory, "run") for _ in range(2)))
    assert case.engine.calls == SWITCH
    assert (first["hash"], second["pause_s"]) == (second["hash"], 0.0)


async def test_what_is_staged_is_not_read_again(case: Case, tmp_path: Path) -> None:
    directory = _publish(tmp_path)
    staged = await case.server.stage(VERSION, directory, "run")
    assert (staged["step"], staged["stage_s"], staged["bytes"]) == (7, 2.0, 96)
    assert case.engine.calls == ["stage 0.7"]
    assert case.server.describe()["step"] == 0
    answer = await case.server.update(VERSION, directory, "run")
    assert case.engine.calls == SWITCH
    assert answer["stage_s"] == 2.0


async def test_a_version_that_is_overtaken_while_it_is_staged_is_dropped(case: Case, tmp_path: Path) -> None:
    older, newer = _publish(tmp_path), _also(tmp_path, 8, hash="")
    case.engine.staging_gate.clear()
    first = asyncio.create_task(case.server.update(VERSION, older, "run"))
    while not case.engine.calls:
        await asyncio.sleep(0)
    second = asyncio.create_task(case.server.update(PolicyVersion(0, 8), newer, "run"))
    with pytest.raises(WeightsRefusedError, match=r"version 0\.7 of .* was overtaken by version 0\.8"):
        await first
    case.engine.staging_gate.set()
    with pytest.raises(WeightsRefusedError, match="its content hash is another"):
        await second
    # What overtook it was refused itself: the older one may be asked for again.
    assert (await case.server.update(VERSION, older, "run"))["step"] == 7


async def test_going_back_overtakes_every_version(case: Case, tmp_path: Path) -> None:
    case.engine.staging_gate.clear()
    update = asyncio.create_task(case.server.update(VERSION, _publish(tmp_path), "run"))
    while not case.engine.calls:
        await asyncio.sleep(0)
    assert (await case.server.reload("run"))["step"] == 0
    with pytest.raises(WeightsRefusedError, match="overtaken by the base model"):
        await update
    assert case.engine.calls == ["stage 0.7", "pause abort", "commit 0.0", "resume"]


async def test_reload_aborts_and_loads_only_what_differs(case: Case, tmp_path: Path) -> None:
    await case.server.reload("run")
    assert case.engine.calls == ["pause abort", "commit 0.0", "resume"]
    await case.server.update(VERSION, _publish(tmp_path), "run")
    await case.server.reload("run")
    assert case.engine.calls[-5:] == ["stage 0.0", "pause abort", "load 0.0", "commit 0.0", "resume"]
    with pytest.raises(LeaseHeldError):
        case.server.release("other")
    assert case.server.release("run")["run_id"] is None


async def test_half_loaded_weights_are_never_sampled_from(case: Case, tmp_path: Path) -> None:
    case.engine.broken = True
    directory = _publish(tmp_path)
    with pytest.raises(OSError, match="disk gone"):
        await case.server.update(VERSION, directory, "run")
    assert case.engine.calls == ["stage 0.7", "pause keep"], "not resumed, not tagged"
    assert case.failures == [
        f"loading {directory} failed half way (disk gone): the weights are undefined, so the server stops"
    ]
    assert case.server.describe()["step"] == 0


async def test_a_caller_that_hangs_up_leaves_no_half_switch(case: Case, tmp_path: Path) -> None:
    case.engine.gate.clear()
    call = asyncio.create_task(case.server.update(VERSION, _publish(tmp_path), "run"))
    while "pause keep" not in case.engine.calls:
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    reload = asyncio.create_task(case.server.reload("run"))
    await asyncio.sleep(0)
    case.engine.gate.set()
    await reload
    assert case.engine.calls == [*SWITCH, "stage 0.0", "pause abort", "load 0.0", "commit 0.0", "resume"]


async def test_the_canary_is_asked_after_the_switch(case: Case, tmp_path: Path) -> None:
    case.engine.logprobs = [[-1.0, -2.00005], [-1.00002, -2.0]]
    answer = await case.server.update(VERSION, _publish(tmp_path, canary=CANARY), "run")
    assert case.engine.calls == [*SWITCH, "canary (5, 6, 7)"]
    assert answer["canary_difference"] == pytest.approx(5e-5)
    assert case.server.describe()["canary_difference"] == pytest.approx(5e-5)
    await case.server.reload("run")
    assert case.server.describe()["canary_difference"] is None


@pytest.mark.parametrize(("logprob", "said"), [(-1.5, "is 0.5, more than 0.0001"), (math.nan, "is nan, more than")])
async def test_a_canary_that_differs_is_an_error_every_time(
    case: Case, tmp_path: Path, logprob: float, said: str
) -> None:
    """Also on one copy of the model alone, and for a caller that tries again."""
    case.engine.logprobs = [[-1.0, -2.0], [logprob, -2.0]]
    directory = _publish(tmp_path, canary=CANARY)
    for _ in range(2):
        with pytest.raises(PolicyWrongError) as caught:
            await case.server.update(VERSION, directory, "run")
        assert f"version 0.7 of {directory} is loaded, but is not the trainer's" in str(caught.value)
        assert said in str(caught.value)
    assert case.engine.calls == [*SWITCH, "canary (5, 6, 7)"]
    assert case.server.describe()["step"] == 7
    await case.server.reload("run")
    assert case.server.describe()["step"] == 0


async def test_the_tolerance_of_the_canary_can_be_set(case: Case, tmp_path: Path) -> None:
    case.engine.logprobs = [[-1.5, -2.0]]
    case.server._canary_tolerance = 0.6
    assert (await case.server.update(VERSION, _publish(tmp_path, canary=CANARY), "run"))["canary_difference"] == 0.5


async def test_a_pin_delays_the_switch_and_not_the_staging(case: Case, tmp_path: Path) -> None:
    case.server.pins.seconds = 60
    pin = await case.server.pins.take()
    update = asyncio.create_task(case.server.update(VERSION, _publish(tmp_path), "run"))
    while case.engine.calls != ["stage 0.7"]:
        await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)
    assert case.engine.calls == ["stage 0.7"]
    case.server.pins.give_back(pin)
    await update
    assert case.engine.calls == SWITCH
