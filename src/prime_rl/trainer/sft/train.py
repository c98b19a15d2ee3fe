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
from prime_rl.types import PolicyVersion


def train(config: SFTConfig) -> None:
    """Train for `config.max_steps`, or once through the data, and publish `weights/step_N` after the last of N steps.

    Raises:
        ConfigError: bad input.
        RunError: the run cannot go on.
    """
    paths = config.run_paths
    with join_world(config.device, config.dist_timeout_seconds, config.model) as world:
        checkpoints = Checkpointer(config, paths, world)
        tokenizer = load_tokenizer(config.tokenizer, config.model)
        examples = data.open_data(config, tokenizer)
        batches, steps = examples.batches, examples.batches.steps
        policy = make_policy(config.model, config.seed, world)
        optimizer = prepare_optimizer(build_optimizer(config.optim, policy), config.model)
        engine = Engine(policy, optimizer, world, config.optim.max_norm)
        publisher = Publisher(policy, tokenizer, compute_dtype(config.weights_dtype, world.device), world)
        publisher.guard(optimizer)
        monitor = Monitor(paths, "trainer", config.wandb, config) if world.leads else None
        reporter = Reporter(policy, config, world, monitor)
        validate = Validator(config, examples.held_out, engine, world, monitor)

        progress = checkpoints.restore(policy, optimizer, batches)
        validate(progress.step)
        for step, rows in enumerate(batches, progress.step):
            clock = Stopwatch()
            factor = schedule_factor(config.scheduler, config.optim.lr, step, steps)
            minibatch = share_rows(rows, config.data.micro_batch_size, world)
            clock.lap("load_data")
            result = engine.step([minibatch], sft_objective, factor)
            clock.lap("train")
            if step + 1 == steps or (config.weights_interval and (step + 1) % config.weights_interval == 0):
                publisher.start(paths.weights(step + 1), PolicyVersion(checkpoints.branch, step + 1))
                clock.lap("publish")
            reporter.report(step, result, clock, lengths_of(rows), minibatch.counts.tokens, publisher.metrics())
            validate(step + 1, last=step + 1 == steps)
            progress.count(int(lengths_of(rows).sum()), len(lengths_of(rows)))
            checkpoints.step_done(progress, last=progress.step == steps)
        checkpoints.close()
        publisher.close()
        reporter.close()


if __name__ == "__main__":
    from prime_rl.entrypoints.sft import main

    main()
