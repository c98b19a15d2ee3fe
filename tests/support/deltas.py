"""Publishing tensors in full and as deltas, in two files, as several ranks of a trainer do it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors.numpy import save_file

from prime_rl.run.artifact import WEIGHTS_FORMAT, publish
from prime_rl.run.delta import encode
from prime_rl.run.tensors import RawTensor, content_hash
from prime_rl.types import PolicyVersion

Tensors = Mapping[str, NDArray[Any]]


def publish_full(target: Path, tensors: Tensors, version: PolicyVersion) -> Path:
    """Publish a full version that deltas may follow, with a configuration and a canary."""

    def write(directory: Path) -> dict[str, Any]:
        for stem, part in _parts(tensors).items():
            save_file(dict(part), directory / f"{stem}.safetensors")
        (directory / "config.json").write_text("{}")
        return {**_fields(tensors, version), "delta": {"base": None}}

    publish(target, write)
    return target


def publish_delta(target: Path, base: Tensors, tensors: Tensors, version: PolicyVersion) -> Path:
    """Publish a version as the delta of the step before."""
    before = PolicyVersion(version.branch, version.step - 1)

    def write(directory: Path) -> dict[str, Any]:
        for stem, part in _parts(tensors).items():
            old = {name: base[name] for name in part}
            encode(old, part, directory / f"{stem}.delta", base_version=before, version=version)
        link = {"base": f"step_{before.step}", "branch": before.branch, "step": before.step, "hash": _hash(base)}
        return {**_fields(tensors, version), "delta": link}

    publish(target, write)
    return target


def _parts(tensors: Tensors) -> dict[str, Tensors]:
    first, *others = sorted(tensors)
    return {
        "model-00001-of-00002": {first: tensors[first]},
        "model-00002-of-00002": {name: tensors[name] for name in others},
    }


def _fields(tensors: Tensors, version: PolicyVersion) -> dict[str, Any]:
    return {
        "format": WEIGHTS_FORMAT,
        "branch": version.branch,
        "step": version.step,
        "tensors": _hashes(tensors),
        "hash": _hash(tensors),
        "canary": {"token_ids": [1, 2], "logprobs": [-0.5], "dtype": "float32"},
    }


def _hashes(tensors: Tensors) -> dict[str, str]:
    return {name: RawTensor.of(tensor).digest(name) for name, tensor in tensors.items()}


def _hash(tensors: Tensors) -> str:
    return content_hash(_hashes(tensors))
