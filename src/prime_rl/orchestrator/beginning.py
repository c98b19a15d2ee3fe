"""Where a run begins: at the beginning, at a checkpoint that the trainer goes back to, or where a dead process ended.

The trainer alone chooses the checkpoint, puts aside what came after it, and says so in `RESUME.json`; the orchestrator
waits for that, so that the two never go on from different places. A trainer that is started again does the same while
the orchestrator lives: that one ends its work (`Rewound`) and begins anew, as one that was started again would.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loguru import logger

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.shared import CkptConfig
from prime_rl.errors import ConfigError, RunError
from prime_rl.orchestrator.checkpoint import Cut, read_cut
from prime_rl.run.artifact import ArtifactError
from prime_rl.run.checkpoints import ORCHESTRATOR, Resume, read_commit, read_resume
from prime_rl.run.paths import RunPaths, steps_in
from prime_rl.run.rewind import START_VARIABLE, branch_of_batch, put_aside_late
from prime_rl.run.wait import wait_until
from prime_rl.types import PolicyVersion


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a run begins.

    Attributes:
        branch: of its versions and batches.
        cut: the orchestrator's state there; None is the beginning of the stream, or told by the ledger.
    """

    branch: int = 0
    cut: Cut | None = None

    @property
    def version(self) -> PolicyVersion | None:
        """What inference has to sample from before anything is dispatched; None is the base model."""
        return PolicyVersion(self.branch, self.cut.step) if self.cut is not None else None


START = Beginning()


class Rewound(Exception):
    """The trainer has gone back, and begun a branch of its own: what is being sampled is none of its any more."""

    def __init__(self, resume: Resume) -> None:
        """Take what `RESUME.json` says."""
        super().__init__(f"the trainer has gone back to step {resume.step}, where branch {resume.branch} begins")
        self.resume = resume


def find_beginning(config: OrchestratorConfig, check: Callable[[], None] = lambda: None) -> Beginning:
    """Find out where the run begins; where the trainer resumes, wait until it has said from where, and published that.

    Args:
        config: of the orchestrator.
        check: called again and again while the trainer is waited for; raises what makes waiting pointless.

    Raises:
        ConfigError: the directory holds another run, or the checkpoint does not suit the configuration.
        RunError: the trainer did not say in time, or the checkpoint is damaged.
    """
    if waits_for_trainer(config):
        _clear_unfinished(config.run_paths)
    if config.restart:
        return _go_on(config, check)
    if config.bench or not _is_asked_to_resume(config):
        _refuse_earlier_run(config.run_paths)
        known = None if config.bench else read_resume(resume_directory(config))
        return Beginning(known.branch) if known else START
    return _begin_at(config, _wait_for_resume(config, check), check)


def waits_for_trainer(config: OrchestratorConfig) -> bool:
    """Whether the trainer says where the run begins."""
    return config.restart or _is_asked_to_resume(config)


def resume_directory(config: OrchestratorConfig) -> Path:
    """Return where the trainer puts `RESUME.json`, also where no checkpoints are written."""
    return config.run_paths.root / (config.ckpt or CkptConfig()).path


def find_rewind(config: OrchestratorConfig, branch: int) -> Resume | None:
    """Look whether the trainer has begun a branch above `branch` that this orchestrator is to sample for."""
    directory = resume_directory(config)
    resume = read_resume(directory)
    return resume if resume is not None and resume.branch > branch and _is_for_us(directory, resume) else None


def _is_for_us(directory: Path, resume: Resume) -> bool:
    """Tell whether the checkpoint has an orchestrator's part; without, the trainer goes on with recorded batches."""
    if not resume.step:
        return True
    try:
        return ORCHESTRATOR in read_commit(directory / f"step_{resume.step}").parts
    except ArtifactError:
        return True  # whoever reads it says what is wrong with it


def _go_on(config: OrchestratorConfig, check: Callable[[], None]) -> Beginning:
    """Begin where a process of the same run ended, or where the trainer has gone back to since."""
    newest = _newest_branch(config.run_paths)
    if _is_asked_to_resume(config) and os.environ.get(START_VARIABLE):
        _wait_for_resume(config, check)  # of this start: before, all that is there is of the run that is resumed
        newest = _newest_branch(config.run_paths)
    ended = -1 if newest is None else newest
    shipped = max((branch_of_batch(batch) or 0 for batch in _batches(config.run_paths)), default=-1)
    if shipped > ended:  # the rewind that has put the ledger aside goes on, or is done again
        _wait_for_branch(config, shipped + 1, check)
    resume = find_rewind(config, ended)
    return Beginning(max(ended, 0)) if resume is None else _begin_at(config, resume, check)


def _begin_at(config: OrchestratorConfig, resume: Resume, check: Callable[[], None]) -> Beginning:
    """Begin the branch of `resume`, or a newer one if the trainer goes back again meanwhile."""
    paths, directory = config.run_paths, resume_directory(config)
    while True:
        if _is_for_us(directory, resume) and (resume.step or config.restart):
            put_aside_late(paths, directory, resume.step, resume.branch)
        if later := [step for step in steps_in(paths.rollouts_dir) if step >= resume.step]:
            raise RunError(
                f"{paths.rollouts(later[0])} is in the way of the new branch {resume.branch}: the trainer resumed from "
                "a checkpoint of its own, on recorded batches; move them away to sample anew"
            )
        if not resume.step:
            return Beginning(resume.branch)
        cut = read_cut(directory / f"step_{resume.step}", config)
        newer = _wait_for_version(config, resume, check)
        if newer is None:
            return Beginning(resume.branch, cut)
        resume = newer


def _wait_for_version(config: OrchestratorConfig, resume: Resume, check: Callable[[], None]) -> Resume | None:
    """Wait until the trainer has published the version that it resumed; returns a newer rewind that comes first."""
    version, newer = config.run_paths.weights(resume.step), list[Resume]()

    def decided() -> bool:
        if (now := find_rewind(config, resume.branch)) is not None:
            newer.append(now)
        return bool(newer) or version.exists()

    what = f"{version}, which {_trainer(config)} should have written"
    wait_until(version.parent, decided, config.wait_timeout_seconds, what, check)
    return newer[-1] if newer else None


def _wait_for_resume(config: OrchestratorConfig, check: Callable[[], None]) -> Resume:
    """Wait until the trainer has said from which checkpoint this start resumes."""
    paths, directory, start = config.run_paths, resume_directory(config), os.environ.get(START_VARIABLE)
    asked = config.ckpt.resume_step if config.ckpt is not None else None
    found = list[Resume]()

    def resumed() -> bool:
        resume = read_resume(directory)
        if resume is None:
            return False
        if start:
            is_new = resume.start == start
        else:  # by hand: what a resume that died at once has left may look the same, and is followed by the next
            begun = paths.ledger(resume.branch).exists() or resume.branch in map(branch_of_batch, _batches(paths))
            is_new = not begun and asked in (-1, resume.step)
        if is_new:
            found.append(resume)
        return is_new

    logger.info("waiting for the trainer to say from which checkpoint it resumes")
    what = f"{_trainer(config)} to say in {directory} that it resumes" + (f" from {asked}" if asked != -1 else "")
    wait_until(directory, resumed, config.wait_timeout_seconds, what, check)
    return found[-1]


def _wait_for_branch(config: OrchestratorConfig, branch: int, check: Callable[[], None]) -> None:
    def begun() -> bool:
        resume = read_resume(resume_directory(config))
        return resume is not None and resume.branch >= branch

    if not begun():
        logger.info("the ledger was put aside: waiting for the trainer to say where it goes back to")
    what = f"{_trainer(config)} to begin branch {branch}: the ledger of the one before is gone"
    wait_until(resume_directory(config), begun, config.wait_timeout_seconds, what, check)


def _trainer(config: OrchestratorConfig) -> str:
    return f"the trainer (log {config.run_paths.log('trainer')})"


def _is_asked_to_resume(config: OrchestratorConfig) -> bool:
    return config.ckpt is not None and config.ckpt.resume_step is not None


def _newest_branch(paths: RunPaths) -> int | None:
    """Return the newest branch with a ledger; one that has no whole line yet was not begun."""
    begun = [file for file in paths.ledger_dir.glob("branch_*.jsonl") if _has_line(file)]
    return max((int(file.stem.removeprefix("branch_")) for file in begun), default=None)


def _has_line(file: Path) -> bool:
    with file.open("rb") as ledger:
        return ledger.readline().endswith(b"\n")


def _batches(paths: RunPaths) -> list[Path]:
    return [paths.rollouts(step) for step in steps_in(paths.rollouts_dir)]


def _clear_unfinished(paths: RunPaths) -> None:
    """Delete the batches that a process has left which died while it wrote them."""
    for leftover in paths.rollouts_dir.glob(".tmp-step_*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _refuse_earlier_run(paths: RunPaths) -> None:
    """Raise ConfigError where an earlier run left what would be taken for this one's, or nothing can be written."""
    branch = _newest_branch(paths)
    if branch is not None:
        raise ConfigError(
            f"output_dir: {paths.ledger(branch)} is the ledger of an earlier run; remove it, choose another output_dir "
            "(`rl` removes it itself), or go on with that run by --restart"
        )
    try:
        paths.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir: {paths.root} cannot be made: {error.strerror}; set --output-dir") from None
    for directory in (paths.rollouts_dir, paths.weights_dir):
        if steps := steps_in(directory):
            raise ConfigError(
                f"output_dir: {directory} holds steps {steps[0]} to {steps[-1]} of an earlier run, to be taken "
                "for this one's; remove it or choose another output_dir (`rl` removes it itself)"
            )
