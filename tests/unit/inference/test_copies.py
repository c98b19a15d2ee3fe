"""Several copies of the model behind one server: what each of them answers is compared, and blamed on the right one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_rl.inference.engine import VllmEngine
from prime_rl.inference.weights import Policy, WeightsRefusedError
from prime_rl.types import PolicyVersion

PLACES = ["data-parallel rank 0 on node a", "data-parallel rank 1 on node b"]
POLICY = Policy(PolicyVersion(0, 3), "abc", Path("weights/step_3"))


class Core:
    """Stands for vLLM's client of two engines with one worker each."""

    def __init__(self, **answers: list[Any]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        name = args[0] if method == "collective_rpc" else method
        self.asked.append(name)
        return self.answers.get(name, [[None], [None]])


def engine_over(core: Core) -> VllmEngine:
    client: Any = SimpleNamespace(
        engine_core=core,
        model_config=SimpleNamespace(dtype="torch.float32", max_model_len=64),
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=2)),
    )
    return VllmEngine(client, places=PLACES)


async def test_copies_that_agree_after_a_switch() -> None:
    await engine_over(Core(switch_policy=[["0.3", POLICY.salt], ["0.3", POLICY.salt]])).commit(POLICY)


@pytest.mark.parametrize("other", [["0.2", POLICY.salt], ["0.3", "another"]])
async def test_a_copy_that_differs_after_a_switch_is_an_error(other: list[str]) -> None:
    core = Core(switch_policy=[["0.3", POLICY.salt], other])
    with pytest.raises(RuntimeError, match=f"{PLACES[1]} samples from .*{other[0]}.*{other[1]}"):
        await engine_over(core).commit(POLICY)


async def test_what_one_copy_cannot_stage_is_refused_for_all_and_says_where() -> None:
    good = {"state": "staged", "error": "", "stage_s": 1.0, "bytes": 4}
    bad = {"state": "failed", "error": "model.safetensors is truncated", "stage_s": 0.0, "bytes": 0}
    core = Core(staged_policy=[[good], [bad]])
    with pytest.raises(WeightsRefusedError, match=r"model.safetensors is truncated \(data-parallel rank 1 on node b\)"):
        await engine_over(core).stage(POLICY, lambda: None)
    assert core.asked[-1] == "drop_policy"


async def test_bytes_and_time_are_of_all_copies() -> None:
    states = [[{"state": "staged", "error": "", "stage_s": seconds, "bytes": 4}] for seconds in (1.0, 2.0)]
    staged = await engine_over(Core(staged_policy=states)).stage(POLICY, lambda: None)
    assert (staged.seconds, staged.bytes) == (2.0, 8)
