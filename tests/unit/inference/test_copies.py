"""Several copies of the model in one server: their answers are compared, and errors name the copy."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_rl.core.types import PolicyVersion
from prime_rl.inference.policy.engine_group import VllmEngine
from prime_rl.inference.policy.weight_checks import POLICY_ADAPTER, CheckedVersion, WeightsRefusedError
from prime_rl.storage.weights.transfer_channel import TransferDescriptor
from tests.support.vllm_modules import needs_vllm

PLACES = ["data-parallel rank 0 on node a", "data-parallel rank 1 on node b"]
POLICY = CheckedVersion(PolicyVersion(0, 3), "abc", Path("weights/step_3"))


class Core:
    """A fake of vLLM's client for two engines with one worker each."""

    def __init__(self, **answers: list[Any]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        name = args[2][0] if method == "collective_rpc" else method
        self.asked.append(name)
        return self.answers.get(name, [[None], [None]])


def engine_over(core: Core, tp: int = 1, is_moe: bool = False) -> VllmEngine:
    client: Any = SimpleNamespace(
        engine_core=core,
        model_config=SimpleNamespace(dtype="torch.float32", max_model_len=64, is_moe=is_moe),
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=2, world_size=tp)),
    )
    return VllmEngine(client, places=PLACES)


@pytest.mark.parametrize("other", [["0.2", POLICY.salt], ["0.3", "another"]])
async def test_commit_with_a_different_answer_raises(other):
    ours = ["0.3", POLICY.salt]
    await engine_over(Core(switch_policy=[ours, ours])).commit(POLICY)
    core = Core(switch_policy=[ours, other])
    with pytest.raises(RuntimeError, match=f"{PLACES[1]} samples from .*{other[0]}.*{other[1]}"):
        await engine_over(core).commit(POLICY)


async def test_stage_failure_of_one_copy_is_refused_and_names_it():
    good = {"state": "staged", "error": "", "stage_s": 1.0, "bytes": 4}
    bad = {"state": "failed", "error": "model.safetensors is truncated", "stage_s": 0.0, "bytes": 0}
    core = Core(state=[[good], [bad]])
    with pytest.raises(WeightsRefusedError, match=r"model.safetensors is truncated \(data-parallel rank 1 on node b\)"):
        await engine_over(core).stage(POLICY, lambda: None)
    assert core.asked[-1] == "drop"


async def test_stage_returns_bytes_and_time_of_all_copies():
    states = [[{"state": "staged", "error": "", "stage_s": seconds, "bytes": 4}] for seconds in (1.0, 2.0)]
    staged = await engine_over(Core(state=states)).stage(POLICY, lambda: None)
    assert staged == {"stage_s": 2.0, "bytes": 8}


@pytest.mark.parametrize(("tp", "is_moe", "refused"), [(1, False, False), (2, False, True), (1, True, True)])
@pytest.mark.parametrize("kind", ["nccl", "ipc"])
async def test_stage_by_nccl_beside_collectives_of_sampling_is_refused(kind, tp, is_moe, refused):
    offer = TransferDescriptor(kind, "here", 1, "session", {}, 60)
    core = Core(state=[[{"state": "staged", "error": "", "stage_s": 1.0, "bytes": 4}]] * 2)
    staging = engine_over(core, tp, is_moe).stage(replace(POLICY, offer=offer), lambda: None)
    if refused and kind == "nccl":
        with pytest.raises(
            WeightsRefusedError, match=r"parallel\.tp > 1.* set trainer.weight_broadcast.type = 'filesy"
        ):
            await staging
        assert not core.asked
    else:
        await staging


@needs_vllm
async def test_canary_of_the_base_slot_refers_to_no_adapter():
    """vLLM refuses a reference to an adapter without enable_lora."""
    sent: list[Any] = []

    async def generate(prompt: Any, sampling: Any, lora_request: Any, **_: Any) -> Any:
        sent.append(lora_request)
        logprobs = [None, *({token: SimpleNamespace(logprob=-0.5)} for token in prompt["prompt_token_ids"][1:])]
        yield SimpleNamespace(prompt_logprobs=logprobs)

    engine = engine_over(Core())
    engine._client.generate = generate
    for number in ({}, {"number": POLICY_ADAPTER}):
        assert await engine.prompt_logprobs((5, 6, 7), **number) == [[-0.5, -0.5]] * 2
    assert sent == [None] * 4
    await engine.prompt_logprobs((5, 6, 7), POLICY_ADAPTER + 1)
    assert [request.lora_int_id for request in sent[4:]] == [POLICY_ADAPTER + 1] * 2
