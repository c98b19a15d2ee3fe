"""Statistics over tokens, parameters and ranks: equal to one computation over everything."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.configs.training.optim import SGDConfig
from prime_rl.trainer import trainer_metrics
from prime_rl.trainer.micro_batch import make_micro_batch
from prime_rl.trainer.optim.optimizers import build_optimizer
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.rl.batch_source import split_batch
from prime_rl.trainer.train_step import (
    ENTROPY_QUANTILES,
    Counts,
    EntropyQuantiles,
    Minibatch,
    Objective,
    ScoredRow,
    TrainStep,
)
from prime_rl.trainer.trainer_metrics import TokenDistributions, rank_statistics, rl_token_values, sft_token_values
from prime_rl.trainer.weights.policy_loading import make_policy
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.test_train_step import OBJECTIVE, ROOM, make_batch
from tests.unit.trainer.world import run_world

LAYOUTS = {1: {"alone": {}}, 2: {"shard": {}, "replicate": {"dp_replicate": 2}, "tp": {"tp": 2}}}


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


def measure_everything(world: World, argument: str):
    """Runs on every rank."""
    results = {}
    for layout, keys in LAYOUTS[world.size].items():
        config = TrainerModelConfig(name=argument, **keys)
        layout_world = World(world.rank, world.size, world.device, keys.get("tp", 1))
        policy = make_policy(config, 0, layout_world)
        optimizer = build_optimizer(SGDConfig(lr=1e-2), policy)
        reference = record_norms(optimizer, policy)
        engine = TrainStep(policy, optimizer, layout_world, max_norm=1e9)
        batch = split_batch(make_batch(0), 0, 1, layout_world, ROOM)
        result = engine.step(batch, OBJECTIVE, 1.0, layer_norms=True)
        skipped = engine.step(split_batch(make_batch(1), 1, 1, layout_world, ROOM), OBJECTIVE, 1.0).layer_norms
        entropies = {name: value for name, value in result.means.items() if name.startswith(("entropy", "logprob"))}
        results[layout] = {
            "norms": result.layer_norms, "reference": reference, "norm": result.grad_norm, "skipped": skipped,
            "entropies": entropies, "waited": engine.synchronize_seconds,
        }  # fmt: skip
    results["ranks"] = rank_statistics({"time/step": 2.0 + world.rank, "time/busy": 1.0 + 0.5 * world.rank}, world)
    return results


def record_norms(optimizer, policy):
    """Return a dict that the first step fills with the norm of each whole gradient."""
    kept = {}

    def record(*_):
        if not kept:
            for name, parameter in policy.causal_lm.named_parameters():
                whole = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
                kept[name] = whole.double().norm().item()

    optimizer.register_step_pre_hook(record)
    return kept


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    model = make_tiny_model(tmp_path_factory.mktemp("model"))
    folder = tmp_path_factory.mktemp("results")
    return {size: run_world(size, measure_everything, str(model), folder) for size in LAYOUTS}


@pytest.mark.extended
@pytest.mark.parametrize(("size", "layout"), [(size, layout) for size in LAYOUTS for layout in LAYOUTS[size]])
def test_layer_norms_equal_the_norms_of_the_whole_gradients(measured, size, layout):
    for rank in measured[size]:
        found, reference = rank[layout]["norms"], rank[layout]["reference"]

        def norm_of(*parts, reference=reference):
            chosen = [value for name, value in reference.items() if any(part in name for part in parts)]
            assert chosen
            return math.hypot(*chosen)

        expected = {
            "grad_norm/layer_0": norm_of(".layers.0."),
            "grad_norm/layer_1": norm_of(".layers.1."),
            "grad_norm/embedding": norm_of("embed_tokens"),
            "grad_norm/attention": norm_of("q_proj", "k_proj", "v_proj", "o_proj"),
            "grad_norm/mlp": norm_of(".mlp."),
            "grad_norm/norm": norm_of("norm"),
        }
        assert found == pytest.approx(expected, rel=1e-5)
        roles = [value for name, value in found.items() if "layer" not in name]
        assert math.hypot(*roles) == pytest.approx(rank[layout]["norm"], rel=1e-5)
        assert rank[layout]["skipped"] == {}


@pytest.mark.extended
def test_layer_norms_and_entropies_do_not_depend_on_the_ranks(measured):
    alone = measured[1][0]["alone"]
    assert alone["entropies"].keys() == {"logprob/mean", "entropy", *(f"entropy/{name}" for name in ENTROPY_QUANTILES)}
    for layout in LAYOUTS[2]:
        for rank in measured[2]:
            assert rank[layout]["norms"] == pytest.approx(alone["norms"], rel=1e-4)
            assert rank[layout]["entropies"] == pytest.approx(alone["entropies"], abs=1e-4)


@pytest.mark.extended
def test_rank_statistics_describe_the_ranks_and_name_the_slowest(measured):
    def expected(**stats):
        rows = {"time/step": [2.0, 3.0], "time/busy": [1.0, 1.5]}
        return {f"{name}/rank_{stat}": choose(row) for stat, choose in stats.items() for name, row in rows.items()}

    stats = {"mean": np.mean, "min": min, "median": min, "max": max}
    first = dict.fromkeys(stats, lambda row: row[0])
    assert measured[1][0]["ranks"] == expected(**first), "a single rank is not compared"
    for rank in measured[2]:
        assert rank["ranks"] == expected(**stats) | {"rank/slowest": 1, "rank/slowdown": 1.5}


@pytest.mark.extended
def test_train_step_measures_the_wait_for_other_ranks(measured):
    assert all(rank[layout]["waited"] > 0 for size in LAYOUTS for rank in measured[size] for layout in LAYOUTS[size])


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


def test_token_distributions_of_a_step_that_is_not_due_are_empty(world):
    distributions = TokenDistributions(sft_token_values, world, lambda step: step == 4)
    assert distributions.record(3, 0, objective) is objective
    assert sample(distributions, [make_row([9, 1])], step=3) == {}
    assert sample(distributions, [make_row([9, 1])], step=4).keys() == {"logprob", "entropy"}


def test_token_distributions_after_an_update_have_no_mismatch():
    values = rl_token_values(score(make_row([9, 1]), before_first_update=False))
    assert values["mismatch_kl"].isnan().all()
    assert values["importance_ratio"].isfinite().all()


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
    return [(-100 * values["logprob"]).round().tolist() for values in (apart, together)]


def test_token_distributions_of_two_ranks_are_those_of_both(tmp_path):
    answers = run_world(2, gather_on_ranks, None, tmp_path)
    assert answers == [[[0, 1, 10, 11, 12], [5, 6]]] * 2
