"""The orchestrator's loop: admit within the bound, play, ship, switch.

I1 every batch keeps the bound (checked again when it is shipped); I2 what is sampled is shipped or dropped under a
name; I3 the ledger is on disk before the batch that builds upon it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.errors import RunError
from prime_rl.monitor import Monitor
from prime_rl.orchestrator.advantages import advantage_function
from prime_rl.orchestrator.beginning import START, Beginning, Rewound, find_rewind, resume_directory
from prime_rl.orchestrator.checkpoint import Cut, write_cut
from prime_rl.orchestrator.dispatch import Dispatcher, TrainEnvironment
from prime_rl.orchestrator.evals.online import OnlineEvaluator, Schedule
from prime_rl.orchestrator.lag import LoopLag
from prime_rl.orchestrator.ledger import Ledger, LedgerState, read_ledger
from prime_rl.orchestrator.packing import pack
from prime_rl.orchestrator.policy import Policy
from prime_rl.orchestrator.report import Tally, batch_metrics, sample_rows, write_rows
from prime_rl.orchestrator.row_cost import TOKENS, RowCost
from prime_rl.orchestrator.scheduler import DeadlineScheduler
from prime_rl.orchestrator.server import Server
from prime_rl.orchestrator.stream import Source, Stream
from prime_rl.orchestrator.vigil import INFERENCE, TRAINER, Vigil
from prime_rl.run.artifact import MANIFEST
from prime_rl.run.batch import Batch, write_batch
from prime_rl.run.heart import Heartbeat
from prime_rl.run.peers import Peers
from prime_rl.run.wait import changes
from prime_rl.supervisor.process import is_supervised
from prime_rl.types import Group


class Orchestrator:
    """One run of the orchestrator."""

    def __init__(
        self,
        config: OrchestratorConfig,
        environments: Sequence[TrainEnvironment],
        servers: Sequence[Server],
        monitor: Monitor,
        row_cost: RowCost = TOKENS,
        schedules: Sequence[Schedule] = (),
        beginning: Beginning = START,
        heart: Heartbeat | None = None,
    ) -> None:
        """Put the parts together; nothing runs yet.

        Args:
            config: of the orchestrator.
            environments: those of `config.env`, started.
            servers: the inference servers.
            monitor: takes the metrics.
            row_cost: what a row costs the trainer.
            schedules: evaluations beside training.
            beginning: where the run begins, or goes on.
            heart: of this process; None says nothing to anybody.

        Raises:
            ConfigError, RunError: the ledger, or the checkpoint, is not of this configuration, or cannot be read.
        """
        self._config = config
        self._environments = environments
        self._monitor = monitor
        self._row_cost = row_cost
        self._paths = config.run_paths
        self._wake = asyncio.Event()
        self._tally = Tally()
        self._lag = LoopLag()
        self._advantage = advantage_function(config.advantage)
        self._policy = Policy(
            servers,
            self._paths,
            self._wake.set,
            self._before_switch,
            config.on_refused_weights,
            config.client.reconnect_seconds,
        )
        self._heart = heart or Heartbeat(self._paths, "orchestrator", "orchestrator")
        limits, by_hand = config.heartbeat.limits, not is_supervised()
        peers = {
            TRAINER: Peers(self._paths, TRAINER, limits, judges=by_hand),
            INFERENCE: Peers(self._paths, INFERENCE, limits, judges=by_hand, heard_otherwise=True),
        }
        self._vigil = Vigil(self._heart, peers, config.wait_timeout_seconds)
        self._ended = 0
        self._evaluator = OnlineEvaluator(schedules, self._policy, monitor, self._paths)
        self._beginning = beginning
        self._writing: asyncio.Future[Batch] | None = None
        state = read_ledger(self._paths, beginning.branch) if config.restart else None
        cut = beginning.cut
        stream = _stream(config, environments)
        if state is not None:
            self._ledger = Ledger.resume(self._paths, stream, state)
        else:
            self._ledger = Ledger.start(self._paths, beginning.branch, stream, cut.base if cut else None)
        self._scheduler = DeadlineScheduler(
            config.batch_size // config.rollouts_per_example,
            config.async_level,
            config.max_steps,
            next_step=self._ledger.positions.next_step,
            max_off_policy_steps=config.max_off_policy_steps,
        )
        self._dispatcher = Dispatcher(
            config, environments, self._policy, self._scheduler, self._ledger, self._tally, self._group_ended
        )
        if state is not None:
            self._restore(state)
        elif cut is not None:
            self._go_on_from(cut)

    async def run(self) -> None:
        """Ship all batches, bring inference to the last version, give its lease back.

        Raises:
            RunError: a wait passed its deadline, inference is gone, or the environment fails all the time.
            Rewound: the trainer has begun a newer branch; the lease is kept for it.
        """
        config, version = self._config, self._beginning.version
        start = self._policy.start(config.wait_timeout_seconds, version, goes_on=config.restart)
        try:
            await self._vigil.start(start, INFERENCE)
            await self._work_leased()
        finally:
            await self._end_writing()
            await self._close_ledger()

    async def _work_leased(self) -> None:
        lease_stays = False
        try:
            await self._work()
        except Rewound:
            lease_stays = True
            raise
        finally:
            if not lease_stays:
                await self._policy.release()

    async def _work(self) -> None:
        stop = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as tasks:
                if not self._config.bench:
                    tasks.create_task(self._follow_trainer(stop))
                tasks.create_task(self._policy.watch(stop))
                tasks.create_task(self._policy.keep(stop))
                tasks.create_task(self._lag.measure(stop))
                if self._config.concurrency.adaptive and self._config.max_concurrent is None:
                    tasks.create_task(self._policy.observe_load(stop, self._config.concurrency.interval))
                await self._ship_all(tasks)
                if not self._config.bench:  # then there is no trainer that could publish it
                    await self._wait_for_last_version()
                self._heart.enter("finish the evaluations", waiting_for=INFERENCE)
                await self._evaluator.finish(self._policy.version)
                stop.set()
        except ExceptionGroup as group:
            raise _first(group.subgroup(Rewound) or group) from group

    async def _follow_trainer(self, stop: asyncio.Event) -> None:
        """Raise Rewound as soon as the trainer has begun a newer branch."""
        directory = self._paths.root if self._config.ckpt is None else resume_directory(self._config)
        async for _ in changes(directory, stop):
            if (resume := find_rewind(self._config, self._beginning.branch)) is not None:
                raise Rewound(resume)

    async def _end_writing(self) -> None:
        """Wait for a batch that a thread still writes: it must not appear after its branch has ended."""
        if self._writing is not None and not self._writing.done():
            await asyncio.wait({self._writing})
            self._writing.exception()  # told to nobody: what ended the run came before it

    async def _close_ledger(self) -> None:
        """Write what waits; all that a batch builds upon is on disk already."""
        try:
            await asyncio.to_thread(self._ledger.close)
        except RunError as error:  # it must not hide what the run ended with
            logger.error("the ledger is not complete: {}", error)

    def _group_ended(self) -> None:
        self._ended += 1
        self._wake.set()

    async def _before_switch(self) -> None:
        await self._evaluator.before_switch()

    def _restore(self, state: LedgerState) -> None:
        for group_id, why in state.damaged.items():
            logger.warning("group {} was finished and is played again: {}", group_id, why)
        self._dispatcher.restore(list(state.finished.values()), state.unfinished, state.waiting)
        logger.info(
            "going on with batch {}: {} groups are finished, {} are dispatched again",
            self._scheduler.next_step, len(state.finished), len(state.unfinished),
        )  # fmt: skip

    def _go_on_from(self, cut: Cut) -> None:
        for known in cut.finished:
            self._ledger.done(known.group)
        self._dispatcher.restore(cut.finished, cut.unfinished, cut.waiting, cut.lengths)
        logger.info(
            "branch {} begins with batch {}: {} groups are finished, {} are dispatched again",
            self._beginning.branch, cut.step, len(cut.finished), len(cut.unfinished),
        )  # fmt: skip

    async def _ship_all(self, tasks: asyncio.TaskGroup) -> None:
        while not self._scheduler.finished:
            self._wake.clear()
            self._evaluator.on_switch(self._policy.version, tasks)
            self._dispatcher.admit(tasks)
            while (group_ids := self._scheduler.ready()) is not None:
                await self._ship(group_ids)
                self._dispatcher.admit(tasks)
            self._tally.wait_for_policy(not self._scheduler.in_flight)
            if not self._scheduler.finished:
                await self._wait_for_progress()

    async def _ship(self, group_ids: list[int]) -> None:
        """Write batch n, then its metrics; the rename of the batch is what ships it."""
        step = self._scheduler.next_step
        groups = [self._dispatcher.complete.pop(group_id) for group_id in group_ids]
        advantages = self._advantage([self._dispatcher.scores(group) for group in groups])
        await self._ledger.flush()
        cut = self._cut(step, group_ids)
        self._writing = asyncio.ensure_future(asyncio.to_thread(self._write, step, groups, advantages, cut))
        batch = await asyncio.shield(self._writing)
        # No await before the ledger and the scheduler know: a draw must not slip in between.
        self._ledger.shipped(step, group_ids)
        self._ledger.delete_spool(group_ids)
        self._scheduler.ship(group_ids)
        filled = len(self._dispatcher.filled.intersection(group_ids))
        self._dispatcher.shipped(group_ids)
        self._tally.shipped(batch)
        await self._report(step, groups, advantages, batch, {"batch/filled_degenerate": filled})

    def _cut(self, step: int, group_ids: Sequence[int]) -> Cut | None:
        """Return the state after batch `step`, if a checkpoint is due then."""
        ckpt, done = self._config.ckpt, step + 1
        if ckpt is None or self._config.bench or (done % ckpt.interval and done != self._config.max_steps):
            return None
        return self._dispatcher.cut(done, self._ledger.state_after(step, group_ids))

    def _write(
        self, step: int, groups: Sequence[Group], advantages: Sequence[NDArray[np.float64]], cut: Cut | None
    ) -> Batch:
        config, branch = self._config, self._beginning.branch
        batch = pack(groups, advantages, config.seq_len, self._row_cost, config.mask_truncated_completions)
        oldest = int(batch.versions[batch.versions >= 0].min())
        if step - oldest > config.bound:
            raise AssertionError(
                f"I1 broken: batch {step} holds tokens of version {oldest}, the bound is {config.bound}"
            )
        fields = {"branch": branch, "step": step, "async_level": config.async_level}

        def save(temporary: Path) -> None:
            if cut is not None and config.ckpt is not None:
                checkpoint = self._paths.root / config.ckpt.path / f"step_{cut.step}"
                write_cut(checkpoint, cut, branch, temporary / MANIFEST, config)

        write_batch(self._paths.rollouts(step), batch, fields, save)
        return batch

    async def _report(
        self,
        step: int,
        groups: Sequence[Group],
        advantages: Sequence[NDArray[np.float64]],
        batch: Batch,
        more: Mapping[str, float],
    ) -> None:
        metrics = {
            **more,
            **{f"error/{env.pool.name}": 0 for env in self._environments},
            **batch_metrics(step, groups, advantages, batch, self._config.seq_len),
            **self._tally.next_batch(self._dispatcher.complete.values()),
            **self._ledger.stream.metrics(),
            **self._lag.metrics(),
            **self._policy.metrics(),
            "workers/deaths": sum(env.pool.deaths for env in self._environments),
        }
        rows = sample_rows(groups, advantages)
        await asyncio.to_thread(write_rows, self._paths.samples(step), rows)
        self._monitor.log(step, metrics)
        self._monitor.log_samples(step, rows)
        distributions = {
            "reward": np.concatenate([group.rewards for group in groups]),
            "advantage": np.concatenate(advantages),
            "completion_len": np.concatenate([group.lengths for group in groups]),
        }
        self._monitor.log_distributions(step, distributions)
        logger.info(
            "batch {}: reward {:.3f}, staleness max {:.0f}, {:.2f} s",
            step, metrics["reward/mean"], metrics["staleness/max"], metrics["time/step"],
        )  # fmt: skip

    async def _wait_for_progress(self) -> None:
        """Wait until a group ends or more may be dispatched than before; both set `_wake`."""
        step, flying = self._scheduler.next_step, self._scheduler.in_flight
        if not flying:
            self._policy.end_if_refused(step)
        mark = step, self._policy.version, self._ended
        if flying or not any(server.up for server in self._policy.servers):
            names = ", ".join(env.pool.name for env in self._environments)
            who = f"{flying} groups in flight at environment {names}"
            await self._vigil.wait(self._wake, mark, f"sample batch {step}", INFERENCE, who)
        else:
            version = self._policy.version + 1
            who = f"the trainer to publish version {version} ({self._paths.log(TRAINER)})"
            await self._vigil.wait(self._wake, mark, f"wait for version {version}", TRAINER, who)

    async def _wait_for_last_version(self) -> None:
        """Stay until inference samples from what the last batch made, so that it serves the trained policy."""
        while self._policy.version < self._scheduler.next_step:
            self._wake.clear()
            await self._wait_for_progress()


def _stream(config: OrchestratorConfig, environments: Sequence[TrainEnvironment]) -> Stream:
    sources = [
        Source(env.pool.name, len(env.pool), given.weight, config.buffer)
        for env, given in zip(environments, config.env, strict=True)
    ]
    return Stream(sources, config.seed)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first exception of a group, of whatever depth: task groups nest."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
