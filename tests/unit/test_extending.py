"""Follows the recipes of docs/extending.md: their code runs, and the files and names of their lists exist."""

import re
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import Field, TypeAdapter

from prime_rl.configs.base_model import TokenizerConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.configs.training.optim import OptimConfig
from prime_rl.core.types import PolicyVersion
from prime_rl.inference.policy.weight_checks import read_published
from prime_rl.inference.routes import _add, make_router
from prime_rl.monitors import Monitor, metric_table
from prime_rl.monitors.metric_table import ORCHESTRATOR, MetricTable
from prime_rl.storage.artifact import WEIGHTS_FORMAT, read_manifest
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.tensor_hashes import hash_tensors
from prime_rl.trainer.fsdp import shard_policy
from prime_rl.trainer.losses.loss_inputs import LossInputs
from prime_rl.trainer.model.policy_model import load_tokenizer
from prime_rl.trainer.optim import optimizers as optim
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.weight_sync import publisher
from prime_rl.trainer.weight_sync.publisher import Publisher
from prime_rl.trainer.weights.policy_loading import load_policy
from tests.support.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]
RECIPES = dict(re.findall(r"^## (.+)\n((?:(?!^## ).*\n)*)", (ROOT / "docs/extending.md").read_text(), re.MULTILINE))


def code_of(recipe: str) -> dict[str, Any]:
    """Execute the Python block of a recipe; return its names."""
    (block,) = re.findall(r"^```python\n(.*?)^```", RECIPES[recipe], re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "recipe"}
    exec(block, names)
    return names


def test_page_has_seven_recipes():
    recipes = ["Loss", "Advantage", "Optimizer", "Metric", "Environment", "Weight transport", "Route"]
    assert list(RECIPES) == recipes


def test_recipe_files_contain_the_names_of_their_row():
    rows = [
        (recipe, *row)
        for recipe, text in RECIPES.items()
        for row in re.findall(r"^- ([^:\n]*/[^:\n]*): (.+)$", text, re.MULTILINE)
    ]
    assert len(rows) > len(RECIPES)
    for recipe, file_cell, change in rows:
        paths = [ROOT / name for name in re.findall(r"`([\w/.]+)`", file_cell)]
        assert all(path.exists() for path in paths), file_cell
        text = "".join(path.read_text() for path in paths if path.is_file())
        names = set(re.findall(r"`(\w+)`", change)) - {"type", "run_id", "load_environment"}
        missing = [name for name in names if text and not re.search(rf"\b{name}\b", text)]
        assert not missing, f"{recipe}: {file_cell} does not contain {missing}"


def test_loss_of_the_recipe_has_a_finite_gradient():
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    mask = torch.tensor([True, True, False])
    inputs = LossInputs(
        logprobs, torch.tensor([-1.0, -2.5, float("nan")]), torch.ones(3), mask, torch.zeros(3, dtype=torch.int64)
    )
    code_of("Loss")["squared_ratio"](inputs, scale=0.5).loss.sum().backward()
    ratio = np.exp(0.5)
    np.testing.assert_allclose(logprobs.grad.numpy(), [-1.0, -ratio + (ratio - 1) * ratio, 0.0], rtol=1e-6)


def test_optimizer_of_the_recipe_moves_weights_by_the_sign(monkeypatch, tmp_path):
    code = code_of("Optimizer")
    new: Any = code["SignSGDConfig"]
    union: Any = Annotated[OptimConfig | new, Field(discriminator="type")]
    config = TypeAdapter(union).validate_python({"type": "sign_sgd", "lr": 0.25, "matrix_lr": 0.5, "weight_decay": 0})
    monkeypatch.setitem(optim.OPTIMIZERS, "sign_sgd", code["sign_sgd"])
    policy = load_policy(TrainerModelConfig(name=str(make_tiny_model(tmp_path / "tiny"))), seed=0)
    optimizer = optim.build_optimizer(config, policy)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    for parameter in policy.parameters():
        parameter.grad = torch.full_like(parameter, -3.0)
    optimizer.step()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] + rates[id(parameter)])


def test_metric_of_the_recipe_is_logged(monkeypatch, tmp_path):
    table = MetricTable("orchestrator", [*ORCHESTRATOR.metrics, code_of("Metric")["metric"]])
    monkeypatch.setitem(metric_table.METRIC_TABLES, "orchestrator", table)
    Monitor(RunPaths(tmp_path), "orchestrator", None).log(0, {"advantage/largest": 2.0})
    assert '"advantage/largest": 2.0' in RunPaths(tmp_path).metrics("orchestrator").read_text()


def test_transport_of_the_recipe_copies_each_version(monkeypatch, tmp_path):
    transport = code_of("Weight transport")["MirrorTransport"]
    transport.mirror = tmp_path / "bucket"
    monkeypatch.setitem(publisher.TRANSPORTS, "filesystem", transport)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = World(rank=0, size=1, device=torch.device("cpu"))
        config = TrainerModelConfig(name=str(make_tiny_model(tmp_path / "tiny")))
        policy = shard_policy(load_policy(config, seed=0), config, world)
        tokenizer = load_tokenizer(TokenizerConfig(name=config.name), config)
        Publisher(policy, tokenizer, torch.float32, world).publish(tmp_path / "step_1", PolicyVersion(0, 1))
    finally:
        dist.destroy_process_group()
    manifest = read_manifest(tmp_path / "step_1", WEIGHTS_FORMAT)
    assert manifest["mirror"] == str(tmp_path / "bucket")
    assert hash_tensors(tmp_path / "bucket/step_1") == manifest["tensors"]
    assert read_published(tmp_path / "step_1", PolicyVersion(0, 1))[0].version == PolicyVersion(0, 1)


@pytest.mark.parametrize(
    ("refusal", "body", "content_type", "status"),
    [
        (None, '{"scale": 2}', "application/json", 200),
        (None, '{"scale": 2, "more": 1}', "application/json", 400),
        (None, '{"scale": 2}', "text/plain", 415),
        ("no key", '{"scale": 2}', "application/json", 403),
    ],
)
def test_route_of_the_recipe_is_checked_and_answers(refusal, body, content_type, status):
    code, app = code_of("Route"), FastAPI()
    router = make_router(MagicMock(), "model", refusal)
    _add(router, "/set_scale", code["ScaleBody"], code["set_scale"])
    app.include_router(router)
    answer = TestClient(app).post("/set_scale", content=body, headers={"Content-Type": content_type})
    assert answer.status_code == status
    assert status != 200 or answer.json() == {"scale": 2.0}
