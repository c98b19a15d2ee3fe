"""I5: content hashes of safetensors files, read without torch so that any process can check them."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from prime_rl.run.artifact import ArtifactError

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""Bytes of one element by dtype, as safetensors spells it."""

_NUMPY_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "uint16": "U16", "int16": "I16", "float16": "F16", "bfloat16": "BF16",
    "uint32": "U32", "int32": "I32", "float32": "F32",
    "uint64": "U64", "int64": "I64", "float64": "F64",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class RawTensor:
    """The bytes of a tensor and what they mean; NumPy alone has no bfloat16.

    Attributes:
        dtype: as safetensors spells it, e.g. `BF16`.
        shape: of the tensor; () is a scalar.
        data: uint8 [bytes], row-major; a view of whatever holds the tensor, writable only where that is.
    """

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def __post_init__(self) -> None:
        size = ITEM_BYTES.get(self.dtype, 0) * math.prod(self.shape)
        if self.dtype in ITEM_BYTES and size != self.data.size:
            raise ValueError(f"{self.dtype} {list(self.shape)} takes {size} bytes, there are {self.data.size}")

    @classmethod
    def of(cls, array: NDArray[Any]) -> "RawTensor":
        """View an array as its bytes.

        Raises:
            ValueError: it is not row-major in one piece, or of a dtype that safetensors has no name for.
        """
        if array.dtype.name not in _NUMPY_NAMES or not array.flags.c_contiguous or not array.dtype.isnative:
            raise ValueError(f"an array of {array.dtype} with strides {array.strides} is not bytes of a tensor")
        return cls(_NUMPY_NAMES[array.dtype.name], array.shape, array.reshape(-1).view(np.uint8))

    def digest(self, name: str) -> str:
        """Hash name, dtype, shape and bytes: hex xxh3_128."""
        digest = xxhash.xxh3_128(f"{name}|{self.dtype}|{list(self.shape)}|".encode())
        digest.update(self.data.data)
        return digest.hexdigest()


def map_tensors(directory: Path) -> dict[str, RawTensor]:
    """Map every tensor in the safetensors files of `directory`; bytes are read from disk when they are touched.

    Raises:
        ArtifactError: no safetensors file, or one that is truncated or malformed; names the file.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ArtifactError(f"{directory} holds no .safetensors file")
    return {name: tensor for file in files for name, tensor in parse_tensors(file, _map(file))}


def hash_tensors(directory: Path) -> dict[str, str]:
    """Hash every tensor in the safetensors files of `directory`.

    Returns:
        Tensor name -> hex xxh3_128 over its name, dtype, shape and bytes.

    Raises:
        ArtifactError: no safetensors file, or one that is truncated or malformed; names the file.
    """
    return {name: tensor.digest(name) for name, tensor in map_tensors(directory).items()}


def content_hash(tensors: Mapping[str, str]) -> str:
    """Combine the hashes of `hash_tensors` into one, independent of files and order."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        digest.update(f"{name}={tensors[name]};".encode())
    return digest.hexdigest()


def parse_tensors(file: Path, data: NDArray[np.uint8]) -> Iterator[tuple[str, RawTensor]]:
    """Find the tensors in the bytes of a safetensors file; they are views of `data`.

    Raises:
        ArtifactError: it is truncated or malformed; names the file.
    """
    length = int.from_bytes(data[:8].tobytes(), "little")
    try:
        header: dict[str, dict[str, Any]] = json.loads(data[8 : 8 + length].tobytes())
    except ValueError as error:
        raise ArtifactError(f"{file} is not a safetensors file: {error}") from None
    body = data[8 + length :]
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if end > len(body):
            raise ArtifactError(f"{file} is truncated: tensor {name} ends at byte {end} of {len(body)}")
        try:
            yield name, RawTensor(entry["dtype"], tuple(entry["shape"]), body[begin:end])
        except ValueError as error:
            raise ArtifactError(f"{file} is malformed: tensor {name}: {error}") from None


def _map(file: Path) -> NDArray[np.uint8]:
    return np.asarray(np.memmap(file, np.uint8, mode="r")) if file.stat().st_size else np.empty(0, np.uint8)
