"""Samples of the tokens of a step, on one rank and on several."""

import dataclasses

import numpy as np
import pytest
import torch

from prime_rl.trainer.losses import token_distributions
from prime_rl.trainer.losses.token_distributions import TokenDistributions, rl_token_values, sft_token_values
from prime_rl.trainer.micro_batch import make_micro_batch
from prime_rl.trainer.parallel.process_group import World, join_world
from prime_rl.trainer.train_step import Counts, Minibatch, Objective, ScoredRow
from tests.unit.trainer.world import run_world


def make_row(tokens):
    """A row whose first token is not trained; log-probabilities are -token / 100, those of the sampler 0.5 less."""
    tokens = np.array(tokens, np.int64)
    mask = np.ones(len(tokens), bool)
    mask[0] = False
    advantages = (tokens % 3 - 1).astype(np.float32)
    logprobs = (-tokens / 100 - 0.5).astype(np.float32)
    return make_micro_batch(tokens, mask, [len(tokens)], logprobs=logprobs, advantages=advantages)


def score(row, before_first_update=True):
    mask = row.loss_mask
    logprobs = torch.where(mask, -row.tokens / 100, 0.0)
    return ScoredRow(row, logprobs, torch.where(mask, 1.0, 0.0), before_first_update, Counts(tokens=1))


def objective(scored):
    return Objective(scored.logprobs.sum(), {})


def sample(distributions, rows, step=0):
    minibatch = Minibatch(rows, Counts(tokens=1))
    recording = distributions.record(step, [minibatch], objective)
    losses = [recording(score(row)).loss for row in rows]
    assert losses == [objective(score(row)).loss for row in rows]
    return distributions.gather()


@pytest.fixture
def world():
    with join_world("cpu", 30) as world:
        yield world


def test_token_distributions_contain_the_trained_tokens_of_all_rows(world):
    values = sample(
        TokenDistributions(rl_token_values, world, lambda step: True), [make_row([9, 1, 2]), make_row([9, 3])]
    )
    np.testing.assert_allclose(values["logprob"], [-0.01, -0.02, -0.03], atol=1e-6)
    np.testing.assert_allclose(values["importance_ratio"], np.exp([0.5] * 3), atol=1e-5)
    np.testing.assert_allclose(values["mismatch_kl"], [np.expm1(0.5) - 0.5] * 3, atol=1e-5)
    np.testing.assert_array_equal(values["advantage"], [0, 1, -1])
    np.testing.assert_array_equal(values["entropy"], [1, 1, 1])


def test_token_distributions_of_a_step_that_is_not_due_are_empty(world):
    distributions = TokenDistributions(sft_token_values, world, lambda step: step == 4)
    assert distributions.record(3, [], objective) is objective
    assert sample(distributions, [make_row([9, 1])], step=3) == {}
    assert sample(distributions, [make_row([9, 1])], step=4).keys() == {"logprob", "entropy"}


def test_token_distributions_after_an_update_have_no_mismatch():
    values = rl_token_values(score(make_row([9, 1]), before_first_update=False))
    assert values["mismatch_kl"].isnan().all()
    assert values["importance_ratio"].isfinite().all()


def test_token_distributions_of_many_tokens_are_evenly_spaced(world, monkeypatch):
    monkeypatch.setattr(token_distributions, "MAX_TOKENS", 6)
    distributions = TokenDistributions(sft_token_values, world, lambda step: True)
    rows = [make_row(range(101)), make_row(range(100, 202))]
    values = -100 * sample(distributions, rows)["logprob"]
    np.testing.assert_allclose(values, [1, 50, 100, 101, 151, 201], atol=1e-3)


def gather_on_ranks(world: World, argument):
    """Values of two data-parallel ranks with different numbers of tokens, and of two ranks with the same rows."""
    row = make_row([9, *range(10 * world.rank, 10 * world.rank + 2 + world.rank)])
    apart = sample(TokenDistributions(sft_token_values, world, lambda step: True), [row])
    shared = dataclasses.replace(world, model_parallel_size=2)
    together = sample(TokenDistributions(sft_token_values, shared, lambda step: True), [make_row([9, 5, 6])])
    return [(-100 * values["logprob"]).round().tolist() for values in (apart, together)]


def test_token_distributions_of_two_ranks_are_those_of_both(tmp_path):
    answers = run_world(2, gather_on_ranks, None, tmp_path)
    assert answers == [[[0, 1, 10, 11, 12], [5, 6]]] * 2
