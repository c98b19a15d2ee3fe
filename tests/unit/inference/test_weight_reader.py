"""I5: what is hashed is what is loaded."""

import json

import pytest
import torch
from safetensors.torch import save_file

from prime_rl.storage.artifact import ArtifactError
from prime_rl.storage.tensor_hashes import hash_tensors
from tests.support.vllm_modules import LazyModule, needs_vllm

pytestmark = needs_vllm

reader = LazyModule("prime_rl.inference.worker.worker_weight_update")


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return {
        "b.weight": torch.randn(33, 7).to(torch.bfloat16),
        "a.weight": torch.randn(5, 3),
        "scalar": torch.tensor(3.5),
        "nothing": torch.empty(0, 4),
        "ids": torch.arange(12).reshape(3, 4),
    }


@pytest.fixture
def directory(tmp_path, tensors):
    names = list(tensors)
    for number, part in enumerate((names[:2], names[2:])):
        save_file({name: tensors[name] for name in part}, tmp_path / f"model-{number}.safetensors")
    return tmp_path


@pytest.mark.parametrize("ahead", [0, 100, 2**20])
def test_read_verified_returns_the_written_tensors(directory, tensors, monkeypatch, ahead):
    monkeypatch.setattr("prime_rl.inference.worker.worker_weight_update._AHEAD_BYTES", ahead)
    read = dict(reader.read_verified(directory, hash_tensors(directory)))
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_read_verified_names_the_tensor_with_a_flipped_bit(directory):
    hashes = hash_tensors(directory)
    file = directory / "model-1.safetensors"
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    at = json.loads(content[8 : 8 + length])["ids"]["data_offsets"][0]
    content[8 + length + at] ^= 1
    file.write_bytes(content)
    with pytest.raises(ArtifactError, match=f"{file} differs from its manifest: tensor ids has another hash"):
        list(reader.read_verified(directory, hashes))


def test_read_verified_ignores_changes_after_the_check(directory, tensors):
    """Tensors are not read again between the check and the load."""
    read = dict(reader.read_verified(directory, hash_tensors(directory)))
    for file in directory.glob("*.safetensors"):
        with file.open("r+b") as stream:
            stream.truncate(16)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_read_verified_of_a_truncated_file_raises(directory, monkeypatch):
    """A memory map would crash the process."""
    hashes = hash_tensors(directory)
    places = reader.read_locations(directory)
    file = directory / "model-0.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    monkeypatch.setattr("prime_rl.inference.worker.worker_weight_update.read_locations", lambda _: places)
    with pytest.raises(ArtifactError, match=f"{file} is truncated: tensor .* lacks 10 bytes"):
        list(reader.read_verified(directory, hashes))


def test_read_verified_stops_when_cancelled(directory):
    def stop() -> None:
        raise InterruptedError

    weights = reader.read_verified(directory, None, stop)
    with pytest.raises(InterruptedError):
        next(weights)
