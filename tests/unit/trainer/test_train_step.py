"""The training step on several gloo processes (I9), and with non-finite gradients (I10)."""

import dataclasses
import hashlib
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
from prime_rl.trainer.train_step import TrainStep
from prime_rl.trainer.weight_sync.publisher import Publisher
from prime_rl.trainer.weights.policy_loading import load_policy, make_policy
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.world import run_world

VOCABULARY = 103
ROOM = 100  # one row of a batch, or two short ones
OBJECTIVE = rl_objective(build_loss(AIPOLossConfig()))
# name -> (tied embeddings, minibatches)
CASES = {"tied": (True, 1), "untied": (False, 1), "minibatches": (True, 3)}


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
    """Runs on every rank: three steps of each case; publishes what comes out."""
    root, results = Path(argument), {}
    for name, (tied, minibatches) in CASES.items():
        source = root / ("tied" if tied else "untied")
        policy, engine = make_engine(world, source)
        steps = [engine.step(split_batch(make_batch(n), n, minibatches, world, ROOM), OBJECTIVE, 1.0) for n in range(3)]
        results[name] = [dataclasses.asdict(step) for step in steps]
        tokenizer = load_tokenizer(TokenizerConfig(), TrainerModelConfig(name=str(source)))
        target = root / f"out_{name}_{world.size}"
        Publisher(policy, tokenizer, torch.float32, world).publish(target, PolicyVersion(0, 3))
    return results


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    root = tmp_path_factory.mktemp("worlds")
    make_tiny_model(root / "tied", tie_word_embeddings=True)
    make_tiny_model(root / "untied", tie_word_embeddings=False)
    results = {size: run_world(size, train_everything, str(root), root) for size in (1, 2)}  # four: test_parallel.py
    return root, results


@pytest.mark.extended(after=1)
@pytest.mark.parametrize("case", CASES)
def test_train_step_does_not_depend_on_world_size(worlds, case):
    """I9: loss, gradient norm, every mean and the resulting weights are those of one rank, and the same on all."""
    root, results = worlds
    alone = results[1][0][case]
    for rank in results[2]:
        assert rank[case] == results[2][0][case]
    for mine, other in zip(alone, results[2][0][case], strict=True):
        for key in ("loss", "grad_norm"):
            assert other[key] == pytest.approx(mine[key], rel=1e-5, abs=1e-5)
        assert other["means"] == pytest.approx(mine["means"], rel=1e-4, abs=1e-5)
        assert mine["skipped"] == other["skipped"] == 0
    one, many = (load_file(root / f"out_{case}_{n}" / "model.safetensors") for n in (1, 2))
    assert one.keys() == many.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(many[name], tensor, rtol=0, atol=2e-4)


def test_gradient_equals_plain_pytorch(worlds, tmp_path):
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


def test_published_weights_are_the_trained_ones_and_tied_heads_are_written_once(worlds):
    root, _ = worlds
    before = load_file(root / "tied" / "model.safetensors")
    after = load_file(root / "out_tied_2" / "model.safetensors")
    assert "lm_head.weight" not in after
    assert before.keys() == after.keys()
    assert not torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert "lm_head.weight" in load_file(root / "out_untied_2" / "model.safetensors")


def test_minibatches_take_one_update_each(worlds):
    _, results = worlds
    one, three = results[1][0]["tied"][0], results[1][0]["minibatches"][0]
    assert one["grad_norm"] != pytest.approx(three["grad_norm"], rel=1e-3)
    # The mismatch is measured before the first update only, over the tokens of the first minibatch.
    assert one["means"]["mismatch_kl"] != three["means"]["mismatch_kl"]


def digest(policy):
    state = [p.full_tensor().detach().numpy().tobytes() for p in policy.parameters()]
    return hashlib.sha256(b"".join(state)).hexdigest()


@pytest.fixture
def lone_engine(world, tmp_path):
    return world, *make_engine(world, make_tiny_model(tmp_path))


def poisoned(field, value):
    batch = make_batch(0)
    values = getattr(batch, field).copy()
    values[np.flatnonzero(batch.loss_mask)[5]] = value
    return dataclasses.replace(batch, **{field: values})


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("field", ["advantages", "logprobs"])
def test_non_finite_inputs_skip_the_update(lone_engine, field, value):
    """I10: whatever a batch holds, no weight becomes non-finite; what cannot be used is skipped and counted."""
    world, policy, engine = lone_engine
    before = digest(policy)
    result = engine.step(split_batch(poisoned(field, value), 0, 1, world, ROOM), OBJECTIVE, 1.0)
    for parameter in policy.parameters():
        assert torch.isfinite(parameter.full_tensor()).all()
    if field == "logprobs" and not np.isnan(value):
        assert result.skipped == 0  # an infinite ratio is clamped, so the step is usable
    else:
        assert (result.skipped, result.grad_norm, result.loss) == (1, None, None)
        assert digest(policy) == before
    good = engine.step(split_batch(make_batch(1), 1, 1, world, ROOM), OBJECTIVE, 1.0)
    assert good.skipped == 0 and digest(policy) != before


def test_non_finite_minibatch_does_not_affect_others(lone_engine):
    world, policy, engine = lone_engine
    before = digest(policy)
    result = engine.step(split_batch(poisoned("advantages", np.nan), 0, 3, world, ROOM), OBJECTIVE, 1e-3)
    assert result.skipped == 1 and result.grad_norm is not None
    assert digest(policy) != before


def test_three_skipped_steps_raise(lone_engine):
    world, _, engine = lone_engine
    bad = split_batch(poisoned("advantages", np.nan), 0, 1, world, ROOM)
    good = split_batch(make_batch(0), 0, 1, world, ROOM)
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


@pytest.mark.parametrize("max_norm", [1e-3, 1e3, None])
def test_update_has_length_of_clipped_gradient(world, tmp_path, max_norm):
    """Plain gradient descent at rate 1 moves the weights by the gradient itself."""
    policy = make_policy(TrainerModelConfig(name=str(make_tiny_model(tmp_path))), 0, world)
    descent = SGDConfig(lr=1.0, momentum=0, weight_decay=0)
    engine = TrainStep(policy, build_optimizer(descent, policy), world, max_norm)
    before = [p.full_tensor().detach().clone() for p in policy.parameters()]
    minibatches = split_batch(make_batch(0), 0, 1, world, ROOM)
    result = engine.step(minibatches, OBJECTIVE, 1.0)
    moved = [(p.full_tensor().detach() - b).double() for p, b in zip(policy.parameters(), before, strict=True)]
    length = sum(difference.square().sum() for difference in moved).sqrt().item()
    assert result.grad_norm > 1e-2
    assert length == pytest.approx(min(result.grad_norm, max_norm or np.inf), rel=1e-3)
