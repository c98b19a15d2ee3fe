"""Supervised fine-tuning on the assistant's tokens of a data set, with the training step of the RL trainer.

Started by `sft`, or on several ranks by `torchrun --nproc-per-node N -m prime_rl.trainer.sft.train @ config.toml`.
"""

import sys
import time
from collections.abc import Sequence

from prime_rl.configs.sft import SFTConfig
from prime_rl.core.entry_point import run_main
from prime_rl.trainer.rank_start import start_rank

if __name__ == "__main__":  # before the imports of torch

    def main() -> None:
        """Fine-tune as a rank, whose heartbeat shows that it imports torch."""
        config = SFTConfig.load()
        with start_rank(config.log, config.run_paths, "sft") as heartbeat:
            from prime_rl.trainer.sft.train import run

            run(config, heartbeat)

    run_main(main)
    sys.exit()

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from prime_rl.configs.loading.base_config import write_config
from prime_rl.core.types import PolicyVersion
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.monitors import Monitor
from prime_rl.monitors.bench_report import report_benchmark
from prime_rl.trainer.checkpoints.checkpointer import Checkpointer
from prime_rl.trainer.data import sft_dataset
from prime_rl.trainer.data.packed_stream import PackedRow
from prime_rl.trainer.fsdp import compute_dtype
from prime_rl.trainer.losses.loss_functions import cross_entropy
from prime_rl.trainer.memory_savings import prepare_optimizer
from prime_rl.trainer.micro_batch import PADDING_ROW, MicroBatch, assign_rows, make_micro_batch, masked_row
from prime_rl.trainer.optim.optimizers import build_optimizer
from prime_rl.trainer.packing_check import check_packing
from prime_rl.trainer.parallel.process_group import RankConsensus, World, join_world
from prime_rl.trainer.process_setup import (
    GarbageCollection,
    check_rank_settings,
    exit_if_stopped,
    limit_process,
)
from prime_rl.trainer.train_step import Counts, Minibatch, Objective, ScoredRow, TrainStep, schedule_factor
from prime_rl.trainer.trainer_metrics import StepReporter, StepTimer, TokenDistributions, sft_token_values
from prime_rl.trainer.trainer_nodes import join_nodes
from prime_rl.trainer.weight_sync.publisher import Publisher
from prime_rl.trainer.weights.policy_loading import make_policy


def run(config: SFTConfig, heartbeat: HeartbeatWriter) -> None:
    """Prepare this process, train, and report the benchmark with `--bench`. Raises what `train` raises."""
    limit_process(config.deterministic)
    heartbeat.enter("wait for all ranks", config.dist_timeout_seconds)
    with report_benchmark(config.bench, config.run_paths, "trainer"):
        stopped = train(config, heartbeat)
    exit_if_stopped(stopped)


def train(config: SFTConfig, heartbeat: HeartbeatWriter) -> bool:
    """Train for `config.max_steps`, or once through the data, and publish `weights/step_N` after the last of N steps.

    Returns whether it was stopped before that. Raises ConfigError for invalid input, and RunError if the run cannot
    continue.
    """
    paths, timeout_seconds = config.run_paths, config.dist_timeout_seconds
    with (
        join_world(config.device, timeout_seconds, config.model) as world,
        join_nodes(paths, world, heartbeat),
    ):
        check_rank_settings(config, world)
        heartbeat.enter("load data and model")
        tokenizer = sft_dataset.open_tokenizer(config)
        examples = sft_dataset.open_data(config, tokenizer, world)
        checkpoints = Checkpointer(config, paths, world, check_data=lambda state: examples.again().restore(state))
        if not checkpoints.resumes:
            examples.count_steps(0)  # reports invalid data before the model is loaded
        limits = {"seq_len": config.data.seq_len, "max_model_len": config.model.max_model_len or config.data.seq_len}
        model = config.model.model_copy(update=limits)
        policy = make_policy(model, config.seed, world)
        optimizer = prepare_optimizer(build_optimizer(config.optim, policy), config.model)
        reduce_once = config.model.reduce_gradients_once
        train_step = TrainStep(policy, optimizer, world, config.optim.max_norm, heartbeat.advance, reduce_once)
        publisher = Publisher(policy, tokenizer, compute_dtype(config.weights_dtype, world.device), world)
        publisher.guard(optimizer)
        if world.is_main:
            write_config(config, paths.config("sft"))  # for the model card of an export
        monitor = Monitor(paths, "trainer", config.metric_loggers, config) if world.is_main else None
        reporter = StepReporter(policy, config, world, monitor, train_step)
        distributions = TokenDistributions(sft_token_values, world, config.logs_distributions)
        validate = Validator(config, examples.held_out, train_step, world, monitor)

        heartbeat.enter("restore")
        progress = checkpoints.restore(policy, optimizer, examples.batches)
        heartbeat.enter("count the steps")
        steps, start = examples.count_steps(progress.step), checkpoints.schedule_start
        heartbeat.enter("check the model", timeout_seconds if world.size > 1 else None)
        max_tokens = config.data.seq_len * config.data.micro_batch_size
        check_packing(policy, model, world, max_tokens)
        if progress.step < steps or checkpoints.resumes:
            validate(progress.step, last=progress.step == steps)
        if progress.step == steps and not RankConsensus(world).on_main(paths.weights(steps).exists):
            publisher.start(paths.weights(steps), PolicyVersion(checkpoints.branch, steps))
        stop = checkpoints.stop_request
        with stop:
            garbage = GarbageCollection(config.gc_interval)
            for step, rows in enumerate(examples.batches, progress.step):
                timer = StepTimer()
                factor = schedule_factor(config.scheduler, config.optim.lr, step - start, steps - start)
                minibatch = share_rows(rows, config.data.micro_batch_size, world, step)
                timer.lap("load_data")
                heartbeat.enter(f"step {step}", timeout_seconds if world.size > 1 else None, step=step)
                recording = distributions.record(step, len(minibatch.rows), sft_objective)
                result = train_step.step([minibatch], recording, factor, config.records_layers(step))
                timer.lap("train")
                heartbeat.enter(f"finish step {step}", step=step)
                if step + 1 == steps or (config.weights_interval and (step + 1) % config.weights_interval == 0):
                    publisher.start(paths.weights(step + 1), PolicyVersion(checkpoints.branch, step + 1))
                    timer.lap("publish")
                tokens = distributions.gather()
                lengths, scored, published = lengths_of(rows), minibatch.counts.tokens, publisher.metrics()
                progress.count(int(lengths.sum()), len(lengths))
                reporter.report(step, result, timer, lengths, scored, progress, published, tokens)
                validate(step + 1, last=step + 1 == steps)
                limit_seconds = config.ckpt.timeout_seconds if config.ckpt else None
                heartbeat.enter(f"checkpoint {progress.step}", limit_seconds, step=step, version=progress.step)
                checkpoints.step_done(progress, last=progress.step == steps)
                garbage.step_done(step)
                if progress.step != steps and stop.agree(progress.step):
                    break
            garbage.close()
            heartbeat.enter("finish writing")
            checkpoints.save_at_stop(progress)
            checkpoints.close()
            publisher.close()
            reporter.close()
        return stop.is_agreed


def share_rows(rows: Sequence[PackedRow], micro_batch_size: int, world: World, step: int = 0) -> Minibatch:
    """Put `micro_batch_size` rows into each micro-batch and take this rank's; counts are over all ranks (I9)."""
    groups = [rows[i : i + micro_batch_size] for i in range(0, len(rows), micro_batch_size)]
    costs = [float(lengths_of(group).sum()) for group in groups]
    mine = assign_rows(costs, world.data_size, step)[world.data_rank]
    learned = sum(int(sequence.loss_mask.sum()) for row in rows for sequence in row)
    return Minibatch(
        rows=[masked_row() if i == PADDING_ROW else to_micro_batch(groups[i]) for i in mine],
        counts=Counts(tokens=max(1, learned)),
    )


def to_micro_batch(rows: Sequence[PackedRow]) -> MicroBatch:
    """Concatenate rows to one micro-batch; attention keeps their segments apart."""
    sequences = [sequence for row in rows for sequence in row]
    return make_micro_batch(
        np.concatenate([s.tokens for s in sequences]),
        np.concatenate([s.loss_mask for s in sequences]),
        [len(s) for s in sequences],
    )


def sft_objective(scored: ScoredRow) -> Objective:
    """Compute the mean cross-entropy over the trained tokens of all ranks, and their entropy."""
    mask = scored.row.loss_mask
    loss = cross_entropy(scored.logprobs, mask).sum() / scored.counts.tokens
    return Objective(loss, {"entropy": (scored.entropy.sum(), mask.sum())})


def lengths_of(rows: Sequence[PackedRow]) -> NDArray[np.int64]:
    """Return the number of tokens of each sequence, int64 [S]."""
    return np.array([len(sequence) for row in rows for sequence in row], np.int64)


class Validator:
    """Reports `val/loss` by version of the weights: the mean over all trained tokens of the validation set."""

    def __init__(
        self, config: SFTConfig, rows: list[PackedRow] | None, step: TrainStep, world: World, monitor: Monitor | None
    ) -> None:
        """Divide the packed rows among the ranks; None disables validation. `monitor` is None except on rank 0."""
        self._minibatch = None if rows is None else share_rows(rows, config.data.micro_batch_size, world)
        self._interval = config.val.interval if config.val is not None else 1
        self._train_step, self._monitor = step, monitor

    def __call__(self, version: int, last: bool = False) -> None:
        """Validate version 0, each `val.interval`-th version, and the `last`. All ranks call it together."""
        if self._minibatch is None or (version % self._interval and not last):
            return
        start = time.perf_counter()
        loss = self._train_step.evaluate(self._minibatch, sft_objective)
        if self._monitor is not None:
            self._monitor.log(version, {"val/loss": loss, "time/val": time.perf_counter() - start})
            logger.info(f"validation of version {version} | loss {loss:.4g}")
