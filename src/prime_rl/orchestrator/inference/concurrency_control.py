"""Limits the rollouts of one server by its /metrics: enough to keep it busy, no more than its KV cache holds.

Rollouts that queue at a server lose slack, because a group's deadline counts from its dispatch. A full KV cache makes
the engine preempt requests and compute them again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from prime_rl.configs.rollouts.options import ConcurrencyConfig

_GROWTH = 1.25
_TRIM = 0.9
_TRIM_PREEMPTED = 0.8
_KV_GROW_BELOW = 0.6
_KV_FULL = 0.9
_QUEUE = 0.5
"""Waiting requests relative to running ones; more is a queue."""
_NUM_QUEUED_READINGS = 3
"""Consecutive readings that must show a queue: a burst of dispatches queues for a moment in any server."""

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USAGE = "vllm:kv_cache_usage_perc"
_PREEMPTIONS = "vllm:num_preemptions"
_CACHE = "vllm:cache_config_info"


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """The load of a server, summed over its engines: requests in the batch, waiting, and preempted since its start.

    `kv_usage` is the largest share of a KV cache in use, 0 to 1; `kv_tokens` the capacity in tokens, if reported.
    """

    running: int
    waiting: int
    kv_usage: float
    preemptions: int
    kv_tokens: int | None = None


def parse_load(text: str) -> ServerLoad | None:
    """Parse vLLM's /metrics page; None if a metric is missing."""
    wanted = (_RUNNING, _WAITING, _KV_USAGE, _PREEMPTIONS, _CACHE)
    lines = [line for line in text.splitlines() if line.startswith(wanted)]
    samples = [s for family in text_string_to_metric_families("\n".join(lines) + "\n") for s in family.samples]
    values: dict[str, list[float]] = {}
    kv_tokens = None
    for sample in samples:
        values.setdefault(sample.name.removesuffix("_total"), []).append(sample.value)
        if sample.name == _CACHE:
            blocks, size = sample.labels.get("num_gpu_blocks", ""), sample.labels.get("block_size", "")
            if blocks.isdigit() and size.isdigit():
                kv_tokens = (kv_tokens or 0) + int(blocks) * int(size)
    if not {_RUNNING, _WAITING, _KV_USAGE, _PREEMPTIONS} <= values.keys():
        return None
    return ServerLoad(
        running=int(sum(values[_RUNNING])),
        waiting=int(sum(values[_WAITING])),
        kv_usage=max(values[_KV_USAGE]),
        preemptions=int(sum(values[_PREEMPTIONS])),
        kv_tokens=kv_tokens,
    )


def load_metrics(loads: Sequence[ServerLoad]) -> dict[str, float]:
    """Return the metrics of the servers that were read; {} if there are none."""
    if not loads:
        return {}
    return {
        "inference/kv_usage/mean": sum(load.kv_usage for load in loads) / len(loads),
        "inference/kv_usage/max": max(load.kv_usage for load in loads),
        "inference/requests_running": sum(load.running for load in loads),
        "inference/requests_waiting": sum(load.waiting for load in loads),
        "inference/preemptions": sum(load.preemptions for load in loads),
    }


class ConcurrencyController:
    """Multiplicative control of one server's limit.

    grow    at least 90 % of the limit is in flight, nothing waits, the KV cache is below 60 %
    trim    to 80 % of what is in flight after preemptions; to 90 % if the KV cache is above 90 %, or if three
            consecutive readings show a queue of more than half of the running requests
    """

    def __init__(self, config: ConcurrencyConfig, seq_len: int) -> None:
        """Start with `config.initial`, or no limit until the first reading.

        `seq_len`, the longest sample in tokens, is the largest share of the KV cache that a rollout takes.
        """
        self.limit: float = float("inf") if config.initial is None else config.initial
        self._config = config
        self._seq_len = seq_len
        self._preemptions: int | None = None
        self._queued = 0

    def observe(self, load: ServerLoad, in_flight: int) -> None:
        """Update the limit from a reading taken while `in_flight` rollouts were at the server."""
        if self.limit == float("inf") and load.kv_tokens is not None:
            self.limit = self._clamp(load.kv_tokens // self._seq_len)
        preempted = self._preemptions is not None and load.preemptions > self._preemptions
        self._preemptions = load.preemptions
        self._queued = self._queued + 1 if load.waiting > _QUEUE * max(load.running, 1) else 0
        used = min(self.limit, in_flight)
        if preempted:
            self.limit = self._clamp(_TRIM_PREEMPTED * used)
        elif load.kv_usage > _KV_FULL or self._queued >= _NUM_QUEUED_READINGS:
            self.limit = self._clamp(_TRIM * used)
            self._queued = 0
        elif load.kv_usage < _KV_GROW_BELOW and not load.waiting and in_flight >= 0.9 * self.limit:
            self.limit = self._clamp(_GROWTH * self.limit + 1)

    def _clamp(self, limit: float) -> float:
        return float(max(self._config.min, min(limit, self._config.max)))
