"""Supervised fine-tuning on the assistant's tokens of a data set, with the training step of the RL trainer.

Started by `sft`, or on several ranks by `torchrun --nproc-per-node N -m prime_rl.trainer.sft.train @ config.toml`.
"""

from prime_rl.configs.sft import SFTConfig
from prime_rl.core.entry_point import run_main
from prime_rl.core.types import PolicyVersion
from prime_rl.monitors import Monitor
from prime_rl.monitors.bench_report import report_benchmark
from prime_rl.trainer.checkpoints.checkpointer import Checkpointer
from prime_rl.trainer.checkpoints.stop_request import exit_if_stopped
from prime_rl.trainer.data import sft_dataset
from prime_rl.trainer.fsdp import compute_dtype
from prime_rl.trainer.losses.token_distributions import TokenDistributions, sft_token_values
from prime_rl.trainer.memory.activation_checkpointing import prepare_optimizer
from prime_rl.trainer.memory.garbage_collection import GarbageCollection
from prime_rl.trainer.model.policy_model import load_tokenizer
from prime_rl.trainer.nodes.trainer_nodes import join_nodes
from prime_rl.trainer.optim import build_optimizer
from prime_rl.trainer.optim.lr_schedule import schedule_factor
from prime_rl.trainer.packing_check import check_packing
from prime_rl.trainer.parallel.process_group import join_world
from prime_rl.trainer.parallel.rank_settings import check_rank_settings
from prime_rl.trainer.process_setup import rank_heartbeat, start_process
from prime_rl.trainer.sft.sft_objective import Validator, lengths_of, sft_objective, share_rows
from prime_rl.trainer.train_step import TrainStep
from prime_rl.trainer.trainer_metrics import StepReporter, StepTimer
from prime_rl.trainer.weight_sync.publisher import Publisher
from prime_rl.trainer.weights.policy_loading import make_policy


def run(config: SFTConfig) -> None:
    """Prepare this process, train, and report the benchmark with `--bench`. Raises what `train` raises."""
    start_process(config.log, config.run_paths, "sft")
    with report_benchmark(config.bench, config.run_paths, "trainer"):
        stopped = train(config)
    exit_if_stopped(stopped)


def train(config: SFTConfig) -> bool:
    """Train for `config.max_steps`, or once through the data, and publish `weights/step_N` after the last of N steps.

    Returns whether it was stopped before that. Raises ConfigError for invalid input, and RunError if the run cannot
    continue.
    """
    paths, timeout_s = config.run_paths, config.dist_timeout_seconds
    with (
        rank_heartbeat(paths, timeout_s) as heartbeat,
        join_world(config.device, timeout_s, config.model) as world,
        join_nodes(paths, world, heartbeat),
    ):
        check_rank_settings(config, world)
        heartbeat.enter("load data and model")
        checkpoints = Checkpointer(config, paths, world)
        tokenizer = load_tokenizer(config.tokenizer, config.model)
        examples = sft_dataset.open_data(config, tokenizer, world)
        batches, steps = examples.batches, examples.batches.steps
        limits = {"seq_len": config.data.seq_len, "max_model_len": config.model.max_model_len or config.data.seq_len}
        model = config.model.model_copy(update=limits)
        policy = make_policy(model, config.seed, world)
        optimizer = prepare_optimizer(build_optimizer(config.optim, policy), config.model)
        reduce_once = config.model.reduce_gradients_once
        train_step = TrainStep(policy, optimizer, world, config.optim.max_norm, heartbeat.advance, reduce_once)
        publisher = Publisher(policy, tokenizer, compute_dtype(config.weights_dtype, world.device), world)
        publisher.guard(optimizer)
        monitor = Monitor(paths, "trainer", config.metric_loggers, config) if world.is_main else None
        reporter = StepReporter(policy, config, world, monitor, train_step)
        distributions = TokenDistributions(sft_token_values, world, config.logs_distributions)
        validate = Validator(config, examples.held_out, train_step, world, monitor)

        heartbeat.enter("restore")
        progress = checkpoints.restore(policy, optimizer, batches)
        heartbeat.enter("check the model", timeout_s if world.size > 1 else None)
        max_tokens = config.data.seq_len * config.data.micro_batch_size
        check_packing(policy, model, world, max_tokens)
        validate(progress.step)
        stop = checkpoints.stop_request
        with stop:
            garbage = GarbageCollection(config.gc_interval)
            for step, rows in enumerate(batches, progress.step):
                timer = StepTimer()
                factor = schedule_factor(config.scheduler, config.optim.lr, step, steps)
                minibatch = share_rows(rows, config.data.micro_batch_size, world)
                timer.lap("load_data")
                heartbeat.enter(f"step {step}", timeout_s if world.size > 1 else None, step=step)
                recording = distributions.record(step, [minibatch], sft_objective)
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
                limit_s = config.ckpt.timeout_seconds if config.ckpt else None
                heartbeat.enter(f"checkpoint {progress.step}", limit_s, step=step, version=progress.step)
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


if __name__ == "__main__":
    run_main(lambda: run(SFTConfig.load()))
