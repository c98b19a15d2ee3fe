"""vLLM's engines as one: a switch changes the version on all copies of the model, or the server ends.

The prefix cache is separated by policy: `make_salt` makes the salts, for the HTTP server and the engines.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.inference.policy.weight_checks import POLICY_ADAPTER, CheckedVersion, WeightsRefusedError

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

_POLL_SECONDS = 0.02
_MAX_POLL_SECONDS = 0.5

CANARY_PREFIX = "canary-"
"""Prefix of the request ids of the server's own canaries, followed by a secret.

The scheduler gives a canary priority, so requests of clients under this prefix are refused."""


class VllmEngine:
    """vLLM's asynchronous engine, as `PolicyManager` and `NamedAdapters` use it.

    A `number` is of an adapter. `POLICY_ADAPTER` stands for the base slot, also if it samples from full weights.

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
        parallel = client.vllm_config.parallel_config
        self._copies = parallel.data_parallel_size
        self._has_collectives = parallel.world_size > 1 or (self._copies > 1 and client.model_config.is_moe)
        self.canary_prefix = f"{CANARY_PREFIX}{secrets.token_hex(16)}-"  # of the ids of the server's own requests
        self._group = secrets.token_hex(8)  # transfer group of the workers, for versions without files

    async def prepare(self, base: CheckedVersion, cache: Path) -> None:
        """Set up the workers. Must be called once, first."""
        await self._workers("prepare_updates", str(base.path), str(cache))

    async def kv_cache_bytes(self) -> int:
        """Smallest KV cache of a worker, bytes."""
        return min(await self._workers("kv_cache_bytes"))

    async def stage(
        self, policy: CheckedVersion, overtaken: Callable[[], str | None], number: int = POLICY_ADAPTER
    ) -> dict[str, Any]:
        """Read, check and prepare the policy's tensors on all workers, while sampling continues: `stage_s`, `bytes`.

        Refused if they are not the published ones, or `overtaken` returns a reason.
        """
        key = _key(policy, number)
        common = key, str(policy.path), dict(policy.tensors)
        if policy.adapter is not None:
            await self._update("stage", *common, None, number, dict(policy.adapter.config))
        elif policy.offer is not None:
            if policy.offer.type == "nccl" and self._has_collectives:
                # NCCL needs the same order of two communicators on all ranks, and here it would be a race on each.
                raise WeightsRefusedError(
                    f"{policy.path} is sent by weight_broadcast.type = 'nccl', which is not supported with collectives "
                    "of sampling (parallel.tp > 1, or parallel.dp > 1 with experts): both at a time may deadlock; set "
                    "trainer.weight_broadcast.type = 'filesystem' and weight_broadcast.directory = /dev/shm/weights"
                )
            fetch = {"hash": policy.hash, "copies": self._copies, "group": self._group}
            await self._update("stage", *common, policy.offer.fields() | fetch)
        else:
            await self._update("stage", *common)
        poll_seconds = _POLL_SECONDS
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
            await asyncio.sleep(poll_seconds)
            poll_seconds = min(_MAX_POLL_SECONDS, 1.3 * poll_seconds)

    async def pause(self) -> None:
        """Stop sampling after the current step. The prefix cache is kept: its entries are separated by policy."""
        await self._core.pause_scheduler_async(mode="keep", clear_cache=False)

    async def load(self, policy: CheckedVersion, number: int = POLICY_ADAPTER) -> None:
        """Load the staged tensors, on all workers: in a pause, unless no request has the number yet."""
        await self._update("load", _key(policy, number))

    async def empty_adapter(self, number: int) -> None:
        """Replace an adapter by one that adds nothing, on all workers; as `load`."""
        await self._update("empty_adapter", number)

    async def drop(self, policy: CheckedVersion, number: int) -> None:
        """Discard staged tensors."""
        await self._update("drop", _key(policy, number))

    async def remove_adapter(self, number: int) -> None:
        """Remove an adapter that no request uses, on all workers."""
        await self._update("remove_adapter", number)
        await self._engines("forget_adapter", number)

    async def end_requests(self, number: int) -> None:
        """End the requests of an adapter on all engines, with the tokens so far."""
        await self._engines("end_requests", number)

    async def count_requests(self, number: int) -> int:
        """Count the unfinished requests of an adapter on all engines."""
        return sum(await self._engines("count_requests", number))

    async def commit(self, policy: CheckedVersion, number: int = POLICY_ADAPTER) -> None:
        """Set the version that each engine attaches to an adapter's tokens, and the salt of its cache entries.

        Raises RuntimeError if an engine reports another version.
        """
        expected = [str(policy.version), policy.salt]
        for rank, answer in enumerate(await self._engines("switch_policy", *expected, self._recompute, number)):
            if list(answer) != expected:
                raise RuntimeError(f"{self._places[rank]} samples from {answer}, not from {expected}, after the switch")

    async def resume(self) -> float:
        """Resume all engines; returns the longest pause that an engine measured."""
        await self._client.resume_generation()
        return max(await self._engines("last_pause"))

    async def prompt_logprobs(self, token_ids: tuple[int, ...], number: int = POLICY_ADAPTER) -> list[list[float]]:
        """Compute the log-probabilities of tokens 1 ... T-1, as far as they fit, on each copy of the model.

        The requests have priority and a unique salt.
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
        # `prepare_requests` adds the reference of the base slot on a server with adapters.
        answers = self._client.generate(
            {"prompt_token_ids": list(token_ids), "cache_salt": name},
            sampling,
            request_id=name,
            lora_request=lora_request(number) if number > POLICY_ADAPTER else None,
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


class EnginePause:
    """The pause of an engine, for one switch at a time.

    An error during the pause leaves undefined weights or paused engines. The engine then stays paused and `fail`, which
    is called with a message, must end the server: no token is sampled from undefined weights.
    """

    def __init__(self, engine: VllmEngine, fail: Callable[[str], None]) -> None:
        self._engine, self._fail = engine, fail
        self._lock = asyncio.Lock()
        self._not_paused = asyncio.Event()
        self._not_paused.set()

    @asynccontextmanager
    async def during(self, purpose: str) -> AsyncIterator[list[float]]:
        """Pause for the length of the block; appends the seconds of the pause to the yielded list."""
        pause_seconds: list[float] = []
        outcome = "the engines may stay paused"
        async with self._lock:
            if not self._not_paused.is_set():  # only a failure leaves it so
                raise RuntimeError("an earlier switch failed; the server stops")
            self._not_paused.clear()
            try:
                await self._engine.pause()
                outcome = "the weights are undefined"
                yield pause_seconds
                outcome = "the engines may stay paused"
                pause_seconds.append(await self._engine.resume())
            except BaseException as error:
                self._fail(f"{purpose} failed ({error or type(error).__name__}): {outcome}; the server stops")
                raise
            self._not_paused.set()

    async def wait_until_sampling(self) -> None:
        """Return when the engine is not paused."""
        await self._not_paused.wait()


def _key(policy: CheckedVersion, number: int) -> str:
    return f"{number} {policy.version} {policy.salt}"


def lora_request(number: int, name: str | None = None) -> "LoRARequest":
    """Make vLLM's reference to an adapter. `AdapterSlots` supplies the verified tensors.

    Name and path are part of the keys of the prefix cache, so adapters share no entries.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest(name or f"adapter {number}", number, f"in memory {number}")


def make_salt(content_hash: str, client_salt: str | None) -> str:
    """Return the prefix-cache salt of a request: the hash of the weights, then the client's own salt.

    The client's salt never stands alone, so no client can read entries of other weights (I5). A content hash contains
    no colon.
    """
    return f"{content_hash}:{client_salt}" if client_salt else content_hash


def replace_hash(content_hash: str, salt: str | None) -> str:
    """Replace the hash in a salt of `make_salt`. Any other salt is kept behind `content_hash`."""
    return make_salt(content_hash, (salt or "").partition(":")[2])
