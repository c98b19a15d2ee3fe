"""Every loss against an independent NumPy version, and on extreme inputs (I10)."""

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from prime_rl.configs.training.loss import KLConfig, LossConfig
from prime_rl.core.errors import ConfigError
from prime_rl.trainer.losses.loss_functions import LOSSES, build_loss, cross_entropy, distillation, kl_penalty
from prime_rl.trainer.losses.loss_inputs import LossInputs, LossOutput
from prime_rl.trainer.micro_batch import make_micro_batch
from prime_rl.trainer.rl.rl_objective import rl_objective
from prime_rl.trainer.train_step import Counts, ScoredRow
from tests.unit.trainer import golden_losses as golden

INF = float("inf")
# What is not a default: every branch of every loss.
VARIANTS = {
    "aipo": [{}, {"ratio_clip": 1.5}],
    "ppo": [{}, {"eps_low": 0.1, "eps_high": 0.5}, {"dual_clip": 1.5}],
    "grpo": [{}],
    "dr_grpo": [{}],
    "gspo": [{}, {"eps_low": 0.2, "eps_high": 0.3}],
    "cispo": [{}, {"eps_low": 0.3, "eps_high": 0.5}],
    "reinforce": [{}],
    "tis": [{}],
    "dppo": [{}, {"dppo_mask_low": 0.02, "dppo_mask_high": 0.03, "adv_tau": 2.0, "kl_tau": 0.5}],
    "icepop": [
        {},
        {"token_mask_low": 0.5, "token_mask_high": 2.0, "kl_tau": 0.3},
        {"geo_mask_low": 0.9, "geo_mask_high": 1.1, "teacher_tau": 0.7},
        {"sequence_mask_low": 0.2, "sequence_mask_high": 4.0, "ratio_type": "sequence", "sequence_clip_high": 1.5},
    ],
    "decoupled_ppo": [{}, {"weight_clip": 1.2}],
}
CASES = [(name, variant) for name, variants in VARIANTS.items() for variant in variants]


def config_of(name, variant):
    return TypeAdapter(LossConfig).validate_python({"type": name, **variant})


def draw(seed, length=48, spread=1.5, segments=5):
    random = np.random.default_rng(seed)
    sampler = -random.exponential(1.5, length)
    shift = random.normal(0, spread / 2, segments)
    cuts = np.sort(random.integers(0, segments, length))
    logprobs = np.minimum(sampler + random.normal(0, spread, length) + shift[cuts], -1e-3)
    return {
        "logprobs": logprobs,
        "sampler": sampler,
        "advantages": random.normal(size=length),
        "mask": random.random(length) < 0.8,
        "segments": cuts,
        "proximal": logprobs + random.normal(0, 0.3, length),
        "reference": logprobs + random.normal(0, 0.3, length),
    }


def tensors(row):
    row = {name: np.asarray(values) for name, values in row.items()}
    floats = {name: torch.tensor(row[name], dtype=torch.float32) for name in row if name not in ("mask", "segments")}
    return LossInputs(
        logprobs=floats["logprobs"].requires_grad_(),
        sampler_logprobs=floats["sampler"],
        advantages=floats["advantages"],
        mask=torch.tensor(row["mask"], dtype=torch.bool),
        segment_ids=torch.tensor(row["segments"], dtype=torch.int64),
        proximal_logprobs=floats.get("proximal"),
        ref_logprobs=floats.get("reference"),
    )


def golden_row(row):
    return golden.Row(**{key: v if key in ("mask", "segments") else np.float32(v) for key, v in row.items()})


def assert_equal(losses, inputs, expected):
    """Losses and gradients of the tokens are those of a golden version; returns the gradients."""
    (gradient,) = torch.autograd.grad(losses.sum(), inputs.logprobs)
    for found, wanted in zip((losses.detach(), gradient), expected, strict=True):
        np.testing.assert_allclose(found.numpy(), wanted, rtol=2e-5, atol=2e-6)
    return gradient


def check(name, variant, row):
    """Loss and gradient of every token are the formula's; returns what the loss answered."""
    config, inputs = config_of(name, variant), tensors(row)
    output = build_loss(config)(inputs)
    keys = config.model_dump(
        exclude={"type", "normalization", "fixed_length", "kl", "entropy_coef", "top_entropy_quantile"}
    )
    gradient = assert_equal(output.loss, inputs, golden.GOLDEN[name](golden_row(row), **keys))
    assert not (output.low | output.high | output.masked)[~inputs.mask].any()
    if name in ("ppo", "grpo", "gspo", "decoupled_ppo"):
        assert not gradient[output.low | output.high].any(), "a clipped token has no gradient"
    return output


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_loss_equals_golden_version(name, variant):
    outputs = [check(name, variant, draw(seed)) for seed in range(4)]
    touched = sum(int((o.low | o.high).sum()) for o in outputs)
    assert (touched > 0) == (name != "reinforce")  # what is clipped or masked was among it
    one = {key: values[:1] for key, values in draw(0).items()}
    check(name, variant, one | {"mask": np.array([True])})
    none = check(name, variant, draw(1) | {"mask": np.zeros(48, bool)})
    assert (none.loss == 0).all()


def test_every_loss_has_a_golden_version():
    assert set(VARIANTS) == set(LOSSES) == set(golden.GOLDEN)


EXTREMES = {
    "ratio e^90": {"logprobs": [-1.0, -2.0], "sampler": [-91.0, -2.0]},
    "ratio e^-90": {"logprobs": [-91.0, -2.0], "sampler": [-1.0, -2.0]},
    "all e^90": {"logprobs": [-1.0, -2.0], "sampler": [-91.0, -92.0]},
    "all e^-90": {"logprobs": [-91.0, -92.0], "sampler": [-1.0, -2.0]},
    "trainer -inf": {"logprobs": [-INF, -2.0], "sampler": [-1.0, -2.0]},
    "sampler -inf": {"logprobs": [-1.0, -2.0], "sampler": [-INF, -2.0]},
    "both -inf": {"logprobs": [-INF, -2.0], "sampler": [-INF, -2.0]},
    "certain": {"logprobs": [0.0, 0.0], "sampler": [0.0, -1e-9]},
}


PAIR = {"mask": [True] * 2, "segments": [0, 0], "advantages": [0.0] * 2}


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize(("name", "variant"), CASES)
def test_loss_of_extreme_inputs_is_finite(name, variant, extreme):
    """I10: for log-ratios of +-90 and log-probabilities of minus infinity, loss and gradient are finite, and right."""
    row = EXTREMES[extreme] | PAIR | {"proximal": [-1.5, -2.0], "reference": [-INF, -2.0]}
    for advantage in (1.5, -1.5, 0.0):
        output = check(name, variant, row | {"advantages": [advantage, 0.5]})
        assert torch.isfinite(output.loss).all()


@pytest.mark.parametrize("field", ["sampler", "advantages", "logprobs", "proximal", "reference"])
@pytest.mark.parametrize(("name", "variant"), CASES)
def test_masked_tokens_do_not_affect_the_gradient(name, variant, field):
    row, answers = draw(2), []
    for poison in (-1.0, float("nan"), INF, -INF):
        inputs = tensors(row | {field: np.where(row["mask"], row[field], poison)})
        loss = build_loss(config_of(name, variant))(inputs).loss.sum()
        answers.append((loss, torch.autograd.grad(loss, inputs.logprobs)[0]))
    for loss, gradient in answers[1:]:
        assert torch.equal(loss, answers[0][0]) and torch.equal(gradient, answers[0][1])


@pytest.mark.parametrize("straight_through", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_penalty_equals_formula(estimator, straight_through):
    for row in (draw(0), EXTREMES["all e^90"] | PAIR | {"reference": [-95.0, -INF]}):
        inputs = tensors(row)
        value = kl_penalty(inputs.logprobs, inputs.ref_logprobs, inputs.mask, estimator, straight_through)
        assert_equal(value, inputs, golden.kl(golden_row(row), estimator, straight_through))


@pytest.mark.parametrize("straight_through", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_penalty_with_importance_weight_has_the_gradient_of_the_kl_off_policy(estimator, straight_through):
    """Expectations over the sampler's whole distribution, through the objective."""
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0)).requires_grad_()
    policy, sampler, reference = (
        torch.log_softmax(logits if seed == 0 else torch.randn(50, generator=torch.Generator().manual_seed(seed)), 0)
        for seed in range(3)
    )
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    # Each token once, weighted with its probability, after a first token that is not trained.
    weights = {"rl_weights": sampler.exp(), "ref_logprobs": reference}
    streams = {name: np.append(0, value.numpy()).astype(np.float32) for name, value in weights.items()}
    logprobs = np.append(0, sampler.numpy()).astype(np.float32)
    row = make_micro_batch(np.zeros(51), np.arange(51) > 0, [51], logprobs=logprobs, streams=streams)
    found = {}
    for weighted in (False, True):
        kl = KLConfig(coef=1, estimator=estimator, straight_through=straight_through, importance_weight=weighted)
        objective = rl_objective(build_loss(config_of("reinforce", {})), kl=kl)
        scored = ScoredRow(row, torch.cat([torch.zeros(1), policy]), torch.zeros(51), True, Counts(1))
        (found[weighted],) = torch.autograd.grad(objective(scored).loss, logits, retain_graph=True)
    torch.testing.assert_close(found[True], exact, rtol=1e-4, atol=1e-6)
    assert (found[False] - exact).abs().max() > 0.01


@pytest.mark.parametrize("extreme", [None, *EXTREMES])
def test_distillation_equals_formula(extreme):
    row = EXTREMES[extreme] | PAIR | {"reference": [-3.0, -INF]} if extreme else draw(3)
    inputs = tensors(row)
    value = distillation(inputs.logprobs, inputs.sampler_logprobs, inputs.ref_logprobs, inputs.mask, ratio_clip=1.5)
    assert_equal(value, inputs, golden.distillation(golden_row(row), ratio_clip=1.5))


def test_cross_entropy_is_negative_logprob():
    logprobs = torch.tensor([-1.0, -2.0, -INF, float("nan")], requires_grad=True)
    loss = cross_entropy(logprobs, torch.tensor([True, False, True, False]))
    assert loss.tolist() == [1.0, 0.0, 1e4, 0.0]
    loss.sum().backward()
    assert logprobs.grad.tolist() == [-1.0, 0.0, 0.0, 0.0]


def one_number(inputs):
    return inputs.logprobs.sum()


def broken(inputs):
    raise KeyError("no such thing")


def without_gradient(inputs):
    return torch.zeros_like(inputs.logprobs)


def half_an_output(inputs):
    return LossOutput(inputs.logprobs, None, None, None)


def since_the_step_began(inputs, scale):
    return scale * (inputs.logprobs - inputs.proximal_logprobs)


def custom(function, proximal=False, **kwargs):
    where = f"tests.unit.trainer.test_losses:{function}"
    return build_loss(config_of("custom", {"import_path": where, "kwargs": kwargs, "proximal": proximal}))


def test_custom_loss_gets_kwargs_and_proximal_logprobs():
    """Before the first update those are the trainer's own, as constants."""
    loss, row = custom("since_the_step_began", proximal=True, scale=2.0), draw(0) | {"mask": np.ones(48, bool)}
    inputs = tensors(row)
    output = loss(inputs)
    assert_equal(output.loss, inputs, (2 * (row["logprobs"] - row["proximal"]), np.full(48, 2)))
    assert not output.masked.any()
    inputs = tensors({key: values for key, values in row.items() if key != "proximal"})
    assert_equal(loss(inputs).loss, inputs, (np.zeros(48), np.full(48, 2)))


def test_custom_loss_without_trained_tokens_needs_no_gradient():
    """The backward pass of such a row runs all the same: the other ranks wait for it."""
    inputs = tensors(draw(0) | {"mask": np.zeros(48, bool), "logprobs": np.full(48, -INF)})
    assert_equal(custom("without_gradient")(inputs).loss, inputs, (np.zeros(48), np.zeros(48)))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("one_number", r"returned a tensor of shape \[\]; return one loss per token, shape \[48\]"),
        ("broken", "failed: KeyError"),
        ("without_gradient", "returned losses without a gradient"),
        ("half_an_output", "returned NoneType; return one loss per token"),
        ("x", "has no function 'x'"),
    ],
)
def test_invalid_custom_loss_raises_one_line(function, said):
    with pytest.raises(ConfigError, match=said) as raised:
        custom(function)(tensors(draw(0)))
    assert "\n" not in str(raised.value)
