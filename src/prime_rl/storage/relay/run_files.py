"""Which files of a run directory a relay offers, and which process writes them.

    written by the trainer:        weights/step_n     heartbeats/trainer_*.json
                                   checkpoints/RESUME.json, checkpoints/STOP.json, checkpoints/step_n/COMMITTED
    written by the orchestrator:   rollouts/step_n    heartbeats/orchestrator.json  checkpoints/step_n/orchestrator

Artifacts are offered with their manifest, the small files in the index. An artifact without its files, such as a batch
whose rows the trainer has deleted, is not offered: readers repeat deletions that way.

Only regular files are offered, and no links that lead out of the run directory: an environment may run code that a
model has written. One link is usual: that of a version in another directory (`weight_broadcast.directory`).
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import xxhash

from prime_rl.storage.artifact import MANIFEST
from prime_rl.storage.batch import ROWS_FILE
from prime_rl.storage.checkpoint_artifacts import COMMITTED, ORCHESTRATOR, RESUME, STOP, ResumeRecord, hash_file
from prime_rl.storage.paths import RunPaths, steps_in

FORMAT = "prime_rl.relay/1"
RESUME_FILE, STOP_FILE = f"checkpoints/{RESUME}", f"checkpoints/{STOP}"
Writer = Literal["trainer", "orchestrator"]

_ARTIFACT = re.compile(rf"(?P<kind>weights|rollouts|checkpoints)/step_(?P<step>[0-9]+)(?P<part>/{ORCHESTRATOR})?")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SMALL_FILES: dict[Writer, re.Pattern[str]] = {
    "trainer": re.compile(
        rf"heartbeats/trainer_[0-9]+\.json|{RESUME_FILE}|{STOP_FILE}|checkpoints/step_[0-9]+/{COMMITTED}"
    ),
    "orchestrator": re.compile(r"heartbeats/orchestrator\.json"),
}
_MAX_SMALL_BYTES = 1 << 16
MAX_MANIFEST_BYTES = 1 << 28
"""A manifest has two lines per tensor."""


@dataclass(frozen=True, slots=True, order=True)
class ArtifactName:
    """An artifact that a relay offers, such as `weights/step_3`. `str` is its path in the run directory."""

    kind: Literal["weights", "rollouts", "checkpoints"]
    step: int

    @classmethod
    def parse(cls, name: str) -> "ArtifactName":
        """Parse `str(name)`. Raises ValueError for anything else."""
        match = _ARTIFACT.fullmatch(name)
        if match is None or (match["kind"] == "checkpoints") != bool(match["part"]):
            raise ValueError(f"{name!r} is not an artifact that a relay offers")
        return cls(match["kind"], int(match["step"]))  # type: ignore[arg-type]

    @property
    def writer(self) -> Writer:
        """Process that writes the artifact."""
        return "trainer" if self.kind == "weights" else "orchestrator"

    def __str__(self) -> str:
        """Return the path."""
        return f"{self.kind}/step_{self.step}" + (f"/{ORCHESTRATOR}" if self.kind == "checkpoints" else "")


class RelayIndex(msgspec.Struct, frozen=True):
    """What a relay offers: hash of the manifest of each artifact, and text of each small file, by path."""

    artifacts: dict[str, str]
    files: dict[str, str]
    format: str = FORMAT


class FileDigest(msgspec.Struct, frozen=True):
    """Size in bytes, and xxh3_128."""

    size: int
    hash: str


class ArtifactListing(msgspec.Struct, frozen=True):
    """An artifact: the text of its manifest, and size and hash of each file that the manifest lists."""

    manifest: str
    files: dict[str, FileDigest]

    @property
    def digest(self) -> str:
        """The hash of the manifest, as in `RelayIndex.artifacts`."""
        return hash_text(self.manifest)


class RunFiles:
    """The files of one run directory that a relay offers. Hashes are kept until the file changes."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self._hashes: dict[Path, tuple[tuple[int, ...], FileDigest]] = {}
        self._listed: dict[Path, tuple[str, dict[str, int]]] = {}
        """Hash and files of each manifest."""

    def index(self) -> RelayIndex:
        """List what is offered now.

        A rollback archives artifacts before it writes `RESUME.json`, and an orchestrator ships a batch after its part
        of the checkpoint. So small files are read first, and batches before checkpoints.
        """
        files = dict(self._small_files())
        found = (name for kind in ("rollouts", "checkpoints", "weights") for name in self.artifacts(kind))
        digests = {str(name): self.manifest_digest(name) for name in found}
        return RelayIndex({name: digest for name, digest in digests.items() if digest is not None}, files)

    def artifacts(self, kind: str) -> list[ArtifactName]:
        """Return the complete artifacts of one kind, by ascending step."""
        names = [ArtifactName(kind, step) for step in steps_in(self.paths.root / kind)]  # type: ignore[arg-type]
        return [name for name in names if self._is_complete(name)]

    def manifest_digest(self, name: ArtifactName) -> str | None:
        """Return the hash of the artifact's manifest; None if there is none."""
        with suppress(OSError):
            return self._digest(self._own_file(name, MANIFEST)).hash
        return None

    def branch(self, name: ArtifactName) -> int:
        """Return the branch in the artifact's manifest; -1 without one."""
        with suppress(OSError, UnicodeDecodeError):
            return branch_of(self._own_file(name, MANIFEST).read_text())
        return -1

    def path(self, name: ArtifactName) -> Path:
        """Return the directory of an artifact in the run directory."""
        return self.paths.root / str(name)

    def listing(self, name: ArtifactName) -> ArtifactListing:
        """Return manifest and hashes of an artifact. Raises FileNotFoundError if it is not complete (any more)."""
        text = self._own_file(name, MANIFEST).read_bytes().decode()
        return ArtifactListing(text, {file: self._digest(self._own_file(name, file)) for file in listed_files(text)})

    def file(self, name: ArtifactName, file: str) -> Path:
        """Return the path of one file that an artifact's manifest lists; raises FileNotFoundError for another one."""
        manifest = self._own_file(name, MANIFEST)
        digest = self._digest(manifest).hash
        known = self._listed.get(manifest)
        if known is None or known[0] != digest:
            known = self._listed[manifest] = digest, listed_files(manifest.read_bytes().decode())
        if file not in known[1]:
            raise FileNotFoundError(f"{name} lists no {file!r}")
        return self._own_file(name, file)

    def _is_complete(self, name: ArtifactName) -> bool:
        with suppress(OSError):
            return self._own_file(name, ROWS_FILE if name.kind == "rollouts" else MANIFEST).exists()
        return False

    def _own_file(self, name: ArtifactName, file: str) -> Path:
        """Return a regular file of an artifact; raises FileNotFoundError."""
        directory = self.path(name)
        if name.kind == "weights" and directory.is_symlink() and (target := directory.resolve()).name == directory.name:
            return _regular_file(target, file)
        return _regular_file(self.paths.root, f"{name}/{file}")

    def _small_files(self) -> Iterator[tuple[str, str]]:
        root = self.paths.root
        # Readers write them in this order: the record of a resume after that of its checkpoint.
        for pattern in ("heartbeats/*.json", f"checkpoints/step_*/{COMMITTED}", STOP_FILE, RESUME_FILE):
            for file in root.glob(pattern):
                name = file.relative_to(root).as_posix()
                with suppress(OSError, UnicodeDecodeError):  # it is being replaced
                    if any(is_small_file(name, writer) for writer in _SMALL_FILES):
                        with _regular_file(root, name).open("rb") as content:
                            yield name, content.read(_MAX_SMALL_BYTES).decode()

    def _digest(self, file: Path) -> FileDigest:
        stat = file.stat()
        key = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        known = self._hashes.get(file)
        if known is None or known[0] != key:
            known = self._hashes[file] = key, FileDigest(stat.st_size, hash_file(file))
        return known[1]

    def forget(self) -> None:
        """Forget the cached hashes of files that no longer exist."""
        for file in list(self._hashes):  # a copy: other threads add hashes meanwhile
            if not file.exists():
                self._hashes.pop(file, None)
                self._listed.pop(file, None)


def _regular_file(directory: Path, file: str) -> Path:
    """Return a file in `directory`, resolved; raises FileNotFoundError if it is not regular or a link leads to it."""
    expected = directory.resolve() / file
    if expected.resolve() != expected or not expected.is_file():
        raise FileNotFoundError(f"{expected} is not a regular file")
    return expected


def listed_files(manifest: str) -> dict[str, int]:
    """Return name and size of each file that a manifest lists. Raises ValueError if it is malformed."""
    try:
        files = {str(name): int(size) for name, size in json.loads(manifest)["files"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the manifest is malformed: {error!r}") from None
    if wrong := [name for name in files if not _FILE.fullmatch(name) or name == MANIFEST]:
        raise ValueError(f"the manifest lists {wrong[0]!r}, which is not the name of a file")
    return files


def branch_of(manifest: str) -> int:
    """Return the branch in a manifest; -1 without one."""
    with suppress(ValueError, KeyError, TypeError):
        return int(json.loads(manifest)["branch"])
    return -1


def is_small_file(name: str, writer: Writer) -> bool:
    """Whether `name` is a small file of the index that `writer` writes."""
    return _SMALL_FILES[writer].fullmatch(name) is not None


def parse_resume(text: str | None) -> ResumeRecord | None:
    """Return the contents of `RESUME.json`; None without it, or if it is malformed."""
    with suppress(ValueError):
        return None if text is None else msgspec.json.decode(text, type=ResumeRecord)
    return None


def hash_text(text: str) -> str:
    """Return the xxh3_128 of a text, as `hash_file` of a file with it."""
    return xxhash.xxh3_128_hexdigest(text.encode())
