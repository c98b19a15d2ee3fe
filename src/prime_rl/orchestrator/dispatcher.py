"""Samples groups: chooses server and position, retries after a failure, and keeps or drops what was sampled."""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from loguru import logger

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.core.errors import RunError
from prime_rl.core.types import Group, Rollout
from prime_rl.orchestrator.example_stream import DrawnExample
from prime_rl.orchestrator.group_filter import (
    LONGEST_PAUSE_SECONDS,
    OVERLONG,
    DropAction,
    DropPolicy,
    DropReason,
    GroupFilter,
    StartLimits,
    is_overlong,
)
from prime_rl.orchestrator.inference.inference_pool import InferencePool
from prime_rl.orchestrator.inference.inference_server import InferenceServer
from prime_rl.orchestrator.ledger.ledger import Ledger
from prime_rl.orchestrator.run_reports import RunCounters, RunWarnings
from prime_rl.orchestrator.scheduler import DeadlineScheduler, DurationHistory, Lookahead
from prime_rl.orchestrator.waits import deadline_scope
from prime_rl.rollouts.clients.inference_client import InferenceError, InferenceServerLost, sampling_parameters
from prime_rl.rollouts.group_attempts import EnvironmentFailed, SampleTooLong
from prime_rl.rollouts.workers.environment_pool import EnvironmentPool

RESAMPLED = "resampled"
"""Drop reason of a finished group that does not fit the settings after a restart; its position is sampled again."""

ENGINE = "error/engine"
"""Drop reason of a group that reachable servers repeatedly failed to sample."""

_MAX_LOST_SERVERS = 10
"""A group that loses more servers than this ends the run."""
_MAX_SERVER_FAULTS = 2
"""A group that meets more server failures than this is dropped."""

_MISCONFIGURED = (401, 403, 404)
"""Status of an error that every request gets: a wrong key, a wrong model name."""

_REPORTED_WAIT_SECONDS = 60.0
"""A batch that waits for so long for a group is reported."""
_LATE = 5
"""A group is late if it takes so many times as long as expected."""
_UNKNOWN_DURATION_SECONDS = 300.0
"""The same for a group of an environment of which no group has ended yet."""

_REMEDY = "env.min_rollouts trains on groups of which some rollouts failed"
_REWARD_REMEDY = ', env.reward_errors = "zero" counts a failed reward as 0'


@dataclass(slots=True)
class _RunningGroup:
    """A group that an environment runs; `started` and `scoring_since` are of `time.monotonic`."""

    draw: DrawnExample
    started: float
    scope: asyncio.Timeout
    scoring_since: float | None = None

    def starts_scoring(self) -> None:
        self.scoring_since = time.monotonic()


@dataclass(frozen=True, slots=True)
class _Dropped:
    """The group is not trained on; it is None if it was not sampled completely."""

    reason: DropReason
    group: Group | None = None


@dataclass(frozen=True, slots=True)
class _Failed:
    """The group ended with an error, which is counted as `reason`."""

    reason: str
    why: str


@dataclass(frozen=True, slots=True)
class _Retry:
    """The group starts again on another server."""

    why: str


_Outcome = Group | _Dropped | _Failed | _Retry
"""What becomes of a group: a `Group` is trained on."""


class Dispatcher:
    """Starts groups within the staleness bound and runs each until it is kept or dropped (I1, I2).

    Each transition of a group is recorded in the scheduler, the ledger (I3) and the counters.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        pools: Sequence[EnvironmentPool],
        inference: InferencePool,
        scheduler: DeadlineScheduler,
        ledger: Ledger,
        counters: RunCounters,
        on_end: Callable[[], None],
        warnings: RunWarnings,
    ) -> None:
        """Connect the parts; `on_end` is called when a group ends."""
        self.complete: dict[int, Group] = {}
        """Finished groups by group_id that wait to be shipped."""
        self.filled: set[int] = set()
        """Those of them with zero advantages, which fill the batch."""
        self._warnings = warnings
        self._config = config
        self._pools = pools
        self._samplings = [env.sampling_with(config.sampling) for env in config.env]
        self._index = {pool.name: index for index, pool in enumerate(pools)}
        self._inference = inference
        self._scheduler = scheduler
        self._ledger = ledger
        self._counters = counters
        self._on_end = on_end
        self._filter = GroupFilter(config)
        self._drops = DropPolicy(
            scheduler.batch_groups, config.oversampling_factor, len(pools), config.failing_env_seconds,
            min(LONGEST_PAUSE_SECONDS, config.wait_timeout_seconds / 2), config.failing_at_start_seconds,
        )  # fmt: skip
        for health in self._drops.health:
            health.has_succeeded = scheduler.next_step > 0
        self._limits = StartLimits(config)
        self.history = DurationHistory()
        self._lookahead = Lookahead(
            lambda: ledger.draw(self._may_start),
            lambda draw: self.history.expected(pools[draw.env].name, draw.example),
            config.length_aware_admission * scheduler.batch_groups if config.async_level else 0,
            (config.max_steps or math.inf) * scheduler.batch_groups,
        )
        self._redispatched: deque[DrawnExample] = deque()
        self._running: dict[int, _RunningGroup] = {}
        self._ended = [0] * len(pools)
        self._num_failed = [0] * len(pools)
        self._reported_wait: int | None = None
        self._failed = False

    def restore(self, finished: Iterable[Group], history: Mapping[str, Any]) -> None:
        """Restore the state of an earlier process, whose positions are those of the ledger.

        Its `finished` groups that fit the current settings become `complete`; the positions of the others are
        dispatched again. `history` is a `DurationHistory.state`.
        """
        self.history.restore(history)
        positions, misfits = self._ledger.positions, Counter[str]()
        started = [(positions.open[group.group_id].version or 0, group) for group in finished]
        for version, group in sorted(started, key=lambda entry: (entry[0], entry[1].group_id)):
            self._counters.restored(group)
            if misfit := self._find_misfit(group, version):
                misfits[misfit] += 1
                self._counters.discarded(RESAMPLED, group)
                positions.reopen(group.group_id)
                continue
            self.complete[group.group_id] = group
            self._scheduler.restore(group.group_id, version)
            if positions.open[group.group_id].done is None:  # from a checkpoint: the new ledger does not have it yet
                self._ledger.done(group)
        for misfit, count in misfits.items():
            logger.warning("{} finished groups are sampled again, since the settings changed: {}", count, misfit)
        self._redispatched.extend(positions.unfinished)
        self._lookahead.restore(positions.waiting)

    def _find_misfit(self, group: Group, version: int) -> str | None:
        """Return why a restored group cannot be shipped with the current settings; None if it can."""
        env, seq_len = self._index[group.env], self._config.seq_len
        count = self._limits.counts[env]
        min_rollouts = self._config.env[env].min_rollouts or count
        if not min_rollouts <= len(group.rollouts) <= count:
            return f"they do not have rollouts_per_example = {count} rollouts"
        if is_overlong(group.rollouts, seq_len):
            return f"they do not fit into seq_len = {seq_len}"
        if not self._scheduler.can_restore(version):
            return f"no batch from {self._scheduler.next_step} on can take them within the staleness bound"
        return None

    def resample_without_routes(self) -> None:
        """Sample restored groups again that have no routed experts, if the servers, which are up now, record them."""
        lacking = [
            group
            for group in self.complete.values()
            if any(sample.routes is None for rollout in group.rollouts for sample in rollout.samples)
        ]
        if not lacking or not self._inference.records_routes:
            return
        logger.warning("{} finished groups are sampled again: they have no routed experts", len(lacking))
        for group in lacking:
            self._counters.discarded(RESAMPLED, group)
            del self.complete[group.group_id]
            self._scheduler.drop(group.group_id)
            self._ledger.positions.reopen(group.group_id)
            self._redispatched.append(self._ledger.positions.open[group.group_id].draw)

    def admit(self, tasks: asyncio.TaskGroup) -> int:
        """Start groups as long as the staleness bound and the servers allow it; return how many."""
        num_started = 0
        if self._config.oversampling_factor > 1:
            self._scheduler.credit = self._drops.credit(self._scheduler.in_flight)
        environments = range(len(self._pools))
        while not self._failed and any(map(self._may_start, environments)) and (server := self._find_server()):
            draw = self._next_position()
            self._drops.health[draw.env].started(draw.group_id)
            self._limits.started(draw.env)
            deadline = self._scheduler.admit(draw.group_id, server.version.step)
            self._assign(draw, server, deadline)
            tasks.create_task(self._run_group(draw, server, time.monotonic()))
            num_started += 1
        return num_started

    def find_pauses(self, now: float) -> dict[str, float]:
        """Return what keeps groups from starting until a time after `now`, with that time, by `time.monotonic`.

        Take `now` before `admit`, and call `admit` again at the earliest of these times: a pause that ends in between
        is still returned, so that none is missed.
        """
        ends = dict[str, float]()
        for env, pool in enumerate(self._pools):
            ends[f"the pause that env.max_rollouts_per_minute makes at {pool.name}"] = self._limits.next_start[env]
            ends[f"the pause of environment {pool.name}, which fails"] = self._drops.health[env].paused_until
        for server in self._inference.servers:
            ends[f"the pause of server {server.client.url}, which failed"] = server.backoff_until
        return {what: end for what, end in ends.items() if end > now}

    def shipped(self, group_ids: Sequence[int]) -> None:
        """Start the next batch, after one with these groups."""
        self._drops.start_batch()
        self.filled.difference_update(group_ids)

    def end_stuck(self, timeout_seconds: float) -> bool:
        """End the groups that have been running for `timeout_seconds` seconds; return whether there were any (I7)."""
        now, soon = time.monotonic(), asyncio.get_running_loop().time()
        stuck = [group.scope for group in self._running.values() if now - group.started >= timeout_seconds]
        for scope in stuck:
            scope.reschedule(soon)
        return bool(stuck)

    def report_wait(self, waited_seconds: float) -> None:
        """Warn about the group that holds up the next batch, if no group has ended for a minute."""
        late = (
            [] if waited_seconds < _REPORTED_WAIT_SECONDS else [g for g in self._running.values() if self._is_late(g)]
        )
        if not late:
            return
        group = min(late, key=lambda group: (self._scheduler.deadline(group.draw.group_id), group.started))
        draw, now = group.draw, time.monotonic()
        if draw.group_id == self._reported_wait:
            return
        self._reported_wait = draw.group_id
        config, env = self._config.env[draw.env], self._pools[draw.env].name
        activity, key = f"running for {now - group.started:.0f} s", "timeout_seconds"
        if group.scoring_since is not None:
            activity, key = f"scoring for {now - group.scoring_since:.0f} s", config.scoring_limit[1]
        limit = getattr(config, key)
        text = (
            f"batch {self._scheduler.next_step} waits for group {draw.group_id} (example {draw.example} of {env}): "
            f"{activity}; env.{key} = {'unlimited' if limit is None else format(limit, 'g')}"
        )
        logger.warning("{}", text)
        self._warnings.add("wait", env, lambda count: text if count == 1 else f"{text} (wait number {count})")

    def _is_late(self, group: "_RunningGroup") -> bool:
        """Return whether a group scores for a minute, or runs for longer than the model is likely to sample."""
        now, usual = time.monotonic(), self.history.expected(self._pools[group.draw.env].name, group.draw.example)
        if group.scoring_since is not None:
            return now - group.scoring_since >= _REPORTED_WAIT_SECONDS
        least = _UNKNOWN_DURATION_SECONDS if usual is None else _LATE * usual
        return now - group.started >= max(_REPORTED_WAIT_SECONDS, least)

    def metrics(self) -> dict[str, float | None]:
        """Return for how many seconds each environment has been failing, and the limit of the rollouts in flight."""
        healths = zip(self._pools, self._drops.health, strict=True)
        limit = self._config.max_concurrent or self._inference.concurrency_limit
        return {
            **{f"failing_seconds/{pool.name}": health.failing_seconds for pool, health in healths},
            "groups/ended": sum(self._ended),
            "groups/failed": sum(self._num_failed),
            "inference/concurrency_limit": limit,
        }

    def _may_start(self, env: int) -> bool:
        return self._drops.may_start(env) and self._limits.may_start(env)

    def _next_position(self) -> DrawnExample:
        """Take the next position: first those that were dispatched before a restart, then those of the lookahead."""
        may_start = [self._may_start(env) for env in range(len(self._pools))]
        draw = next((draw for draw in self._redispatched if may_start[draw.env]), None)
        if draw is None:
            return self._lookahead.next(self._scheduler.placed, lambda draw: may_start[draw.env])
        self._redispatched.remove(draw)
        return draw

    def _find_server(self) -> InferenceServer | None:
        """Return the least loaded server for which the staleness bound admits a group; None if there is none now."""
        count, limit = max(self._limits.counts), self._config.max_concurrent
        if limit is not None and sum(self._limits.in_flight) + count > max(limit, count):
            return None
        servers = self._inference.available_servers(count)
        return next((server for server in servers if self._scheduler.can_admit(server.version.step)), None)

    def _assign(self, draw: DrawnExample, server: InferenceServer, deadline: int) -> None:
        self._ledger.issued(draw.group_id, server.version.step, deadline)
        server.in_flight += self._limits.counts[draw.env]

    async def _run_group(self, draw: DrawnExample, server: InferenceServer, started: float) -> None:
        """Sample one group until it ends. If its server is lost or fails, it starts again on another server."""
        failures: list[InferenceError | InferenceServerLost] = []
        try:
            while isinstance(outcome := await self._attempt(draw, server, started, failures), _Retry):
                self._counters.retried += 1
                logger.warning("group {} is sampled again: {}", draw.group_id, outcome.why)
                server = await self._inference.wait_for_server(self._scheduler.version(draw.group_id))
                started = time.monotonic()
                self._assign(draw, server, self._scheduler.repin(draw.group_id, server.version.step))
            match outcome:
                case Group():
                    self._drops.record_kept(draw.env)
                    self._keep(outcome)
                case _Dropped(reason, group):
                    self._drop(draw.group_id, draw.env, reason, group)
                case _Failed(name, why):
                    self._fail(draw, name, why)
        except BaseException:
            self._failed = True  # the loop may run once more before the task group ends; it must not start groups
            raise
        finally:
            self._limits.ended(draw.env)
            self._on_end()

    async def _attempt(
        self,
        draw: DrawnExample,
        server: InferenceServer,
        started: float,
        failures: list[InferenceError | InferenceServerLost],
    ) -> _Outcome:
        """Sample one group on one server; `failures` are those of servers at this group, to which it adds its own."""
        try:
            async with server.cancel_scope():
                outcome = await self._sample(draw, server, started)
            server.succeeded()
            return outcome
        except (InferenceError, InferenceServerLost) as error:
            failures.append(error)
            return self._server_failed(server, failures)
        finally:
            server.in_flight -= self._limits.counts[draw.env]

    def _server_failed(
        self, server: InferenceServer, failures: Sequence[InferenceError | InferenceServerLost]
    ) -> _Failed | _Retry:
        """Return what the last failure means for its group; raise it if every group would meet it."""
        error = failures[-1]
        has_lost_slot = isinstance(error, InferenceError) and error.status == 404 and self._config.model.lora.name
        if isinstance(error, InferenceServerLost) or has_lost_slot:
            if len(failures) > _MAX_LOST_SERVERS:
                raise error
            self._inference.take_out(server, str(error))
            return _Retry(str(error))
        if error.status in _MISCONFIGURED:
            raise error
        if error.is_server_fault:
            server.failed()  # it gets no groups for a while
            if sum(isinstance(failure, InferenceError) for failure in failures) <= _MAX_SERVER_FAULTS:
                return _Retry(str(error))
        return _Failed(ENGINE, str(error))

    async def _sample(self, draw: DrawnExample, server: InferenceServer, started: float) -> _Outcome:
        """Sample one group, and decide whether it is kept. Raises InferenceError, InferenceServerLost."""
        pool, sampling = self._pools[draw.env], self._samplings[draw.env]
        seed = None if sampling.seed is None else (sampling.seed, draw.env, draw.group_id)

        def stuck() -> EnvironmentFailed:
            return EnvironmentFailed(
                f"example {draw.example} of environment {pool.name} (group {draw.group_id}) did not end within "
                f"{time.monotonic() - started:.0f} s, and there was no other progress for wait_timeout_seconds; "
                "set env.timeout_seconds"
            )

        try:
            async with deadline_scope(stuck) as scope:
                self._running[draw.group_id] = running = _RunningGroup(draw, started, scope)
                rollouts = await pool.run_group(
                    draw.example, self._limits.counts[draw.env], server.client.url, sampling_parameters(sampling),
                    self._config.seq_len, seed, running.starts_scoring,
                )  # fmt: skip
        except EnvironmentFailed as error:
            return _Failed(f"error/{pool.name}", str(error))
        except SampleTooLong as error:
            return _Dropped(DropReason(OVERLONG, str(error)))
        finally:
            del self._running[draw.group_id]
        seconds = time.monotonic() - started
        with ExitStack() as on_error:
            tokens = sum(rollout.sampled_tokens for rollout in rollouts)
            on_error.callback(pool.discarded.add, "replayed", len(rollouts), tokens)
            self._check_versions(rollouts, self._scheduler.version(draw.group_id), server)
            await self._inference.wait_until_acknowledged(server, _newest(rollouts))
            on_error.pop_all()
        group = Group(
            draw.group_id, tuple(rollouts), pool.name, draw.example, sampling.temperature,
            top_k=max(0, sampling.top_k), top_p=sampling.top_p, min_p=sampling.min_p, server=server.client.url,
        )  # fmt: skip
        self._counters.arrived(group)
        self.history.add(group.env, group.example, seconds)
        reason = self._filter.reason_to_drop(group)
        return group if reason is None else _Dropped(reason, group)

    def _check_versions(self, rollouts: Sequence[Rollout], version: int, server: InferenceServer) -> None:
        """Check the versions that the server reports for a group which started at `version`.

        They are older if the server restarted unnoticed, and must not be newer than what the trainer can have made.
        """
        newest, possible = _newest(rollouts), self._scheduler.next_step + 1  # a batch is on disk before it counts here
        if newest > possible:
            raise InferenceError(f"{server.client.url} reports version {newest}, but the newest possible is {possible}")
        oldest = min(int(s.versions[s.versions >= 0].min()) for rollout in rollouts for s in rollout.samples)
        if oldest < version:
            raise InferenceServerLost(f"inference at {server.client.url} sampled from version {oldest}, not {version}")

    def _keep(self, group: Group) -> None:
        self._ended[self._index[group.env]] += 1
        self.complete[group.group_id] = group
        self._scheduler.complete(group.group_id)
        self._ledger.done(group)

    def _drop(self, group_id: int, env: int, reason: DropReason, group: Group | None = None) -> None:
        """Drop a group that was filtered out, or keep it to fill the batch; RunError if all are exhausted."""
        action = self._drops.record_filtered(reason.zero_advantage, env)
        if action is DropAction.FILL and group is not None:
            self.filled.add(group_id)
            self._keep(group)
            return
        level = "WARNING" if group is None else "DEBUG"
        logger.log(level, "group {} is dropped as {}: {}", group_id, reason.name, reason.explanation)
        self._end(group_id, reason.name, group, env=env)
        if action is DropAction.FAIL:
            raise self._exhausted(reason.name, reason.explanation)

    def _fail(self, draw: DrawnExample, reason: str, failure: str) -> None:
        """Drop a group that ended with an error, and pause its environment; RunError if all are exhausted."""
        action = self._drops.record_error(draw.group_id, draw.env)
        health, env = self._drops.health[draw.env], self._pools[draw.env].name
        logger.warning(
            "group {} (example {} of {}) is dropped as {}: {}; {} errors in a row, the next group starts in {:.2g} s",
            draw.group_id, draw.example, env, reason, failure, health.errors, health.pause_seconds,
        )  # fmt: skip
        timeout_seconds, key = self._drops.failure_timeout(draw.env)
        self._num_failed[draw.env] += 1
        self._end(draw.group_id, reason, env=draw.env)
        ended, group = self._ended[draw.env], f"group {draw.group_id} (example {draw.example})"

        also = "" if "env.reward_errors" in failure else _REWARD_REMEDY
        remedy = "" if reason == ENGINE else f"{_REMEDY}{also}; "
        cause = f"{failure}; {remedy}if only errors occur, the run ends after {timeout_seconds:.0f} s ({key})"

        def text(count: int) -> str:
            which = f"{count} of {ended} groups since the start failed and were dropped, the last is {group}"
            return f"environment {env}: {f'{group} failed and is dropped' if count == 1 else which}: {cause}"

        self._warnings.add("group", env, text, cause)
        if action is DropAction.FAIL:
            raise self._exhausted(reason, failure)

    def _end(self, group_id: int, reason: str, group: Group | None = None, *, env: int) -> None:
        self._ended[env] += 1
        self._scheduler.drop(group_id)
        self._ledger.dropped(group_id, reason, None if group is None else group.rewards)
        self._counters.discarded(reason, group)

    def _exhausted(self, reason: str, failure: str) -> RunError:
        env, longest_seconds = max(
            enumerate(health.failing_seconds for health in self._drops.health), key=lambda entry: entry[1]
        )
        since = f" ({longest_seconds:.0f} s; {self._drops.failure_timeout(env)[1]})" if longest_seconds else ""
        count = self._drops.num_consecutive_drops
        return RunError(f"{count} groups in a row were dropped as {reason}; the last: {failure}{since}")


def _newest(rollouts: Sequence[Rollout]) -> int:
    return max(int(sample.versions.max()) for rollout in rollouts for sample in rollout.samples)
