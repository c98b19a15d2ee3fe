"""Learning rates over the steps."""

import math

import pytest
import torch

from prime_rl.configs.shared import (
    AdamWConfig,
    ConstantSchedulerConfig,
    CosineSchedulerConfig,
    LinearSchedulerConfig,
    MuonConfig,
    SGDConfig,
)
from prime_rl.errors import ConfigError
from prime_rl.trainer.optim import build_optimizer, learning_rate, set_learning_rate


def rates(config, steps, peak=1.0):
    return [learning_rate(config, peak, step, steps) for step in range(steps)]


def test_constant():
    assert rates(ConstantSchedulerConfig(), 4) == [1.0] * 4
    assert learning_rate(ConstantSchedulerConfig(), 0.5, 10**6, None) == 0.5


def test_warm_up_rises_evenly_to_the_peak():
    assert rates(ConstantSchedulerConfig(warmup_steps=3), 6) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_linear_decays_over_the_last_steps():
    config = LinearSchedulerConfig(warmup_steps=1, decay_steps=4, min_lr=0.2)
    assert rates(config, 8) == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4])
    assert learning_rate(config, 1.0, 8, 8) == pytest.approx(0.2)
    assert learning_rate(config, 1.0, 80, 8) == pytest.approx(0.2)


def test_decay_fills_all_after_the_warm_up_by_default():
    assert rates(LinearSchedulerConfig(warmup_steps=2), 6) == pytest.approx([1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25])


def test_cosine_is_half_way_in_the_middle():
    config = CosineSchedulerConfig(min_lr=0.1)
    values = rates(config, 10)
    assert values[0] == 1.0
    assert values[5] == pytest.approx(0.55)
    assert values[1] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 10)) / 2)
    assert values == sorted(values, reverse=True)


def test_decay_needs_an_end():
    with pytest.raises(ConfigError, match="max_steps"):
        learning_rate(LinearSchedulerConfig(), 1.0, 0, None)


def test_weight_decay_is_for_matrices_only():
    layer = torch.nn.Linear(2, 2)
    optimizer = build_optimizer(AdamWConfig(weight_decay=0.1), layer.parameters())
    decay = {p.ndim: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decay == {2: 0.1, 1: 0.0}
    set_learning_rate(optimizer, 0.3)
    assert {g["lr"] for g in optimizer.param_groups} == {0.3}


def test_other_optimizers():
    layer = torch.nn.Linear(2, 2)
    assert isinstance(build_optimizer(SGDConfig(), layer.parameters()), torch.optim.SGD)
    with pytest.raises(ConfigError, match="muon"):
        build_optimizer(MuonConfig(), layer.parameters())
