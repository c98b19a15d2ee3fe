"""Several copies of the model in one server: their answers are compared, and errors name the copy."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_rl.core.types import PolicyVersion
from prime_rl.inference.policy.weight_checks import PublishedPolicy, WeightsRefusedError
from prime_rl.inference.vllm.engine_group import VllmEngine

PLACES = ["data-parallel rank 0 on node a", "data-parallel rank 1 on node b"]
POLICY = PublishedPolicy(PolicyVersion(0, 3), "abc", Path("weights/step_3"))


class Core:
    """A fake of vLLM's client for two engines with one worker each."""

    def __init__(self, **answers: list[Any]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        name = args[2][0] if method == "collective_rpc" else method
        self.asked.append(name)
        return self.answers.get(name, [[None], [None]])


def engine_over(core: Core) -> VllmEngine:
    client: Any = SimpleNamespace(
        engine_core=core,
        model_config=SimpleNamespace(dtype="torch.float32", max_model_len=64),
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=2)),
    )
    return VllmEngine(client, places=PLACES)


async def test_commit_with_equal_answers_succeeds() -> None:
    await engine_over(Core(switch_policy=[["0.3", POLICY.salt], ["0.3", POLICY.salt]])).commit(POLICY)


@pytest.mark.parametrize("other", [["0.2", POLICY.salt], ["0.3", "another"]])
async def test_commit_with_a_different_answer_raises(other: list[str]) -> None:
    core = Core(switch_policy=[["0.3", POLICY.salt], other])
    with pytest.raises(RuntimeError, match=f"{PLACES[1]} samples from .*{other[0]}.*{other[1]}"):
        await engine_over(core).commit(POLICY)


async def test_stage_failure_of_one_copy_is_refused_and_names_it() -> None:
    good = {"state": "staged", "error": "", "stage_s": 1.0, "bytes": 4}
    bad = {"state": "failed", "error": "model.safetensors is truncated", "stage_s": 0.0, "bytes": 0}
    core = Core(state=[[good], [bad]])
    with pytest.raises(WeightsRefusedError, match=r"model.safetensors is truncated \(data-parallel rank 1 on node b\)"):
        await engine_over(core).stage(POLICY, lambda: None)
    assert core.asked[-1] == "drop"


async def test_stage_polls_less_often_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each poll waits for the steps in flight of a GPU."""
    pauses: list[float] = []
    staging = {"state": "staging", "error": "", "stage_s": 0.0, "bytes": 0}
    core = Core(state=[[staging], [staging]])

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if sum(pauses) > 60:
            core.answers["state"] = [[staging | {"state": "staged"}]] * 2

    monkeypatch.setattr("prime_rl.inference.vllm.engine_group.asyncio.sleep", sleep)
    await engine_over(core).stage(POLICY, lambda: None)
    assert pauses[0] <= 0.02 and max(pauses) <= 0.5
    assert len(pauses) < 150


async def test_stage_returns_bytes_and_time_of_all_copies() -> None:
    states = [[{"state": "staged", "error": "", "stage_s": seconds, "bytes": 4}] for seconds in (1.0, 2.0)]
    staged = await engine_over(Core(state=states)).stage(POLICY, lambda: None)
    assert staged == {"stage_s": 2.0, "bytes": 8}
