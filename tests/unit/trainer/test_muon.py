"""Muon against NumPy, and the same weights however its matrices are sharded (I9)."""

import numpy as np
import pytest
import torch

from prime_rl.configs.optim import MuonConfig
from prime_rl.configs.trainer import AIPOLossConfig, TrainerModelConfig
from prime_rl.trainer.engine import Engine
from prime_rl.trainer.loading import make_policy
from prime_rl.trainer.losses import build_loss
from prime_rl.trainer.optim import build_optimizer
from prime_rl.trainer.optim.muon import Muon, orthogonalise
from prime_rl.trainer.parallel import World
from prime_rl.trainer.rl.batches import split_batch
from prime_rl.trainer.rl.objective import rl_objective
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.test_engine import ROOM, make_batch
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
def test_equals_numpy(nesterov, adjust_lr):
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


def test_singular_values_come_near_one_and_zeros_stay():
    matrix = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrix))
    assert values.min() > 0.3 and values.max() < 1.3
    assert torch.equal(orthogonalise(torch.zeros(4, 3)), torch.zeros(4, 3)), "an adapter's B begins with no gradient"


def test_update_has_the_size_that_adamw_would_give():
    matrix = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    update = 0.2 * 256**0.5 * orthogonalise(matrix)
    assert update.square().mean().sqrt() == pytest.approx(0.2, rel=0.2)


def test_agrees_with_torch_in_half_precision():
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


def test_world_size_and_layout_are_invisible(tmp_path):
    weights, gradients = draw()
    alone = [torch.nn.Parameter(torch.tensor(w, dtype=torch.float32)) for w in weights]
    train(alone, gradients)
    for answer in run_world(4, train_sharded, "", tmp_path):
        for layout, sharded in answer.items():
            for whole, mine in zip(sharded, alone, strict=True):
                np.testing.assert_allclose(whole, mine.detach(), atol=1e-6, err_msg=layout)


def train_policy(world: World, argument: str):
    """Runs on every rank: three steps of the engine; returns the learning rates and the whole weights."""
    replicas, path = argument.split(" ")
    config = TrainerModelConfig(name=path, dp_replicate=int(replicas))
    policy = make_policy(config, 0, world)
    optim = MuonConfig(lr=1e-3, embedding_lr=2e-3, matrix_lr=5e-3, weight_decay=0.1)
    engine = Engine(policy, build_optimizer(optim, policy), world, max_norm=1.0)
    objective = rl_objective(build_loss(AIPOLossConfig()))
    rates = [engine.step(split_batch(make_batch(n), n, 1, world, ROOM), objective, 0.5).rates for n in range(STEPS)]
    whole = {name: p.detach().full_tensor() for name, p in policy.named_parameters()}
    return {"rates": rates[-1], "weights": {name: tensor.flatten().tolist() for name, tensor in whole.items()}}


def test_a_policy_trains_to_the_same_weights_on_any_number_of_ranks(tmp_path):
    path = make_tiny_model(tmp_path / "tiny")
    layouts = [(1, 1), (2, 1), (4, 1), (4, 2)]  # ranks, of which copies of the sharded model
    alone, *others = [run_world(size, train_policy, f"{copies} {path}", tmp_path)[0] for size, copies in layouts]
    assert alone["rates"] == {"lr": 5e-4, "lr/embedding": 1e-3, "lr/matrix": 2.5e-3}
    for layout, answer in zip(layouts[1:], others, strict=True):
        for name, values in answer["weights"].items():
            np.testing.assert_allclose(values, alone["weights"][name], atol=2e-5, err_msg=f"{layout} {name}")
