"""Reads the index of one of several relays, and changes to another one if it has had nothing new for seconds.

A mirror that has lost the connection to its own source, or its files, still answers. While a process of the run lives,
its heartbeat changes the index of every relay that still receives it.
"""

import time

from loguru import logger

from prime_rl.relay.relay_client import RelayClient
from prime_rl.relay.run_files import ArtifactName, RelayIndex, Writer, is_small_file

_Part = dict[str, str]


class IndexReader:
    """Reads the index of the relays of `client`, of which only what `writer` writes matters."""

    def __init__(self, client: RelayClient, writer: Writer, silence_seconds: float, pause_seconds: float) -> None:
        """After `silence_seconds` without a change the other relays are asked, every `pause_seconds`."""
        self._client, self._writer = client, writer
        self._silence_seconds, self._pause_seconds = silence_seconds, pause_seconds
        self._current: _Part = {}
        self._others = dict[str, _Part]()
        """What the other relays had when they were asked first, since the last change."""
        self._next_question = time.monotonic() + silence_seconds

    async def read(self) -> RelayIndex:
        """Return an index. Raises RelayError if no relay sends one."""
        index = await self._client.index()
        now = time.monotonic()
        if (part := self._part(index)) != self._current:
            self._current, self._others, self._next_question = part, {}, now + self._silence_seconds
        elif now >= self._next_question:
            index = await self._ask_others() or index
            self._next_question = time.monotonic() + self._pause_seconds
        return index

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
