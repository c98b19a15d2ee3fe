"""Supervised fine-tuning: the step engine of the RL trainer on the assistant's tokens of a data set.

Run by `sft`, or on several ranks by `torchrun --nproc-per-node N src/prime_rl/trainer/sft/train.py @ config.toml`.
"""

from prime_rl.configs.sft import SFTConfig
from prime_rl.monitor import Monitor
from prime_rl.trainer.checkpoints import Checkpointer
from prime_rl.trainer.engine import Engine
from prime_rl.trainer.loading import make_policy
from prime_rl.trainer.memory import prepare_optimizer
from prime_rl.trainer.model import load_tokenizer
from prime_rl.trainer.optim import build_optimizer, schedule_factor
from prime_rl.trainer.parallel import compute_dtype, join_world
from prime_rl.trainer.publication import Publisher
from prime_rl.trainer.report import Reporter, Stopwatch
from prime_rl.trainer.sft import data
from prime_rl.trainer.sft.objective import lengths_of, sft_objective, share_rows
from prime_rl.trainer.sft.validation import Validator
from prime_rl.trainer.start import rank_heartbeat
from prime_rl.types import PolicyVersion


def train(config: SFTConfig) -> None:
    """Train for `config.max_steps`, or once through the data, and publish `weights/step_N` after the last of N steps.

    Raises:
        ConfigError: bad input.
        RunError: the run cannot go on.
    """
    paths, timeout_s = config.run_paths, config.dist_timeout_seconds
    with rank_heartbeat(paths, timeout_s) as heart, join_world(config.device, timeout_s, config.model) as world:
        heart.enter("load data and model")
        checkpoints = Checkpointer(config, paths, world)
        tokenizer = load_tokenizer(config.tokenizer, config.model)
        examples = data.open_data(config, tokenizer)
        batches, steps = examples.batches, examples.batches.steps
        policy = make_policy(config.model, config.seed, world)
        optimizer = prepare_optimizer(build_optimizer(config.optim, policy), config.model)
        engine = Engine(policy, optimizer, world, config.optim.max_norm, heart.advance)
        publisher = Publisher(policy, tokenizer, compute_dtype(config.weights_dtype, world.device), world)
        publisher.guard(optimizer)
        monitor = Monitor(paths, "trainer", config.wandb, config) if world.leads else None
        reporter = Reporter(policy, config, world, monitor)
        validate = Validator(config, examples.held_out, engine, world, monitor)

        heart.enter("restore")
        progress = checkpoints.restore(policy, optimizer, batches)
        validate(progress.step)
        for step, rows in enumerate(batches, progress.step):
            clock = Stopwatch()
            factor = schedule_factor(config.scheduler, config.optim.lr, step, steps)
            minibatch = share_rows(rows, config.data.micro_batch_size, world)
            clock.lap("load_data")
            heart.enter(f"step {step}", timeout_s if world.size > 1 else None)
            result = engine.step([minibatch], sft_objective, factor)
            clock.lap("train")
            heart.enter(f"finish step {step}")
            if step + 1 == steps or (config.weights_interval and (step + 1) % config.weights_interval == 0):
                publisher.start(paths.weights(step + 1), PolicyVersion(checkpoints.branch, step + 1))
                clock.lap("publish")
            reporter.report(step, result, clock, lengths_of(rows), minibatch.counts.tokens, publisher.metrics())
            validate(step + 1, last=step + 1 == steps)
            progress.count(int(lengths_of(rows).sum()), len(lengths_of(rows)))
            heart.enter(f"checkpoint {progress.step}", config.ckpt.timeout if config.ckpt else None)
            checkpoints.step_done(progress, last=progress.step == steps)
        heart.enter("write what is left")
        checkpoints.close()
        publisher.close()
        reporter.close()


if __name__ == "__main__":
    from prime_rl.entrypoints.sft import main

    main()
