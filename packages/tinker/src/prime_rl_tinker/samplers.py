"""Sampling from the base model and from adapters that the inference server loads when they are used."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from prime_rl.core.retries import Retries, growing_pauses
from prime_rl.storage.artifact import MANIFEST

_ATTEMPTS, _MAX_LOST = 3, 2
"""Of a request, and how many of them may lose the server: it may end during the first one, and not have the adapter for
the second. A request that ends the server must not use up its restarts."""
_RESTART_SECONDS = 600
_EMPTY = (0, -99999.0)
"""Token and log-probability of an empty cell of top-k log-probabilities."""


class SamplingError(Exception):
    """The inference server refused a request; `status` is its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class _Loaded:
    """An adapter on the server."""

    name: str
    loading: asyncio.Task[None]
    uses: int = 0

    @property
    def failed(self) -> bool:
        """Whether the server refused it, or was lost."""
        return self.loading.done() and self.loading.exception() is not None


_Key: TypeAlias = tuple[Path, int, int]


def _key(folder: Path) -> _Key:
    """Return what identifies an adapter: its folder and the file of its manifest, as a save may replace the folder."""
    with suppress(OSError):  # there is none: the server refuses the adapter
        found = (folder / MANIFEST).stat()
        return folder, found.st_ino, found.st_mtime_ns
    return folder, 0, 0


class Samplers:
    """Adapters on the inference server: at most `capacity`, the least recently used one makes room.

    Adapters are immutable folders, which are replaced as a whole, so one with the same manifest is the same when it is
    loaded again. While all are in use, a request for another one waits.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, base_name: str, capacity: int) -> None:
        self._session, self._url, self._base_name, self._capacity = session, url, base_name, capacity
        self._loaded: OrderedDict[_Key, _Loaded] = OrderedDict()  # the least recently used first
        self._changed = asyncio.Condition()
        self._leaving: list[str] = []  # adapters that the server may have and are in no entry
        self._number = 0

    async def sample(self, folder: Path | None, body: dict[str, Any]) -> dict[str, Any]:
        """Answer a request for completions from an adapter, or from the base model without `folder`.

        Raises SamplingError if the server refuses the request.
        """
        num_lost = 0
        for left in reversed(range(_ATTEMPTS)):
            try:
                return await self._sample_once(folder, body)
            except SamplingError as error:
                is_missing = error.status == 404
                num_lost += not is_missing
                if not left or num_lost == _MAX_LOST or (400 <= error.status < 500 and not is_missing):
                    raise
                await self._wait_for_server()  # it was restarted, or will be
        raise AssertionError("unreachable")

    async def _sample_once(self, folder: Path | None, body: dict[str, Any]) -> dict[str, Any]:
        if folder is None:
            return await self._post("/v1/completions", {**body, "model": self._base_name})
        async with self._use(folder) as adapter:
            return await self._post("/v1/completions", {**body, "model": adapter.name})

    @asynccontextmanager
    async def _use(self, folder: Path) -> AsyncIterator[_Loaded]:
        key = _key(folder)
        async with self._changed:
            await self._changed.wait_for(lambda: key in self._loaded or self._has_room())
            if key not in self._loaded:
                self._number += 1
                name, replaced = f"sampler-{self._number}", self._make_room()
                # Requests from other adapters do not wait for it.
                loading = asyncio.ensure_future(self._load(folder, name, replaced))
                self._loaded[key] = _Loaded(name, loading)
            entry = self._loaded[key]
            self._loaded.move_to_end(key)
            entry.uses += 1
        try:
            await asyncio.shield(entry.loading)
            yield entry
        except SamplingError as error:
            if (error.status == 404 or entry.failed) and self._loaded.get(key) is entry:
                del self._loaded[key]
            raise
        finally:
            entry.uses -= 1
            async with self._changed:
                self._changed.notify_all()

    def _has_room(self) -> bool:
        return len(self._loaded) < self._capacity or not all(entry.uses for entry in self._loaded.values())

    def _make_room(self) -> str | None:
        """Return the name of the adapter that makes room, if one must."""
        if self._leaving:
            return self._leaving.pop()
        if len(self._loaded) < self._capacity:
            return None
        return self._loaded.pop(next(key for key, entry in self._loaded.items() if not entry.uses)).name

    async def _load(self, folder: Path, name: str, replaced: str | None) -> None:
        retries = Retries(growing_pauses(0.2, 3))
        while True:
            if replaced is not None:
                # Refused if the server was restarted, or while it aborts requests of a client that has ended.
                with suppress(SamplingError):
                    await self._post("/unload_adapter", {"name": replaced})
            try:
                await self._post("/load_adapter", {"name": name, "weight_dir": str(folder), "branch": 0, "step": 0})
                return
            except SamplingError as error:
                if replaced is None or error.status >= 500 or not await retries.pause():
                    if replaced is not None:
                        self._leaving.append(replaced)
                    raise

    async def _wait_for_server(self) -> None:
        retries = Retries([1.0] * _RESTART_SECONDS)
        while True:
            with suppress(aiohttp.ClientError):
                async with self._session.get(f"{self._url}/health") as response:
                    if response.status == 200:
                        return
            if not await retries.pause():
                raise SamplingError(f"the inference server did not return within {_RESTART_SECONDS} s", 503)

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            async with self._session.post(self._url + path, json=body) as response:
                answer: dict[str, Any] = await response.json(content_type=None)
        except (aiohttp.ClientError, ValueError) as error:  # the latter: half an answer
            raise SamplingError(f"the inference server does not answer: {error}", 503) from None
        if response.status != 200:
            said = answer.get("error", answer)
            text = said.get("message", str(said)) if isinstance(said, dict) else str(said)
            raise SamplingError(text, response.status)
        return answer


def to_response(answer: dict[str, Any], prompt: list[int], num_top: int) -> bytes:
    """Convert completions to a `SampleResponse`, with prompt log-probabilities where they were requested.

    Raises SamplingError if a log-probability is missing: no value is invented.
    """
    response = pb.SampleResponse()
    for choice in answer["choices"]:
        tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        if len(tokens) != len(logprobs) or any(value is None for value in logprobs):
            raise SamplingError("the inference server returned a token without its log-probability", 502)
        reason = pb.STOP_REASON_LENGTH if choice["finish_reason"] == "length" else pb.STOP_REASON_STOP
        response.sequences.add(
            stop_reason=reason,
            tokens=np.asarray(tokens, np.int32).tobytes(),
            logprobs=np.asarray(logprobs, np.float32).tobytes(),
        )
    entries = answer["choices"][0].get("prompt_logprobs")
    if entries is not None:
        scored = zip(entries[1:], prompt[1:], strict=True)
        values = [np.nan, *(entry[str(token)]["logprob"] for entry, token in scored)]
        response.prompt_logprobs = np.asarray(values, np.float32).tobytes()
        if num_top:
            _add_top(response, entries, num_top)
    return bytes(response.SerializeToString())


def _add_top(response: Any, entries: list[dict[str, Any] | None], num_top: int) -> None:
    """Add the `num_top` likeliest tokens of each position of the prompt."""
    tokens = np.full((len(entries), num_top), _EMPTY[0], np.int32)
    logprobs = np.full((len(entries), num_top), _EMPTY[1], np.float32)
    for position, entry in enumerate(entries):
        ranked = sorted((entry or {}).items(), key=lambda item: item[1]["rank"])[:num_top]
        for column, (token, value) in enumerate(ranked):
            tokens[position, column], logprobs[position, column] = int(token), value["logprob"]
    top = response.topk_prompt_logprobs
    top.token_ids, top.logprobs, top.k, top.length = tokens.tobytes(), logprobs.tobytes(), num_top, len(entries)
