"""Decides where a trainer starts: at step 0, or at a checkpoint. Rank 0 records the decision in `RESUME.json` (I3)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from loguru import logger

from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.liveness.heartbeat_writer import take_over
from prime_rl.liveness.parent_process import is_supervised
from prime_rl.storage import checkpoint_artifacts as files
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.rollback import has_orchestrator, is_restart, may_restart, next_branch, roll_back, start_name
from prime_rl.trainer.parallel.process_group import RankConsensus, World
from prime_rl.trainer.process_setup import check_output_dir, check_writable


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a trainer starts.

    Attributes:
        step: completed steps.
        branch: of this run: 0, or one more than that of the resumed run.
        commit: the resumed checkpoint, if any.
        required_branch: branch that batches must have; None accepts any.
    """

    step: int = 0
    branch: int = 0
    commit: files.CheckpointCommit | None = None
    required_branch: int | None = None


@dataclass(frozen=True, slots=True)
class ResumeDecision:
    """Decides where a trainer starts. All ranks make the same calls.

    Attributes:
        config: of the trainer.
        paths: the run.
        directory: of the checkpoints and of `RESUME.json`, even if no checkpoints are written.
        world: the ranks.
        ranks: runs work on files on all ranks.
        publishes_versions: inference samples from the versions.
        check: raises ConfigError if the checkpoint with this manifest cannot be resumed; called before the rollback.
    """

    config: TrainerConfig | SFTConfig
    paths: RunPaths
    directory: Path
    world: World
    ranks: RankConsensus
    publishes_versions: bool
    check: Callable[[Mapping[str, Any]], object] = lambda manifest: None

    def choose(self) -> ResumePoint:
        """Decide, and roll back to the chosen checkpoint: archive what came after it. Raises as `Checkpointer`."""
        wanted = self.ranks.on_main(self._wanted)
        self.ranks.gather(lambda: check_output_dir(self.paths, resuming=wanted is not None))
        if wanted is None:
            return self.ranks.on_main(self._start_new)
        last = self.config.max_steps
        if self.config.ckpt is None and last is not None and self.ranks.on_main(self.paths.weights(last).exists):
            return ResumePoint(step=last)  # a restarted run without checkpoints had completed its last step
        return self._resume(wanted)

    def _wanted(self) -> int | None:
        """Return the checkpoint to resume, as in `ckpt.resume_step`.

        A restarted trainer resumes the newest checkpoint regardless of its configuration, but only if its first start
        is on record: otherwise it would take the files of another run, which the first attempt rejected, for its own.
        """
        asked = None
        if self.config.ckpt is not None:
            check_writable("ckpt.path", self.directory)
            asked = self.config.ckpt.resume_step
        if not is_restart():
            return asked
        name, known = start_name(), files.read_resume(self.directory)
        is_on_record = name is None or (known is not None and known.start == name)
        return -1 if is_on_record else asked

    def _start_new(self) -> ResumePoint:
        """Reject checkpoints of an earlier run, and record this start if the trainer may be restarted."""
        if self.config.ckpt is not None and (steps := files.find_checkpoints(self.directory).steps):
            raise ConfigError(
                f"output_dir: {self.directory} holds checkpoints of an earlier run (steps {steps[0]} to {steps[-1]}); "
                "resume the newest with --ckpt.resume-step -1, or choose another output_dir"
            )
        known = files.read_resume(self.directory)
        branch = known.branch if known else 0  # a new orchestrator reads the same value
        if known or may_restart():
            self.directory.mkdir(parents=True, exist_ok=True)
            files.write_resume(self.directory, files.ResumeRecord(0, branch, start_name()))
        return ResumePoint(branch=branch)

    def _resume(self, wanted: int) -> ResumePoint:
        """Choose the newest checkpoint with correct sizes and hashes, and archive what came after it."""
        chosen = None
        for commit in self.ranks.on_main(lambda: self._candidates(wanted)):
            try:
                self.ranks.gather(partial(self._check_hashes, commit))
            except RunError as damage:  # the same on every rank
                if wanted != -1:
                    raise
                if self.world.is_main:
                    logger.warning(f"{self.directory / f'step_{commit.step}'} is not used: {damage}")
            else:
                chosen = commit
                break
        step, limit = chosen.step if chosen else 0, self.config.max_steps
        keeps_step = self.config.ckpt is not None and self.config.ckpt.skip_progress and not is_restart()
        if limit is not None and (step > limit or (keeps_step and step == limit)):
            kept = ", which ckpt.skip_progress does not reset" if keeps_step else ""
            raise ConfigError(
                f"max_steps = {limit}, but the checkpoint to resume from has completed {step} steps{kept}; increase "
                "--max-steps, or choose an earlier one with --ckpt.resume-step"
            )
        if chosen is not None:
            part = self.directory / f"step_{chosen.step}" / files.TRAINER
            self.ranks.gather(lambda: self.check(files.read_manifest(part, files.PART_FORMAT)))
        if chosen is None and self.world.is_main:
            logger.warning(f"{self.directory} has no complete checkpoint: starting at step 0")
        return self.ranks.on_main(lambda: self._roll_back(step, chosen))

    def _check_hashes(self, commit: files.CheckpointCommit) -> None:
        """Check this rank's share of the files of all parts, since the rollback cannot be undone."""
        for part in commit.parts:
            files.check_hashes(self.directory / f"step_{commit.step}" / part, self.world.rank, self.world.size)

    def _candidates(self, wanted: int) -> list[files.CheckpointCommit]:
        if self.config.ckpt is None:  # existing checkpoints are of another run
            return []
        found = files.find_checkpoints(self.directory)
        for name, why in found.broken.items():
            logger.warning(f"{self.directory / name} is not used: {why}")
        if wanted != -1 and wanted not in found.steps:
            there = ", ".join(map(str, found.steps)) or "none"
            broken = found.broken.get(f"step_{wanted}")
            raise ConfigError(
                f"ckpt.resume_step = {wanted}: {self.directory} has no complete checkpoint of this step"
                + (f" ({broken})" if broken else "")
                + f"; complete checkpoints: {there}"
            )
        return [commit for commit in reversed(found.complete) if wanted in (-1, commit.step)]

    def _roll_back(self, step: int, commit: files.CheckpointCommit | None) -> ResumePoint:
        if not is_supervised():  # `rl` holds the lock of the run
            take_over(self.paths)
        branch = next_branch(self.directory, commit)
        # Without an orchestrator, which would sample the batches again, the trainer reuses the recorded ones.
        resampled = self.publishes_versions and has_orchestrator(self.paths, commit)
        weights = self.publishes_versions or not step
        roll_back(self.paths, self.directory, step, branch, weights, rollouts=resampled, start=start_name())
        return ResumePoint(step, branch, commit, branch if resampled else None)
