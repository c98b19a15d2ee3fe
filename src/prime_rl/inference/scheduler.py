"""I5 inside the engine: KV cached under a salt was computed, from its first token to its last, by the salt's weights.

The HTTP server salts every request with the hash of the weights that are loaded when the request is handed to the
engine. That alone does not hold across a switch: a request that waits in the queue meanwhile is prefilled by the new
weights under the old salt, would be given blocks that the old weights computed, and its first token, tagged new, would
not be the new policy's. So the salt is decided here, where it can be known, at three moments:

1. *Lookup.* The scheduler looks a request up in the prefix cache in the very step that starts its prefill, and no
   switch happens inside a step. A request whose salt is not that of the loaded weights is salted anew right there.
   This covers whatever waits across a switch, whatever arrives during the pause, and whatever is preempted and
   prefilled again. With the server's salt in place it costs one comparison.
2. *Switch, requests in mid-prefill.* They have sampled no token, so the first one must be the new policy's alone:
   they give their blocks back and are prefilled again from the start.
3. *Switch, requests in mid-generation.* Under `kv_on_switch = keep` they keep their blocks, and what they compute from
   now on rests on KV of both policies. It is true of neither, so the hash chain of the request is broken: its later
   blocks are cached under hashes that no other request can produce. Under `recompute` they give their blocks back, as
   vLLM lets requests do when it runs out of them: prompt and sampled tokens are prefilled again by the new weights,
   under the new salt, and sampling goes on from there.

Each named adapter (`named_adapters`) has a hash of its own, which no switch changes; its requests are looked up by it.

Hence, by induction over steps, an entry under salt h holds KV of weights h only, also when h is loaded again later.

A canary (`canary`) is a request of the server itself, of 64 tokens and one step. It goes ahead of what waits, and where
no seat or no block is free the youngest running request makes room: a version would be doubted for as long as the
longest rollout takes.
"""

import secrets
import time
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from prime_rl.inference import patches
from prime_rl.inference.salt import CANARY, remix


class SyncPolicyScheduler(Scheduler):
    """vLLM's scheduler with a prefix cache that is divided by policy."""

    content_hash = ""
    last_pause_s = 0.0
    _paused_at = 0.0
    _canary: Request | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._named_hashes: dict[int, str] = {}

    def switch_policy(self, content_hash: str, recompute: bool = False) -> None:
        """Salt by `content_hash` from here on. The engine must be paused, its last step processed.

        Requests of named adapters go on as they were: what they are sampled from does not change.

        Args:
            content_hash: of the policy that is loaded now.
            recompute: requests in flight give up the KV that other weights computed.
        """
        if content_hash == self.content_hash:
            return
        self.content_hash = content_hash
        running = [request for request in self.running if not self._is_named(request)]
        self._restart([request for request in running if recompute or not request.num_output_tokens])
        for request in self.requests.values():
            if request.num_computed_tokens and not self._is_named(request):
                self._break_chain(request)
        # The workers dropped the old weights' image embeddings when they loaded; the scheduler's list must agree.
        self.reset_encoder_cache()

    def name_adapter(self, number: int, content_hash: str | None) -> None:
        """Salt requests of a named adapter by its hash from here on; None forgets it."""
        if content_hash is None:
            self._named_hashes.pop(number, None)
        else:
            self._named_hashes[number] = content_hash

    def requests_of(self, number: int) -> int:
        """Count the unfinished requests of an adapter."""
        return sum(_adapter_of(request) == number for request in self.requests.values())

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause or go on, and take the time of the pause."""
        super().set_pause_state(pause_state)
        if pause_state == PauseState.UNPAUSED:
            self.last_pause_s = time.monotonic() - self._paused_at
        else:
            self._paused_at = time.monotonic()

    def add_request(self, request: Request) -> None:
        """Queue a request; a canary before all others."""
        super().add_request(request)
        if request.request_id.startswith(CANARY):
            self._canary = request
            self.waiting.remove_request(request)
            self.waiting.prepend_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Choose what the next step computes; a canary that waits is part of it."""
        if self._canary is not None and self._pause_state == PauseState.UNPAUSED:
            self._seat(self._canary)
            self._canary = None
        return super().schedule(*args, **kwargs)

    def _seat(self, canary: Request) -> None:
        """Let the youngest running requests make room for a waiting one, if there is none."""
        if canary.status != RequestStatus.WAITING:
            return
        blocks = (canary.num_tokens // self.block_size + 1) * len(self.kv_cache_config.kv_cache_groups)
        pool = self.kv_cache_manager.block_pool
        while self.running and (
            len(self.running) >= self.max_num_active_reqs or pool.get_num_free_blocks() < len(self.running) + blocks
        ):
            self._restart([self.running[-1]])
        self.waiting.remove_request(canary)
        self.waiting.prepend_request(canary)

    def _get_local_prefix_cache_hit(self, request: Request) -> tuple[KVCacheBlocks, int, int, bool]:
        """Salt the request by the loaded weights, then look it up."""
        salt = remix(self._named_hashes.get(_adapter_of(request), self.content_hash), request.cache_salt)
        if salt != request.cache_salt:
            request.cache_salt = salt
            request.block_hashes.clear()
            request.update_block_hashes()
        return super()._get_local_prefix_cache_hit(request)

    def _is_named(self, request: Request) -> bool:
        return _adapter_of(request) in self._named_hashes

    def _restart(self, requests: list[Request]) -> None:
        """Put running requests back at the head of the queue, as vLLM does when it runs out of blocks."""
        for request in reversed(requests):
            self.running.remove(request)
            self._preempt_request(request, time.monotonic())
            # Resumed in the very next step, it must be sent to the worker as a whole.
            self.prev_step_scheduled_req_ids.discard(request.request_id)

    def _break_chain(self, request: Request) -> None:
        """Make the hashes of the blocks that are not yet cached, and of all that follow, unlike any other."""
        unique = secrets.token_hex(16)
        # Not a salt of the server's: should the request be preempted, its lookup salts it anew.
        request.cache_salt = remix(f"mixed-{unique}", request.cache_salt)
        cached = request.num_computed_tokens // self.hash_block_size
        del request.block_hashes[cached:]
        if cached:
            # Each hash is chained from its predecessor. This one is in the cache already and is not read again.
            request.block_hashes[-1] = BlockHash(unique.encode())
        request.update_block_hashes()


def _adapter_of(request: Request) -> int:
    return request.lora_request.lora_int_id if request.lora_request is not None else 0


class AsyncPolicyScheduler(SyncPolicyScheduler, AsyncScheduler):
    """The same for asynchronous scheduling, which vLLM uses on GPUs."""


def make_scheduler(vllm_config: VllmConfig, **kwargs: Any) -> SyncPolicyScheduler:
    """Make the engine's scheduler. vLLM calls this (`scheduler_cls`) in each engine process, at its start."""
    patches.die_with_parent()
    patches.add_switch_utility()
    scheduler = AsyncPolicyScheduler if vllm_config.scheduler_config.async_scheduling else SyncPolicyScheduler
    return scheduler(vllm_config=vllm_config, **kwargs)
