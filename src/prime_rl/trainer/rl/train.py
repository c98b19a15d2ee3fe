"""The RL trainer: wait for batch n, train v_n on it, publish v_{n+1}.

Run by `trainer`, or on several ranks by `torchrun --nproc-per-node N src/prime_rl/trainer/rl/train.py @ config.toml`.
"""

import os
from collections.abc import Callable
from functools import partial
from itertools import count

import numpy as np
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from prime_rl.configs.trainer import TrainerConfig
from prime_rl.errors import ConfigError
from prime_rl.monitor import Monitor
from prime_rl.run.artifact import remove
from prime_rl.run.batch import ROWS_FILE, Batch, read_batch
from prime_rl.run.heart import Heartbeat
from prime_rl.run.paths import RunPaths
from prime_rl.run.peers import Peers
from prime_rl.run.rewind import branch_of_batch
from prime_rl.run.visibility import patience, settled
from prime_rl.run.wait import DeadlineError, wait_for
from prime_rl.supervisor.process import is_supervised
from prime_rl.trainer.checkpoints import Checkpointer
from prime_rl.trainer.engine import Engine
from prime_rl.trainer.loading import make_policy
from prime_rl.trainer.memory import prepare_optimizer
from prime_rl.trainer.model import PolicyModel, load_tokenizer
from prime_rl.trainer.optim import build_optimizer, schedule_factor
from prime_rl.trainer.parallel import World, compute_dtype, join_world
from prime_rl.trainer.publication import Publisher, choose_way, plain_twin
from prime_rl.trainer.report import Reporter, Stopwatch
from prime_rl.trainer.rl.batches import fake_batch, split_batch
from prime_rl.trainer.rl.objective import build_objective
from prime_rl.trainer.rl.reference import References
from prime_rl.trainer.start import rank_heartbeat
from prime_rl.types import PolicyVersion


def train(config: TrainerConfig) -> None:
    """Train until `config.max_steps`.

    Raises:
        ConfigError: bad input.
        RunError: a batch did not come in time, or the run cannot go on.
    """
    paths, timeout_s = config.run_paths, config.dist_timeout_seconds
    with rank_heartbeat(paths, timeout_s) as heart, join_world(config.device, timeout_s, config.model) as world:
        heart.enter("load the model")
        checkpoints = Checkpointer(config, paths, world, serves=True, keeps_batches=config.keep_batches)
        policy = make_policy(config.model, config.seed, world)
        tokenizer = load_tokenizer(config.tokenizer, config.model)
        optimizer = prepare_optimizer(build_optimizer(config.optim, policy), config.model)
        engine = Engine(policy, optimizer, world, config.optim.max_norm, heart.advance)
        publisher = make_publisher(config, policy, tokenizer, optimizer, world)
        objective = build_objective(config.loss, config.model.seq_len)
        references = References(config, policy, world)
        next_batch = batch_source(config, paths, policy, publisher, heart, checkpoints.batches_of)
        monitor = Monitor(paths, "trainer", config.wandb, config) if world.leads else None
        reporter = Reporter(policy, config, world, monitor)

        heart.enter("restore")
        progress = checkpoints.restore(policy, optimizer)
        if checkpoints.resumes and config.data.fake is None:
            publisher.start(paths.weights(progress.step), PolicyVersion(checkpoints.branch, progress.step))
        for step in range(progress.step, config.max_steps) if config.max_steps else count(progress.step):
            clock = Stopwatch()
            batch = next_batch(step)
            clock.lap("wait_for_batch")
            heart.enter(f"step {step}", timeout_s if world.size > 1 else None)
            factor = schedule_factor(config.scheduler, config.optim.lr, step, config.max_steps)
            minibatches = split_batch(batch, step, config.minibatches, world, room=config.model.seq_len)
            result = engine.step(references.score(minibatches), objective, factor)
            clock.lap("train")
            last = step + 1 == config.max_steps
            heart.enter(f"publish version {step + 1}", config.weight_broadcast.timeout)
            publisher.start(paths.weights(step + 1), PolicyVersion(checkpoints.branch, step + 1), last)
            clock.lap("publish")
            if world.leads:
                clean_up(config, paths, step)
            reporter.report(step, result, clock, batch.seq_lens, batch.loss_tokens, publisher.metrics())
            progress.count(len(batch.tokens), len(batch.seq_lens), len(np.unique(batch.sample_group)))
            heart.enter(f"checkpoint {progress.step}", config.ckpt.timeout if config.ckpt else None)
            checkpoints.step_done(progress, last)
        heart.enter("write what is left")
        checkpoints.close()
        publisher.close()
        if world.leads and config.data.fake is not None:
            remove(paths.weights(progress.step))
        reporter.close()


def make_publisher(
    config: TrainerConfig,
    policy: PolicyModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: Optimizer,
    world: World,
) -> Publisher:
    """Make what publishes each version while the next step already runs."""
    options = config.weight_broadcast
    files, transfer = choose_way(options, world)
    dtype = compute_dtype(config.model.dtype, world.device)
    publisher = Publisher(
        policy,
        tokenizer,
        compute_dtype(options.dtype, world.device),
        world,
        directory=files.directory,
        canary=dtype if options.canary else None,
        full_interval=files.delta.full_interval if files.delta else None,
        transfer=transfer,
        timeout_s=options.timeout,
        twin=partial(plain_twin, policy, config.model, world, dtype),
    )
    publisher.guard(optimizer)
    return publisher


def batch_source(
    config: TrainerConfig,
    paths: RunPaths,
    policy: PolicyModel,
    publisher: Publisher,
    heart: Heartbeat,
    branch: int | None = None,
) -> Callable[[int], Batch]:
    """Return what gives the batch of a step: the run directory, where every rank waits by itself, or a generator.

    Where a `branch` is given only its batches count: an orchestrator that has not seen yet that the trainer went back
    may still write others, which it puts aside then.

    The source raises ConfigError where the orchestrator was given another bound, and while it waits what goes wrong
    with the publication: the batch may never come without the version. It looks whether the orchestrator lives.
    """
    fake = config.data.fake
    if fake is not None:
        return lambda step: fake_batch(fake, policy.vocabulary, config.model.seq_len, config.seed, step)

    orchestrator = Peers(paths, "orchestrator", config.heartbeat.limits, judges=not is_supervised())

    looks = not int(os.environ.get("LOCAL_RANK", 0))  # one rank of each node; torchrun ends the others with it

    def check() -> None:
        publisher.check()
        if looks:
            orchestrator.check()

    def read(step: int) -> Batch:
        path = paths.rollouts(step)
        heart.enter(f"wait for batch {step}", config.wait_timeout_seconds, "orchestrator")
        owner = f"the orchestrator (log {paths.log('orchestrator')})"
        if looks:
            orchestrator.look()  # also where the batch is there and nobody waits
        try:
            wait_for(path, config.wait_timeout_seconds, owner, check, lambda: branch in (None, branch_of_batch(path)))
        except DeadlineError as error:
            raise DeadlineError(f"{error}; {orchestrator.told()}") from None
        batch, manifest = settled(partial(read_batch, path, step), patience(path, paths.visibility_s), publisher.check)
        if manifest["async_level"] != config.async_level:
            raise ConfigError(
                f"async_level = {config.async_level} here and {manifest['async_level']} at the orchestrator that wrote "
                f"{path}; give both the same with --async-level"
            )
        return batch

    return read


def clean_up(config: TrainerConfig, paths: RunPaths, step: int) -> None:
    """Delete what step `step` has made useless.

    The rows of the batch before, unless they are kept or a checkpoint may need them; its manifest stays and tells what
    was shipped.
    Versions made from fake data, which nobody reads; that of this step is still being written.
    """
    if config.data.fake is not None:
        remove(paths.weights(step))
    elif config.ckpt is None and not config.keep_batches:
        (paths.rollouts(step - 1) / ROWS_FILE).unlink(missing_ok=True)


if __name__ == "__main__":
    from prime_rl.entrypoints.trainer import main

    main()
