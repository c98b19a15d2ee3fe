"""Finds where a run starts: at step 0, at a checkpoint, or where an earlier process ended.

Only the trainer chooses the checkpoint. It archives later artifacts and writes `RESUME.json`, for which the
orchestrator waits, so both continue from the same step. If the trainer restarts while the orchestrator runs, the
orchestrator ends its work (`TrainerRolledBack`) and starts again from the new checkpoint.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from loguru import logger

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.shared.blocks import CkptConfig
from prime_rl.core.errors import ConfigError, RunError, translate_error, unwritable
from prime_rl.core.types import PolicyVersion
from prime_rl.orchestrator.orchestrator_checkpoint import OrchestratorState, read_checkpoint_part
from prime_rl.storage.artifact import ArtifactError
from prime_rl.storage.checkpoint_artifacts import ORCHESTRATOR, ResumeRecord, read_commit, read_resume
from prime_rl.storage.earlier_run import clear_earlier_run
from prime_rl.storage.paths import RunPaths, steps_in
from prime_rl.storage.rollback import START_VARIABLE, archive_late_artifacts, branch_of_batch
from prime_rl.storage.wait_for import wait_until


@dataclass(frozen=True, slots=True)
class StartPoint:
    """Where a run starts: the branch of its versions and batches, and the state of the checkpoint.

    The state is None at the start of the stream, or if the ledger holds it.
    """

    branch: int = 0
    state: OrchestratorState | None = None

    @property
    def version(self) -> PolicyVersion | None:
        """The version to load before anything is dispatched; None is the base model."""
        return PolicyVersion(self.branch, self.state.step) if self.state is not None else None


START = StartPoint()


class TrainerRolledBack(Exception):
    """The trainer resumed from a checkpoint on a new branch; the groups in flight belong to the old one."""

    def __init__(self, resume: ResumeRecord) -> None:
        super().__init__(f"the trainer rolled back to step {resume.step}, where branch {resume.branch} starts")
        self.resume = resume


def find_start_point(config: OrchestratorConfig, check: Callable[[], None] = lambda: None) -> StartPoint:
    """Find where the run starts; if the trainer resumes, wait for its checkpoint and the published version.

    `check` is called repeatedly during a wait for the trainer; it raises if the trainer is lost.

    Raises:
        ConfigError: the directory holds another run, or the checkpoint does not match the configuration.
        RunError: the trainer did not resume in time, or the checkpoint is damaged.
    """
    if waits_for_trainer(config):  # batches of a process that was killed while it wrote them
        for unfinished in config.run_paths.rollouts_dir.glob(".tmp-step_*"):
            shutil.rmtree(unfinished, ignore_errors=True)
    if config.restart:
        return _continue(config, check)
    if config.bench or not _is_asked_to_resume(config):
        _prepare_directory(config)
        known = None if config.bench else read_resume(resume_directory(config))
        return StartPoint(known.branch) if known else START
    return _start_at(config, _wait_for_resume(config, check), check)


def waits_for_trainer(config: OrchestratorConfig) -> bool:
    """Return whether the trainer decides where the run starts."""
    return config.restart or _is_asked_to_resume(config)


def resume_directory(config: OrchestratorConfig) -> Path:
    """Return the directory of `RESUME.json`, which exists even if no checkpoints are written."""
    return config.run_paths.root / (config.ckpt or CkptConfig()).path


def find_rollback(config: OrchestratorConfig, branch: int) -> ResumeRecord | None:
    """Return the trainer's rollback to a branch above `branch`, if this orchestrator samples for it."""
    directory = resume_directory(config)
    resume = read_resume(directory)
    return resume if resume is not None and resume.branch > branch and _is_for_us(directory, resume) else None


def _is_for_us(directory: Path, resume: ResumeRecord) -> bool:
    """Return whether the checkpoint has an orchestrator's part; otherwise the trainer replays recorded batches."""
    if resume.step:
        with suppress(ArtifactError):  # `read_checkpoint_part` reports the defect
            return ORCHESTRATOR in read_commit(directory / f"step_{resume.step}", only=ORCHESTRATOR).parts
    return True


def _continue(config: OrchestratorConfig, check: Callable[[], None]) -> StartPoint:
    """Start where an earlier process of the run ended, or where the trainer rolled back to since."""
    if _is_asked_to_resume(config) and os.environ.get(START_VARIABLE):
        _wait_for_resume(config, check)  # until then all files belong to the resumed run
    branch, shipped = _newest_branch(config.run_paths), _shipped_branch(config.run_paths)
    if shipped > branch:  # a rollback archived the ledger and is still running, or will be repeated
        _wait_for_branch(config, shipped + 1, check)
    resume = find_rollback(config, branch)
    return StartPoint(max(branch, 0)) if resume is None else _start_at(config, resume, check)


def _start_at(config: OrchestratorConfig, resume: ResumeRecord, check: Callable[[], None]) -> StartPoint:
    """Start the branch of `resume`, or a newer one if the trainer rolls back again meanwhile."""
    paths, directory = config.run_paths, resume_directory(config)
    while True:
        if _is_for_us(directory, resume) and (resume.step or config.restart):
            archive_late_artifacts(paths, directory, resume.step, resume.branch)
        if later := [step for step in steps_in(paths.rollouts_dir) if step >= resume.step]:
            raise RunError(
                f"{paths.rollouts(later[0])} already exists, so branch {resume.branch} cannot start: the trainer "
                "resumed on recorded batches; move them away to sample new ones"
            )
        if not resume.step:
            return StartPoint(resume.branch)
        state = read_checkpoint_part(directory / f"step_{resume.step}", config)
        newest = _wait_for_version(config, resume, check)
        if newest is resume:
            return StartPoint(resume.branch, state)
        resume = newest


def _wait_for_version(config: OrchestratorConfig, resume: ResumeRecord, check: Callable[[], None]) -> ResumeRecord:
    """Wait until the trainer publishes the resumed version, or rolls back again; return the newest rollback."""
    version = config.run_paths.weights(resume.step)
    what = f"{version}, which {_trainer(config)} should have written"

    def find() -> ResumeRecord | None:
        return find_rollback(config, resume.branch) or (resume if version.exists() else None)

    return _wait(config, version.parent, find, what, check)


def _wait_for_resume(config: OrchestratorConfig, check: Callable[[], None]) -> ResumeRecord:
    """Wait until the trainer writes from which checkpoint this start resumes."""
    paths, directory, start = config.run_paths, resume_directory(config), os.environ.get(START_VARIABLE)
    asked = config.ckpt.resume_step if config.ckpt is not None else None

    def find() -> ResumeRecord | None:
        resume = read_resume(directory)
        if resume is None:
            return None
        if start:
            is_new = resume.start == start
        else:  # standalone: may read a stale `RESUME.json` of a resume that crashed; the next rollback corrects it
            is_started = paths.ledger(resume.branch).exists() or resume.branch == _shipped_branch(paths)
            is_new = not is_started and asked in (-1, resume.step)
        return resume if is_new else None

    logger.info("waiting for the trainer to record which checkpoint it resumes from")
    what = f"{_trainer(config)} to record in {directory} that it resumes" + (f" from {asked}" if asked != -1 else "")
    return _wait(config, directory, find, what, check)


def _wait_for_branch(config: OrchestratorConfig, branch: int, check: Callable[[], None]) -> None:
    directory = resume_directory(config)

    def find() -> ResumeRecord | None:
        resume = read_resume(directory)
        return resume if resume is not None and resume.branch >= branch else None

    if find() is None:
        logger.info("the ledger was archived by a rollback: waiting for the trainer to resume")
    what = f"{_trainer(config)} to start branch {branch}: the ledger of the branch before was archived"
    _wait(config, directory, find, what, check)


def _wait(
    config: OrchestratorConfig,
    directory: Path,
    find: Callable[[], ResumeRecord | None],
    what: str,
    check: Callable[[], None],
) -> ResumeRecord:
    """Return what `find` returns, as soon as it finds something in `directory`."""
    found = list[ResumeRecord]()

    def is_found() -> bool:
        found.extend(record for record in [find()] if record is not None)
        return bool(found)

    wait_until(directory, is_found, config.wait_timeout_seconds, what, check)
    return found[-1]


def _trainer(config: OrchestratorConfig) -> str:
    return f"the trainer{config.run_paths.log_hint('trainer')}"


def _is_asked_to_resume(config: OrchestratorConfig) -> bool:
    return config.ckpt is not None and config.ckpt.resume_step is not None


def _newest_branch(paths: RunPaths) -> int:
    """Return the newest branch whose ledger has a complete line; -1 if there is none."""
    branches = [-1]
    for file in paths.ledger_dir.glob("branch_*.jsonl"):
        with file.open("rb") as ledger:
            if ledger.readline().endswith(b"\n"):
                branches.append(int(file.stem.removeprefix("branch_")))
    return max(branches)


def _shipped_branch(paths: RunPaths) -> int:
    """Return the branch of the newest batch, which is the highest; -1 if there is no batch."""
    steps = steps_in(paths.rollouts_dir)
    branches = (branch_of_batch(paths.rollouts(step)) for step in reversed(steps))
    return next((branch for branch in branches if branch is not None), 0 if steps else -1)


def _prepare_directory(config: OrchestratorConfig) -> None:
    """Create the directory, or clear it with `clean`; raise ConfigError if artifacts of an earlier run remain."""
    paths = config.run_paths
    with translate_error(OSError, unwritable(f"output_dir: {paths.root} cannot be created")):
        paths.root.mkdir(parents=True, exist_ok=True)
    try:
        for old in clear_earlier_run(paths) if config.clean else ():
            logger.info("{} {} of an earlier run", "archived" if old == paths.checkpoints_dir else "removed", old)
    except OSError as error:
        raise ConfigError(
            f"clean: {error.filename} cannot be removed: {error.strerror}; remove it, or choose another output_dir"
        ) from None
    if (branch := _newest_branch(paths)) >= 0:
        raise ConfigError(
            f"output_dir: {paths.ledger(branch)} is the ledger of an earlier run; remove it with --clean, choose "
            "another output_dir, or continue that run with --restart"
        )
    for directory in (paths.rollouts_dir, paths.weights_dir):
        if steps := steps_in(directory):
            raise ConfigError(
                f"output_dir: {directory} holds steps {steps[0]} to {steps[-1]} of an earlier run; "
                "remove it with --clean, or choose another output_dir"
            )
