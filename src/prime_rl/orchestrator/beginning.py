"""Where a run begins: at the beginning, at a checkpoint that the trainer goes back to, or where a dead process ended.

The trainer alone chooses the checkpoint, puts aside what came after it, and says so in `RESUME.json`; the orchestrator
waits for that, so that the two never go on from different places.
"""

import os
from dataclasses import dataclass

from loguru import logger

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.errors import ConfigError, RunError
from prime_rl.orchestrator.checkpoint import Cut, read_cut
from prime_rl.run.checkpoints import Resume, read_resume
from prime_rl.run.paths import RunPaths, steps_in
from prime_rl.run.rewind import START_VARIABLE
from prime_rl.run.wait import wait_for, wait_until
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


def find_beginning(config: OrchestratorConfig) -> Beginning:
    """Find out where the run begins; where the trainer resumes, wait until it has said from where, and published that.

    Raises:
        ConfigError: the directory holds another run, or the checkpoint does not suit the configuration.
        RunError: the trainer did not say in time, or the checkpoint is damaged.
    """
    paths, ckpt = config.run_paths, config.ckpt
    if config.restart:
        return Beginning(_newest_branch(paths))
    if ckpt is None or ckpt.resume_step is None or config.bench:
        _refuse_earlier_run(paths)
        return START
    directory = paths.root / ckpt.path
    trainer, timeout_s = f"the trainer (log {paths.log('trainer')})", config.wait_timeout_seconds
    found = list[Resume]()

    def resumed() -> bool:
        resume = read_resume(directory)
        if resume is not None and _is_of_this_start(resume, paths):
            found.append(resume)
        return bool(found)

    logger.info("waiting for the trainer to say from which checkpoint it resumes")
    wait_until(directory, resumed, timeout_s, f"{trainer} to say in {directory} from which checkpoint it resumes")
    resume = found[-1]
    if ckpt.resume_step not in (-1, resume.step):
        raise ConfigError(f"ckpt.resume_step = {ckpt.resume_step} here, and the trainer resumed from {resume.step}")
    if later := [step for step in steps_in(paths.rollouts_dir) if step >= resume.step]:
        raise RunError(
            f"{paths.rollouts(later[0])} is in the way of the new branch {resume.branch}: the trainer resumed from a "
            "checkpoint of its own, on recorded batches; move them away to sample anew"
        )
    if not resume.step:
        return Beginning(resume.branch)
    cut = read_cut(directory / f"step_{resume.step}", config)
    wait_for(paths.weights(resume.step), timeout_s, trainer)
    return Beginning(resume.branch, cut)


def _is_of_this_start(resume: Resume, paths: RunPaths) -> bool:
    """Tell this resume from an earlier one: by the name that `rl` gives each start, else by its ledger."""
    start = os.environ.get(START_VARIABLE)
    return resume.start == start if start else not paths.ledger(resume.branch).exists()


def _newest_branch(paths: RunPaths) -> int:
    known = paths.ledger_dir.glob("branch_*.jsonl") if paths.ledger_dir.is_dir() else ()
    return max((int(file.stem.removeprefix("branch_")) for file in known), default=0)


def _refuse_earlier_run(paths: RunPaths) -> None:
    """Raise ConfigError where an earlier run left what would be taken for this one's, or nothing can be written."""
    branch = _newest_branch(paths)
    if paths.ledger(branch).exists():
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
