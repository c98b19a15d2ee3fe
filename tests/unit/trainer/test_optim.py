"""Parameter groups, schedules and optimizers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loguru import logger

from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.configs.training.optim import (
    AdamWConfig,
    ConstantSchedulerConfig,
    CosineSchedulerConfig,
    LinearSchedulerConfig,
    MuonConfig,
    SGDConfig,
)
from prime_rl.core.errors import ConfigError
from prime_rl.trainer.optim import build_optimizer
from prime_rl.trainer.optim.lr_schedule import LearningRates, schedule_factor, warn_if_warmup_exceeds_run
from prime_rl.trainer.weights.policy_loading import load_policy
from tests.support.tiny_model import make_tiny_model


def factors(config, steps, peak=1.0):
    return [schedule_factor(config, peak, step, steps) for step in range(steps)]


def test_schedule_constant_is_one():
    assert factors(ConstantSchedulerConfig(), 4) == [1.0] * 4
    assert schedule_factor(ConstantSchedulerConfig(), 0.5, 10**6, None) == 1.0


def test_schedule_factor_scales_all_but_the_floor():
    assert factors(ConstantSchedulerConfig(warmup_steps=1, factor=0.5), 3) == pytest.approx([0.25, 0.5, 0.5])
    assert factors(LinearSchedulerConfig(factor=0.5, min_lr=0.1), 4) == pytest.approx([0.5, 0.4, 0.3, 0.2])


def test_schedule_warm_up_is_linear():
    assert factors(ConstantSchedulerConfig(warmup_steps=3), 6) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


@pytest.mark.parametrize(("warmup", "steps", "warns"), [(5, 4, True), (5, 5, False), (5, None, False)])
def test_schedule_warm_up_longer_than_run_logs_warning(warmup, steps, warns):
    told = []
    sink = logger.add(told.append, level="WARNING")
    warn_if_warmup_exceeds_run(ConstantSchedulerConfig(warmup_steps=warmup), steps)
    logger.remove(sink)
    assert ["scheduler.warmup_steps = 5 is more than max_steps = 4" in line for line in told] == [True] * warns


def test_schedule_linear_decays_over_last_steps():
    config = LinearSchedulerConfig(warmup_steps=1, decay_steps=4, min_lr=0.2)
    assert factors(config, 8) == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4])
    assert schedule_factor(config, 1.0, 8, 8) == pytest.approx(0.2)
    assert schedule_factor(config, 1.0, 80, 8) == pytest.approx(0.2)


def test_schedule_floor_is_a_rate():
    config = LinearSchedulerConfig(min_lr=0.2)
    assert schedule_factor(config, 2.0, 8, 8) * 2.0 == pytest.approx(0.2)
    assert schedule_factor(LinearSchedulerConfig(), 0.0, 4, 8) == 0.5, "a peak of zero divides nothing"


def test_schedule_decay_defaults_to_all_steps_after_warm_up():
    wanted = [1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25]
    assert factors(LinearSchedulerConfig(warmup_steps=2), 6) == pytest.approx(wanted)
    longer = LinearSchedulerConfig(warmup_steps=2, decay_steps=100)
    assert factors(longer, 6) == pytest.approx(wanted), "the peak is reached all the same"


def test_schedule_cosine_is_half_in_the_middle():
    config = CosineSchedulerConfig(min_lr=0.1)
    values = factors(config, 10)
    assert values[0] == 1.0
    assert values[5] == pytest.approx(0.55)
    assert values[1] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 10)) / 2)
    assert values == sorted(values, reverse=True)


@given(
    kind=st.sampled_from([LinearSchedulerConfig, CosineSchedulerConfig]),
    warmup=st.integers(0, 20),
    decay=st.none() | st.integers(1, 50),
    steps=st.integers(1, 60),
    floor=st.floats(0, 1),
)
def test_schedule_rises_stays_and_decays_to_floor(kind, warmup, decay, steps, floor):
    config = kind(warmup_steps=warmup, decay_steps=decay, min_lr=floor)
    values = [schedule_factor(config, 1.0, step, steps) for step in range(max(steps, warmup) + 2)]
    rising, falling = values[:warmup], values[warmup:]
    assert all(0 < value < 1 for value in rising) and rising == sorted(rising)
    assert all(floor - 1e-12 <= value <= 1 for value in falling) and falling == sorted(falling, reverse=True)
    begin = max(warmup, steps - (steps - warmup if decay is None else decay))
    assert all(value == 1 for value in values[warmup : max(warmup, begin)])
    assert steps <= warmup or values[steps] == pytest.approx(floor)


def test_schedule_decay_without_max_steps_raises():
    with pytest.raises(ConfigError, match="max_steps"):
        schedule_factor(LinearSchedulerConfig(), 1.0, 0, None)
    with pytest.raises(ValueError, match="max_steps"):
        TrainerConfig(scheduler=LinearSchedulerConfig())
    assert SFTConfig(scheduler=LinearSchedulerConfig()).max_steps is None, "sft counts its data"


@pytest.mark.parametrize("root", [TrainerConfig, SFTConfig])
def test_schedule_floor_above_peak_is_refused(root):
    with pytest.raises(ValueError, match=r"scheduler\.min_lr = 0\.1 is above scheduler\.factor \* optim\.lr = 0\.01"):
        root(max_steps=5, scheduler=LinearSchedulerConfig(min_lr=0.1), optim=AdamWConfig(lr=0.01))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {tied: make_tiny_model(root / str(tied), tie_word_embeddings=tied) for tied in (True, False)}


def load(path):
    return load_policy(TrainerModelConfig(name=str(path)), seed=0)


@pytest.mark.parametrize("tied", [True, False])
def test_parameter_groups_have_rates_of_their_roles(models, tied):
    policy = load(models[tied])
    config = AdamWConfig(lr=1.0, embedding_lr=2.0, unembedding_lr=3.0, matrix_lr=4.0, weight_decay=0.1)
    optimizer = build_optimizer(config, policy)
    names = {id(p): name for name, p in policy.named_parameters()}
    groups = {group["role"]: group for group in optimizer.param_groups}
    members = {role: {names[id(p)] for p in group["params"]} for role, group in groups.items()}
    assert members["embedding"] == {"causal_lm.model.embed_tokens.weight"}
    assert members.get("unembedding") == (None if tied else {"causal_lm.lm_head.weight"})
    assert all("norm" in name for name in members["vector"])
    assert sorted(name for group in members.values() for name in group) == sorted(names.values())
    peaks = {"embedding": 2.0, "unembedding": 3.0, "matrix": 4.0, "vector": 1.0}
    assert {role: group["lr"] for role, group in groups.items()} == {role: peaks[role] for role in members}
    decay = {role: group["weight_decay"] for role, group in groups.items()}
    assert decay == {role: 0.1 if role == "matrix" else 0.0 for role in members}


def test_learning_rates_multiply_peaks_by_factor(models):
    optimizer = build_optimizer(AdamWConfig(lr=1.0, embedding_lr=2.0), load(models[True]))
    rates = LearningRates(optimizer)
    optimizer.param_groups[0]["lr"] = 77.0  # as a checkpoint of another configuration would
    assert rates.apply(0.5) == {"lr": 0.5, "lr/embedding": 1.0}
    assert {group["role"]: group["lr"] for group in optimizer.param_groups} == {
        "embedding": 1.0,
        "matrix": 0.5,
        "vector": 0.5,
    }


def test_parameter_groups_without_effect_log_warning(models):
    said = list[str]()
    handler = logger.add(said.append, format="{message}", level="WARNING")
    build_optimizer(AdamWConfig(embedding_lr=2.0, unembedding_lr=3.0), load(models[True]))
    logger.remove(handler)
    assert said == ["optim.unembedding_lr has no effect: the output head is tied to the embedding\n"]


def test_parameter_groups_omit_frozen_parameters(models):
    policy = load(models[True]).requires_grad_(False)
    policy.blocks[0].mlp.up_proj.weight.requires_grad_(True)
    (group,) = build_optimizer(MuonConfig(), policy).param_groups
    assert (group["role"], len(group["params"])) == ("matrix", 1)


def test_build_optimizer_selects_type(models):
    policy = load(models[True])
    assert isinstance(build_optimizer(SGDConfig(), policy), torch.optim.SGD)
    assert isinstance(build_optimizer(SGDConfig(momentum=0), policy), torch.optim.SGD)
    adamw = build_optimizer(AdamWConfig(beta2=0.9), policy)
    assert isinstance(adamw, torch.optim.AdamW) and adamw.defaults["betas"] == (0.9, 0.9)
