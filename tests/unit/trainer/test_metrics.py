"""Statistics over tokens, parameters and ranks: equal to one computation over everything."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.configs.training.loss import AIPOLossConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.configs.training.optim import SGDConfig
from prime_rl.trainer.losses import build_loss
from prime_rl.trainer.metrics.entropy_quantiles import QUANTILES, EntropyQuantiles
from prime_rl.trainer.metrics.rank_statistics import rank_statistics
from prime_rl.trainer.optim import build_optimizer
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.rl.batch_source import split_batch
from prime_rl.trainer.rl.rl_objective import rl_objective
from prime_rl.trainer.train_step import TrainStep
from prime_rl.trainer.weights.policy_loading import make_policy
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.test_train_step import ROOM, make_batch
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
    for name, share in QUANTILES.items():
        exact = np.quantile(np.array(values, np.float32), share, method="inverted_cdf")
        assert found[f"entropy/{name}"] == pytest.approx(float(exact), abs=0.008)


def test_entropy_quantiles_are_exact_near_zero_and_start_again():
    quantiles = EntropyQuantiles()
    quantiles.add(torch.full((1000,), 0.01), torch.ones(1000, dtype=torch.bool))
    assert quantiles.reduce(_NoPeers())["entropy/q50"] == pytest.approx(0.01, abs=4e-5)
    quantiles.add(torch.tensor([1.0, math.nan]), torch.tensor([False, True]))
    assert quantiles.reduce(_NoPeers()) == {f"entropy/{name}": None for name in QUANTILES}
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
        objective = rl_objective(build_loss(AIPOLossConfig()))
        batch = split_batch(make_batch(0), 0, 1, layout_world, ROOM)
        result = engine.step(batch, objective, 1.0, layer_norms=True)
        skipped = engine.step(split_batch(make_batch(1), 1, 1, layout_world, ROOM), objective, 1.0).layer_norms
        entropies = {name: value for name, value in result.means.items() if name.startswith(("entropy", "logprob"))}
        results[layout] = {
            "norms": result.layer_norms, "reference": reference, "norm": result.grad_norm, "skipped": skipped,
            "entropies": entropies, "waited": engine.synchronize_seconds,
        }  # fmt: skip
    results["ranks"] = rank_statistics({"time/step": 2.0 + world.rank, "perf/x": -3.0 * world.rank}, world)
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


def test_layer_norms_and_entropies_do_not_depend_on_the_ranks(measured):
    alone = measured[1][0]["alone"]
    assert alone["entropies"].keys() == {"logprob/mean", "entropy", *(f"entropy/{name}" for name in QUANTILES)}
    for layout in LAYOUTS[2]:
        for rank in measured[2]:
            assert rank[layout]["norms"] == pytest.approx(alone["norms"], rel=1e-4)
            assert rank[layout]["entropies"] == pytest.approx(alone["entropies"], abs=1e-4)


def test_rank_statistics_are_the_mean_and_the_largest_of_the_ranks(measured):
    assert measured[1][0]["ranks"] == {
        "time/step/rank_mean": 2, "perf/x/rank_mean": 0, "time/step/rank_max": 2, "perf/x/rank_max": 0,
    }  # fmt: skip
    for rank in measured[2]:
        assert rank["ranks"] == {
            "time/step/rank_mean": 2.5, "perf/x/rank_mean": -1.5, "time/step/rank_max": 3, "perf/x/rank_max": 0,
        }  # fmt: skip


def test_train_step_measures_the_wait_for_other_ranks(measured):
    assert all(rank[layout]["waited"] > 0 for size in LAYOUTS for rank in measured[size] for layout in LAYOUTS[size])
