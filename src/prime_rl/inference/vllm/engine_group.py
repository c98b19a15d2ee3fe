"""vLLM's engines as one: a switch changes the version on all copies of the model, or the server ends."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.inference.policy.adapter_checks import POLICY_ADAPTER
from prime_rl.inference.policy.named_adapters import lora_request
from prime_rl.inference.policy.policy_manager import PauseMode
from prime_rl.inference.policy.weight_checks import PublishedPolicy, WeightsRefusedError
from prime_rl.inference.vllm.cache_salts import CANARY_PREFIX

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_POLL_S = 0.02
_MAX_POLL_S = 0.5


class VllmEngine:
    """vLLM's asynchronous engine, as `PolicyManager` and `NamedAdapters` use it.

    Its methods for an adapter are about a named one; `number` is the adapter's.

    Args:
        client: vLLM's.
        recompute: `kv_cache_on_weight_update = recompute`: requests in flight are prefilled again by the new weights.
        places: name of each copy of the model in messages; may be empty for one copy.
    """

    def __init__(self, client: "AsyncLLM", recompute: bool = False, places: Sequence[str] = ()) -> None:
        self.dtype = str(client.model_config.dtype).removeprefix("torch.")  # of its computation, e.g. "float32"
        self._client = client
        self._core = client.engine_core
        self._recompute = recompute
        self._places = places
        self._copies = client.vllm_config.parallel_config.data_parallel_size
        self.canary_prefix = f"{CANARY_PREFIX}{secrets.token_hex(16)}-"  # of the ids of the server's own requests
        self._group = secrets.token_hex(8)  # transfer group of the workers, for versions without files

    async def prepare(self, base: PublishedPolicy, cache: Path) -> None:
        """Set up the workers. Must be called once, first."""
        await self._workers("prepare_updates", str(base.path), str(cache))

    async def kv_cache_bytes(self) -> int:
        """Smallest KV cache of a worker, bytes."""
        return min(await self._workers("kv_cache_bytes"))

    async def stage(self, policy: PublishedPolicy, overtaken: Callable[[], str | None]) -> dict[str, Any]:
        """Read, check and prepare the policy's tensors on all workers, while sampling continues: `stage_s`, `bytes`.

        Refused if they are not the published ones, or `overtaken` returns a reason.
        """
        return await self._stage(policy, _key(policy), POLICY_ADAPTER, overtaken)

    async def stage_adapter(self, number: int, policy: PublishedPolicy) -> None:
        """Stage a named adapter on all workers; raises as `stage`."""
        await self._stage(policy, f"adapter {number}", number, lambda: None)

    async def _stage(
        self, policy: PublishedPolicy, key: str, number: int, overtaken: Callable[[], str | None]
    ) -> dict[str, Any]:
        common = key, str(policy.path), dict(policy.tensors)
        if policy.adapter is not None:
            await self._update("stage", *common, None, number, dict(policy.adapter.config))
        elif policy.offer is not None:
            fetch = {"hash": policy.hash, "copies": self._copies, "group": self._group}
            await self._update("stage", *common, policy.offer.fields() | fetch)
        else:
            await self._update("stage", *common)
        poll_s = _POLL_S
        while True:
            engines = await self._engines("collective_rpc", "call_weight_update", None, ("state", key), None)
            states = [state for workers in engines for state in workers]
            errors = [
                state["error"] + (f" ({self._places[rank]})" if self._copies > 1 else "")
                for rank, workers in enumerate(engines)
                for state in workers
                if state["error"]
            ]
            if reason := errors[0] if errors else overtaken():
                await self._update("drop", key)
                self._group = secrets.token_hex(8)  # the workers may be in different steps of the transfer
                raise WeightsRefusedError(reason)
            if any(state["state"] == "gone" for state in states):
                raise RuntimeError(f"a worker dropped {key} while it was staged")
            if all(state["state"] == "staged" for state in states):
                return {"stage_s": max(s["stage_s"] for s in states), "bytes": sum(s["bytes"] for s in states)}
            # A worker cannot notify the server. Each poll waits for all steps in flight, so the interval grows.
            await asyncio.sleep(poll_s)
            poll_s = min(_MAX_POLL_S, 1.3 * poll_s)

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling after the current step. The prefix cache is kept: its entries are separated by policy."""
        await self._core.pause_scheduler_async(mode=mode, clear_cache=False)

    async def load(self, policy: PublishedPolicy) -> None:
        """Load the staged tensors into the paused model, on all workers."""
        await self._update("load", _key(policy))

    async def disable_adapter(self) -> None:
        """Remove the policy's adapter on all workers."""
        await self._update("disable_adapter")

    async def drop_adapter(self, number: int) -> None:
        """Discard a staged adapter."""
        await self._update("drop", f"adapter {number}")

    async def add_adapter(self, number: int, policy: PublishedPolicy) -> None:
        """Load a staged adapter between two steps, and salt its requests by its hash."""
        await self._update("load", f"adapter {number}")
        await self._engines("name_adapter", number, policy.salt)

    async def remove_adapter(self, number: int) -> None:
        """Remove a named adapter on all workers."""
        await self._update("remove_adapter", number)
        await self._engines("name_adapter", number, None)

    async def count_requests(self, number: int) -> int:
        """Count the unfinished requests of an adapter on all engines."""
        return sum(await self._engines("count_requests", number))

    async def commit(self, policy: PublishedPolicy) -> None:
        """Set the version that each engine attaches to tokens, and the salt of its cache entries.

        Raises RuntimeError if an engine reports another version.
        """
        expected = [str(policy.version), policy.salt]
        for rank, answer in enumerate(await self._engines("switch_policy", *expected, self._recompute)):
            if list(answer) != expected:
                raise RuntimeError(f"{self._places[rank]} samples from {answer}, not from {expected}, after the switch")

    async def resume(self) -> float:
        """Resume all engines; returns the longest pause that an engine measured."""
        await self._client.resume_generation()
        return max(await self._engines("last_pause"))

    async def prompt_logprobs(self, token_ids: tuple[int, ...], number: int = 0) -> list[list[float]]:
        """Compute the log-probabilities of tokens 1 ... T-1, as far as they fit, on each copy of the model.

        The requests have priority and a unique salt. The number of the policy is 0.
        """
        token_ids = token_ids[: self._client.model_config.max_model_len - 1]
        copies = range(self._copies)
        return list(await asyncio.gather(*(self._prompt_logprobs(token_ids, number, rank) for rank in copies)))

    async def measure(self) -> dict[str, Any]:
        """See `WorkerWeightUpdate.measure`; returns the first worker's answer."""
        return (await self._update("measure"))[0]

    async def _prompt_logprobs(self, token_ids: tuple[int, ...], number: int, rank: int) -> list[float]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        final = RequestOutputKind.FINAL_ONLY
        sampling = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False, output_kind=final)
        name = f"{self.canary_prefix}{secrets.token_hex(8)}"
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
        return list(await self._core.call_utility_all_async(method, *args))

    async def _workers(self, method: str, *args: Any) -> list[Any]:
        answers = await self._engines("collective_rpc", method, None, args, None)
        return [answer for engine in answers for answer in engine]

    async def _update(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker's `WorkerWeightUpdate`."""
        return await self._workers("call_weight_update", method, *args)


def _key(policy: PublishedPolicy) -> str:
    return f"{policy.version} {policy.salt}"
