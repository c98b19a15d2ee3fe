"""The published versions in `weights/`: which are valid, and which can be deleted.

Threads read the directory, so a network file system that hangs does not block the event loop.
"""

import asyncio
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from loguru import logger

from prime_rl.core.errors import RunError, summarize_exception
from prime_rl.core.types import PolicyVersion
from prime_rl.storage.artifact import (
    MANIFEST,
    WEIGHTS_FORMAT,
    ArtifactError,
    read_manifest,
    retry_until_complete,
    visibility_timeout,
)
from prime_rl.storage.paths import RunPaths, step_of, steps_in
from prime_rl.storage.wait_for import run_in_daemon_thread
from prime_rl.storage.weights.weight_retention import remove_old_versions


class InvalidWeights(RunError):
    """A published version that must not be sampled from; the message names the file and the defect."""


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """A published version: the directory of its manifest, and the content hash of its weights.

    If `is_in_memory`, the weights are only in the trainer's memory, and only until a newer version is published.
    """

    directory: Path
    version: PolicyVersion
    hash: str
    is_in_memory: bool = False

    @classmethod
    def read(cls, directory: Path, timeout_seconds: float = 0.0) -> "PublishedVersion":
        """Read the manifest of `directory` and check the sizes of the files; retry for `timeout_seconds` seconds.

        Raises InvalidWeights if the manifest or a file is missing or wrong.
        """
        try:
            manifest = retry_until_complete(partial(read_manifest, directory, WEIGHTS_FORMAT), timeout_seconds)
            version = PolicyVersion(int(manifest["branch"]), int(manifest["step"]))
            content = str(manifest["hash"])
        except ArtifactError as error:
            raise InvalidWeights(str(error)) from None
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise InvalidWeights(f"{directory / MANIFEST} cannot be read: {summarize_exception(error)}") from None
        if version.step != step_of(directory):
            raise InvalidWeights(f"{directory / MANIFEST} declares step {version.step}")
        return cls(directory, version, content, manifest.get("transfer") is not None)


class WeightVersions:
    """The published versions of a run. With `on_refused = fail` an invalid version ends the run."""

    def __init__(self, paths: RunPaths, on_refused: Literal["fail", "keep_previous"]) -> None:
        self.steps: list[int] = []
        """At the last `refresh`, ascending."""
        self.refused: dict[int, InvalidWeights] = {}
        """By the step of the invalid version."""
        self.paths = paths
        self._on_refused = on_refused
        self._kept = Counter[int]()
        self._lock = asyncio.Lock()

    @property
    def newest(self) -> int | None:
        """The newest valid version at the last `refresh`."""
        return max((step for step in self.steps if step not in self.refused), default=None)

    async def refresh(self) -> None:
        """List the versions. The lock keeps an older listing from replacing a newer one."""
        async with self._lock:
            self.steps = await run_in_daemon_thread(steps_in, self.paths.weights_dir)

    def read(self, step: int) -> PublishedVersion:
        """Read a version's manifest; raises InvalidWeights. Blocks."""
        directory = self.paths.weights(step)
        timeout_seconds = visibility_timeout(directory, self.paths.fs_consistency_timeout_seconds)
        return PublishedVersion.read(directory, timeout_seconds)

    async def refuse(self, step: int, error: InvalidWeights) -> bool:
        """Mark a version as invalid, or raise `error` if that ends the run.

        Returns False if it only disappeared, so that the error does not count.
        """
        await self.refresh()
        if step not in self.steps or await self._is_outdated(step):  # archived by a rollback, or replaced in memory
            logger.warning("version {} is no longer available: {}", step, error)
            return False
        if self._on_refused == "fail":
            raise error
        if step not in self.refused:
            logger.warning("rejected weights version {}; keeping the previous version: {}", step, error)
        self.refused[step] = error
        return True

    def retain_files(self, step: int) -> None:
        """Keep the files of a version until `release_files`."""
        self._kept[step] += 1

    def release_files(self, step: int) -> None:
        """Undo one `retain_files`."""
        self._kept[step] -= 1

    async def clean(self, oldest_sampled: int, loading: Collection[int]) -> None:
        """Delete the versions below `oldest_sampled` that are neither retained nor in `loading`."""
        needed = {*loading, *(step for step, count in self._kept.items() if count)}
        try:
            await asyncio.to_thread(remove_old_versions, self.paths.weights_dir, oldest_sampled, needed)
        except OSError as error:
            logger.warning("cannot delete an old version, will retry at the next switch: {}", error)

    async def _is_outdated(self, step: int) -> bool:
        """Return whether the version was in the trainer's memory and a newer one replaced it."""
        with suppress(InvalidWeights):
            published = await run_in_daemon_thread(PublishedVersion.read, self.paths.weights(step))
            return published.is_in_memory and (self.newest or step) > step
        return False
