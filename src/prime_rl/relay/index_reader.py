"""Reads the index of one of several relays, and changes to another one if it has had nothing new for seconds.

A mirror that has lost the connection to its own source, or its files, still answers. While a process of the run lives,
its heartbeat changes the index of every relay that still receives it. Such a mirror may also be from before a rollback,
so an index of an earlier branch is used only after it has changed: then it belongs to a new run.
"""

import time

from loguru import logger

from prime_rl.relay.relay_client import RelayClient
from prime_rl.relay.run_files import RESUME_FILE, ArtifactName, RelayIndex, Writer, is_small_file, parse_resume

_Part = dict[str, str]


class IndexReader:
    """Reads the index of the relays of `client`, of which only what `writer` writes matters."""

    def __init__(
        self, client: RelayClient, writer: Writer, silence_seconds: float, pause_seconds: float, branch: int = 0
    ) -> None:
        """After `silence_seconds` without a change the other relays are asked, every `pause_seconds`.

        `branch` is that of what has been copied before.
        """
        self._client, self._writer, self._branch = client, writer, branch
        self._silence_seconds, self._pause_seconds = silence_seconds, pause_seconds
        self._current: _Part = {}
        self._others = dict[str, _Part]()
        """What the other relays had when they were asked first, since the last change."""
        self._earlier: _Part | None = None
        """What a relay had of an earlier branch when it was asked first."""
        self._next_question = time.monotonic() + silence_seconds

    async def read(self) -> RelayIndex | None:
        """Return an index, or None if it may be from before a rollback. Raises RelayError if no relay sends one."""
        index = await self._client.index()
        part, now = self._part(index), time.monotonic()
        is_usable = self._is_usable(part)
        if is_usable and part != self._current:
            self._current, self._others, self._next_question = part, {}, now + self._silence_seconds
        elif now >= self._next_question:
            other = await self._ask_others()
            self._next_question = time.monotonic() + self._pause_seconds
            if other is not None:
                return other
        return index if is_usable else None

    def _is_usable(self, part: _Part) -> bool:
        resume = parse_resume(part.get(RESUME_FILE))
        branch = resume.branch if resume is not None else 0
        if branch < self._branch and self._earlier in (None, part):
            self._earlier = part
            return False
        self._branch, self._earlier = branch, None
        return True

    async def _ask_others(self) -> RelayIndex | None:
        """Return the index of a relay that has changed since it was asked before, and ask that relay from now on."""
        for url, index in (await self._client.other_indexes()).items():
            part = self._part(index)
            if self._others.setdefault(url, part) != part != self._current:
                silent = self._client.prefer(url)
                logger.warning("{} has had nothing new of the {}; continuing with {}", silent, self._writer, url)
                return index
        return None

    def _part(self, index: RelayIndex) -> _Part:
        files = {name: text for name, text in index.files.items() if is_small_file(name, self._writer)}
        return files | {name: digest for name, digest in index.artifacts.items() if _writer_of(name) == self._writer}


def _writer_of(name: str) -> Writer | None:
    try:
        return ArtifactName.parse(name).writer
    except ValueError:  # of a newer relay
        return None
