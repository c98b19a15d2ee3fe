"""I3, I4: a resumed trainer is the one that wrote the checkpoint, on any number of ranks; saving never endangers it.

Checkpoint N is written after step N - 1 and before batch N. All ranks write their shards to a temporary folder; when
all are on the disk rank 0 renames it, and commits if the other parts of the run's checkpoint are there too. All talk
goes over a group of its own, so that a save in the background never mixes with the collectives of training.
"""

import shutil
import time
from collections.abc import Mapping
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from loguru import logger
from torch import Tensor, nn
from torch.optim import Optimizer

from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.shared import CkptConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.errors import ConfigError, RunError
from prime_rl.run import checkpoints as files
from prime_rl.run.artifact import MANIFEST, ArtifactError
from prime_rl.run.batch import delete_rows
from prime_rl.run.paths import RunPaths, step_of
from prime_rl.run.threads import start
from prime_rl.run.wait import DeadlineError
from prime_rl.trainer.checkpoints import state
from prime_rl.trainer.checkpoints.agreement import Agreement
from prime_rl.trainer.checkpoints.loading import load_model_and_optimizer, reason
from prime_rl.trainer.checkpoints.reader import TensorReader
from prime_rl.trainer.checkpoints.settings import changes, settings_of
from prime_rl.trainer.checkpoints.start import Chooser, Start
from prime_rl.trainer.parallel import World, lost_ranks_told
from prime_rl.trainer.start import check_output_dir

PART = files.TRAINER


class DataStream(Protocol):
    """Data with a place to go on from, which does not depend on the number of ranks."""

    def state(self) -> dict[str, Any]:
        """Return the place after what was trained on, as values that JSON can write."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there. Raises ConfigError where the data is not the same."""


@dataclass(slots=True)
class Progress:
    """How far a run is.

    Attributes:
        step: steps done.
        tokens: of all batches, prompts included.
        samples: sequences of all batches.
        problems: groups of all batches; 0 for supervised fine-tuning.
    """

    step: int = 0
    tokens: int = 0
    samples: int = 0
    problems: int = 0

    def count(self, tokens: int, samples: int, problems: int = 0) -> None:
        """Add one step."""
        self.step += 1
        self.tokens += tokens
        self.samples += samples
        self.problems += problems


class Checkpointer:
    """Saves and resumes one trainer. A benchmark does neither; without a `ckpt` block a restart begins at step 0."""

    def __init__(
        self,
        config: TrainerConfig | SFTConfig,
        paths: RunPaths,
        world: World,
        serves: bool = False,
        keeps_batches: bool = False,
    ) -> None:
        """Look at the run directory, and go back to the checkpoint that the configuration asks for.

        Args:
            config: of the trainer.
            paths: the run.
            world: the ranks; all call this together.
            serves: versions are sampled from, so that version N is published again after a resume.
            keeps_batches: rows of batches stay, although no checkpoint needs them.

        Raises:
            ConfigError: the directory holds another run, or not the checkpoint that is asked for.
            RunError: the checkpoint is damaged, or the directory cannot be written.
        """
        self._config, self._paths, self._world, self._keeps_batches = config, paths, world, keeps_batches
        self._options = None if config.bench else config.ckpt
        if config.bench:
            check_output_dir(paths, resuming=False)
            self._start = Start()
            return
        self._directory = paths.root / (self._options or CkptConfig()).path
        timeout = timedelta(seconds=config.dist_timeout_seconds)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._ranks = Agreement(world, self._group)
        self._pending: Future[None] | None = None
        self._start = Chooser(config, paths, self._directory, world, self._ranks, serves).choose()

    @property
    def branch(self) -> int:
        """Of this run: 0, or one more than that of the run that is resumed."""
        return self._start.branch

    @property
    def batches_of(self) -> int | None:
        """The branch that batches must be of: an orchestrator that lives on after a rewind may still write others.

        None takes any, as a trainer alone does.
        """
        return self._start.batches_of

    @property
    def resumes(self) -> bool:
        """Whether a checkpoint is gone on from, so that version `start` has to be published again."""
        return self._start.commit is not None

    def restore(self, policy: nn.Module, optimizer: Optimizer, stream: DataStream | None = None) -> Progress:
        """Give model, optimizer, random generators and data the state of the checkpoint, if this run resumes one.

        A run that begins anew gets generators that depend on its seed alone.

        Called last before the first step, so that nothing draws random numbers in between.

        Args:
            policy: sharded; later saves read it too.
            optimizer: over its trained parameters.
            stream: the data, where it has a place.

        Returns:
            The progress to go on from.

        Raises:
            ConfigError: the checkpoint is of another model, or of other data.
            RunError: it is damaged.
        """
        self._policy, self._optimizer, self._stream = policy, optimizer, stream
        state.seed_rng(self._world, self._config.seed)
        if self._options is None or self._start.commit is None:
            return Progress(self._start.step)
        part = self._checkpoint(self._start.step) / PART
        manifest = files.read_manifest(part, files.PART_FORMAT)
        self._compare(manifest)
        load_model_and_optimizer(part, policy, optimizer, self._group, _hint(manifest, self._config))
        self._restore_generators(part, manifest)
        if stream is not None:
            stream.restore(manifest["data"])
        if self._world.leads:
            logger.info(f"resumed from {part.parent}, branch {self.branch}")
            if self.batches_of is not None:
                logger.info("the orchestrator samples the batches from {} on again", self._start.step)
        return Progress(**manifest["progress"])

    def step_done(self, progress: Progress, last: bool) -> None:
        """Save if it is time, after step `progress.step - 1`. All ranks call it after every step.

        Args:
            progress: with that step counted.
            last: no step follows, so this one is saved in any case.

        Raises:
            RunError: this save, or an earlier one in the background, failed.
        """
        if self._options is None:
            return
        self._poll()
        if not last and progress.step % self._options.interval:
            return
        self._wait()
        tensors = {
            **state.model_tensors(self._policy),
            **state.optimizer_tensors(self._policy, self._optimizer),
            **state.rng_tensors(self._world),
        }
        config = self._config.model_dump(mode="json")
        fields = {
            "step": progress.step,
            "branch": self.branch,
            "command": self._config.command,
            "world": self._world.size,
            "device": self._world.device.type,
            "progress": asdict(progress),
            "data": self._stream.state() if self._stream is not None else None,
            "config": config,
            "digest": files.digest_of(settings_of(config)),
        }
        if not self._options.save_async:
            self._save(progress.step, tensors, fields)
        else:
            save = partial(self._save, progress.step, state.staged(tensors), fields)
            self._pending = start(save, "checkpoint", stay_s=self._options.timeout)

    def close(self) -> None:
        """Wait for a save in the background.

        Raises:
            RunError: it failed.
            DeadlineError: it was not done in time.
        """
        if self._options is not None:
            self._wait()

    def _save(self, step: int, tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> None:
        """Write and commit; all errors that a disk or a lost rank can cause become one line."""
        begin = time.perf_counter()
        checkpoint = self._checkpoint(step)
        try:
            with lost_ranks_told(self._config.dist_timeout_seconds):
                self._write(checkpoint, tensors, fields)
        except (OSError, RunError, dcp.CheckpointException) as error:
            if self._world.leads:
                shutil.rmtree(checkpoint / _temporary(PART), ignore_errors=True)
                with suppress(OSError):  # another part is in it
                    checkpoint.rmdir()
            raise RunError(
                f"cannot save {checkpoint}: {reason(error)} ({_free(self._directory)}); earlier checkpoints are whole"
            ) from error
        if self._world.leads:
            size = sum(file.stat().st_size for file in (checkpoint / PART).iterdir()) / 1024**2
            logger.info(f"saved {checkpoint}: {size:,.1f} MiB in {time.perf_counter() - begin:.1f} s")

    def _write(self, checkpoint: Path, tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> None:
        temporary = checkpoint / _temporary(PART)
        self._ranks.on_lead(lambda: files.clear_unfinished(checkpoint, PART))
        writer = dcp.FileSystemWriter(temporary, sync_files=True)
        dcp.save(dict(tensors), storage_writer=writer, process_group=self._group)
        hashes = self._ranks.gather(lambda: self._hash_own(temporary))

        options = self._options
        assert options is not None

        def seal() -> None:
            together = {name: digest for some in hashes for name, digest in some.items()}
            files.seal_part(temporary, checkpoint / PART, fields, together)
            parts = (PART, *self._orchestrators(checkpoint))
            files.commit_checkpoint(checkpoint, self.branch, parts, fields["digest"])
            kept = files.prune(self._directory, options.keep_last, options.keep_interval)
            if not self._keeps_batches:
                delete_rows(self._paths, below=kept[0])

        self._ranks.on_lead(seal)

    def _hash_own(self, temporary: Path) -> dict[str, str]:
        """Hash the files that this rank wrote, each on the node where they are still in memory."""
        names = [f"__{self._world.rank}_*.distcp", *([".metadata"] if self._world.leads else [])]
        return {file.name: files.hash_file(file) for name in names for file in temporary.glob(name)}

    def _poll(self) -> None:
        """Raise on all ranks where a save in the background has failed on one; forget one that all have finished."""
        if self._pending is None:
            return
        done = self._pending.done()
        error = self._pending.exception() if done else None
        counts = self._world.sum(
            torch.tensor([float(error is not None), float(not done)], device=self._world.device)
        ).tolist()
        if error is not None:
            raise error
        if counts[0]:
            self._pending.result()
            raise RunError("saving a checkpoint failed on another rank, whose log says why")
        if not counts[1]:
            self._pending = None

    def _wait(self) -> None:
        if self._pending is None or self._options is None:
            return
        if not futures.wait([self._pending], self._options.timeout).done:
            raise DeadlineError(
                f"waited {self._options.timeout:.0f} s for a checkpoint to be written to {self._directory} "
                "(ckpt.timeout): the disk, or another rank, does not answer"
            )
        self._pending.result()
        self._pending = None

    def _orchestrators(self, checkpoint: Path) -> tuple[str, ...]:
        """Name the orchestrator's part if it wrote one, before the last batch, and see that it is of that batch.

        Raises:
            ArtifactError: it is not.
        """
        part = checkpoint / files.ORCHESTRATOR
        if not part.exists():
            return ()
        step = step_of(checkpoint)
        assert step is not None, checkpoint
        manifest = files.read_manifest(part, files.PART_FORMAT)
        batch = self._paths.rollouts(step - 1) / MANIFEST
        if (manifest["branch"], manifest["batch"]) != (self.branch, files.hash_file(batch)):
            raise ArtifactError(f"{part} is of branch {manifest['branch']}, and not of the batch {batch.parent}")
        return (files.ORCHESTRATOR,)

    def _compare(self, manifest: Mapping[str, Any]) -> None:
        if manifest["command"] != self._config.command:
            raise ConfigError(
                f"the checkpoint was written by {manifest['command']}, not by {self._config.command}; to start from "
                "its weights, export them (prime_rl.trainer.export) and give the folder as model.name"
            )
        before, now = manifest["config"]["optim"]["type"], self._config.optim.type
        if before != now:
            raise ConfigError(
                f"optim.type = {now}, but the checkpoint has the state of {before}; resume with that, or export its "
                "weights (prime_rl.trainer.export) and begin a new run with them"
            )
        for line in changes(manifest["config"], self._config.model_dump(mode="json")) if self._world.leads else ():
            logger.warning(f"this resume is not a continuation to the bit: {line}")

    def _restore_generators(self, part: Path, manifest: Mapping[str, Any]) -> None:
        """A rank's generators have a meaning only among as many ranks; with another number they start from the seed."""
        if manifest["world"] != self._world.size:
            return
        reader = TensorReader(part)
        tensors = state.empty_rng_tensors(self._world, reader.read_metadata())
        dcp.load(tensors, storage_reader=reader, process_group=self._group)
        state.restore_rng(self._world, tensors)

    def _checkpoint(self, step: int) -> Path:
        return self._directory / f"step_{step}"


def _temporary(part: str) -> str:
    return f".tmp-{part}"


def _hint(manifest: Mapping[str, Any], config: TrainerConfig | SFTConfig) -> str:
    found = changes(manifest["config"], config.model_dump(mode="json"), only="model")
    return f"; {found[0]}" if found else ""


def _free(directory: Path) -> str:
    try:
        return f"{shutil.disk_usage(directory).free / 1024**3:.1f} GiB free"
    except OSError as error:
        return f"free space unknown: {error.strerror}"
