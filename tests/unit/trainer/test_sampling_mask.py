"""Sampling masks equal a NumPy implementation of vLLM's sampler over a sorted vocabulary."""

import numpy as np
import pytest
import torch

from prime_rl.configs.training.loss import AIPOLossConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.trainer.losses.loss_functions import build_loss
from prime_rl.trainer.micro_batch import make_micro_batch, masked_row
from prime_rl.trainer.model.lm_head import SamplingMask, kept_threshold, token_logprobs
from prime_rl.trainer.rl.rl_objective import rl_objective
from prime_rl.trainer.train_step import Counts, ScoredRow
from prime_rl.trainer.weights.policy_loading import load_policy

SETTINGS = [  # top_k, top_p, min_p
    (0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1), (7, 0.8, 0.02), (1, 1.0, 0.0), (0, 1e-6, 0.0),
    (0, 1.0, 1.0), (400, 0.999, 1e-4), (50, 0.5, 0.3),
]  # fmt: skip


def kept_by_definition(logits, top_k, top_p, min_p):
    """Which of float64 logits [V] are kept: min-p, then top-k, then top-p, each over what the last one left."""
    probabilities = np.exp(logits - logits.max())
    kept = probabilities >= min_p * probabilities.max()
    if 0 < top_k < kept.sum():
        kept &= logits >= np.sort(logits[kept])[-top_k]
    order = [i for i in np.argsort(-logits, kind="stable") if kept[i]]
    mass, wanted = 0.0, top_p * probabilities[kept].sum()
    for place, i in enumerate(order):
        if place and mass >= wanted and top_p < 1:
            kept[i] = False
        mass += probabilities[i]
    return kept


def truncation(settings):
    top_k, top_p, min_p = zip(*settings, strict=True)
    return SamplingMask(torch.tensor(top_k, dtype=torch.int32), torch.tensor(top_p), torch.tensor(min_p))


def make(n, vocabulary=101, spread=3.0):
    generator = torch.Generator().manual_seed(n)
    hidden = torch.randn(n, 16, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, 16, generator=generator, dtype=torch.float64) * spread / 4
    targets = torch.randint(0, vocabulary, (n,), generator=generator)
    temperature = 0.5 + torch.rand(n, generator=generator)
    return hidden, weight, targets, temperature


@pytest.mark.parametrize("spread", [0.3, 3.0, 20.0])
def test_threshold_keeps_the_tokens_of_the_sampler(spread):
    settings = SETTINGS * 20
    hidden, weight, _, temperature = make(len(settings), spread=spread)
    logits = (hidden @ weight.T / temperature[:, None]).float()
    lowest = kept_threshold(logits, truncation(settings))
    wanted = [kept_by_definition(row.double().numpy(), *s) for row, s in zip(logits, settings, strict=True)]
    np.testing.assert_array_equal((logits >= lowest[:, None]).numpy(), np.stack(wanted))


def test_threshold_of_a_wide_nucleus_is_found():
    """Wider than where it is looked for first, and one that is narrow, in one call."""
    logits = torch.cat([torch.zeros(1, 4000) + torch.linspace(0, 1e-2, 4000), torch.linspace(0, 100, 4000)[None]])
    kept = logits >= kept_threshold(logits, truncation([(0, 0.9, 0.0), (0, 0.9, 0.0)]))[:, None]
    for row, mine in zip(logits, kept, strict=True):
        np.testing.assert_array_equal(mine.numpy(), kept_by_definition(row.double().numpy(), 0, 0.9, 0.0))


@pytest.mark.parametrize(
    ("logits", "settings", "kept"),
    [
        ([3.0, 2.0, 2.0, 2.0, 1.0], (2, 1.0, 0.0), [True, True, True, True, False]),  # ties
        ([3.0, 2.0, 2.0, 2.0, 1.0], (0, 0.75, 0.0), [True, True, True, True, False]),
        ([np.nextafter(np.float32(1), np.float32(2)), 1.0, 0.0], (1, 1.0, 0.0), [True, False, False]),
    ],
)
def test_threshold_keeps_ties_and_separates_neighbouring_floats(logits, settings, kept):
    logits = torch.tensor([logits])
    assert (logits >= kept_threshold(logits, truncation([settings]))[:, None]).tolist() == [kept]


@pytest.mark.parametrize("chunk", [1, 7, None])
def test_masked_logprobs_and_gradients_equal_the_renormalised_ones(chunk):
    """Tokens with different cuts, and with none, in one row; some of them left out by these logits."""
    settings = SETTINGS * 4
    hidden, weight, targets, temperature = make(len(settings))
    logits = hidden @ weight.T / temperature[:, None]
    kept = np.stack(
        [kept_by_definition(row.float().double().numpy(), *s) for row, s in zip(logits, settings, strict=True)]
    )
    likeliest = logits.argmax(-1)
    targets = torch.where(torch.arange(len(targets)) % 3 == 0, targets, likeliest)
    inside = kept[np.arange(len(targets)), targets]
    assert 3 < (~inside).sum() < len(inside) - 3
    kept[np.arange(len(targets)), targets] = True

    double = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    logits = (double[0] @ double[1].T / temperature[:, None]).masked_fill(~torch.from_numpy(kept), -torch.inf)
    wanted = logits.log_softmax(-1)
    entropy = -(wanted.exp() * wanted.masked_fill(~torch.from_numpy(kept), 0.0)).sum(-1)
    wanted = wanted.gather(1, targets[:, None])[:, 0]
    slopes = torch.linspace(-2, 2, len(hidden)), torch.linspace(3, -1, len(hidden)).sin()
    wanted_gradients = torch.autograd.grad([wanted, entropy], double, [slope.double() for slope in slopes])

    single = [hidden.float().requires_grad_(), weight.float().requires_grad_()]
    logprobs, measured, left_out = token_logprobs(
        *single, targets, temperature, chunk, truncation(settings), entropy_gradient=True
    )
    gradients = torch.autograd.grad([logprobs, measured], single, slopes)
    np.testing.assert_array_equal(left_out.numpy(), ~inside)
    torch.testing.assert_close(logprobs, wanted.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(measured, entropy.float(), rtol=1e-5, atol=1e-5)
    for a, b in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=2e-5)


def test_masked_logprobs_of_extreme_logits_are_finite():
    hidden, weight, targets, temperature = make(len(SETTINGS), spread=1e4)
    inputs = [hidden.float().requires_grad_(), weight.float().requires_grad_()]
    logprobs, entropy, _ = token_logprobs(*inputs, targets, temperature, 3, truncation(SETTINGS))
    gradients = torch.autograd.grad(logprobs.sum(), inputs)
    assert all(torch.isfinite(x).all() for x in (logprobs, entropy, *gradients))


def test_metric_is_reported_for_batches_with_sampling_parameters_only(tiny):
    """Mixed rows: of the tokens with a cut, the share that the policy's own would leave out."""
    policy = load_policy(TrainerModelConfig(name=str(tiny)), seed=0)
    tokens, mask = np.arange(6, 30), np.arange(24) % 12 > 3
    plain = make_micro_batch(tokens, mask, [12, 12])
    top_k = np.repeat([0, 3], 12).astype(np.int32)
    row = make_micro_batch(tokens, mask, [12, 12], streams={"top_k": top_k})
    objective = rl_objective(build_loss(AIPOLossConfig()))
    counts = Counts(tokens=16)
    assert len(policy(plain)) == 2
    assert "sampling_mask/outside_trainer_mask" not in objective(ScoredRow(plain, *policy(plain), True, counts)).means
    logprobs, entropy, left_out = policy(row)
    means = objective(ScoredRow(row, logprobs, entropy, True, counts, left_out)).means
    total, count = means["sampling_mask/outside_trainer_mask"]
    assert (total, count) == (left_out.sum(), 8)
    assert not left_out[:12].any()
    assert 0 < total < 8
    torch.testing.assert_close(logprobs[:12], policy(plain)[0][:12])
    assert (logprobs[12:] > policy(plain)[0][12:] + 1e-3)[mask[12:]].all()


def test_row_without_trained_tokens_has_a_mask(tiny):
    policy = load_policy(TrainerModelConfig(name=str(tiny)), seed=0)
    logprobs, *_, left_out = policy(masked_row({"top_p": np.ones(3, np.float32)}))
    logprobs.sum().backward()
    assert not left_out.any()
