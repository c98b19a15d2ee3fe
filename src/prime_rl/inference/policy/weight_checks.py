"""Checks of a weights directory before its tensors are read: manifest, file sizes and headers, without torch.

A version has all weights of the model, or it is an adapter: factors A and B of low-rank additions to layers of the base
model, in peft's format. The manifest has the hash of every tensor, and as `adapter` the hash of the configuration with
the scale. The workers hash the tensors themselves when they load them.
"""

import json
import os
import socket
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from prime_rl.configs.base_model import NameConfig
from prime_rl.core.errors import ConfigError, translate_error
from prime_rl.core.types import PolicyVersion
from prime_rl.storage.artifact import (
    MANIFEST,
    WEIGHTS_FORMAT,
    ArtifactError,
    IncompleteArtifact,
    read_manifest,
    retry_until_complete,
    visibility_timeout,
)
from prime_rl.storage.delta.chain import base_of, read_entries
from prime_rl.storage.model_files import find_model
from prime_rl.storage.tensor_hashes import content_hash, hash_tensors
from prime_rl.storage.weights.canary import PolicyCanary, parse_canary
from prime_rl.storage.weights.transfer_channel import TransferDescriptor

Shapes = dict[str, tuple[int, ...]]

_HALF = {"BF16": "bfloat16", "F16": "float16"}

ADAPTER_CONFIG = "adapter_config.json"

POLICY_ADAPTER = 1
"""Number of the base slot's adapter; those of runs, and named adapters, have larger numbers."""

_PREFIX = "base_model.model."


class WeightsRefusedError(Exception):
    """Weights that the server does not load; the message has the reason. The server keeps the loaded version."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """How an adapter's factors are applied: peft's configuration (rank `r`, `lora_alpha` ...) and its file's hash."""

    config: Mapping[str, Any]
    digest: str


@dataclass(frozen=True, slots=True)
class CheckedVersion:
    """A published version in the directory `path` that has passed the checks, with the content hash of its tensors.

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
    adapter: AdapterSpec | None = None
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

    policy: CheckedVersion
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


def find_base_model(model: NameConfig) -> ServedModel:
    """Find or download a model by `find_model`, and hash its weights.

    Raises:
        ConfigError: as `find_model`, or the model contains no safetensors weights.
    """
    directory = find_model(model.name, model.revision, model.download_timeout_seconds)
    invalid = f"model.name: {model.name} is not a Hugging Face model with safetensors weights"
    with translate_error((ArtifactError, OSError, ValueError), lambda error: ConfigError(f"{invalid}: {error}")):
        config = json.loads((directory / "config.json").read_text())
        tensors = hash_tensors(directory)
    shapes = read_shapes(directory)
    # Without the key, the default of the model class applies; a checkpoint without a head is tied in any case.
    declared = config.get("text_config", config).get("tie_word_embeddings") or config.get("tie_word_embeddings")
    tied = declared is True or "lm_head.weight" not in shapes
    embedding = next((shape for name, shape in shapes.items() if name.endswith("embed_tokens.weight")), None)
    if tied and embedding is not None:
        shapes = {"lm_head.weight": embedding, **shapes}  # an adapter may have factors of the head alone
    return ServedModel(CheckedVersion(PolicyVersion(0, 0), content_hash(tensors), directory, tensors), shapes, tied)


def check_version(directory: Path, version: PolicyVersion, model: ServedModel, max_rank: int | None) -> CheckedVersion:
    """Check a published version by `check_weights` or `check_adapter`."""
    if (directory / ADAPTER_CONFIG).exists():
        return check_adapter(directory, version, model.shapes, max_rank)
    return check_weights(directory, version, model.shapes, model.tied)


def check_weights(directory: Path, version: PolicyVersion, base: Shapes, tied: bool) -> CheckedVersion:
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


def check_adapter(directory: Path, version: PolicyVersion, base: Shapes, max_rank: int | None) -> CheckedVersion:
    """Check that `directory` contains a complete adapter of the served model, published as `version`.

    `max_rank` is the largest rank of the server; None if it accepts no adapters.

    Raises:
        WeightsRefusedError: as `check_weights`; or a factor matches no layer of the base model, its rank is too large,
            or the server accepts no adapters.
    """
    policy, places, manifest = read_published(directory, version)
    file = directory / ADAPTER_CONFIG
    invalid = f"{file} is not a configuration of an adapter"
    with translate_error((OSError, ValueError), lambda error: WeightsRefusedError(f"{invalid}: {error}")):
        raw = file.read_bytes()
        config = json.loads(raw)
        if not isinstance(config, dict):
            raise ValueError("not an object")
    adapter = AdapterSpec(config, xxhash.xxh3_128_hexdigest(raw))
    if manifest.get("adapter") != adapter.digest:
        raise WeightsRefusedError(f"{file} differs from its manifest: {MANIFEST} has another hash")
    if max_rank is None:
        raise WeightsRefusedError(f"{directory} contains an adapter; the server accepts it with enable_lora = true")
    rank = _check_factors(directory, places, base)
    if rank > max_rank:
        raise WeightsRefusedError(
            f"{directory} contains an adapter of rank {rank}; this server has max_lora_rank = {max_rank}"
        )
    return replace(policy, adapter=adapter)


def _check_factors(directory: Path, places: Mapping[str, TensorLocation], base: Shapes) -> int:
    """Check every factor against its layer and the other factor of that layer; return the largest rank."""
    largest = 0
    layers = {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in places}
    for layer in sorted(layers):
        a, b = (places.get(f"{_PREFIX}{layer}.lora_{factor}.weight") for factor in "AB")
        if a is None or b is None:
            raise WeightsRefusedError(f"{directory} lacks a factor of layer {layer or '?'}, or its name is not peft's")
        weight = base.get(f"{layer}.weight")
        if weight is None:
            raise WeightsRefusedError(f"{a.file} adapts layer {layer}, which the served model does not have")
        rank = a.shape[0] if a.shape else 0
        if (a.shape, b.shape, len(weight)) != ((rank, weight[-1]), (weight[0], rank), 2):
            raise WeightsRefusedError(
                f"{a.file} adapts layer {layer} by factors of shape {list(a.shape)} and {list(b.shape)}; "
                f"its weight has shape {list(weight)} in the served model"
            )
        largest = max(largest, rank)
    if 2 * len(layers) != len(places):
        raise WeightsRefusedError(f"{directory} contains tensors that are not factors of an adapter")
    return largest


def read_published(
    directory: Path, version: PolicyVersion
) -> tuple[CheckedVersion, dict[str, TensorLocation], Mapping[str, Any]]:
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
    policy = CheckedVersion(version, manifest["hash"], directory, manifest["tensors"], canary, offer=offer)
    return policy, locations, manifest


def _explain(directory: Path, error: Exception) -> str:
    if directory.parent.is_dir():
        return str(error)
    return (
        f"{directory.parent} does not exist on {socket.gethostname()}: a server needs the run's directory at the same "
        "path, or relay.urls"
    )


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
