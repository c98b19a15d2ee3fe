"""Statistics over tokens and ranks: equal to one computation over everything."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.trainer import trainer_metrics
from prime_rl.trainer.micro_batch import make_micro_batch
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.train_step import (
    ENTROPY_QUANTILES,
    Counts,
    EntropyQuantiles,
    Minibatch,
    Objective,
    ScoredRow,
)
from prime_rl.trainer.trainer_metrics import TokenDistributions, rank_statistics, rl_token_values, sft_token_values
from tests.unit.trainer.world import run_world


@settings(max_examples=30)
@given(st.lists(st.floats(0, 15), min_size=1, max_size=60), st.integers(0, 9))
def test_entropy_quantiles_are_close_to_the_inverse_of_the_distribution(values, num_masked):
    world, quantiles = _NoPeers(), EntropyQuantiles()
    entropy = torch.tensor([*values, *[3.3] * num_masked])
    mask = torch.arange(len(entropy)) < len(values)
    for part in (slice(0, 7), slice(7, None)):
        quantiles.add(entropy[part], mask[part])
    found = quantiles.reduce(world)
    for name, share in ENTROPY_QUANTILES.items():
        exact = np.quantile(np.array(values, np.float32), share, method="inverted_cdf")
        assert found[f"entropy/{name}"] == pytest.approx(float(exact), abs=0.008)


def test_entropy_quantiles_are_exact_near_zero_and_start_again():
    quantiles = EntropyQuantiles()
    quantiles.add(torch.full((1000,), 0.01), torch.ones(1000, dtype=torch.bool))
    assert quantiles.reduce(_NoPeers())["entropy/q50"] == pytest.approx(0.01, abs=4e-5)
    quantiles.add(torch.tensor([1.0, math.nan]), torch.tensor([False, True]))
    assert quantiles.reduce(_NoPeers()) == {f"entropy/{name}": None for name in ENTROPY_QUANTILES}
    assert quantiles.reduce(_NoPeers()) == {}


class _NoPeers:
    def sum_rows(self, values):
        return values


# Samples of the tokens of a step, on one rank and on several


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
    recording = distributions.record(step, len(minibatch.rows), objective)
    losses = [recording(score(row)).loss for row in rows]
    assert losses == [objective(score(row)).loss for row in rows]
    return distributions.gather()


def test_token_distributions_contain_the_trained_tokens_of_all_rows(world):
    values = sample(
        TokenDistributions(rl_token_values, world, lambda step: True), [make_row([9, 1, 2]), make_row([9, 3])]
    )
    np.testing.assert_allclose(values["logprob"], [-0.01, -0.02, -0.03], atol=1e-6)
    np.testing.assert_allclose(values["importance_ratio"], np.exp([0.5] * 3), atol=1e-5)
    np.testing.assert_allclose(values["mismatch_kl"], [np.expm1(0.5) - 0.5] * 3, atol=1e-5)
    np.testing.assert_array_equal(values["advantage"], [0, 1, -1])
    np.testing.assert_array_equal(values["entropy"], [1, 1, 1])
    later = rl_token_values(score(make_row([9, 1]), before_first_update=False))
    assert later["mismatch_kl"].isnan().all() and later["importance_ratio"].isfinite().all()


def test_token_distributions_of_a_step_that_is_not_due_are_empty(world):
    distributions = TokenDistributions(sft_token_values, world, lambda step: step == 4)
    assert distributions.record(3, 0, objective) is objective
    assert sample(distributions, [make_row([9, 1])], step=3) == {}
    assert sample(distributions, [make_row([9, 1])], step=4).keys() == {"logprob", "entropy"}


def test_token_distributions_of_many_tokens_are_evenly_spaced(world, monkeypatch):
    monkeypatch.setattr(trainer_metrics, "MAX_TOKENS", 6)
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
    tokens = [(-100 * values["logprob"]).round().tolist() for values in (apart, together)]
    return [tokens, rank_statistics({"time/step": 2.0 + world.rank, "time/busy": 1.0 + 0.5 * world.rank}, world)]


def test_values_of_two_ranks_are_those_of_both_and_the_slowest_is_named(tmp_path):
    stats = {"mean": (2.5, 1.25), "min": (2.0, 1.0), "median": (2.0, 1.0), "max": (3.0, 1.5)}
    expected = {
        f"{name}/rank_{stat}": row[i]
        for stat, row in stats.items()
        for i, name in enumerate(("time/step", "time/busy"))
    }
    expected |= {"rank/slowest": 1, "rank/slowdown": 1.5}
    assert run_world(2, gather_on_ranks, None, tmp_path) == [[[[0, 1, 10, 11, 12], [5, 6]], expected]] * 2
