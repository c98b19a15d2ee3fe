"""Reads from relays: the index, and artifacts, which appear complete or not at all (I4).

All relays of a client have the same files. Each file of an artifact comes from one of them; if that relay fails, the
next one continues at the same byte. Partial files survive the process, and are completed by the next attempt.
"""

import asyncio
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self, TypeVar

import aiohttp
import msgspec
from loguru import logger

from prime_rl.core.errors import RunError
from prime_rl.core.os_errors import summarize_os_error
from prime_rl.relay.run_files import (
    FORMAT,
    MAX_MANIFEST_BYTES,
    ArtifactListing,
    ArtifactName,
    FileDigest,
    RelayIndex,
    listed_files,
)
from prime_rl.storage.artifact import MANIFEST, fsync
from prime_rl.storage.checkpoint_artifacts import hash_file

_CONNECT_SECONDS = 5.0
_SILENCE_SECONDS = 10.0
"""A relay that sends nothing for so long is given up for the file, which continues from the next one, or the index."""
_LISTING_SECONDS = 60.0
"""The same for a listing, for which a relay reads all files of the artifact; it remembers their hashes."""
_OTHERS_SECONDS = 0.5
"""After the first listing, others are waited for so long; these relays then share the work."""
_BLOCK_BYTES = 1 << 20
_NUM_PARALLEL_FILES = 4
_ROUNDS = 2
"""Attempts at each relay without a new byte, after which a file fails."""
PARTIAL = ".relay-"
"""Prefix of the folders of incomplete artifacts."""

_T = TypeVar("_T")


class RelayError(RunError):
    """A relay sent something else than it announced; the message names the file."""


class RelayUnreachable(RelayError):
    """No relay answers; a later attempt may succeed."""


class ArtifactGone(RelayError):
    """No relay has the artifact, (any more or yet)."""


class RelayClient:
    """The relays at some URLs. Use as an async context manager."""

    _session: aiohttp.ClientSession

    def __init__(self, urls: Sequence[str], api_key: str | None) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(None, sock_connect=_CONNECT_SECONDS, sock_read=_SILENCE_SECONDS)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def index(self) -> RelayIndex:
        """Return the index of the first relay that sends one, which is asked first from then on.

        Raises RelayUnreachable if none answers, or RelayError for an answer that cannot be used.
        """
        errors = list[RelayError]()
        for url in list(self._urls):
            try:
                index = await self._index(url)
            except RelayError as error:
                errors.append(error)
                self._urls.remove(url)
                self._urls.append(url)
                continue
            for refusal in errors:
                if not isinstance(refusal, RelayUnreachable):
                    logger.warning("{}; another relay has answered", refusal)
            return index
        raise _reason(errors, len(self._urls), "")

    async def other_indexes(self) -> dict[str, RelayIndex]:
        """Return the indexes of the relays that are not asked first, by URL; without those that send none."""
        urls = self._urls[1:]
        answers = await asyncio.gather(*map(self._index, urls), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, RelayError):
                raise answer
        return {url: index for url, index in zip(urls, answers, strict=True) if isinstance(index, RelayIndex)}

    def prefer(self, url: str) -> str:
        """Ask the relay at `url` first from now on; return the one that was asked first."""
        first = self._urls[0]
        self._urls.remove(url)
        self._urls.insert(0, url)
        return first

    async def _index(self, url: str) -> RelayIndex:
        index = await self._get(url, "index", RelayIndex, _SILENCE_SECONDS)
        if index.format != FORMAT:
            raise RelayError(f"{url} has format {index.format!r}, expected {FORMAT!r}")
        return index

    async def listing(
        self, name: ArtifactName, accepts: Callable[[ArtifactListing], bool] = lambda listing: True
    ) -> tuple[ArtifactListing, list[str]]:
        """Return the first listing of an artifact that `accepts` accepts, and the URLs of the relays that have it.

        All relays are asked at once; those that answer much later than the first one are left out.

        Raises:
            ArtifactGone: no relay has such an artifact.
            RelayUnreachable: no relay answers.
            RelayError: an answer cannot be used.
        """
        tasks = {asyncio.ensure_future(self._list(url, name)): url for url in self._urls}
        found, errors = dict[str, ArtifactListing](), list[RelayError]()
        pending, timeout_s = set(tasks), None
        try:
            while pending:
                done, pending = await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    try:
                        if accepts(listing := await task):
                            found[tasks[task]] = listing
                    except RelayError as error:
                        errors.append(error)
                if found and not done:
                    break
                timeout_s = _OTHERS_SECONDS if found else None
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        if not found:
            raise _reason(errors, len(tasks), f"{', '.join(tasks.values())}: {name} is not there")
        first = next(iter(found.values()))
        return first, [url for url, other in found.items() if other == first]

    async def _list(self, url: str, name: ArtifactName) -> ArtifactListing:
        listing = await self._get(url, f"artifacts/{name}", ArtifactListing, _LISTING_SECONDS)
        with _well_formed(url, f"artifacts/{name}"):
            if {file: entry.size for file, entry in listing.files.items()} != listed_files(listing.manifest):
                raise ValueError("its files are not those of its manifest")
        return listing

    async def fetch(
        self,
        name: ArtifactName,
        target: Path,
        digest: str | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy an artifact to the directory `target`, which is replaced if it exists.

        Args:
            name: the artifact.
            target: where it appears, by a rename, when all files have the announced hashes.
            digest: hash of its manifest; None takes what the first relay has.
            check: called after each block; raises to abort. What was read is kept.

        Raises:
            RelayError: also ArtifactGone and RelayUnreachable, as `listing`.
            OSError: the disk is full, or another error of the file system.
        """
        listing, urls = await self.listing(name, lambda listing: listing.digest == (digest or listing.digest))
        partial = target.parent / f"{PARTIAL}{target.name}-{listing.digest[:12]}"
        await asyncio.to_thread(partial.mkdir, parents=True, exist_ok=True)
        waiting = list(enumerate(sorted(listing.files)))

        async def work() -> None:
            while waiting:
                number, file = waiting.pop(0)
                sources = [urls[(number + i) % len(urls)] for i in range(len(urls))]
                await self._fetch_file(sources, f"files/{name}/{file}", listing.files[file], partial / file, check)

        tasks = [asyncio.ensure_future(work()) for _ in range(min(_NUM_PARALLEL_FILES, len(waiting)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(_commit, partial, target, listing.manifest)

    async def _fetch_file(
        self, urls: Sequence[str], path: str, expected: FileDigest, target: Path, check: Callable[[], None]
    ) -> None:
        """Append to `target` until it has the expected size, and check its hash."""
        failures = list[str]()
        while len(failures) < _ROUNDS * len(urls):
            url = urls[len(failures) % len(urls)]
            before, problem = _size(target), ""
            try:
                if before < expected.size:
                    await self._append(f"{url}/{path}", max(before, 0), expected.size, target, check)
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                problem = f": {_summarize(error)}"
            if (size := _size(target)) >= expected.size:
                if await asyncio.to_thread(hash_file, target) == expected.hash:
                    return
                failures.append(f"{url}/{path} has another hash than announced")
                target.unlink()
                continue
            if size > before:
                failures.clear()
            failures.append(f"{url}/{path}" + (problem or f" ended after {size} of {expected.size} bytes"))
        raise RelayUnreachable(failures[-1])

    async def _append(self, url: str, begin: int, size: int, target: Path, check: Callable[[], None]) -> None:
        """Append what arrives of a file from byte `begin`, also if the connection is lost then."""
        headers = {"Range": f"bytes={begin}-"} if begin else {}
        async with self._session.get(url, headers=headers, allow_redirects=False) as response:
            if response.status != 200 and (response.status != 206 or not begin):
                raise aiohttp.ClientPayloadError(f"status {response.status}")
            if response.status == 200:  # a proxy may ignore `Range`
                begin = 0
            with target.open("ab" if begin else "wb") as output:
                block = bytearray()
                try:
                    async for chunk in response.content.iter_any():
                        if begin + len(block) + len(chunk) > size:
                            raise aiohttp.ClientPayloadError(f"more than the announced {size} bytes")
                        block += chunk
                        if len(block) >= _BLOCK_BYTES:
                            full, block = block, bytearray()
                            begin += await asyncio.to_thread(output.write, full)
                            check()
                finally:
                    output.write(block)
        check()

    async def _get(self, url: str, path: str, kind: type[_T], silence_seconds: float) -> _T:
        """Get and decode one JSON object."""
        timeout = aiohttp.ClientTimeout(None, sock_connect=_CONNECT_SECONDS, sock_read=silence_seconds)
        try:
            async with self._session.get(f"{url}/{path}", allow_redirects=False, timeout=timeout) as response:
                if response.status == 404:
                    raise ArtifactGone(f"{url}/{path} is not there")
                if response.status in (401, 403):
                    raise RelayError(f"{url} refuses the request: {(await response.text())[:200]}")
                if response.status != 200:
                    raise RelayUnreachable(f"{url}/{path} answered with status {response.status}")
                content = bytearray()
                async for chunk in response.content.iter_any():
                    content += chunk
                    if len(content) > MAX_MANIFEST_BYTES:
                        raise RelayError(f"{url}/{path} is longer than {MAX_MANIFEST_BYTES} bytes")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RelayUnreachable(f"{url} does not answer: {_summarize(error)}") from None
        with _well_formed(url, path):
            return msgspec.json.decode(content, type=kind)


@contextmanager
def _well_formed(url: str, path: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise RelayError(f"{url}/{path} is malformed: {error}") from None


def _reason(errors: Sequence[RelayError], num_relays: int, absence: str) -> RelayError:
    """The error of an index or a listing that no relay has sent."""
    others = [error for error in errors if not isinstance(error, ArtifactGone | RelayUnreachable)]
    if others:
        return others[0]
    if sum(isinstance(error, RelayUnreachable) for error in errors) == num_relays:
        return RelayUnreachable("; ".join(map(str, errors)))
    return ArtifactGone(absence)


def _size(file: Path) -> int:
    """Return the size of a file; -1 if it does not exist."""
    return file.stat().st_size if file.exists() else -1


def _summarize(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    return summarize_os_error(error) if isinstance(error, OSError) else str(error) or type(error).__name__


def _commit(partial: Path, target: Path, manifest: str) -> None:
    """Replace `target` by the complete artifact in `partial`."""
    (partial / MANIFEST).write_text(manifest)
    for file in partial.iterdir():
        fsync(file)
    fsync(partial)
    replaced = target.with_name(f"{PARTIAL}replaced-{target.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    partial.rename(target)
    fsync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)
