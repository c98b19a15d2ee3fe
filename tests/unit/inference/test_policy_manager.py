"""The order of a switch, with an engine that records its calls."""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_rl.core.types import PolicyVersion
from prime_rl.inference.policy.engine_group import EnginePause
from prime_rl.inference.policy.policy_manager import Lease, LeaseHeldError, PolicyManager, WrongWeightsError
from prime_rl.inference.policy.weight_checks import POLICY_ADAPTER, CheckedVersion, ServedModel, WeightsRefusedError
from prime_rl.storage.weights.canary import PolicyCanary
from tests.support.tiny_model import publish_weights
from tests.unit.inference.test_weight_checks import BASE, VERSION, _publish

SWITCH = ["stage 0.7", "pause", "load 0.7", "commit 0.7", "resume"]
CANARY = {"token_ids": [5, 6, 7], "logprobs": [-1.0, -2.0], "dtype": "float32"}


def _of(number: int) -> str:
    return "" if number == POLICY_ADAPTER else f" of {number}"


class Engine:
    """Records its calls; `stage` and `load` wait for their gates and fail on request."""

    dtype = "float32"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.staging_gate = asyncio.Event()
        self.staging_gate.set()
        self.broken = False
        self.fails_at = ""
        self.altered = False
        self.logprobs = [[-1.0, -2.0]]

    async def stage(
        self, policy: CheckedVersion, overtaken: Callable[[], str | None], number: int = POLICY_ADAPTER
    ) -> dict[str, Any]:
        self.calls.append(f"stage {policy.version}{_of(number)}")
        while not self.staging_gate.is_set():
            if reason := overtaken():
                raise WeightsRefusedError(reason)
            await asyncio.sleep(0)
        if self.altered:
            raise WeightsRefusedError("another hash")
        return {"stage_s": 2.0, "bytes": 96}

    async def pause(self) -> None:
        self.calls.append("pause")
        if self.fails_at == "pause":
            raise RuntimeError("pause is still in flight")

    async def end_requests(self, number: int) -> None:
        self.calls.append(f"end requests{_of(number)}")

    async def load(self, policy: CheckedVersion, number: int = POLICY_ADAPTER) -> None:
        await self.gate.wait()
        if self.broken:
            raise OSError("disk gone")
        self.calls.append(f"load {policy.version}{_of(number)}")

    async def empty_adapter(self, number: int) -> None:
        self.calls.append(f"empty{_of(number)}")

    async def remove_adapter(self, number: int) -> None:
        self.calls.append(f"remove{_of(number)}")

    async def commit(self, policy: CheckedVersion, number: int = POLICY_ADAPTER) -> None:
        self.calls.append(f"commit {policy.version}{_of(number)}")

    async def resume(self) -> float:
        self.calls.append("resume")
        if self.fails_at == "resume":
            raise RuntimeError("an engine is dead")
        return 0.25

    async def measure(self) -> dict[str, Any]:
        self.calls.append("measure")
        await self.gate.wait()
        return {"bytes": 1}

    async def prompt_logprobs(self, token_ids: tuple[int, ...], number: int = POLICY_ADAPTER) -> list[list[float]]:
        self.calls.append(f"canary {token_ids}{_of(number)}")
        if self.fails_at == "canary":
            raise RuntimeError("no answer")
        return self.logprobs


class Case:
    def __init__(self) -> None:
        self.engine = Engine()
        self.failures: list[str] = []
        base = CheckedVersion(PolicyVersion(0, 0), "base", Path("/base"))
        self.phases: list[tuple[str, str]] = []
        self.pause = EnginePause(self.engine, self.failures.append)
        self.server = PolicyManager(
            self.engine, self.pause, ServedModel(base, BASE, tied=False), Lease(30),
            on_phase=lambda name, start, version: self.phases.append((name, str(version))),
        )  # fmt: skip


@pytest.fixture
async def case():
    return Case()


def _also(tmp_path: Path, step: int, **fields: Any) -> Path:
    """Publish the weights of `_publish` as another step."""
    return publish_weights(tmp_path / str(step), tmp_path / "model", step, overrides=fields)


async def called(engine: Engine, call: str) -> None:
    while call not in engine.calls:
        await asyncio.sleep(0)


async def test_update_loads_and_commits_during_the_pause(case, tmp_path):
    await case.server.start()
    answer = await case.server.update(VERSION, _publish(tmp_path), "run")
    assert case.engine.calls == ["empty", "commit 0.0", *SWITCH]
    assert {key: answer[key] for key in ("branch", "step", "hash", "canary_difference")} == {
        "branch": 0, "step": 7, "hash": case.server.policy.hash, "canary_difference": None,
    }  # fmt: skip
    assert (answer["stage_s"], answer["pause_s"], answer["bytes"]) == (2.0, 0.25, 96)
    assert answer["load_s"] >= 0
    assert case.server.describe()["run_id"] == "run"
    assert case.phases == [("stage", "0.7"), ("swap", "0.7"), ("pause", "0.7")]


async def test_refused_call_does_not_change_the_engine(case, tmp_path):
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


async def test_update_of_a_staged_version_does_not_read_it_again(case, tmp_path):
    directory = _publish(tmp_path)
    staged = await case.server.stage(VERSION, directory, "run")
    assert (staged["step"], staged["stage_s"], staged["bytes"]) == (7, 2.0, 96)
    assert case.engine.calls == ["stage 0.7"]
    assert case.server.describe()["step"] == 0
    answer = await case.server.update(VERSION, directory, "run")
    assert case.engine.calls == SWITCH
    assert answer["stage_s"] == 2.0


async def test_version_overtaken_during_staging_is_refused(case, tmp_path):
    older, newer = _publish(tmp_path), _also(tmp_path, 8, hash="")
    case.engine.staging_gate.clear()
    first = asyncio.create_task(case.server.update(VERSION, older, "run"))
    await called(case.engine, "stage 0.7")
    second = asyncio.create_task(case.server.update(PolicyVersion(0, 8), newer, "run"))
    with pytest.raises(WeightsRefusedError, match=r"version 0\.7 of .* was superseded by version 0\.8"):
        await first
    case.engine.staging_gate.set()
    with pytest.raises(WeightsRefusedError, match="its content hash does not match its tensors"):
        await second
    # The newer version was refused, so the older one can be requested again.
    assert (await case.server.update(VERSION, older, "run"))["step"] == 7


async def test_reload_overtakes_every_version(case, tmp_path):
    case.engine.staging_gate.clear()
    update = asyncio.create_task(case.server.update(VERSION, _publish(tmp_path), "run"))
    await called(case.engine, "stage 0.7")
    assert (await case.server.reload("run"))["step"] == 0
    with pytest.raises(WeightsRefusedError, match="superseded by the base model"):
        await update
    assert case.engine.calls == ["stage 0.7", "pause", "end requests", "commit 0.0", "resume"]


async def test_reload_ends_requests_and_loads_only_other_weights(case, tmp_path):
    await case.server.reload("run")
    assert case.engine.calls == ["pause", "end requests", "commit 0.0", "resume"]
    await case.server.update(VERSION, _publish(tmp_path), "run")
    await case.server.reload("run")
    assert case.engine.calls[-6:] == ["stage 0.0", "pause", "end requests", "load 0.0", "commit 0.0", "resume"]


async def test_failed_load_ends_the_server_without_resume(case, tmp_path):
    case.engine.broken = True
    directory = _publish(tmp_path)
    with pytest.raises(OSError, match="disk gone"):
        await case.server.update(VERSION, directory, "run")
    assert case.engine.calls == ["stage 0.7", "pause"], "not resumed, not tagged"
    assert case.failures == [f"loading {directory} failed (disk gone): the weights are undefined; the server stops"]
    assert case.server.describe()["step"] == 0


@pytest.mark.parametrize(
    ("fails_at", "message"), [("pause", "pause is still in flight"), ("resume", "an engine is dead")]
)
async def test_failed_pause_or_resume_ends_the_server(case, tmp_path, fails_at, message):
    case.engine.fails_at = fails_at
    directory = _publish(tmp_path)
    with pytest.raises(RuntimeError, match=message):
        await case.server.update(VERSION, directory, "run")
    assert case.failures == [f"loading {directory} failed ({message}): the engines may stay paused; the server stops"]
    with pytest.raises(TimeoutError):  # the heartbeat waits for this
        await asyncio.wait_for(case.pause.wait_until_sampling(), 0.05)


async def test_switch_that_waited_for_a_failed_one_is_refused(case, tmp_path):
    """It would resume the engines, over undefined weights."""
    case.engine.broken = True
    case.engine.gate.clear()
    failing = asyncio.create_task(case.server.update(VERSION, _publish(tmp_path), "run"))
    await called(case.engine, "pause")
    waiting = asyncio.create_task(_pause_once(case.pause))
    await asyncio.sleep(0)
    case.engine.gate.set()
    with pytest.raises(OSError, match="disk gone"):
        await failing
    with pytest.raises(RuntimeError, match="an earlier switch failed; the server stops"):
        await waiting
    assert case.engine.calls == ["stage 0.7", "pause"] and len(case.failures) == 1


async def _pause_once(pause: EnginePause) -> None:
    async with pause.during("another slot"):
        pass


async def test_measure_and_update_do_not_overlap(case, tmp_path):
    """The end of one pause would resume the engines during the other."""
    case.engine.gate.clear()
    measuring = asyncio.create_task(case.server.measure())
    await called(case.engine, "measure")
    switching = asyncio.create_task(case.server.update(VERSION, _publish(tmp_path), "run"))
    await asyncio.sleep(0.05)
    assert case.engine.calls == ["pause", "measure"]
    case.engine.gate.set()
    assert await measuring == {"bytes": 1}
    await switching
    assert case.engine.calls == ["pause", "measure", "resume", *SWITCH]
    await case.pause.wait_until_sampling()
    case.engine.fails_at = "resume"
    with pytest.raises(RuntimeError):
        await case.server.measure()
    assert "measuring a switch failed (an engine is dead)" in case.failures[0]


async def test_cancelled_update_completes(case, tmp_path):
    case.engine.gate.clear()
    call = asyncio.create_task(case.server.update(VERSION, _publish(tmp_path), "run"))
    await called(case.engine, "pause")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    reload = asyncio.create_task(case.server.reload("run"))
    await asyncio.sleep(0)
    case.engine.gate.set()
    await reload
    assert case.engine.calls == [*SWITCH, "stage 0.0", "pause", "end requests", "load 0.0", "commit 0.0", "resume"]


async def test_update_compares_the_canary_after_the_switch(case, tmp_path):
    case.engine.logprobs = [[-1.0, -2.00005], [-1.00002, -2.0]]
    directory = _publish(tmp_path, canary=CANARY)
    answer = await case.server.update(VERSION, directory, "run")
    assert case.engine.calls == [*SWITCH, "canary (5, 6, 7)"]
    assert answer["canary_difference"] == pytest.approx(5e-5)
    assert case.server.describe()["canary_difference"] == pytest.approx(5e-5)
    await case.server.reload("run")
    assert case.server.describe()["canary_difference"] is None
    case.engine.logprobs = [[-1.5, -2.0]]
    case.server._canary_tolerance = 0.6
    assert (await case.server.update(VERSION, directory, "run"))["canary_difference"] == 0.5


@pytest.mark.parametrize(("logprob", "message"), [(-1.5, "is 0.5, more than 0.0001"), (math.nan, "is nan, more than")])
async def test_update_with_a_different_canary_raises_every_time(case, tmp_path, logprob, message):
    """Also if one copy of the model differs, and for a repeated call."""
    case.engine.logprobs = [[-1.0, -2.0], [logprob, -2.0]]
    directory = _publish(tmp_path, canary=CANARY)
    for _ in range(2):
        with pytest.raises(WrongWeightsError) as caught:
            await case.server.update(VERSION, directory, "run")
        assert f"version 0.7 of {directory} is loaded, but is not the trainer's" in str(caught.value)
        assert message in str(caught.value)
    assert case.engine.calls == [*SWITCH, "canary (5, 6, 7)"]
    assert case.server.describe()["step"] == 7
    await case.server.reload("run")
    assert case.server.describe()["step"] == 0


async def test_update_after_a_failed_canary_repeats_it(case, tmp_path):
    """The weights are loaded then, but a repeated call must not succeed without the comparison."""
    directory = _publish(tmp_path, canary=CANARY)
    case.engine.fails_at = "canary"
    with pytest.raises(RuntimeError, match="no answer"):
        await case.server.update(VERSION, directory, "run")
    assert case.server.policy.version == VERSION
    case.engine.fails_at = ""
    case.engine.logprobs = [[-1.0, -3.0]]
    with pytest.raises(WrongWeightsError):
        await case.server.update(VERSION, directory, "run")
    assert case.engine.calls == [*SWITCH, "canary (5, 6, 7)", "canary (5, 6, 7)"]


async def test_update_accepts_three_times_the_difference_of_the_base_model(case, tmp_path):
    canary = {"token_ids": [5, 6, 7], "logprobs": [-1.0, -9.0], "dtype": "bfloat16", "base_logprobs": [-1.0, -8.0]}
    case.server.base_canary = PolicyCanary((5, 6, 7), (-1.1, -8.1), "bfloat16")
    case.engine.logprobs = [[-1.29, -9.29]]
    directory = _publish(tmp_path, canary=canary)
    await case.server.update(VERSION, directory, "run")
    await case.server.reload("run")
    case.engine.logprobs = [[-1.31, -9.31]]
    with pytest.raises(
        WrongWeightsError, match=r"the mean difference .* is 0\.31, more than 0\.3 \(canary_tolerance\)"
    ):
        await case.server.update(VERSION, directory, "run")


async def test_pin_delays_the_switch_but_not_the_staging(case, tmp_path):
    case.server.pins.seconds = 60
    pin = await case.server.pins.acquire()
    update = asyncio.create_task(case.server.update(VERSION, _publish(tmp_path), "run"))
    await called(case.engine, "stage 0.7")
    for _ in range(10):
        await asyncio.sleep(0)
    assert case.engine.calls == ["stage 0.7"]
    case.server.pins.release(pin)
    await update
    assert case.engine.calls == SWITCH


class Copies:
    """Copies nothing: counts the requests, and waits for its gate."""

    def __init__(self) -> None:
        self.requested: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def copy(self, published: Path, version: PolicyVersion, overtaken: Callable[[], str | None]) -> Path:
        self.requested.append(str(version))
        while not self.gate.is_set():
            if reason := overtaken():
                raise WeightsRefusedError(reason)
            await asyncio.sleep(0)
        return published.with_name("here")


@pytest.fixture
async def relayed():
    copies, base = Copies(), CheckedVersion(PolicyVersion(0, 0), "base", Path("/base"))
    served = ServedModel(base, BASE, tied=False)
    engine = Engine()
    return PolicyManager(engine, EnginePause(engine, [].append), served, Lease(30), copy=copies.copy), copies


async def test_version_is_read_from_its_copy_which_is_made_once(relayed, tmp_path):
    server, copies = relayed
    directory = _publish(tmp_path)
    directory.rename(directory.with_name("here"))
    await server.stage(VERSION, directory, "run")
    await server.update(VERSION, directory, "run")
    assert server.policy.path == directory.with_name("here")
    assert copies.requested == ["0.7"]
    await server.reload("run")
    await server.update(VERSION, directory, "run")
    assert copies.requested == ["0.7", "0.7"], "the next run has other weights under the same version"
