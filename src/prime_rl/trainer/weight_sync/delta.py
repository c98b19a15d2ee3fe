"""Versions as deltas against the previous one: full, delta, delta, ..., full. First and last version are full."""

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from prime_rl.core.errors import RunError
from prime_rl.core.types import PolicyVersion
from prime_rl.storage.artifact import fsync
from prime_rl.storage.delta.chain import SUFFIX, DeltaBase
from prime_rl.storage.delta.tensor_codec import encode_delta
from prime_rl.storage.tensor_hashes import RawTensor
from prime_rl.trainer.weight_sync.filesystem import FilesystemTransport
from prime_rl.trainer.weight_sync.transport import PieceExchange, raw_tensors

_MAX_THREADS = 8


class DeltaTransport(FilesystemTransport):
    """Writes every `full_interval`-th version in full, and the others as deltas.

    Every rank keeps a copy of the tensors that it wrote. The copy becomes the base of the next delta when its version
    is complete; after an error the next version is therefore full.
    """

    num_versions = 3  # two full versions, and the deltas between them

    def __init__(self, full_interval: int, exchange: PieceExchange) -> None:
        super().__init__(exchange)
        self._interval = full_interval
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", exchange.world.size))
        self._threads = min(_MAX_THREADS, max(1, (os.cpu_count() or 1) // 2 // local_ranks))
        self._kept: dict[str, dict[str, RawTensor]] = {}
        self._hashes: dict[str, dict[str, str]] = {}
        self._complete: DeltaBase | None = None
        self._base: DeltaBase | None = None
        self._current: DeltaBase | None = None
        self._is_last = False
        self._since_full = 0

    def begin(self, name: str, version: PolicyVersion, last: bool) -> None:
        """Decide whether the version becomes a delta."""
        as_delta = not last and self._since_full + 1 < self._interval
        self._base, self._complete = self._complete if as_delta else None, None
        self._current, self._is_last = DeltaBase(name, version, hash=""), last
        self.is_delta = self._base is not None

    def write_tensors(self, path: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Write the tensors to `path`, or their delta beside it; return the hashes of the tensors.

        Raises OSError, or RunError if the kept copy of the base is not what was published.
        """
        raw = raw_tensors(tensors)
        if self._base is None:
            hashes = super().write_tensors(path, tensors)
        else:
            hashes = self._write_delta(path, raw, self._base)
        if not self._is_last:
            kept = self._kept.setdefault(path.stem, {})
            for name, new in raw.items():
                if name in kept:
                    np.copyto(kept[name].data, new.data)
                else:
                    kept[name] = RawTensor(new.dtype, new.shape, new.data.copy())
            self._hashes[path.stem] = hashes
        return hashes

    def manifest_fields(self) -> dict[str, Any]:
        """Describe the base of a delta; None for a full version that deltas may follow."""
        if self._is_last:
            return {}
        if self._base is None:
            return {"delta": {"base": None}}
        return {"delta": {"base": self._base.name, **asdict(self._base.version), "hash": self._base.hash}}

    def complete(self, content_hash: str) -> None:
        """Make the version the base of the next delta."""
        assert self._current is not None
        self._since_full = 0 if self._base is None else self._since_full + 1
        self._complete = None if self._is_last else replace(self._current, hash=content_hash)

    def _write_delta(self, path: Path, tensors: Mapping[str, RawTensor], base: DeltaBase) -> dict[str, str]:
        assert self._current is not None
        path = path.with_suffix(SUFFIX)
        kept, version = self._kept[path.stem], self._current.version
        delta = encode_delta(kept, tensors, path, base.version, version, self._threads)
        fsync(path)
        if {name: entry.base for name, entry in delta.entries.items()} != self._hashes[path.stem]:
            raise RunError(
                f"the copy of {base.name} in memory is not what was published; check this machine's memory for errors"
            )
        return delta.hashes
