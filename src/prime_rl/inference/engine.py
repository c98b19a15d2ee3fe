"""vLLM's engines: the version moves on all copies of the model, or the server says which did not follow (I5)."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.inference.adapters import POLICY_ADAPTER
from prime_rl.inference.policy import PauseMode, Staged
from prime_rl.inference.requests import lora_request
from prime_rl.inference.salt import CANARY
from prime_rl.inference.weights import Policy, WeightsRefusedError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_POLL_S = 0.02


class VllmEngine:
    """`policy.Engine` over vLLM's asynchronous engine.

    Args:
        client: vLLM's.
        recompute: `kv_on_switch = recompute`: requests in flight are prefilled again by the new weights.
        places: what each copy of the model is called in messages; none are needed for one.
    """

    def __init__(self, client: "AsyncLLM", recompute: bool = False, places: Sequence[str] = ()) -> None:
        self.dtype = str(client.model_config.dtype).removeprefix("torch.")
        self._client = client
        self._core = client.engine_core
        self._recompute = recompute
        self._places = places
        self._copies = client.vllm_config.parallel_config.data_parallel_size
        self._group = secrets.token_hex(8)  # under which the workers fetch versions that are in no file

    async def prepare(self, base: Policy, cache: Path) -> None:
        """Let the workers follow their engines to the end, and know what they have loaded. To be called once, first."""
        await self._workers("follow_engine")
        await self._workers("prepare_switches", str(base.path), str(cache))

    async def stage(self, policy: Policy, overtaken: Callable[[], str | None]) -> Staged:
        """Stage on all workers, each in a thread of its own."""
        return await self._stage(policy, _key(policy), POLICY_ADAPTER, overtaken)

    async def _stage(self, policy: Policy, key: str, number: int, overtaken: Callable[[], str | None]) -> Staged:
        place = key, str(policy.path), dict(policy.tensors)
        if policy.offer is not None:
            request = {**policy.offer.fields(), "hash": policy.hash, "copies": self._copies, "group": self._group}
            await self._workers("stage_policy", *place, request)
        elif policy.adapter is None:
            await self._workers("stage_policy", *place)
        else:
            await self._workers("stage_adapter", *place, number, dict(policy.adapter.config))
        while True:
            engines = await self._engines("collective_rpc", "staged_policy", None, (key,), None)
            states = [state for workers in engines for state in workers]
            errors = [
                state["error"] + (f" ({self._places[rank]})" if self._copies > 1 else "")
                for rank, workers in enumerate(engines)
                for state in workers
                if state["state"] == "failed"
            ]
            if reason := errors[0] if errors else overtaken():
                await self._workers("drop_policy", key)
                self._group = secrets.token_hex(8)  # not all of them may be in step now
                raise WeightsRefusedError(reason)
            if any(state["state"] == "gone" for state in states):
                raise RuntimeError(f"a worker has lost {key} while it was staged")
            if all(state["state"] == "staged" for state in states):
                return Staged(max(s["stage_s"] for s in states), sum(s["bytes"] for s in states))
            await asyncio.sleep(_POLL_S)  # a worker has no way to call; a question costs it a moment between two steps

    async def pause(self, mode: PauseMode) -> None:
        """Return when the step in progress is done. The cache is kept: it is divided by policy."""
        await self._core.pause_scheduler_async(mode=mode, clear_cache=False)

    async def load(self, policy: Policy) -> None:
        """Put in place on all workers."""
        await self._workers("load_policy", _key(policy))

    async def unadapt(self) -> None:
        """Take the policy's adapter away on all workers."""
        await self._workers("unadapt_policy")

    async def add_adapter(self, number: int, policy: Policy) -> None:
        """Stage a named adapter on all workers, put it in place between two steps, salt its requests by its hash."""
        await self._stage(policy, f"adapter {number}", number, lambda: None)
        await self._workers("load_policy", f"adapter {number}")
        await self._engines("name_adapter", number, policy.salt)

    async def remove_adapter(self, number: int) -> None:
        """Forget it on all workers."""
        await self._workers("forget_adapter", number)
        await self._engines("name_adapter", number, None)

    async def requests_of(self, number: int) -> int:
        """Count over all engines."""
        return sum(await self._engines("requests_of", number))

    async def commit(self, policy: Policy) -> None:
        """Set the version that each engine attaches to each token, and the salt of what it caches.

        Raises:
            RuntimeError: an engine says that it samples from something else; names which.
        """
        asked = [str(policy.version), policy.salt]
        for rank, answer in enumerate(await self._engines("switch_policy", *asked, self._recompute)):
            if list(answer) != asked:
                raise RuntimeError(f"{self._places[rank]} samples from {answer}, not from {asked}, after the switch")

    async def resume(self) -> float:
        """Schedule again; the engines themselves tell how long they did not."""
        await self._client.resume_generation()
        return max(await self._engines("last_pause"))

    async def prompt_logprobs(self, token_ids: tuple[int, ...], number: int = 0) -> list[list[float]]:
        """Ask each copy of the model, ahead of what waits (`scheduler`), under a salt that is used once.

        `number` is a named adapter's; 0 asks the policy.
        """
        token_ids = token_ids[: self._client.model_config.max_model_len - 1]
        copies = range(self._copies)
        return list(await asyncio.gather(*(self._prompt_logprobs(token_ids, number, rank) for rank in copies)))

    async def measure(self) -> dict[str, Any]:
        """Time what no switch can avoid, in the first worker, while nothing is sampled; see `WeightSwitch.measure`."""
        await self.pause("keep")
        try:
            limits: list[dict[str, Any]] = await self._workers("measure_switch_limit")
        finally:
            await self.resume()
        return limits[0]

    async def _prompt_logprobs(self, token_ids: tuple[int, ...], number: int, rank: int) -> list[float]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            max_tokens=1,
            temperature=1.0,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        name = f"{CANARY}{secrets.token_hex(8)}"
        answers = self._client.generate(
            {"prompt_token_ids": list(token_ids), "cache_salt": name},
            sampling,
            request_id=name,
            lora_request=lora_request(number) if number else None,
            data_parallel_rank=rank if self._copies > 1 else None,
        )
        async for answer in answers:
            logprobs = answer.prompt_logprobs[1:]
        return [entry[token].logprob for entry, token in zip(logprobs, token_ids[1:], strict=True)]

    async def _engines(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every engine; one answer each."""
        answers: list[Any] = await self._core.call_utility_all_async(method, *args)
        return answers

    async def _workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker of every engine; one answer each."""
        answers = await self._engines("collective_rpc", method, None, args, None)
        return [answer for engine in answers for answer in engine]


def _key(policy: Policy) -> str:
    return f"{policy.version} {policy.salt}"
