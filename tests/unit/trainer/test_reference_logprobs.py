"""Reference and proximal log-probabilities, on one rank and on two."""

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from prime_rl.configs.trainer import FakeDataConfig, TrainerConfig
from prime_rl.configs.training.loss import (
    AIPOLossConfig,
    DecoupledPPOLossConfig,
    GSPOLossConfig,
    KLConfig,
    ReferenceConfig,
)
from prime_rl.configs.training.model import DebugModelConfig, LoRAConfig, TrainerModelConfig
from prime_rl.configs.training.optim import AdamWConfig
from prime_rl.core.errors import ConfigError
from prime_rl.trainer.optim.optimizers import build_optimizer
from prime_rl.trainer.rl.batch_source import fake_batch, split_batch
from prime_rl.trainer.rl.rl_objective import References, build_objective
from prime_rl.trainer.train_step import TrainStep
from prime_rl.trainer.weights.policy_loading import make_policy
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.world import run_world

VOCABULARY, ROOM = 103, 100
KL = AIPOLossConfig(kl=KLConfig(coef=0.5))


def make_batch(step=0):
    """Seven rows: on two ranks the last of one is padding."""
    config = FakeDataConfig(batch_size=14, seq_len=40, micro_batch_size=2, variable_length=True)
    return fake_batch(config, VOCABULARY, row_length=80, seed=3, step=step)


class Trained:
    """A policy that is trained as a configuration says, and what it needs."""

    def __init__(self, world, path, lr=1e-2, minibatches=1, **keys):
        self.lora = keys.pop("lora", None)
        self.config = TrainerConfig(model=TrainerModelConfig(name=str(path), lora=self.lora), **keys)
        self.world, self.minibatches = world, minibatches
        self.policy = make_policy(self.config.model, 0, world)
        self.engine = TrainStep(self.policy, build_optimizer(AdamWConfig(lr=lr), self.policy), world, None)
        self.references = References(self.config, self.policy, world)
        self.objective = build_objective(self.config.loss, 64)

    def split(self, batch):
        return self.references.score(split_batch(batch, 0, self.minibatches, self.world, ROOM))

    def step(self, batch=None):
        return self.engine.step(self.split(batch or make_batch()), self.objective, 1.0)

    @torch.no_grad()
    def logprobs(self, minibatches):
        return [[self.policy(row)[0] for row in minibatch.rows] for minibatch in minibatches]


def on_ranks(world, path):
    """Runs on every rank."""
    by_sequence = GSPOLossConfig(eps_low=0.2, eps_high=0.2, kl=KL.kl)
    reference = ReferenceConfig(name=path.replace("policy", "reference"))
    cases = {
        "base": Trained(world, path, loss=KL),
        "lora": Trained(world, path, loss=KL, lora=LoRAConfig(rank=4)),
        "other": Trained(world, path, loss=by_sequence, reference=reference),
        "decoupled": Trained(world, path, loss=DecoupledPPOLossConfig(), minibatches=3),
        "entropy": Trained(world, path, loss=AIPOLossConfig(top_entropy_quantile=0.3), minibatches=2),
    }
    results = {name: [dataclasses.asdict(trained.step()) for _ in range(3)] for name, trained in cases.items()}
    base, lora = (
        torch.cat([r.ref_logprobs for r in cases[name].split(make_batch())[0].rows]) for name in ("base", "lora")
    )
    results["gap"] = (base - lora).abs().max().item()
    return results


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    make_tiny_model(root / "policy", seed=0)
    make_tiny_model(root / "reference", seed=1)
    return {size: run_world(size, on_ranks, str(root / "policy"), root) for size in (1, 2)}


@pytest.mark.extended
@pytest.mark.parametrize("case", ["base", "lora", "other", "decoupled", "entropy"])
def test_reference_logprobs_do_not_depend_on_world_size(worlds, case):
    """I9, with a second sharded model beside the first, and padding rows."""
    for one, two in zip(worlds[1][0][case], worlds[2][0][case], strict=True):
        for key in ("loss", "grad_norm"):
            assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-5)
        assert two["means"] == pytest.approx(one["means"], rel=1e-3, abs=1e-5)
    assert worlds[2][0][case] == worlds[2][1][case]


@pytest.mark.extended
def test_reference_kl_starts_at_zero_and_grows(worlds):
    for case in ("base", "lora"):
        kl = [step["means"]["kl/reference"] for step in worlds[1][0][case]]
        assert kl[0] == pytest.approx(0, abs=1e-7) and kl[2] > 1e-4
    assert worlds[1][0]["other"][0]["means"]["kl/reference"] > 1e-4
    assert worlds[1][0]["gap"] < 1e-5, "between a frozen copy and the trained policy without its adapters"


@pytest.fixture
def lone(world, tiny):
    return world, str(tiny)


def test_proximal_logprobs_are_those_before_the_first_update(lone):
    trained = Trained(*lone, loss=DecoupledPPOLossConfig(), minibatches=3)
    trained.step()
    minibatches = trained.split(make_batch())
    wanted = trained.logprobs(minibatches)
    assert all(row.proximal_logprobs is None for row in minibatches[0].rows)
    for minibatch, logprobs in zip(minibatches[1:], wanted[1:], strict=True):
        for row, values in zip(minibatch.rows, logprobs, strict=True):
            assert torch.equal(row.proximal_logprobs, values)
    clipped = trained.step().means["importance_ratio/clipped"]
    assert 0 < clipped < 1  # the later minibatches, after updates, leave the trust region here and there


def test_top_entropy_quantile_trains_the_tokens_of_the_highest_entropy_in_the_minibatch(lone):
    """Against NumPy: linear quantile by sorting; the loss stays divided by all tokens, and the KL has all tokens."""
    trained = Trained(*lone, loss=AIPOLossConfig(top_entropy_quantile=0.3, kl=KLConfig(coef=1.0)), minibatches=2)
    batch = make_batch()
    weights = np.where(np.arange(len(batch.tokens)) % 5, 0.5, 0).astype(np.float32)
    batch = dataclasses.replace(batch, rl_weights=weights, ref_logprobs=np.full(len(weights), -4.0, np.float32))
    objective = build_objective(trained.config.loss, 64)
    for minibatch in trained.split(batch):
        assert len(minibatch.rows) > 1
        parts = []
        for row in minibatch.rows:
            with torch.no_grad():
                scored = trained.engine.forward(row, minibatch.counts, before_first_update=True)
            parts.append((objective(scored), scored))
        arrays = {
            name: np.concatenate([getattr(scored.row, name).numpy() for _, scored in parts])
            for name in ("loss_mask", "rl_weights", "sampler_logprobs", "advantages")
        }
        entropy, logprobs = (
            np.concatenate([getattr(s, name).double().numpy() for _, s in parts]) for name in ("entropy", "logprobs")
        )
        mask = arrays["loss_mask"] & (arrays["rl_weights"] != 0)
        values = np.sort(entropy[mask])
        place = 0.7 * (len(values) - 1)
        low = int(place)
        threshold = values[low] + (place - low) * (values[low + 1] - values[low])
        chosen = mask & (entropy >= threshold)
        assert chosen.sum() == pytest.approx(0.3 * mask.sum(), abs=1)
        ratio = np.exp(logprobs - arrays["sampler_logprobs"])
        terms = -np.minimum(ratio, 8.0) * arrays["advantages"] * 0.5
        wanted = terms[chosen].sum() / mask.sum()
        assert sum(result.parts["rl"].item() for result, _ in parts) == pytest.approx(wanted, rel=1e-4)
        assert sum(result.means["kl/reference"][1].item() for result, _ in parts) == mask.sum()


@pytest.mark.parametrize("loss", [AIPOLossConfig(top_entropy_quantile=0.3), DecoupledPPOLossConfig()])
def test_token_that_the_model_lacks_is_refused_before_the_policy_scores_it(lone, loss):
    batch = make_batch()
    batch = dataclasses.replace(batch, tokens=batch.tokens + 1000)
    with pytest.raises(ConfigError, match="the batch contains token 1"):
        Trained(*lone, loss=loss, minibatches=3).split(batch)


def test_logprobs_are_computed_only_if_the_loss_needs_and_the_batch_lacks_them(lone):
    trained = Trained(*lone, loss=AIPOLossConfig(), minibatches=3)
    rows = [row for minibatch in trained.split(make_batch()) for row in minibatch.rows]
    assert all(row.proximal_logprobs is None and row.ref_logprobs is None for row in rows)
    batch = make_batch()
    batch = dataclasses.replace(batch, ref_logprobs=np.full(len(batch.tokens), -2.5, np.float32))
    (minibatch,) = Trained(*lone, loss=KL).split(batch)
    assert all((row.ref_logprobs == -2.5).all() for row in minibatch.rows)


def test_reference_model_has_forward_precision(lone):
    world, path = lone
    config = TrainerConfig(model=TrainerModelConfig(name=path, dtype="bfloat16"), loss=KL)
    policy = make_policy(config.model, 0, world)
    references = References(config, policy, world)
    (minibatch,) = references.score(split_batch(make_batch(), 0, 1, world, ROOM))
    assert {p.dtype for p in references._model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in references._model.parameters())
    with torch.no_grad():
        assert all(torch.equal(row.ref_logprobs, policy(row)[0]) for row in minibatch.rows)


def test_other_reference_ignores_debug_settings(lone, tmp_path):
    world, path = lone
    teacher = make_tiny_model(tmp_path / "teacher", seed=1)
    model = TrainerModelConfig(name=path, debug=DebugModelConfig(num_layers=1, random_init=True))
    policy = make_policy(model, 0, world)
    own, other = (
        References(TrainerConfig(model=model, loss=KL, reference=ReferenceConfig(name=str(name))), policy, world)._model
        for name in (path, teacher)
    )
    assert (len(own.blocks), len(other.blocks)) == (1, 2)
    wanted = load_file(teacher / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(other.causal_lm.get_input_embeddings().weight.full_tensor(), wanted)
