"""A resume goes back to a checkpoint: what came after it is put aside, so that nobody takes it for the new line's.

Everything is moved, by renames, to `abandoned/branch_b`, b being the branch that ends there. A rewind that is
interrupted is finished by the next one: `RESUME.json`, written last, begins the new branch.
"""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

from prime_rl.run.artifact import fsync, remove
from prime_rl.run.checkpoints import RESUME, Commit, write_json
from prime_rl.run.paths import RunPaths, step_of


def next_branch(directory: Path, commit: Commit | None) -> int:
    """Return the branch that begins with a resume: one above that of every resume before and of the checkpoint."""
    known = [commit.branch if commit else 0]
    with suppress(FileNotFoundError):
        known.append(int(json.loads((directory / RESUME).read_text())["branch"]))
    return max(known) + 1


def rewind(paths: RunPaths, directory: Path, step: int, branch: int, weights: bool, rollouts: bool) -> None:
    """Put aside what steps >= `step` have left behind, and write `RESUME.json`.

    Args:
        paths: the run.
        directory: of the checkpoints; those above `step` are moved, complete or not.
        step: N; steps below are done.
        branch: that begins.
        weights: version N will be published again, so the old one goes too; versions above go in any case.
        rollouts: batches >= N will be shipped again, so the old ones go.

    Raises:
        OSError: the directory cannot be written.
    """
    aside = paths.abandoned(branch - 1)
    _move_steps(directory, aside / "checkpoints", above=step)
    _move_steps(paths.weights_dir, aside / "weights", above=step - 1 if weights else step)
    if rollouts:
        _move_steps(paths.rollouts_dir, aside / "rollouts", above=step - 1)
    _cut_metrics(paths.metrics("trainer"), aside / "metrics" / "trainer.jsonl", step)
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / RESUME, {"step": step, "branch": branch})


def _move_steps(directory: Path, target: Path, above: int) -> None:
    if not directory.is_dir():
        return
    moved = [entry for entry in directory.iterdir() if (step := step_of(entry)) is not None and step > above]
    for entry in moved:
        target.mkdir(parents=True, exist_ok=True)
        if entry.is_symlink():  # weights in memory (weight_broadcast.directory), which should not stay there
            remove(entry)
        else:
            shutil.move(entry, target / entry.name)  # renames, unless ckpt.path is on another disk
    if moved:
        fsync(directory)


def _cut_metrics(file: Path, target: Path, step: int) -> None:
    """Keep the lines of steps below `step`; the others, and one that was not written to its end, go to `target`."""
    if not file.exists():
        return
    kept, cut = list[str](), list[str]()
    for line in file.read_text().splitlines(keepends=True):
        (kept if _is_before(line, step) else cut).append(line)
    if not cut:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("a") as abandoned:
        abandoned.writelines(cut)
    temporary = file.with_name(f".tmp-{file.name}-{os.getpid()}")
    temporary.write_text("".join(kept))
    fsync(temporary)
    temporary.rename(file)


def _is_before(line: str, step: int) -> bool:
    try:
        return line.endswith("\n") and int(json.loads(line)["step"]) < step
    except (ValueError, KeyError, TypeError):
        return False
