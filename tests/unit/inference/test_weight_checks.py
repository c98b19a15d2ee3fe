"""Checks of published weights by `check_weights`."""

import json
import math
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from prime_rl.configs.base_model import NameConfig
from prime_rl.core.errors import ConfigError
from prime_rl.core.types import PolicyVersion
from prime_rl.inference.policy.weight_checks import (
    Shapes,
    WeightsRefusedError,
    check_weights,
    find_base_model,
    read_shapes,
)
from prime_rl.storage.artifact import ArtifactError
from prime_rl.storage.tensor_hashes import content_hash
from prime_rl.storage.weights.canary import PolicyCanary
from tests.support.tiny_model import publish_weights

VERSION = PolicyVersion(0, 7)
BASE: Shapes = {"embed.weight": (8, 4), "norm.weight": (4,)}
ENTRY = {"token_ids": [5, 6, 7], "logprobs": [-1.0, -2.0], "dtype": "float32"}


def _publish(tmp_path: Path, shapes: Shapes = BASE, **fields: Any) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    names = sorted(shapes)
    # In two files, like large models.
    for number, part in enumerate((names[:1], names[1:])):
        tensors = {name: np.full(shapes[name], number, dtype=np.float32) for name in part}
        save_file(tensors, model / f"model-{number}.safetensors")
    return publish_weights(tmp_path, model, VERSION.step, overrides=fields)


def _reason(directory: Path, tied: bool = False) -> str:
    with pytest.raises(WeightsRefusedError) as caught:
        check_weights(directory, VERSION, BASE, tied)
    return str(caught.value)


def _change(directory: Path, change: Callable[[bytearray], None]) -> None:
    file = directory / "model-1.safetensors"
    content = bytearray(file.read_bytes())
    change(content)
    file.write_bytes(content)


def test_check_weights_accepts_published_weights(tmp_path):
    directory = _publish(tmp_path)
    policy = check_weights(directory, VERSION, BASE, tied=False)
    assert (policy.version, policy.path) == (VERSION, directory)
    assert policy.hash == json.loads((directory / "manifest.json").read_text())["hash"]
    assert read_shapes(directory) == BASE
    with_head = {**BASE, "lm_head.weight": (8, 4)}
    check_weights(directory, VERSION, with_head, tied=True)
    (tmp_path / "tied").mkdir()
    check_weights(_publish(tmp_path / "tied", with_head), VERSION, BASE, tied=True)


@pytest.mark.parametrize(
    ("shapes", "fields", "reason"),
    [
        (BASE, {"format": "other/1"}, "has format 'other/1'"),
        (BASE, {"step": 8}, "manifest.json declares branch 0, step 8; requested was branch 0, step 7"),
        (BASE, {"branch": 1}, "declares branch 1, step 7"),
        (BASE, {"hash": "0" * 32}, "its content hash does not match its tensors"),
        (BASE, {"tensors": None}, "lists no tensors"),
        (BASE, {"tensors": {}}, "manifest.json lacks tensor embed.weight (and 1 more)"),
        (BASE, {"tensors": dict.fromkeys([*BASE, "head.weight"], "")}, "it lacks tensor head.weight"),
        (BASE, {"canary": {**ENTRY, "token_ids": 5}}, "is malformed: Expected `array`"),
        (
            BASE,
            {"canary": {"token_ids": [1]}},
            "Object missing required field `logprobs` - at `$.canary`",
        ),
        (BASE, {"canary": {**ENTRY, "logprobs": [0.0] * 4}}, "3 token ids and 4 log-prob"),
        ({"embed.weight": (8, 4)}, {}, "lacks tensor norm.weight"),
        (
            {**BASE, "extra.weight": (1,)},
            {},
            "contains tensor extra.weight, which the served model",
        ),
        ({**BASE, "lm_head.weight": (8, 4)}, {}, "contains tensor lm_head.weight"),
        ({**BASE, "norm.weight": (5,)}, {}, "model-1.safetensors has shape [5], the served model has [4]"),
    ],
)
def test_check_weights_rejects_a_wrong_manifest_and_another_model(tmp_path, shapes, fields, reason):
    assert reason in _reason(_publish(tmp_path, shapes, **fields))


def test_check_weights_rejects_altered_files(tmp_path):
    """The content of tensors is checked when they are read: test_weight_reader.py."""
    directory = _publish(tmp_path)
    file = directory / "model-1.safetensors"
    _change(directory, lambda content: content.pop())
    assert f"{file} has 95 bytes, its manifest says 96" in _reason(directory)
    file.unlink()
    assert f"{file} is missing; its manifest says" in _reason(directory)
    (directory / "manifest.json").write_text("{")
    assert "is not JSON" in _reason(directory)
    (directory / "manifest.json").write_text('{"format": "prime_rl.weights/1"}')
    assert "lists no files" in _reason(directory)
    (directory / "manifest.json").unlink()
    assert "manifest.json is missing" in _reason(directory)
    reason = _reason(tmp_path / "other/weights/step_1")
    assert reason.startswith(f"{tmp_path / 'other/weights'} does not exist on {socket.gethostname()}: a server needs")


@pytest.mark.parametrize(("dtype", "exact"), [(np.float32, True), (np.float16, False)])
def test_canary_has_the_precision_of_the_published_weights(tmp_path, dtype, exact):
    """A trainer that computes in float32 and publishes half precision differs by the rounding."""
    model = tmp_path / "model"
    model.mkdir()
    save_file({name: np.ones(shape, dtype) for name, shape in BASE.items()}, model / "model.safetensors")
    canary = {"token_ids": [1, 2], "logprobs": [-1.0], "dtype": "float32"}
    directory = publish_weights(tmp_path, model, VERSION.step, overrides={"canary": canary})
    policy = check_weights(directory, VERSION, BASE, tied=False)
    assert policy.canary is not None
    assert policy.canary.dtype == ("float32" if exact else "float16")


def test_read_shapes_names_a_malformed_file(tmp_path):
    file = tmp_path / "model.safetensors"
    for content in (b"", b"\xff" * 64, b"\x02" + b"\x00" * 7 + b"[]"):
        file.write_bytes(content)
        with pytest.raises(ArtifactError, match=f"{file} is not a safetensors file"):
            read_shapes(tmp_path)
    save_file({"a": np.zeros(4)}, file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match=f"{file} is truncated: tensor a ends at byte"):
        read_shapes(tmp_path)


def _offer(tmp_path: Path, shapes: Shapes, **fields: Any) -> Path:
    """Publish a version without files of tensors."""
    tensors = {name: f"{number:032x}" for number, name in enumerate(shapes)}
    offered = {name: ["F32", list(shape)] for name, shape in shapes.items()}
    transfer = {"type": "nccl", "host": "a", "port": 1, "session": "s", "timeout_s": 5, "tensors": offered, **fields}
    model = tmp_path / "model"
    model.mkdir()
    overrides = {"tensors": tensors, "hash": content_hash(tensors), "transfer": transfer}
    save_file({"x": np.zeros(1)}, model / "model.safetensors")
    directory = publish_weights(tmp_path, model, VERSION.step, overrides=overrides)
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "model.safetensors").unlink()
    (directory / "manifest.json").write_text(json.dumps({**manifest, "files": {}}))
    return directory


@pytest.mark.parametrize(
    ("shapes", "fields", "reason"),
    [
        ({**BASE, "norm.weight": (5,)}, {}, "tensor norm.weight of {file} has shape [5], the served model has [4]"),
        ({"embed.weight": (8, 4)}, {}, "lacks tensor norm.weight of the served model"),
        (BASE, {"tensors": {}}, "differs from its manifest: it lacks tensor embed.weight (and 1 more)"),
        (BASE, {"type": "pigeon"}, "{file} is malformed: Invalid enum value 'pigeon' - at `$.transfer.type`"),
        (BASE, {"port": None}, "{file} is malformed: Expected `int`, got `null` - at `$.transfer.port`"),
        (BASE, {"tensors": {"embed.weight": ["F99", [1]]}}, "{file} is malformed: transfer: unknown dtype 'F99'"),
    ],
)
def test_check_weights_accepts_a_good_offer_only(tmp_path, shapes, fields, reason):
    (tmp_path / "good").mkdir()
    offer = check_weights(_offer(tmp_path / "good", BASE), VERSION, BASE, tied=False).offer
    assert offer is not None
    assert (offer.type, offer.tensors["embed.weight"]) == ("nccl", ("F32", (8, 4)))
    directory = _offer(tmp_path, shapes, **fields)
    assert reason.format(file=directory / "manifest.json") in _reason(directory)


# Search for the base model


HEAD = "lm_head.weight"


def _model(directory: Path, config: dict[str, object], names: list[str]) -> str:
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: np.zeros((2, 3), dtype=np.float32) for name in names}, directory / "model.safetensors")
    return str(directory)


@pytest.mark.parametrize(
    ("config", "names", "tied"),
    [
        ({"tie_word_embeddings": True}, ["embed", HEAD], True),
        ({"tie_word_embeddings": False}, ["embed", HEAD], False),
        ({}, ["embed", HEAD], False),
        ({}, ["embed"], True),
        ({"text_config": {"tie_word_embeddings": True}}, ["embed", HEAD], True),
    ],
)
def test_find_base_model_detects_a_tied_head(tmp_path, config, names, tied):
    base = find_base_model(NameConfig(name=_model(tmp_path, config, names)))
    assert base.tied is tied
    assert base.shapes == dict.fromkeys(names, (2, 3))
    assert (base.policy.version, base.policy.path) == (PolicyVersion(0, 0), tmp_path)


def test_find_base_model_rejects_other_directories(tmp_path):
    with pytest.raises(ConfigError, match="is not a Hugging Face model with safetensors weights"):
        find_base_model(NameConfig(name=str(tmp_path)))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no \.safetensors file"):
        find_base_model(NameConfig(name=str(tmp_path)))
    with pytest.raises(ConfigError, match="does not exist"):
        find_base_model(NameConfig(name=str(tmp_path / "missing")))


# Canaries: the accepted differences


EXACT = PolicyCanary((5, 6, 7), (-1.0, -2.0), "float32")


def test_compare_in_float32_uses_the_largest_difference():
    compared = EXACT.compare([-1.00008, -2.0], "float32")
    assert (compared.which, compared.passes) == ("largest", True)
    assert compared.difference == compared.largest == pytest.approx(8e-5)
    assert not EXACT.compare([-1.0002, -2.0], "float32").passes
    assert EXACT.compare([-1.0002, -2.0], "float32", tolerance=1e-3).passes
    assert EXACT.compare([-1.0], "float32").passes, "a shorter model compares the first tokens"
    assert not EXACT.compare([-1.5], "float32").passes


def test_compare_in_float32_accepts_the_rounding_of_single_tokens():
    exact = PolicyCanary(tuple(range(64)), (-1.0,) * 63, "float32")
    compared = exact.compare([-1.0002, *[-1.000005] * 62], "float32")
    assert (compared.which, compared.passes) == ("mean", True)
    assert compared.largest == pytest.approx(2e-4)
    for measured in ([-1.001, *[-1.0] * 62], [-1.0002, *[-1.00002] * 62]):
        compared = exact.compare(measured, "float32")
        assert (compared.which, compared.passes) == ("largest", False)
    assert not exact.compare([-1.0002, *[-1.0] * 62], "float32", tolerance=1e-4).passes


@pytest.mark.parametrize(("trained", "served"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16",) * 2])
def test_compare_in_half_precision_uses_the_mean_difference(trained, served):
    canary = PolicyCanary((5, 6, 7), (-1.0, -2.0), trained)
    compared = canary.compare([-1.0, -2.08], served)
    assert (compared.which, compared.passes) == ("mean", True)
    assert (compared.largest, compared.difference) == (pytest.approx(0.08), pytest.approx(0.04))
    assert not canary.compare([-1.0, -2.2], served).passes


@pytest.mark.parametrize("measured", [[-1.0, math.nan], [math.nan, -2.0]])
@pytest.mark.parametrize("served", ["float32", "bfloat16"])
def test_compare_with_nan_never_passes(measured, served):
    assert not EXACT.compare(measured, served, tolerance=1e9).passes
    assert math.isnan(EXACT.compare(measured, served).largest)
