"""I5: versions as deltas against the one before, of which every rank keeps in memory what it has written.

    full, delta, delta ... delta, full, delta ...     every `full_interval`-th is full, the first and the last are too

What is kept becomes a base when its version is complete, and not before: after an error the next version is full.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from prime_rl.errors import RunError
from prime_rl.run.artifact import fsync
from prime_rl.run.delta.chain import SUFFIX
from prime_rl.run.delta.codec import encode
from prime_rl.run.tensors import RawTensor
from prime_rl.trainer.parallel import World
from prime_rl.trainer.publication import files
from prime_rl.types import PolicyVersion

_MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class _Version:
    name: str
    version: PolicyVersion
    hash: str = ""


class Deltas:
    """Decides what each version becomes, and writes this rank's files of it. All ranks make the same calls."""

    def __init__(self, full_interval: int | None, world: World) -> None:
        """Write every `full_interval`-th version in full; None: all of them, and keep nothing."""
        self._interval = full_interval or 1
        self._on = full_interval is not None
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
        self._threads = min(_MAX_THREADS, max(1, (os.cpu_count() or 1) // 2 // ranks_here))
        self._files: dict[str, dict[str, RawTensor]] = {}
        self._hashes: dict[str, dict[str, str]] = {}
        self._complete: _Version | None = None
        self._base: _Version | None = None
        self._new: _Version | None = None
        self._keeps = False
        self._since_full = 0

    @property
    def room(self) -> tuple[int, str]:
        """How many full versions must fit where they are written, and the word for it: two, and the deltas between."""
        return (3, "three") if self._on else (2, "two")

    @property
    def active(self) -> bool:
        """Whether the version that was begun is a delta."""
        return self._base is not None

    def begin(self, name: str, version: PolicyVersion, last: bool) -> None:
        """Decide what becomes of the version that will be published as `name`; `last` if none follows."""
        as_delta = not last and self._since_full + 1 < self._interval
        self._base, self._complete = self._complete if as_delta else None, None
        self._new, self._keeps = _Version(name, version), self._on and not last

    def write(self, path: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Write contiguous CPU tensors, durably: to `path`, or as a delta beside it.

        Returns:
            Tensor name -> hash.

        Raises:
            OSError: the disk is full ...
            RunError: what was kept of the base is not what was published.
        """
        if self._base is None:
            hashes = files.write_safetensors(path, tensors)
        else:
            hashes = self._write_delta(path, files.raw_tensors(tensors), self._base)
        if self._keeps:
            self._keep(path.name, files.raw_tensors(tensors), hashes)
        return hashes

    def fields(self) -> dict[str, Any]:
        """Return what the manifest says of it: the base of a delta, and of a full version that deltas may follow."""
        if not self._keeps:
            return {}
        if self._base is None:
            return {"delta": {"base": None}}
        version = self._base.version
        described = {"branch": version.branch, "step": version.step, "hash": self._base.hash}
        return {"delta": {"base": self._base.name, **described}}

    def complete(self, content_hash: str) -> None:
        """Take the version that was begun as the base of the next: it is published, with that hash."""
        assert self._new is not None
        self._since_full = 0 if self._base is None else self._since_full + 1
        self._complete = _Version(self._new.name, self._new.version, content_hash) if self._keeps else None

    def _write_delta(self, path: Path, tensors: Mapping[str, RawTensor], base: _Version) -> dict[str, str]:
        assert self._new is not None
        path = path.with_suffix(SUFFIX)
        kept = self._files[path.stem]
        delta = encode(kept, tensors, path, base_version=base.version, version=self._new.version, threads=self._threads)
        fsync(path)
        if {name: entry.base for name, entry in delta.entries.items()} != self._hashes[path.stem]:
            raise RunError(f"what is in memory of {base.name} is not what was published: this machine is at fault")
        return delta.hashes

    def _keep(self, name: str, tensors: Mapping[str, RawTensor], hashes: dict[str, str]) -> None:
        stem = Path(name).stem
        kept = self._files.setdefault(stem, {})
        for tensor, new in tensors.items():
            if tensor in kept:
                np.copyto(kept[tensor].data, new.data)
            else:
                kept[tensor] = RawTensor(new.dtype, new.shape, new.data.copy())
        self._hashes[stem] = hashes
