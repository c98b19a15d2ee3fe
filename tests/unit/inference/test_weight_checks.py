"""Checks of published weights by `check_weights`."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from prime_rl.core.types import PolicyVersion
from prime_rl.inference.policy.weight_checks import Shapes, WeightsRefusedError, check_weights, read_shapes
from prime_rl.storage.artifact import ArtifactError
from prime_rl.storage.tensor_hashes import content_hash
from tests.support.tiny_model import publish_weights

VERSION = PolicyVersion(0, 7)
BASE: Shapes = {"embed.weight": (8, 4), "norm.weight": (4,)}


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


def test_check_weights_accepts_published_weights(tmp_path: Path) -> None:
    directory = _publish(tmp_path)
    policy = check_weights(directory, VERSION, BASE, tied=False)
    assert (policy.version, policy.path) == (VERSION, directory)
    assert policy.hash == json.loads((directory / "manifest.json").read_text())["hash"]
    assert read_shapes(directory) == BASE


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"format": "other/1"}, "has format 'other/1'"),
        ({"step": 8}, "manifest.json declares branch 0, step 8; requested was branch 0, step 7"),
        ({"branch": 1}, "declares branch 1, step 7"),
        ({"hash": "0" * 32}, "its content hash does not match its tensors"),
        ({"tensors": None}, "lists no tensors"),
        ({"tensors": {}}, "manifest.json lacks tensor embed.weight (and 1 more)"),
        ({"tensors": {"embed.weight": "", "norm.weight": "", "head.weight": ""}}, "it lacks tensor head.weight"),
        ({"canary": {"token_ids": [1, 2]}}, "is malformed: Object missing required field `logprobs` - at `$.canary`"),
        ({"canary": {"token_ids": [1, 2], "logprobs": [0.0] * 4, "dtype": "float32"}}, "2 token ids and 4 log-prob"),
    ],
)
def test_check_weights_rejects_a_wrong_manifest(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    assert reason in _reason(_publish(tmp_path, **fields))


def test_check_weights_rejects_altered_files(tmp_path: Path) -> None:
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


def test_check_weights_on_a_machine_without_the_directory_of_the_run_names_it(tmp_path: Path) -> None:
    reason = _reason(tmp_path / "run/weights/step_1")
    assert reason.startswith(f"{tmp_path / 'run/weights'} does not exist on {socket.gethostname()}: a server needs")


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({"embed.weight": (8, 4)}, "lacks tensor norm.weight"),
        ({**BASE, "extra.weight": (1,)}, "model-1.safetensors contains tensor extra.weight, which the served model"),
        (
            {**BASE, "norm.weight": (5,)},
            "tensor norm.weight of {}/model-1.safetensors has shape [5], the served model has [4]",
        ),
        ({**BASE, "lm_head.weight": (8, 4)}, "contains tensor lm_head.weight"),
    ],
)
def test_check_weights_rejects_another_model(tmp_path: Path, shapes: Shapes, reason: str) -> None:
    directory = _publish(tmp_path, shapes)
    assert reason.format(directory) in _reason(directory)


@pytest.mark.parametrize(("dtype", "exact"), [(np.float32, True), (np.float16, False)])
def test_canary_has_the_precision_of_the_published_weights(tmp_path: Path, dtype: type, exact: bool) -> None:
    """A trainer that computes in float32 and publishes half precision differs by the rounding."""
    model = tmp_path / "model"
    model.mkdir()
    save_file({name: np.ones(shape, dtype) for name, shape in BASE.items()}, model / "model.safetensors")
    canary = {"token_ids": [1, 2], "logprobs": [-1.0], "dtype": "float32"}
    directory = publish_weights(tmp_path, model, VERSION.step, overrides={"canary": canary})
    policy = check_weights(directory, VERSION, BASE, tied=False)
    assert policy.canary is not None
    assert policy.canary.dtype == ("float32" if exact else "float16")


def test_read_shapes_names_a_malformed_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for content, reason in [
        (b"", "is not a safetensors file"),
        (b"\xff" * 64, "is not a safetensors file"),
        (b"\x02" + b"\x00" * 7 + b"[]", "is not a safetensors file"),
    ]:
        file.write_bytes(content)
        with pytest.raises(ArtifactError, match=f"{file} {reason}"):
            read_shapes(tmp_path)
    save_file({"a": np.zeros(4)}, file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match=f"{file} is truncated: tensor a ends at byte"):
        read_shapes(tmp_path)


def test_check_weights_accepts_a_tied_model_with_and_without_head(tmp_path: Path) -> None:
    directory = _publish(tmp_path, {**BASE, "lm_head.weight": (8, 4)})
    check_weights(directory, VERSION, BASE, tied=True)
    check_weights(directory, VERSION, {**BASE, "lm_head.weight": (8, 4)}, tied=True)


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


def test_check_weights_accepts_an_offer(tmp_path: Path) -> None:
    offer = check_weights(_offer(tmp_path, BASE), VERSION, BASE, tied=False).offer
    assert offer is not None
    assert (offer.type, offer.tensors["embed.weight"]) == ("nccl", ("F32", (8, 4)))


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
def test_check_weights_rejects_a_wrong_offer(
    tmp_path: Path, shapes: Shapes, fields: dict[str, Any], reason: str
) -> None:
    directory = _offer(tmp_path, shapes, **fields)
    assert reason.format(file=directory / "manifest.json") in _reason(directory)
