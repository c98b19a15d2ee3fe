"""Writes warnings about failing groups to a file that `rl` shows on the console."""

import asyncio
import json
import time
from collections import Counter
from pathlib import Path

from loguru import logger


class FailureWarnings:
    """Writes a warning for the 1st, 10th, 100th ... group that fails in an environment, one JSON object a line.

    {"time": unix s, "env": ..., "num_failed": ..., "text": ...}
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed = Counter[str]()
        self._due: list[str] = []
        self._writing: asyncio.Task[None] | None = None

    def add(self, env: str, group: str, failure: str, outlook: str) -> None:
        """Count a failed group, and write a warning if it is due; `outlook` describes what happens next."""
        self._failed[env] += 1
        count = self._failed[env]
        if str(count).strip("0") != "1":
            return
        which = f"{group} failed" if count == 1 else f"{count} groups failed so far, the last is {group}"
        text = f"environment {env}: {which}: {failure}; {outlook}"
        self._due.append(json.dumps({"time": time.time(), "env": env, "num_failed": count, "text": text}))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def close(self) -> None:
        """Wait until all warnings are written."""
        if self._writing is not None:
            await self._writing

    async def _write(self) -> None:
        while self._due:
            lines, self._due = self._due, []
            try:
                await asyncio.to_thread(self._append, lines)
            except OSError as error:  # the failure is also in the log
                logger.warning("{} cannot be written: {}", self._path, error.strerror)

    def _append(self, lines: list[str]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
