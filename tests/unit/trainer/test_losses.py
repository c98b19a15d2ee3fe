"""AIPO against an independent NumPy version written from the formula; I10 on extreme inputs."""

import numpy as np
import pytest
import torch

from prime_rl.configs.trainer import AIPOLossConfig
from prime_rl.trainer.losses import LOSSES, LossInputs, build_loss, cross_entropy
from prime_rl.trainer.losses.base import MAX_LOG_RATIO


def make_inputs(logprobs, sampler, advantages, mask):
    return LossInputs(
        logprobs=torch.tensor(logprobs, dtype=torch.float32, requires_grad=True),
        sampler_logprobs=torch.tensor(sampler, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        mask=torch.tensor(mask, dtype=torch.bool),
        segment_ids=torch.zeros(len(mask), dtype=torch.int64),
    )


def reference_aipo(logprobs, sampler, advantages, mask, clip):
    """Loss and gradient, token by token, in double precision."""
    loss, gradient = 0.0, np.zeros(len(mask))
    for t in range(len(mask)):
        if not mask[t]:
            continue
        log_ratio = min(max(float(logprobs[t]) - float(sampler[t]), -MAX_LOG_RATIO), MAX_LOG_RATIO)
        ratio = np.exp(log_ratio)
        loss -= min(ratio, clip) * advantages[t]
        if ratio < clip and log_ratio > -MAX_LOG_RATIO:
            gradient[t] = -ratio * advantages[t]
    return loss, gradient


def check_against_reference(logprobs, sampler, advantages, mask, clip=8.0):
    inputs = make_inputs(logprobs, sampler, advantages, mask)
    output = build_loss(AIPOLossConfig(ratio_clip=clip))(inputs)
    output.loss.backward()
    loss, gradient = reference_aipo(logprobs, sampler, advantages, mask, clip)
    np.testing.assert_allclose(output.loss.item(), loss, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(inputs.logprobs.grad.numpy(), gradient, rtol=1e-5, atol=1e-6)
    return output


@pytest.mark.parametrize("seed", range(5))
def test_aipo_is_the_formula(seed):
    random = np.random.default_rng(seed)
    sampler = -random.exponential(2.0, 64).astype(np.float32)
    logprobs = sampler + random.normal(0, 1.5, 64).astype(np.float32)
    output = check_against_reference(logprobs, sampler, random.normal(size=64), random.random(64) < 0.7)
    assert output.clipped.any()  # the random ratios reach beyond 8, so the clip is exercised


@pytest.mark.parametrize("gap", [90.0, -90.0, 1e4, -1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_finite_for_extreme_ratios(gap, advantage):
    output = check_against_reference([gap - 100.0, -1.0], [-100.0, -1.0], [advantage, 0.5], [True, True])
    assert torch.isfinite(output.loss)


def test_ratio_is_clipped_at_delta():
    output = check_against_reference(
        [np.log(3.0), np.log(3.0)], [0.0, np.log(2.0)], [1.0, -2.0], [True, True], clip=2.0
    )
    assert output.loss.item() == pytest.approx(-(2.0 * 1.0 + 1.5 * -2.0))
    assert output.clipped.tolist() == [True, False]


def test_empty_mask_is_zero_with_zero_gradient():
    check_against_reference([-1.0, -2.0], [-3.0, -1.0], [1.0, 1.0], [False, False])


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("field", ["sampler_logprobs", "advantages", "logprobs"])
def test_what_is_masked_cannot_poison_the_gradient(poison, field):
    values = {"logprobs": [-1.0, -1.0], "sampler_logprobs": [-1.0, -1.0], "advantages": [1.0, 1.0]}
    values[field] = [-1.0 if field != "advantages" else 1.0, poison]
    for loss in (build_loss(AIPOLossConfig()), cross_entropy):
        inputs = make_inputs(values["logprobs"], values["sampler_logprobs"], values["advantages"], [True, False])
        output = loss(inputs)
        output.loss.backward()
        assert torch.isfinite(output.loss)
        assert torch.isfinite(inputs.logprobs.grad).all()
        assert inputs.logprobs.grad[1] == 0


def test_cross_entropy_sums_negative_logprobs():
    inputs = make_inputs([-1.0, -2.0, -4.0], [0.0] * 3, [0.0] * 3, [True, False, True])
    assert cross_entropy(inputs).loss.item() == 5.0


def test_every_loss_is_configured_by_its_keyword_arguments():
    assert set(LOSSES) == {"aipo"}
    assert build_loss(AIPOLossConfig(ratio_clip=3.0)).keywords == {"ratio_clip": 3.0}
