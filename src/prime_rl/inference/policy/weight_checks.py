"""Checks of a weights directory before its tensors are read: manifest, file sizes and headers, without torch.

`weight_reader` hashes the tensors themselves when they are loaded.
"""

import json
import os
import socket
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.core.errors import translate_error
from prime_rl.core.types import PolicyVersion
from prime_rl.storage.artifact import MANIFEST, WEIGHTS_FORMAT, ArtifactError, IncompleteArtifact, read_manifest
from prime_rl.storage.delta.chain import base_of, read_entries
from prime_rl.storage.fs_consistency import retry_until_complete, visibility_timeout
from prime_rl.storage.tensor_hashes import content_hash
from prime_rl.storage.weights.canary import PolicyCanary, parse_canary
from prime_rl.storage.weights.transfer_descriptor import TransferDescriptor

if TYPE_CHECKING:
    from prime_rl.inference.policy.adapter_checks import AdapterSpec

Shapes = dict[str, tuple[int, ...]]

_HALF = {"BF16": "bfloat16", "F16": "float16"}


class WeightsRefusedError(Exception):
    """Weights that the server does not load; the message has the reason. The server keeps the loaded version."""


@dataclass(frozen=True, slots=True)
class PublishedPolicy:
    """A published policy version in the directory `path`, with the content hash of its tensors.

    Attributes:
        tensors: hash of each tensor by name, from the manifest.
        canary: the trainer's log-probabilities, if they were published.
        adapter: how the tensors are applied to the base model; None for full weights.
        offer: where to fetch the tensors; None if they are in files.
    """

    version: PolicyVersion
    hash: str
    path: Path
    tensors: Mapping[str, str] = field(default_factory=dict, repr=False)
    canary: PolicyCanary | None = None
    adapter: "AdapterSpec | None" = None
    offer: TransferDescriptor | None = None

    def describe(self) -> dict[str, Any]:
        """Version and hash, for responses."""
        return {"branch": self.version.branch, "step": self.version.step, "hash": self.hash}

    @property
    def salt(self) -> str:
        """Identifies the policy: the content hash, and for an adapter the hash of its configuration."""
        return self.hash if self.adapter is None else f"{self.hash}-{self.adapter.digest}"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The base model: policy version 0, and the tensor shapes of all later versions.

    If it is `tied`, its output head is its embedding, and `lm_head.weight` is optional.
    """

    policy: PublishedPolicy
    shapes: Shapes
    tied: bool


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Location of a tensor: `size` bytes from `begin` of `file`; `dtype` is that of safetensors."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int


def read_locations(directory: Path) -> list[TensorLocation]:
    """Read the headers of the safetensors files in `directory`: tensors by file, in their order there.

    Raises ArtifactError if there is no file, or one is truncated or malformed; names the file.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise IncompleteArtifact(f"{directory} contains no .safetensors file")
    return [location for file in files for location in _file_locations(file)]


def read_shapes(directory: Path) -> Shapes:
    """Read tensor name -> shape; raises as `read_locations`."""
    return {location.name: location.shape for location in read_locations(directory)}


def check_weights(directory: Path, version: PolicyVersion, base: Shapes, tied: bool) -> PublishedPolicy:
    """Check that `directory` contains the complete published weights of `version`, for the served model.

    Raises:
        WeightsRefusedError: the manifest is missing, malformed or of another version, a file is missing or of another
            size, or a tensor is missing, unknown or of another shape.
    """
    policy, locations, _ = read_published(directory, version)
    ignored = {"lm_head.weight"} if tied else set()
    if missing := sorted(base.keys() - locations.keys() - ignored):
        raise WeightsRefusedError(f"{directory} lacks tensor {_list(missing)} of the served model")
    if unknown := sorted(locations.keys() - base.keys() - ignored):
        raise WeightsRefusedError(
            f"{locations[unknown[0]].file} contains tensor {_list(unknown)}, which the served model does not have"
        )
    for name in sorted(locations.keys() & base.keys()):
        if locations[name].shape != base[name]:
            raise WeightsRefusedError(
                f"tensor {name} of {locations[name].file} has shape {list(locations[name].shape)}, "
                f"the served model has {list(base[name])}"
            )
    return policy


def read_published(
    directory: Path, version: PolicyVersion
) -> tuple[PublishedPolicy, dict[str, TensorLocation], Mapping[str, Any]]:
    """Read the policy, the locations of its tensors by name, and the manifest, of any model.

    Raises WeightsRefusedError as `check_weights`, except for checks against the model.
    """
    file = directory / MANIFEST
    with (
        translate_error((ArtifactError, OSError), lambda error: WeightsRefusedError(_explain(directory, error))),
        translate_error(ValueError, lambda error: WeightsRefusedError(f"{file} is malformed: {error}")),
    ):
        manifest = retry_until_complete(
            partial(read_manifest, directory, WEIGHTS_FORMAT), visibility_timeout(directory)
        )
        if (declared := (manifest.get("branch"), manifest.get("step"))) != (version.branch, version.step):
            raise WeightsRefusedError(
                f"{file} declares branch {declared[0]}, step {declared[1]}; "
                f"requested was branch {version.branch}, step {version.step}"
            )
        offer = None if manifest.get("transfer") is None else TransferDescriptor.parse(manifest["transfer"])
        locations = {location.name: location for location in _published_locations(directory, manifest, offer)}
        _check_manifest(file, manifest, locations.keys())
        canary = parse_canary(manifest)
        if canary is not None and (coarse := {location.dtype for location in locations.values()} & _HALF.keys()):
            canary = replace(canary, dtype=_HALF[min(coarse)])
    policy = PublishedPolicy(version, manifest["hash"], directory, manifest["tensors"], canary, offer=offer)
    return policy, locations, manifest


def _explain(directory: Path, error: Exception) -> str:
    if directory.parent.is_dir():
        return str(error)
    return (
        f"{directory.parent} does not exist on {socket.gethostname()}: a server needs the run's directory at the same "
        "path, or relay.urls"
    )


def _published_locations(
    directory: Path, manifest: Mapping[str, Any], offer: TransferDescriptor | None
) -> Iterator[TensorLocation]:
    """Same as `read_locations`; for a delta or an offer the resulting tensors, without their position in the file."""
    if offer is not None:
        for name, (dtype, shape) in offer.tensors.items():
            yield TensorLocation(directory / MANIFEST, name, dtype, shape, 0, 0)
    elif base_of(directory, manifest) is None:
        yield from read_locations(directory)
    else:
        for name, (file, entry) in read_entries(directory, manifest).items():
            yield TensorLocation(file, name, entry.dtype, entry.shape, 0, 0)


def _file_locations(file: Path) -> Iterator[TensorLocation]:
    """Read one header: its length as u64, then JSON, then the tensors."""
    malformed = (ValueError, KeyError, TypeError, AttributeError)
    with translate_error(malformed, lambda error: ArtifactError(f"{file} is not a safetensors file: {error}")):
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(length, size)))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            if 8 + length + end > size:
                raise IncompleteArtifact(
                    f"{file} is truncated: tensor {name} ends at byte {8 + length + end} of {size}"
                )
            yield TensorLocation(file, name, entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin)


def _check_manifest(file: Path, manifest: Mapping[str, Any], names: Set[str]) -> None:
    published = manifest.get("tensors")
    if not isinstance(published, Mapping):
        raise WeightsRefusedError(f"{file} lists no tensors")
    differs = f"{file.parent} differs from its manifest:"
    if absent := sorted(published.keys() - names):
        raise WeightsRefusedError(f"{differs} it lacks tensor {_list(absent)}")
    if added := sorted(names - published.keys()):
        raise WeightsRefusedError(f"{differs} {MANIFEST} lacks tensor {_list(added)}")
    if manifest.get("hash") != content_hash(published):
        raise WeightsRefusedError(f"{file} is inconsistent: its content hash does not match its tensors")


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
