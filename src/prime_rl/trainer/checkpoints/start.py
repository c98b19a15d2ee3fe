"""I3: where a trainer begins is decided once, by rank 0, and on record in `RESUME.json` before anything builds upon it.

At the beginning, or at the checkpoint that the configuration asks for. A trainer that has died and is started again
(`run.rewind.is_restart`) resumes whatever its configuration says: from the newest checkpoint, or from step 0. It does
so only if its start is on record, for what the first attempt refused, the files of another run, must not be taken for
this run's by the second.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loguru import logger

from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.errors import ConfigError
from prime_rl.run import checkpoints as files
from prime_rl.run.paths import RunPaths
from prime_rl.run.rewind import has_orchestrator, is_restart, may_restart, next_branch, rewind, start_name
from prime_rl.trainer.checkpoints.agreement import Agreement
from prime_rl.trainer.parallel import World
from prime_rl.trainer.start import check_output_dir, check_writable


@dataclass(frozen=True, slots=True)
class Start:
    """Where a trainer begins.

    Attributes:
        step: steps that are done already.
        branch: of this run: 0, or one more than that of the run that is resumed.
        commit: the checkpoint that is gone on from, if one is.
        batches_of: the branch that batches must be of; None takes any.
    """

    step: int = 0
    branch: int = 0
    commit: files.Commit | None = None
    batches_of: int | None = None


class Chooser:
    """Decides where a trainer begins. All ranks make the same calls."""

    def __init__(
        self,
        config: TrainerConfig | SFTConfig,
        paths: RunPaths,
        directory: Path,
        world: World,
        ranks: Agreement,
        serves: bool,
    ) -> None:
        """Take what is decided from: configuration and directories, of the run and of its checkpoints.

        Args:
            config: of the trainer.
            paths: the run.
            directory: of the checkpoints, also where none are written: `RESUME.json` is in it.
            world: the ranks.
            ranks: their talk about files.
            serves: versions are sampled from.
        """
        self._config, self._paths, self._directory = config, paths, directory
        self._world, self._ranks, self._serves = world, ranks, serves

    def choose(self) -> Start:
        """Decide, and where that is a checkpoint go back to it: put aside what came after.

        Raises:
            ConfigError: the directory holds another run, or not the checkpoint that is asked for.
            RunError: the checkpoint is damaged, or the directory cannot be written.
        """
        wanted = self._ranks.on_lead(self._wanted)
        self._ranks.gather(lambda: check_output_dir(self._paths, resuming=wanted is not None))
        if wanted is None:
            return self._ranks.on_lead(self._begin)
        if self._ranks.on_lead(self._is_done):
            return Start(step=self._config.max_steps or 0)
        return self._go_back(wanted)

    def _wanted(self) -> int | None:
        """Return which checkpoint to go back to, as `ckpt.resume_step` has it."""
        asked = None
        if self._config.ckpt is not None:
            check_writable("ckpt.path", self._directory)
            asked = self._config.ckpt.resume_step
        if not is_restart():
            return asked
        name, known = start_name(), files.read_resume(self._directory)
        is_on_record = name is None or (known is not None and known.start == name)
        return -1 if is_on_record else asked

    def _begin(self) -> Start:
        """Refuse the checkpoints of an earlier run; put this start on record where it may come to a restart."""
        if self._config.ckpt is not None and (steps := files.find_checkpoints(self._directory).steps):
            raise ConfigError(
                f"output_dir: {self._directory} holds checkpoints of an earlier run (steps {steps[0]} to {steps[-1]}); "
                "go on from the newest with --ckpt.resume-step -1, or choose another output_dir"
            )
        known = files.read_resume(self._directory)
        branch = known.branch if known else 0  # an orchestrator that begins anew reads the same
        if known or may_restart():
            self._directory.mkdir(parents=True, exist_ok=True)
            files.write_resume(self._directory, files.Resume(0, branch, start_name()))
        return Start(branch=branch)

    def _is_done(self) -> bool:
        """Whether nothing is left for a restart to do, and no checkpoint to go back to."""
        last = self._config.max_steps
        return self._config.ckpt is None and last is not None and self._paths.weights(last).exists()

    def _go_back(self, wanted: int) -> Start:
        """Choose the checkpoint, newest first, by size and then by hash; put aside what came after it."""
        chosen = None
        for commit in self._ranks.on_lead(lambda: self._candidates(wanted)):
            damage = self._ranks.failure(partial(self._check_hashes, commit))
            if damage is None:
                chosen = commit
                break
            if wanted != -1:
                raise damage
            if self._world.leads:
                logger.warning(f"{self._directory / f'step_{commit.step}'} is not used: {damage}")
        step, limit = chosen.step if chosen else 0, self._config.max_steps
        if limit is not None and step > limit:
            raise ConfigError(
                f"max_steps = {limit}, but the checkpoint to resume from has done {step} steps; raise "
                "--max-steps, or choose an earlier one with --ckpt.resume-step"
            )
        if chosen is None and self._world.leads:
            logger.warning(f"{self._directory} has no complete checkpoint: starting at step 0")
        return self._ranks.on_lead(lambda: self._rewind(step, chosen))

    def _check_hashes(self, commit: files.Commit) -> None:
        """Check this rank's share of all parts, the orchestrator's too: after the rewind there is no other choice."""
        for part in commit.parts:
            files.check_hashes(self._directory / f"step_{commit.step}" / part, self._world.rank, self._world.size)

    def _candidates(self, wanted: int) -> list[files.Commit]:
        if self._config.ckpt is None:  # what is there is of another run
            return []
        found = files.find_checkpoints(self._directory)
        for name, why in found.broken.items():
            logger.warning(f"{self._directory / name} is not used: {why}")
        if wanted != -1 and wanted not in found.steps:
            there = ", ".join(map(str, found.steps)) or "none"
            broken = found.broken.get(f"step_{wanted}")
            raise ConfigError(
                f"ckpt.resume_step = {wanted}: {self._directory} has no complete checkpoint of it"
                + (f" ({broken})" if broken else "")
                + f"; complete are: {there}"
            )
        return [commit for commit in reversed(found.complete) if wanted in (-1, commit.step)]

    def _rewind(self, step: int, commit: files.Commit | None) -> Start:
        branch = next_branch(self._directory, commit)
        # Who resumes without an orchestrator, which would sample them again, trains on the batches that are recorded.
        resampled = self._serves and has_orchestrator(self._paths, commit)
        rewind(
            self._paths,
            self._directory,
            step,
            branch,
            weights=self._serves or not step,
            rollouts=resampled,
            start=start_name(),
        )
        return Start(step, branch, commit, branch if resampled else None)
