"""Checks of published adapters, and switches of a policy that is an adapter."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from prime_rl.core.types import PolicyVersion
from prime_rl.inference.policy.engine_group import EnginePause
from prime_rl.inference.policy.policy_manager import Lease, PolicyManager
from prime_rl.inference.policy.weight_checks import (
    CheckedVersion,
    ServedModel,
    Shapes,
    WeightsRefusedError,
    check_adapter,
    check_version,
    check_weights,
)
from tests.support.adapters import publish_adapter
from tests.support.tiny_model import publish_weights
from tests.unit.inference.test_policy_manager import Engine
from tests.unit.inference.test_weight_checks import _publish

BASE: Shapes = {"model.q_proj.weight": (8, 4), "model.norm.weight": (4,)}
A, B = (f"base_model.model.model.q_proj.lora_{factor}.weight" for factor in "AB")
SHAPES: Shapes = {A: (2, 4), B: (8, 2)}
VERSION = PolicyVersion(0, 7)


def make(directory: Path, shapes: Shapes = SHAPES, alpha: float = 4, value: float = 1, step: int = 7) -> Path:
    """Publish an adapter whose factors are all `value`."""
    model = directory / "adapter"
    model.mkdir(parents=True)
    save_file(
        {name: np.full(shape, value, np.float32) for name, shape in shapes.items()}, model / "adapter_model.safetensors"
    )
    (model / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": alpha}))
    return publish_adapter(directory, model, step)


def _model(tied: bool = False) -> ServedModel:
    return ServedModel(CheckedVersion(PolicyVersion(0, 0), "base", Path("/base")), BASE, tied)


def _refuses(directory: Path, reason: str, max_rank: int | None = 2) -> None:
    with pytest.raises(WeightsRefusedError, match=reason):
        check_adapter(directory, VERSION, BASE, max_rank)


def test_check_version_accepts_a_published_adapter(tmp_path):
    directory = make(tmp_path)
    policy = check_version(directory, VERSION, _model(tied=True), max_rank=2)
    assert policy.adapter is not None
    assert (policy.version, policy.path, policy.adapter.config["lora_alpha"]) == (VERSION, directory, 4)
    assert policy.hash == json.loads((directory / "manifest.json").read_text())["hash"]
    assert check_adapter(directory, VERSION, BASE, 2) == policy


def test_salt_depends_on_the_scale(tmp_path):
    """The factors and their hash are equal, but not the sampled tokens."""
    one, other = (check_adapter(make(tmp_path / str(alpha), alpha=alpha), VERSION, BASE, 2) for alpha in (4, 8))
    assert one.hash == other.hash
    assert one.salt != other.salt
    assert ":" not in one.salt


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({A: (2, 4)}, r"lacks a factor of layer model\.q_proj"),
        ({**SHAPES, "base_model.model.model.q_proj.lora_embedding_A": (2, 4)}, "contains tensors that are not factors"),
        ({**SHAPES, "stray": (2, 4)}, "lacks a factor of layer"),
        ({A: (2, 5), B: (8, 2)}, r"factors of shape \[2, 5\] and \[8, 2\]; its weight has shape \[8, 4\]"),
        ({A: (2, 4), B: (8, 1)}, r"factors of shape \[2, 4\] and \[8, 1\]"),
        ({A: (3, 4), B: (8, 3)}, "an adapter of rank 3; this server has max_lora_rank = 2"),
        ({name.replace("q_proj", "norm"): (2, 4) for name in SHAPES}, "factors of shape"),
        (
            {name.replace("q_proj", "v_proj"): shape for name, shape in SHAPES.items()},
            r"layer model\.v_proj, which the served model does not have",
        ),
    ],
)
def test_check_adapter_rejects_factors_that_do_not_fit(tmp_path, shapes, reason):
    _refuses(make(tmp_path, shapes), reason)


@pytest.mark.parametrize(
    ("file", "old", "new", "reason"),
    [
        ("adapter_config.json", "4", "5", "adapter_config.json differs from its manifest"),
        ("adapter_config.json", "{", "[", "adapter_config.json is not a configuration of an adapter"),
        ("manifest.json", '"adapter"', '"other"', "manifest.json has another hash"),
    ],
)
def test_check_adapter_names_the_damage(tmp_path, file, old, new, reason):
    directory = make(tmp_path)
    (directory / file).write_text((directory / file).read_text().replace(old, new, 1))
    _refuses(directory, reason)


def test_check_version_without_enable_lora_rejects_adapters(tmp_path):
    with pytest.raises(WeightsRefusedError, match="the server accepts it with enable_lora = true"):
        check_version(make(tmp_path), VERSION, _model(tied=True), max_rank=None)


def _server() -> tuple[PolicyManager, Engine]:
    engine = Engine()
    return PolicyManager(engine, EnginePause(engine, [].append), _model(), Lease(30), max_rank=2), engine


async def test_switch_between_adapters_does_not_load_the_base_model(tmp_path):
    server, engine = _server()
    for step in (7, 8):
        answer = await server.update(PolicyVersion(0, step), make(tmp_path / str(step), value=step, step=step), "run")
        assert (answer["step"], answer["bytes"]) == (step, 96)
    assert engine.calls == [
        "stage 0.7", "pause", "load 0.7", "commit 0.7", "resume",
        "stage 0.8", "pause", "load 0.8", "commit 0.8", "resume",
    ]  # fmt: skip
    engine.calls.clear()
    await server.reload("run")
    assert engine.calls == ["pause", "end requests", "empty", "commit 0.0", "resume"], "reads no weights"
    engine.calls.clear()
    await server.reload("run")
    assert engine.calls == ["pause", "end requests", "commit 0.0", "resume"]


async def test_adapters_and_full_weights_exclude_each_other(tmp_path):
    server, engine = _server()
    shapes = {"embed.weight": (8, 4), "norm.weight": (4,), **BASE}
    server._model = replace(server._model, shapes=shapes)
    (tmp_path / "full").mkdir()
    full = _publish(tmp_path / "full", shapes)
    server.dependent_adapters = ("eval",)
    with pytest.raises(WeightsRefusedError, match="these adapters depend on the base model: eval"):
        await server.update(VERSION, full, "run")
    server.dependent_adapters = ()
    await server.update(VERSION, full, "run")
    adapter = make(tmp_path / "adapter", step=8)
    with pytest.raises(WeightsRefusedError, match=r"version 0\.7 with all weights is loaded"):
        await server.update(PolicyVersion(0, 8), adapter, "run")
    with pytest.raises(WeightsRefusedError, match=r"version 0\.7 with all weights is loaded, but an adapter needs"):
        async with server.base_weights_loaded():
            pass
    await server.reload("run")
    assert engine.calls[-6:] == ["stage 0.0", "pause", "end requests", "load 0.0", "commit 0.0", "resume"]
    await server.update(PolicyVersion(0, 8), adapter, "run")
    again = publish_weights(tmp_path / "again", full.parents[1] / "model", 9)
    assert (await server.update(PolicyVersion(0, 9), again, "run"))["step"] == 9
    assert engine.calls[-5:] == ["stage 0.9", "pause", "load 0.9", "commit 0.9", "resume"]
    assert check_weights(full, VERSION, shapes, tied=False).salt == server.policy.hash
