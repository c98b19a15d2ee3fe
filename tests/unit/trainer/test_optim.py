"""Parameter groups, schedules and optimizers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
from prime_rl.trainer.optim.optimizers import Muon, build_optimizer, orthogonalise
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.rl.batch_source import split_batch
from prime_rl.trainer.train_step import LearningRates, TrainStep, schedule_factor, warn_if_warmup_exceeds_run
from prime_rl.trainer.weights.policy_loading import load_policy, make_policy
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.test_train_step import OBJECTIVE, ROOM, make_batch
from tests.unit.trainer.world import run_world


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (ConstantSchedulerConfig(), [1.0] * 4),
        (ConstantSchedulerConfig(warmup_steps=1, factor=0.5), [0.25, 0.5, 0.5]),
        (ConstantSchedulerConfig(warmup_steps=3), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        (LinearSchedulerConfig(factor=0.5, min_lr=0.1), [0.5, 0.4, 0.3, 0.2]),  # scales all but the floor
        (LinearSchedulerConfig(warmup_steps=1, decay_steps=4, min_lr=0.2), [0.5, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4]),
        # Longer than the run: the peak is reached all the same.
        (LinearSchedulerConfig(warmup_steps=2, decay_steps=100), [1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25]),
        (
            CosineSchedulerConfig(min_lr=0.1),
            [1.0, 0.1 + 0.9 * (1 + 0.5**0.5) / 2, 0.55, 0.1 + 0.9 * (1 - 0.5**0.5) / 2],
        ),
    ],
)
def test_schedule_factors_of_a_run(config, wanted):
    factors = [schedule_factor(config, 1.0, step, len(wanted)) for step in range(len(wanted))]
    assert factors == pytest.approx(wanted)


@pytest.mark.parametrize(("warmup", "steps", "warns"), [(5, 4, True), (5, 5, False), (5, None, False)])
def test_schedule_warm_up_longer_than_run_logs_warning(warmup, steps, warns, said):
    warn_if_warmup_exceeds_run(ConstantSchedulerConfig(warmup_steps=warmup), steps)
    assert ["scheduler.warmup_steps = 5 is more than max_steps = 4" in line for line in said()] == [True] * warns


def test_schedule_floor_is_a_rate_that_stays():
    config = LinearSchedulerConfig(min_lr=0.2)
    for step in (8, 80):
        assert schedule_factor(config, 2.0, step, 8) * 2.0 == pytest.approx(0.2)
    assert schedule_factor(LinearSchedulerConfig(), 0.0, 4, 8) == 0.5, "a peak of zero divides nothing"
    assert schedule_factor(ConstantSchedulerConfig(), 0.5, 10**6, None) == 1.0


@settings(max_examples=30)
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
    assert isinstance(optimizer, torch.optim.AdamW)
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
    applied = {group["role"]: group["lr"] for group in optimizer.param_groups}
    assert applied == {"embedding": 1.0, "matrix": 0.5, "vector": 0.5}


def test_parameter_groups_without_effect_log_warning(models, said):
    build_optimizer(AdamWConfig(embedding_lr=2.0, unembedding_lr=3.0), load(models[True]))
    assert said() == ["optim.unembedding_lr has no effect: the output head is tied to the embedding"]


def test_parameter_groups_omit_frozen_parameters(models):
    policy = load(models[True]).requires_grad_(False)
    policy.blocks[0].mlp.up_proj.weight.requires_grad_(True)
    (group,) = build_optimizer(MuonConfig(eps=1e-7), policy).param_groups
    assert (group["role"], len(group["params"]), group["eps"]) == ("matrix", 1, 1e-7)
    adamw = build_optimizer(AdamWConfig(beta2=0.95, eps=1e-7), policy)
    assert isinstance(adamw, torch.optim.AdamW)
    assert (adamw.defaults["betas"], adamw.defaults["eps"]) == ((0.9, 0.95), 1e-7)
    sgd = build_optimizer(SGDConfig(momentum=0), policy)
    assert isinstance(sgd, torch.optim.SGD) and sgd.defaults["momentum"] == 0


# Muon against NumPy, and equal weights for any sharding (I9)


STEPS = 3
# Tall, wide and square; an odd number of equal ones; fewer rows than ranks; two stacks; and what AdamW takes.
SHAPES = [(7, 5), (7, 5), (7, 5), (4, 9), (6, 6), (2, 8), (5, 4, 6), (3, 6, 4), (9,)]


def numpy_orthogonalise(matrix, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / np.sqrt((x**2).sum())
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def numpy_muon(weight, gradients, lr, mu, decay, nesterov, original):
    momentum = np.zeros_like(weight)
    for gradient in gradients:
        momentum = mu * momentum + (1 - mu) * gradient
        update = mu * momentum + (1 - mu) * gradient if nesterov else momentum
        m, n = weight.shape[-2:]
        scale = max(1, m / n) ** 0.5 if original else 0.2 * max(m, n) ** 0.5
        stack = update.reshape(-1, m, n)
        orthogonal = np.stack([numpy_orthogonalise(x) for x in stack]).reshape(weight.shape)
        weight = weight * (1 - lr * decay) - lr * scale * orthogonal
    return weight


def numpy_adamw(weight, gradients, lr, betas, eps):
    mean, square = np.zeros_like(weight), np.zeros_like(weight)
    for t, gradient in enumerate(gradients, 1):
        mean = betas[0] * mean + (1 - betas[0]) * gradient
        square = betas[1] * square + (1 - betas[1]) * gradient**2
        weight = weight - lr * mean / (1 - betas[0] ** t) / (np.sqrt(square / (1 - betas[1] ** t)) + eps)
    return weight


def draw(shapes=SHAPES):
    """Weights, and the gradients of every step."""
    random = np.random.default_rng(0)
    return [random.normal(size=shape) for shape in shapes], [
        [random.normal(size=shape) * 2.0**-i for i, shape in enumerate(shapes)] for _ in range(STEPS)
    ]


def groups(parameters):
    matrices = [p for p in parameters if p.ndim > 1]
    return [
        {"params": matrices, "role": "matrix", "lr": 0.02, "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "role": "vector", "lr": 0.1, "weight_decay": 0.0},
    ]


def train(parameters, gradients, place=lambda i, tensor: tensor, **options):
    optimizer = Muon(groups(parameters), lr=0.1, **options)
    for step in gradients:
        for i, (parameter, gradient) in enumerate(zip(parameters, step, strict=True)):
            parameter.grad = place(i, torch.tensor(gradient, dtype=torch.float32))
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr", ["match_rms_adamw", "original"])
def test_muon_equals_numpy(nesterov, adjust_lr):
    weights, gradients = draw()
    parameters = [torch.nn.Parameter(torch.tensor(w, dtype=torch.float32)) for w in weights]
    train(parameters, gradients, nesterov=nesterov, adjust_lr=adjust_lr, eps=1e-2)
    for i, (parameter, weight) in enumerate(zip(parameters, weights, strict=True)):
        mine = [step[i] for step in gradients]
        if weight.ndim == 1:
            wanted = numpy_adamw(weight, mine, 0.1, (0.9, 0.95), eps=1e-2)
        else:
            wanted = numpy_muon(weight, mine, 0.02, 0.95, 0.1, nesterov, adjust_lr == "original")
        np.testing.assert_allclose(parameter.detach(), wanted, atol=2e-6, err_msg=str(SHAPES[i]))
    assert torch.equal(orthogonalise(torch.zeros(4, 3)), torch.zeros(4, 3)), "an adapter's B begins with no gradient"


def train_sharded(world: World, argument: str):
    """Runs on every rank: the shapes in every layout; returns the whole weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    line = init_device_mesh("cpu", (world.size,))
    square = init_device_mesh("cpu", (world.size // 2, 2))
    # Mesh, and the placements of a vector, a matrix and a stack of matrices.
    rows, columns, copies = Shard(0), Shard(1), Replicate()
    layouts = {
        "rows": (line, [[rows], [rows], [rows]]),
        "columns": (line, [[rows], [columns], [Shard(2)]]),
        "copies": (line, [[copies], [copies], [copies]]),
        "hybrid": (square, [[copies, rows], [copies, rows], [copies, rows]]),
        "tensor_parallel": (square, [[rows, copies], [rows, columns], [rows, Shard(2)]]),
        "stacks_cut_inside": (square, [[copies, rows], [rows, copies], [rows, columns]]),
    }
    weights, gradients = draw()
    results = {}
    for name, (mesh, placements) in layouts.items():

        def place(_, tensor, mesh=mesh, placements=placements):
            return distribute_tensor(tensor, mesh, placements[tensor.ndim - 1])

        parameters = [torch.nn.Parameter(place(i, torch.tensor(w, dtype=torch.float32))) for i, w in enumerate(weights)]
        train(parameters, gradients, place)
        results[name] = [p.detach().full_tensor().tolist() for p in parameters]
    return results


@pytest.mark.extended
def test_muon_does_not_depend_on_world_size_and_layout(tmp_path):
    weights, gradients = draw()
    alone = [torch.nn.Parameter(torch.tensor(w, dtype=torch.float32)) for w in weights]
    train(alone, gradients)
    for answer in run_world(4, train_sharded, "", tmp_path):
        for layout, sharded in answer.items():
            for whole, mine in zip(sharded, alone, strict=True):
                np.testing.assert_allclose(whole, mine.detach(), atol=1e-6, err_msg=layout)


def train_policy(world: World, argument: tuple[str, list[int]]):
    """Runs on every rank: three steps of the engine per layout; returns the learning rates and the whole weights."""
    path, replicas = argument
    results = []
    for copies in replicas:
        policy = make_policy(TrainerModelConfig(name=path, dp_replicate=copies), 0, world)
        optim = MuonConfig(lr=1e-3, embedding_lr=2e-3, matrix_lr=5e-3, weight_decay=0.1)
        engine = TrainStep(policy, build_optimizer(optim, policy), world, max_norm=1.0)
        rates = [engine.step(split_batch(make_batch(n), n, 1, world, ROOM), OBJECTIVE, 0.5).rates for n in range(STEPS)]
        whole = {name: p.detach().full_tensor().flatten().tolist() for name, p in policy.named_parameters()}
        results.append({"rates": rates[-1], "weights": whole})
    return results


@pytest.mark.extended
def test_muon_training_does_not_depend_on_world_size(tmp_path):
    path = make_tiny_model(tmp_path / "tiny")
    layouts = {1: [1], 4: [1, 2]}  # ranks -> copies of the sharded model
    results = {
        size: run_world(size, train_policy, (str(path), copies), tmp_path)[0] for size, copies in layouts.items()
    }
    [alone] = results.pop(1)
    assert alone["rates"] == {"lr": 5e-4, "lr/embedding": 1e-3, "lr/matrix": 2.5e-3}
    for copies, answer in zip(layouts[4], results[4], strict=True):
        assert answer["weights"].keys() == alone["weights"].keys()
        for name, values in answer["weights"].items():
            np.testing.assert_allclose(values, alone["weights"][name], atol=2e-5, err_msg=f"{copies} {name}")
