"""The RL trainer: train v_n on batch n and publish v_{n+1}, for n = 0, 1, 2, ...

    rollouts/step_n --> BatchSource.read --> split_batch --> References.score --> TrainStep.step
          ^                   (1)                                                  (2)    |
          |                                                                               v
    orchestrator <-- inference <-- weights/step_{n+1} <-- writer thread <-- Publisher.start   Checkpointer.step_done
                                                                               (3)                  (4)

Back-pressure:

1. `read` waits for the orchestrator, which ships batch n only when each of its tokens is from v_{n-k} or later (I1).
2. The update waits until the writer thread has copied the weights of v_n to host memory.
3. `start` waits until v_n is written; v_{n+1} is then written while the next step runs.
4. A checkpoint waits until the previous one is written.

Started by `trainer`, or on several ranks by `torchrun --nproc-per-node N -m prime_rl.trainer.rl.train @ config.toml`.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from typing import Any

import torch
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from prime_rl.configs.trainer import TrainerConfig
from prime_rl.configs.training.model import DebugModelConfig
from prime_rl.core.entry_point import run_main
from prime_rl.core.types import PolicyVersion
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.liveness.run_settings import PUBLISHED_DTYPE, RunSettings
from prime_rl.liveness.timeline_writer import TimelineWriter
from prime_rl.monitors import Monitor
from prime_rl.monitors.bench_report import report_benchmark
from prime_rl.storage.artifact import remove_artifact
from prime_rl.storage.batch import ROWS_FILE
from prime_rl.storage.paths import RunPaths
from prime_rl.trainer.checkpoints.checkpointer import Checkpointer
from prime_rl.trainer.checkpoints.stop_request import exit_if_stopped
from prime_rl.trainer.fsdp import compute_dtype
from prime_rl.trainer.losses.token_distributions import TokenDistributions, rl_token_values
from prime_rl.trainer.memory.activation_checkpointing import prepare_optimizer
from prime_rl.trainer.memory.garbage_collection import GarbageCollection
from prime_rl.trainer.model.policy_model import PolicyModel, load_tokenizer
from prime_rl.trainer.nodes.trainer_nodes import join_nodes
from prime_rl.trainer.optim import build_optimizer
from prime_rl.trainer.optim.lr_schedule import schedule_factor
from prime_rl.trainer.packing_check import check_packing
from prime_rl.trainer.parallel.process_group import World, device_type, join_world
from prime_rl.trainer.parallel.rank_settings import check_rank_settings
from prime_rl.trainer.policy_canary import check_base_canaries, unsharded_copy
from prime_rl.trainer.process_setup import rank_heartbeat, start_process
from prime_rl.trainer.rl.batch_source import BatchSource, compare_with_orchestrator, split_batch
from prime_rl.trainer.rl.reference_logprobs import References
from prime_rl.trainer.rl.rl_objective import build_objective
from prime_rl.trainer.rl.token_export import TokenExporter
from prime_rl.trainer.train_step import TrainStep
from prime_rl.trainer.trainer_metrics import StepReporter, StepTimer
from prime_rl.trainer.weight_sync.memory import check_transport
from prime_rl.trainer.weight_sync.publisher import Publisher
from prime_rl.trainer.weights.policy_loading import make_policy


def run(config: TrainerConfig) -> None:
    """Prepare this process, train, and report the benchmark with `--bench`. Raises what `train` raises."""
    start_process(config.log, config.run_paths)
    with report_benchmark(config.bench, config.run_paths, "trainer"):
        stopped = train(config)
    exit_if_stopped(stopped)


def train(config: TrainerConfig) -> bool:
    """Train until `config.max_steps`, or until the trainer is stopped; return whether it was stopped.

    Raises ConfigError for invalid input, and RunError if the run cannot continue.
    """
    paths, timeout_s = config.run_paths, config.dist_timeout_seconds
    with (
        rank_heartbeat(paths, timeout_s, complete_settings(config)) as heartbeat,
        join_world(config.device, timeout_s, config.model) as world,
        join_nodes(paths, world, heartbeat, config.heartbeat.limits, config.nodes_share_directory) as directory,
    ):
        check_rank_settings(config, world)
        compare_with_orchestrator(config)
        heartbeat.enter("load the model")
        exporter = make_exporter(config, paths, world, lambda: checkpoints.first_needed_batch)
        checkpoints = Checkpointer(
            config, paths, world, publishes_versions=True,
            keeps_rows=lambda step: config.keep_batches or exporter.keeps_rows(step),
        )  # fmt: skip
        policy = make_policy(config.model, config.seed, world)
        tokenizer = load_tokenizer(config.tokenizer, config.model)
        optimizer = prepare_optimizer(build_optimizer(config.optim, policy), config.model)
        reduce_once = config.model.reduce_gradients_once
        train_step = TrainStep(policy, optimizer, world, config.optim.max_norm, heartbeat.advance, reduce_once)
        timeline = heartbeat.part("publication") if world.is_main else None  # it overlaps the phases of the rank
        publisher = make_publisher(config, policy, tokenizer, optimizer, world, timeline, directory.num_writers)
        objective = build_objective(config.loss, config.model.seq_len, exporter.add)
        references = References(config, policy, world)
        batches, stop = make_batches(config, policy, world, publisher, heartbeat, checkpoints), checkpoints.stop_request
        monitor = Monitor(paths, "trainer", config.metric_loggers, config) if world.is_main else None
        reporter = StepReporter(policy, config, world, monitor, train_step)
        distributions = TokenDistributions(rl_token_values, world, config.logs_distributions)

        heartbeat.enter("restore")
        progress = checkpoints.restore(policy, optimizer)
        heartbeat.enter("check the model", timeout_s if world.size > 1 else None)
        check_packing(policy, config.model, world, config.model.seq_len)
        if checkpoints.resumes and config.data.fake is None:
            publisher.start(paths.weights(progress.step), PolicyVersion(checkpoints.branch, progress.step))
        with stop:
            garbage = GarbageCollection(config.gc_interval)
            for step in range(progress.step, config.max_steps) if config.max_steps else count(progress.step):
                timer = StepTimer()
                if (batch := batches.read(step)) is None:
                    break
                timer.lap("wait_for_batch")
                heartbeat.enter(f"step {step}", timeout_s if world.size > 1 else None, step=step)
                factor = schedule_factor(config.scheduler, config.optim.lr, step, config.max_steps)
                minibatches = split_batch(batch, step, config.num_minibatches, world, max_tokens=config.model.seq_len)
                exporter.start_step(step)
                recording = distributions.record(step, minibatches, objective)
                result = train_step.step(references.score(minibatches), recording, factor, config.records_layers(step))
                timer.lap("train")
                last = step + 1 == config.max_steps
                heartbeat.enter(
                    f"publish version {step + 1}", config.weight_broadcast.timeout_seconds, step=step, version=step + 1
                )
                publisher.start(paths.weights(step + 1), PolicyVersion(checkpoints.branch, step + 1), last)
                timer.lap("publish")
                exporter.finish_step(step, len(batch.tokens))
                if directory.is_main:
                    delete_obsolete_files(config, paths, step, exporter.keeps_rows)
                tokens = distributions.gather()
                progress.count_batch(batch)
                scored, published = batch.loss_tokens, publisher.metrics()
                reporter.report(step, result, timer, batch.seq_lens, scored, progress, published, tokens)
                limit_s = config.ckpt.timeout_seconds if config.ckpt else None
                heartbeat.enter(f"checkpoint {progress.step}", limit_s, step=step, version=progress.step)
                checkpoints.step_done(progress, last)
                garbage.step_done(step)
            garbage.close()
            heartbeat.enter("finish writing")
            checkpoints.save_at_stop(progress)
            checkpoints.close()
            publisher.close()
            exporter.close()
            if world.is_main and config.data.fake is not None:
                remove_artifact(paths.weights(progress.step))
            reporter.close()
        return stop.is_agreed


def complete_settings(config: TrainerConfig) -> RunSettings:
    """Return the settings that other processes must fit, with the precision of the published weights."""
    dtype = compute_dtype(config.weight_broadcast.dtype, torch.device(device_type(config.device)))
    return {**config.run_settings, PUBLISHED_DTYPE: str(dtype).removeprefix("torch.")}


def make_batches(
    config: TrainerConfig,
    policy: PolicyModel,
    world: World,
    publisher: Publisher,
    heartbeat: HeartbeatWriter,
    checkpoints: Checkpointer,
) -> BatchSource:
    """Create the source of the batches, which compares the base model before batch 0."""
    return BatchSource(
        config,
        config.run_paths,
        policy.vocabulary,
        publisher.check,
        heartbeat,
        checkpoints.required_branch,
        partial(check_version_0, config, policy, world),
        checkpoints.stop_request,
    )


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
    check_transport(options, world)
    dtype = compute_dtype(config.model.dtype, world.device)
    publisher = Publisher(
        policy,
        tokenizer,
        compute_dtype(options.dtype, world.device),
        world,
        options,
        canary=dtype if options.canary else None,
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
    elif config.ckpt is None and not config.keep_batches and not keeps_rows(step - 1):
        (paths.rollouts(step - 1) / ROWS_FILE).unlink(missing_ok=True)


if __name__ == "__main__":
    run_main(lambda: run(TrainerConfig.load()))
