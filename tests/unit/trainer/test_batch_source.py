"""Splitting a batch into minibatches and micro-batches, equal on every world size (I9)."""

import numpy as np
import pytest
import torch

from prime_rl.configs.trainer import FakeDataConfig
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.rl.batch_source import fake_batch, split_batch

CPU = torch.device("cpu")


def make(step=0, **changes):
    config = FakeDataConfig(batch_size=22, seq_len=30, micro_batch_size=2, variable_length=True)
    return fake_batch(config.model_copy(update=changes), 100, row_length=60, seed=1, step=step)


def samples_of(minibatch):
    """Every sample that is trained on, as a list of tokens."""
    real = [row for row in minibatch.rows if len(row.scored)]
    return [part.tolist() for row in real for part in row.tokens.split(np.diff(row.boundaries.numpy()).tolist())]


@pytest.mark.parametrize("minibatches", [1, 3, 4, 50])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_split_batch_trains_every_sample_once_in_the_same_minibatch(minibatches, size):
    batch = make()
    alone = split_batch(batch, 0, minibatches, World(0, 1, CPU), max_tokens=60)
    ranks = [split_batch(batch, 0, minibatches, World(rank, size, CPU), max_tokens=60) for rank in range(size)]
    assert len(alone) == min(minibatches, batch.rows)
    for i, minibatch in enumerate(alone):
        shares = [rank[i] for rank in ranks]
        assert len({len(share.rows) for share in shares}) == 1
        assert {share.counts for share in shares} == {minibatch.counts}
        assert sorted(row for share in shares for row in samples_of(share)) == sorted(samples_of(minibatch))
    assert sum(minibatch.counts.tokens for minibatch in alone) == batch.loss_tokens
    assert sum(len(samples_of(m)) for m in alone) == len(batch.seq_lens)


def test_split_batch_balances_minibatches():
    sizes = [m.counts.tokens for m in split_batch(make(), 0, 4, World(0, 1, CPU), max_tokens=60)]
    assert max(sizes) < 1.35 * min(sizes)


def test_split_batch_marks_on_policy_by_sample():
    batch = make(step=5)
    versions = batch.versions.copy()
    first = int(np.flatnonzero(batch.loss_mask)[0])
    versions[first] = 4  # one older token makes its whole sample off-policy
    object.__setattr__(batch, "versions", versions)
    row = split_batch(batch, 5, batch.rows, World(0, 1, CPU), max_tokens=60)
    old = [m.rows[0] for m in row if not m.rows[0].on_policy.all()]
    assert len(old) == 1
    assert old[0].on_policy.tolist() == [s != 0 for s in old[0].segment_ids.tolist()]


def test_fake_batch_is_valid_and_depends_on_seed_and_step():
    one, same, other = make(0), make(0), make(1)
    one.validate()
    assert (one.tokens == same.tokens).all()
    assert not np.array_equal(one.tokens, other.tokens)
    assert set(np.unique(other.versions)) == {-1, 1}
    full = make(variable_length=False)
    assert (full.seq_lens == 30).all() and full.rows == 11


def test_split_batch_concatenates_rows_up_to_max_tokens():
    batch = make()
    apart, together = (
        split_batch(batch, 0, 1, World(0, 1, CPU), max_tokens=max_tokens)[0].rows for max_tokens in (1, 150)
    )
    assert len(apart) == batch.rows > len(together)
    assert all(len(row.tokens) <= 150 for row in together)
    for field in ("tokens", "position_ids", "loss_mask", "advantages", "on_policy"):
        assert torch.equal(*(torch.cat([getattr(row, field) for row in rows]) for rows in (apart, together)))
    lengths = [np.diff(row.boundaries.numpy()) for row in together]
    assert np.concatenate(lengths).tolist() == batch.seq_lens.tolist()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("max_tokens", [60, 150])
def test_split_batch_cuts_micro_batches_equally_on_every_rank(size, max_tokens):
    """The costliest rows of all ranks meet in one forward pass, and the cheapest in another: nobody waits for long."""
    batch = make(batch_size=44)
    ranks = [split_batch(batch, 0, 1, World(rank, size, CPU), max_tokens)[0].rows for rank in range(size)]
    assert len({len(rows) for rows in ranks}) == 1
    longest_yet = batch.seq_lens.max()
    for rows in zip(*ranks, strict=True):
        lengths = np.concatenate([np.diff(row.boundaries.numpy()) for row in rows if len(row.scored)])
        assert lengths.max() <= longest_yet
        assert all(len(row.tokens) <= max_tokens for row in rows)
        longest_yet = lengths.min()
