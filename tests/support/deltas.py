"""Publishes tensors in full and as deltas, in two files, like several ranks of a trainer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from prime_rl.core.types import PolicyVersion
from prime_rl.storage.artifact import WEIGHTS_FORMAT, publish_artifact
from prime_rl.storage.delta.tensor_codec import encode_delta
from prime_rl.storage.tensor_hashes import SAFETENSORS_NAMES, RawTensor, content_hash

Tensors = Mapping[str, NDArray[Any]]


def publish_full(target: Path, tensors: Tensors, version: PolicyVersion) -> Path:
    """Publish a full version, the base of later deltas, with a configuration and a canary."""

    def write(directory: Path) -> dict[str, Any]:
        for stem, part in _parts(tensors).items():
            save_file(dict(part), directory / f"{stem}.safetensors")
        (directory / "config.json").write_text("{}")
        return {**_fields(tensors, version), "delta": {"base": None}}

    publish_artifact(target, write)
    return target


def publish_delta(target: Path, base: Tensors, tensors: Tensors, version: PolicyVersion) -> Path:
    """Publish a version as a delta against the previous step."""
    before = PolicyVersion(version.branch, version.step - 1)

    def write(directory: Path) -> dict[str, Any]:
        for stem, part in _parts(tensors).items():
            old, new = raw_tensors({name: base[name] for name in part}), raw_tensors(part)
            encode_delta(old, new, directory / f"{stem}.delta", before, version)
        link = {"base": f"step_{before.step}", "branch": before.branch, "step": before.step, "hash": _hash(base)}
        return {**_fields(tensors, version), "delta": link}

    publish_artifact(target, write)
    return target


def raw_tensors(tensors: Tensors) -> dict[str, RawTensor]:
    """View contiguous arrays as bytes."""
    return {
        name: RawTensor(SAFETENSORS_NAMES[array.dtype.name], array.shape, array.reshape(-1).view(np.uint8))
        for name, array in tensors.items()
    }


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
    return {name: tensor.digest(name) for name, tensor in raw_tensors(tensors).items()}


def _hash(tensors: Tensors) -> str:
    return content_hash(_hashes(tensors))
