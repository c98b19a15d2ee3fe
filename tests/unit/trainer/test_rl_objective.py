"""Token weights and the sum of the loss components (I8, I9), and agreement with public implementations."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.public_losses import ours
from pydantic import TypeAdapter

from prime_rl.configs.trainer import FakeDataConfig
from prime_rl.configs.training.loss import KLConfig, LossConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.configs.training.optim import AdamWConfig
from prime_rl.core.errors import RunError
from prime_rl.trainer.losses.loss_functions import build_loss
from prime_rl.trainer.optim.optimizers import build_optimizer
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.rl.batch_source import fake_batch, split_batch
from prime_rl.trainer.rl.rl_objective import build_objective, rl_objective, with_source_metrics
from prime_rl.trainer.train_step import MetricAccumulator, ScoredRow, TrainStep
from prime_rl.trainer.weights.policy_loading import make_policy
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer import golden_losses as golden

PUBLIC = json.loads(Path(__file__).with_name("public_losses.json").read_text())
CPU = torch.device("cpu")
SEQ_LEN = 64
LOSSES = ["aipo", "ppo", "grpo", "dr_grpo", "gspo", "cispo", "reinforce", "tis", "dppo", "icepop", "decoupled_ppo"]


@pytest.mark.parametrize("case", PUBLIC["cases"], ids=lambda case: f"{case['case']} {case['version']}")
def test_objective_equals_public_implementation(case):
    """Within 1e-5; recorded by benchmarks/public_losses.py, which also draws anew."""
    loss, gradient = ours(case["config"], case["rows"])
    assert loss == pytest.approx(case["loss"], abs=1e-5)
    np.testing.assert_allclose(gradient, case["gradient"], atol=1e-5)
    assert 0 in gradient or "cispo" in case["case"] or "kl" in case["config"]  # some tokens are clipped


def config_of(**keys):
    return TypeAdapter(LossConfig).validate_python(keys)


def make_batch(streams=(), seed=0):
    """Fourteen samples of very different lengths in seven rows, one of them without a trained token."""
    config = FakeDataConfig(batch_size=14, seq_len=40, micro_batch_size=2, variable_length=True)
    batch = fake_batch(config, 100, row_length=80, seed=seed, step=0)
    random = np.random.default_rng(seed)
    mask = batch.loss_mask.copy()
    mask[: batch.seq_lens[0]] = 0
    size = len(mask)
    extra = {name: random.choice([0.0, 0.0, 0.5, 1.0, 2.0], size).astype(np.float32) for name in streams}
    if "ref_logprobs" in extra:
        extra["ref_logprobs"] = -random.exponential(1.5, size).astype(np.float32)
    logprobs = -random.exponential(1.5, size).astype(np.float32)
    return dataclasses.replace(batch, loss_mask=mask, logprobs=logprobs, **extra)


def policy(row):
    """Log-probabilities that depend on the token alone, so that they are the same in whatever row it lies."""
    return torch.where(row.loss_mask, -0.03 * row.tokens - 0.01 * row.position_ids - 0.02, 0.0)


def evaluate(objective, batch, size=1, max_tokens=80, minibatches=1):
    """Loss, means, and gradient by token id, summed over `size` ranks."""
    total, gradient, means = 0.0, torch.zeros(100, dtype=torch.float64), MetricAccumulator()
    for rank in range(size):
        for minibatch in split_batch(batch, 0, minibatches, World(rank, size, CPU), max_tokens):
            for row in minibatch.rows:
                logprobs = policy(row).requires_grad_()
                answer = objective(ScoredRow(row, logprobs, torch.zeros_like(logprobs), True, minibatch.counts))
                answer.loss.backward()
                gradient.index_add_(0, row.tokens, logprobs.grad.double())
                total += answer.loss.item()
                means.add(answer.means | {f"loss/{k}": (part, torch.ones(())) for k, part in answer.parts.items()})
    return total, gradient, {name: tuple(pair.tolist()) for name, pair in means._totals.items()}


@pytest.mark.parametrize("normalization", ["token", "sequence", "fixed"])
@pytest.mark.parametrize("name", LOSSES)
def test_objective_does_not_depend_on_rows_and_ranks(name, normalization):
    """I8, I9: laid together or apart, on 1, 2 or 4 ranks, every loss has one value and one gradient."""
    objective = build_objective(config_of(type=name, normalization=normalization), SEQ_LEN)
    wanted, gradient, means = evaluate(objective, make_batch(), size=1, max_tokens=1)
    for size, max_tokens in [(1, 1000), (2, 80), (4, 160)]:
        loss, other, others = evaluate(objective, make_batch(), size, max_tokens)
        assert loss == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        torch.testing.assert_close(other, gradient, rtol=1e-5, atol=1e-7)
        assert others.keys() == means.keys()
        assert not [key for key in means if key.startswith(("loss/", "kl/"))], "without streams there are no parts"
        for key, pair in means.items():
            assert others[key] == pytest.approx(pair, rel=1e-5, abs=1e-6)
    empty = dataclasses.replace(make_batch(), loss_mask=np.zeros_like(make_batch().loss_mask))
    loss, gradient, _ = evaluate(objective, empty)
    assert loss == 0 and (gradient == 0).all()


@pytest.mark.parametrize("normalization", ["token", "sequence", "fixed"])
def test_normalizations_equal_definitions(normalization):
    batch = make_batch()
    objective = build_objective(config_of(type="reinforce", normalization=normalization), SEQ_LEN)
    loss, _, _ = evaluate(objective, batch)
    # Position ids restart with every sample.
    position = np.concatenate([np.arange(n) for n in batch.seq_lens])
    terms = -batch.advantages * (-0.03 * batch.tokens - 0.01 * position - 0.02)
    sample, mask = np.repeat(np.arange(14), batch.seq_lens), batch.loss_mask != 0
    sums = [terms[mask & (sample == s)].sum() for s in range(14)]
    counts = [max(1, (mask & (sample == s)).sum()) for s in range(14)]
    wanted = {
        "token": sum(sums) / mask.sum(),
        "sequence": np.mean(np.divide(sums, counts)),
        "fixed": sum(sums) / (14 * SEQ_LEN),
    }
    assert loss == pytest.approx(wanted[normalization], rel=1e-5)


@pytest.mark.parametrize("normalization", ["token", "sequence", "fixed"])
def test_entropy_bonus_has_the_weights_of_the_loss(normalization):
    """Its value and gradient are those of -coef times the entropy, for each loss."""
    batch, coef = make_batch(), 0.3
    names = ("aipo", "gspo")
    bonuses = []
    for name in names:
        found = []
        for keys in ({}, {"entropy_coef": coef}):
            objective = build_objective(config_of(type=name, normalization=normalization, **keys), SEQ_LEN)
            loss, slopes = 0.0, torch.zeros(100, dtype=torch.float64)
            for minibatch in split_batch(batch, 0, 1, World(0, 1, CPU), 80):
                for row in minibatch.rows:
                    entropy = (0.05 * row.tokens).requires_grad_()
                    answer = objective(ScoredRow(row, policy(row), entropy, True, minibatch.counts))
                    loss += answer.loss.item()
                    if keys:
                        answer.loss.backward()
                        slopes.index_add_(0, row.tokens, entropy.grad.double())
            found.append(loss)
        bonuses.append(found[1] - found[0])
    constant = batch.advantages * 0 + 1  # a surrogate of log-probabilities has the same weights
    plain = build_objective(config_of(type="reinforce", normalization=normalization), SEQ_LEN)
    _, weights, _ = evaluate(plain, dataclasses.replace(batch, advantages=constant))
    torch.testing.assert_close(slopes, coef * weights, rtol=1e-5, atol=1e-8)
    assert bonuses == pytest.approx([float((slopes * 0.05 * torch.arange(100)).sum())] * 2, rel=1e-4)


def test_entropy_bonus_makes_a_policy_uniform(module_world, tmp_path):
    """Without advantages, only the bonus has a gradient."""
    make_tiny_model(tmp_path / "model")
    policy = make_policy(TrainerModelConfig(name=str(tmp_path / "model")), 0, module_world)
    policy.entropy_gradient = True
    engine = TrainStep(policy, build_optimizer(AdamWConfig(lr=1e-2), policy), module_world, max_norm=1.0)
    batch = dataclasses.replace(make_batch(), advantages=np.zeros_like(make_batch().advantages))
    objective = build_objective(config_of(type="reinforce", entropy_coef=1.0), SEQ_LEN)
    steps = [engine.step(split_batch(batch, 0, 1, module_world, 80), objective, 1.0) for _ in range(4)]
    entropies = [step.means["entropy"] for step in steps]
    assert entropies == sorted(entropies) and entropies[-1] > entropies[0] + 1e-3
    assert steps[0].means["loss/entropy"] == pytest.approx(-entropies[0], rel=1e-5)


def test_token_count_ignores_masks_of_the_loss():
    """Tokens that icepop leaves out are missing above the line, never below it."""
    nothing = {"token_mask_low": 0.0, "token_mask_high": 1e9, "geo_mask_low": 0.0, "geo_mask_high": 1e9}
    batch = make_batch()
    everything, _, _ = evaluate(build_objective(config_of(type="icepop", sequence_mask_high=1e9, **nothing), 1), batch)
    bounded, _, means = evaluate(build_objective(config_of(type="icepop", token_mask_high=1.0), 1), batch)
    assert 0 < means["importance_ratio/masked"][0] < means["importance_ratio/masked"][1] == batch.loss_tokens
    assert everything != bounded


STREAMS = ("rl_weights", "ce_weights", "ref_kl_weights", "ref_logprobs")


def golden_total(batch, kl_coef):
    """L_rl / N_rl + kl / N_rl + L_ce / N_ce + L_refkl / N_refkl, token by token."""
    position = np.concatenate([np.arange(n) for n in batch.seq_lens])
    logprobs = np.float32(-0.03 * batch.tokens - 0.01 * position - 0.02)
    mask = batch.loss_mask != 0
    used = {name: mask & (getattr(batch, name) != 0) for name in STREAMS[:3]}
    segments = np.repeat(np.arange(14), batch.seq_lens)

    def row(mask):
        return golden.Row(logprobs, batch.logprobs, batch.advantages, mask, segments, reference=batch.ref_logprobs)

    rl, _ = golden.aipo(row(used["rl_weights"]), 8.0)
    kl, _ = golden.kl(row(used["rl_weights"]), "k2", False)
    distilled, _ = golden.distillation(row(used["ref_kl_weights"]), 8.0)
    parts = {
        "rl": (batch.rl_weights * rl).sum() / used["rl_weights"].sum(),
        "kl": kl_coef * (batch.rl_weights * kl).sum() / used["rl_weights"].sum(),
        "ce": -(batch.ce_weights * logprobs)[mask].sum() / used["ce_weights"].sum(),
        "ref_kl": (batch.ref_kl_weights * distilled).sum() / used["ref_kl_weights"].sum(),
    }
    return sum(parts.values()), parts


@pytest.mark.parametrize("size", [1, 2, 4])
def test_streams_are_divided_by_their_counts(size):
    batch = make_batch(STREAMS)
    objective = rl_objective(build_loss(config_of(type="aipo")), kl=KLConfig(coef=0.3, estimator="k2"))
    loss, _, means = evaluate(objective, batch, size)
    wanted, parts = golden_total(batch, 0.3)
    assert loss == pytest.approx(wanted, rel=1e-5)
    for name, part in parts.items():
        assert means[f"loss/{name}"][0] == pytest.approx(part, rel=1e-5, abs=1e-7)


def test_padding_rows_have_the_same_metric_names():
    """A rank whose every row is padding adds the names that the others add."""
    objective = rl_objective(build_loss(config_of(type="aipo")), kl=KLConfig())
    names = []
    for rank in range(8):  # seven rows
        (minibatch,) = split_batch(make_batch(STREAMS), 0, 1, World(rank, 8, CPU), 80)
        for row in minibatch.rows:
            logprobs = policy(row).requires_grad_()
            answer = objective(ScoredRow(row, logprobs, torch.zeros_like(logprobs), True, minibatch.counts))
            answer.loss.backward()
            names.append([*answer.means, *answer.parts])
            assert torch.isfinite(answer.loss) and torch.isfinite(logprobs.grad).all()
    assert all(keys == names[0] for keys in names)
    assert {"rl", "kl", "ce", "ref_kl", "kl/reference"} <= set(names[0])


def test_default_normalizations_are_those_of_the_papers():
    fitting = {name: config_of(type=name).normalization for name in LOSSES}
    others = dict.fromkeys(LOSSES, "token")
    assert fitting == others | {"grpo": "sequence", "gspo": "sequence", "dr_grpo": "fixed"}


def test_metrics_of_a_batch_without_policy_gradient_are_over_its_trained_tokens():
    batch = make_batch(STREAMS)
    batch = dataclasses.replace(batch, rl_weights=np.zeros_like(batch.rl_weights))
    _, _, means = evaluate(rl_objective(build_loss(config_of(type="aipo"))), batch)
    assert means["logprob/mean"][1] == means["mismatch_kl"][1] == means["entropy"][1] == batch.loss_tokens
    assert means["mismatch_kl"][0] > 0
    assert means["importance_ratio/clipped"][1] == 0, "the loss that clips has no tokens"


@pytest.mark.parametrize("size", [1, 4])
def test_mismatch_by_source_equals_numpy(size):
    batch = make_batch()
    versions = np.where(np.arange(len(batch.tokens)) < 100, 0, -1).astype(np.int32)  # the first samples are on policy
    batch = dataclasses.replace(batch, versions=versions, sources={"env/a": [1, 3, 9], "server/b": [2, 5], "env/c": []})
    objective = rl_objective(build_loss(config_of(type="aipo")))
    assert with_source_metrics(objective, dataclasses.replace(batch, sources={})) is objective
    _, _, means = evaluate(with_source_metrics(objective, batch), batch, size)
    ends, position = np.cumsum(batch.seq_lens), np.concatenate([np.arange(n) for n in batch.seq_lens])
    log_r = np.float64(-0.03) * batch.tokens - 0.01 * position - 0.02 - batch.logprobs
    sample = np.repeat(np.arange(14), batch.seq_lens)
    for name, groups in batch.sources.items():
        for prefix, own in (("", groups), ("on_policy/", [group for group in groups if ends[group] <= 100])):
            values = (np.exp(log_r) - log_r - 1)[np.isin(sample, own) & (batch.loss_mask == 1)]
            assert means[f"mismatch_kl/{prefix}{name}"] == pytest.approx((values.sum(), len(values)), rel=1e-5)
    assert 0 < means["mismatch_kl/on_policy/env/a"][1] < means["mismatch_kl/env/a"][1]


@pytest.mark.parametrize("streams", [(), ("ref_kl_weights",)])
def test_missing_reference_raises(streams):
    objective = rl_objective(build_loss(config_of(type="aipo")), kl=None if streams else KLConfig())
    with pytest.raises(RunError, match="ref_kl_weights" if streams else "loss.kl"):
        evaluate(objective, make_batch(streams))
