"""Reads the tensors of published weights and checks their hashes.

Each tensor is read once into private memory and hashed there, so the hashed bytes are the loaded bytes (I5), even if a
file changes in between. Several threads read ahead of the loader, up to a limit in bytes.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from prime_rl.inference.policy.delta_cache import NUM_THREADS, DeltaCache
from prime_rl.inference.policy.weight_checks import TensorLocation, read_locations
from prime_rl.storage.artifact import ArtifactError
from prime_rl.storage.fs_consistency import retry_until_complete, visibility_timeout
from prime_rl.storage.tensor_hashes import SAFETENSORS_NAMES, RawTensor

_AHEAD_BYTES = 256 * 2**20

_DTYPES = {code: getattr(torch, name) for name, code in SAFETENSORS_NAMES.items()}


def read_verified(
    directory: Path,
    hashes: Mapping[str, str] | None,
    check: Callable[[], None] = lambda: None,
    cache: DeltaCache | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Read all tensors of the safetensors files in `directory`, file by file and in their order there.

    Args:
        directory: of safetensors files; with `cache`, of any published version.
        hashes: name -> hash that each tensor must have (`RawTensor.digest`); None checks nothing.
        check: called before each tensor; may raise to stop.
        cache: rebuilds a version that was published as a delta.

    Raises:
        ArtifactError: a file is missing, truncated or malformed, or a tensor has another hash; names the file.
        OSError: a file cannot be read.
    """
    if cache is not None:
        directory = cache.complete(directory, check)
    locations = retry_until_complete(partial(read_locations, directory), visibility_timeout(directory), check)
    with ThreadPoolExecutor(NUM_THREADS, "read-weights") as pool:
        pending: deque[tuple[TensorLocation, Future[Tensor]]] = deque()
        ahead = 0
        try:
            for location in locations:
                check()
                pending.append((location, pool.submit(_read, location, hashes)))
                ahead += location.size
                while ahead > _AHEAD_BYTES and len(pending) > 1:
                    done, future = pending.popleft()
                    ahead -= done.size
                    yield done.name, future.result()
            while pending:
                check()
                done, future = pending.popleft()
                yield done.name, future.result()
        finally:
            for _, future in pending:
                future.cancel()


def _read(location: TensorLocation, hashes: Mapping[str, str] | None) -> Tensor:
    """Read one tensor. Not by mmap: a mapped file that is truncated would kill the process with SIGBUS."""
    data = np.fromfile(location.file, np.uint8, location.size, offset=location.begin)
    if missing := location.size - data.size:
        raise ArtifactError(f"{location.file} is truncated: tensor {location.name} lacks {missing} bytes")
    tensor = RawTensor(location.dtype, location.shape, data)
    if hashes is not None and tensor.digest(location.name) != hashes.get(location.name):
        raise ArtifactError(f"{location.file} differs from its manifest: tensor {location.name} has another hash")
    if location.size == 0:
        return torch.empty(location.shape, dtype=_DTYPES[location.dtype])
    return torch.from_numpy(data).view(_DTYPES[location.dtype]).reshape(location.shape)
