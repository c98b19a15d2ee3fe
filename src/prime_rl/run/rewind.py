"""A resume goes back to a checkpoint: what came after it is put aside, so that nobody takes it for the new line's.

Everything is moved, by renames, to `abandoned/branch_b`, b being the branch that ends there. A rewind that is
interrupted is finished by the next one: `RESUME.json`, written last, begins the new branch.

The orchestrator may live on while the trainer is started again and goes back. It follows as soon as it sees
`RESUME.json`; what it wrote in between, it puts aside itself (`put_aside_late`).
"""

import json
import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path

import psutil

from prime_rl.run.artifact import MANIFEST, fsync, remove
from prime_rl.run.checkpoints import COMMITTED, ORCHESTRATOR, Commit, Resume, read_resume, write_resume
from prime_rl.run.paths import RunPaths, step_of, steps_in

START_VARIABLE = "PRIME_RL_START"
"""Environment variable in which `rl` gives each start of trainer and orchestrator a name that both know."""
RESTART_VARIABLE = "PRIME_RL_RESTART"
"""Environment variable of a trainer that may be started again after its death; "1" where this is such a start."""


def is_restart() -> bool:
    """Tell whether this trainer has died and is started again, by torchrun for all its ranks or by whoever started it.

    It then goes on from the newest checkpoint, or from step 0, whatever its configuration says of a resume.
    """
    return os.environ.get(RESTART_VARIABLE) == "1" or _number("TORCHELASTIC_RESTART_COUNT") > 0


def may_restart() -> bool:
    """Tell whether this trainer would be started again if it died, or was so already."""
    return RESTART_VARIABLE in os.environ or _number("TORCHELASTIC_MAX_RESTARTS") > 0 or is_restart()


def start_name() -> str | None:
    """Return what is the same for a start and its restarts, and for no other start: `rl`'s name, else torchrun's.

    None where nobody would restart this trainer, or where the user does it, who then knows what is in the directory.
    """
    if name := os.environ.get(START_VARIABLE):
        return name
    if not _number("TORCHELASTIC_MAX_RESTARTS"):
        return None
    agent = psutil.Process(os.getppid())
    return f"{socket.gethostname()}:{agent.pid}:{agent.create_time()}"


def next_branch(directory: Path, commit: Commit | None) -> int:
    """Return the branch that begins with a resume: one above that of every resume before and of the checkpoint."""
    resume = read_resume(directory)
    return max(commit.branch if commit else 0, resume.branch if resume else 0) + 1


def has_orchestrator(paths: RunPaths, commit: Commit | None) -> bool:
    """Tell whether an orchestrator will sample the batches anew after a rewind to `commit`, or to the beginning.

    It will if it wrote its part of the checkpoint. At the beginning there is none: `rl` always has an orchestrator;
    by hand a restarted trainer has one if there is a ledger, and otherwise trains on batches that were recorded.
    """
    if commit is not None:
        return ORCHESTRATOR in commit.parts
    if os.environ.get(START_VARIABLE):
        return True
    return is_restart() and (any(paths.ledger_dir.glob("branch_*.jsonl")) or not steps_in(paths.rollouts_dir))


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
    for role in ("trainer", "orchestrator") if rollouts else ("trainer",):
        _cut_metrics(paths.metrics(role), aside / "metrics" / f"{role}.jsonl", step)
    if rollouts:
        _move(sorted(paths.ledger_dir.glob("*")), aside / "ledger")
    directory.mkdir(parents=True, exist_ok=True)
    write_resume(directory, Resume(step, branch, start))


def put_aside_late(paths: RunPaths, directory: Path, step: int, branch: int) -> None:
    """Put aside what an orchestrator of an earlier branch wrote while the trainer went back, or after it.

    For the orchestrator alone, before it begins `branch`: the trainer gets no further than `step` without it.

    Args:
        paths: the run.
        directory: of the checkpoints: parts of later ones that were not committed, and never will be, are moved.
        step: N, where the branch begins.
        branch: that begins; what it wrote already stays.

    Raises:
        OSError: the directory cannot be written.
    """
    for batch in _steps(paths.rollouts_dir, above=step - 1):
        if (earlier := branch_of_batch(batch)) is None or earlier < branch:
            _move([batch], paths.abandoned(branch - 1 if earlier is None else earlier) / "rollouts")
    for ledger in sorted(paths.ledger_dir.glob("branch_*.jsonl")):
        if ledger != paths.ledger(branch):
            _move([ledger], paths.abandoned(branch - 1) / "ledger")
    unfinished = [checkpoint for checkpoint in _steps(directory, above=step) if not (checkpoint / COMMITTED).exists()]
    _move(unfinished, paths.abandoned(branch - 1) / "checkpoints")
    _cut_metrics(paths.metrics("orchestrator"), paths.abandoned(branch - 1) / "metrics" / "orchestrator.jsonl", step)


def branch_of_batch(batch: Path) -> int | None:
    """Return the branch of the batch in this folder; None where it does not say."""
    try:
        return int(json.loads((batch / MANIFEST).read_bytes())["branch"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _number(variable: str) -> int:
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else 0


def _steps(directory: Path, above: int) -> list[Path]:
    entries = directory.iterdir() if directory.is_dir() else ()
    return sorted(entry for entry in entries if (step := step_of(entry)) is not None and step > above)


def _move_steps(directory: Path, target: Path, above: int) -> None:
    _move(_steps(directory, above), target)


def _move(entries: list[Path], target: Path) -> None:
    """Move files or folders of one directory into `target`, under other names where these are taken."""
    for entry in entries:
        target.mkdir(parents=True, exist_ok=True)
        if entry.is_symlink():  # weights in memory (weight_broadcast.directory), which should not stay there
            remove(entry)
            continue
        with suppress(FileNotFoundError):  # trainer and orchestrator may put the same aside
            shutil.move(entry, _free(target / entry.name))  # renames, unless ckpt.path is on another disk
    if entries:
        fsync(entries[0].parent)


def _free(target: Path) -> Path:
    number, free = 0, target
    while free.exists():
        number += 1
        free = target.with_name(f"{target.name}.{number}")
    return free


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
