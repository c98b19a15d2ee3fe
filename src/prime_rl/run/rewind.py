"""A resume goes back to a checkpoint: what came after it is put aside, so that nobody takes it for the new line's.

Everything is moved, by renames, to `abandoned/branch_b`, b being the branch that ends there. A rewind that is
interrupted is finished by the next one: `RESUME.json`, written last, begins the new branch.
"""

import json
import os
import shutil
from pathlib import Path

from prime_rl.run.artifact import fsync, remove
from prime_rl.run.checkpoints import Commit, Resume, read_resume, write_resume
from prime_rl.run.paths import RunPaths, step_of

START_VARIABLE = "PRIME_RL_START"
"""Environment variable in which `rl` gives each start of trainer and orchestrator a name that both know."""


def next_branch(directory: Path, commit: Commit | None) -> int:
    """Return the branch that begins with a resume: one above that of every resume before and of the checkpoint."""
    resume = read_resume(directory)
    return max(commit.branch if commit else 0, resume.branch if resume else 0) + 1


def rewind(
    paths: RunPaths, directory: Path, step: int, branch: int, weights: bool, rollouts: bool, start: str | None = None
) -> None:
    """Put aside what steps >= `step` have left behind, and write `RESUME.json`.

    Args:
        paths: the run.
        directory: of the checkpoints; those above `step` are moved, complete or not.
        step: N; steps below are done.
        branch: that begins.
        weights: version N will be published again, so the old one goes too; versions above go in any case.
        rollouts: batches >= N will be shipped again, so the old ones go, and so do the ledger of the branch that ends
            and the orchestrator's metrics of these steps.
        start: of the run that resumes, so that its other processes know this resume from an earlier one.

    Raises:
        OSError: the directory cannot be written.
    """
    aside = paths.abandoned(branch - 1)
    _move_steps(directory, aside / "checkpoints", above=step)
    _move_steps(paths.weights_dir, aside / "weights", above=step - 1 if weights else step)
    if rollouts:
        _move_steps(paths.rollouts_dir, aside / "rollouts", above=step - 1)
        _move_files(paths.ledger_dir, aside / "ledger")
    for role in ("trainer", "orchestrator") if rollouts else ("trainer",):
        _cut_metrics(paths.metrics(role), aside / "metrics" / f"{role}.jsonl", step)
    directory.mkdir(parents=True, exist_ok=True)
    write_resume(directory, Resume(step, branch, start))


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


def _move_files(directory: Path, target: Path) -> None:
    if not directory.is_dir():
        return
    target.mkdir(parents=True, exist_ok=True)
    for file in list(directory.iterdir()):
        shutil.move(file, target / file.name)
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
