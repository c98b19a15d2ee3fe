"""Clears a run directory that contains an earlier run."""

import shutil
import time
from pathlib import Path

from prime_rl.storage.paths import RunPaths


def find_earlier_run(paths: RunPaths) -> list[Path]:
    """Return the non-empty directories of an earlier run."""
    data = (paths.rollouts_dir, paths.weights_dir, paths.ledger_dir, paths.spool_dir)
    written = (*data, paths.metrics_dir, paths.samples_dir, paths.checkpoints_dir)
    return [path for path in written if path.is_dir() and any(path.iterdir())]


def clear_earlier_run(paths: RunPaths) -> list[Path]:
    """Remove the files of an earlier run, except checkpoints, which are moved to `abandoned/`.

    Checkpoints are kept because the earlier run cannot be continued without them. A directory that is a symbolic link,
    for example to another disk, is emptied and remains a link; a link to checkpoints is moved. Returns the directories
    that were removed or moved.
    """
    old = find_earlier_run(paths)
    for path in old:
        if path == paths.checkpoints_dir:
            target = paths.abandoned_dir / time.strftime("run_%Y%m%d_%H%M%S")
            target.mkdir(parents=True, exist_ok=True)
            if path.is_symlink():
                (target / path.name).symlink_to(path.resolve())  # a relative link would be wrong at the new place
                path.unlink()
            else:
                path.rename(target / path.name)
        elif path.is_symlink():
            for entry in path.iterdir():
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        else:
            shutil.rmtree(path)
    for directory in (paths.torchrun_logs, paths.timeline_dir):
        shutil.rmtree(directory, ignore_errors=True)
    for file in (paths.events, paths.loss_surface):
        file.unlink(missing_ok=True)
    return old
