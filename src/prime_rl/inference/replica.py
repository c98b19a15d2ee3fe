"""I4, I5: the newest version as a full one on this node, kept to make the next one of it where versions are deltas.

    published                      here (`weights_cache`)
    step_4  full      -- copied -->  <hash of 4>
    step_5  delta     ------------>  <hash of 4> + delta = <hash of 5>, and <hash of 4> goes
    step_8  delta     ------------>  <hash of 5> + deltas 6, 7, 8 = <hash of 8>

Where the base is not here (a server that was started again, or has missed versions), the way back through the published
bases ends at one that is here, or at a full one. All workers of a node share the folder: the first one does the work
under a lock, the others find it done. A version appears by a rename, what was found is compared with its hashes before
it is used, and a worker reads and hashes what it loads as it does with any published version.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prime_rl.run.artifact import MANIFEST, WEIGHTS_FORMAT, ArtifactError, read_manifest
from prime_rl.run.delta.chain import among_deltas, base_of, is_sound, read_base, rebuild
from prime_rl.run.locks import acquire

logger = logging.getLogger(__name__)

_LOCK = "lock"
_UNFINISHED = ".tmp"
_MAX_THREADS = 8
_LOCK_S = 1200.0
"""As long as a request may take by default (`client.timeout`): who asked for the version does not wait any longer."""


def replica_root(folder: Path | None, port: int) -> Path:
    """Return where the server at `port` keeps its replica: inside `folder`, or the system's temporary folder."""
    return (folder or Path(tempfile.gettempdir())) / f"prime_rl-weights-{os.getuid()}-{port}"


class Replica:
    """Full versions in a folder of this node.

    Args:
        root: the folder, made where it is missing; nobody else's.
        timeout_s: longest wait for another worker of this node that rebuilds a version.
    """

    def __init__(self, root: Path, timeout_s: float = _LOCK_S) -> None:
        self._root, self._timeout_s = root, timeout_s

    def complete(self, directory: Path, check: Callable[[], None]) -> Path:
        """Return where the version that was published in `directory` lies as a full one.

        Args:
            directory: of a published version, or of a model.
            check: called now and then; what it raises ends the work.

        Returns:
            `directory` itself, unless it is a delta or one that deltas may start from.

        Raises:
            ArtifactError: a file is missing, damaged, or not what was published; names the file.
            DeadlineError: another worker was at it for too long; names the process.
            OSError: the disk is full ...
        """
        if not (directory / MANIFEST).exists():
            return directory
        manifest = read_manifest(directory, WEIGHTS_FORMAT)
        if not among_deltas(manifest):
            return directory
        with self._locked(check):
            check()
            target = self._root / str(manifest["hash"])
            if not is_sound(target):
                shutil.rmtree(target, ignore_errors=True)
                self._make(directory, target, check)
            for entry in self._root.iterdir():
                if entry.is_dir() and entry != target:
                    shutil.rmtree(entry)
            return target

    def _make(self, directory: Path, target: Path, check: Callable[[], None]) -> None:
        """Rebuild `directory` as `target`, of what is here or, where that turns out to be damaged, of what is not."""
        while True:
            full, deltas = self._way(directory)
            try:
                self._build(full, deltas, target, check)
                return
            except ArtifactError as error:
                if full.parent != self._root or is_sound(full):
                    raise
                logger.warning("%s is damaged (%s); going back to what was published", full, error)
                shutil.rmtree(full)

    def _way(self, directory: Path) -> tuple[Path, list[Path]]:
        """Go back from a published version to the nearest one that is here, or is published as a full one."""
        deltas: list[Path] = []
        manifest = read_manifest(directory, WEIGHTS_FORMAT)
        while (base := base_of(directory, manifest)) is not None:
            deltas.insert(0, directory)
            here = self._root / base.hash
            if here.is_dir():
                return here, deltas
            manifest = read_base(directory, base)
            directory = directory.parent / base.name
        return directory, deltas

    def _build(self, full: Path, deltas: list[Path], target: Path, check: Callable[[], None]) -> None:
        temporary = self._root / _UNFINISHED
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            threads = min(_MAX_THREADS, max(1, (os.cpu_count() or 1) // 2))
            rebuild(full, deltas, temporary, threads=threads, check=check)
            temporary.rename(target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    @contextmanager
    def _locked(self, check: Callable[[], None]) -> Iterator[None]:
        """Exclude the other workers of this node. Whoever dies lets go."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._root.stat().st_uid != os.getuid():
            raise ArtifactError(f"{self._root} belongs to another user; set weights_cache to a folder of your own")
        with (self._root / _LOCK).open("w") as lock:
            acquire(lock, self._timeout_s, "rebuilds weights from deltas", check)
            yield
