"""I5: what is hashed is what is loaded."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from prime_rl.inference import reading
from prime_rl.inference.reading import Cancelled, read_verified
from prime_rl.run.artifact import ArtifactError
from prime_rl.run.tensors import hash_tensors


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "b.weight": torch.randn(33, 7).to(torch.bfloat16),
        "a.weight": torch.randn(5, 3),
        "scalar": torch.tensor(3.5),
        "nothing": torch.empty(0, 4),
        "ids": torch.arange(12).reshape(3, 4),
    }


@pytest.fixture
def directory(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    names = list(tensors)
    for number, part in enumerate((names[:2], names[2:])):
        save_file({name: tensors[name] for name in part}, tmp_path / f"model-{number}.safetensors")
    return tmp_path


@pytest.mark.parametrize("ahead", [0, 100, 2**20])
def test_reads_what_was_written(
    directory: Path, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    monkeypatch.setattr(reading, "_AHEAD_BYTES", ahead)
    read = dict(read_verified(directory, hash_tensors(directory)))
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_names_file_and_tensor_of_a_flipped_bit(directory: Path) -> None:
    hashes = hash_tensors(directory)
    file = directory / "model-1.safetensors"
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    at = json.loads(content[8 : 8 + length])["ids"]["data_offsets"][0]
    content[8 + length + at] ^= 1
    file.write_bytes(content)
    with pytest.raises(ArtifactError, match=f"{file} is not what was published: tensor ids has another hash"):
        list(read_verified(directory, hashes))


def test_a_change_after_the_check_is_not_loaded(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """There is no second reading between the check and the load."""
    read = dict(read_verified(directory, hash_tensors(directory)))
    for file in directory.glob("*.safetensors"):
        with file.open("r+b") as stream:
            stream.truncate(16)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_a_file_that_is_cut_short_while_it_is_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping would end the process."""
    hashes = hash_tensors(directory)
    places = reading.read_places(directory)
    file = directory / "model-0.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    monkeypatch.setattr(reading, "read_places", lambda _: places)
    with pytest.raises(ArtifactError, match=f"{file} is truncated: tensor .* lacks 10 bytes"):
        list(read_verified(directory, hashes))


def test_stops_when_told(directory: Path) -> None:
    weights = read_verified(directory, None, lambda: True)
    with pytest.raises(Cancelled):
        next(weights)
