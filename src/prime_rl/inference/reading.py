"""I5: the bytes that are hashed are the bytes that are loaded.

Each tensor is read once, into memory of our own, and hashed there: between the check and the load no file can change
under it. Reads run ahead of the loader in several threads, bounded in bytes.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from prime_rl.inference.replica import Replica
from prime_rl.inference.weights import TensorPlace, read_places
from prime_rl.run.artifact import ArtifactError
from prime_rl.run.tensors import RawTensor
from prime_rl.run.visibility import patience, settled

_AHEAD_BYTES = 256 * 2**20
_MAX_THREADS = 8

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


class Cancelled(Exception):
    """The reader was told to stop."""


def read_verified(
    directory: Path,
    hashes: Mapping[str, str] | None,
    cancelled: Callable[[], bool] = lambda: False,
    replica: Replica | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Read all tensors of the safetensors files in `directory`, file by file and in their order there.

    Args:
        directory: with at least one safetensors file; with `replica`, any published version.
        hashes: name -> hash that each tensor must have (`RawTensor.digest`); None checks nothing.
        cancelled: asked before each tensor.
        replica: rebuilds what was published as a delta.

    Yields:
        Name and tensor, in memory of its own.

    Raises:
        ArtifactError: a file is missing, truncated or malformed, or a tensor has another hash; names the file.
        Cancelled: `cancelled` was true.
        OSError: the disk.
    """
    if replica is not None:
        directory = replica.complete(directory, partial(_stop_if, cancelled))
    places = settled(partial(read_places, directory), patience(directory), partial(_stop_if, cancelled))
    threads = min(_MAX_THREADS, max(1, (os.cpu_count() or 1) // 2))
    with ThreadPoolExecutor(threads, "read-weights") as pool:
        pending: deque[tuple[TensorPlace, Future[Tensor]]] = deque()
        ahead = 0
        try:
            for place in places:
                _stop_if(cancelled)
                pending.append((place, pool.submit(_read, place, hashes)))
                ahead += place.size
                while ahead > _AHEAD_BYTES and len(pending) > 1:
                    done, future = pending.popleft()
                    ahead -= done.size
                    yield done.name, future.result()
            while pending:
                done, future = pending.popleft()
                yield done.name, future.result()
        finally:
            for _, future in pending:
                future.cancel()


def _stop_if(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise Cancelled


def _read(place: TensorPlace, hashes: Mapping[str, str] | None) -> Tensor:
    """Read one tensor; pread, because a mapped file that is cut short would end the process by SIGBUS."""
    data = np.empty(place.size, np.uint8)
    view = data.data
    descriptor = os.open(place.file, os.O_RDONLY)
    try:
        done = 0
        while done < place.size:
            count = os.preadv(descriptor, [view[done:]], place.begin + done)
            if count == 0:
                raise ArtifactError(f"{place.file} is truncated: tensor {place.name} lacks {place.size - done} bytes")
            done += count
    finally:
        os.close(descriptor)
    if hashes is not None and RawTensor(place.dtype, place.shape, data).digest(place.name) != hashes.get(place.name):
        raise ArtifactError(f"{place.file} is not what was published: tensor {place.name} has another hash")
    if place.size == 0:
        return torch.empty(place.shape, dtype=_DTYPES[place.dtype])
    return torch.from_numpy(data).view(_DTYPES[place.dtype]).reshape(place.shape)
