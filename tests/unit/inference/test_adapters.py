"""What `check_adapter` accepts and refuses, and how a policy that is an adapter is switched."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from prime_rl.inference.adapters import check_adapter, check_version
from prime_rl.inference.lease import Lease
from prime_rl.inference.policy import PolicyServer
from prime_rl.inference.weights import Policy, Shapes, WeightsRefusedError, check_weights
from prime_rl.types import PolicyVersion
from tests.support.adapters import publish_adapter
from tests.support.tiny_model import publish_weights
from tests.unit.inference.test_policy import Engine
from tests.unit.inference.test_weights import _publish

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


def _refuses(directory: Path, reason: str, max_rank: int | None = 2) -> None:
    with pytest.raises(WeightsRefusedError, match=reason):
        check_adapter(directory, VERSION, BASE, max_rank)


def test_accepts_what_was_published(tmp_path: Path) -> None:
    directory = make(tmp_path)
    policy = check_version(directory, VERSION, BASE, tied=True, max_rank=2)
    assert policy.adapter is not None
    assert (policy.version, policy.path, policy.adapter.config["lora_alpha"]) == (VERSION, directory, 4)
    assert policy.hash == json.loads((directory / "manifest.json").read_text())["hash"]
    assert check_adapter(directory, VERSION, BASE, 2) == policy


def test_the_scale_tells_policies_apart(tmp_path: Path) -> None:
    """The factors are the same, and so is their hash; what is sampled is not."""
    one, other = (check_adapter(make(tmp_path / str(alpha), alpha=alpha), VERSION, BASE, 2) for alpha in (4, 8))
    assert one.hash == other.hash
    assert one.salt != other.salt
    assert ":" not in one.salt


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({A: (2, 4)}, r"lacks a factor of layer model\.q_proj"),
        ({**SHAPES, "base_model.model.model.q_proj.lora_embedding_A": (2, 4)}, "holds tensors that are no factors"),
        ({**SHAPES, "stray": (2, 4)}, "lacks a factor of layer"),
        ({A: (2, 5), B: (8, 2)}, r"factors of shape \[2, 5\] and \[8, 2\]; its weight has shape \[8, 4\]"),
        ({A: (2, 4), B: (8, 1)}, r"factors of shape \[2, 4\] and \[8, 1\]"),
        ({A: (3, 4), B: (8, 3)}, "an adapter of rank 3; this server has max_lora_rank = 2"),
        ({name.replace("q_proj", "norm"): (2, 4) for name in SHAPES}, "factors of shape"),
        ({name.replace("q_proj", "v_proj"): shape for name, shape in SHAPES.items()}, r"layer model\.v_proj, unknown"),
    ],
)
def test_factors_that_do_not_fit_are_refused(tmp_path: Path, shapes: Shapes, reason: str) -> None:
    _refuses(make(tmp_path, shapes), reason)


def _edit(name: str, change: Callable[[str], str]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        (directory / name).write_text(change((directory / name).read_text()))

    return edit


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_edit("adapter_config.json", lambda text: text.replace("4", "5")), "adapter_config.json is not what was publ"),
        (_edit("adapter_config.json", lambda text: "[" + text[1:]), "adapter_config.json is not an adapter's config"),
        (_edit("manifest.json", lambda text: text.replace('"step": 7', '"step": 6')), "declares branch 0, step 6"),
        (_edit("manifest.json", lambda text: text.replace('"adapter"', '"other"')), "has another hash of it"),
        (
            lambda directory: (directory / "adapter_config.json").unlink(),
            "adapter_config.json is missing; its manifest says",
        ),
    ],
)
def test_damage_is_told(tmp_path: Path, damage: Callable[[Path], None], reason: str) -> None:
    directory = make(tmp_path)
    damage(directory)
    _refuses(directory, reason)


def test_a_server_without_adapters_says_how_to_take_them(tmp_path: Path) -> None:
    with pytest.raises(WeightsRefusedError, match="this server takes them with enable_lora = true"):
        check_version(make(tmp_path), VERSION, BASE, tied=True, max_rank=None)


class AdaptedEngine(Engine):
    """Also takes the adapter away."""

    async def unadapt(self) -> None:
        self.calls.append("unadapt")


def _server() -> tuple[PolicyServer, AdaptedEngine]:
    engine = AdaptedEngine()
    base = Policy(PolicyVersion(0, 0), "base", Path("/base"))
    return PolicyServer(engine, base, BASE, False, Lease(30), lambda _: None, None, 2), engine


async def test_the_base_model_stays_where_it_is(tmp_path: Path) -> None:
    server, engine = _server()
    for step in (7, 8):
        answer = await server.update(PolicyVersion(0, step), make(tmp_path / str(step), value=step, step=step), "run")
        assert (answer["step"], answer["bytes"]) == (step, 96)
    assert engine.calls == [
        "stage 0.7", "pause keep", "load 0.7", "commit 0.7", "resume",
        "stage 0.8", "pause keep", "load 0.8", "commit 0.8", "resume",
    ]  # fmt: skip
    engine.calls.clear()
    await server.reload("run")
    assert engine.calls == ["pause abort", "unadapt", "commit 0.0", "resume"], "nothing is read"
    engine.calls.clear()
    await server.reload("run")
    assert engine.calls == ["pause abort", "commit 0.0", "resume"]


async def test_a_staged_adapter_is_not_read_again(tmp_path: Path) -> None:
    server, engine = _server()
    directory = make(tmp_path)
    await server.stage(VERSION, directory, "run")
    await server.update(VERSION, directory, "run")
    await server.update(VERSION, directory, "run")
    assert engine.calls == ["stage 0.7", "pause keep", "load 0.7", "commit 0.7", "resume"]


async def test_an_adapter_and_all_weights_do_not_mix(tmp_path: Path) -> None:
    server, engine = _server()
    server._shapes = {"embed.weight": (8, 4), "norm.weight": (4,), **BASE}
    (tmp_path / "full").mkdir()
    full = _publish(tmp_path / "full", server._shapes)
    server.guests = ("eval",)
    with pytest.raises(WeightsRefusedError, match="adapters rest on the base model's: eval"):
        await server.update(VERSION, full, "run")
    server.guests = ()
    await server.update(VERSION, full, "run")
    adapter = make(tmp_path / "adapter", step=8)
    with pytest.raises(WeightsRefusedError, match=r"all weights of version 0\.7 are loaded"):
        await server.update(PolicyVersion(0, 8), adapter, "run")
    with pytest.raises(WeightsRefusedError, match=r"the policy is all weights of version 0\.7"):
        async with server.base_in_place():
            pass
    await server.reload("run")
    assert engine.calls[-5:] == ["stage 0.0", "pause abort", "load 0.0", "commit 0.0", "resume"]
    await server.update(PolicyVersion(0, 8), adapter, "run")
    assert (await server.update(PolicyVersion(0, 9), _at(full, 9, tmp_path), "run"))["step"] == 9
    assert engine.calls[-5:] == ["stage 0.9", "pause keep", "load 0.9", "commit 0.9", "resume"]
    assert check_weights(full, VERSION, server._shapes, tied=False).salt == server.policy.hash


def _at(directory: Path, step: int, tmp_path: Path) -> Path:
    """The same weights as another version."""
    return publish_weights(tmp_path / "again", directory.parents[1] / "model", step)
