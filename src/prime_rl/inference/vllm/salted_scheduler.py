"""vLLM's scheduler with a prefix cache that is separated by policy version.

Guarantee: KV that is cached under a salt was computed completely by the weights of that salt, so the version tags of
tokens are exact (I5).

The HTTP server salts every request with the hash of the loaded weights. That is not enough across a switch: a request
that waits in the queue would be prefilled by the new weights under the old salt, and would read blocks that the old
weights computed. So the scheduler decides the salt at three moments:

1. *Lookup.* A request is looked up in the prefix cache in the step that starts its prefill, and no switch happens
   within a step. A request whose salt is not that of the loaded weights gets a new one there. This covers requests
   that wait across a switch, arrive during the pause, or are preempted. Otherwise it costs one comparison.
2. *Switch, requests in prefill.* They have no token yet, and the first one must be sampled by the new policy alone:
   they return their blocks and are prefilled again.
3. *Switch, requests in generation.* Under `kv_cache_on_weight_update = keep` they keep their blocks, and all further KV
   depends on both policies. Their hash chain is broken: their later blocks are cached under unique hashes. Under
   `recompute` they return their blocks, as in a preemption: prompt and sampled tokens are prefilled again by the new
   weights, under the new salt.

Each slot has its own hash, by the number of its adapter, and its switch changes its own requests only.

By induction over steps, an entry under salt h contains only KV of weights h, also when h is loaded again later.

A canary is a request of the server, with 64 tokens and one step. It has priority over waiting requests; if there is no
free seat or block, the youngest running request is preempted. Otherwise a check of the weights would take as long as
the longest rollout.
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

from prime_rl.inference.policy.engine_group import CANARY_PREFIX, replace_hash
from prime_rl.inference.policy.weight_checks import POLICY_ADAPTER
from prime_rl.inference.vllm import patches


class SyncPolicyScheduler(Scheduler):
    """vLLM's scheduler with a prefix cache that is separated by policy."""

    last_pause_seconds = 0.0
    _paused_at = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.versions: dict[int, str] = {}  # of the slots, by number, for the tags of tokens
        self._hashes = {POLICY_ADAPTER: ""}
        self._canaries: list[Request] = []  # that wait; one of each slot may

    def switch_policy(self, content_hash: str, recompute: bool = False, number: int = POLICY_ADAPTER) -> None:
        """Use the salt of a slot's loaded policy. Must be called during a pause, after the last step was processed.

        With `recompute`, its requests in flight are prefilled again. Requests of other slots continue unchanged. A new
        number needs no pause.
        """
        if content_hash == self._hashes.get(number):
            return
        self._hashes[number] = content_hash
        running = [request for request in self.running if self._slot_of(request) == number]
        self._preempt([request for request in running if recompute or not request.num_output_tokens])
        for request in self.requests_of(number):
            if request.num_computed_tokens:
                self._break_chain(request)
        if number == POLICY_ADAPTER:
            # The workers dropped the old weights' image embeddings when they loaded; the scheduler's list must agree.
            self.reset_encoder_cache()

    def hash_of(self, number: int) -> str:
        """Salt of the slot `number`."""
        return self._hashes[number]

    def forget_adapter(self, number: int) -> None:
        """Remove an adapter without requests."""
        self._hashes.pop(number, None)
        self.versions.pop(number, None)

    def requests_of(self, number: int) -> list[Request]:
        """Return the unfinished requests that sample from the slot `number`."""
        return [request for request in self.requests.values() if self._slot_of(request) == number]

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause or resume, and measure the pause."""
        super().set_pause_state(pause_state)
        if pause_state == PauseState.UNPAUSED:
            self.last_pause_seconds = time.monotonic() - self._paused_at
        else:
            self._paused_at = time.monotonic()

    def add_request(self, request: Request) -> None:
        """Queue a request; a canary goes to the head of the queue."""
        super().add_request(request)
        if request.request_id.startswith(CANARY_PREFIX):
            self._canaries.append(request)
            self.waiting.remove_request(request)
            self.waiting.prepend_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule the next step, with a waiting canary if its tokens fit."""
        if self._canaries and self._pause_state == PauseState.UNPAUSED:
            self._seat(self._canaries[0])
        scheduled = super().schedule(*args, **kwargs)
        self._canaries = [canary for canary in self._canaries if canary.status == RequestStatus.WAITING]
        return scheduled

    def _seat(self, canary: Request) -> None:
        """Preempt the youngest running requests if there is no seat or block for a waiting canary."""
        if canary.status != RequestStatus.WAITING:
            return
        blocks = (canary.num_tokens // self.block_size + 1) * len(self.kv_cache_config.kv_cache_groups)
        pool = self.kv_cache_manager.block_pool
        rollouts = [request for request in self.running if not request.request_id.startswith(CANARY_PREFIX)]
        if self.aux_output_connector is not None and self.scheduler_config.async_scheduling:
            rollouts = []  # steps in flight still record the routes of these requests
        while rollouts and (
            len(self.running) >= self.max_num_active_reqs or pool.get_num_free_blocks() < len(self.running) + blocks
        ):
            self._preempt([rollouts.pop()])
        self.waiting.remove_request(canary)
        self.waiting.prepend_request(canary)

    def _get_local_prefix_cache_hit(self, request: Request) -> tuple[KVCacheBlocks, int, int, bool]:
        """Set the salt of the loaded weights, then look up the request."""
        salt = replace_hash(self._hashes[self._slot_of(request)], request.cache_salt)
        if salt != request.cache_salt:
            request.cache_salt = salt
            request.block_hashes.clear()
            request.update_block_hashes()
        return super()._get_local_prefix_cache_hit(request)

    def _slot_of(self, request: Request) -> int:
        number = POLICY_ADAPTER if request.lora_request is None else request.lora_request.lora_int_id
        return number if number in self._hashes else POLICY_ADAPTER

    def _preempt(self, requests: list[Request]) -> None:
        """Return running requests to the head of the queue, as vLLM does when it has no free blocks."""
        for request in reversed(requests):
            self.running.remove(request)
            self._preempt_request(request, time.monotonic())
            # If it resumes in the next step, the worker needs the complete request.
            self.prev_step_scheduled_req_ids.discard(request.request_id)
            if (routes := self.aux_output_connector) and request.request_id in routes._finished_requests:
                # Else the last hash of the request that ends would replace those of the same request that starts again.
                routes._finished_requests[request.request_id] = None

    def _break_chain(self, request: Request) -> None:
        """Make the hashes of all blocks that are not cached yet unique."""
        unique = secrets.token_hex(16)
        # Differs from every salt of the server, so the lookup after a preemption replaces it.
        request.cache_salt = replace_hash(f"mixed-{unique}", request.cache_salt)
        cached = request.num_computed_tokens // self.hash_block_size
        del request.block_hashes[cached:]
        if cached:
            # Each hash includes its predecessor. This one is cached already and is not read again.
            request.block_hashes[-1] = BlockHash(unique.encode())
        request.update_block_hashes()


class AsyncPolicyScheduler(SyncPolicyScheduler, AsyncScheduler):
    """The scheduler for asynchronous scheduling, which vLLM uses on GPUs."""


def make_scheduler(vllm_config: VllmConfig, **kwargs: Any) -> SyncPolicyScheduler:
    """Make the engine's scheduler; vLLM calls this (`scheduler_cls`) at the start of each engine process."""
    patches.keep_log_file()
    patches.die_with_parent()
    patches.add_switch_utility()
    scheduler = AsyncPolicyScheduler if vllm_config.scheduler_config.async_scheduling else SyncPolicyScheduler
    return scheduler(vllm_config=vllm_config, **kwargs)
