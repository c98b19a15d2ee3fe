"""What is checked of a weights directory before its tensors are read (I5: loaded is what was published).

Here are the manifest, the sizes of the files, and their headers, or all of a delta: cheap, and without torch. The
tensors themselves are hashed by `reading`, on the bytes that are loaded.
"""

import json
import os
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.inference.canary import Canary, parse_canary
from prime_rl.run.artifact import MANIFEST, WEIGHTS_FORMAT, ArtifactError, Incomplete, read_manifest
from prime_rl.run.delta.chain import base_of, read_entries
from prime_rl.run.offer import Offer
from prime_rl.run.tensors import content_hash
from prime_rl.run.visibility import patience, settled
from prime_rl.types import PolicyVersion

if TYPE_CHECKING:
    from prime_rl.inference.adapters import Adapter

Shapes = dict[str, tuple[int, ...]]

_HALF = {"BF16": "bfloat16", "F16": "float16"}


class WeightsRefusedError(Exception):
    """Weights that will not be loaded; the message says why. The server goes on with what it has."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy version that was published.

    Attributes:
        version: which one.
        hash: content hash of its tensors.
        path: directory.
        tensors: hash of each tensor by name, as its manifest has it.
        canary: the trainer's log-probabilities under it, if they were published.
        adapter: what its tensors are the factors of, on top of the base model; None if they are all of a model's.
        offer: where to fetch its tensors; None if they are in files.
    """

    version: PolicyVersion
    hash: str
    path: Path
    tensors: Mapping[str, str] = field(default_factory=dict, repr=False)
    canary: Canary | None = None
    adapter: "Adapter | None" = None
    offer: Offer | None = None

    @property
    def salt(self) -> str:
        """What tells it from every other policy: the content hash, and that of an adapter's scale and layers."""
        return self.hash if self.adapter is None else f"{self.hash}-{self.adapter.digest}"


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies: `size` bytes from `begin` of `file`; `dtype` as safetensors spells it."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int


def read_places(directory: Path) -> list[TensorPlace]:
    """Read the headers of the safetensors files in `directory`: tensors by file, in their order there.

    Raises:
        ArtifactError: no safetensors file, or one that is truncated or malformed; names the file.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise Incomplete(f"{directory} holds no .safetensors file")
    return [place for file in files for place in _places(file)]


def read_shapes(directory: Path) -> Shapes:
    """Read tensor name -> shape; raises as `read_places`."""
    return {place.name: place.shape for place in read_places(directory)}


def check_weights(directory: Path, version: PolicyVersion, base: Shapes, tied: bool) -> Policy:
    """Check that `directory` claims to hold the published weights of `version`, whole, for the running model.

    Args:
        directory: a published weights directory.
        version: the version it must declare.
        base: names and shapes of the base checkpoint, which are those that the model can load.
        tied: the model's output head is its embedding, so that a checkpoint may hold `lm_head.weight` or leave it out.

    Raises:
        WeightsRefusedError: the manifest is missing, malformed or of another version, a file is missing or of another
            size, or a tensor is missing, unknown or of another shape.
    """
    policy, places, _ = read_published(directory, version)
    _check_shapes(directory, places, base, ignored={"lm_head.weight"} if tied else set())
    return policy


def read_published(directory: Path, version: PolicyVersion) -> tuple[Policy, dict[str, TensorPlace], Mapping[str, Any]]:
    """Read what `directory` claims to hold, for which model or none: the policy, its tensors by name, the manifest.

    Raises:
        WeightsRefusedError: as `check_weights`, but for the model.
    """
    try:
        manifest = settled(partial(read_manifest, directory, WEIGHTS_FORMAT), patience(directory))
        _check_version(directory / MANIFEST, manifest, version)
        offer = None if manifest.get("transfer") is None else Offer.parse(manifest["transfer"])
        places = {place.name: place for place in _published_places(directory, manifest, offer)}
        _check_manifest(directory / MANIFEST, manifest, places.keys())
        canary = parse_canary(manifest)
        if canary is not None and (coarse := {place.dtype for place in places.values()} & _HALF.keys()):
            canary = replace(canary, dtype=_HALF[min(coarse)])
    except (ArtifactError, OSError) as error:
        raise WeightsRefusedError(str(error)) from None
    except ValueError as error:
        raise WeightsRefusedError(f"{directory / MANIFEST} is malformed: {error}") from None
    policy = Policy(version, manifest["hash"], directory, manifest["tensors"], canary, offer=offer)
    return policy, places, manifest


def _published_places(directory: Path, manifest: Mapping[str, Any], offer: Offer | None) -> list[TensorPlace]:
    """As `read_places`; of a delta or an offer, what it leads to and in which file, but for the place there."""
    if offer is not None:
        file = directory / MANIFEST
        return [TensorPlace(file, name, dtype, shape, 0, 0) for name, (dtype, shape) in offer.tensors.items()]
    if base_of(directory, manifest) is None:
        return read_places(directory)
    entries = read_entries(directory, manifest).items()
    return [TensorPlace(file, name, entry.dtype, entry.shape, 0, 0) for name, (file, entry) in entries]


def _places(file: Path) -> Iterator[TensorPlace]:
    """Read one header: its length as u64, then JSON, then the tensors."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(length, size)))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            if 8 + length + end > size:
                raise Incomplete(f"{file} is truncated: tensor {name} ends at byte {8 + length + end} of {size}")
            yield TensorPlace(file, name, entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{file} is not a safetensors file: {error}") from None


def _check_version(file: Path, manifest: Mapping[str, Any], version: PolicyVersion) -> None:
    declared = (manifest.get("branch"), manifest.get("step"))
    if declared != (version.branch, version.step):
        raise WeightsRefusedError(
            f"{file} declares branch {declared[0]}, step {declared[1]}; "
            f"asked for was branch {version.branch}, step {version.step}"
        )


def _check_manifest(file: Path, manifest: Mapping[str, Any], names: Set[str]) -> None:
    published = manifest.get("tensors")
    if not isinstance(published, Mapping):
        raise WeightsRefusedError(f"{file} lists no tensors")
    if absent := sorted(published.keys() - names):
        raise WeightsRefusedError(f"{file.parent} is not what was published: it lacks tensor {_list(absent)}")
    if added := sorted(names - published.keys()):
        raise WeightsRefusedError(f"{file.parent} is not what was published: {MANIFEST} lacks tensor {_list(added)}")
    if manifest.get("hash") != content_hash(published):
        raise WeightsRefusedError(f"{file} is not what was published: its content hash is another")


def _check_shapes(directory: Path, places: Mapping[str, TensorPlace], base: Shapes, ignored: set[str]) -> None:
    missing = sorted(base.keys() - places.keys() - ignored)
    unknown = sorted(places.keys() - base.keys() - ignored)
    if missing:
        raise WeightsRefusedError(f"{directory} lacks tensor {_list(missing)} of the model that is served")
    if unknown:
        raise WeightsRefusedError(
            f"{places[unknown[0]].file} holds tensor {_list(unknown)}, unknown to the model that is served"
        )
    for name in sorted(places.keys() & base.keys()):
        if places[name].shape != base[name]:
            raise WeightsRefusedError(
                f"tensor {name} of {places[name].file} has shape {list(places[name].shape)}, "
                f"the model that is served {list(base[name])}"
            )


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
