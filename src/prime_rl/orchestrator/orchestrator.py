"""The orchestrator's loop: dispatch groups within the staleness bound, ship batches, switch to new weights.

    example stream --> dispatch --> rollouts --> complete groups --> batch n --> rollouts/step_n/
                          ^    (environment workers,   |                             |
                          |     inference servers)     +--> dropped, counted         v
                          |                                                       trainer
    servers sample v <-- switch all servers <-- stage <-- weights/step_{n+1}/ <------+

What blocks what:

    dispatch   waits for a server with capacity and for the staleness bound, which opens when a batch ships or a
               version is switched to (`DeadlineScheduler`). A trainer that falls behind stops dispatch this way.
    batch n    waits for B complete groups, and for each group that may not join a later batch.
    rename     of `rollouts/step_n` waits for the ledger and, if due, for the orchestrator's part of the checkpoint.
    switch     waits until every server has staged the version, and for a pinned evaluation, a limited time.
               Rollouts continue during a switch; their later tokens come from the new version.

Dispatch continues while a batch is written. One coroutine ships batches (`_ship_all`), others dispatch groups
(`_keep_admitting`), follow the weights, and look after the servers (`InferencePool`).
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from prime_rl.configs.advantage import GROUP_BASELINES
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.core.errors import ConfigError, RunError, first_exception
from prime_rl.core.types import Group
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.liveness.parent_process import is_supervised
from prime_rl.liveness.peer_monitor import PeerMonitor
from prime_rl.monitors import Monitor
from prime_rl.monitors.learning_signal import LearningSignalMonitor
from prime_rl.orchestrator.algorithms.advantages import advantage_function, part_advantages, uncompared_share
from prime_rl.orchestrator.dispatcher import Dispatcher
from prime_rl.orchestrator.example_stream import ExampleStream, StreamEnvironment
from prime_rl.orchestrator.inference.inference_pool import InferencePool
from prime_rl.orchestrator.inference.inference_server import InferenceServer
from prime_rl.orchestrator.ledger.ledger import Ledger, LedgerState, read_ledger
from prime_rl.orchestrator.online_evaluation import EvalSchedule, OnlineEvaluator
from prime_rl.orchestrator.packing import TOKENS, RowCost, pack
from prime_rl.orchestrator.resume import (
    START,
    OrchestratorState,
    StartPoint,
    StopCheckpoints,
    TrainerRolledBack,
    find_rollback,
    resume_directory,
    write_checkpoint_part,
)
from prime_rl.orchestrator.run_reports import (
    RunCounters,
    RunWarnings,
    SampleFiles,
    batch_metrics,
    group_sources,
    rollout_times,
)
from prime_rl.orchestrator.scheduler import DeadlineScheduler
from prime_rl.orchestrator.waits import INFERENCE, TRAINER, ProgressWatchdog, pause
from prime_rl.rollouts.workers.environment_pool import EnvironmentPool
from prime_rl.rollouts.workers.protocol import DiscardedWork
from prime_rl.storage.artifact import MANIFEST
from prime_rl.storage.batch import Batch, Progress, read_progress, write_batch
from prime_rl.storage.wait_for import run_in_daemon_thread, watch_directory

Written = TypeVar("Written")
_TICK_SECONDS = 0.05


class OrchestratorLoop:
    """One run of the orchestrator."""

    def __init__(
        self,
        config: OrchestratorConfig,
        pools: Sequence[EnvironmentPool],
        servers: Sequence[InferenceServer],
        monitor: Monitor,
        row_cost: RowCost = TOKENS,
        schedules: Sequence[EvalSchedule] = (),
        start_point: StartPoint = START,
        heartbeat: HeartbeatWriter | None = None,
        warnings: RunWarnings | None = None,
    ) -> None:
        """Connect the parts; `run` starts them. `pools` are the started environments of `config.env`."""
        self._config = config
        self._pools = pools
        self._monitor = monitor
        self._warnings = warnings or RunWarnings(config.run_paths.warnings)
        self._row_cost = row_cost
        self._start_point = start_point
        self._paths = config.run_paths
        self._wake = asyncio.Event()
        self._can_dispatch = asyncio.Event()
        self._counters = RunCounters()
        self._lag = EventLoopLag()
        self._signal = LearningSignalMonitor()
        self._advantage = advantage_function(config.advantage)
        self._inference = InferencePool(
            servers, self._paths, self._on_change, config.on_invalid_weights, config.client.reconnect_seconds,
            config.min_servers,
        )  # fmt: skip
        self._heartbeat = heartbeat or HeartbeatWriter(self._paths, "orchestrator", "orchestrator")
        limits, standalone = config.heartbeat.limits, not is_supervised()
        settings = config.run_settings
        self._trainer = PeerMonitor(self._paths, TRAINER, limits, raises=standalone, settings=settings)
        inference = PeerMonitor(self._paths, INFERENCE, limits, raises=standalone, answers_requests=True)
        peers = {TRAINER: self._trainer, INFERENCE: inference}
        self._watchdog = ProgressWatchdog(self._heartbeat, peers, config.wait_timeout_seconds)
        self._num_ended = 0
        self._progress = Progress()
        self._evaluator = OnlineEvaluator(schedules, self._inference, monitor, self._paths, self._warn)
        self._inference.before_switch = self._evaluator.before_switch
        self._writing: asyncio.Future[Any] | None = None
        self._samples = SampleFiles(
            self._paths,
            config.num_samples_per_batch,
            config.num_kept_sample_files,
            config.kept_sample_interval,
            config.identities,
        )
        state = start_point.state
        self._start_warnings = list[tuple[str, str, str]]()
        if state is not None and state.changes:
            self._start_warnings.append(("resume", "", state.describe_changes()))
        self._stop_checkpoints = StopCheckpoints(config, start_point.branch)
        self._ledger: Ledger
        self._scheduler: DeadlineScheduler
        self._dispatcher: Dispatcher

    async def run(self) -> None:
        """Ship all batches, switch inference to the last version, release the servers.

        Raises:
            ConfigError: the ledger or the checkpoint does not belong to this configuration.
            RunError: a file cannot be read, a wait timed out, inference is lost, or every environment keeps failing.
            TrainerRolledBack: the trainer started a newer branch; the servers stay leased for it.
        """
        config, version = self._config, self._start_point.version
        self._heartbeat.enter("read the ledger", config.wait_timeout_seconds)
        self._restore(*await asyncio.to_thread(self._open_ledger))
        for warning in self._start_warnings:
            self._warn(*warning)
        try:
            await self._evaluator.read_history()
            await self._watchdog.wait_for_slot()
            start = self._inference.start(config.wait_timeout_seconds, version, config.restart)
            await self._watchdog.start(start, INFERENCE)
            self._dispatcher.resample_without_routes()
            await self._run_tasks()
        finally:
            await self._finish_writing()
            await self._warnings.close()
            try:
                await asyncio.to_thread(self._ledger.close)
            except RunError as error:  # must not hide the error that the run ended with
                logger.error("ledger: the last records were not written: {}", error)

    def _warn(self, kind: str, env: str, text: str) -> None:
        logger.warning("{}", text)
        self._warnings.add(kind, env, lambda count: text)

    async def _finish_writing(self) -> None:
        """Wait for a batch that is being written: it must not appear after its branch ended."""
        if self._writing is not None and not self._writing.done():
            await asyncio.wait({self._writing})
            self._writing.exception()  # retrieved and ignored: the run already ended with an earlier error

    def _open_ledger(self) -> tuple[Ledger, LedgerState | None]:
        """Start a ledger, or read it and replay the stream; takes seconds, so it runs in a thread."""
        config, branch, checkpoint = self._config, self._start_point.branch, self._start_point.state
        state = read_ledger(self._paths, branch) if config.restart else None
        next_step = state.positions.next_step if state else checkpoint.step if checkpoint else 0
        if config.max_steps is not None and next_step > config.max_steps:
            raise ConfigError(
                f"max_steps = {config.max_steps}, but {next_step} batches were shipped before in "
                f"{self._paths.rollouts_dir}; set it to {next_step} or more"
            )
        self._progress = read_progress(self._paths, next_step)
        sources = [
            StreamEnvironment(pool.name, len(pool), env.weight, config.buffer, pool.content_hash, tuple(pool.skipped))
            for pool, env in zip(self._pools, config.env, strict=True)
        ]
        stream = ExampleStream(sources, config.seed)
        if state is None:
            ledger = Ledger.start(self._paths, branch, stream, checkpoint.base if checkpoint else None)
        else:
            ledger = Ledger.resume(self._paths, stream, state)
        self._start_warnings += [("data", env, text) for env, text in stream.warnings.items()]
        return ledger, state

    def _restore(self, ledger: Ledger, state: LedgerState | None) -> None:
        """Build the scheduler and the dispatcher, and restore the groups of the ledger or of the checkpoint."""
        config, checkpoint, self._ledger = self._config, self._start_point.state, ledger
        self._scheduler = DeadlineScheduler(
            config.batch_size // config.rollouts_per_example,
            config.async_level,
            config.max_steps,
            next_step=ledger.positions.next_step,
            max_off_policy_steps=config.max_off_policy_steps,
        )
        self._dispatcher = Dispatcher(
            config, self._pools, self._inference, self._scheduler, ledger, self._counters, self._group_ended,
            self._warnings,
        )  # fmt: skip
        if state is not None:
            for group_id, why in state.damaged.items():
                logger.warning("finished group {} cannot be read and is sampled again: {}", group_id, why)
            self._dispatcher.restore(state.finished.values(), {})
        elif checkpoint is not None:
            self._dispatcher.restore(checkpoint.finished, checkpoint.history)
        else:
            return
        logger.info(
            "branch {} continues with batch {}: {} groups are finished, {} are dispatched again",
            self._start_point.branch, self._scheduler.next_step, len(self._dispatcher.complete),
            len(ledger.positions.unfinished),
        )  # fmt: skip

    async def _run_tasks(self) -> None:
        config, stop, keep_lease = self._config, asyncio.Event(), False
        try:
            async with asyncio.TaskGroup() as tasks:
                if not config.bench:
                    tasks.create_task(self._follow_trainer(stop))
                tasks.create_task(self._inference.follow_weights(stop))
                tasks.create_task(self._inference.maintain(stop))
                tasks.create_task(self._lag.measure(stop))
                adapts = config.concurrency.adaptive and config.max_concurrent is None
                tasks.create_task(self._inference.observe_load(stop, config.concurrency.interval_seconds, adapts))
                tasks.create_task(self._keep_admitting(tasks, stop))
                await self._ship_all(tasks)
                self._trainer.expect_end()  # the last version may be copied and loaded for minutes after it
                wait = config.wait_for_final_version and not config.bench  # a benchmark has no trainer
                while wait and self._inference.version < self._scheduler.next_step:
                    self._wake.clear()
                    self._evaluator.on_switch(self._inference.version, tasks)
                    await self._wait_for_progress()
                self._heartbeat.enter("finish the evaluations", waiting_for=INFERENCE)
                await self._evaluator.finish(self._inference.version)
                stop.set()
                self._can_dispatch.set()
        except ExceptionGroup as group:
            rolled_back = group.subgroup(TrainerRolledBack)
            keep_lease = rolled_back is not None
            raise first_exception(rolled_back or group) from group
        except asyncio.CancelledError:  # SIGTERM, which the trainer may have got as well
            await self._finish_writing()
            await asyncio.to_thread(self._stop_checkpoints.write)
            raise
        finally:
            if not keep_lease:
                await self._inference.release()

    async def _follow_trainer(self, stop: asyncio.Event) -> None:
        """Raise TrainerRolledBack as soon as the trainer starts a newer branch; help it to stop with a checkpoint."""
        directory = self._paths.root if self._config.ckpt is None else resume_directory(self._config)
        async for _ in watch_directory(directory, stop):
            resume = await run_in_daemon_thread(find_rollback, self._config, self._start_point.branch)
            if resume is not None:
                raise TrainerRolledBack(resume)
            await run_in_daemon_thread(self._stop_checkpoints.answer)

    def _group_ended(self) -> None:
        self._num_ended += 1
        self._on_change()

    def _on_change(self) -> None:
        self._wake.set()
        self._can_dispatch.set()

    async def _keep_admitting(self, tasks: asyncio.TaskGroup, stop: asyncio.Event) -> None:
        """Start groups as soon as they can be admitted, also while a batch is written.

        Timers may fire early, and events may come at any time: each is only a reason to look again.
        """
        while not stop.is_set():
            self._can_dispatch.clear()
            now = time.monotonic()
            if self._dispatcher.admit(tasks):
                self._wake.set()  # `_wait_for_progress` waits for something else now
            next_start = min(self._dispatcher.find_pauses(now).values(), default=None)
            await pause(self._can_dispatch, None if next_start is None else max(0.0, next_start - time.monotonic()))
            if not self._can_dispatch.is_set():
                self._num_ended += 1
                self._wake.set()

    async def _ship_all(self, tasks: asyncio.TaskGroup) -> None:
        while not self._scheduler.finished:
            self._wake.clear()
            self._evaluator.on_switch(self._inference.version, tasks)
            self._dispatcher.admit(tasks)
            self._can_dispatch.set()  # the groups that start have changed what may start next, and when
            if (group_ids := self._scheduler.ready()) is not None:
                await self._ship(group_ids)
                continue
            await self._wait_for_progress()

    async def _ship(self, group_ids: list[int]) -> None:
        """Write batch n, then its metrics. The batch counts as shipped when its directory is renamed into place."""
        config, step = self._config, self._scheduler.next_step
        self._heartbeat.enter(f"write batch {step}", config.wait_timeout_seconds, step=step)
        groups = [self._dispatcher.complete.pop(group_id) for group_id in group_ids]
        advantages = part_advantages(self._advantage, groups, config)
        await self._ledger.flush()  # everything that the batch builds on is on disk before the batch (I3)
        canaries = await self._inference.base_canaries() if step == 0 else []
        state = self._checkpoint_state(step, group_ids)
        if state is not None and not self._is_checkpoint_due(step + 1):
            self._stop_checkpoints.keep(step + 1, state, self._inference.weight_versions.newest or 0)
            state = None
        batch = await self._in_thread(lambda: self._write(step, groups, advantages, state, canaries))
        # No await before the ledger and the scheduler are updated: no group may be admitted in between.
        self._ledger.shipped(step, group_ids)
        self._scheduler.ship(group_ids)
        num_filled = len(self._dispatcher.filled.intersection(group_ids))
        self._dispatcher.shipped(group_ids)
        self._counters.shipped(batch)
        self._progress.count_batch(batch)
        await self._report(step, groups, advantages, batch, num_filled)

    async def _in_thread(self, write: Callable[[], Written]) -> Written:
        """Write something in a thread, which `run` waits for if it ends meanwhile."""
        self._writing = writing = asyncio.ensure_future(asyncio.to_thread(write))
        return await asyncio.shield(writing)

    def _checkpoint_state(self, step: int, group_ids: Sequence[int]) -> Callable[[], OrchestratorState] | None:
        """Return a function that builds the state after batch `step`; None without checkpoints. Call it once."""
        if self._config.ckpt is None or self._config.bench:
            return None
        snapshot, history = self._ledger.snapshot(), self._dispatcher.history.copy()
        finished = list(self._dispatcher.complete.values())
        return lambda: OrchestratorState(step + 1, snapshot.state_after(step, group_ids), finished, history.state())

    def _is_checkpoint_due(self, step: int) -> bool:
        ckpt = self._config.ckpt
        return ckpt is not None and (not step % ckpt.interval or step == self._config.max_steps)

    def _write(
        self,
        step: int,
        groups: Sequence[Group],
        advantages: Sequence[NDArray[np.float64]],
        state: Callable[[], OrchestratorState] | None,
        canaries: Sequence[dict[str, Any]],
    ) -> Batch:
        config, branch = self._config, self._start_point.branch
        batch = pack(groups, advantages, config.seq_len, self._row_cost, config.mask_truncated_completions)
        oldest = int(batch.versions[batch.versions >= 0].min())
        if step - oldest > config.max_staleness:
            raise AssertionError(
                f"batch {step} holds tokens of version {oldest}, staleness bound {config.max_staleness} (I1)"
            )
        fields: dict[str, Any] = {"branch": branch, "step": step, "async_level": config.async_level}
        fields |= {"base_canaries": list(canaries)} if canaries else {}
        fields |= {"sources": sources} if (sources := group_sources(groups)) else {}
        progress = replace(self._progress)
        progress.count_batch(batch)
        fields["progress"] = asdict(progress)

        def before_rename(temporary: Path) -> None:
            if state is not None and config.ckpt is not None:
                checkpoint = self._paths.root / config.ckpt.path / f"step_{step + 1}"
                write_checkpoint_part(checkpoint, state(), branch, temporary / MANIFEST, config)

        write_batch(self._paths.rollouts(step), batch, fields, before_rename)
        return batch

    async def _report(
        self,
        step: int,
        groups: Sequence[Group],
        advantages: Sequence[NDArray[np.float64]],
        batch: Batch,
        num_filled: int,
    ) -> None:
        compares = self._config.advantage.type in GROUP_BASELINES
        losses = DiscardedWork.total(pool.discarded for pool in self._pools)
        metrics = {
            "batch/zero_advantage_filler": num_filled,
            "batch/uncompared_tokens": uncompared_share(groups) if compares else 0.0,
            **{f"dropped/error/{pool.name}": 0 for pool in self._pools},
            **batch_metrics(step, groups, advantages, batch, self._config.seq_len),
            **self._counters.next_batch(self._dispatcher.complete.values(), losses, self._config.pass_threshold),
            **self._progress.metrics(),
            **rollout_times(self._pools),
            **self._ledger.stream.metrics(),
            **self._lag.metrics(),
            **self._dispatcher.metrics(),
            **self._inference.metrics(),
            "env_workers/restarts": sum(pool.deaths for pool in self._pools),
            "env_workers/memory_gib": sum(pool.memory_bytes() for pool in self._pools) / 2**30,
        }

        def write() -> None:
            rows = self._samples.write(step, groups, advantages)
            self._monitor.log(step, metrics)
            self._monitor.log_samples(step, rows)
            distributions = {
                "reward": np.concatenate([group.rewards for group in groups]),
                "advantage": np.concatenate(advantages),
                "completion_len": np.concatenate([group.lengths for group in groups]),
            }
            self._monitor.log_distributions(step, distributions)

        for warning in self._signal.add({"step": step, **metrics}):
            self._warn(*warning)
        await self._in_thread(write)
        logger.info(
            "batch {}: reward {:.3f}, staleness max {:.0f}, {:.2f} s",
            step, metrics["reward/mean"], metrics["staleness/max"], metrics["time/step"],
        )  # fmt: skip

    async def _wait_for_progress(self) -> None:
        """Wait until a group ends or more groups can be dispatched; both set `_wake`."""
        step, in_flight, version = self._scheduler.next_step, self._scheduler.in_flight, self._inference.version
        servers = [server for server in self._inference.servers if server.up]
        may_start = any(self._scheduler.can_admit(server.version.step) for server in servers)
        if not in_flight and not may_start:
            self._inference.raise_if_refused(step)
        progress_token = step, version, self._num_ended
        if in_flight or may_start or not servers:
            pauses = [] if in_flight else self._dispatcher.find_pauses(time.monotonic())
            self._counters.wait_for("pause" if pauses else None)
            names = ", ".join(pool.name for pool in self._pools)
            groups = f"{in_flight} groups in flight at {names}" if in_flight else f"a group of {names} to start"
            waiting_for = " and ".join(pauses) or (groups if servers else "an inference server")
            phase, unblock = f"sample batch {step}", self._dispatcher.end_stuck
            await self._watchdog.wait(
                self._wake, progress_token, phase, INFERENCE, waiting_for, unblock, step=step, version=version,
                on_wait=self._dispatcher.report_wait,
            )  # fmt: skip
        else:
            self._counters.wait_for("policy")
            version += 1
            waiting_for = f"the trainer to publish version {version}{self._paths.log_hint(TRAINER)}"
            phase = f"wait for version {version}"
            await self._watchdog.wait(
                self._wake, progress_token, phase, TRAINER, waiting_for, step=step, version=version
            )


class EventLoopLag:
    """Measures by how much a timer of 50 ms fires late."""

    def __init__(self) -> None:
        self._late: list[float] = []

    async def measure(self, stop: asyncio.Event) -> None:
        """Measure until `stop` is set."""
        loop = asyncio.get_running_loop()
        while not stop.is_set():
            due = loop.time() + _TICK_SECONDS
            await asyncio.sleep(_TICK_SECONDS)
            self._late.append(max(0.0, loop.time() - due))

    def metrics(self) -> dict[str, float]:
        """Return median, 99th percentile and maximum since the last call, seconds; empty without a measurement."""
        late, self._late = np.array(self._late), []
        if not len(late):
            return {}
        return {
            "event_loop_lag/median": float(np.median(late)),
            "event_loop_lag/p99": float(np.percentile(late, 99)),
            "event_loop_lag/max": float(late.max()),
        }
