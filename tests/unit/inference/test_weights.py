"""What `check_weights` accepts and refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from prime_rl.inference.weights import Shapes, WeightsRefusedError, check_weights, read_shapes
from prime_rl.run.artifact import ArtifactError
from prime_rl.run.tensors import content_hash
from prime_rl.types import PolicyVersion
from tests.support.tiny_model import publish_weights

VERSION = PolicyVersion(0, 7)
BASE: Shapes = {"embed.weight": (8, 4), "norm.weight": (4,)}


def _publish(tmp_path: Path, shapes: Shapes = BASE, **fields: Any) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    names = sorted(shapes)
    # In two files, as large models are.
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


def test_accepts_what_was_published(tmp_path: Path) -> None:
    directory = _publish(tmp_path)
    policy = check_weights(directory, VERSION, BASE, tied=False)
    assert (policy.version, policy.path) == (VERSION, directory)
    assert policy.hash == json.loads((directory / "manifest.json").read_text())["hash"]
    assert read_shapes(directory) == BASE


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"format": "other/1"}, "has format 'other/1'"),
        ({"step": 8}, "manifest.json declares branch 0, step 8; asked for was branch 0, step 7"),
        ({"branch": 1}, "declares branch 1, step 7"),
        ({"hash": "0" * 32}, "its content hash is another"),
        ({"tensors": None}, "lists no tensors"),
        ({"tensors": {}}, "manifest.json lacks tensor embed.weight (and 1 more)"),
        ({"tensors": {"embed.weight": "", "norm.weight": "", "head.weight": ""}}, "it lacks tensor head.weight"),
        ({"canary": {"token_ids": [1, 2]}}, "is malformed: canary: KeyError: 'logprobs'"),
        ({"canary": {"token_ids": [1, 2], "logprobs": [0.0] * 4, "dtype": "float32"}}, "2 token ids and 4 log-prob"),
    ],
)
def test_refuses_a_manifest_that_lies(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    assert reason in _reason(_publish(tmp_path, **fields))


def test_refuses_altered_files(tmp_path: Path) -> None:
    """What is inside the tensors is looked at when they are read: test_reading.py."""
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


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({"embed.weight": (8, 4)}, "lacks tensor norm.weight"),
        ({**BASE, "extra.weight": (1,)}, "model-1.safetensors holds tensor extra.weight, unknown to the model"),
        (
            {**BASE, "norm.weight": (5,)},
            "tensor norm.weight of {}/model-1.safetensors has shape [5], the model that is served [4]",
        ),
        ({**BASE, "lm_head.weight": (8, 4)}, "holds tensor lm_head.weight"),
    ],
)
def test_refuses_another_model(tmp_path: Path, shapes: Shapes, reason: str) -> None:
    directory = _publish(tmp_path, shapes)
    assert reason.format(directory) in _reason(directory)


@pytest.mark.parametrize(("dtype", "exact"), [(np.float32, True), (np.float16, False)])
def test_a_canary_is_as_exact_as_the_published_weights(tmp_path: Path, dtype: type, exact: bool) -> None:
    """A trainer that computes in float32 and publishes half precision differs from what is loaded by the rounding."""
    model = tmp_path / "model"
    model.mkdir()
    save_file({name: np.ones(shape, dtype) for name, shape in BASE.items()}, model / "model.safetensors")
    canary = {"token_ids": [1, 2], "logprobs": [-1.0], "dtype": "float32"}
    directory = publish_weights(tmp_path, model, VERSION.step, overrides={"canary": canary})
    policy = check_weights(directory, VERSION, BASE, tied=False)
    assert policy.canary is not None
    assert policy.canary.dtype == ("float32" if exact else "float16")


def test_tells_which_file_is_no_safetensors_file(tmp_path: Path) -> None:
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


def test_a_tied_head_may_be_written_or_left_out(tmp_path: Path) -> None:
    directory = _publish(tmp_path, {**BASE, "lm_head.weight": (8, 4)})
    check_weights(directory, VERSION, BASE, tied=True)
    check_weights(directory, VERSION, {**BASE, "lm_head.weight": (8, 4)}, tied=True)


def _offer(tmp_path: Path, shapes: Shapes, **fields: Any) -> Path:
    """Publish a version whose tensors are in no file."""
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


def test_accepts_what_is_offered(tmp_path: Path) -> None:
    offer = check_weights(_offer(tmp_path, BASE), VERSION, BASE, tied=False).offer
    assert offer is not None
    assert (offer.type, offer.tensors["embed.weight"]) == ("nccl", ("F32", (8, 4)))


@pytest.mark.parametrize(
    ("shapes", "fields", "reason"),
    [
        ({**BASE, "norm.weight": (5,)}, {}, "tensor norm.weight of {file} has shape [5], the model that is served [4]"),
        ({"embed.weight": (8, 4)}, {}, "lacks tensor norm.weight of the model that is served"),
        (BASE, {"tensors": {}}, "is not what was published: it lacks tensor embed.weight (and 1 more)"),
        (BASE, {"type": "pigeon"}, "{file} is malformed: transfer: type 'pigeon'"),
        (BASE, {"port": None}, "{file} is malformed: transfer: TypeError"),
        (BASE, {"tensors": {"embed.weight": ["F99", [1]]}}, "{file} is malformed: transfer: dtype 'F99'"),
    ],
)
def test_refuses_an_offer_that_cannot_be(tmp_path: Path, shapes: Shapes, fields: dict[str, Any], reason: str) -> None:
    directory = _offer(tmp_path, shapes, **fields)
    assert reason.format(file=directory / "manifest.json") in _reason(directory)
