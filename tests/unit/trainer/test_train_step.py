"""The training step on several gloo processes (I9), and with non-finite gradients (I10)."""

import dataclasses
import hashlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from prime_rl.configs.base_model import TokenizerConfig
from prime_rl.configs.trainer import FakeDataConfig
from prime_rl.configs.training.loss import AIPOLossConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.configs.training.optim import AdamWConfig, SGDConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.core.types import PolicyVersion
from prime_rl.trainer.losses.loss_functions import build_loss
from prime_rl.trainer.model.policy_model import load_tokenizer
from prime_rl.trainer.optim.optimizers import build_optimizer
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.rl.batch_source import fake_batch, split_batch
from prime_rl.trainer.rl.rl_objective import rl_objective
from prime_rl.trainer.train_step import Counts, Minibatch, TrainStep
from prime_rl.trainer.weight_sync.publisher import Publisher
from prime_rl.trainer.weights.policy_loading import load_policy, make_policy
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.world import run_world

VOCABULARY = 103
ROOM = 100  # one row of a batch, or two short ones
OBJECTIVE = rl_objective(build_loss(AIPOLossConfig()))
# name -> (tied embeddings, minibatches)
CASES = {"tied": (True, 1), "untied": (False, 3)}
STEPS = 2


def make_batch(step):
    """Seven rows of very different lengths; the second has nothing to train on, the versions differ."""
    config = FakeDataConfig(batch_size=14, seq_len=40, micro_batch_size=2, variable_length=True)
    batch = fake_batch(config, VOCABULARY, row_length=80, seed=3, step=step)
    mask = batch.loss_mask.copy()
    mask[batch.row(1)] = 0
    versions = np.where((batch.versions >= 0) & (np.repeat(np.arange(14), batch.seq_lens) % 3 == 0), -7, batch.versions)
    logprobs = batch.logprobs + np.random.default_rng(step).normal(0, 0.3, len(mask)).astype(np.float32)
    return dataclasses.replace(batch, loss_mask=mask, versions=versions.astype(np.int32), logprobs=logprobs)


def make_engine(world, path, lr=1e-3):
    config = TrainerModelConfig(name=str(path))
    policy = make_policy(config, 0, world)
    return policy, TrainStep(policy, build_optimizer(AdamWConfig(lr=lr), policy), world, max_norm=1.0)


def train_everything(world: World, argument: str):
    """Runs on every rank: the steps of each case; publishes the result."""
    root, results = Path(argument), {}
    for name, (_, minibatches) in CASES.items():
        policy, engine = make_engine(world, root / name)
        steps = [
            engine.step(split_batch(make_batch(n), n, minibatches, world, ROOM), OBJECTIVE, 1.0) for n in range(STEPS)
        ]
        results[name] = [dataclasses.asdict(step) for step in steps]
        tokenizer = load_tokenizer(TokenizerConfig(), TrainerModelConfig(name=str(root / name)))
        Publisher(policy, tokenizer, torch.float32, world).publish(
            root / f"out_{name}_{world.size}", PolicyVersion(0, STEPS)
        )
    return results


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    root = tmp_path_factory.mktemp("worlds")
    for name, (tied, _) in CASES.items():
        make_tiny_model(root / name, tie_word_embeddings=tied)
    results = {size: run_world(size, train_everything, str(root), root) for size in (1, 2)}  # four: test_parallel.py
    return root, results


@pytest.mark.parametrize("case", CASES)
def test_train_step_does_not_depend_on_world_size(worlds, case):
    """I9: loss, gradient norm, every mean and the published weights are those of one rank, and the same on all."""
    root, results = worlds
    alone = results[1][0][case]
    for rank in results[2]:
        assert rank[case] == results[2][0][case]
    for mine, other in zip(alone, results[2][0][case], strict=True):
        for key in ("loss", "grad_norm"):
            assert other[key] == pytest.approx(mine[key], rel=1e-5, abs=1e-5)
        assert other["means"] == pytest.approx(mine["means"], rel=1e-4, abs=1e-5)
        assert mine["skipped"] == other["skipped"] == 0
    before, one, many = (
        load_file(root / name / "model.safetensors") for name in (case, f"out_{case}_1", f"out_{case}_2")
    )
    assert before.keys() == one.keys() == many.keys()
    assert ("lm_head.weight" in one) == (case == "untied"), "a tied head is written once"
    assert not torch.equal(before["model.embed_tokens.weight"], one["model.embed_tokens.weight"])
    for name, tensor in one.items():
        torch.testing.assert_close(many[name], tensor, rtol=0, atol=2e-4)


def test_gradient_equals_plain_pytorch(worlds):
    """The engine's loss and norm against one unsharded forward and backward pass over the whole batch."""
    root, results = worlds
    policy = load_policy(TrainerModelConfig(name=str(root / "tied")), seed=0)
    world = World(rank=0, size=1, device=torch.device("cpu"))
    (minibatch,) = split_batch(make_batch(0), 0, 1, world, ROOM)
    assert minibatch.counts.tokens == make_batch(0).loss_mask.sum()
    total = 0.0
    for row in minibatch.rows:
        ratio = (policy(row)[0] - row.sampler_logprobs).exp().clamp(max=8.0)
        loss = -(ratio * row.advantages)[row.loss_mask].sum() / minibatch.counts.tokens
        loss.backward()
        total += loss.item()
    norm = sum(p.grad.pow(2).sum() for p in policy.parameters()).sqrt().item()
    first = results[1][0]["tied"][0]
    assert first["loss"] == pytest.approx(total, abs=1e-5)
    assert first["grad_norm"] == pytest.approx(norm, rel=1e-5)


def digest(policy):
    state = [p.full_tensor().detach().numpy().tobytes() for p in policy.parameters()]
    return hashlib.sha256(b"".join(state)).hexdigest()


@pytest.fixture
def lone_engine(world, tiny):
    return world, *make_engine(world, tiny)


def poisoned(field, value):
    batch = make_batch(0)
    values = getattr(batch, field).copy()
    values[np.flatnonzero(batch.loss_mask)[5]] = value
    return dataclasses.replace(batch, **{field: values})


@pytest.mark.parametrize(
    ("field", "value", "is_skipped"),
    [
        ("advantages", np.nan, True),
        ("advantages", -np.inf, True),
        ("logprobs", np.nan, True),
        ("logprobs", np.inf, False),  # an infinite ratio is clamped, so the step is usable
        ("logprobs", -np.inf, False),
    ],
)
def test_non_finite_inputs_skip_the_update(lone_engine, field, value, is_skipped):
    """I10: no weight becomes non-finite; a step that cannot be used is skipped and counted."""
    world, policy, engine = lone_engine
    before = digest(policy)
    result = engine.step(split_batch(poisoned(field, value), 0, 1, world, ROOM), OBJECTIVE, 1.0)
    assert all(torch.isfinite(parameter.full_tensor()).all() for parameter in policy.parameters())
    assert result.skipped == is_skipped
    assert (digest(policy) == before) is is_skipped
    if is_skipped:
        assert (result.grad_norm, result.loss) == (None, None)


def test_non_finite_minibatch_does_not_affect_others(lone_engine):
    world, policy, engine = lone_engine
    before = digest(policy)
    result = engine.step(split_batch(poisoned("advantages", np.nan), 0, 3, world, ROOM), OBJECTIVE, 1e-3)
    assert result.skipped == 1 and result.grad_norm is not None
    assert digest(policy) != before


def test_three_skipped_steps_raise(lone_engine):
    world, _, engine = lone_engine
    bad, good = (
        [Minibatch(split_batch(batch, 0, 1, world, ROOM)[0].rows[:1], Counts(1))]
        for batch in (poisoned("advantages", np.nan), make_batch(0))
    )
    for minibatches in (bad, bad, good, bad, bad):
        engine.step(minibatches, OBJECTIVE, 1.0)
    with pytest.raises(RunError, match="3 consecutive steps"):
        engine.step(bad, OBJECTIVE, 1.0)


@pytest.mark.parametrize("action", ["step", "evaluate"])
def test_token_outside_vocabulary_raises(lone_engine, action):
    world, _, engine = lone_engine
    batch = make_batch(0)
    batch = dataclasses.replace(batch, tokens=np.where(batch.tokens == batch.tokens[3], 128, batch.tokens))
    (minibatch,) = split_batch(batch, 0, 1, world, ROOM)
    with pytest.raises(ConfigError, match=r"the batch contains token 128, but .* has 128 tokens"):
        engine.step([minibatch], OBJECTIVE, 1.0) if action == "step" else engine.evaluate(minibatch, OBJECTIVE)


def test_batch_without_trained_tokens_changes_nothing(lone_engine):
    world, _, engine = lone_engine
    batch = make_batch(0)
    batch = dataclasses.replace(batch, loss_mask=np.zeros_like(batch.loss_mask))
    (minibatch,) = split_batch(batch, 0, 1, world, ROOM)
    assert minibatch.counts.tokens == 1
    result = engine.step([minibatch], OBJECTIVE, factor=0.0)
    assert (result.loss, result.grad_norm, result.skipped) == (0.0, 0.0, 0)
    assert result.means["mismatch_kl"] is None


def test_mismatch_is_measured_before_the_first_update_only(lone_engine):
    world, policy, engine = lone_engine
    minibatches = split_batch(make_batch(0), 0, 3, world, ROOM)
    before = digest(policy)
    wanted = engine.step(minibatches[:1], OBJECTIVE, factor=0.0).means
    assert digest(policy) == before, "a learning rate of 0"
    got = engine.step(minibatches, OBJECTIVE, factor=100.0).means
    for name in ("mismatch_kl", "mismatch_kl/on_policy"):
        assert got[name] == pytest.approx(wanted[name], rel=1e-6)
    assert got["importance_ratio/mean"] != pytest.approx(wanted["importance_ratio/mean"], rel=1e-3)


def test_parts_of_the_loss_add_up_to_it(lone_engine):
    """Over minibatches of different sizes too."""
    world, _, engine = lone_engine
    batch = make_batch(0)
    batch = dataclasses.replace(batch, ce_weights=np.linspace(0, 2, len(batch.tokens), dtype=np.float32))
    result = engine.step(split_batch(batch, 0, 3, world, ROOM), OBJECTIVE, factor=1.0)
    parts = [result.means[f"loss/{name}"] for name in ("rl", "ce")]
    assert sum(parts) == pytest.approx(result.loss, rel=1e-5) and parts[0] != pytest.approx(result.loss, rel=1e-2)


def test_layer_norms_equal_the_norms_of_the_gradients(world, tiny):
    policy = make_policy(TrainerModelConfig(name=str(tiny)), 0, world)
    optimizer, norms = build_optimizer(SGDConfig(lr=1e-2), policy), {}

    def record(*_):
        gradients = {name: p.grad.full_tensor().double() for name, p in policy.causal_lm.named_parameters()}
        norms.update((name, gradient.norm().item()) for name, gradient in gradients.items())

    optimizer.register_step_pre_hook(record)
    minibatches = split_batch(make_batch(0), 0, 1, world, ROOM)
    result = TrainStep(policy, optimizer, world, 1e9).step(minibatches, OBJECTIVE, 1.0, layer_norms=True)
    parts = {
        "layer_0": [".layers.0."], "layer_1": [".layers.1."], "embedding": ["embed_tokens"], "mlp": [".mlp."],
        "attention": ["q_proj", "k_proj", "v_proj", "o_proj"], "norm": ["norm"],
    }  # fmt: skip
    wanted = {
        f"grad_norm/{key}": math.hypot(*(norm for name, norm in norms.items() if any(word in name for word in some)))
        for key, some in parts.items()
    }
    assert result.layer_norms == pytest.approx(wanted, rel=1e-5)
    assert result.grad_norm == pytest.approx(math.hypot(*norms.values()), rel=1e-5)


@pytest.mark.parametrize("max_norm", [1e-3, 1e3, None])
def test_update_has_length_of_clipped_gradient(world, tiny, max_norm):
    """Plain gradient descent at rate 1 moves the weights by the gradient itself."""
    policy = make_policy(TrainerModelConfig(name=str(tiny)), 0, world)
    descent = SGDConfig(lr=1.0, momentum=0, weight_decay=0)
    engine = TrainStep(policy, build_optimizer(descent, policy), world, max_norm)
    before = [p.full_tensor().detach().clone() for p in policy.parameters()]
    result = engine.step(split_batch(make_batch(0), 0, 1, world, ROOM), OBJECTIVE, 1.0)
    moved = [(p.full_tensor().detach() - b).double() for p, b in zip(policy.parameters(), before, strict=True)]
    length = sum(difference.square().sum() for difference in moved).sqrt().item()
    assert result.grad_norm > 1e-2
    assert length == pytest.approx(min(result.grad_norm, max_norm or np.inf), rel=1e-3)
