"""Reads from relays: index, artifacts and policy versions, which appear complete or not at all (I4).

All relays of a client have the same files, but some may be damaged, slow or hostile. Each file of an artifact comes
from one relay, so a wrong hash shows which relay is wrong. A relay that fails, is slow or has sent a wrong file is
replaced by the next one, which begins at the first byte. Partial files survive the process, and are completed by the
next attempt.
"""

import asyncio
import functools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import aiohttp
import msgspec
from loguru import logger

from prime_rl.core.errors import RunError
from prime_rl.core.os_errors import summarize_os_error
from prime_rl.storage.artifact import MANIFEST, ArtifactError, fsync
from prime_rl.storage.checkpoint_artifacts import hash_file
from prime_rl.storage.delta.chain import DeltaBase, base_of
from prime_rl.storage.paths import step_of
from prime_rl.storage.relay.run_files import (
    FORMAT,
    MAX_MANIFEST_BYTES,
    ArtifactListing,
    ArtifactName,
    FileDigest,
    RelayIndex,
    RunFiles,
    listed_files,
)

_CONNECT_SECONDS = 5.0
_SILENCE_SECONDS = 10.0
"""Timeout of an index, and of a relay that sends nothing of a file."""
_LISTING_SECONDS = 60.0
"""Timeout of a listing, for which a relay reads all files of the artifact; it remembers their hashes."""
_SLOW_SECONDS, _PATIENT_SECONDS = 5.0, 60.0
"""Timeout of each MiB of a file: while other relays have not been tried, and after that."""
_OTHERS_SECONDS = 0.5
"""After the first listing, others are waited for so long; these relays then share the work."""
_BLOCK_BYTES = 1 << 20
_NUM_PARALLEL_FILES = 4
_ATTEMPTS = 2
"""Requests to a relay without a new byte, after which the next relay is asked."""
_MAX_REFUSAL_BYTES = 200
PARTIAL = ".relay-"
"""Prefix of the folders of incomplete artifacts."""

Check = Callable[[ArtifactName, str, int], None]
"""Called with an artifact, one of its files and the size of the copy; raises to abort."""
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
        self._failed = set[str]()
        """Hashes of manifests whose files could not be copied. Other manifests are preferred."""

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

    def defer(self) -> None:
        """Ask the relay last that was asked first."""
        self._urls.append(self._urls.pop(0))

    async def _index(self, url: str) -> RelayIndex:
        index = await self._get(url, "index", RelayIndex, _SILENCE_SECONDS)
        if index.format != FORMAT:
            raise RelayError(f"{url} has format {index.format!r}, expected {FORMAT!r}")
        return index

    async def listing(
        self, name: ArtifactName, accepts: Callable[[ArtifactListing], bool] = lambda listing: True
    ) -> ArtifactListing:
        """Return the first listing of an artifact that `accepts` accepts; raises as `listings`.

        One whose files could not be copied before is returned only if no relay has another one.
        """
        found = await self.listings(name, accepts)
        return next(iter(found.values()))

    async def listings(
        self, name: ArtifactName, accepts: Callable[[ArtifactListing], bool], others_seconds: float | None = None
    ) -> dict[str, ArtifactListing]:
        """Return the listings of an artifact that `accepts` accepts, by URL, the first one first.

        All relays are asked at once; those that answer `others_seconds` after the first one are left out.

        Raises:
            ArtifactGone: no relay has such an artifact.
            RelayUnreachable: no relay answers.
            RelayError: an answer cannot be used.
        """
        tasks = {asyncio.ensure_future(self._list(url, name)): url for url in self._urls}
        found, doubtful, errors = dict[str, ArtifactListing](), dict[str, ArtifactListing](), list[RelayError]()
        pending, timeout_seconds = set(tasks), None
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    try:
                        if accepts(listing := await task):
                            (doubtful if listing.digest in self._failed else found)[tasks[task]] = listing
                    except RelayError as error:
                        errors.append(error)
                if found and not done:
                    break
                timeout_seconds = (_OTHERS_SECONDS if others_seconds is None else others_seconds) if found else None
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        if not found and not doubtful:
            raise _reason(errors, len(tasks), f"{', '.join(tasks.values())}: {name} is not there")
        return found or doubtful

    async def _list(self, url: str, name: ArtifactName) -> ArtifactListing:
        listing = await self._get(url, f"artifacts/{name}", ArtifactListing, _LISTING_SECONDS)
        with _well_formed(url, f"artifacts/{name}"):
            if {file: entry.size for file, entry in listing.files.items()} != listed_files(listing.manifest):
                raise ValueError("its files are not those of its manifest")
        return listing

    async def fetch(
        self, name: ArtifactName, target: Path, digest: str | None = None, check: Check = lambda name, file, size: None
    ) -> None:
        """Copy an artifact to the directory `target`, which is replaced if it exists.

        Args:
            name: the artifact.
            target: where it appears, by a rename, when all files have the announced hashes.
            digest: hash of its manifest; None takes what the first relay has.
            check: called after each block; raises to abort. What was read is kept.

        Raises:
            RelayError: also ArtifactGone and RelayUnreachable, as `listings`.
            OSError: the disk is full, or another error of the file system.
        """

        def is_wanted(listing: ArtifactListing) -> bool:
            return digest in (None, listing.digest)

        tried = set[str]()
        failure: RelayError | None = None
        for others_seconds in (_OTHERS_SECONDS, _LISTING_SECONDS):  # if the fast relays fail, the others are waited for
            found = await self.listings(name, is_wanted, others_seconds)
            digest = next(iter(found.values())).digest
            found = {url: one for url, one in found.items() if one.digest == digest and url not in tried}
            if failure is not None and not found:
                raise failure
            try:
                await self._fetch_files(name, found, target, check)
            except RelayError as error:
                self._failed.add(digest)
                tried, failure = set(found), error
            else:
                self._failed.discard(digest)
                return
        assert failure is not None
        raise failure

    async def _fetch_files(
        self, name: ArtifactName, listings: dict[str, ArtifactListing], target: Path, check: Check
    ) -> None:
        """Copy an artifact from relays that have the same manifest, but may announce other hashes of its files."""
        listing = next(iter(listings.values()))
        partial = target.parent / f"{PARTIAL}{target.name}-{listing.digest[:12]}"
        await asyncio.to_thread(partial.mkdir, parents=True, exist_ok=True)
        urls, waiting, faults = list(listings), list(enumerate(sorted(listing.files))), Counter[str]()

        async def work() -> None:
            while waiting:
                number, file = waiting.pop(0)
                first = number % len(urls)
                announced = {url: listings[url].files[file] for url in urls[first:] + urls[:first]}
                votes = Counter(digest.hash for digest in announced.values())
                sources = sorted(announced, key=lambda url: (faults[url], -votes[announced[url].hash]))
                await self._fetch_file(
                    {url: announced[url] for url in sources}, f"files/{name}/{file}", partial / file, faults,
                    functools.partial(check, name, file),
                )  # fmt: skip

        tasks = [asyncio.ensure_future(work()) for _ in range(min(_NUM_PARALLEL_FILES, len(waiting)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(_commit, partial, target, listing.manifest)

    async def _fetch_file(
        self,
        sources: dict[str, FileDigest],
        path: str,
        target: Path,
        faults: Counter[str],
        check: Callable[[int], None],
    ) -> None:
        """Fetch a file from the first relay of `sources` that sends what it announces; counts the `faults` of others.

        What an earlier attempt left is continued once, as it may be of any relay. Raises RelayUnreachable.
        """
        turns = [(url, seconds) for seconds in (_SLOW_SECONDS, _PATIENT_SECONDS) for url in sources]
        is_of_earlier_attempt = target.exists()
        if is_of_earlier_attempt:
            turns.insert(0, turns[0])
        problem, owner, wrong = "", turns[0][0], set[str]()
        for url, seconds in turns:
            if url in wrong:
                continue
            if url != owner:
                target.unlink(missing_ok=True)
                owner, is_of_earlier_attempt = url, False
            failure = await self._complete(f"{url}/{path}", sources[url].size, target, seconds, check)
            if failure is None:
                if await asyncio.to_thread(hash_file, target) == sources[url].hash:
                    return
                failure = "has another hash than announced"
                target.unlink()
                if not is_of_earlier_attempt:
                    wrong.add(url)
                is_of_earlier_attempt = False
            faults[url] += 1
            problem = f"{url}/{path} {failure}"
            logger.debug("{}", problem)
        raise RelayUnreachable(problem)

    async def _complete(
        self, url: str, size: int, target: Path, seconds: float, check: Callable[[int], None]
    ) -> str | None:
        """Append to `target` until it has `size` bytes, with `seconds` for each MiB; returns what prevents that."""
        failure, failures = "", 0
        counted = most = before = _size(target)

        def count(here: int) -> None:
            nonlocal counted
            check(here)
            if here - counted >= _BLOCK_BYTES:
                counted = here
                limit.reschedule(asyncio.get_running_loop().time() + seconds)

        try:
            async with asyncio.timeout(seconds) as limit:
                while before != size and failures < _ATTEMPTS:
                    try:
                        await self._append(url, before if 0 < before < size else 0, size, target, count)
                        failure = ""
                    except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                        failure = f": {_summarize(error)}"
                    before = _size(target)
                    count(before)
                    failures = 0 if before > most else failures + 1
                    most = max(most, before)
        except TimeoutError:
            return f"is slow: less than 1 MiB in {seconds:g} s, {max(_size(target), 0)} of {size} bytes"
        return None if before == size else f"ended after {before} of {size} bytes{failure}"

    async def _append(self, url: str, begin: int, size: int, target: Path, count: Callable[[int], None]) -> None:
        """Append what arrives of a file from byte `begin`, also if the connection is lost then."""
        headers = {"Range": f"bytes={begin}-"} if begin else {}
        async with self._session.get(url, headers=headers, allow_redirects=False) as response:
            if response.status == 206 and begin:
                if not response.headers.get("Content-Range", "").startswith(f"bytes {begin}-"):
                    raise aiohttp.ClientPayloadError("another range than requested")
            elif response.status == 200:  # a proxy may ignore `Range`
                begin = 0
            else:
                raise aiohttp.ClientPayloadError(f"status {response.status}")
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
                            count(begin)
                finally:
                    output.write(block)

    async def _get(self, url: str, path: str, kind: type[_T], seconds: float) -> _T:
        """Get and decode one JSON object."""
        timeout = aiohttp.ClientTimeout(seconds, sock_connect=_CONNECT_SECONDS)
        try:
            async with self._session.get(f"{url}/{path}", allow_redirects=False, timeout=timeout) as response:
                if response.status == 404:
                    raise ArtifactGone(f"{url}/{path} is not there")
                if response.status in (401, 403):
                    reason = (await response.content.read(_MAX_REFUSAL_BYTES)).decode(errors="replace")
                    raise RelayError(f"{url} refuses the request: {reason}")
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


async def download_version(
    client: RelayClient,
    files: RunFiles,
    name: ArtifactName,
    digest: str | None = None,
    check: Check = lambda name, file, size: None,
) -> list[ArtifactName]:
    """Copy the version `name`, after the bases that are missing here; return it and its bases, the newest first.

    Args:
        client: the relays.
        files: the directory to copy to.
        name: the version.
        digest: hash of its manifest; None takes what the first relay has.
        check: called after each block of a copy; raises to abort.

    Raises:
        RelayError, OSError: as `RelayClient.fetch`.
    """
    chain, missing = list[ArtifactName](), list[tuple[ArtifactName, str]]()
    base: DeltaBase | None = None
    while True:
        directory = files.path(name)
        text = _read_held(files, name, digest, base)
        if text is None:
            listing = await client.listing(name, functools.partial(_is_wanted, digest=digest, base=base))
            text = listing.manifest
            missing.append((name, listing.digest))
        chain.append(name)
        base = _base(directory, text)
        if base is None:
            break
        step = step_of(Path(base.name))
        assert step is not None, base  # `base_of` checks the name
        name, digest = ArtifactName("weights", step), None
    for wanted, expected in reversed(missing):
        await client.fetch(wanted, files.path(wanted), expected, check)
    return chain


def _read_held(files: RunFiles, name: ArtifactName, digest: str | None, base: DeltaBase | None) -> str | None:
    """Return the manifest of the requested version, if it is here: the one with `digest`, or the `base` of a delta."""
    held = files.manifest_digest(name)
    if held is None or (base is None and held != digest):
        return None
    text = (files.path(name) / MANIFEST).read_text()
    return text if base is None or _is_base(text, base) else None


def _is_wanted(listing: ArtifactListing, digest: str | None, base: DeltaBase | None) -> bool:
    """Whether a relay has the requested version; None accepts any."""
    return digest in (None, listing.digest) and (base is None or _is_base(listing.manifest, base))


def _is_base(manifest: str, base: DeltaBase) -> bool:
    """Whether a version is the base of the delta, and not one that a rollback has abandoned."""
    fields: Any = json.loads(manifest)
    found = (fields.get("branch"), fields.get("step"), fields.get("hash"))
    return found == (base.version.branch, base.version.step, base.hash)


def _base(directory: Path, manifest: str) -> DeltaBase | None:
    try:
        return base_of(directory, json.loads(manifest))
    except (ArtifactError, ValueError) as error:
        raise RelayError(f"the manifest of {directory} is malformed: {error}") from None
