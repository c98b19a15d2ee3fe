"""Supervised fine-tuning: the step engine of the RL trainer on the assistant's tokens of a data set.

Run by `sft`, or on several ranks by `torchrun --nproc-per-node N src/prime_rl/trainer/sft/train.py @ config.toml`.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
from transformers import PreTrainedTokenizerBase

from prime_rl.configs.sft import LossMaskConfig, SFTConfig
from prime_rl.errors import ConfigError
from prime_rl.monitor import Monitor
from prime_rl.run.assign import PADDING_ROW, assign_rows
from prime_rl.trainer.engine import Counts, Engine, Minibatch, Objective, Scored
from prime_rl.trainer.loading import make_policy
from prime_rl.trainer.losses import cross_entropy
from prime_rl.trainer.micro_batch import masked_row
from prime_rl.trainer.model import load_tokenizer
from prime_rl.trainer.optim import build_optimizer, schedule_factor
from prime_rl.trainer.parallel import World, compute_dtype, join_world
from prime_rl.trainer.publish import Publisher
from prime_rl.trainer.report import Reporter, Stopwatch
from prime_rl.trainer.sft import data
from prime_rl.trainer.start import check_output_dir
from prime_rl.types import PolicyVersion


def train(config: SFTConfig) -> None:
    """Train for `config.max_steps`, or once through the data, and publish `weights/step_N` after the last of N steps.

    Raises:
        ConfigError: bad input.
        RunError: the run cannot go on.
    """
    paths = config.run_paths
    with join_world(config.device, config.dist_timeout_seconds, config.model) as world:
        check_output_dir(paths)
        policy = make_policy(config.model, config.seed, world)
        tokenizer = load_tokenizer(config.tokenizer, config.model)
        batches, steps = prepare_batches(config, tokenizer, policy.vocabulary)
        engine = Engine(policy, build_optimizer(config.optim, policy), world, config.optim.max_norm)
        publisher = Publisher(policy, tokenizer, compute_dtype(config.weights_dtype, world.device), world)
        monitor = Monitor(paths, "trainer", config.wandb, config) if world.leads else None
        reporter = Reporter(policy, config.model, world, monitor)

        for step, rows in enumerate(batches):
            clock = Stopwatch()
            factor = schedule_factor(config.scheduler, config.optim.lr, step, steps)
            minibatch = share_rows(rows, config.data.micro_batch_size, world)
            clock.lap("load_data")
            result = engine.step([minibatch], sft_objective, factor)
            clock.lap("train")
            if step + 1 == steps or (config.weights_interval and (step + 1) % config.weights_interval == 0):
                publisher.publish(paths.weights(step + 1), PolicyVersion(0, step + 1))
                clock.lap("publish")
            reporter.report(step, result, clock, lengths_of(rows), minibatch.counts.tokens)
        reporter.close()


def prepare_batches(
    config: SFTConfig, tokenizer: PreTrainedTokenizerBase, vocabulary: int
) -> tuple[Iterable[list[data.Row]], int]:
    """Return the batches in order and how many there are.

    Raises:
        ConfigError: the data set is missing or has nothing to learn, or fake data without `max_steps`.
    """
    source, steps = config.data, config.max_steps
    if source.type == "sft" and source.loss_mask != LossMaskConfig():
        raise ConfigError("data.loss_mask: only assistant messages can be learned yet; leave it out")
    if source.type == "fake":
        stream = data.fake_sequences(source, vocabulary)
    else:
        kept = data.encode_all(data.load_examples(source), tokenizer, source.seq_len)
        stream = data.in_order(kept, source.seed if source.shuffle else None, epochs=1 if steps is None else None)
    batches = data.in_batches(data.pack(stream, source.seq_len), source.batch_size)
    if steps is not None:
        return islice(batches, steps), steps
    if source.type == "fake":
        raise ConfigError("max_steps: fake data never ends; set max_steps")
    once = list(batches)
    return once, len(once)


def share_rows(rows: Sequence[data.Row], micro_batch_size: int, world: World) -> Minibatch:
    """Lay `micro_batch_size` rows into each micro-batch and take this rank's; N counts the tokens of all ranks."""
    groups = [rows[i : i + micro_batch_size] for i in range(0, len(rows), micro_batch_size)]
    mine = assign_rows([float(lengths_of(group).sum()) for group in groups], world.data_size)[world.data_rank]
    learned = sum(int(sequence.loss_mask.sum()) for row in rows for sequence in row)
    return Minibatch(
        rows=[masked_row() if i == PADDING_ROW else data.to_micro_batch(groups[i]) for i in mine],
        counts=Counts(tokens=max(1, learned)),
    )


def sft_objective(scored: Scored) -> Objective:
    """Cross-entropy over the learned tokens, a mean over those of all ranks, and their entropy."""
    mask = scored.row.loss_mask
    loss = cross_entropy(scored.logprobs, mask).sum() / scored.counts.tokens
    return Objective(loss, {"entropy": (scored.entropy.sum(), mask.sum())})


def lengths_of(rows: Sequence[data.Row]) -> np.ndarray:
    """Tokens of each sequence, int64 [S]."""
    return np.array([len(sequence) for row in rows for sequence in row], np.int64)


if __name__ == "__main__":
    from prime_rl.entrypoints.sft import main

    main()
