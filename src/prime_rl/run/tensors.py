"""I5: content hashes of safetensors files, read without torch so that any process can check them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import xxhash

from prime_rl.run.artifact import ArtifactError


def hash_tensors(directory: Path) -> dict[str, str]:
    """Hash every tensor in the safetensors files of `directory`.

    Returns:
        Tensor name -> hex xxh3_128 over its name, dtype, shape and bytes.

    Raises:
        ArtifactError: no safetensors file, or one that is truncated; names the file.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ArtifactError(f"{directory} holds no .safetensors file")
    return {name: digest for file in files for name, digest in _hash_file(file)}


def content_hash(tensors: Mapping[str, str]) -> str:
    """Combine the hashes of `hash_tensors` into one, independent of files and order."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        digest.update(f"{name}={tensors[name]};".encode())
    return digest.hexdigest()


def _hash_file(file: Path) -> Iterator[tuple[str, str]]:
    data = np.memmap(file, np.uint8, mode="r") if file.stat().st_size else np.empty(0, np.uint8)
    length = int.from_bytes(data[:8].tobytes(), "little")
    try:
        header = json.loads(data[8 : 8 + length].tobytes())
    except ValueError as error:
        raise ArtifactError(f"{file} is not a safetensors file: {error}") from None
    body = data[8 + length :]
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if end > len(body):
            raise ArtifactError(f"{file} is truncated: tensor {name} ends at byte {end} of {len(body)}")
        digest = xxhash.xxh3_128(f"{name}|{entry['dtype']}|{entry['shape']}|".encode())
        digest.update(body[begin:end].data)
        yield name, digest.hexdigest()
