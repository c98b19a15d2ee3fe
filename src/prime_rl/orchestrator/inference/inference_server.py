"""One inference server: the settings that it must have, its version, whether it is up, and how much it may sample."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from loguru import logger
from prometheus_client.parser import text_string_to_metric_families

from prime_rl.configs.concurrency import ConcurrencyConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.core.types import PolicyVersion
from prime_rl.liveness.heartbeat_limits import HeartbeatLimits
from prime_rl.liveness.heartbeat_monitor import LivenessTracker, read_heartbeat, read_kernel_state
from prime_rl.liveness.run_settings import (
    ADAPTER_RANK,
    PUBLISHED_DTYPE,
    RECORDS_ROUTES,
    REPLAYS_ROUTES,
    SAMPLED_LENGTH,
    ProcessSettings,
    RunSettings,
    find_difference,
)
from prime_rl.orchestrator.inference.weight_versions import InvalidWeights, PublishedVersion
from prime_rl.orchestrator.waits import deadline_scope
from prime_rl.rollouts.clients.inference_client import (
    InferenceClient,
    InferenceError,
    InferenceServerLost,
    LoadedVersion,
)
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.wait_for import run_in_daemon_thread

_PROBE_SECONDS = 0.25
_FIRST_BACKOFF_SECONDS = 0.05
_LONGEST_BACKOFF_SECONDS = 2.0
"""The back-off doubles with each failure, from the first to the longest."""
_INVALID_WEIGHTS = (400, 422)
"""Status of invalid weights: they differ from what was published, or have a wrong canary."""
SERVER_ERRORS = (InferenceServerLost, InferenceError)
Answer = TypeVar("Answer")
FindProblem = Callable[[str, RunSettings], str | None]
"""Returns why the server at a URL, with some settings, cannot be used: `RequiredSettings.find_problem`."""


def accept_all(url: str, settings: RunSettings) -> None:
    """Accept a server with any settings."""


def may_recover(error: object) -> bool:
    """Return whether a server is lost or failed; it may be restarted."""
    return isinstance(error, InferenceServerLost) or (isinstance(error, InferenceError) and error.is_server_fault)


@contextmanager
def warn_of_failure(what: str) -> Iterator[None]:
    """Log a failed request instead of raising."""
    try:
        yield
    except SERVER_ERRORS as error:
        logger.warning("{}: {}", what, error)


_TRAINER = "trainer_0"
"""All ranks have the same settings."""
_POLL_SECONDS = 1.0


class UnfitServer(ConfigError):
    """The settings of a server do not fit those of the run; the message has places, values and cure."""


class RequiredSettings:
    """Settings that every inference server must match: the orchestrator's, and those of the running trainer.

    A server reports its own with each answer to `GET /policy`, so they are compared before it is leased, and again when
    it returns after a restart. The trainer's are in its heartbeat, which a relay copies as well. Nothing is compared
    with a heartbeat of a server, which may be of another run.
    """

    def __init__(self, model: str, seq_len: int, paths: RunPaths, limits: HeartbeatLimits) -> None:
        """Know the orchestrator's settings: the model as it is named in requests, and the longest sample in tokens."""
        own: RunSettings = {"model.name": model, SAMPLED_LENGTH: seq_len}
        self._orchestrator, self._trainer = ProcessSettings("here", own), ProcessSettings("", {})
        self._file = paths.heartbeat(_TRAINER)
        self._tracker = LivenessTracker(_TRAINER, limits)

    def find_problem(self, url: str, settings: RunSettings) -> str | None:
        """Return why the server at `url` cannot be used with these settings of it; None if it can."""
        server = ProcessSettings(f"at {url}", settings)
        return find_difference(self._orchestrator, server) or find_difference(self._trainer, server)

    @property
    def knows_trainer(self) -> bool:
        """Whether the trainer has been seen alive."""
        return bool(self._trainer.values)

    @property
    def publishes_adapters(self) -> bool:
        """Whether the trainer is known, and publishes adapters alone."""
        return bool(self._trainer.values.get(ADAPTER_RANK))

    def read_trainer(self) -> None:
        """Read the settings of the trainer, if it has been seen alive and has not ended. Blocks."""
        if (beat := read_heartbeat(self._file)) is None:
            return
        report = self._tracker.observe(beat, time.monotonic(), read_kernel_state(beat))
        is_known = report.seen_alive and not report.has_exited
        keys = (PUBLISHED_DTYPE, ADAPTER_RANK, REPLAYS_ROUTES)
        values = {key: beat.settings[key] for key in keys if key in beat.settings}
        self._trainer = ProcessSettings(f"at {beat}", values if is_known else {})

    async def follow_trainer(self) -> None:
        """Read the settings of the trainer every second, until cancelled."""
        while True:
            await run_in_daemon_thread(self.read_trainer)
            await asyncio.sleep(_POLL_SECONDS)


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
_DRAFTS = "vllm:spec_decode_num_drafts"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """The load of a server, summed over its engines: requests in the batch, waiting, and preempted since its start.

    `kv_usage` is the largest share of a KV cache in use, 0 to 1; `kv_tokens` the capacity in tokens, if reported;
    `accepted_per_draft` the draft tokens that were accepted per draft of speculative decoding, if there were any.
    """

    running: int
    waiting: int
    kv_usage: float
    preemptions: int
    kv_tokens: int | None = None
    accepted_per_draft: float | None = None


def parse_load(text: str) -> ServerLoad | None:
    """Parse vLLM's /metrics page; None if a metric is missing."""
    wanted = (_RUNNING, _WAITING, _KV_USAGE, _PREEMPTIONS, _CACHE, _DRAFTS, _ACCEPTED)
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
        accepted_per_draft=sum(values[_ACCEPTED]) / drafts if (drafts := sum(values.get(_DRAFTS, ()))) else None,
    )


def load_metrics(loads: Sequence[ServerLoad]) -> dict[str, float]:
    """Return the metrics of the servers that were read; {} if there are none."""
    if not loads:
        return {}
    accepted = [load.accepted_per_draft for load in loads if load.accepted_per_draft is not None]
    return {
        **({"inference/accepted_per_draft": sum(accepted) / len(accepted)} if accepted else {}),
        "inference/kv_usage/mean": sum(load.kv_usage for load in loads) / len(loads),
        "inference/kv_usage/max": max(load.kv_usage for load in loads),
        "inference/requests_running": sum(load.running for load in loads),
        "inference/requests_waiting": sum(load.waiting for load in loads),
        "inference/preemptions": sum(load.preemptions for load in loads),
    }


class ConcurrencyController:
    """Multiplicative control of the rollouts in flight at one server, by its /metrics.

    There should be enough to keep it busy, but not more than its KV cache holds. Rollouts that queue at a server lose
    slack, because a group's deadline counts from its dispatch. A full KV cache makes the engine preempt requests and
    compute them again.

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


class InferenceServer:
    """One inference server. It starts as down; `InferencePool.start` brings it up.

    Attributes:
        client: the admin connection; rollouts use other connections, so a switch never queues behind them.
        version: the last version that it acknowledged.
        up: it receives rollouts.
        in_flight: rollouts that it samples; limited by `controller`.
        loading: step of the version that it is switching to; `switch_lock` is held meanwhile.
        rejected_step: step of a version that only this server rejects; it stays out until a newer one is published.
        failed_switches: consecutive switches that failed.
        last_load: the last reading of its /metrics, if any.
    """

    def __init__(
        self,
        client: InferenceClient,
        controller: ConcurrencyController,
        find_problem: FindProblem = accept_all,
    ) -> None:
        self.client = client
        self.controller = controller
        self._find_problem = find_problem
        self._settings: RunSettings = {}  # those that fitted
        self._refusal = ""  # that was logged last
        self.version = PolicyVersion(0, 0)
        self.up = False
        self.in_flight = 0
        self.loading: int | None = None
        self.rejected_step: int | None = None
        self.switch_lock = asyncio.Lock()
        self.failed_switches = 0
        self.last_load: ServerLoad | None = None
        self._faults = 0
        self.backoff_until = 0.0
        """End of the last back-off, by `time.monotonic`."""
        self._scopes = set[asyncio.Timeout]()

    @property
    def records_routes(self) -> bool:
        """Whether it records the experts of each token (`enable_return_routed_experts`), as far as it is known."""
        return bool(self._settings.get(RECORDS_ROUTES))

    async def policy(self) -> LoadedVersion:
        """Return what it samples from, and renew the lease if this run holds it.

        Raises:
            UnfitServer: its settings do not fit those of the run.
            ConfigError: the settings of a trainer that has started since do not fit those of this server.
            InferenceServerLost, InferenceError: as `InferenceClient.policy`.
        """
        loaded = await self.client.policy()
        problem = self._find_problem(self.client.url, loaded.settings)
        if problem is None:
            self._settings, self._refusal = loaded.settings, ""
            return loaded
        raise (ConfigError if self.up and loaded.settings == self._settings else UnfitServer)(problem)

    def log_refusal(self, error: UnfitServer) -> None:
        """Log once why it is not used."""
        if str(error) != self._refusal:
            self._refusal = str(error)
            logger.warning("inference at {} is not used: {}", self.client.url, error)

    @asynccontextmanager
    async def cancel_scope(self) -> AsyncIterator[None]:
        """Raise InferenceServerLost from the block when `cancel_all` is called.

        Connections alone are not enough: that to a machine without power stays open until its own timeout.
        """
        async with deadline_scope(lambda: InferenceServerLost(f"inference at {self.client.url} died")) as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)

    def cancel_all(self) -> None:
        """End all blocks inside `cancel_scope`."""
        now = asyncio.get_running_loop().time()
        scopes, self._scopes = self._scopes, set()
        for scope in scopes:
            scope.reschedule(now)

    @property
    def backoff_seconds(self) -> float:
        """Remaining seconds without new rollouts after a failure; a server that fails fast would otherwise get all."""
        return max(0.0, self.backoff_until - time.monotonic())

    def failed(self) -> None:
        """Start a back-off."""
        backoff_seconds = min(_FIRST_BACKOFF_SECONDS * 2.0 ** min(self._faults, 16), _LONGEST_BACKOFF_SECONDS)
        self._faults += 1
        self.backoff_until = time.monotonic() + backoff_seconds

    def succeeded(self) -> None:
        """Reset the back-off after a finished group."""
        self._faults, self.backoff_until = 0, 0.0

    def has_capacity(self, rollouts: int) -> bool:
        """Return whether it can take `rollouts` more; an idle server always can."""
        return self.in_flight == 0 or self.in_flight + rollouts <= self.controller.limit

    async def wait_until_reachable(self, timeout_seconds: float) -> None:
        """Poll until the server answers; raise RunError after `timeout_seconds` seconds, and otherwise as `policy`."""
        deadline = time.monotonic() + timeout_seconds
        logger.info("waiting for inference at {}", self.client.url)
        reason = ""
        while True:
            try:
                await self.policy()
                return
            except SERVER_ERRORS as error:
                if not may_recover(error):
                    raise
                if str(error) != reason:  # a name that nothing resolves looks like a server that starts
                    reason = str(error)
                    logger.info("{}; waiting", reason)
                if time.monotonic() > deadline:
                    raise RunError(f"{error}; waited {timeout_seconds:.0f} s for it to start") from None
            await asyncio.sleep(_PROBE_SECONDS)

    async def stage(self, published: PublishedVersion) -> None:
        """Have the server read and check a version while it samples; raise InvalidWeights, or SERVER_ERRORS.

        Raises ConfigError if the settings of the trainer do not fit those of this server.
        """
        if (problem := self._find_problem(self.client.url, self._settings)) is not None:
            raise ConfigError(problem)
        async with self.cancel_scope():
            await self._request(self.client.stage, published)

    async def load(self, published: PublishedVersion) -> LoadedVersion:
        """Switch to a version; the caller holds `switch_lock`.

        Raises as `stage`, InvalidWeights also after a wrong canary, and RunError if the server reports another version.
        """
        self.loading = published.version.step
        try:
            loaded = await self._request(self.client.load, published)
        finally:
            self.loading = None
        if loaded.version != published.version or loaded.hash != published.hash:
            raise RunError(
                f"inference at {self.client.url} loaded {loaded.version} ({loaded.hash}) but {published.directory} "
                f"holds {published.version} ({published.hash})"
            )
        self.version = published.version
        return loaded

    async def switch(self, published: PublishedVersion) -> LoadedVersion | None:
        """Switch to a version, as `load`; None if the server was taken out meanwhile."""
        if not self.up:  # the lock may be held while it waits for a slot
            return None
        async with self.switch_lock:
            if not self.up or self.version.step > published.version.step:
                return None
            async with self.cancel_scope():
                return await self.load(published)

    async def _request(
        self, request: Callable[[str, PolicyVersion], Awaitable[Answer]], published: PublishedVersion
    ) -> Answer:
        """Make a request about a version, and turn the server's answer to invalid weights into InvalidWeights."""
        directory = await run_in_daemon_thread(published.directory.resolve)
        try:
            return await request(str(directory), published.version)
        except InferenceError as error:
            raise (InvalidWeights(str(error)) if error.status in _INVALID_WEIGHTS else error) from None


async def first_reachable(
    servers: Sequence[InferenceServer], timeout_seconds: float, minimum: int
) -> list[InferenceServer]:
    """Wait until `minimum` servers answer; return those that do, or all after the timeout."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        answers = await asyncio.gather(*(server.policy() for server in servers), return_exceptions=True)
        answered = list(zip(servers, answers, strict=True))
        candidates = [server for server, answer in answered if isinstance(answer, LoadedVersion)]
        unfit = [(server, answer) for server, answer in answered if isinstance(answer, UnfitServer)]
        for server, refusal in unfit:
            if len(servers) - len(unfit) < minimum:
                raise refusal
            server.log_refusal(refusal)
        if len(candidates) >= minimum:
            for server, answer in answered:
                if not isinstance(answer, LoadedVersion | UnfitServer):
                    logger.warning("inference at {} does not answer; starting without it", server.client.url)
            return candidates
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, UnfitServer) and not may_recover(answer):
                raise answer
        await asyncio.sleep(_PROBE_SECONDS)
    return list(servers)
