"""What is published in `weights/`, what of it is refused, and what of it may be deleted."""

import asyncio
from collections import Counter
from collections.abc import Collection
from typing import Literal

from loguru import logger

from prime_rl.orchestrator.server import Published, VersionRefused
from prime_rl.run.cleaning import clean
from prime_rl.run.paths import RunPaths, steps_in
from prime_rl.run.visibility import patience


class Publications:
    """The published versions of a run, by step.

    Attributes:
        steps: those that were there at the last look, ascending.
        refused: why, of those that were refused.
    """

    def __init__(self, paths: RunPaths, on_refused: Literal["end", "keep"]) -> None:
        """Look at the run at `paths`; `on_refused` says whether a refused version ends the run."""
        self.steps: list[int] = []
        self.refused: dict[int, VersionRefused] = {}
        self._paths = paths
        self._on_refused = on_refused
        self._kept = Counter[int]()

    @property
    def newest(self) -> int | None:
        """The newest version that is not refused, as of the last look."""
        return max((step for step in self.steps if step not in self.refused), default=None)

    def look(self) -> None:
        """See what is there now."""
        self.steps = steps_in(self._paths.weights_dir)

    def read(self, step: int) -> Published:
        """Read a version's manifest, which may take a while over a network; raises VersionRefused."""
        directory = self._paths.weights(step)
        return Published.read(directory, patience(directory, self._paths.visibility_s))

    def between(self, older: int, newer: int) -> int:
        """Count what was there to be sampled from between two versions."""
        return sum(older < step < newer and step not in self.refused for step in self.steps)

    def refuse(self, step: int, error: VersionRefused) -> bool:
        """Note that a version is not to be asked for again; False if it was only too late for it.

        Raises:
            VersionRefused: `error`, where a refusal ends the run.
        """
        self.look()
        if step not in self.steps or self._came_too_late(step):  # put aside by a trainer that goes back, or overtaken
            logger.warning("version {} is gone, or gives way to a newer one: {}", step, error)
            return False
        if self._on_refused == "end":
            raise error
        if step not in self.refused:
            logger.warning("version {} is refused, and done without: {}", step, error)
        self.refused[step] = error
        return True

    def keep_files(self, step: int) -> None:
        """Keep the files of a version until `free_files`, whatever the servers sample from."""
        self._kept[step] += 1

    def free_files(self, step: int) -> None:
        """Take one `keep_files` back."""
        self._kept[step] -= 1

    async def clean(self, oldest_sampled: int, loading: Collection[int]) -> None:
        """Delete the versions that nobody can need any more; what cannot be deleted now is tried next time.

        Args:
            oldest_sampled: the oldest version that a server samples from.
            loading: those that servers are being switched to.
        """
        needed = {*loading, *(step for step, count in self._kept.items() if count)}
        try:
            await asyncio.to_thread(clean, self._paths.weights_dir, oldest_sampled, needed)
        except OSError as error:
            logger.warning("an old version cannot be deleted: {}", error)

    def _came_too_late(self, step: int) -> bool:
        """Tell whether the version was in memory, where it is no more once newer ones are published."""
        self.look()
        try:
            published = Published.read(self._paths.weights(step))
        except VersionRefused:
            return False
        return published.is_in_memory and (self.newest or step) > step
