"""Muon against NumPy, and equal weights for any sharding (I9)."""

import weakref

import numpy as np
import pytest
import torch

from prime_rl.configs.trainer import AIPOLossConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.configs.training.optim import MuonConfig
from prime_rl.trainer.losses import build_loss
from prime_rl.trainer.optim import build_optimizer, muon
from prime_rl.trainer.optim.muon import Muon, orthogonalise
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.rl.batch_source import split_batch
from prime_rl.trainer.rl.rl_objective import rl_objective
from prime_rl.trainer.train_step import TrainStep
from prime_rl.trainer.weights.policy_loading import make_policy
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.test_train_step import ROOM, make_batch
from tests.unit.trainer.world import run_world

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


def numpy_adamw(weight, gradients, lr, betas, eps=1e-8):
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
    train(parameters, gradients, nesterov=nesterov, adjust_lr=adjust_lr)
    for i, (parameter, weight) in enumerate(zip(parameters, weights, strict=True)):
        mine = [step[i] for step in gradients]
        if weight.ndim == 1:
            wanted = numpy_adamw(weight, mine, 0.1, (0.9, 0.95))
        else:
            wanted = numpy_muon(weight, mine, 0.02, 0.95, 0.1, nesterov, adjust_lr == "original")
        np.testing.assert_allclose(parameter.detach(), wanted, atol=2e-6, err_msg=str(SHAPES[i]))


def test_orthogonalise_brings_singular_values_near_one():
    matrix = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrix))
    assert values.min() > 0.3 and values.max() < 1.3
    assert torch.equal(orthogonalise(torch.zeros(4, 3)), torch.zeros(4, 3)), "an adapter's B begins with no gradient"


def test_muon_update_has_rms_of_adamw():
    matrix = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    update = 0.2 * 256**0.5 * orthogonalise(matrix)
    assert update.square().mean().sqrt() == pytest.approx(0.2, rel=0.2)


def test_muon_agrees_with_torch_in_half_precision():
    weights, gradients = draw([(7, 5), (4, 9)])
    ours, theirs = ([torch.nn.Parameter(torch.tensor(w, dtype=torch.float32)) for w in weights] for _ in range(2))
    train(ours, gradients)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for step in gradients:
        for parameter, gradient in zip(theirs, step, strict=True):
            parameter.grad = torch.tensor(gradient, dtype=torch.float32)
        reference.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-3, rtol=0)


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
        objective = rl_objective(build_loss(AIPOLossConfig()))
        rates = [engine.step(split_batch(make_batch(n), n, 1, world, ROOM), objective, 0.5).rates for n in range(STEPS)]
        whole = {name: p.detach().full_tensor().flatten().tolist() for name, p in policy.named_parameters()}
        results.append({"rates": rates[-1], "weights": whole})
    return results


def test_muon_training_does_not_depend_on_world_size(tmp_path):
    path = make_tiny_model(tmp_path / "tiny")
    layouts = {1: [1], 2: [1], 4: [1, 2]}  # ranks -> copies of the sharded model
    results = {
        size: run_world(size, train_policy, (str(path), copies), tmp_path)[0] for size, copies in layouts.items()
    }
    [alone] = results.pop(1)
    assert alone["rates"] == {"lr": 5e-4, "lr/embedding": 1e-3, "lr/matrix": 2.5e-3}
    assert [len(answers) for answers in results.values()] == [1, 2]
    for size, answers in results.items():
        for copies, answer in zip(layouts[size], answers, strict=True):
            assert answer["weights"].keys() == alone["weights"].keys()
            for name, values in answer["weights"].items():
                np.testing.assert_allclose(values, alone["weights"][name], atol=2e-5, err_msg=f"{size} {copies} {name}")


def test_updates_are_formed_one_exchange_at_a_time(monkeypatch):
    """All of them would be 6 bytes for every parameter of the rank's shards, on CUDA."""
    formed, alive = [], []
    lerp, iterate = torch.Tensor.lerp, muon.orthogonalise

    def forming(*args):
        update = lerp(*args)
        formed.append(weakref.ref(update))
        return update

    def iterating(*args):
        alive.append(sum(update() is not None for update in formed))
        return iterate(*args)

    monkeypatch.setattr(torch.Tensor, "lerp", forming)
    monkeypatch.setattr(muon, "orthogonalise", iterating)
    parameters = [torch.nn.Parameter(torch.randn(4, 4)) for _ in range(6)]
    for parameter in parameters:
        parameter.grad = torch.randn(4, 4)
    Muon([{"params": parameters, "role": "matrix", "lr": 0.1, "weight_decay": 0.0}], lr=0.1).step()
    assert len(alive) == 6
    assert max(alive) <= 2  # the one that is computed, and the one before, which the loop still names
