"""One run on a policy: its optimizer, loss, published versions, checkpoints and metrics.

A trainer of one run has one, a trainer of several runs one for each (`multi_run`).
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from prime_rl.configs.trainer import TrainerConfig
from prime_rl.configs.training.model import DebugModelConfig
from prime_rl.core.types import PolicyVersion
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.liveness.run_settings import PUBLISHED_DTYPE, RunSettings
from prime_rl.liveness.timeline_writer import TimelineWriter
from prime_rl.monitors import Monitor
from prime_rl.storage.artifact import remove_artifact
from prime_rl.storage.batch import Batch, Progress, delete_rows
from prime_rl.storage.paths import RunPaths
from prime_rl.trainer.checkpoints.checkpointer import Checkpointer
from prime_rl.trainer.fsdp import compute_dtype
from prime_rl.trainer.memory_savings import prepare_optimizer
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.optim.optimizers import build_optimizer
from prime_rl.trainer.parallel.process_group import RankConsensus, World, device_type
from prime_rl.trainer.rl.rl_objective import build_objective, with_source_metrics
from prime_rl.trainer.rl.token_export import TokenExporter
from prime_rl.trainer.train_step import Objective, ScoredRow, StepResult, TrainStep, schedule_factor
from prime_rl.trainer.trainer_metrics import StepReporter, StepTimer, TokenDistributions, rl_token_values
from prime_rl.trainer.trainer_nodes import DirectoryUse
from prime_rl.trainer.weight_sync.publisher import (
    TRANSPORTS,
    Publisher,
    canary_row,
    check_base_canaries,
    measure_canary,
    unsharded_copy,
)


@dataclass(frozen=True, slots=True)
class PolicyOfRuns:
    """A sharded policy on this rank, its tokenizer, the ranks, and how they use the run directory."""

    policy: PolicyModel
    tokenizer: PreTrainedTokenizerBase
    world: World
    directory: DirectoryUse


class TrainedRun:
    """One run on a policy: its optimizer, loss, published versions, checkpoints and metrics.

    Attributes:
        train_step: forward, backward and update of a step, between `begin_step` and `end_step`.
        publisher: of the run's versions.
        progress: of the run, once restored.
    """

    def __init__(
        self,
        config: TrainerConfig,
        shared: PolicyOfRuns,
        heartbeat: HeartbeatWriter,
        exporter: TokenExporter,
        checkpoints: Checkpointer,
        name: str = "",
    ) -> None:
        """Create the parts; all ranks call it together. `name` is the run's in the log, if the trainer has several.

        Raises ConfigError as `train`.
        """
        policy, tokenizer, world, directory = shared.policy, shared.tokenizer, shared.world, shared.directory
        self._config, self._paths, self._heartbeat = config, config.run_paths, heartbeat
        self._policy, self._exporter, self._checkpoints, self._directory = policy, exporter, checkpoints, directory
        self._optimizer = prepare_optimizer(build_optimizer(config.optim, policy), config.model)
        reduce_once = config.model.reduce_gradients_once
        self.train_step = TrainStep(
            policy, self._optimizer, world, config.optim.max_norm, heartbeat.advance, reduce_once
        )
        timeline = heartbeat.part("publication") if world.is_main else None  # it overlaps the phases of the rank
        self.publisher = make_publisher(
            config, policy, tokenizer, self._optimizer, world, timeline, directory.num_writers
        )
        self._objective = build_objective(config.loss, config.model.seq_len, exporter.add)
        monitor = make_monitor(config, world)
        self._reporter = StepReporter(policy, config, world, monitor, self.train_step, name)
        self._distributions = TokenDistributions(rl_token_values, world, config.logs_distributions)

    def restore(self) -> Progress:
        """Restore the checkpoint that the run resumes, if any; return the progress at the start."""
        self.progress = self._checkpoints.restore(self._policy, self._optimizer)
        return self.progress

    def publish_restored(self) -> None:
        """Start to publish the version of a resumed checkpoint again."""
        step = self.progress.step
        if self._checkpoints.resumes and self._config.data.fake is None:
            last = step == self._config.max_steps
            self.publisher.start(self._paths.weights(step), PolicyVersion(self._checkpoints.branch, step), last)

    def begin_step(self, batch: Batch, num_rows: int) -> tuple[Callable[[ScoredRow], Objective], float, bool]:
        """Return the arguments of `TrainStep.begin` for a batch with `num_rows` rows on this rank."""
        step, start, steps = self.progress.step, self._checkpoints.schedule_start, self._config.max_steps
        length = None if steps is None else steps - start
        factor = schedule_factor(self._config.scheduler, self._config.optim.lr, step - start, length)
        self._exporter.start_step(step)
        objective = self._distributions.record(step, num_rows, with_source_metrics(self._objective, batch))
        return objective, factor, self._config.records_layers(step)

    def end_step(self, batch: Batch, result: StepResult, timer: StepTimer) -> None:
        """Publish the version after the step, report the step, and save a checkpoint if one is due.

        All ranks call it together. Raises RunError if an earlier version or checkpoint could not be written.
        """
        config, progress, step = self._config, self.progress, self.progress.step
        last, limit_seconds = step + 1 == config.max_steps, config.weight_broadcast.timeout_seconds
        self._heartbeat.enter(f"publish version {step + 1}", limit_seconds, step=step, version=step + 1)
        version = PolicyVersion(self._checkpoints.branch, step + 1)
        self.publisher.start(self._paths.weights(step + 1), version, last)
        timer.lap("publish")
        self._exporter.finish_step(step, len(batch.tokens))
        tokens = self._distributions.gather()
        progress.count_batch(batch)
        scored, published = batch.loss_tokens, self.publisher.metrics()
        try:
            self._reporter.report(step, result, timer, batch.seq_lens, scored, progress, published, tokens)
        finally:  # a full disk fails the report on rank 0 alone, and the other ranks save
            ckpt_seconds = config.ckpt.timeout_seconds if config.ckpt else None
            self._heartbeat.enter(f"checkpoint {progress.step}", ckpt_seconds, step=step, version=progress.step)
            self._checkpoints.step_done(progress, last)
        if self._directory.is_main:
            delete_obsolete_files(config, self._paths, step, self._exporter.keeps_rows)

    def close(self) -> None:
        """Wait until everything is written, with a checkpoint if the run stops."""
        self._heartbeat.enter("finish writing")
        with ExitStack() as stack:
            parts = (self._checkpoints, self.publisher, self._exporter, self._reporter)
            for part in reversed(parts):
                stack.callback(part.close)
            self._checkpoints.save_at_stop(self.progress)


def make_monitor(config: TrainerConfig, world: World) -> Monitor | None:
    """Create the monitor on rank 0; all ranks call it together, and all raise its ConfigError."""
    monitors = list[Monitor]()
    RankConsensus(world).on_main(
        lambda: monitors.append(Monitor(config.run_paths, "trainer", config.metric_loggers, config))
    )
    return monitors[0] if monitors else None


def make_checkpoints(config: TrainerConfig, world: World) -> tuple[TokenExporter, Checkpointer]:
    """Create what reads and deletes files of earlier steps, and roll the run back to where it starts."""
    paths = config.run_paths
    exporter = make_exporter(config, paths, world, lambda: checkpoints.first_needed_batch)
    checkpoints = Checkpointer(
        config, paths, world, publishes_versions=True,
        keeps_rows=lambda step: config.keep_batches or exporter.keeps_rows(step),
    )  # fmt: skip
    return exporter, checkpoints


def complete_settings(config: TrainerConfig) -> RunSettings:
    """Return the settings that other processes must fit, with the precision of the published weights."""
    dtype = compute_dtype(config.weight_broadcast.dtype, torch.device(device_type(config.device)))
    return {**config.run_settings, PUBLISHED_DTYPE: str(dtype).removeprefix("torch.")}


def make_publisher(
    config: TrainerConfig,
    policy: PolicyModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: Optimizer,
    world: World,
    timeline: TimelineWriter | None = None,
    num_writers: int | None = None,
) -> Publisher:
    """Create the publisher, which writes each version while the next step runs, on the first `num_writers` ranks."""
    options = config.weight_broadcast
    TRANSPORTS[options.type].check_device(options, world)
    dtype = compute_dtype(config.model.dtype, world.device)
    # No checkpoint is restored yet, so these are the base model's weights, as those of inference at its start.
    base = measure_canary(policy, canary_row(policy.vocabulary).to(world.device)) if options.canary else list
    publisher = Publisher(
        policy,
        tokenizer,
        compute_dtype(options.dtype, world.device),
        world,
        options,
        canary=dtype if options.canary else None,
        base_logprobs=base(),
        canary_model=partial(unsharded_copy, policy, config.model, world, dtype),
        timeline=timeline,
        num_writers=num_writers,
    )
    publisher.guard(optimizer)
    return publisher


def check_version_0(config: TrainerConfig, policy: PolicyModel, world: World, manifest: Mapping[str, Any]) -> None:
    """Compare the policy with the base model that sampled batch 0 (I6), unless the canary is disabled.

    `model.debug` changes the trainer's model on purpose, so it disables the check.
    """
    if config.weight_broadcast.canary and config.model.debug == DebugModelConfig():
        dtype = compute_dtype(config.model.dtype, world.device)
        check_base_canaries(policy, world, manifest, config.model.name, dtype)


def make_exporter(
    config: TrainerConfig, paths: RunPaths, world: World, first_needed_batch: Callable[[], int]
) -> TokenExporter:
    """Create the exporter of per-token values; fake batches are not on disk, so nothing is exported with them.

    `first_needed_batch` is that of the checkpoints. Without checkpoints, each batch is needed until it is trained on.
    """
    first_needed: Callable[[], int] | None = first_needed_batch if config.ckpt is not None else lambda: sys.maxsize
    if config.keep_batches:
        first_needed = None
    return TokenExporter(config.token_export if config.data.fake is None else None, paths, world, first_needed)


def delete_obsolete_files(config: TrainerConfig, paths: RunPaths, step: int, keeps_rows: Callable[[int], bool]) -> None:
    """Delete the files that step `step` made obsolete.

    These are the rows of the previous batch, unless they are kept (`keeps_rows`) or a checkpoint may need them; the
    manifest stays as a record. With fake data they are the previous version of the weights, since nothing reads it.
    """
    if config.data.fake is not None:
        remove_artifact(paths.weights(step))
    elif config.ckpt is None and not config.keep_batches:
        delete_rows(paths, below=step, first=step - 1, keeps=keeps_rows)
