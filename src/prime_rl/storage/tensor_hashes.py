"""Content hashes of safetensors files, computed without torch so that any process can check them (I5)."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from prime_rl.storage.artifact import IncompleteArtifact

_MAX_THREADS = 8

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""Bytes per element of each safetensors dtype."""

SAFETENSORS_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "uint16": "U16", "int16": "I16", "float16": "F16", "bfloat16": "BF16",
    "uint32": "U32", "int32": "I32", "float32": "F32",
    "uint64": "U64", "int64": "I64", "float64": "F64",
}  # fmt: skip
"""Safetensors dtype by the dtype's name in NumPy and PyTorch."""


@dataclass(frozen=True, slots=True, eq=False)
class RawTensor:
    """The bytes of a tensor with dtype and shape. Used because NumPy has no bfloat16.

    Attributes:
        dtype: safetensors name, e.g. `BF16`.
        shape: () for a scalar.
        data: uint8 [bytes], row-major view of the tensor's memory.
    """

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def __post_init__(self) -> None:
        size = ITEM_BYTES.get(self.dtype, 0) * math.prod(self.shape)
        if self.dtype in ITEM_BYTES and size != self.data.size:
            raise ValueError(f"{self.dtype} {list(self.shape)} requires {size} bytes, not {self.data.size}")

    def digest(self, name: str) -> str:
        """Return the xxh3_128 over name, dtype, shape and bytes, in hexadecimal."""
        digest = xxhash.xxh3_128(f"{name}|{self.dtype}|{list(self.shape)}|".encode())
        digest.update(self.data.data)
        return digest.hexdigest()


def map_tensors(directory: Path, pattern: str = "*.safetensors") -> dict[str, RawTensor]:
    """Memory-map every tensor in the safetensors files of `directory` that match `pattern`.

    Raises IncompleteArtifact if there is no safetensors file, or one is truncated or malformed.
    """
    files = sorted(directory.glob(pattern))
    if not files:
        raise IncompleteArtifact(f"{directory} contains no .safetensors file")
    tensors: dict[str, RawTensor] = {}
    for file in files:
        data = np.memmap(file, np.uint8, mode="r") if file.stat().st_size else np.empty(0, np.uint8)
        tensors.update(parse_tensors(file, np.asarray(data)))
    return tensors


def hash_tensors(directory: Path, pattern: str = "*.safetensors") -> dict[str, str]:
    """Return the `RawTensor.digest` of each tensor in the files that match; raises as `map_tensors`."""
    tensors = map_tensors(directory, pattern)
    with ThreadPoolExecutor(min(_MAX_THREADS, max(1, (os.cpu_count() or 1) // 2))) as pool:
        return dict(zip(tensors, pool.map(lambda name: tensors[name].digest(name), tensors), strict=True))


def content_hash(tensors: Mapping[str, str]) -> str:
    """Combine the hashes of `hash_tensors` into one hash, independent of files and order."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        digest.update(f"{name}={tensors[name]};".encode())
    return digest.hexdigest()


def parse_tensors(file: Path, data: NDArray[np.uint8]) -> Iterator[tuple[str, RawTensor]]:
    """Yield the tensors in the bytes of a safetensors file, as views of `data`; raises as `map_tensors`."""
    length = int.from_bytes(data[:8].tobytes(), "little")
    body, where = data[8 + length :], "its header"
    try:
        for name, entry in json.loads(data[8 : 8 + length].tobytes()).items():
            if name != "__metadata__":
                where = f"tensor {name}"
                begin, end = entry["data_offsets"]
                if end > len(body):
                    raise IncompleteArtifact(f"{file} is truncated: tensor {name} ends at byte {end} of {len(body)}")
                yield name, RawTensor(entry["dtype"], tuple(entry["shape"]), body[begin:end])
    except ValueError as error:
        raise IncompleteArtifact(f"{file} is not a safetensors file: {where}: {error}") from None
