"""Load balance metrics equal explicit counts and do not depend on the world size (I9)."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from prime_rl.configs.shared.blocks import TokenizerConfig
from prime_rl.configs.training.loss import AIPOLossConfig
from prime_rl.configs.training.memory import ActivationCheckpointConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.configs.training.optim import SGDConfig
from prime_rl.core.types import PolicyVersion
from prime_rl.trainer.losses import build_loss
from prime_rl.trainer.micro_batch import masked_row
from prime_rl.trainer.model.policy_model import load_tokenizer
from prime_rl.trainer.optim import build_optimizer
from prime_rl.trainer.rl.batch_source import split_batch
from prime_rl.trainer.rl.rl_objective import rl_objective
from prime_rl.trainer.train_step import TrainStep
from prime_rl.trainer.weight_sync.publisher import Publisher
from prime_rl.trainer.weights.policy_loading import load_policy, make_policy
from tests.support.tiny_model import make_tokenizer
from tests.unit.trainer.test_policy_model import SMALL, pack, segments
from tests.unit.trainer.test_train_step import ROOM, make_batch
from tests.unit.trainer.world import run_world

EXPERTS, CHOSEN, LAYERS = 8, 2, 3
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    path = tmp_path_factory.mktemp("mixture")
    config = transformers.Qwen3MoeConfig(
        **{**SMALL, "vocab_size": 128}, head_dim=16, num_experts=EXPERTS, num_experts_per_tok=CHOSEN,
        moe_intermediate_size=16, mlp_only_layers=[1],
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def by_hand(path, parts):
    """The metrics from transformers' own router logits, in NumPy."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    violation, idle, confidence = [], [], []
    with torch.no_grad():
        logits = [model(torch.from_numpy(p)[None], output_router_logits=True).router_logits for p in parts]
    for layer in zip(*logits, strict=True):
        z = np.concatenate([x.reshape(-1, EXPERTS).numpy() for x in layer]).astype(np.float64)
        weights = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        best = np.argsort(-weights, axis=1)[:, :CHOSEN]
        load = np.bincount(best.ravel(), minlength=EXPERTS)
        kept = np.take_along_axis(weights, best, 1)
        violation.append(load.max() / load.mean() - 1)
        idle.append((load == 0).mean())
        confidence.append((kept[:, 0] / kept.sum(1)).mean())
    values = map(np.mean, (violation, idle, confidence))
    return dict(zip(("moe/max_violation", "moe/idle_experts", "moe/routing_confidence"), values, strict=True))


def test_metrics_equal_explicit_counts(mixture):
    policy = load_policy(TrainerModelConfig(name=str(mixture)), seed=0)
    parts = segments(128)[:2]
    for part in parts:
        policy(pack([part]))
    policy(masked_row())
    with torch.no_grad():
        policy(pack(segments(128)))  # validation
    metrics = policy.routing.reduce(lambda counts: counts, CPU)
    assert metrics == pytest.approx(by_hand(mixture, parts), rel=1e-5)
    assert metrics["moe/max_violation"] > 0 and 1 / CHOSEN < metrics["moe/routing_confidence"] < 1
    assert set(policy.routing.reduce(lambda counts: counts, CPU).values()) == {None}


def test_dense_model_has_no_metrics(tmp_path):
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    policy = load_policy(TrainerModelConfig(name=str(tmp_path)), seed=0)
    policy(pack(segments(64)))
    assert policy.routing.reduce(lambda counts: counts, CPU) == {}


def train(world, argument):
    """Runs on every rank: two steps; publishes what comes out."""
    config = TrainerModelConfig(name=argument, ac=ActivationCheckpointConfig(freq=2))
    policy = make_policy(config, 0, world)
    engine = TrainStep(policy, build_optimizer(SGDConfig(lr=1e-2), policy), world, max_norm=1.0)
    objective = rl_objective(build_loss(AIPOLossConfig()))
    steps = [engine.step(split_batch(make_batch(n), n, 1, world, ROOM), objective, 1.0) for n in range(2)]
    tokenizer = load_tokenizer(TokenizerConfig(), config)
    target = Path(argument) / f"out/{world.size}"
    Publisher(policy, tokenizer, torch.float32, world).publish(target, PolicyVersion(0, 2))
    return [dataclasses.asdict(step) for step in steps]


def test_training_and_metrics_do_not_depend_on_the_world_size(mixture, tmp_path):
    alone, several = (run_world(size, train, str(mixture), tmp_path) for size in (1, 2))
    assert several[0] == several[1]
    for mine, other in zip(alone[0], several[0], strict=True):
        assert other["loss"] == pytest.approx(mine["loss"], abs=1e-5)
        assert other["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-5)
        assert other["means"]["moe/max_violation"] == pytest.approx(mine["means"]["moe/max_violation"])
        assert other["means"] == pytest.approx(mine["means"], rel=1e-4, abs=1e-5)
    one, two = (load_file(mixture / f"out/{size}/model.safetensors") for size in (1, 2))
    before = load_file(mixture / "model.safetensors")
    assert one.keys() == two.keys() == before.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-5)
    assert any(not torch.equal(before[name], one[name]) for name in one if ".experts." in name)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(mixture / "out/2", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert loaded.config.num_experts == EXPERTS
