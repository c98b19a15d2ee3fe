"""Training of several LoRA runs over one policy (`max_concurrent_runs`).

Each run has its adapter, optimizer, schedule, loss, progress, checkpoints and publications: it is a `TrainedRun`, which
finds its adapter in the policy while that is active. One iteration:

    rank 0: Runs.discover, next batches --(plan)--> all ranks: leave, join, read batches
        --> rows of all runs, by turns --> run_jobs --> each run whose minibatch is complete: sum, update
        --> each run whose step is complete: publish, report, checkpoint

Gradients of a run accumulate over iterations until its minibatch is complete, so no run waits for the batch of another.
"""

import gc
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from loguru import logger
from torch import Tensor

from prime_rl.configs.trainer import TrainerConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.monitors import Monitor
from prime_rl.storage.batch import OPTIONAL_ARRAYS, Batch
from prime_rl.storage.rollback import branch_of_batch
from prime_rl.trainer.adapter_engine import Job, run_jobs, sum_gradients
from prime_rl.trainer.micro_batch import MicroBatch, masked_row
from prime_rl.trainer.model.lora import Adapter, adapted_layers
from prime_rl.trainer.model.policy_model import PolicyModel, load_tokenizer
from prime_rl.trainer.packing_check import check_packing
from prime_rl.trainer.parallel.process_group import NodeRanks, RankConsensus, collect_groups, join_world
from prime_rl.trainer.process_setup import GarbageCollection, StopRequest, check_rank_settings
from prime_rl.trainer.rl.batch_source import load_batch, make_row, split_rows
from prime_rl.trainer.rl.runs import Changes, Runs
from prime_rl.trainer.rl.trained_run import (
    PolicyOfRuns,
    TrainedRun,
    check_version_0,
    make_checkpoints,
)
from prime_rl.trainer.train_step import Counts, ScoredRow
from prime_rl.trainer.trainer_metrics import StepTimer
from prime_rl.trainer.trainer_nodes import join_nodes
from prime_rl.trainer.weights.policy_loading import make_policy

_ROWS_PER_RANK = 4
"""Rows of one iteration: a run with a large batch delays the others by at most so many."""
_DISCOVER_SECONDS = 1.0
_POLL_SECONDS = 0.05


def train_runs(config: TrainerConfig, heartbeat: HeartbeatWriter) -> bool:
    """Train the runs that come, until SIGTERM or `exit_when_idle_seconds`; return whether the trainer was stopped."""
    paths, timeout_seconds = config.run_paths, config.dist_timeout_seconds
    with (
        join_world(config.device, timeout_seconds, config.model) as world,
        join_nodes(paths, world, heartbeat, config.heartbeat.limits) as directory,
    ):
        check_rank_settings(config, world)
        heartbeat.enter("load the model")
        policy = make_policy(config.model, config.seed, world, shared=True)
        tokenizer = load_tokenizer(config.tokenizer, config.model)
        heartbeat.enter("check the model", timeout_seconds if world.size > 1 else None)
        check_packing(policy, config.model, world, config.model.seq_len)
        with StopRequest(config.run_paths.checkpoints_dir, 0, world) as stop:
            shared = PolicyOfRuns(policy, tokenizer, world, directory)
            MultiRunTrainer(config, shared, heartbeat, stop).train()
            return stop.is_agreed


@dataclass(frozen=True)
class _Plan:
    """What rank 0 has decided for the next iteration, and errors of runs on the ranks."""

    changes: Changes = field(default_factory=Changes)
    batches: Sequence[int] = ()  # indices of runs whose next batch is there
    stops: Sequence[int] = ()  # indices of runs that stop before their next batch
    num_waiting: int = 0
    is_stopping: bool = False
    ends: bool = False


class ActiveRun:
    """A run with a slot, on one rank.

    Attributes:
        adapter: its weights.
        run: its optimizer, publications, checkpoints and metrics.
        step: the next step, or the one in progress.
        num_ready: micro-batches of the present minibatch that have not been processed.
    """

    def __init__(self, idx: int, config: TrainerConfig, shared: PolicyOfRuns, heartbeat: HeartbeatWriter) -> None:
        """Join: initialise or restore the run and publish the restored version. All ranks call it together.

        Raises ConfigError or RunError if the run cannot start.
        """
        assert config.model.lora is not None
        self.idx, self.config, self.heartbeat, self.error = idx, config, heartbeat, ""
        self._policy, self._world = policy, world = shared.policy, shared.world
        self.adapter = Adapter(adapted_layers(policy), config.model.lora, config.seed, world.device)
        with self.active(), collect_groups() as self._groups:
            policy.routing.reduce(world.sum, world.device)  # forget an earlier run in this slot
            exporter, self.checkpoints = make_checkpoints(config, world)
            self.checkpoints.stop_request.discard_earlier()
            self.run = TrainedRun(config, shared, heartbeat, exporter, self.checkpoints, config.output_dir.name)
            self.run.restore()
            self.run.publish_restored()
        self.batch: Batch | None = None
        self._minibatches: list[tuple[list[list[int]], Counts]] = []
        self._next = 0
        self._rows: dict[int, MicroBatch] = {}
        self.timer = StepTimer()

    @property
    def step(self) -> int:
        """The next step, or the one in progress."""
        return self.run.progress.step

    @property
    def is_finished(self) -> bool:
        """Whether the run's last step is trained."""
        return self.batch is None and self.config.max_steps is not None and self.step >= self.config.max_steps

    @property
    def is_writing(self) -> bool:
        """Whether a version or a checkpoint is not complete: the next step would wait for it."""
        return self.run.publisher.is_writing or self.checkpoints.is_saving

    @property
    def num_ready(self) -> int:
        """Micro-batches of the present minibatch that have not been processed."""
        return len(self._minibatches[0][0]) - self._next if self._minibatches else 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Put the adapter into the policy, and let it count and compute what this run needs."""
        with self.adapter.activate():
            self._policy.routing.run = self.idx
            self._policy.entropy_gradient = self.config.loss.entropy_coef > 0
            yield

    def has_batch(self) -> bool:
        """Return whether the next batch is there, of the run's branch."""
        path, branch = self.config.run_paths.rollouts(self.step), self.checkpoints.required_branch
        return path.exists() and branch in (None, branch_of_batch(path))

    def read(self, node: NodeRanks) -> None:
        """Get the next batch, which the first rank of the node reads, and check it. All ranks of the node call it.

        Raises ConfigError or RunError if it cannot be trained on.
        """
        batch, self._manifest = load_batch(self.config, self.step, node)
        trained, longest = batch.loss_mask != 0, self.config.model.seq_len
        if not len(batch.tokens):
            raise RunError(f"batch {self.step} is empty")
        if np.diff(batch.row_offsets).max() > longest:
            raise RunError(f"batch {self.step} has a row of more than model.seq_len = {longest} tokens")
        if not (np.isfinite(batch.logprobs[trained]).all() and np.isfinite(batch.advantages[trained]).all()):
            raise RunError(f"batch {self.step} has log-probabilities or advantages that are not finite")
        self._policy.check_range(int(batch.tokens.min()), int(batch.tokens.max()), int(batch.seq_lens.max()))
        self.batch, self._minibatches = batch, split_rows(batch, self.config.num_minibatches, longest)

    def drop_batch(self, error: str) -> None:
        """Train no further; the ranks agree on the error, and evict the run."""
        self.error, self.batch, self._minibatches = error, None, []

    def begin(self) -> None:
        """Begin the step of the batch that was read. All ranks call it together; raises as `read`."""
        assert self.batch is not None
        self.timer.lap("wait_for_batch")
        self._waits = True
        if self.step == 0:
            check_version_0(self.config, self._policy, self._world, self._manifest)
        self.heartbeat.enter(f"step {self.step}", step=self.step)
        count = sum(len(micro_batches) for micro_batches, _ in self._minibatches)
        self.run.train_step.begin(*self.run.begin_step(self.batch, -(-count // self._world.data_size)))
        self._name_metrics()

    def job(self, count: int) -> Job:
        """Return the next `count` micro-batches; they count as processed."""
        assert self.batch is not None
        if self._waits:
            self.timer.lap("wait_for_turn")
            self._waits = False
        micro_batches = self._minibatches[0][0][self._next : self._next + count]
        self._next += count
        self._rows = {}
        self.num_tokens = sum(len(self.batch.tokens[self.batch.row(row)]) for rows in micro_batches for row in rows)
        costs = [float(self.batch.row_cost[indices].sum()) for indices in micro_batches]
        build = partial(self._row, micro_batches)
        needs_reference = self.config.reference_name is not None and self.batch.ref_logprobs is None
        return Job(
            self.adapter, costs, lambda policy, row: self._loss(policy, row, build),
            (lambda policy, row: self._score_reference(policy, row, build)) if needs_reference else None,
        )  # fmt: skip

    def update(self) -> None:
        """Update the adapter if its minibatch is complete. All ranks call it together."""
        if self.num_ready or not self._minibatches:
            return
        with self.active():
            sum_gradients(self.adapter, self._world)
            self.run.train_step.update()
            del self._minibatches[0]
            self._next = 0

    def finish(self) -> None:
        """Publish, report and save if the step is complete. Raises RunError as `TrainedRun`."""
        if self.batch is None or self._minibatches:
            return
        batch, self.batch = self.batch, None
        with self.active():
            result = self.run.train_step.finish()
            self.timer.lap("train")
            self.run.end_step(batch, result, self.timer)
        self.timer = StepTimer()
        self.heartbeat.enter(f"wait for batch {self.step}", waiting_for="orchestrator", step=self.step)

    def check(self) -> None:
        """Set `error` if a version could not be written; the orchestrator may wait for it."""
        try:
            self.run.publisher.check()
        except RunError as error:
            self.error = self.error or str(error)

    def close(self) -> None:
        """Write what is not written, with a checkpoint if the run was stopped. All ranks call it together."""
        with self.active(), self._groups:
            self.run.close()

    def _row(self, micro_batches: Sequence[Sequence[int]], row: int | None) -> MicroBatch:
        """Return a micro-batch of this iteration, or a padding row with the same streams."""
        assert self.batch is not None
        if row is None:
            arrays = self.batch.arrays.items()
            return masked_row({name: array[:0] for name, array in arrays if name in OPTIONAL_ARRAYS})
        if row not in self._rows:
            self._rows[row] = make_row(self.batch, micro_batches[row], self.step)
        return self._rows[row]

    def _score_reference(self, policy: PolicyModel, row: int | None, build: "partial[MicroBatch]") -> None:
        """Add the log-probabilities of the base model, whose adapter is not active, to a row."""
        whole = build(row)
        logprobs = policy(whole.to(self._world.device))[0]
        if row is not None:
            self._rows[row] = replace(whole, ref_logprobs=logprobs)

    def _loss(self, policy: PolicyModel, row: int | None, build: "partial[MicroBatch]") -> Tensor:
        policy.routing.run = self.idx
        self.heartbeat.advance()
        train_step, counts = self.run.train_step, self._minibatches[0][1]
        scored = train_step.forward(self._padded(build(row)), counts, before_first_update=not train_step.has_updated)
        return train_step.add(scored)

    def _padded(self, row: MicroBatch) -> MicroBatch:
        """Give a padding row the log-probabilities of a reference that the other rows have."""
        if self.config.reference_name is None or row.ref_logprobs is not None:
            return row
        return replace(row, ref_logprobs=torch.zeros(len(row.tokens)))

    def _name_metrics(self) -> None:
        """Count nothing under the names of the step's metrics, which a rank without a row of the run would not know."""
        row = self._padded(self._row((), None)).to(self._world.device)
        zeros = torch.zeros(len(row.tokens), device=self._world.device)
        counts = self._minibatches[0][1]
        with torch.no_grad():
            self.run.train_step.add(ScoredRow(row, zeros, zeros, True, counts, zeros.bool()))


def take_turns(ready: Mapping[int, int], after: int, budget: int) -> tuple[dict[int, int], int]:
    """Take `budget` rows, one from each run in turn, beginning with the run behind `after`.

    `ready` has the number of rows by index of the run. Returns the number of rows taken, by index, and the index of the
    run that was served last.
    """
    order = sorted(ready, key=lambda idx: (idx <= after, idx))
    taken = Counter[int]()
    while budget and any(taken[idx] < ready[idx] for idx in order):
        for idx in order:
            if budget and taken[idx] < ready[idx]:
                taken[idx] += 1
                budget -= 1
                after = idx
    return dict(taken), after


class MultiRunTrainer:
    """The runs with a slot on this rank, and on rank 0 the table of all runs. Every rank does the same in order."""

    def __init__(
        self, config: TrainerConfig, shared: PolicyOfRuns, heartbeat: HeartbeatWriter, stop: StopRequest
    ) -> None:
        """Begin without runs; `stop` stops them all."""
        self._config, self._shared, self._heartbeat, self._stop = config, shared, heartbeat, stop
        self._policy, self._world = shared.policy, shared.world
        self._ranks, self._node = RankConsensus(shared.world), NodeRanks(shared.world)
        self._active: dict[int, ActiveRun] = {}
        self._runs = Runs(config) if shared.world.is_main else None
        self._totals = Monitor(config.run_paths, "trainer", (), config) if shared.world.is_main else None
        self._is_stopping = False  # on request of any rank
        self._served = -1  # the run that was served last
        self._looked, self._idle_since = float("-inf"), time.monotonic()

    def train(self) -> None:
        """Train until the trainer ends."""
        garbage = GarbageCollection(self._config.gc_interval)
        iteration = 0
        while True:
            self._heartbeat.enter("wait for batches")
            errors, plan = self._agree()
            for idx, error in sorted(errors.items()):
                self._leave(idx, error, evict=True)
            for idx, reason in sorted(plan.changes.leaving.items()):
                self._leave(idx, reason)
            for idx in [idx for idx, run in sorted(self._active.items()) if run.is_finished]:
                self._leave(idx, "its last step is trained")
            self._stop.is_agreed = plan.is_stopping
            self._stop_runs(plan.stops)
            for idx, (run_id, config) in sorted(plan.changes.joining.items()):
                self._join(idx, run_id, config)
            if plan.ends:
                break
            for idx in plan.batches:
                if idx in self._active:
                    self._read(self._active[idx])
            if self._iterate(iteration, plan.num_waiting):
                garbage.step_done(iteration)
                iteration += 1
        for idx in sorted(self._active):  # runs without an orchestrator
            self._leave(idx, "the trainer ends")
        garbage.close()
        if self._totals is not None:
            self._totals.close()

    def _agree(self) -> tuple[dict[int, str], _Plan]:
        """Return the runs with an error on a rank, and rank 0's plan."""
        for run in self._active.values():
            run.check()
        mine = {idx: run.error for idx, run in self._active.items() if run.error}
        answers = self._ranks.gather(
            lambda: (mine, self._stop.has_signal, self._plan() if self._runs is not None else None)
        )
        errors = {idx: error for found, *_ in reversed(answers) for idx, error in found.items()}
        self._is_stopping = any(asked for _, asked, _ in answers)
        plan = answers[0][2]
        assert plan is not None
        return errors, plan

    def _plan(self) -> _Plan:
        """Decide on rank 0; wait up to a second for something to do."""
        assert self._runs is not None
        deadline = time.monotonic() + _DISCOVER_SECONDS
        while True:
            changes, is_stopping = Changes(), self._is_stopping or self._stop.is_requested(0)
            if looks := not is_stopping and time.monotonic() - self._looked >= _DISCOVER_SECONDS:
                changes = self._runs.discover(self._has_work)
                self._looked = time.monotonic()
            idle = [run for run in self._active.values() if run.batch is None and run.idx not in changes.leaving]
            stops = [run.idx for run in idle if is_stopping]
            ready = [run.idx for run in idle if not (is_stopping or run.error or run.is_writing) and run.has_batch()]
            ends = len(self._active) == len(stops) if is_stopping else looks and self._is_idle_too_long(changes)
            is_busy = any(run.batch is not None or run.error or run.is_finished for run in self._active.values())
            if ready or stops or ends or is_busy or changes != Changes() or time.monotonic() > deadline:
                return _Plan(changes, ready, stops, self._runs.num_waiting, is_stopping, ends)
            time.sleep(_POLL_SECONDS)

    def _is_idle_too_long(self, changes: Changes) -> bool:
        """Return whether no run has used the trainer for `exit_when_idle_seconds`, once there has been one."""
        assert self._runs is not None
        in_use = any(self._runs.has_orchestrator(idx) or self._has_work(idx) for idx in self._active)
        if in_use or changes.joining or not self._runs.has_seen_one or self._runs.num_waiting:
            self._idle_since = time.monotonic()
            return False
        limit = self._config.exit_when_idle_seconds
        return limit is not None and time.monotonic() - self._idle_since > limit

    def _join(self, idx: int, run_id: str, dumped: str) -> None:
        """Give a slot to a run; a run that cannot start is refused."""
        config = TrainerConfig.model_validate_json(dumped)
        heartbeat = self._runs.heartbeat(idx) if self._runs is not None else HeartbeatWriter(
            config.run_paths, "trainer_0", "trainer"
        )  # fmt: skip
        self._heartbeat.enter(f"join {run_id}", self._config.dist_timeout_seconds)
        try:
            self._active[idx] = ActiveRun(idx, config, self._shared, heartbeat)
        except (ConfigError, RunError) as error:
            if self._runs is not None:
                self._runs.refuse(run_id, str(error))
                self._runs.leave(idx, str(error), failed=True)
            return
        heartbeat.enter(f"wait for batch {self._active[idx].step}", waiting_for="orchestrator")

    def _has_work(self, idx: int) -> bool:
        run = self._active[idx]
        return run.batch is not None or run.is_writing or run.has_batch()

    def _stop_runs(self, stops: Sequence[int]) -> None:
        """Stop runs before their next batch. Their orchestrators hear of it first, and write parts of checkpoints."""
        for run in (self._active[idx] for idx in stops if idx in self._active):
            try:
                self._ranks.gather(partial(run.checkpoints.stop_request.declare, run.step))
            except RunError as error:
                logger.warning("{}", error)
        for idx in stops:
            self._leave(idx, "the trainer stops")

    def _leave(self, idx: int, reason: str, evict: bool = False) -> None:
        """Write the files of a run and free its slot; with `evict`, report the reason to its orchestrator."""
        if (run := self._active.pop(idx, None)) is None:
            return
        problem = ""
        try:
            run.close()
        except RunError as error:
            problem = str(error)
        if not evict and (problem := next(filter(None, self._ranks.gather(lambda: problem)), "")):
            reason, evict = problem, True
        if self._runs is not None:
            if evict:
                self._runs.evict(idx, reason)
            self._runs.leave(idx, reason, failed=evict)
        del run
        gc.collect()  # optimizer and adapter are in cycles

    def _read(self, run: ActiveRun) -> None:
        """Read a run's next batch on all ranks, and begin its step."""
        self._heartbeat.enter(f"read batch {run.step}", self._config.dist_timeout_seconds)
        try:
            self._ranks.gather(partial(run.read, self._node))
            with run.active():
                run.begin()
        except (ConfigError, RunError) as error:
            run.drop_batch(str(error))

    def _iterate(self, iteration: int, num_waiting: int) -> bool:
        """Process the next rows of the runs, by turns; return whether there were any."""
        ready = {idx: run.num_ready for idx, run in self._active.items() if run.num_ready}
        if not ready:
            return False
        timer = StepTimer()
        self._heartbeat.enter(f"iteration {iteration}", self._config.dist_timeout_seconds)
        taken, self._served = take_turns(ready, self._served, self._world.data_size * _ROWS_PER_RANK)
        jobs = [self._active[idx].job(count) for idx, count in sorted(taken.items())]
        tokens = sum(self._active[idx].num_tokens for idx in taken)
        run_jobs(self._policy, self._world, jobs, on_row=self._heartbeat.advance, turn=iteration)
        for idx in sorted(taken):
            run = self._active[idx]
            run.update()
            try:
                run.finish()
            except (ConfigError, RunError) as error:  # perhaps of this rank alone
                run.drop_batch(str(error))
        timer.lap("step")
        if self._totals is not None:
            self._totals.log(iteration, {
                "runs/active": len(self._active), "runs/waiting": num_waiting, "runs/in_iteration": len(taken),
                "tokens": tokens, "time/step": timer.laps["step"],
                "perf/tokens_per_second": tokens / timer.laps["step"],
            })  # fmt: skip
        return True
