"""Copies what one process writes from relays into a run directory, and repeats the deletions of its readers.

Each poll reads the index and applies it in this order: obsolete copies are removed, small files are replaced, missing
artifacts are copied. Heartbeats therefore arrive while a large version is copied, and no process reads `RESUME.json`
of a rollback next to versions that the rollback has abandoned.

A copy of a version is obsolete if its manifest is another one now, or if the relay does not have it any more: because
it has a newer one, or because a rollback has abandoned it. A relay that has lost its files deletes nothing here.
"""

import asyncio
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from loguru import logger

from prime_rl.core.os_errors import is_system_resource_error
from prime_rl.storage.artifact import replace_file
from prime_rl.storage.batch import ROWS_FILE
from prime_rl.storage.checkpoint_artifacts import COMMITTED, ResumeRecord
from prime_rl.storage.relay.relay_client import (
    PARTIAL,
    ArtifactGone,
    RelayClient,
    RelayError,
    RelayUnreachable,
    download_version,
)
from prime_rl.storage.relay.run_files import (
    RESUME_FILE,
    ArtifactName,
    RelayIndex,
    RunFiles,
    Writer,
    branch_of,
    is_small_file,
    parse_resume,
)
from prime_rl.storage.weights.weight_retention import remove_if_free

_PAUSE_SECONDS = 1.0
"""Pause after a failed copy, and between questions to other relays."""
_WARN_SECONDS = 5.0
"""A relay that is silent for so long is reported; if it has had nothing new, the others are asked."""


_Part = dict[str, str]


@dataclass
class _Silence:
    """Logs once that no relay answers, and once that one answers again."""

    writer: Writer
    since: float
    is_reported: bool = False

    def end(self) -> None:
        """Record an answer of a relay; log it if the silence was reported."""
        if self.is_reported:
            seconds = time.monotonic() - self.since
            logger.info("the relay of the {} answers again after {:.0f} s", self.writer, seconds)
        self.since, self.is_reported = time.monotonic(), False

    def report(self, error: RelayError) -> None:
        """Record a failed request; log it once if the silence is long or the relay refused."""
        seconds = time.monotonic() - self.since
        if not self.is_reported and (seconds > _WARN_SECONDS or not isinstance(error, RelayUnreachable)):
            logger.warning("received no files of the {} for {:.0f} s: {}", self.writer, seconds, error)
            self.is_reported = True


class RunCopier:
    """Copies the files that `writer` writes from the relays of `client`."""

    def __init__(self, files: RunFiles, client: RelayClient, writer: Writer, poll_seconds: float) -> None:
        self._files, self._client, self._writer, self._poll_seconds = files, client, writer, poll_seconds
        self._root = files.paths.root
        self._index = RelayIndex({}, {})
        self._small_files = dict[str, str]()
        self._abandoned = set[tuple[ArtifactName, str]]()
        self._failed: tuple[ArtifactName, str] | None = None
        """What the last pass could not copy."""

    async def run(self) -> None:
        """Copy until cancelled. Raises OSError if the disk is full or cannot be written."""
        fetching: asyncio.Future[None] | None = None
        silence = _Silence(self._writer, time.monotonic())
        copied = self._read_resume() if self._writer == "trainer" else None
        branch = copied.branch if copied is not None else 0
        reader = IndexReader(self._client, self._writer, branch)
        try:
            while True:
                try:
                    self._index = await reader.read() or self._index
                    silence.end()
                    with _tolerate_changes():
                        await asyncio.to_thread(self.apply, self._index)
                    if fetching is None or fetching.done():
                        if fetching is not None:
                            fetching.result()
                        fetching = asyncio.ensure_future(self._fetch_missing())
                except RelayError as error:
                    silence.report(error)
                await asyncio.sleep(self._poll_seconds)
        finally:
            if fetching is not None:
                fetching.cancel()
                await asyncio.gather(fetching, return_exceptions=True)

    def apply(self, index: RelayIndex) -> None:
        """Remove obsolete copies, repeat deletions of readers, and replace small files."""
        resume = parse_resume(index.files.get(RESUME_FILE))
        for kind in ("rollouts", "checkpoints", "weights"):
            listed = [ArtifactName.parse(name) for name in index.artifacts if name.startswith(f"{kind}/")]
            newest = max((name.step for name in listed), default=-1)
            known = [name for name in listed if self._is_read(name, index)]
            for artifact in reversed(self._files.artifacts(kind)):  # the newest first: deltas keep their bases
                digest, is_older = index.artifacts.get(str(artifact)), artifact.step < newest
                if artifact.writer != self._writer:
                    if digest is None and self._is_consumed(artifact, max(known, default=None)):
                        self._delete_consumed(artifact)
                elif kind == "weights":  # of the others, the reader deletes the copy
                    is_gone = digest is None and (is_older or self._is_abandoned(artifact, resume))
                    if is_gone or digest not in (None, self._files.manifest_digest(artifact)):
                        remove_if_free(self._files.path(artifact))
        self._files.forget()
        for name, text in index.files.items():
            if self._small_files.get(name) != text and is_small_file(name, self._writer):
                self._write_small_file(self._root / name, text)
                self._small_files[name] = text

    def _is_read(self, name: ArtifactName, index: RelayIndex) -> bool:
        """Whether the reader has an artifact that is here, and needs older ones only if it has them as well.

        Parts of checkpoints are not written in their order: a trainer that stops may ask for an older one. It deletes
        checkpoints only when it has committed a newer one.
        """
        if name.kind == "checkpoints" and f"checkpoints/step_{name.step}/{COMMITTED}" not in index.files:
            return False
        return index.artifacts[str(name)] == self._files.manifest_digest(name)

    def _is_consumed(self, name: ArtifactName, newest: ArtifactName | None) -> bool:
        """Whether the reader has had an artifact, given the newest one that it has of those that are here.

        What it has of an abandoned branch is not here any more, and says nothing about artifacts of this branch.
        """
        return newest is not None and name < newest and self._files.branch(name) <= self._files.branch(newest)

    def _delete_consumed(self, name: ArtifactName) -> None:
        """Delete an artifact that its reader has deleted."""
        path = self._files.path(name)
        if name.kind == "rollouts":
            (path / ROWS_FILE).unlink(missing_ok=True)  # the manifest remains as the record
        elif name.kind == "weights":
            remove_if_free(path)
        else:
            shutil.rmtree(path.parent)
        logger.debug("deleted {}, as its reader did", name)

    def _write_small_file(self, file: Path, text: str) -> None:
        if file.name == COMMITTED and not file.parent.is_dir():  # the part of another orchestrator
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.parent.name == "heartbeats":  # needs not survive a crash
            temporary = file.with_name(f"{PARTIAL}{file.name}")
            temporary.write_text(text)
            temporary.rename(file)
        else:
            replace_file(file, text)

    async def _fetch_missing(self) -> None:
        """Copy missing artifacts, one after the other, until there is none; errors end the pass."""
        with _tolerate_changes():
            await asyncio.to_thread(self._remove_partial)
            await self._fetch_all()

    async def _fetch_all(self) -> None:
        missing: tuple[ArtifactName, str] | None = None
        try:
            while (missing := await asyncio.to_thread(self._next_missing)) is not None:
                name, digest = missing
                start = time.monotonic()
                if name.kind == "weights":
                    await download_version(self._client, self._files, name, digest, self._check_listed)
                elif await self._is_of_this_branch(name, digest):
                    await self._client.fetch(name, self._files.path(name), digest, self._check_listed)
                else:
                    self._abandoned.add(missing)
                    continue
                logger.info("copied {} in {:.2f} s", name, time.monotonic() - start)
        except RelayError as error:
            if self._failed == missing:  # the index may list what no relay has
                self._client.defer()
            self._failed = missing
            if isinstance(error, ArtifactGone):
                logger.debug("{}", error)  # the next index has another one
                return
            logger.warning("a copy failed; retrying: {}", error)
            await asyncio.sleep(_PAUSE_SECONDS)

    def _next_missing(self) -> tuple[ArtifactName, str] | None:
        """Return the next artifact to copy, and the hash of its manifest.

        Parts of checkpoints come first, because the trainer expects the part when it reads the batch; then batches in
        their order; of the versions only the newest one.
        """
        offered = list[tuple[ArtifactName, str]]()
        for text, digest in self._index.artifacts.items():
            with suppress(ValueError):  # a newer relay may offer more
                if (name := ArtifactName.parse(text)).writer == self._writer:
                    offered.append((name, digest))
        versions = [one for one in offered if one[0].kind == "weights"]
        wanted = [one for one in sorted(offered) if one not in versions and one not in self._abandoned]
        return next((one for one in (*wanted, *sorted(versions)[-1:]) if self._is_missing(*one)), None)

    def _is_missing(self, name: ArtifactName, digest: str) -> bool:
        held = self._files.manifest_digest(name)  # a batch stays held when its rows are deleted
        is_fixed = name.kind == "checkpoints" and (self._files.path(name).parent / COMMITTED).exists()
        return held is None or (held != digest and not is_fixed)

    async def _is_of_this_branch(self, name: ArtifactName, digest: str) -> bool:
        """Whether the trainer has not abandoned an artifact of the orchestrator by a rollback."""
        listing = await self._client.listing(name, lambda listing: listing.digest == digest)
        resume = self._read_resume()
        return resume is None or name.step < resume.step or branch_of(listing.manifest) >= resume.branch

    def _read_resume(self) -> ResumeRecord | None:
        file = self._root / RESUME_FILE
        return parse_resume(file.read_text() if file.exists() else None)

    def _is_abandoned(self, name: ArtifactName, resume: ResumeRecord | None) -> bool:
        return resume is not None and name.step >= resume.step and self._files.branch(name) < resume.branch

    def _check_listed(self, name: ArtifactName, file: str, size: int) -> None:
        if str(name) not in self._index.artifacts:
            raise ArtifactGone(f"{name} was deleted while it was copied")

    def _remove_partial(self) -> None:
        """Delete partial copies of artifacts that no relay offers any more."""
        offered = {digest[:12] for digest in self._index.artifacts.values()}
        for pattern in ("weights", "rollouts", "checkpoints/step_*"):
            for folder in self._root.glob(f"{pattern}/{PARTIAL}*"):
                if folder.name.rpartition("-")[2] not in offered:
                    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _tolerate_changes() -> Iterator[None]:
    """End the block if a file has disappeared: processes of the run move and delete files. The next poll repeats it.

    Errors of the machine, such as a full disk, are raised.
    """
    try:
        yield
    except OSError as error:
        if is_system_resource_error(error):
            raise
        logger.debug("a file has changed meanwhile: {}", error)


class IndexReader:
    """Reads the index of one of the relays of `client`, of which only what `writer` writes matters.

    It changes to another relay if this one has had nothing new for seconds: a mirror that has lost the connection to
    its own source, or its files, still answers. While a process of the run lives, its heartbeat changes the index of
    every relay that still receives it. Such a mirror may also be from before a rollback, so an index of an earlier
    branch is used only after it has changed: then it belongs to a new run.
    """

    def __init__(self, client: RelayClient, writer: Writer, branch: int) -> None:
        """`branch` is that of what has been copied before."""
        self._client, self._writer, self._branch = client, writer, branch
        self._current: _Part = {}
        self._others = dict[str, _Part]()
        """What the other relays had when they were asked first, since the last change."""
        self._earlier: _Part | None = None
        """What a relay had of an earlier branch when it was asked first."""
        self._next_question = time.monotonic() + _WARN_SECONDS

    async def read(self) -> RelayIndex | None:
        """Return an index, or None if it may be from before a rollback. Raises RelayError if no relay sends one."""
        index = await self._client.index()
        part, now = self._part(index), time.monotonic()
        is_usable = self._is_usable(part)
        if is_usable and part != self._current:
            self._current, self._others, self._next_question = part, {}, now + _WARN_SECONDS
        elif now >= self._next_question:
            other = await self._ask_others()
            self._next_question = time.monotonic() + _PAUSE_SECONDS
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
