"""I5 on GPUs: the asynchronous scheduler with two steps in flight, across switches and canaries, over vLLM's real one.

A CPU never uses it. Here a double for the device notes which slot and weights computed the KV at each place of each
block, and each prefix hit is compared with it. Requests of two slots draw their tokens from two values, so many prompts
share prefixes; the slots have versions with equal hashes.
"""

import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.vllm import engine_arguments
from tests.support.vllm_modules import needs_vllm

pytestmark = needs_vllm

BLOCK = 4
BLOCKS = 40
STEPS = 1500
LONGEST = 64
SLOTS = (1, 5)

Place = tuple[int, int]  # block, offset


def _make_config() -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    model = Path("configs/reverse_text/model")
    extra = {"max_num_seqs": 4, "max_num_batched_tokens": LONGEST, "enable_chunked_prefill": True}
    config = InferenceConfig.model_validate({"model": {"name": str(model), "max_model_len": LONGEST}, "vllm": extra})
    args = engine_arguments.make_arguments(config, model, on_cpu=True)
    vllm = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
    vllm.scheduler_config.async_scheduling = True
    vllm.cache_config.block_size, vllm.cache_config.num_gpu_blocks = BLOCK, BLOCKS
    vllm.cache_config.enable_prefix_caching = True
    return vllm


def _make_scheduler(vllm: Any) -> Any:
    import torch
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from prime_rl.inference.vllm.salted_scheduler import AsyncPolicyScheduler

    init_none_hash(sha256)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return AsyncPolicyScheduler(
        vllm_config=vllm,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(vllm),
        block_size=BLOCK,
        log_stats=False,
    )


class Simulation:
    """An engine whose device computes nothing, and remembers of each place in the KV cache whose it is.

    Attributes:
        wanted: output tokens by request.
        got: output tokens by request, so far.
        hits: prefix hits.
        impure: prefix hits on KV that is not wholly of the loaded weights.
        waits: for each canary how many steps passed between its arrival and its own.
    """

    def __init__(self, vllm: Any, seed: int) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher

        self.scheduler = _make_scheduler(vllm)
        self.scheduler.switch_policy("h0")
        self.scheduler.switch_policy("h0", number=SLOTS[1])
        self.random = random.Random(seed)
        self.wanted: dict[str, int] = {}
        self.got: dict[str, int] = {}
        self.done = set[str]()
        self.hits = self.switches = 0
        self.impure: list[str] = []
        self.waits: dict[str, int] = {}
        self._arrived: dict[str, int] = {}
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._in_flight: deque[tuple[Any, dict[str, bool]]] = deque()
        self._computed_by: dict[Place, str | None] = {}

    def run(self) -> None:
        """Mix requests, canaries and switches, then let all end."""
        for step in range(STEPS):
            if len(self.wanted) - len(self.done) < 8:
                self._add(f"request-{step}", self.random.randint(3, 20), self.random.randint(1, 25))
            chance = self.random.random()
            if chance < 0.03:
                for name in (self.canary_name(step), f"{self.canary_name(step)}-of-another-slot"):
                    self._add(name, 10, 1)
                    self._arrived[name] = step
            elif chance > 0.97:
                self._switch()
            self._step(step)
        for step in range(STEPS, 10 * STEPS):
            if not self._in_flight and not self.scheduler.has_unfinished_requests():
                return
            self._step(step)
        raise AssertionError("requests never end")

    @staticmethod
    def canary_name(step: int) -> str:
        from prime_rl.inference.policy.engine_group import CANARY_PREFIX

        return f"{CANARY_PREFIX}{step}"

    def _add(self, name: str, prompt: int, output: int) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.v1.request import Request

        tokens = [self.random.randint(0, 1) if place > 3 else 0 for place in range(prompt)]
        salt = name if name in self._arrived else self.scheduler.hash_of(SLOTS[0])
        number = self.random.choice(SLOTS)
        request = Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=output, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
            cache_salt=salt,
            lora_request=None if number == SLOTS[0] else LoRARequest(f"slot {number}", number, "in memory"),
        )
        self.scheduler.add_request(request)
        self.wanted[name], self.got[name] = output, 0

    def _switch(self) -> None:
        """Switch as the engine does: schedule nothing, process the steps in flight, then change the weights."""
        from vllm.v1.core.sched.interface import PauseState

        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while self._in_flight:
            self._land()
        self.switches += 1
        number = self.random.choice(SLOTS)
        others = [one for one in self.scheduler.running if self.scheduler._slot_of(one) != number]
        self.scheduler.switch_policy(f"h{self.switches % 2}", self.random.random() < 0.5, number)
        assert [one for one in self.scheduler.running if self.scheduler._slot_of(one) != number] == others
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _step(self, step: int) -> None:
        if len(self._in_flight) < 2 and self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            for name in self._arrived.keys() & scheduled.num_scheduled_tokens.keys():
                self.waits.setdefault(name, step - self._arrived[name])
            self._compute(scheduled)
        elif self._in_flight:
            self._land()

    def _compute(self, scheduled: Any) -> None:
        cached = scheduled.scheduled_cached_reqs
        starting = {new.req_id for new in scheduled.scheduled_new_reqs} | set(cached.resumed_req_ids)
        samples = {}
        for name, count in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            number = self.scheduler._slot_of(request)
            weights = f"{self.scheduler.hash_of(number)} of {number}"
            [blocks] = self.scheduler.kv_cache_manager.get_block_ids(name)
            begin = request.num_computed_tokens - count
            before = {self._computed_by.get((blocks[at // BLOCK], at % BLOCK)) for at in range(begin)}
            if name in starting and begin:
                self.hits += 1
                self.impure += [name] * (before != {weights})
            for at in range(begin, begin + count):
                self._computed_by[blocks[at // BLOCK], at % BLOCK] = weights if before <= {weights} else None
            samples[name] = not request.is_prefill_chunk
        self._in_flight.append((scheduled, samples))

    def _land(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        scheduled, samples = self._in_flight.popleft()
        names = list(scheduled.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[1] if samples[name] else [] for name in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            for one in outputs.outputs:
                self.got[one.request_id] += len(one.new_token_ids)
                if one.finish_reason is not None:
                    self.done.add(one.request_id)


@pytest.mark.parametrize("second_runner", [False, True], ids=["model runner 1", "model runner 2"])
def test_async_scheduler_separates_versions_and_loses_no_block(monkeypatch, second_runner):
    config = _make_config()
    if second_runner:
        from vllm.config import VllmConfig

        monkeypatch.setattr(VllmConfig, "use_v2_model_runner", property(lambda self: True))
    one = Simulation(config, seed=1)
    assert one.scheduler.use_v2_model_runner is second_runner
    one.run()
    assert one.switches > 20 and len(one.waits) > 20 and one.hits > 200
    assert one.impure == []
    assert one.got == {name: min(count, LONGEST) for name, count in one.wanted.items()}
    assert one.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS - 1, "one is vLLM's own"
    assert max(one.waits.values()) <= 6, "steps in flight, and one that has no tokens left"


def test_async_scheduler_without_broken_chains_mixes_versions(monkeypatch):
    """The simulation sees what it is there for."""
    from prime_rl.inference.vllm.salted_scheduler import AsyncPolicyScheduler

    monkeypatch.setattr(AsyncPolicyScheduler, "_break_chain", lambda self, request: None)
    one = Simulation(_make_config(), seed=1)
    one.run()
    assert one.impure
